"""Predictions end, however large the sizes: waves that are alike are counted, not walked, and come to the same."""

from __future__ import annotations

import dataclasses
import heapq

import pytest
from devices import BLOCK_OF_H200
from hypothesis import given
from hypothesis import strategies as st

from weft.core.machine import load
from weft.core.problem import OPS, Op, Problem
from weft.core.schedule import Gemm
from weft.perf.kernels import Ends, FreeSms
from weft.perf.shapes import SHAPES, Arriving, _gated_us, _numbers, _opens, _sent_us, shape_of, whole_tiles
from weft.planner import plan
from weft.schedules import MOST_PIECES, MOST_RANKS, build, candidates

H200 = load("h200x8")
LARGE = 10**9


@given(sms=st.integers(1, 12), groups=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 30), st.integers(0, 2000))))
def test_tiles_given_out_at_once_end_as_one_by_one(sms: int, groups: list[tuple[int, int, int]]) -> None:
    blocks, free = FreeSms(sms, 0), [0] * sms
    for tiles, takes_ns, not_before in groups:
        ends = Ends(takes_ns, not_before)
        one_by_one = [ends(heapq.heappushpop(free, ends(free[0]))) for _ in range(tiles)]
        assert blocks.take(tiles, ends) == ((one_by_one[0], one_by_one[-1]) if tiles else (0, 0))


def _walked_us(parts: tuple[Arriving, ...], ready_us: list[float], tile_us: float, step: int, width: int) -> float:
    """Tile by tile, in the kernel's order: groups of `step` row tiles, column by column, on 132 blocks in turns."""
    rows = [number for number, part in enumerate(parts) for _ in range(-(-part.rows // 64))]
    groups = [rows[first : first + step] for first in range(0, len(rows), step)]
    order = [number for group in groups for _ in range(-(-parts[0].cols // width)) for number in group]
    free = [0.0] * 132
    for tile, number in enumerate(order):
        free[tile % 132] = max(free[tile % 132], ready_us[number]) + tile_us
    return max(free)


@pytest.mark.parametrize("group", [8, 3])
@pytest.mark.parametrize("rows", [(64,) * 4, (640, 200, 64, 2000), (4096, 0, 100, 64 * 131), (64 * 264,) * 2])
def test_a_gated_step_ends_as_its_tiles_one_by_one(rows: tuple[int, ...], group: int) -> None:
    blocks = dataclasses.replace(SHAPES[3], group=group)
    parts = tuple(Arriving(count, 1000, number > 0, (64,)) for number, count in enumerate(rows))
    arrived_us, now, numbers = [0.0], 0.0, _numbers(H200, 132)
    for count in rows[1:]:
        now += numbers.copy_us + count * 64 * 2 / numbers.copied
        arrived_us.append(now)
    tile_us = numbers.whole_us(blocks, 64, stored=True)
    walked_us = _walked_us(parts, arrived_us, tile_us, group, 128)
    assert _gated_us(parts, blocks, numbers, stored=True) == pytest.approx(walked_us, rel=1e-9)


def test_slices_are_waited_for_one_after_the_other() -> None:
    """Columns of 2 us each, slices that end at 4 and 10 and are there at 30 and 31: 30 + 20; or there at 0 and 50: 50 + 12."""
    assert _opens((4, 10), (30.0, 31.0), 2.0) + 10 * 2.0 == 50.0
    assert _opens((4, 10), (0.0, 50.0), 2.0) + 10 * 2.0 == 62.0


@pytest.mark.parametrize("m", [100, 40000])
@pytest.mark.parametrize("k", [4096])
@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_tiles_that_are_sent_end_as_wave_by_wave(number: int, k: int, m: int) -> None:
    shape = SHAPES[number]
    parts = tuple(Arriving(m // 4, 4096, False, (k,), away) for away in (True, True, True, False))
    counts = [(-(-part.rows // shape.m) * -(-part.cols // shape.n), part.away) for part in parts]
    away, total = sum(tiles for tiles, leaves in counts if leaves), sum(tiles for tiles, _ in counts)
    numbers = _numbers(H200, 132)
    tile_us = numbers.whole_us(shape, k)
    now = sent = 0.0
    for first in range(0, total, 132):
        now += tile_us * H200.gpu.half_tile if first >= whole_tiles(total, 132, shape) else tile_us
        leaving = max(0, min(away - first, 132))
        sent = max(sent, now) + leaving * shape.m * shape.n * 2 / numbers.sent if leaving else sent
    assert _sent_us(parts, shape, numbers) == pytest.approx(max(now, sent), rel=1e-9)


@pytest.mark.parametrize("extent", [pytest.param("m", marks=pytest.mark.slow), "n", pytest.param("k", marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", OPS[:1])
def test_a_plan_ends_soon_whatever_the_extent(op: Op, extent: str) -> None:
    found = plan(dataclasses.replace(Problem(op=op, m=4096, n=4096, k=4096, world_size=8), **{extent: LARGE}), H200)
    assert found.chosen.predicted_us <= found.sequential_us
    assert found.chosen.predicted_us > 0.95 * found.ideal_us


def test_a_shape_is_found_soon_whatever_the_extent() -> None:
    for name in ("flag_gated", "flag_gated_2d", "direct_store"):
        for op in ("all_gather_matmul", "matmul_reduce_scatter"):
            if (name, op) != ("flag_gated_2d", "matmul_reduce_scatter"):
                schedule = build(Problem(op=op, m=LARGE, n=LARGE, k=4096, world_size=8), name, 4)
                assert (
                    shape_of(next(step for _, _, _, step in schedule if isinstance(step, Gemm)), BLOCK_OF_H200, H200) in SHAPES
                )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world_size", [9, pytest.param(64, marks=pytest.mark.slow)])
def test_candidates_of_many_ranks_have_few_pieces(op: Op, world_size: int) -> None:
    found = candidates(Problem(op=op, m=4096, n=4096, k=4096, world_size=world_size))
    assert len({schedule.name for schedule in found}) > 1
    assert max(schedule.chunks for schedule in found) in (1, min(2 * world_size, MOST_PIECES // world_size**2))


@pytest.mark.slow
def test_a_plan_of_many_ranks_says_what_was_not_considered() -> None:
    """What a candidate takes grows with the square of the ranks."""
    large = dataclasses.replace(H200, world_size=256)
    problem = Problem(op="all_gather_matmul", m=8192, n=8192, k=8192, world_size=256)
    found = plan(problem, large)
    assert [one.spec for one in found.candidates] == ["sequential"]
    assert str(MOST_RANKS) in found.why
    assert str(MOST_RANKS) not in plan(dataclasses.replace(problem, world_size=8), H200).why
    assert {schedule.chunks for schedule in candidates(problem, only="uniform_fused_2d")} == {1}
