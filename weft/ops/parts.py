"""Cuts and gathers of tensors, and sums of their gradients.

Two functions move tensors between two layouts: whole on every rank, or cut along a dimension as torch.chunk cuts them.

    cut(x)       x [B, S, H], the same on every rank  -->  this rank's [B, s, H]       backward: the gradient is gathered
    gathered(x)  this rank's [B, s, H]  -->  [B, S, H]                                 backward: the gradient is cut

A whole tensor has a whole gradient, which is the same on every rank, so nothing is summed. Each function is the backward of the
other, so gradients can be differentiated any number of times. Parts may be uneven, and those of the last ranks empty. Results
are contiguous and have memory of their own.

In eager mode these are collectives of the process group. A `redistribute` of a DTensor takes 1 ms of host time.

The other functions are for tensors that are replicated on all ranks, of which each rank uses, or computes, a part:

    with_summed_gradient(x)      x                     backward: the sum of all ranks' gradients
    with_summed_gradients(xs)    each x                backward: the same for several tensors, in one collective
    _AllReduce                   the sum of all x      backward: the gradient, unchanged

Megatron-LM calls these "copy to" and "reduce from" the tensor-parallel region. Each is the backward of the other, so gradients
can be differentiated any number of times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from weft.compat.dispatch import all_gathered, all_reduced
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


def with_summed_gradient(x: Tensor, group: str) -> Tensor:
    """Return the tensor, with its gradient summed over the group.

    It is for a tensor that is the same on every rank, where each rank computes a part of its gradient.

    group: the name of the process group.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    found: Tensor = _Identity.apply(x, group)  # type: ignore[no-untyped-call]
    return found


def with_summed_gradients(xs: Sequence[Tensor], group: str, arrived: Callable[[list[bool]], None]) -> tuple[Tensor, ...]:
    """Return the tensors, with their gradients summed over the group by one all-reduce for each dtype. Not for torch.compile.

    A backward pass sums when it has computed the gradients of all results. A result without a gradient stays without one. The
    results may be used in several forward passes, because their node saves no tensors.

    xs: tensors that require gradients.
    arrived: called in each backward pass with, for each tensor, whether it has a gradient.
    """
    found: tuple[Tensor, ...] = _Identities.apply(group, arrived, *xs)  # type: ignore[no-untyped-call]
    return found


def with_summed_double_gradient(grad: Tensor, group: str) -> Tensor:
    """Do as with_summed_gradient, for a gradient that a backward receives.

    It has an effect if the backward is differentiated. Compiled backwards are not.
    """
    return grad if torch.compiler.is_compiling() else with_summed_gradient(grad, group)


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: str) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if torch.compiler.is_compiling():
            return all_reduced(grads[0], ctx.group, GROUPS.await_work), None
        return _summed(grads[0], ctx.group), None


class _Identities(torch.autograd.Function):
    # With setup_context, each call would bind its arguments to a signature, which takes longer than all the rest.
    @staticmethod
    def forward(ctx: Any, group: str, arrived: Callable[[list[bool]], None], *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.arrived = group, arrived
        ctx.set_materialize_grads(False)
        # A view would get a new grad_fn after each step of an optimizer, which changes its base.
        return tuple([x.detach() for x in xs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.arrived([grad is not None for grad in grads])
        found = list(grads)
        for dtype in dict.fromkeys(grad.dtype for grad in grads if grad is not None):
            these = [(i, grad) for i, grad in enumerate(grads) if grad is not None and grad.dtype == dtype]
            total = _summed(torch.cat([grad.reshape(-1) for _, grad in these]), ctx.group, own=True)
            parts = torch.split(total, [grad.numel() for _, grad in these])
            sums = [part.view(grad.shape) for (_, grad), part in zip(these, parts, strict=True)]
            # A DTensor whose part begins inside of a storage cannot be deep-copied (torch 2.13), so each sum gets its own.
            if len(sums) > 1 and not torch.is_grad_enabled():
                views, sums = sums, [torch.empty(grad.shape, dtype=dtype, device=grad.device) for _, grad in these]
                torch._foreach_copy_(sums, views)
            for (i, _), one in zip(these, sums, strict=True):
                found[i] = one
        return None, None, *found


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: str) -> Tensor:
        return all_reduced(x, group, GROUPS.await_work)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return with_summed_double_gradient(grads[0], ctx.group), None


def _summed(x: Tensor, group: str, *, own: bool = False) -> Tensor:
    if not torch.is_grad_enabled():
        return all_reduced(x, group, GROUPS.await_work, own=own)
    found: Tensor = _AllReduce.apply(x, group)  # type: ignore[no-untyped-call]
    return found
