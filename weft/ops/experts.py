"""These operations run around the matmuls of experts, without communication, as Triton kernels on GPUs.

    weft::experts_route(index [T, k], experts, last)         -> order [T k], place [T, k], counts [experts]
    weft::experts_spread(x [T, H], place [T, k])             -> [T k, H]     rows[place[t, j]] = x[t]
    weft::experts_total(rows [T k, H], place, weights?)      -> [T, H]       sums over j of weights[t, j] * rows[place[t, j]]
    weft::swiglu(hidden [rows, 2 F], counts)                 -> [rows, F]    silu(left half) * right half; zeros below counts
    weft::experts_quantise(rows [rows, K], counts?)          -> [rows, K] float8_e4m3fn, scales [rows, K / 128]; no backward

place is -1 for an index that names no expert. Each result is computed in float32 (float64 in float64) and rounded once. On CPUs
torch computes the same, or the kernels run under Triton's interpreter. The gradient of experts_spread is experts_total without
weights, and vice versa.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch

from weft.core.experts import FARTHEST, REFUSED
from weft.core.problem import SCALE_BLOCK
from weft.ops.operator import define

_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.uint8)
"""The dtypes that the kernels take. The last is for FP8 rows, which are spread as bytes."""


def _by_kernels(x: torch.Tensor) -> bool:
    """Return whether kernels run on x. Triton's interpreter has no bfloat16."""
    if x.is_cuda:
        return x.dtype in _KERNEL_DTYPES
    return _uses_interpreter() and x.dtype in _KERNEL_DTYPES[1:]


def _uses_interpreter() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


# experts_route


