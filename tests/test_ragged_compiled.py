"""The kernels of splits, compiled for a GPU that need not be there: what is in their code."""

from __future__ import annotations

import re

import pytest
from compiled import for_a_gpu


@pytest.mark.parametrize("name", ["dispatch_kernel", "combine_kernel"])
@pytest.mark.parametrize("transposed", [0, 1])
def test_what_gpus_run(name: str, transposed: int) -> None:
    """Loads by TMA, products by tensor cores, rows moved 16 bytes at a time with loads ahead, flags at system scope."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from weft.kernels import ragged
    from weft.kernels.shapes import SHAPES

    blocks = SHAPES[0]
    b_block = [1, blocks.n, blocks.k] if transposed else [1, blocks.k, blocks.n]
    tile = f"tensordesc<bf16{[blocks.m, blocks.k]}>"
    whole = f"tensordesc<bf16{[blocks.m, blocks.n]}>"
    types = {
        "out_desc": whole,
        "product_desc": whole,
        "a_desc": tile,
        "landing_desc": tile,
        "b_desc": f"tensordesc<bf16{b_block}>",
        "notes_ptr": "*i64",
    }
    types |= dict.fromkeys(("a_ptr", "out_ptr", "landing_ptr", "product_ptr"), "*bf16")
    constants = {"W": 8, "E": 4, "Q": 32, "EQ": 4, "GROUP_FIELDS": 4, "PART_FIELDS": 3, "MOVE_FIELDS": 6}
    constants |= {"MOVE_ROWS": 64, "COLS": 256, "STAGES": 4, "GROUP": 8, "ALIGN": 8, "B_TRANSPOSED": transposed}
    constants |= {"BLOCK_M": blocks.m, "BLOCK_N": blocks.n, "BLOCK_K": blocks.k}
    constants |= {"ASYNCHRONOUS": 1} | ({} if name == "combine_kernel" else {"GATED": 0})
    text = str(for_a_gpu(getattr(ragged, name), constants, types, warps=blocks.warps, stages=3).asm["ptx"])
    for needed in ("wgmma.mma_async", "cp.async.bulk.tensor", "cp.async.cg", "st.global.v4.b32", "sys.release.add"):
        assert needed in text, needed
    assert "sys.acquire" in text
    # Rows of peers that TMA loads are acquired for it, too; a combine loads its own.
    assert ("fence.proxy.async.global" in text) == (name == "dispatch_kernel")
    # A tile that TMA stores is told of when it has been written, not when it has been read from shared memory.
    assert text.count("bulk.wait_group 0;") == (2 if name == "combine_kernel" else 0)
    # Triton's own waits, behind a loop of stores, have a tab; since 3.9 they are such as ours.
    assert re.search(r"bulk\.wait_group(\.read)? \t0;", text)
    assert "st.global.b16" not in text
