"""Collectives as values: what is to run beside a computation, and on which tensors.

    class             stands for                                 writes      reads
    AllReduce         dist.all_reduce                            tensor      tensor
    AllGather         dist.all_gather_into_tensor                output      input
    ReduceScatter     dist.reduce_scatter_tensor                 output      input
    AllToAll          dist.all_to_all_single, equal shares       output      input
    SendReceive       dist.isend and dist.irecv, as one batch    receive     send

Making one moves nothing. Its tensors belong to it from the start of the collective to its end: the computation beside it
neither writes what it reads nor touches what it writes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist

from weft.comm.texts import no_group
from weft.core.concurrent import OpaqueCollective
from weft.core.problem import CollectiveProblem
from weft.ops.common import DTYPES, check_values
from weft.overlap import collectives as by_copy_engine
from weft.overlap.collectives.checks import check_overlap
from weft.runtime.collective_calls import staging_from_environment

COPY_ENGINE, PULL = "copy_engine", "copy_engine_pull"
"""The schedules of weft.collectives."""
Reduction = Literal["sum", "avg"]
_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}
# The names that these two have from torch 2.13 on; the older ones warn there.
vendor_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
vendor_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collective(ABC):
    """One collective on one rank. group: None for the default group, until `resolved`."""

    op: ClassVar[str]
    reduces: ClassVar[bool] = False
    group: dist.ProcessGroup | None

    def __post_init__(self) -> None:
        if not dist.is_initialized():
            raise ValueError("group: torch.distributed is not initialised; call dist.init_process_group, or use torchrun")
        group = dist.group.WORLD if self.group is None else self.group
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(no_group(group, f"make {type(self).__name__}"))
        object.__setattr__(self, "group", group)
        self._check(group.size())

    @abstractmethod
    def _check(self, world_size: int) -> None:
        """Raises ValueError that names the argument."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that it reads or writes."""

    @property
    def reads(self) -> tuple[torch.Tensor, ...]:
        return self.tensors

    @property
    def writes(self) -> tuple[torch.Tensor, ...]:
        return self.tensors

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def ranks(self) -> dist.ProcessGroup:
        """The group, as resolved."""
        assert self.group is not None
        return self.group

    @property
    def nbytes(self) -> int:
        """Bytes of its largest tensor."""
        return max(tensor.nbytes for tensor in self.tensors)

    def meets(self, other: Collective) -> bool:
        """Whether some of its memory is the other's, too."""
        return any(_overlap(mine, theirs) for mine in self.tensors for theirs in other.tensors)

    @property
    def signature(self) -> tuple[object, ...]:
        """The same for collectives of the same problem, on this rank. Compared at each use: cheap."""
        return self.op, self.ranks.group_name, *((tensor.shape, tensor.dtype) for tensor in self.tensors)

    def describe(self) -> str:
        """What the ranks of a group have in common, in a line."""
        sizes = ", ".join(f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in self.tensors)
        return f"{self.op} of {sizes} among {self.ranks.size()}"

    def problem(self, world_size: int, nodes: tuple[int, ...]) -> CollectiveProblem | OpaqueCollective:
        """What it is in a schedule of so many ranks: of other ranks, or of what weft cannot add, nothing that is described."""
        if self.ranks.size() != world_size or not self.moves:
            return OpaqueCollective(name=self.op if self.ranks.size() == world_size else f"{self.op} among {self.ranks.size()}")
        tensor = max(self.tensors, key=torch.Tensor.numel)
        op: Any = self.op
        staging_bytes = staging_from_environment(self.device)
        return CollectiveProblem(
            op=op,
            m=tensor.numel() if self.reduces else tensor.nbytes,
            world_size=world_size,
            dtype=DTYPES[tensor.dtype] if self.reduces else "uint8",  # type: ignore[arg-type]
            reduce_op=getattr(self, "reduction", "sum"),
            nodes=nodes,
            staging_bytes=staging_bytes,
        )

    @abstractmethod
    def enqueue(self, group: dist.ProcessGroup, *, async_op: bool) -> dist.Work | None:
        """The vendor's collective, on `group`, which has the ranks of the collective's own. On CUDA without async_op it is on
        torch's current stream; with it, work to wait for."""

    @property
    def moves(self) -> bool:
        """Whether weft.collectives has it: sums only of the dtypes that weft adds."""
        return not self.reduces or self.tensors[0].dtype in DTYPES

    @property
    def pulls(self) -> bool:
        """Whether weft.collectives has it with copy engines that pull."""
        return False

    @abstractmethod
    def move(self, sms: int, *, pull: bool = False) -> None:
        """The same by copy engines, on CUDA on torch's current stream. sms: what sums take, 0 for their own choice. pull: by
        those of the receivers, where it `pulls`. Raises ValueError where copy engines cannot."""

    @contextmanager
    def rehearsed(self) -> Iterator[Collective]:
        """The same on the same tensors, to be run any number of times. What it reads is at the end as it was."""
        yield self


