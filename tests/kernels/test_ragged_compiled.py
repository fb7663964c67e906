"""The kernels of splits, compiled for a GPU that need not be there: what is in their code."""

from __future__ import annotations

import devices
import pytest
import torch
from compiled import for_a_gpu

from weft.compat.device import capabilities


@pytest.mark.parametrize("name", ["dispatch_kernel", "combine_kernel"])
@pytest.mark.parametrize("transposed", [0, 1])
def test_what_gpus_run(name: str, transposed: int) -> None:
    """Loads by TMA, products by tensor cores, rows moved 16 bytes at a time with loads ahead, flags at system scope."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from devices import BLOCK_OF_H200
    from kernel_examples import ragged_example

    from weft.perf.shapes import SHAPES

    example = ragged_example(name, SHAPES[0], BLOCK_OF_H200, transposed=bool(transposed))
    made = for_a_gpu(example.kernel, example.constants, example.types, warps=example.warps, stages=example.stages)
    text = str(made.asm["ptx"])
    for needed in ("wgmma.mma_async", "cp.async.bulk.tensor", "cp.async.cg", "st.global.v4.b32", "sys.release.add"):
        assert needed in text, needed
    assert "sys.acquire" in text
    # Rows of peers that TMA loads are acquired for it, too; a combine loads its own.
    assert ("fence.proxy.async.global" in text) == (name == "dispatch_kernel")
    # A tile that TMA stores is signalled after it has been written; having been read from shared memory does not suffice.
    assert text.count("bulk.wait_group 0;") == (2 if name == "combine_kernel" else 0)
    assert "st.global.b16" not in text


@pytest.mark.parametrize("name", ["dispatch_kernel", "combine_kernel", "push_kernel", "collect_kernel"])
def test_fp8_on_gpus(name: str) -> None:
    """Products of FP8 by tensor cores, two in turn, rows moved 16 bytes at a time; scales are stored before the flag."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from kernel_examples import examples

    module = "ragged" if name in ("dispatch_kernel", "combine_kernel") else "ragged_rows"
    with devices.pretend(devices.H200):
        gpu = capabilities(torch.device("cuda"))
        found = [
            one
            for one in examples(module, gpu)
            if one.kernel.__name__ == name and ("float8" in one.words or "FP8" in one.words)
        ]
    assert found
    for one in found:
        made = for_a_gpu(one.kernel, one.constants, one.types, warps=one.warps, stages=one.stages)
        text = str(made.asm["ptx"])
        if module == "ragged":
            a, _, b = one.words.split(",")[0].partition(" by ")
            kinds = "".join(f".{ {'float8_e4m3fn': 'e4m3', 'float8_e5m2': 'e5m2'}[kind] }" for kind in (a, b))
            assert f"k32.f32{kinds}" in text, one.words
        if name != "combine_kernel":
            assert "cp.async.cg" in text, one.words
            assert "st.global.v4.b32" in text, one.words
            assert "st.global.b8" not in text, one.words
