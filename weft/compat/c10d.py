"""Private names of torch.distributed that weft uses; a test (tests/compat) says what a new torch has changed of them.

torch names groups that only some ranks make by their ranks and by how many groups a rank has. So ranks could differ in a name,
of such a group or of the caller's next one: connections of weft's own have no name.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    PrefixStore,
    _get_process_group_store,
    _resolve_process_group,
)


def store_of(group: dist.ProcessGroup, name: str) -> Any:
    """A part of the group's store that `name` alone uses, on a connection of its own: another thread may wait on torch's. A
    store that is written in Python cannot be cloned; it is used as it is."""
    store: Any = _get_process_group_store(group)
    try:
        own = store.clone()
    except RuntimeError:
        own = store
    return PrefixStore(name, own)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """What runs a group's collectives on a device: its communicator, with `abort`."""
    return group._get_backend(device)


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of this process that has a name, as custom operators are given it."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


class FlatCollectives:
    """Collectives of whole tensors, enqueued on torch's current stream. They leave out what torch.distributed's own functions
    check and log, which is most of the host time of those. op: of sums."""

    def __init__(self, group: dist.ProcessGroup, op: Any) -> None:
        self._group: Any = group
        self._gathers, self._scatters, self._reduces = AllgatherOptions(), ReduceScatterOptions(), AllreduceOptions()
        self._scatters.reduceOp = self._reduces.reduceOp = op
        for options in (self._gathers, self._scatters, self._reduces):
            options.asyncOp = False

    def all_gather(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """As torch.distributed.all_gather_into_tensor."""
        _in_order(self._group._allgather_base(dst, src, self._gathers))

    def reduce_scatter(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """As torch.distributed.reduce_scatter_tensor."""
        _in_order(self._group._reduce_scatter_base(dst, src, self._scatters))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """As torch.distributed.all_reduce, in place."""
        _in_order(self._group.allreduce([tensor], self._reduces))


def _in_order(work: Any) -> None:
    """Let the current stream go on after a collective. A backend that has seen to that itself gives nothing to wait for."""
    if work is not None:
        work.wait()


def nccl_connections(store: Any, rank: int, ranks: list[int], *, name: str, max_ctas: int, device: torch.device) -> Any:
    """A communicator of NCCL's that torch knows by no name, for messages among `ranks` of the default group. Its kernels have a
    stream of high priority, and max_ctas blocks at most. Collective. Blocks until all ranks have made it."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options.config.max_ctas = max_ctas
    options.config.cga_cluster_size = 1
    options.global_ranks_in_group = ranks
    options.group_name = name
    made: Any = dist.ProcessGroupNCCL(store, rank, len(ranks), options)
    made._set_sequence_number_for_group()
    # The communicator is made by all ranks at once, whoever exchanges what with whom later.
    made.allreduce([torch.zeros(1, device=device)]).wait()
    torch.cuda.current_stream(device).synchronize()
    return made


def exchange_messages(
    backend: Any, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
) -> None:
    """Enqueue one group of sends and receives, each with the rank at its other end, on torch's current stream."""
    backend._start_coalescing()
    for sent, to in sends:
        backend.send([sent], to, 0)
    for got, source in receives:
        backend.recv([got], source, 0)
    backend._end_coalescing().wait()


def connections(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """gloo's connections among `size` ranks that share a store: torch's backend. Collective. Blocks until all have come."""
    from torch.distributed.distributed_c10d import ProcessGroupGloo  # a build of torch may lack it

    return ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))


def nameless_group(store: Any, rank: int, size: int, backend: Any) -> dist.ProcessGroup:
    """A process group for torch.distributed's collectives on CPUs, over some connections."""
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group