@contextmanager
def rehearsed(collectives: Sequence[Collective]) -> Iterator[list[Collective]]:
    """All of a use, to be run any number of times, one after the other. What any of them reads is at the end as it was, also
    where another one writes it."""
    with ExitStack() as stack:
        for one in collectives:
            written = [tensor for other in collectives if other is not one for tensor in other.writes]
            for read in one.reads:
                if any(_overlap(read, tensor) for tensor in written):
                    stack.enter_context(_kept(read))
        yield [stack.enter_context(one.rehearsed()) for one in collectives]


@contextmanager
def _kept(tensor: torch.Tensor) -> Iterator[None]:
    """Whatever is written to a tensor, at the end it is as it was. Takes room for another one."""
    plain = tensor.detach()  # a parameter, too: what is written is no part of a graph
    before = plain.clone()
    try:
        yield
    finally:
        plain.copy_(before)


def _matches(name: str, tensor: torch.Tensor, like_name: str, like: torch.Tensor) -> None:
    if (tensor.dtype, tensor.device) != (like.dtype, like.device):
        theirs = f"{like_name} {like.dtype} on {like.device}"
        raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, {theirs}; they must agree")


def _contiguous(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}; it must be a tensor")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {tensor.device}; weft runs on cpu and cuda")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous; pass a contiguous tensor")
    check_values(name, tensor)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements one after the other: gloo asks for shapes that go together, where only their number counts. Of a parameter,
    too: what is written is no part of a graph."""
    return tensor.detach().view(-1)


def _reduction(op: object, tensor: torch.Tensor) -> None:
    if not isinstance(op, str) or op not in _REDUCTIONS:
        raise ValueError(f"reduction is {op!r}; use {' or '.join(_REDUCTIONS)}")
    if op == "avg" and tensor.device.type == "cpu" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"reduction is 'avg', of {tensor.dtype}, of which gloo has no mean; use sum")


def _overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    low, high = sorted((left, right), key=torch.Tensor.data_ptr)
    return low.data_ptr() + low.nbytes > high.data_ptr()


@dataclass(frozen=True, eq=False)
class AllReduce(Collective):
    """tensor becomes the sum, or the mean, over all ranks.

    tensor: contiguous, of one shape and dtype on every rank. group: default: all ranks. reduction: "sum" or "avg". For
    weft.concurrent. Raises ValueError for what is no contiguous tensor, or another reduction."""

    op: ClassVar[str] = "all_reduce"
    reduces: ClassVar[bool] = True
    tensor: torch.Tensor
    group: dist.ProcessGroup | None = None
    reduction: Reduction = field(default="sum", kw_only=True)

    def _check(self, world_size: int) -> None:
        _contiguous("tensor", self.tensor)
        _reduction(self.reduction, self.tensor)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.tensor,)

    def enqueue(self, group: dist.ProcessGroup, *, async_op: bool) -> dist.Work | None:
        op = _REDUCTIONS[self.reduction]
        # Of a parameter, gloo's mean would be a change to a leaf.
        work: dist.Work | None = dist.all_reduce(self.tensor.detach(), op, group=group, async_op=async_op)
        return work

    @property
    def pulls(self) -> bool:
        return True

    def move(self, sms: int, *, pull: bool = False) -> None:
        schedule = PULL if pull else COPY_ENGINE
        by_copy_engine.all_reduce(self.tensor, self.reduction, group=self.group, schedule=schedule, sms=sms or None)

    @contextmanager
    def rehearsed(self) -> Iterator[Collective]:
        """Means in place of sums: those of the same values stay, however often, and no number overflows."""
        mean: Reduction = "avg" if self.tensor.is_floating_point() else self.reduction
        with _kept(self.tensor):
            yield replace(self, reduction=mean)


@dataclass(frozen=True, eq=False)
class _Moving(Collective):
    """What has an output and an input, one of them world_size times the other, or both alike. SCALE: output by input."""

    output: torch.Tensor
    input: torch.Tensor
    group: dist.ProcessGroup | None = None

    def _check(self, world_size: int) -> None:
        for name, tensor in (("output", self.output), ("input", self.input)):
            _contiguous(name, tensor)
        _matches("output", self.output, "input", self.input)
        wanted = self._wanted(world_size)
        if self.output.numel() != wanted:
            raise ValueError(
                f"output has {self.output.numel()} elements; {self.op} of {self.input.numel()} among {world_size} ranks "
                f"gives {wanted}"
            )
        check_overlap(self.op, self.output, self.input, self.ranks.rank())

    @abstractmethod
    def _wanted(self, world_size: int) -> int:
        """Elements of the output."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.output, self.input

    @property
    def reads(self) -> tuple[torch.Tensor, ...]:
        return (self.input,)

    @property
    def writes(self) -> tuple[torch.Tensor, ...]:
        return (self.output,)


