"""These kernels run before, between and after experts' matmuls. Each makes one pass over memory.

    count_rows()   index [T, k]     to counts [E] of rows, and the least refused index
    places()       order of a sort  to place [T, k]             place[order[i]] = i; -1 for a token without an expert
    permute()      x [T, H]         to rows by expert [T k, H]  rows[place[t, j]] = x[t]
    unpermute()    rows by expert   to [T, H]                   sum over j of weights[t, j] * rows[place[t, j]]
    swiglu()       [rows, 2 F]      to [rows, F]                silu(left half) * right half, for valid rows
    quantise()     [rows, K]        to FP8 [rows, K], scales    largest of 128 columns / 448, for valid rows

The module also has the gradients of these kernels.

place: int64 [T, k], the rows of each token among the T k rows. -1 means no row: nothing is stored, read or added.

Sums are in float32, over j in order, and rounded once. Only integers are added atomically, so results are deterministic. The
number of valid rows is the sum of counts, which is on the device. Rows beyond it are not read, and are stored as zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.core.experts import FARTHEST, REFUSED
from weft.core.problem import SCALE_BLOCK
from weft.kernels.scaled import rounded

_COLS = 2048
_WARPS = 8
_INDICES = 1024
"""The number of indices that a block processes."""


@triton.jit
def _count_kernel(
    index_ptr, words_ptr, count, experts, last, REFUSED: tl.constexpr, FARTHEST: tl.constexpr, SIZE: tl.constexpr
):
    """Count rows by expert. words: the counts, then the least index below -1 or past `last`, plus REFUSED; zeros at first."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    index = tl.load(index_ptr + at, inside, 0).to(tl.int64)
    tl.atomic_add(words_ptr + index, 1, inside & (index >= 0) & (index < experts), sem="relaxed")
    refused = inside & ((index < -1) | (index > last))
    far = tl.minimum(tl.maximum(index, -FARTHEST), FARTHEST)
    least = tl.min(tl.where(refused, far + REFUSED, 0), 0)
    if least < 0:
        tl.atomic_min(words_ptr + experts, least, sem="relaxed")


@triton.jit
def _places_kernel(order_ptr, words_ptr, place_ptr, counts_ptr, count, experts, EXPERTS: tl.constexpr, SIZE: tl.constexpr):
    """Write place for rows sorted by expert, those without an expert last. If an index is refused, the first count encodes
    it."""
    each = tl.arange(0, EXPERTS)
    rows = tl.load(words_ptr + each, each < experts, 0)
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    source = tl.load(order_ptr + at, at < count, 0)
    tl.store(place_ptr + source, tl.where(at < tl.sum(rows, 0), at, -1).to(tl.int64), at < count)
    if tl.program_id(0) == 0:
        refused = tl.load(words_ptr + experts)
        tl.store(counts_ptr + each, tl.where((each == 0) & (refused < 0), refused, rows), each < experts)


@triton.jit
def _columns_of(row, width):
    """Return the number of columns of a token's row: 0 if it has no row."""
    return tl.where(row >= 0, width, 0)


