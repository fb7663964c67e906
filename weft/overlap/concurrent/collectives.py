"""Collectives as values, which `concurrent` runs concurrently with a computation.

    class             runs                                       writes      reads
    AllReduce         dist.all_reduce                            tensor      tensor
    AllGather         dist.all_gather_into_tensor                output      input
    ReduceScatter     dist.reduce_scatter_tensor                 output      input
    AllToAll          dist.all_to_all_single, equal shares       output      input
    SendReceive       dist.isend and dist.irecv, as one batch    receive     send

Creating a value moves no data. While the collective runs, the computation must not write the tensors that the collective reads,
and must not touch the tensors that it writes. Arguments are checked as those of weft.collectives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, cast

import torch
import torch.distributed as dist

from weft.comm.texts import no_group
from weft.core.concurrent import OpaqueCollective
from weft.core.problem import CollectiveProblem, Op
from weft.core.schedule import Schedule
from weft.ops.common import DTYPES
from weft.overlap.collectives import CheckedOptions, check_options, check_pair, check_tensor, reduction
from weft.runtime.groups import GROUPS

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}
# From torch 2.13 on these two have other names, and the older names warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ConcurrentCollective(ABC):
    """One collective on one rank.

    group: the ranks that run it. None is replaced by the default group.
    """

    op: ClassVar[str]
    group: dist.ProcessGroup | None

    def __post_init__(self) -> None:
        if not dist.is_initialized():
            raise ValueError("group: torch.distributed is not initialised; call dist.init_process_group, or use torchrun")
        group = dist.group.WORLD if self.group is None else self.group
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(no_group(group, f"make {type(self).__name__}"))
        object.__setattr__(self, "group", group)
        self._check(group)

    @abstractmethod
    def _check(self, group: dist.ProcessGroup) -> None:
        """Raise ValueError, which names the argument, if the collective is invalid."""

    @property
    @abstractmethod
    def reads(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that the collective reads."""

    @property
    @abstractmethod
    def writes(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that the collective writes."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors that the collective reads or writes."""
        return self.writes + self.reads

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def ranks(self) -> dist.ProcessGroup:
        """Return the process group that runs the collective."""
        assert self.group is not None
        return self.group

    def shares_memory_with(self, other: ConcurrentCollective) -> bool:
        """Return whether this collective and the other one use any of the same memory."""
        return any(_overlap(mine, theirs) for mine in self.tensors for theirs in other.tensors)

    @property
    @abstractmethod
    def signature(self) -> tuple[object, ...]:
        """Return a key that is equal for collectives with the same problem on this rank. Each use computes it, so it is
        cheap."""

    @abstractmethod
    def describe(self) -> str:
        """Return one line that is the same on all ranks of the group."""

    def problem(
        self, world_size: int, nodes: tuple[int, ...], staging_bytes: int | None = None
    ) -> CollectiveProblem | OpaqueCollective:
        """Return the collective as a problem for a schedule of `world_size` ranks.

        It is opaque, with only a name, if its group has another size or if weft cannot sum its dtype.
        """
        mine = self.ranks.size() == world_size
        return OpaqueCollective(name=self.op if mine else f"{self.op} among {self.ranks.size()}")

    @abstractmethod
    def enqueue(self, group: dist.ProcessGroup, *, async_op: bool) -> dist.Work | None:
        """Call NCCL's or gloo's collective on `group`, which has the same ranks as the collective's own group.

        On CUDA without async_op it runs on torch's current stream. With async_op the result is the work to wait for.
        """

    @property
    def moves(self) -> bool:
        """Return whether weft.collectives can run this collective."""
        return False

    def move(self, schedule: Schedule) -> None:
        """Run the steps of a schedule for this collective alone, on CUDA from torch's current stream on."""
        raise AssertionError(f"{self.op} has no schedule of its own")

    @contextmanager
    def rehearsed(self) -> Iterator[ConcurrentCollective]:
        """Yield a collective on the same tensors that may run any number of times. At the end its inputs are restored."""
        yield self


@contextmanager
def rehearsed(collectives: Sequence[ConcurrentCollective]) -> Iterator[list[ConcurrentCollective]]:
    """Yield collectives that may run any number of times, in order. At the end all tensors that they read are restored.

    This includes tensors that another one of the collectives writes.
    """
    with ExitStack() as stack:
        for one in collectives:
            written = [tensor for other in collectives if other is not one for tensor in other.writes]
            for read in one.reads:
                if any(_overlap(read, tensor) for tensor in written):
                    stack.enter_context(_restore_after(read))
        yield [stack.enter_context(one.rehearsed()) for one in collectives]


@contextmanager
def _restore_after(tensor: torch.Tensor) -> Iterator[None]:
    """Restore a tensor at the end from a copy. The copy takes as much memory as the tensor."""
    plain = tensor.detach()  # autograd must not record writes to a parameter
    before = plain.clone()
    try:
        yield
    finally:
        plain.copy_(before)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a tensor, because gloo compares shapes where only the number of elements matters.

    The view is detached, since autograd must not record writes to a parameter.
    """
    return tensor.detach().view(-1)


def _overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    low, high = sorted((left, right), key=torch.Tensor.data_ptr)
    return low.data_ptr() + low.nbytes > high.data_ptr()


class _Whole(ConcurrentCollective):
    """A collective of all ranks from `input` to `output`.

    reduction: how values are summed, or None if the collective sums nothing.
    """

    output: torch.Tensor
    input: torch.Tensor
    reduction: Literal["sum", "avg"] | None = None

    def _check(self, group: dist.ProcessGroup) -> None:
        check_pair(self.op, self.output, self.input, group.rank(), group.size())
        if self.reduction is None:
            return
        object.__setattr__(self, "reduction", reduction(self.reduction, "reduction"))
        if self.reduction == "avg" and self.device.type == "cpu" and not (self._real or self.input.is_complex()):
            raise ValueError(f"reduction is 'avg', of {self.input.dtype}, of which gloo has no mean; use sum")

    @property
    def _real(self) -> bool:
        return self.input.is_floating_point()

    @property
    def reads(self) -> tuple[torch.Tensor, ...]:
        return (self.input,)

    @property
    def writes(self) -> tuple[torch.Tensor, ...]:
        return (self.output,)

    @property
    def signature(self) -> tuple[object, ...]:
        out, given = self.output, self.input
        return self.op, self.ranks.group_name, self.reduction, out.shape, given.shape, given.dtype, self._reachable

    def describe(self) -> str:
        tensors = (self.output,) if self.output is self.input else (self.output, self.input)
        sizes = ", ".join(f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)
        return f"{self.op} of {sizes} among {self.ranks.size()}"

    @property
    def moves(self) -> bool:
        """Return whether weft.collectives can run it. If it sums, weft must support the dtype."""
        return self.reduction is None or self.input.dtype in DTYPES

    @property
    def _reachable(self) -> bool:
        """Return whether peers can write the result."""
        return self.op != "reduce_scatter" and GROUPS.reach(self.ranks.group_name, self.output) is not None

    def problem(
        self, world_size: int, nodes: tuple[int, ...], staging_bytes: int | None = None
    ) -> CollectiveProblem | OpaqueCollective:
        if self.ranks.size() != world_size or not self.moves:
            return super().problem(world_size, nodes)
        call = self._options("auto").make(self.output, self.input)
        found = call.problem((staging_bytes or call.staging_bytes,) * world_size)
        return replace(found, nodes=nodes, reachable=found.reachable and not nodes)

    def enqueue(self, group: dist.ProcessGroup, *, async_op: bool) -> dist.Work | None:
        output, given = _flat(self.output), _flat(self.input)
        options: dict[str, Any] = {"group": group, "async_op": async_op}
        if self.op == "all_reduce":
            return dist.all_reduce(output, _REDUCTIONS[self.reduction or "sum"], **options)  # type: ignore[no-any-return]
        if self.op == "reduce_scatter":
            return _reduce_scatter(output, given, op=_REDUCTIONS[self.reduction or "sum"], **options)  # type: ignore[no-any-return]
        moves: Any = _all_gather if self.op == "all_gather" else dist.all_to_all_single
        return moves(output, given, **options)  # type: ignore[no-any-return]

    def move(self, schedule: Schedule) -> None:
        call = self._options(schedule).make_checked(self.output, self.input)
        GROUPS.run(call.group, call)

    def _options(self, schedule: str | Schedule) -> CheckedOptions:
        return check_options(cast(Any, self.op), self.group, self.reduction or "sum", schedule)


@dataclass(frozen=True, eq=False)
class AllReduce(_Whole):
    """Replace `tensor` by the sum, or the mean, over all ranks. For weft.concurrent.

    tensor: contiguous, with the same shape and dtype on every rank.
    group: the ranks. Default: the default group.
    reduction: "sum" or "avg".

    Raises ValueError for anything but a contiguous tensor, and for another reduction.
    """

    op: ClassVar[Op] = "all_reduce"
    tensor: torch.Tensor
    group: dist.ProcessGroup | None = None
    reduction: Literal["sum", "avg"] = field(default="sum", kw_only=True)

    @property
    def output(self) -> torch.Tensor:  # type: ignore[override]
        return self.tensor

    @property
    def input(self) -> torch.Tensor:  # type: ignore[override]
        return self.tensor

    @contextmanager
    def rehearsed(self) -> Iterator[ConcurrentCollective]:
        """Yield a collective that averages instead of summing. Repeated averages of equal values do not change, and do not
        overflow."""
        with _restore_after(self.tensor):
            yield replace(self, reduction="avg" if self._real else self.reduction)


@dataclass(frozen=True, eq=False)
class AllGather(_Whole):
    """Concatenate the inputs of all ranks in `output`. For weft.concurrent.

    output: contiguous, with world_size times the elements of input, the same on every rank.
    input: contiguous. It may be this rank's part of output.
    group: the ranks. Default: the default group.

    Raises ValueError for sizes, dtypes or devices that do not match.
    """

    op: ClassVar[Op] = "all_gather"
    output: torch.Tensor
    input: torch.Tensor
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True, eq=False)
class ReduceScatter(_Whole):
    """Store this rank's part of the sum, or the mean, of all inputs in `output`. For weft.concurrent.

    output: contiguous. It may be this rank's part of input.
    input: contiguous, with world_size times the elements of output, the same on every rank.
    group: the ranks. Default: the default group.
    reduction: "sum" or "avg".

    Raises ValueError for sizes, dtypes or devices that do not match.
    """

    op: ClassVar[Op] = "reduce_scatter"
    output: torch.Tensor
    input: torch.Tensor
    group: dist.ProcessGroup | None = None
    reduction: Literal["sum", "avg"] = field(default="sum", kw_only=True)

    @contextmanager
    def rehearsed(self) -> Iterator[ConcurrentCollective]:
        with _restore_after(self.input) if _overlap(self.output, self.input) else nullcontext():
            yield self


@dataclass(frozen=True, eq=False)
class AllToAll(_Whole):
    """Send equal parts of `input` to the ranks in order, and store the parts for this rank in `output`. For weft.concurrent.

    output, input: contiguous, in separate memory, with the same number of elements, which is a multiple of world_size.
    group: the ranks. Default: the default group.

    Raises ValueError for sizes, dtypes or devices that do not match.
    """

    op: ClassVar[Op] = "all_to_all"
    output: torch.Tensor
    input: torch.Tensor
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class SendReceive(ConcurrentCollective):
    """One stage's transfers in a step of a pipeline. At least one of `send` and `receive` is given.

    send: the tensor to send to rank `to` of the group, or None.
    receive: the tensor that rank `source` of the group fills, or None.
    """

    op: ClassVar[str] = "send_receive"
    send: torch.Tensor | None = None
    to: int | None = None
    receive: torch.Tensor | None = None
    source: int | None = None
    group: dist.ProcessGroup | None = None

    def _check(self, group: dist.ProcessGroup) -> None:
        if self.send is None and self.receive is None:
            raise ValueError("send and receive are None; pass one of them, or leave this collective out")
        for name, tensor, role, peer in (("send", self.send, "to", self.to), ("receive", self.receive, "source", self.source)):
            if (tensor is None) != (peer is None):
                raise ValueError(f"{name} and {role} belong together; {role} is {peer}")
            if tensor is not None:
                check_tensor(name, tensor, contiguous=True)
            if peer is not None and not (isinstance(peer, int) and 0 <= peer < group.size() and peer != group.rank()):
                raise ValueError(f"{role} is {peer!r}; use another rank of the group, which has {group.size()} ranks")

    @property
    def reads(self) -> tuple[torch.Tensor, ...]:
        return () if self.send is None else (self.send,)

    @property
    def writes(self) -> tuple[torch.Tensor, ...]:
        return () if self.receive is None else (self.receive,)

    @property
    def signature(self) -> tuple[object, ...]:
        """Return a key that all stages share. It has no shapes, since stages may see a smaller microbatch at different uses."""
        return self.op, self.ranks.group_name

    def describe(self) -> str:
        """Return the operation and the number of ranks. Stages send different tensors, so these are left out."""
        return f"{self.op} among {self.ranks.size()}"

    def enqueue(self, group: dist.ProcessGroup, *, async_op: bool) -> dist.Work | None:
        ops = []
        if self.send is not None:
            ops.append(dist.P2POp(dist.isend, self.send, group=group, group_peer=self.to))
        if self.receive is not None:
            ops.append(dist.P2POp(dist.irecv, self.receive, group=group, group_peer=self.source))
        works = Works(dist.batch_isend_irecv(ops))
        if async_op:
            return works
        works.wait()
        return None


class Works(dist.Work):
    """Several works of torch.distributed as one."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait()
        return True
