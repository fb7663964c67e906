"""The kernel of sums, compiled for a GPU that need not be there."""

from __future__ import annotations

import re
from typing import Any

import pytest
from compiled import for_a_gpu

triton = pytest.importorskip("triton", reason="Triton is not installed")


def compiled(align: int, sources: int, element: Any, *, own: int = 1) -> Any:
    """For an H100, with its table of addresses at a multiple of 16 bytes and nothing known of all else."""
    from weft.kernels import sums

    constants = {"SOURCES": sources, "OWN": own, "DIVIDE_BY": 4, "ELEMENT": element, "RESULT": element, "ALIGN": align}
    rows, cols, warps = (1, 8192, 16) if own >= 0 else (4, 1024, 8)
    constants |= {"ROWS": rows, "COLS": cols, "FIELDS": sums._FIELDS, "BIAS": own < 0, "RESIDUAL": own < 0}
    types = {"addresses_ptr": "*i64", **dict.fromkeys(("own", "out", "bias", "residual"), "i64")}
    return for_a_gpu(sums._sum_kernel, constants, types, warps=warps)


@pytest.mark.parametrize("own", [1, -1])
@pytest.mark.parametrize(("align", "wide", "narrow"), [(8, (8, 2), 0), (1, (0, 0), 64)])
def test_loads_are_16_bytes_wide_where_addresses_allow(align: int, wide: tuple[int, int], narrow: int, own: int) -> None:
    """Runs, and regions: each thread has 16 elements of each of four sources, which are two loads of 16 bytes, or 16 of 2."""
    text = compiled(align, 4, triton.language.bfloat16, own=own).asm["ptx"]
    assert (len(re.findall(r"ld\.global\.cg\.v4\.b32", text)), len(re.findall(r"st\.global\.v4\.b32", text))) == wide
    assert len(re.findall(r"ld\.global\.cg\.b16", text)) == narrow


def test_divides_exactly() -> None:
    assert "div.rn.f32" in compiled(8, 4, triton.language.bfloat16).asm["ptx"]
