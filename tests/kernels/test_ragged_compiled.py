"""The kernels of splits, compiled for a GPU that need not be there: what is in their code."""

from __future__ import annotations

import pytest
from compiled import for_a_gpu


@pytest.mark.parametrize("name", ["dispatch_kernel", "combine_kernel"])
@pytest.mark.parametrize("transposed", [0, 1])
def test_what_gpus_run(name: str, transposed: int) -> None:
    """Loads by TMA, products by tensor cores, rows moved 16 bytes at a time with loads ahead, flags at system scope."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from kernel_examples import ragged_example

    from weft.core.capabilities import H200
    from weft.kernels.shapes import SHAPES

    example = ragged_example(name, SHAPES[0], H200, transposed=bool(transposed))
    made = for_a_gpu(example.kernel, example.constants, example.types, warps=example.warps, stages=example.stages)
    text = str(made.asm["ptx"])
    for needed in ("wgmma.mma_async", "cp.async.bulk.tensor", "cp.async.cg", "st.global.v4.b32", "sys.release.add"):
        assert needed in text, needed
    assert "sys.acquire" in text
    # Rows of peers that TMA loads are acquired for it, too; a combine loads its own.
    assert ("fence.proxy.async.global" in text) == (name == "dispatch_kernel")
    # A tile that TMA stores is told of when it has been written, not when it has been read from shared memory.
    assert text.count("bulk.wait_group 0;") == (2 if name == "combine_kernel" else 0)
    assert "st.global.b16" not in text
