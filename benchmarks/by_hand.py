"""What a careful person writes without weft: layers under tensor and sequence parallelism, over NCCL's collectives by hand.

    Gather, Scatter    collectives of tokens as autograd functions, one after the other with everything else
    ColumnProduct      as Megatron's ColumnParallelLinear: only this rank's tokens are kept, and the backward gathers them
                       again, during the product for the input's gradient. The reduce-scatter of that gradient runs during
                       the product for the weight's gradient
    exchange           experts over ranks: all-to-alls of rows, sorted by expert, and grouped matmuls

A Link has the collectives. `Link` has those of a process group, and can list what it was called with. `NoLink` has none: what
would arrive from others is data that lies there, so the same program runs its computation alone.

Legend: s tokens of this rank, S of all, H hidden size, E experts of all ranks, e of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Tensor = torch.Tensor
Wait = Callable[[], object]
Splits = tuple[list[int], list[int], Tensor]
"""Rows to each rank, rows from each rank, and rows by rank that they come from and expert of this rank, [ranks, e]."""


@dataclass(kw_only=True)
class Link:
    """The collectives of a group, None for all ranks. made: the collectives, with shapes, that were called; None: it keeps no
    list."""

    ranks: int
    rank: int
    group: dist.ProcessGroup | None = None
    made: list[tuple[Any, tuple[int, ...], tuple[int, ...], tuple[Any, ...]]] | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> Link:
        return cls(ranks=dist.get_world_size(group), rank=dist.get_rank(group), group=group)

    def gather(self, x: Tensor) -> Tensor:
        """[1, s, H] of all ranks -> [1, S, H]."""
        return self._gathered(x, later=False)[0]

    def start_gather(self, x: Tensor) -> tuple[Tensor, Wait]:
        return self._gathered(x, later=True)

    def _gathered(self, x: Tensor, *, later: bool) -> tuple[Tensor, Wait]:
        out = x.new_empty(self.ranks, *x.shape[1:])
        wait = self._call(dist.all_gather_into_tensor, out, x.contiguous(), later=later)
        return out.view(1, -1, x.shape[2]), wait

    def scatter(self, x: Tensor) -> Tensor:
        """The sum over ranks of [1, S, H] -> [1, s, H]."""
        return self._scattered(x, later=False)[0]

    def start_scatter(self, x: Tensor) -> tuple[Tensor, Wait]:
        return self._scattered(x, later=True)

    def _scattered(self, x: Tensor, *, later: bool) -> tuple[Tensor, Wait]:
        out = x.new_empty(1, x.shape[1] // self.ranks, x.shape[2])
        return out, self._call(dist.reduce_scatter_tensor, out, x.contiguous().view(self.ranks, -1, x.shape[2]), later=later)

    def exchange(self, rows: Tensor, got: list[int], sent: list[int]) -> Tensor:
        """all_to_all_single of rows, by numbers of rows."""
        landed = rows.new_empty(sum(got), rows.shape[1])
        self._call(dist.all_to_all_single, landed, rows.contiguous(), got, sent, later=False)
        return landed

    def splits(self, counts: Tensor) -> Splits:
        """counts: this rank's rows by rank that they go to and its expert. The host waits for the result."""
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        both = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        return both[0], both[1], arriving

    def sum(self, x: Tensor) -> None:
        """In place, over ranks."""
        dist.all_reduce(x, group=self.group)

    def _call(self, collective: Any, out: Tensor, given: Tensor, *splits: Any, later: bool) -> Wait:
        if self.made is not None:
            self.made.append((collective, tuple(out.shape), tuple(given.shape), splits))
        work = collective(out, given, *splits, group=self.group, async_op=later)
        return work.wait if later else _nothing

    def replay(self, like: Tensor) -> Wait:
        """What makes all calls of `made` again, one after the other and with nothing else. like: of the tensors' dtype."""
        shapes = {shape for _, *both, _ in self.made or () for shape in both}
        tensors = {(shape, side): like.new_zeros(shape) for shape in shapes for side in range(2)}
        calls = [
            partial(collective, tensors[out, 0], tensors[given, 1], *splits, group=self.group)
            for collective, out, given, splits in self.made or ()
        ]

        def run() -> None:
            for call in calls:
                call()

        return run


