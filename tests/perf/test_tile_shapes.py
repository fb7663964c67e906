"""The tile shape of a GEMM step: smaller tiles where its last chunk arrives late, the largest where there is work enough."""

from __future__ import annotations

import pytest
import torch

from weft.core.machine import load
from weft.core.problem import Problem
from weft.core.schedule import Gemm
from weft.schedules import build

pytest.importorskip("triton", reason="Triton is not installed")
from weft.kernels.gemm import blocks_for
from weft.perf.shapes import SHAPES, tiles_of

GPU = torch.device("cuda")
H200 = load("h200x8")
pytestmark = pytest.mark.usefixtures("on_an_h200")


def first_gemm(m: int, name: str, world_size: int = 4, chunks: int = 1) -> Gemm:
    schedule = build(Problem(op="all_gather_matmul", m=m, n=28672, k=8192, world_size=world_size), name, chunks)
    return next(step for _, _, _, step in schedule if isinstance(step, Gemm))


def test_large_steps_take_the_largest_tiles() -> None:
    for name in ("flag_gated", "sequential"):
        assert (blocks_for(first_gemm(8192, name), GPU, H200).m, blocks_for(first_gemm(8192, name), GPU, H200).n) == (128, 256)


def test_a_gated_step_of_one_wave_is_cut_finer() -> None:
    """With one wave, the tiles of the last chunk would all start when it arrives."""
    plain, gated = blocks_for(first_gemm(512, "sequential"), GPU, H200), blocks_for(first_gemm(512, "flag_gated"), GPU, H200)
    assert (plain.m, plain.n) == (128, 256)
    assert gated.m * gated.n < plain.m * plain.n
    assert gated.group * gated.m < 512, "row tiles of the own shard must not take turns with those of the last chunk"


def test_a_step_of_slices_keeps_the_largest_tiles_in_one_wave() -> None:
    """Its tiles all start with the first slices. 116 SMs are left to it: 4 x 28 tiles of 128 x 256, or 8 x 14 of 64 x 256."""
    for world_size, shape in ((4, (128, 256)), (8, (64, 256))):
        blocks = blocks_for(first_gemm(512, "flag_gated_2d", world_size, chunks=4), GPU, H200)
        assert (blocks.m, blocks.n) == shape


@pytest.mark.parametrize("m", [1, 512, 8192])
@pytest.mark.parametrize("world_size", [3, 8])
def test_every_rank_chooses_alike(m: int, world_size: int) -> None:
    schedule = build(Problem(op="all_gather_matmul", m=m, n=world_size * 640, k=512, world_size=world_size), "flag_gated", 2)
    steps = [step for _, _, _, step in schedule if isinstance(step, Gemm)]
    full = [step for step in steps if len(step.parts) == max(len(s.parts) for s in steps)]
    assert len({blocks_for(step, GPU, H200) for step in full}) == 1
    assert all((b.m, b.n) in {(s.m, s.n) for s in SHAPES} for b in map(lambda s: blocks_for(s, GPU, H200), steps))  # noqa: C417
    assert all(tiles_of(part, blocks_for(step, GPU, H200)) > 0 for step in steps for part in step.parts)


def test_tiles_that_threads_store_are_large() -> None:
    """8192 x 4256, a count each: 64 x 256 fills its waves best, but ran 24% longer than 128 x 256 on 4 x H200."""
    schedule = build(Problem(op="matmul_reduce_scatter", m=8192, n=4256, k=17024, world_size=4), "track_and_trigger", 1)
    step = next(step for _, _, _, step in schedule if isinstance(step, Gemm))
    assert (blocks_for(step, GPU, H200).m, blocks_for(step, GPU, H200).n) == (128, 256)
