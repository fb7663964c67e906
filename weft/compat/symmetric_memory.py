"""This module allocates torch's symmetric memory on several ranks, and frees it.

In torch's rendezvous, ranks exchange the handles of their memory. It fails for groups that share only some of their ranks,
because ranks publish handles under a number that torch counts for the process, not for the group (2.11 to 2.13;
https://github.com/pytorch/pytorch/issues/196082). After a rendezvous that leaves a rank out, the ranks of one with that rank
use different numbers and wait forever. So here ranks exchange handles in a separate store, whose numbers start from 0:

    torch on ranks 0 and 1    set CUDASymmetricMemory/7/0    get CUDASymmetricMemory/7/2
    torch on rank 2           set CUDASymmetricMemory/5/2
    in the store, of all      exchange 3/CUDASymmetricMemory/0/0, exchange 3/CUDASymmetricMemory/0/2

If two threads are in the rendezvous of two groups at once, torch's numbers of each group have gaps. That is harmless, because a
group's store sees them in the same order on all ranks. But torch has one socket for handles in a process, and a second thread
could not open it, or handles would reach the wrong thread. So only one thread is in a rendezvous at a time, and the ranks of a
rendezvous agree on it.

Torch frees symmetric memory when its last tensor is freed. It then waits for the device, and ends the process if waiting is not
allowed, for example if the garbage collector runs during a capture. So this module holds the memory until `free_unused`.
"""

from __future__ import annotations

import itertools
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory, _unregister_process_group
from torch.distributed.distributed_c10d import PrefixStore, Store

from weft.compat.device import idle
from weft.compat.storages import users
from weft.core.errors import WaitTimeout

BOUND_S = 60.0
"""The bound in s of a wait in a rendezvous that all ranks have reached, in case a rank dies during it."""
_ALONE = threading.Lock()
"""The thread that is in a rendezvous holds this lock, because torch has one socket for it in a process."""
_PATIENCE_S = 0.2
"""The longest time that a thread waits for another one before it lets the ranks of its rendezvous try again."""
_IDLE_S, _IDLE_SHORTLY_S = 10.0, 1.0
"""The longest time to wait until a GPU is idle and its memory can be freed: at the end of a group, and before an allocation."""
_HELD: list[tuple[torch.Tensor, Any]] = []
"""Memory, and its handle, that `free_unused` has yet to free."""
_FREES = threading.Lock()
"""`free_unused` holds this lock, because several threads may make and close groups."""
_NUMBERED = re.compile(r"(.*?/)(\d+)(/.*)?")


