"""The GEMM kernel, interpreted on the CPU: alone, and as a step of schedules across rank processes."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from launch_counts import counting
from rank_pools import interpreted_ranks, on_ranks
from rank_work import check_both, check_scatter

import weft
from weft.runtime.ranks import Ranks

pytestmark = pytest.mark.ranks
FUSED = ("flag_gated:2", "track_and_trigger:2", "direct_store:2", "sequential_stores", "flag_gated_2d:2")


interpreted = interpreted_ranks([2], slow=[3])


@on_ranks(pool="interpreted")
def test_fused_schedules_run_as_kernels() -> None:
    """Every family with a fused GEMM, on shapes with whole and ragged tiles, some of them halved.

    The first shape comes back after a larger one, for which memory that its tables point into has grown and moved.
    """
    from weft.kernels import gemm
    from weft.perf.shapes import TileShape
    from weft.runtime import fused

    assert os.environ["TRITON_INTERPRET"] == "1"
    halved = 0
    whole_tiles = gemm.whole_tiles

    def cut(tiles: int, at_once: int, blocks: TileShape) -> int:
        nonlocal halved
        whole = whole_tiles(tiles, at_once, blocks)
        halved += whole < tiles
        return whole

    with mock.patch.object(gemm, "whole_tiles", cut), counting(fused.FusedGemm, fused.FusedSum) as launches:
        for call, (m, n, k) in enumerate(((64, 80, 48), (128, 96, 64), (64, 80, 48))):
            for name in FUSED[:2] if call == 2 else FUSED:
                check_both(m, n, k, torch.float16, name, call)
    assert launches.count >= 12
    assert halved >= 3


@on_ranks(pool="interpreted")
def test_rows_that_are_one_ranks_alone() -> None:
    """One row of each entry of a batch: all are one rank's, and each of the kernel's tiles adds what peers have sent."""
    for chunks in (1, 2, 3):
        for batch in (2, 40):
            check_scatter(1, 24, 16, torch.float16, f"direct_store:{chunks}", batch, batch=batch)


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
