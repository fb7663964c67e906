"""These kernels are the backward of a lookup. They sum the gradients of table rows and write or apply them, and compute the
gradients of weights.

    _update_kernel      one block for each row that was looked up: sums its gradients, then applies them; launched by update()
    _weights_kernel     the gradient of per-sample weights; launched by weight_gradients()

A row's gradient is itself a lookup: the sum of the gradients of all bags that hold the row. So `weft.kernels.lookup.pool`
computes it in float32, in the order of the indices, which is deterministic. No gradient per index is materialised. The sum is
used in one of these ways:

    gradient          grad[row] = sum (a dense gradient, zeroed before)
    sgd               row -= lr * sum
    rowwise_adagrad   state[row] += mean(sum^2); row -= lr * sum / (sqrt(state[row]) + eps)

A CUDA graph can capture all launches, because none depends on values on the device. There are as many segments as indices, and
empty segments come last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from weft.kernels.lookup import ELEMENTS, pool
from weft.kernels.tables import Places, SortedIndices, cached_constant

KINDS = ("gradient", "sgd", "rowwise_adagrad")
_FIELDS = 6
_ROW_BYTES = 4096
_WIDE = 1024
_WARPS_PER_SM, _REGISTERS = 32, 64
"""With 64 registers per thread, 32 warps fit on an SM."""


def update(
    kind: str,
    grad: torch.Tensor,
    found: SortedIndices,
    targets: Sequence[torch.Tensor],
    states: Sequence[torch.Tensor] = (),
    *,
    base: torch.Tensor | None = None,
    lr: float = 0.0,
    eps: float = 0.0,
    sms: int,
) -> None:
    """Reduce the gradients of rows and apply them.

    kind: one of KINDS.
    grad: [batch, columns of all targets, concatenated], the gradient of the lookup's result.
    targets: the tables, or their dense gradients.
    states: float32 [rows] for each table, for rowwise_adagrad.
    base: the tensor that holds all targets, if its address changes from call to call.
    lr, eps: the learning rate, and the epsilon of rowwise_adagrad.
    sms: the number of SMs of the device.
    """
    assert kind in KINDS, kind
    if not found.rows.numel():
        return
    plan, width, align = _plan(grad, targets, states, 0 if base is None else base.data_ptr())
    item = targets[0].element_size()
    warps = max(1, min(16, width // _WIDE))
    _update_kernel[(min(_WARPS_PER_SM // warps * sms, found.rows.numel()),)](
        found.starts,
        found.tables,
        found.rows,
        found.samples,
        found.factors,
        grad,
        plan,
        0 if base is None else base.data_ptr(),
        found.rows.numel(),
        grad.shape[0],
        lr,
        eps,
        KIND=KINDS.index(kind),
        ROWS=max(1, _ROW_BYTES // (width * item)),
        WIDTH=width,
        ALIGN=align,
        ELEMENT=ELEMENTS[targets[0].dtype],
        ITEM=item,
        FIELDS=_FIELDS,
        num_warps=warps,
        maxnreg=_REGISTERS,
    )


def weight_gradients(
    grad: torch.Tensor, indices: torch.Tensor, places: Places, tables: Sequence[torch.Tensor], *, sms: int
) -> torch.Tensor:
    """Return the dot product of each index's row and its bag's gradient, in float32. It is 0 for indices that do not count."""
    out = torch.zeros(indices.numel(), device=indices.device)
    if not indices.numel():
        return out
    plan, width, align = _plan(grad, tables, ())
    rows = max(1, min(8, _ROW_BYTES // (width * grad.element_size())))
    _weights_kernel[(min(_WARPS_PER_SM * sms, -(-indices.numel() // rows)),)](
        indices,
        places.bag,
        places.counts,
        grad,
        plan,
        out,
        indices.numel(),
        grad.shape[0],
        ROWS=rows,
        WIDTH=width,
        ALIGN=align,
        ELEMENT=ELEMENTS[tables[0].dtype],
        ITEM=tables[0].element_size(),
        FIELDS=_FIELDS,
        num_warps=max(1, min(16, width // _WIDE)),
    )
    return out


def _plan(
    grad: torch.Tensor, targets: Sequence[torch.Tensor], states: Sequence[torch.Tensor], base: int = 0
) -> tuple[torch.Tensor, int, int]:
    """Return the table of targets, a block's columns, and the alignment in elements.

    A row of the table has a target's address relative to `base`, its row stride, its columns, its first column in grad, the
    address of its state, and the row stride of grad.
    """
    item, rows, column = grad.element_size(), [], 0
    for at, target in enumerate(targets):
        state = states[at].data_ptr() if states else 0
        rows.append((target.data_ptr() - base, target.stride(0), target.shape[1], column, state, grad.stride(0)))
        column += target.shape[1]
    places = [n for address, *sizes, _, stride in rows for n in (address, *(size * item for size in (*sizes, stride)))]
    align = math.gcd(16, base, grad.data_ptr(), *places) // item
    width = triton.next_power_of_2(max(target.shape[1] for target in targets))
    return cached_constant(tuple(rows), grad.device), width, align


@triton.jit(do_not_specialize=["length", "batch", "base", "lr", "eps"])
def _update_kernel(
    starts_ptr,
    tables_ptr,
    rows_ptr,
    samples_ptr,
    factors_ptr,
    grad_ptr,
    plan_ptr,
    base: tl.int64,
    length,
    batch,
    lr,
    eps,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    ELEMENT: tl.constexpr,
    ITEM: tl.constexpr,
    FIELDS: tl.constexpr,
):
    cols = tl.arange(0, WIDTH)
    for segment in range(tl.program_id(0), length, tl.num_programs(0)):
        start, end = tl.load(starts_ptr + segment), tl.load(starts_ptr + segment + 1)
        if start < end:
            fields = plan_ptr + FIELDS * tl.load(tables_ptr + start)
            columns = tl.multiple_of(tl.load(fields + 2), ALIGN)
            inside = cols < columns
            source_ptr = grad_ptr + tl.multiple_of(tl.load(fields + 3), ALIGN)
            stride = tl.multiple_of(tl.load(fields + 5), ALIGN)
            total = pool(samples_ptr, factors_ptr, source_ptr, stride, batch, start, end, cols, inside, True, ROWS, WIDTH)
            row = tl.load(rows_ptr + start)
            row_ptr = tl.multiple_of((base + tl.load(fields)).to(tl.pointer_type(ELEMENT)), ALIGN * ITEM)
            row_ptr += row * tl.multiple_of(tl.load(fields + 1), ALIGN) + cols
            if KIND == 0:
                new = total
            else:
                rate = lr
                if KIND == 2:
                    state_ptr = tl.load(fields + 4).to(tl.pointer_type(tl.float32)) + row
                    state = tl.load(state_ptr) + tl.sum(total * total, 0) / columns.to(tl.float32)
                    tl.store(state_ptr, state)
                    rate = lr / (tl.sqrt(state) + eps)
                new = tl.load(row_ptr, mask=inside, other=0.0).to(tl.float32) - rate * total
            tl.store(row_ptr, new.to(ELEMENT), mask=inside)


@triton.jit(do_not_specialize=["length", "batch"])
def _weights_kernel(
    indices_ptr,
    bags_ptr,
    counts_ptr,
    grad_ptr,
    plan_ptr,
    out_ptr,
    length,
    batch,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    ELEMENT: tl.constexpr,
    ITEM: tl.constexpr,
    FIELDS: tl.constexpr,
):
    cols = tl.arange(0, WIDTH)[None, :]
    for first in range(tl.program_id(0) * ROWS, length, tl.num_programs(0) * ROWS):
        at = first + tl.arange(0, ROWS)
        counts = tl.load(counts_ptr + at, mask=at < length, other=0) != 0
        bag = tl.load(bags_ptr + at, mask=counts, other=0)
        fields = plan_ptr + FIELDS * (bag // batch)
        inside = counts[:, None] & (cols < tl.multiple_of(tl.load(fields + 2), ALIGN)[:, None])
        row = tl.load(indices_ptr + at, mask=counts, other=0).to(tl.int64) * tl.load(fields + 1)
        row_ptr = (tl.load(fields) + row * ITEM)[:, None].to(tl.pointer_type(ELEMENT))
        row_ptr = tl.multiple_of(row_ptr, [ALIGN * ITEM, ALIGN * ITEM])
        value = tl.load(row_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        flow_at = ((bag % batch) * tl.load(fields + 5) + tl.load(fields + 3))[:, None]
        flow_at = tl.multiple_of(flow_at, [ALIGN, ALIGN])
        flow = tl.load(grad_ptr + flow_at + cols, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, tl.sum(value * flow, 1), mask=at < length)