class _Numbered(Store):
    """A _Numbered store replaces the numbers in keys, `words/number/words`, by 0, 1, ... in the order in which they first come.

    lost: the error that ended a wait, or None.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}
        self.lost: RuntimeError | None = None

    def _key(self, key: str) -> str:
        found = _NUMBERED.fullmatch(key)
        if not found:
            return key
        before, number, behind = found.groups(default="")
        return f"{before}{self._numbers.setdefault(number, len(self._numbers))}{behind}"

    def set(self, key: str, value: Any) -> None:
        self._waits(self._store.set, self._key(key), value)

    def get(self, key: str) -> bytes:
        value: bytes = self._waits(self._store.get, self._key(key))
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values: list[bytes] = self._waits(self._store.multi_get, [self._key(key) for key in keys])
        return values

    def add(self, key: str, value: int) -> int:
        return int(self._store.add(self._key(key), value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check([self._key(key) for key in keys]))

    def wait(self, keys: Sequence[str], *within: timedelta) -> None:
        self._waits(self._store.wait, [self._key(key) for key in keys], *within)

    def _waits(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return ask(*arguments)
        except RuntimeError as error:
            self.lost = error
            raise


def empty(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate memory of this GPU that other ranks can map. It first frees unused memory, for a short time at most.

    Torch takes the memory from a pool. Its allocator cudaMallocAsync has no pool, so there each call allocates separately.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    free_unused(within_s=_IDLE_SHORTLY_S)
    if torch.cuda.get_allocator_backend() != "native":
        return _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device, None)
    return symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)


@contextmanager
def registered(name: Any, group: dist.ProcessGroup) -> Iterator[None]:
    """Register a group under a name in torch, within this context."""
    _register_process_group(name, group)
    try:
        yield
    finally:
        _unregister_process_group(name)


class HandleExchange:
    """A HandleExchange exchanges the handles of ranks that allocate symmetric memory together.

    store: a new store that only these ranks use, on a connection of its own. Keys remain in it, so it cannot be used again.
    rank, size: this rank's number among these ranks, and how many they are.
    """

    def __init__(self, store: Any, *, rank: int, size: int) -> None:
        self._store, self.rank, self.size = store, rank, size
        self._count = 0

    def exchange(self, area: torch.Tensor) -> Any:
        """Return torch's handle of the ranks' symmetric memory. Collective. Threads of one process run it one at a time.

        Raises WaitTimeout if a rank does not find another's handle in BOUND_S, or the store is lost.
        """
        import torch.distributed._symmetric_memory as symmetric_memory

        self._count += 1
        own: Any = PrefixStore(f"exchange {self._count}", self._store)
        own.set_timeout(timedelta(seconds=BOUND_S))
        numbered = _Numbered(own)  # this variable keeps it alive, because torch holds no reference to the Python object
        stand_in = dist.ProcessGroup(numbered, self.rank, self.size)
        name: Any = f"weft/{id(self)}/{self._count}"
        try:
            with self._alone(numbered), registered(name, stand_in):
                return symmetric_memory.rendezvous(area, name)
        except RuntimeError:
            if numbered.lost is None:
                raise
            raise WaitTimeout(
                f"rank {self.rank} has waited for {BOUND_S:g} s at most in torch's rendezvous of symmetric memory, to which "
                f"all {self.size} ranks had come: {numbered.lost}"
            ) from numbered.lost

    @contextmanager
    def _alone(self, store: _Numbered) -> Iterator[None]:
        """Wait until no other thread of these processes is in a rendezvous, because torch has one socket for it in a process.

        If one rank does not get its process's lock, all ranks release theirs and try again. Otherwise two rendezvous could wait
        for each other, each with a rank that waits for the other rendezvous.
        """
        deadline = time.monotonic() + BOUND_S
        for turn in itertools.count():
            mine = _ALONE.acquire(timeout=random.uniform(0.01, _PATIENCE_S))
            try:
                store.set(f"alone in turn {turn}, rank {self.rank}", str(int(mine)))
                if all(map(int, store.multi_get([f"alone in turn {turn}, rank {rank}" for rank in range(self.size)]))):
                    yield
                    return
            finally:
                if mine:
                    _ALONE.release()
            if time.monotonic() > deadline:
                store.lost = RuntimeError("threads of one process keep each other from it")
                raise store.lost
            time.sleep(random.uniform(0.0, _PATIENCE_S))


def held(area: torch.Tensor, handle: Any) -> torch.Tensor:
    """Hold memory and its handle until `free_unused` frees them. Return a tensor on the same memory."""
    _HELD.append((area, handle))
    return area[:]


def free_unused(within_s: float = _IDLE_S) -> None:
    """Free the symmetric memory that no tensor uses. It does nothing while the current stream is captured.

    Torch waits for the whole GPU when it frees. If the GPU is not idle within `within_s`, for example because a receive waits
    for its sender, the memory remains until the next call.
    """
    if not _HELD or torch.cuda.is_current_stream_capturing():
        return
    with _FREES:
        gone = [number for number, (area, _) in enumerate(_HELD) if users(area) == 1]
        # During torch's own wait no other thread can run, including the thread that would end the wait after a peer is lost.
        devices = {_HELD[number][0].device for number in gone}
        ready = {device for device in devices if idle(device, within_s)}
        for number in reversed(gone):
            if _HELD[number][0].device in ready:
                del _HELD[number]