@dataclass(kw_only=True)
class NoLink(Link):
    """No communication, with the shapes of `ranks`. known: what `splits` returns."""

    known: Splits | None = None
    landed: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def _gathered(self, x: Tensor, *, later: bool) -> tuple[Tensor, Wait]:
        return self._lies(x, (1, x.shape[1] * self.ranks, x.shape[2])), _nothing

    def _scattered(self, x: Tensor, *, later: bool) -> tuple[Tensor, Wait]:
        return x[:, : x.shape[1] // self.ranks], _nothing

    def exchange(self, rows: Tensor, got: list[int], sent: list[int]) -> Tensor:
        return self._lies(rows, (sum(got), rows.shape[1]))

    def _lies(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        if shape not in self.landed:
            self.landed[shape] = torch.randn(shape, dtype=like.dtype, device=like.device)
        return self.landed[shape].detach()

    def splits(self, counts: Tensor) -> Splits:
        assert self.known is not None, "known is needed for experts"
        return self.known

    def sum(self, x: Tensor) -> None:
        pass


def _nothing() -> None:
    pass


class Gather(torch.autograd.Function):
    """All ranks' tokens [1, S, H] from a rank's [1, s, H]; backward, the sum over ranks of a rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link) -> Tensor:
        ctx.link = link
        return link.gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.link.scatter(grad), None


class Scatter(torch.autograd.Function):
    """The reverse of Gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link) -> Tensor:
        ctx.link = link
        return link.scatter(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.link.gather(grad), None


class ColumnProduct(torch.autograd.Function):
    """gathered(x [1, s, H]) @ weight.t(), of a rank's rows of weight, with the backward that this file begins with."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, link: Link) -> Tensor:
        ctx.link = link
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(link.gather(x), weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        link: Link = ctx.link
        whole, arrive = link.start_gather(x)
        grad_whole = grad @ weight
        arrive()
        grad_x, finish = link.start_scatter(grad_whole)
        grad_weight = grad[0].t() @ whole[0]
        finish()
        return grad_x, grad_weight, None


class Exchange(torch.autograd.Function):
    """all_to_all_single of rows; backward, the reverse."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, got: list[int], sent: list[int], link: Link) -> Tensor:
        ctx.got, ctx.sent, ctx.link = got, sent, link
        return link.exchange(rows, got, sent)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.link.exchange(grads[0].contiguous(), ctx.sent, ctx.got), None, None, None


def cut(weight: Tensor, dim: int, link: Link) -> Tensor:
    """A rank's part, a tensor of its own."""
    return weight.detach().chunk(link.ranks, dim)[link.rank].clone()


def sum_gradients(gradients: Sequence[Tensor], link: Link) -> None:
    """Add the gradients of all ranks, in one collective."""
    flat = torch.cat(list(gradients))
    link.sum(flat)
    torch._foreach_copy_(list(gradients), flat.split([grad.numel() for grad in gradients]))


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of their columns side by side."""
    gate, up = gate_up.chunk(2, -1)
    return nn.functional.silu(gate) * up


@cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A piece without products or communication as one kernel, by Inductor."""
    return torch.compile(function, dynamic=False)


class Plain:
    """Rows by expert and back as eager PyTorch has them, in the place of weft.models.experts.Routing."""

    def __init__(self, index: Tensor, experts: int) -> None:
        self.shape, self.order = index.shape, index.flatten().argsort(stable=True)
        self.counts = torch.zeros(experts, dtype=torch.int64, device=index.device)
        self.counts.scatter_add_(0, index.flatten(), torch.ones_like(index.flatten()))

    def spread(self, x: Tensor) -> Tensor:
        return x[self.order // self.shape[1]]

    def gather(self, rows: Tensor, weights: Tensor) -> Tensor:
        apart = torch.empty_like(rows).index_copy(0, self.order, rows).view(*self.shape, rows.shape[1])
        return (apart * weights.float()[..., None]).sum(1).to(rows.dtype)


def exchanged(
    x: Tensor, routing: Any, weights: Tensor, splits: Splits, experts: Callable[[Tensor, Tensor, Tensor], Tensor], link: Link
) -> Tensor:
    """Send tokens to their experts, run these, send the results back, and sum them by weights.

    routing: Plain, or weft's Routing. experts: from rows by expert, where each expert's rows end, and `splits[2]`."""
    sent, got, arriving = splits
    rows: Tensor = Exchange.apply(routing.spread(x), got, sent, link)  # type: ignore[no-untyped-call]
    order, offsets = _by_expert(arriving, sum(got))
    made = torch.empty_like(rows).index_copy(0, order, experts(rows[order], offsets, arriving))
    home: Tensor = Exchange.apply(made, sent, got, link)  # type: ignore[no-untyped-call]
    found: Tensor = routing.gather(home, weights)
    return found


def _by_expert(arriving: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """(where each row by expert has landed, where each expert's rows end)."""
    expert = torch.arange(arriving.shape[1], device=arriving.device).repeat(arriving.shape[0])
    of_row = torch.repeat_interleave(expert, arriving.flatten(), output_size=total)
    return of_row.argsort(stable=True), arriving.sum(0).cumsum(0).to(torch.int32)


def multiply_experts(rows: Tensor, offsets: Tensor, into: Tensor, out: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    """Experts' grouped matmuls. into: [e, 2 F, H]. out: [e, H, F]."""
    hidden = torch._grouped_mm(rows, into.transpose(1, 2), offs=offsets)
    return torch._grouped_mm(act(hidden), out.transpose(1, 2), offs=offsets)


@torch.compiler.disable
def exchange(x: Tensor, index: Tensor, weights: Tensor, into: Tensor, out: Tensor, link: Link, *, fused: bool) -> Tensor:
    """A layer's experts over the ranks of a link. The host waits for the number of rows. fused: SwiGLU is one kernel."""
    act = compiled(swiglu) if fused else swiglu
    routing = Plain(index, into.shape[0] * link.ranks)
    splits = link.splits(routing.counts.view(link.ranks, -1))
    return exchanged(
        x, routing, weights, splits, lambda rows, offsets, _: multiply_experts(rows, offsets, into, out, act), link
    )