@triton.jit
def _permute_kernel(x_ptr, place_ptr, rows_ptr, width, TOP: tl.constexpr, COLS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for first in range(0, width, COLS):
        col = first + tl.arange(0, COLS)
        value = tl.load(x_ptr + token * width + col, col < width)
        for turn in tl.static_range(TOP):
            row = tl.load(place_ptr + token * TOP + turn)
            tl.store(rows_ptr + row * width + col, value, col < _columns_of(row, width))


@triton.jit
def _unpermute_kernel(
    rows_ptr, place_ptr, weights_ptr, out_ptr, width, TOP: tl.constexpr, COLS: tl.constexpr, WEIGHED: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    for first in range(0, width, COLS):
        col = first + tl.arange(0, COLS)
        acc = tl.zeros((COLS,), tl.float32)
        for turn in tl.static_range(TOP):
            row = tl.load(place_ptr + token * TOP + turn)
            value = tl.load(rows_ptr + row * width + col, col < _columns_of(row, width), 0).to(tl.float32)
            if WEIGHED:
                value *= tl.load(weights_ptr + token * TOP + turn, row >= 0, 0).to(tl.float32)
            acc += value
        tl.store(out_ptr + token * width + col, acc.to(out_ptr.dtype.element_ty), col < width)


@triton.jit
def _unpermute_backward_kernel(
    grad_ptr,
    rows_ptr,
    place_ptr,
    weights_ptr,
    grad_rows_ptr,
    grad_weights_ptr,
    width,
    TOP: tl.constexpr,
    COLS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    for turn in tl.static_range(TOP):
        row = tl.load(place_ptr + token * TOP + turn)
        weight = tl.load(weights_ptr + token * TOP + turn).to(tl.float32)
        products = tl.zeros((COLS,), tl.float32)
        there = _columns_of(row, width)
        for first in range(0, width, COLS):
            col = first + tl.arange(0, COLS)
            grad = tl.load(grad_ptr + token * width + col, col < there, 0).to(tl.float32)
            products += grad * tl.load(rows_ptr + row * width + col, col < there, 0).to(tl.float32)
            tl.store(grad_rows_ptr + row * width + col, (grad * weight).to(grad_rows_ptr.dtype.element_ty), col < there)
        found = tl.sum(products, 0)
        tl.store(grad_weights_ptr + token * TOP + turn, found.to(grad_weights_ptr.dtype.element_ty))


@triton.jit
def _columns_there(counts_ptr, count, row, width, COUNTS: tl.constexpr):
    """Return the number of columns to read of a row: 0 for a row past the sum of counts."""
    each = tl.arange(0, COUNTS)
    return tl.where(row < tl.sum(tl.load(counts_ptr + each, each < count, 0).to(tl.int32), 0), width, 0)


@triton.jit
def _swiglu_kernel(hidden_ptr, counts_ptr, out_ptr, count, width, COUNTS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    there = _columns_there(counts_ptr, count, row, width, COUNTS)
    hidden_ptr += row * 2 * width
    for first in range(0, width, COLS):
        col = first + tl.arange(0, COLS)
        gate = tl.load(hidden_ptr + col, col < there, 0).to(tl.float32)
        up = tl.load(hidden_ptr + width + col, col < there, 0).to(tl.float32)
        found = gate * tl.sigmoid(gate) * up
        tl.store(out_ptr + row * width + col, found.to(out_ptr.dtype.element_ty), col < width)


@triton.jit
def _swiglu_backward_kernel(grad_ptr, hidden_ptr, counts_ptr, out_ptr, count, width, COUNTS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    there = _columns_there(counts_ptr, count, row, width, COUNTS)
    hidden_ptr += row * 2 * width
    out_ptr += row * 2 * width
    for first in range(0, width, COLS):
        col = first + tl.arange(0, COLS)
        inside = col < there
        gate = tl.load(hidden_ptr + col, inside, 0).to(tl.float32)
        up = tl.load(hidden_ptr + width + col, inside, 0).to(tl.float32)
        grad = tl.load(grad_ptr + row * width + col, inside, 0).to(tl.float32)
        part = tl.sigmoid(gate)
        to_gate = grad * up * part * (1 + gate * (1 - part))
        tl.store(out_ptr + col, to_gate.to(out_ptr.dtype.element_ty), col < width)
        tl.store(out_ptr + width + col, (grad * gate * part).to(out_ptr.dtype.element_ty), col < width)


@triton.jit
def _quantise_kernel(
    rows_ptr, counts_ptr, out_ptr, scales_ptr, count, width,
    COUNTED: tl.constexpr, COUNTS: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr,
    BLOCK: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    there = width
    if COUNTED:
        there = _columns_there(counts_ptr, count, row, width, COUNTS)
    for first in range(0, there, COLS):
        col = first + tl.arange(0, COLS)
        blocks = tl.load(rows_ptr + row * width + col, col < there, 0).to(tl.float32).reshape(COLS // BLOCK, BLOCK)
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(blocks), 1), LEAST), LARGEST)
        found = tl.div_rn(blocks, tl.broadcast_to(scale[:, None], (COLS // BLOCK, BLOCK))).reshape(COLS)
        tl.store(out_ptr + row * width + col, rounded(found), col < there)
        block = first // BLOCK + tl.arange(0, COLS // BLOCK)
        tl.store(scales_ptr + row * (width // BLOCK) + block, scale, block < there // BLOCK)


def count_rows(index: torch.Tensor, experts: int, last: int) -> torch.Tensor:
    """Count the rows of each expert.

    index: [T, k].
    Returns int64 [experts + 1]: the rows of each expert, then the least index below -1 or past `last`, plus REFUSED.
    """
    words = torch.zeros(experts + 1, dtype=torch.int64, device=index.device)
    if index.numel():
        constants = {"REFUSED": REFUSED, "FARTHEST": FARTHEST, "SIZE": _INDICES}
        _count_kernel[_blocks(index)](index.contiguous(), words, index.numel(), experts, last, **constants, num_warps=_WARPS)
    return words


def places(order: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Invert a sort of rows by expert. Return (place, counts).

    order: [T k], each row's position in index.
    words: the result of `count_rows`.
    """
    place, experts = torch.empty_like(order), len(words) - 1
    if not order.numel():
        return place, words[:experts]
    counts = torch.empty_like(words[:experts])
    constants = {"EXPERTS": int(triton.next_power_of_2(experts)), "SIZE": _INDICES}
    _places_kernel[_blocks(order)](order, words, place, counts, order.numel(), experts, **constants, num_warps=_WARPS)
    return place, counts


def _blocks(indices: torch.Tensor) -> tuple[int]:
    return (triton.cdiv(indices.numel(), _INDICES),)


def permute(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Copy each token to its rows. x: [T, H]. place: [T, k]. Returns [T k, H]."""
    tokens, top = place.shape
    rows = x.new_empty(tokens * top, x.shape[1])
    if rows.numel():
        _permute_kernel[(tokens,)](x.contiguous(), place, rows, x.shape[1], TOP=top, **_by_columns(x))
    return rows


def unpermute(rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Sum each token's rows. rows: [T k, H]. place, weights: [T, k]; without weights all are 1. Returns [T, H]."""
    tokens, top = place.shape
    out, weighed = rows.new_empty(tokens, rows.shape[1]), weights is not None
    factors = rows if weights is None else weights.contiguous()
    if out.numel():
        _unpermute_kernel[(tokens,)](
            rows.contiguous(), place, factors, out, rows.shape[1], TOP=top, WEIGHED=int(weighed), **_by_columns(rows)
        )
    return out


def unpermute_backward(
    grad: torch.Tensor, rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of rows and of weights of `unpermute`. grad: [T, H]."""
    tokens, top = place.shape
    grad_rows, grad_weights = (torch.empty_like(one, memory_format=torch.contiguous_format) for one in (rows, weights))
    if rows.numel():
        sources = grad.contiguous(), rows.contiguous(), place, weights.contiguous()
        _unpermute_backward_kernel[(tokens,)](*sources, grad_rows, grad_weights, rows.shape[1], TOP=top, **_by_columns(rows))
    return grad_rows, grad_weights


def swiglu(hidden: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return silu(left half) * right half, [rows, F].

    hidden: [rows, 2 F].
    counts: int32 or int64 of any shape. Their sum is the number of valid rows.
    """
    rows, width = hidden.shape[0], hidden.shape[1] // 2
    out = hidden.new_empty(rows, width)
    if out.numel():
        _swiglu_kernel[(rows,)](
            hidden.contiguous(), counts.contiguous(), out, counts.numel(), width, **_by_columns(out), **_counting(counts)
        )
    return out


def swiglu_backward(grad: torch.Tensor, hidden: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the gradient of hidden. grad: [rows, F]."""
    rows, width = grad.shape
    out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    if out.numel():
        sources = grad.contiguous(), hidden.contiguous(), counts.contiguous()
        _swiglu_backward_kernel[(rows,)](*sources, out, counts.numel(), width, **_by_columns(grad), **_counting(counts))
    return out


def quantise(
    rows: torch.Tensor, counts: torch.Tensor | None, largest: float, least: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows to FP8. Each 128 columns are divided by their scale: max(their largest magnitude, `least`) / `largest`.

    rows: [rows, K]; K is a multiple of 128.
    counts: as for swiglu. Without counts all rows are valid.
    Returns float8_e4m3fn [rows, K] and the scales, float32 [rows, K / 128]. Rows that are not valid are undefined.
    """
    height, width = rows.shape
    out = torch.empty(height, width, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty(height, width // SCALE_BLOCK, dtype=torch.float32, device=rows.device)
    if out.numel():
        counted = rows if counts is None else counts.contiguous()
        constants = {"COUNTED": counts is not None, "LARGEST": largest, "LEAST": least, "BLOCK": SCALE_BLOCK}
        constants |= _counting(counted) if counts is not None else {"COUNTS": 1}
        _quantise_kernel[(height,)](
            rows.contiguous(), counted, out, scales, counted.numel(), width, **constants, **_by_columns(out)
        )
    return out, scales


def _by_columns(like: torch.Tensor) -> dict[str, int]:
    """Return the constants of a loop over a row: the columns of an iteration, and the warps of a block."""
    return {"COLS": min(_COLS, int(triton.next_power_of_2(like.shape[1]))), "num_warps": _WARPS if like.is_cuda else 1}


def _counting(counts: torch.Tensor) -> dict[str, int]:
    return {"COUNTS": int(triton.next_power_of_2(max(1, counts.numel())))}
