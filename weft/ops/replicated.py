"""These functions are for tensors that are replicated on all ranks, of which each rank uses, or computes, a part.

    with_summed_gradient(x)    x                     backward: the sum of all ranks' gradients
    _AllReduce                 the sum of all x      backward: the gradient, unchanged

Megatron-LM calls these "copy to" and "reduce from" the tensor-parallel region. Each is the backward of the other, so gradients
can be differentiated any number of times.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.compat.tensors import all_reduced

Tensor = torch.Tensor


def with_summed_gradient(x: Tensor, group: str) -> Tensor:
    """Return the tensor, with its gradient summed over the group.

    It is for a tensor that is the same on every rank, where each rank computes a part of its gradient.

    group: the name of the process group.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    found: Tensor = _Identity.apply(x, group)  # type: ignore[no-untyped-call]
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
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _AllReduce.apply(grads[0], ctx.group), None  # type: ignore[no-untyped-call]
        return all_reduced(grads[0], ctx.group), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: str) -> Tensor:
        return all_reduced(x, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return with_summed_double_gradient(grads[0], ctx.group), None
