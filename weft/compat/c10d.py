"""Private names of torch.distributed: process groups, their collectives, and symmetric memory.

tests/compat reports what a new torch changes.

Connections that weft makes have no name. torch names a group that only some ranks create by its ranks and by the number of
groups of a rank, so ranks could disagree on its name, or on that of the caller's next group.

Symmetric memory: in torch's rendezvous, ranks exchange the handles of their memory. It fails for groups that share only some
of their ranks, because ranks publish handles under a number that torch counts for the process, not for the group (2.11 to
2.13; https://github.com/pytorch/pytorch/issues/196082). After a rendezvous that leaves a rank out, the ranks of one with that
rank use different numbers and wait forever. So here ranks exchange handles in a separate store, whose numbers start from 0:

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
import socket
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    ReduceScatterOptions,
    TCPStore,
    _register_process_group,
    _SymmetricMemory,
    _unregister_process_group,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    PrefixStore,
    Store,
    _get_process_group_store,
    _pg_map,
    _resolve_process_group,
)

from weft.compat.device import idle, users
from weft.core.errors import WaitTimeout

_CONNECTS_S = 1.0
"""How long a host may take to answer before nothing is known of it."""


def store_of(group: dist.ProcessGroup, name: str) -> Any:
    """Return a part of the group's store that only `name` uses.

    It has a connection of its own, because another thread may wait on torch's connection. A store that is written in Python
    cannot be cloned, and is used as it is.
    """
    store: Any = _get_process_group_store(group)
    try:
        own = store.clone()
    except RuntimeError:
        own = store
    return PrefixStore(name, own)


def refusal_of_store(group: dist.ProcessGroup) -> str:
    """Return why nothing takes connections at the address of the group's store: its host has ended. Return "" otherwise.

    A clone of a store tries to connect for minutes, without a word. A store without an address is never refused.
    """
    store: Any = _get_process_group_store(group)
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return ""
    try:
        socket.create_connection((store.host, store.port), timeout=_CONNECTS_S).close()
    except ConnectionRefusedError as error:
        return f"{store.host}:{store.port}: {error.strerror}"
    except OSError:
        return ""
    return ""


@contextmanager
def pretended_ranks(count: int) -> Iterator[DeviceMesh]:
    """Make this process rank 0 of `count` ranks that do not exist, whose collectives do nothing. Yield their mesh.

    Raises ValueError in a process that has a process group."""
    # The module registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError("torch.distributed is initialized in this process; use a process without ranks")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield init_device_mesh("cpu", (count,))
    finally:
        dist.destroy_process_group()


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend that runs a group's collectives on a device. It has `abort`."""
    return group._get_backend(device)


LIVING_GROUPS: Container[object] = _pg_map
"""The process groups that have not been destroyed."""


def living_groups() -> list[dist.ProcessGroup]:
    """Return the process groups that have not been destroyed."""
    return list(_pg_map)


def group_named(name: str) -> dist.ProcessGroup:
    """Return the process group that has a name. torch's custom operators take a group by its name."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


class FlatCollectives:
    """FlatCollectives runs collectives of whole tensors on torch's current stream.

    It omits the checks and logs of torch.distributed's own functions, which are most of their host time.

    op: the torch.distributed.ReduceOp of reductions.
    """

    def __init__(self, group: dist.ProcessGroup, op: Any) -> None:
        self._group: Any = group
        self._gathers, self._scatters, self._reduces = AllgatherOptions(), ReduceScatterOptions(), AllreduceOptions()
        self._scatters.reduceOp = self._reduces.reduceOp = op
        for options in (self._gathers, self._scatters, self._reduces):
            options.asyncOp = False

    def all_gather(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Do as torch.distributed.all_gather_into_tensor."""
        if (work := self._group._allgather_base(dst, src, self._gathers)) is not None:
            work.wait()

    def reduce_scatter(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Do as torch.distributed.reduce_scatter_tensor."""
        if (work := self._group._reduce_scatter_base(dst, src, self._scatters)) is not None:
            work.wait()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Do as torch.distributed.all_reduce, in place."""
        if (work := self._group.allreduce([tensor], self._reduces)) is not None:
            work.wait()


_SUM: Any = AllreduceOptions()
_SUM.reduceOp, _SUM.asyncOp = dist.ReduceOp.SUM, False
_GATHER: Any = AllgatherOptions()
_GATHER.asyncOp = False


def begin_sum(tensor: torch.Tensor, group: str) -> Any:
    """Begin torch.distributed.all_reduce on torch's current stream, without its checks and logs. Return its work, or None.

    group: its name.
    """
    pg: Any = group_named(group)
    return pg.allreduce([tensor], _SUM)


def begin_gather(whole: torch.Tensor, part: torch.Tensor, group: str) -> Any:
    """Begin torch.distributed.all_gather_into_tensor, in the way of begin_sum."""
    pg: Any = group_named(group)
    return pg._allgather_base(whole, part, _GATHER)


def has_ended(work: Any, within_s: float) -> bool:
    """Wait for a collective on CPUs for a time, and return whether it has ended. Raises the RuntimeError by which it ended."""
    try:
        work.wait(timedelta(seconds=within_s))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it has ended meanwhile, perhaps with this error
    return True


def nccl_connections(store: Any, rank: int, ranks: list[int], *, name: str, max_ctas: int, device: torch.device) -> Any:
    """Return an NCCL communicator without a name in torch, for messages among `ranks` of the default group.

    Its kernels have a stream of high priority, and at most max_ctas blocks. Collective: it blocks until all ranks have made it.
    """
    options: Any = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options.config.max_ctas = max_ctas
    options.config.cga_cluster_size = 1
    options.global_ranks_in_group = ranks
    options.group_name = name
    made: Any = dist.ProcessGroupNCCL(store, rank, len(ranks), options)
    made._set_sequence_number_for_group()
    # This makes the communicator on all ranks now. Otherwise only the ranks of the first messages would make it.
    made.allreduce([torch.zeros(1, device=device)]).wait()
    torch.cuda.current_stream(device).synchronize()
    return made


def exchange_messages(
    backend: Any, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
) -> None:
    """Enqueue one group of sends and receives on torch's current stream. Each tensor comes with its peer."""
    backend._start_coalescing()
    for sent, to in sends:
        backend.send([sent], to, 0)
    for got, source in receives:
        backend.recv([got], source, 0)
    backend._end_coalescing().wait()


def connections(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """Return torch's gloo backend for `size` ranks that share a store. Collective: it blocks until all ranks have connected."""
    from torch.distributed.distributed_c10d import ProcessGroupGloo  # some builds of torch lack it

    return ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))


def nameless_group(store: Any, rank: int, size: int, backend: Any) -> dist.ProcessGroup:
    """Return a process group for torch.distributed's collectives on CPUs, over the connections of a gloo backend."""
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


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
