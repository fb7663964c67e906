"""weft::experts_spread, experts_total and swiglu: what lies around the matmuls of experts, one kernel each on GPUs.

    weft::experts_spread(x [T, H], place [T, k])             -> [T k, H]     rows[place[t, j]] = x[t]
    weft::experts_total(rows [T k, H], place, weights?)      -> [T, H]       sums over j of weights[t, j] * rows[place[t, j]]
    weft::swiglu(hidden [rows, 2 F], counts)                 -> [rows, F]    silu(left half) * right half; zeros below counts

Each is computed in float32 (float64 in float64) and rounded once. On CPUs torch does the same; under Triton's interpreter the
kernels run there. Gradients of experts_spread are experts_total without weights, and the other way round.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from weft.ops.library import register

_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _by_kernels(x: torch.Tensor) -> bool:
    """Whether a kernel does it. The interpreter has no bfloat16."""
    if x.is_cuda:
        return x.dtype in _KERNEL_DTYPES
    return os.environ.get("TRITON_INTERPRET") == "1" and x.dtype in _KERNEL_DTYPES[1:]


def _spread(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    if _by_kernels(x):
        from weft.kernels import experts

        return experts.spread(x, place)
    tokens, top = place.shape
    rows = x.new_empty(tokens * top, x.shape[1])
    rows[place.flatten()] = x.repeat_interleave(top, 0)
    return rows


def _spread_fake(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return x.new_empty(place.shape[0] * place.shape[1], x.shape[1])


def _spread_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _spread_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (place,) = ctx.saved_tensors
    return torch.ops.weft.experts_total(grad, place, None), None


def _total(rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    if _by_kernels(rows):
        from weft.kernels import experts

        return experts.total(rows, place, weights)
    apart = _wide(rows[place])
    return (apart if weights is None else apart * _wide(weights)[..., None]).sum(1).to(rows.dtype)


def _total_fake(rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    return rows.new_empty(place.shape[0], rows.shape[1])


def _total_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    rows, place, weights = inputs
    ctx.weighed = weights is not None
    ctx.save_for_backward(*((rows, place, weights) if ctx.weighed else (place,)))


def _total_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    if not ctx.weighed:
        return torch.ops.weft.experts_spread(grad, *ctx.saved_tensors), None, None
    grad_rows, grad_weights = torch.ops.weft.experts_total_backward(grad, *ctx.saved_tensors)
    return grad_rows, None, grad_weights


def _weighed_backward(
    grad: torch.Tensor, rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if _by_kernels(rows):
        from weft.kernels import experts

        return experts.total_backward(grad, rows, place, weights)
    each = _wide(grad)[:, None] * _wide(weights)[..., None]
    grad_rows = torch.empty_like(rows)
    grad_rows[place.flatten()] = each.flatten(0, 1).to(rows.dtype)
    return grad_rows, (_wide(rows[place]) * _wide(grad)[:, None]).sum(2).to(weights.dtype)


def _weighed_backward_fake(
    grad: torch.Tensor, rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(rows), torch.empty_like(weights)


def _swiglu(hidden: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    if _by_kernels(hidden):
        from weft.kernels import experts

        return experts.swiglu(hidden, counts)
    gate, up = _wide(_there(hidden, counts)).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(hidden.dtype)


def _swiglu_fake(hidden: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return hidden.new_empty(hidden.shape[0], hidden.shape[1] // 2)


def _swiglu_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.weft.swiglu_backward(grad, *ctx.saved_tensors), None


def _swiglu_gradient(grad: torch.Tensor, hidden: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    if _by_kernels(hidden):
        from weft.kernels import experts

        return experts.swiglu_backward(grad, hidden, counts)
    gate, up = _wide(_there(hidden, counts)).chunk(2, -1)
    part, flow = gate.sigmoid(), _wide(_there(grad, counts))
    both = flow * up * part * (1 + gate * (1 - part)), flow * gate * part
    return torch.cat(both, -1).to(hidden.dtype)


def _swiglu_gradient_fake(grad: torch.Tensor, hidden: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(hidden)


def _there(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The rows; zeros below counts, whatever is there."""
    return torch.where(torch.arange(rows.shape[0], device=rows.device)[:, None] < counts.sum(), rows, 0)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


register(
    "experts_spread(Tensor x, Tensor place) -> Tensor",
    run=_spread,
    fake=_spread_fake,
    context=_spread_context,
    backward=_spread_backward,
)
register(
    "experts_total(Tensor rows, Tensor place, Tensor? weights) -> Tensor",
    run=_total,
    fake=_total_fake,
    context=_total_context,
    backward=_total_backward,
    twice=False,
)
register(
    "experts_total_backward(Tensor grad, Tensor rows, Tensor place, Tensor weights) -> (Tensor, Tensor)",
    run=_weighed_backward,
    fake=_weighed_backward_fake,
)
register(
    "swiglu(Tensor hidden, Tensor counts) -> Tensor",
    run=_swiglu,
    fake=_swiglu_fake,
    context=_swiglu_context,
    backward=_swiglu_backward,
    twice=False,
)
register(
    "swiglu_backward(Tensor grad, Tensor hidden, Tensor counts) -> Tensor", run=_swiglu_gradient, fake=_swiglu_gradient_fake
)
