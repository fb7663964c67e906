"""This kernel sums runs in the order of ranks, on a fixed number of SMs. A run is a contiguous range of elements of each rank.

    _sum_runs_kernel   one block per SM; for each tile: load all sources, add in float32, divide, round once, store
    sum_runs()         its launcher; RunTable  the addresses of a step's fixed sources

A collective's sum should occupy few SMs while other kernels run, with many bytes in flight on each. So blocks have 16 warps,
each with two loads of 16 bytes for each source. The kernel never waits, because its stream has waited before.

One source is the caller's own tensor, and the result may be the caller's, too. Their addresses change from call to call and are
arguments. Triton knows only their alignment, of which there are two variants: all addresses are multiples of 16 bytes, or any.
Both are loaded before the first call that may wait (`load`), because loading a kernel waits for all streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weft.kernels.launch import Launcher
from weft.triton.flags import table

_WARPS = 16
_TILE, _INTERPRETED_TILE = 8192, 128
_VECTOR_BYTES = 16
_ELEMENTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True, kw_only=True)
class RunTable:
    """A RunTable describes the sources of a sum.

    addresses: the address of each source, in order, on the device.
    own: the number of the caller's source. Its entry in addresses is unused.
    sources: the number of sources.
    aligned: whether the other addresses are multiples of 16 bytes.
    dtype: the dtype of the sources and of the result.
    tile: the elements of a tile.
    """

    addresses: torch.Tensor
    own: int
    sources: int
    aligned: bool
    dtype: torch.dtype
    divide_by: int
    tile: int


def run_table(addresses: Sequence[int], *, own: int, dtype: torch.dtype, divide_by: int, device: torch.device) -> RunTable:
    """Build the table of a sum. own: the number of the source whose address is passed at each launch."""
    return RunTable(
        addresses=table(list(addresses), torch.int64, device),
        own=own,
        sources=len(addresses),
        aligned=all(address % _VECTOR_BYTES == 0 for number, address in enumerate(addresses) if number != own),
        dtype=dtype,
        divide_by=divide_by,
        tile=_TILE if device.type == "cuda" else _INTERPRETED_TILE,
    )


def load(plan: RunTable, *, launched_by: Launcher, address: int) -> None:
    """Compile and load both variants. address: any address, which is not accessed."""
    for align in {1, _vector(plan)}:
        _launch(plan, address, address, 0, 0, align, 1, launched_by, None)


def sum_runs(plan: RunTable, *, own: int, out: int, elements: int, sms: int, launched_by: Launcher, stream: int | None) -> None:
    """Store the sum of the first `elements` of all sources, divided, at out.

    own, out: the addresses of the caller's source and of the result, which may be equal.
    sms: the number of SMs and of blocks.
    launched_by, stream: as for weft.kernels.gemm.gemm.
    """
    assert elements <= 1 << 30, elements
    vector = _vector(plan) if plan.aligned and own % _VECTOR_BYTES == out % _VECTOR_BYTES == 0 else 1
    whole = elements // vector * vector
    if whole:
        _launch(plan, own, out, 0, whole, vector, sms, launched_by, stream)
    if whole < elements:
        _launch(plan, own, out, whole, elements, 1, 1, launched_by, stream)


def _vector(plan: RunTable) -> int:
    return _VECTOR_BYTES // plan.dtype.itemsize


def _launch(
    plan: RunTable,
    own: int,
    out: int,
    first: int,
    last: int,
    align: int,
    sms: int,
    launched_by: Launcher,
    stream: int | None,
) -> None:
    blocks = max(1, min(sms, -(-(last - first) // plan.tile)))
    constants = {
        "SOURCES": plan.sources,
        "OWN": plan.own,
        "DIVIDE_BY": plan.divide_by,
        "ELEMENT": _ELEMENTS[plan.dtype],
        "TILE": plan.tile,
        "ALIGN": align,
    }
    arguments = (plan.addresses, own, out, first // align, last // align)
    key = (plan.sources, plan.own, plan.divide_by, plan.dtype, align)
    launched_by(_sum_runs_kernel, blocks, arguments, constants, key=key, stream=stream, num_warps=_WARPS)


@triton.jit(do_not_specialize=["own", "out", "first", "last"])
def _sum_runs_kernel(
    addresses_ptr,
    own,
    out,
    first,
    last,
    SOURCES: tl.constexpr,
    OWN: tl.constexpr,
    DIVIDE_BY: tl.constexpr,
    ELEMENT: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    WIDTH: tl.constexpr = ALIGN * ELEMENT.primitive_bitwidth // 8
    # Passed divided by ALIGN, because the compiler accepts no alignment hint on an argument.
    low = first * ALIGN
    high = last * ALIGN
    for tile in range(tl.program_id(0), tl.cdiv(high - low, TILE), tl.num_programs(0)):
        at = low + tile * TILE + tl.arange(0, TILE)
        inside = at < high
        total = tl.zeros((TILE,), tl.float32)
        for source in tl.static_range(SOURCES):
            address = own if source == OWN else tl.load(addresses_ptr + source)
            here = tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), WIDTH)
            # Bypass this SM's L1 cache, which may hold data of an earlier call.
            total += tl.load(here + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        if DIVIDE_BY != 1:
            total = tl.div_rn(total, DIVIDE_BY * 1.0)
        there = tl.multiple_of(out.to(tl.pointer_type(ELEMENT)), WIDTH)
        tl.store(there + at, total.to(ELEMENT), mask=inside)
