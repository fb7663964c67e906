"""The GEMM kernel, interpreted on the CPU: alone, and as a step of schedules across rank processes."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from rank_pools import interpreted_ranks
from rank_work import check_both, check_scatter

import weft
from weft.runtime.ranks import Ranks

pytestmark = pytest.mark.ranks
FUSED = ("flag_gated:2", "track_and_trigger:2", "direct_store:2", "sequential_stores", "flag_gated_2d:2")


interpreted = interpreted_ranks([2], slow=[3])


def _fused_schedules() -> tuple[int, int]:
    """Every family with a fused GEMM, on shapes with whole and ragged tiles; how often it ran, and with half tiles.

    The first shape comes back after a larger one, for which memory that its tables point into has grown and moved.
    """
    from weft.kernels import gemm
    from weft.perf.shapes import TileShape
    from weft.runtime import fused

    assert os.environ["TRITON_INTERPRET"] == "1"
    launches = halved = 0
    whole_tiles = gemm.whole_tiles

    def cut(tiles: int, at_once: int, blocks: TileShape) -> int:
        nonlocal halved
        whole = whole_tiles(tiles, at_once, blocks)
        halved += whole < tiles
        return whole

    gemm.whole_tiles = cut
    kinds = (fused.FusedGemm, fused.FusedSum)
    launch = {kind: kind.launch for kind in kinds}

    def counted(self: fused.FusedStep, *arguments: object, **options: object) -> None:
        nonlocal launches
        launches += 1
        launch[type(self)](self, *arguments, **options)  # type: ignore[index, arg-type]

    for kind in kinds:
        kind.launch = counted  # type: ignore[method-assign]
    try:
        for call, (m, n, k) in enumerate(((64, 80, 48), (128, 96, 64), (64, 80, 48))):
            for name in FUSED[:2] if call == 2 else FUSED:
                check_both(m, n, k, torch.float16, name, call)
    finally:
        for kind in kinds:
            kind.launch = launch[kind]  # type: ignore[method-assign]
        gemm.whole_tiles = whole_tiles
    return launches, halved


def test_fused_schedules_run_as_kernels(interpreted: Ranks) -> None:
    for launches, halved in interpreted.run(_fused_schedules):
        assert launches >= 12
        assert halved >= 3


def _rows_of_one_rank() -> None:
    """One row of each entry of a batch: all are one rank's, and each of the kernel's tiles adds what peers have sent."""
    for chunks in (1, 2, 3):
        for batch in (2, 40):
            check_scatter(1, 24, 16, torch.float16, f"direct_store:{chunks}", batch, batch=batch)


def test_rows_that_are_one_ranks_alone(interpreted: Ranks) -> None:
    interpreted.run(_rows_of_one_rank)


def _no_columns() -> list[tuple[int, ...]]:
    """One of several b has none: on all ranks, or on one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    a, b, none = (torch.ones(*shape, dtype=torch.float16) for shape in ((8, 64), (64, 32), (64, 0)))
    shapes = []
    for second in (none, b if rank else none):
        outs = weft.all_gather_matmul(a, [b, second], schedule="flag_gated:1")
        shapes.append(tuple(out.shape[1] for out in outs))
        assert all(torch.equal(out, torch.full((8 * size, out.shape[1]), 64.0, dtype=torch.float16)) for out in outs)
    weft.close()
    return shapes


def test_a_matrix_without_columns_among_several(interpreted: Ranks) -> None:
    first, *others = interpreted.run(_no_columns)
    assert first == [(32, 0), (32, 0)]
    assert others == [[(32, 0), (32, 32)]] * len(others)
