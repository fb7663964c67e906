"""What is whole on every rank, and what each rank makes a part of.

    summed(x)         x            whole on every rank, used for a part        backward: the sum of all ranks' gradients
    _Total(x)         sum of x     a part on every rank, whole once summed     backward: the gradient, whole, as it is

Each is the other's backward, so that gradients have gradients, and these have, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import _functional_collectives as functional

Tensor = torch.Tensor


def summed(whole: Tensor, group: str) -> Tensor:
    """The tensor; its gradient is summed over the group. For what is whole on every rank but used for a part there."""
    if not (torch.is_grad_enabled() and whole.requires_grad):
        return whole
    found: Tensor = _Summed.apply(whole, group)  # type: ignore[no-untyped-call]
    return found


def summed_in_backward(whole: Tensor, group: str) -> Tensor:
    """As `summed`, of what a backward is given: of effect with create_graph alone, which compiled backwards have not."""
    return whole if torch.compiler.is_compiling() else summed(whole, group)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(whole: Tensor, group: str) -> Tensor:
        return whole.view_as(whole)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _Total.apply(grads[0], ctx.group), None  # type: ignore[no-untyped-call]
        return _total(grads[0], ctx.group), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(part: Tensor, group: str) -> Tensor:
        return _total(part, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return summed_in_backward(grads[0], ctx.group), None


def _total(part: Tensor, group: str) -> Tensor:
    total = functional.all_reduce(part.contiguous(), "sum", group)  # type: ignore[arg-type]
    found: Tensor = functional.wait_tensor(total)  # type: ignore[no-untyped-call]
    return found
