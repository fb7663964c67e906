"""Symmetric memory of torch: how ranks allocate it together, and how it is freed.

Torch's rendezvous, in which ranks exchange the handles of their memory, does not work in groups that share only some of their
ranks. There, ranks look for what the others publish under a number that torch counts for the process and not for the group
(2.11 to 2.13; https://github.com/pytorch/pytorch/issues/196082). After one of a group that leaves a rank out, one with that
rank waits for good, each rank under another number. So here ranks exchange handles in a store of their own, which counts anew:

    torch on ranks 0 and 1    set CUDASymmetricMemory/7/0    get CUDASymmetricMemory/7/2
    torch on rank 2           set CUDASymmetricMemory/5/2
    in the store, of all      exchange 3/CUDASymmetricMemory/0/0, exchange 3/CUDASymmetricMemory/0/2

Bad interleaving: two threads are in the rendezvous of two groups at once. Torch's numbers of either have gaps then. What counts
is the order in which a group's store sees them, which is the same on its ranks. But torch has one socket for handles in a
process, by its number: the second thread could not have it, or handles would go astray. So one thread is in a rendezvous at a
time, which the ranks of a rendezvous agree on.

Torch frees symmetric memory where its last tensor goes. It waits for the device then, and ends the process if it must not, as
while a stream is captured, where the garbage collector may run. So the memory stays here until `free_unused`.
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
"""Held by the thread that is in a rendezvous: torch has one socket for it in a process."""
_PATIENCE_S = 0.2
"""How long a thread waits at most for another one before it lets the ranks of its rendezvous try again."""
_IDLE_S, _IDLE_SHORTLY_S = 10.0, 1.0
"""How long a GPU may take to become idle before its memory is freed: at the end of a group, and before an allocation."""
_HELD: list[tuple[torch.Tensor, Any]] = []
"""Memory, and its handle, that `free_unused` has yet to free."""
_FREES = threading.Lock()
"""Groups may be made and closed on several threads."""
_NUMBERED = re.compile(r"(.*?/)(\d+)(/.*)?")


class _Numbered(Store):
    """A store in which the numbers of keys, `words/number/words`, are counted from 0 as they come. lost: what a wait ended by,
    if not by what it was for."""

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
    """Bytes of this GPU that other ranks can be given. What it frees before, it frees for this; see `free_unused`. Torch takes
    them from a memory pool, which its allocator cudaMallocAsync does not have; they are allocated one by one then."""
    import torch.distributed._symmetric_memory as symmetric_memory

    free_unused(within_s=_IDLE_SHORTLY_S)
    if torch.cuda.get_allocator_backend() != "native":
        return _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device, None)
    return symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)


@contextmanager
def registered(name: Any, group: dist.ProcessGroup) -> Iterator[None]:
    """Within, torch knows the group by this name."""
    _register_process_group(name, group)
    try:
        yield
    finally:
        _unregister_process_group(name)


class HandleExchange:
    """Of ranks that allocate symmetric memory together. store: one that they alone have, on a connection of its own, and that
    nobody had before, since keys stay in it. rank, size: of them."""

    def __init__(self, store: Any, *, rank: int, size: int) -> None:
        self._store, self.rank, self.size = store, rank, size
        self._count = 0

    def exchange(self, area: torch.Tensor) -> Any:
        """Torch's handle of the ranks' symmetric memory. Collective. In one process, threads come one after the other.

        Raises WaitTimeout if a rank does not find another's part in BOUND_S, or the store is gone.
        """
        import torch.distributed._symmetric_memory as symmetric_memory

        self._count += 1
        own: Any = PrefixStore(f"exchange {self._count}", self._store)
        own.set_timeout(timedelta(seconds=BOUND_S))
        numbered = _Numbered(own)  # held here: of what is Python's of it, and of groups by name, torch keeps nothing
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
        """No other thread of any of the processes is in a rendezvous: torch has one socket for it in a process.

        Whoever cannot be the one gives all other ranks another try. Otherwise two rendezvous, each with a rank that waits for
        the other one, would wait for each other.
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
    """A tensor on the same memory, which stays, with its handle, until `free_unused` frees it."""
    _HELD.append((area, handle))
    return area[:]


def free_unused(within_s: float = _IDLE_S) -> None:
    """Free the symmetric memory of which no tensor is left; nothing while the current stream is captured. Torch waits for the
    whole GPU where it frees. Where that is not idle within so long, as behind a receive whose sender is late, the memory stays
    for the next time."""
    if not _HELD or torch.cuda.is_current_stream_capturing():
        return
    with _FREES:
        gone = [number for number, (area, _) in enumerate(_HELD) if users(area) == 1]
        # In torch's own wait no other thread runs: not even one that would end it, if a peer is lost.
        devices = {_HELD[number][0].device for number in gone}
        ready = {device for device in devices if idle(device, within_s)}
        for number in reversed(gone):
            if _HELD[number][0].device in ready:
                del _HELD[number]