def experts_route(index: torch.Tensor, experts: int, last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort rows by expert. Return (order, place, counts).

    index: [T, k], 0 to experts - 1. No expert is -1, or a number past the experts up to `last`.
    order: [T k], the position in index of each row by expert. Positions that name no expert come last.
    place: [T, k], the inverse of order, with -1 for an index that names no expert.
    counts: [experts]. If an index is wrong, the first count is the number that weft.core.experts.refused_index decodes, and
        order and place have any values within bounds.
    """
    order, place, counts = _experts_route(index, experts, last)
    return order, place, counts


def _route(index: torch.Tensor, experts: int, last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    flat = index.flatten()
    # A radix sort reads its keys once for each of their bytes. As an unsigned number, -1 is the highest.
    keys = flat.to(torch.uint8) if experts < 256 else flat.to(torch.int32) & 0x7FFFFFFF
    order = keys.argsort(stable=True)
    if index.is_cuda or _uses_interpreter():
        from weft.kernels import experts as kernels

        place, counts = kernels.places(order, kernels.count_rows(flat, experts, last))
        return order, place.view(index.shape), counts
    counts = _counted_by_expert(flat.long(), experts, last)
    place = torch.full_like(order, -1)
    there = order[: max(0, int(counts.sum()))]
    return order, place.scatter_(0, there, torch.arange(len(there))).view(index.shape), counts


def _counted_by_expert(flat: torch.Tensor, experts: int, last: int) -> torch.Tensor:
    counts = torch.bincount(flat[(flat >= 0) & (flat < experts)], minlength=experts)
    refused = flat[(flat < -1) | (flat > last)]
    if len(refused):
        counts[0] = refused.min().clamp(-FARTHEST, FARTHEST) + REFUSED
    return counts


def _route_fake(index: torch.Tensor, experts: int, last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    long = index.new_empty(0, dtype=torch.int64)
    return long.new_empty(index.numel()), long.new_empty(index.shape), long.new_empty(experts)


_experts_route = define("experts_route", _route, _route_fake)


# experts_spread


def experts_spread(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Copy each token's row once for each of its experts. Rows of the result that belong to no token are undefined.

    place: [T, k], the rows of the result for each token, or -1 for none.
    """
    rows: torch.Tensor = _experts_spread(x, place)
    return rows


def _spread(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    if _by_kernels(x):
        from weft.kernels import experts

        return experts.permute(x, place)
    tokens, top = place.shape
    rows = x.new_empty(tokens * top, x.shape[1])
    token, turn = _there(place)
    rows[place[token, turn]] = x[token]
    return rows


def _there(place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entries of place that are rows: (token, which of its k)."""
    token, turn = (place >= 0).nonzero(as_tuple=True)
    return token, turn


def _spread_save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _spread_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (place,) = ctx.saved_tensors
    return experts_total(grad, place, None), None


_experts_spread = define(
    "experts_spread",
    _spread,
    lambda x, place: x.new_empty(place.shape[0] * place.shape[1], x.shape[1]),
    save=_spread_save,
    backward=_spread_backward,
)


# experts_total


def experts_total(rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Return the sum of each token's rows, with weights [T, k] if given. place: as for experts_spread."""
    total: torch.Tensor = _experts_total(rows, place, weights)
    return total


def _total(rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    if _by_kernels(rows):
        from weft.kernels import experts

        return experts.unpermute(rows, place, weights)
    each = _wide(rows[place])
    if weights is not None:
        each = each * _wide(weights)[..., None]
    return each.where(place[..., None] >= 0, 0).sum(1).to(rows.dtype)


def _total_save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    rows, place, weights = inputs
    ctx.weighed = weights is not None
    ctx.save_for_backward(*((rows, place, weights) if ctx.weighed else (place,)))


def _total_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    if not ctx.weighed:
        return experts_spread(grad, *ctx.saved_tensors), None, None
    grad_rows, grad_weights = _experts_total_backward(grad, *ctx.saved_tensors)
    return grad_rows, None, grad_weights


_experts_total = define(
    "experts_total",
    _total,
    lambda rows, place, weights: rows.new_empty(place.shape[0], rows.shape[1]),
    save=_total_save,
    backward=_total_backward,
    double_backward=False,
)


def _weighed_gradients(
    grad: torch.Tensor, rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if _by_kernels(rows):
        from weft.kernels import experts

        return experts.unpermute_backward(grad, rows, place, weights)
    each = _wide(grad)[:, None] * _wide(weights)[..., None]
    grad_rows, (token, turn) = torch.empty_like(rows), _there(place)
    grad_rows[place[token, turn]] = each[token, turn].to(rows.dtype)
    found = (_wide(rows[place]) * _wide(grad)[:, None]).sum(2)
    return grad_rows, found.where(place >= 0, 0).to(weights.dtype)


_experts_total_backward = define(
    "experts_total_backward",
    _weighed_gradients,
    lambda grad, rows, place, weights: (torch.empty_like(rows), torch.empty_like(weights)),
)


# swiglu


def swiglu(hidden: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return silu(left half) * right half of hidden [rows, 2 F], computed in float32. Rows past the sum of counts are zeros."""
    out: torch.Tensor = _swiglu(hidden, counts)
    return out


def _gated(hidden: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    if _by_kernels(hidden):
        from weft.kernels import experts

        return experts.swiglu(hidden, counts)
    gate, up = _wide(_counted(hidden, counts)).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(hidden.dtype)


def _gated_save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gated_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return _swiglu_backward(grad, *ctx.saved_tensors), None


_swiglu = define(
    "swiglu",
    _gated,
    lambda hidden, counts: hidden.new_empty(hidden.shape[0], hidden.shape[1] // 2),
    save=_gated_save,
    backward=_gated_backward,
    double_backward=False,
)


def _gated_gradient(grad: torch.Tensor, hidden: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    if _by_kernels(hidden):
        from weft.kernels import experts

        return experts.swiglu_backward(grad, hidden, counts)
    gate, up = _wide(_counted(hidden, counts)).chunk(2, -1)
    part, flow = gate.sigmoid(), _wide(_counted(grad, counts))
    both = flow * up * part * (1 + gate * (1 - part)), flow * gate * part
    return torch.cat(both, -1).to(hidden.dtype)


_swiglu_backward = define("swiglu_backward", _gated_gradient, lambda grad, hidden, counts: torch.empty_like(hidden))


# experts_quantise

_FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FLOAT8).max
_LEAST = 1e-12
"""The least magnitude from which a scale is computed, as in torchao, so that no scale is 0."""


class Float8Operand(NamedTuple):
    """A Float8Operand is a quantised operand.

    elements: float8_e4m3fn.
    scales: float32, of the blockwise recipe (weft.core.problem.Scaling).
    """

    elements: torch.Tensor
    scales: torch.Tensor


def experts_quantise(rows: torch.Tensor, counts: torch.Tensor | None = None) -> Float8Operand:
    """Quantise rows [rows, K] to FP8, with a scale for each 128 columns of a row.

    The scale is the largest absolute value over 448, as in DeepSeek-V3 (arXiv 2412.19437, section 3.3.2).

    counts: their sum is the number of valid rows. The result of other rows is undefined.
    Raises ValueError if K is not a multiple of 128.
    """
    if rows.shape[1] % SCALE_BLOCK:
        raise ValueError(f"rows have {rows.shape[1]} columns; blockwise FP8 needs a multiple of {SCALE_BLOCK}")
    return Float8Operand(*_experts_quantise(rows, counts))


def _quantise(rows: torch.Tensor, counts: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if _by_kernels(rows):
        from weft.kernels import experts

        return experts.quantise(rows, counts, _LARGEST, _LEAST)
    blocks = rows.float().view(rows.shape[0], rows.shape[1] // SCALE_BLOCK, SCALE_BLOCK)
    scales = blocks.abs().amax(2).clamp(min=_LEAST) / _LARGEST
    return (blocks / scales[..., None]).to(_FLOAT8).view(rows.shape), scales


_experts_quantise = define(
    "experts_quantise",
    _quantise,
    lambda rows, counts: (
        torch.empty_like(rows, dtype=_FLOAT8),
        rows.new_empty(rows.shape[0], rows.shape[1] // SCALE_BLOCK, dtype=torch.float32),
    ),
)


def quantised_weights(b: torch.Tensor) -> Float8Operand:
    """Quantise b [experts, K, N] to FP8, with a scale for each 128 x 128 elements: [experts, K / 128, N / 128].

    Columns of the result are contiguous. Raises ValueError if K or N is not a multiple of 128.
    """
    _, k, n = b.shape
    if k % SCALE_BLOCK or n % SCALE_BLOCK:
        raise ValueError(f"experts' weights are {k} x {n}; blockwise FP8 needs multiples of {SCALE_BLOCK}")
    found = [_quantised_weight(weight) for weight in b.detach().mT]
    elements = torch.stack([elements.view(torch.uint8) for elements, _ in found]).view(_FLOAT8)
    # Calls on GPUs copy scales that are not contiguous.
    return Float8Operand(elements.mT, torch.stack([scales for _, scales in found]).mT.contiguous())


def _quantised_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight [N, K]."""
    high, wide = (extent // SCALE_BLOCK for extent in weight.shape)
    blocks = weight.float().reshape(high, SCALE_BLOCK, wide, SCALE_BLOCK)
    scales = blocks.abs().amax((1, 3)).clamp(min=_LEAST) / _LARGEST
    return (blocks / scales[:, None, :, None]).to(_FLOAT8).view(weight.shape), scales


def _counted(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the rows, with zeros in all rows past the sum of counts."""
    return torch.where(torch.arange(rows.shape[0], device=rows.device)[:, None] < counts.sum(), rows, 0)
