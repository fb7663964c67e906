"""These functions move tensors between two layouts: whole on every rank, or cut along a dimension as torch.chunk cuts them.

    cut(x)       x [B, S, H], the same on every rank  -->  this rank's [B, s, H]       backward: the gradient is gathered
    gathered(x)  this rank's [B, s, H]  -->  [B, S, H]                                 backward: the gradient is cut

A whole tensor has a whole gradient, which is the same on every rank, so nothing is summed. Each function is the backward of the
other, so gradients can be differentiated any number of times. Parts may be uneven, and those of the last ranks empty. Results
are contiguous and have memory of their own.

In eager mode these are collectives of the process group. A `redistribute` of a DTensor takes 1 ms of host time.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.distributed as dist

from weft.compat.dispatch import all_gathered
from weft.runtime.groups import GROUPS

Tensor = torch.Tensor


def cut(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Return this rank's part of a whole tensor along a dimension."""
    return _moved(x, False, (dim % x.dim(), x.shape[dim], group.group_name, group.rank(), group.size()))


def gathered(x: Tensor, group: dist.ProcessGroup, dim: int, total: int) -> Tensor:
    """Return the whole tensor, of which x is this rank's part along a dimension. total: the dimension's whole size."""
    return _moved(x, True, (dim % x.dim(), total, group.group_name, group.rank(), group.size()))


Place = tuple[int, int, str, int, int]
"""The dimension, its whole size, the name of the process group, this rank in it, and its number of ranks."""


def _moved(x: Tensor, gathers: bool, place: Place) -> Tensor:
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _gather(x, *place) if gathers else _cut(x, *place)
    found: Tensor = _Move.apply(x, gathers, *place)  # type: ignore[no-untyped-call]
    return found


class _Move(torch.autograd.Function):
    # With setup_context, each call would bind its arguments to a signature, which takes longer than all the rest.
    @staticmethod
    def forward(ctx: Any, x: Tensor, gathers: bool, *place: Any) -> Tensor:
        ctx.gathers, ctx.place = gathers, place
        return _gather(x, *place) if gathers else _cut(x, *place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _moved(grads[0], not ctx.gathers, ctx.place), None, None, None, None, None, None


def _cut(x: Tensor, dim: int, total: int, group: str, rank: int, ranks: int) -> Tensor:
    size = -(-total // ranks)
    low = min(rank * size, total)
    return x.narrow(dim, low, min(size, total - low)).clone(memory_format=torch.contiguous_format)


def _gather(x: Tensor, dim: int, total: int, group: str, rank: int, ranks: int) -> Tensor:
    size, shape = -(-total // ranks), list(x.shape)
    own = shape[dim]
    if own < size:
        shape[dim] = size - own
        x = torch.cat([x, x.new_zeros(shape)], dim)
        shape[dim] = size
    if size * ranks == total and prod(shape[:dim]) == 1:
        shape[dim] = total
        return all_gathered(x, shape, group, GROUPS.await_work)
    parts = all_gathered(x, [ranks, *shape], group, GROUPS.await_work).unbind()
    if size * ranks != total:
        parts = tuple(part.narrow(dim, 0, max(min(size, total - i * size), 0)) for i, part in enumerate(parts))
    return torch.cat(parts, dim)