@dataclass(frozen=True, eq=False)
class AllGather(_Moving):
    """output becomes the inputs of all ranks, one after the other. input may be this rank's part of output.

    output: contiguous, world_size times the elements of input, on every rank alike. group: default: all ranks. For
    weft.concurrent. Raises ValueError for sizes, dtypes or devices that do not go together."""

    op: ClassVar[str] = "all_gather"

    def _wanted(self, world_size: int) -> int:
        return self.input.numel() * world_size

    def enqueue(self, group: dist.ProcessGroup, *, async_op: bool) -> dist.Work | None:
        work: dist.Work | None = vendor_all_gather(_flat(self.output), _flat(self.input), group=group, async_op=async_op)
        return work

    @property
    def pulls(self) -> bool:
        return True

    def move(self, sms: int, *, pull: bool = False) -> None:
        schedule = PULL if pull else COPY_ENGINE
        by_copy_engine.all_gather_into_tensor(self.output, self.input, group=self.group, schedule=schedule)


@dataclass(frozen=True, eq=False)
class ReduceScatter(_Moving):
    """output becomes this rank's part of the sum, or the mean, of all inputs. It may be that part of input.

    input: contiguous, world_size times the elements of output, on every rank alike. group: default: all ranks. reduction: "sum"
    or "avg". For weft.concurrent. Raises ValueError for sizes, dtypes or devices that do not go together."""

    op: ClassVar[str] = "reduce_scatter"
    reduces: ClassVar[bool] = True
    reduction: Reduction = field(default="sum", kw_only=True)

    def _check(self, world_size: int) -> None:
        super()._check(world_size)
        _reduction(self.reduction, self.input)
        if self.input.numel() % world_size:
            raise ValueError(f"input has {self.input.numel()} elements; {world_size} ranks share them: pad it to a multiple")

    def _wanted(self, world_size: int) -> int:
        return self.input.numel() // world_size

    def enqueue(self, group: dist.ProcessGroup, *, async_op: bool) -> dist.Work | None:
        op = _REDUCTIONS[self.reduction]
        output, input = _flat(self.output), _flat(self.input)
        work: dist.Work | None = vendor_reduce_scatter(output, input, op=op, group=group, async_op=async_op)
        return work

    def move(self, sms: int, *, pull: bool = False) -> None:
        by_copy_engine.reduce_scatter_tensor(
            self.output, self.input, self.reduction, group=self.group, schedule=COPY_ENGINE, sms=sms or None
        )

    @contextmanager
    def rehearsed(self) -> Iterator[Collective]:
        with _kept(self.input) if _overlap(self.output, self.input) else nullcontext():
            yield self


