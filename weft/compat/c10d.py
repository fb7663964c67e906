"""This module wraps the private names of torch.distributed that weft uses. tests/compat reports what a new torch changes.

Connections that weft makes have no name. torch names a group that only some ranks create by its ranks and by the number of
groups of a rank, so ranks could disagree on its name, or on that of the caller's next group.
"""

from __future__ import annotations

import socket
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    PrefixStore,
    _get_process_group_store,
    _pg_map,
    _resolve_process_group,
)

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