@dataclass(frozen=True, eq=False)
class AllToAll(_Moving):
    """Equal parts of input go to the ranks in order; output becomes the parts of all ranks for this one.

    Both contiguous, of as many elements, a multiple of world_size, and apart in memory. group: default: all ranks. For
    weft.concurrent. Raises ValueError for sizes, dtypes or devices that do not go together."""

    op: ClassVar[str] = "all_to_all"

    def _check(self, world_size: int) -> None:
        super()._check(world_size)
        if self.input.numel() % world_size:
            raise ValueError(f"input has {self.input.numel()} elements; {world_size} ranks share them: pad it to a multiple")

    def _wanted(self, world_size: int) -> int:
        return self.input.numel()

    def enqueue(self, group: dist.ProcessGroup, *, async_op: bool) -> dist.Work | None:
        work: dist.Work | None = dist.all_to_all_single(_flat(self.output), _flat(self.input), group=group, async_op=async_op)
        return work

    def move(self, sms: int, *, pull: bool = False) -> None:
        by_copy_engine.all_to_all_single(self.output, self.input, group=self.group, schedule=COPY_ENGINE)


@dataclass(frozen=True, kw_only=True, eq=False)
class SendReceive(Collective):
    """One stage's part of a pipeline's step: send goes to a peer, receive is filled by one. Either may be None, with its peer,
    but not both. to, source: ranks in the group."""

    op: ClassVar[str] = "send_receive"
    send: torch.Tensor | None = None
    to: int | None = None
    receive: torch.Tensor | None = None
    source: int | None = None
    group: dist.ProcessGroup | None = None

    def _check(self, world_size: int) -> None:
        if self.send is None and self.receive is None:
            raise ValueError("send and receive are None; pass one of them, or leave this collective out")
        for name, tensor, role, peer in (("send", self.send, "to", self.to), ("receive", self.receive, "source", self.source)):
            if (tensor is None) != (peer is None):
                raise ValueError(f"{name} and {role} belong together; {role} is {peer}")
            if tensor is not None:
                _contiguous(name, tensor)
            if peer is not None and not (isinstance(peer, int) and 0 <= peer < world_size and peer != self.ranks.rank()):
                raise ValueError(f"{role} is {peer!r}; use another rank of the group, which has {world_size} ranks")

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.reads + self.writes

    @property
    def reads(self) -> tuple[torch.Tensor, ...]:
        return () if self.send is None else (self.send,)

    @property
    def writes(self) -> tuple[torch.Tensor, ...]:
        return () if self.receive is None else (self.receive,)

    @property
    def signature(self) -> tuple[object, ...]:
        """What all stages have in common: a smaller microbatch reaches them at different uses."""
        return self.op, self.ranks.group_name

    def describe(self) -> str:
        """Stages differ in what they send: only the op is common."""
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

    @property
    def moves(self) -> bool:
        return False

    def move(self, sms: int, *, pull: bool = False) -> None:
        raise AssertionError("a schedule by copy engines has no sends and receives")


class Works(dist.Work):
    """Several, of torch's or weft's, as one of torch's."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait()
        return True
