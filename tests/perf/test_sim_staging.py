"""What the cost model adds to a kernel's own time: bounded power, torch around library calls, waking streams, copies in turns.

On the made-up machine a launch takes 3 us, a 4 x 4 tile of k = 8 1.5 us, a copy's fixed cost 2 us, and 64 bytes 1 us.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from machine_tiny import tiny

from weft.core.hardware import Tile
from weft.core.machine import Machine, load
from weft.core.problem import Problem
from weft.core.span import Span
from weft.perf import run
from weft.perf.terms import gemm_cost, gemm_us
from weft.schedules import build

GATHER = Problem(op="all_gather_matmul", m=8, n=16, k=8, world_size=2)
SCATTER = Problem(op="matmul_reduce_scatter", m=8, n=8, k=16, world_size=2)


def with_numbers(machine: Machine, *paths: str, **changes: Any) -> Machine:
    """Changed, each new number with a source."""
    return dataclasses.replace(machine, **changes, sources={**machine.sources, **dict.fromkeys(paths, "made up")})


def spans(problem: Problem, name: str, machine: Machine, kind: str, chunks: int | None = None) -> list[Span]:
    return [span for span in run(build(problem, name, chunks), machine).spans if span.kind == kind and span.rank == 0]


def test_power_bounds_what_comes_after_a_burst() -> None:
    machine = tiny()
    gpu = dataclasses.replace(machine.gpu, burst_us=3.0, sustained=0.5)
    slow = with_numbers(machine, "gpu.burst_us", "gpu.sustained", gpu=gpu)
    assert (gpu.paced_us(2.0), gpu.paced_us(3.0), gpu.paced_us(7.0)) == (2.0, 3.0, 11.0)
    # 8 x 16 by 8: eight tiles on two SMs, 6 us at full rate, of which the last 3 take twice as long.
    assert gemm_us(machine, 8, 16, 8, "bfloat16") == 3.0 + 6.0
    assert gemm_us(slow, 8, 16, 8, "bfloat16") == 3.0 + 9.0
    whole = spans(GATHER, "shard_p2p", machine, "gemm")
    bound = spans(GATHER, "shard_p2p", slow, "gemm")
    # Two matmuls of 1.5 us: the burst lasts for both; of four such the last two are slow.
    assert [one.duration_us for one in whole] == [one.duration_us for one in bound] == [4.5, 4.5]
    wide = dataclasses.replace(GATHER, n=32)
    assert [one.duration_us for one in spans(wide, "shard_p2p", slow, "gemm")] == [6.0, 9.0]
    for pair in ({"burst_us": 3.0}, {"burst_us": 3.0, "sustained": 1.5}):
        with pytest.raises(ValueError, match="give both, sustained at most 1, or neither"):
            dataclasses.replace(machine.gpu, **pair)


def test_a_kernel_of_wefts_has_its_own_tiles_and_libraries_may_cut_k() -> None:
    machine = tiny()
    gpu = dataclasses.replace(machine.gpu, kernel_tiles=(Tile(rows=8, cols=8, efficiency=1.0),), shared_bytes=1 << 16)
    own = with_numbers(machine, "gpu.kernel_tiles", "gpu.shared_bytes", gpu=gpu)
    sizes: Any = {"rows": (4, 4), "n": 16, "k": 8, "dtype": "bfloat16"}
    assert gemm_cost(own, **sizes).tiles == (4, 4)
    assert gemm_cost(own, **sizes, flags=True).tiles == (2, 2)
    h200 = load("h200x8")
    few: Any = {"rows": (136,), "n": 6144, "dtype": "bfloat16"}
    assert gemm_cost(h200, **few, k=16384).busy_us < 1.2 * gemm_cost(h200, **few, k=12288).busy_us, "cut in two"
    assert gemm_cost(h200, **few, k=12288).busy_us > 1.4 * gemm_cost(h200, **few, k=8192).busy_us, "whole"


def test_rows_apart_are_staged_where_torch_calls_a_library() -> None:
    """A step's product has rows of two ranks: two kernels put them in their places."""
    staged = dataclasses.replace(tiny(), stages=True)
    plain = [one.duration_us for one in spans(GATHER, "uniform_fused_1d", tiny(), "gemm", 2)]
    assert plain == pytest.approx([4.5, 4.5])
    assert [one.duration_us for one in spans(GATHER, "uniform_fused_1d", staged, "gemm", 2)] == pytest.approx([10.5, 10.5])
    # One of weft's kernels, and a matmul whose rows lie together, need nothing.
    for name in ("flag_gated", "shard_p2p", "sequential"):
        assert run(build(GATHER, name), staged).total_us == run(build(GATHER, name), tiny()).total_us


@pytest.mark.parametrize(("problem", "kernels"), [(GATHER, 4), (SCATTER, 4)])
def test_uneven_shards_are_padded_around_nccls_collective(problem: Problem, kernels: int) -> None:
    staged, uneven = dataclasses.replace(tiny(), stages=True), dataclasses.replace(problem, m=7)
    more = run(build(uneven, "sequential"), staged).total_us - run(build(uneven, "sequential"), tiny()).total_us
    assert more == pytest.approx(3.0 * kernels, abs=0.1)
    assert run(build(problem, "sequential"), staged).total_us == run(build(problem, "sequential"), tiny()).total_us


def test_a_copy_lane_that_waited_wakes_late() -> None:
    slow, slower = (with_numbers(tiny(), "wake_us", wake_us=us) for us in (2.0, 7.0))
    early, late, latest = (spans(SCATTER, "shard_p2p", machine, "copy")[0].start_us for machine in (tiny(), slow, slower))
    assert late == pytest.approx(early + 2.0)
    assert early + 2.0 < latest < early + 7.0  # it has waited for less than 7 us
    # Its flag is up when it comes to it: nothing wakes.
    early, late = (spans(GATHER, "shard_p2p", machine, "copy")[0].start_us for machine in (tiny(), slow))
    assert late == pytest.approx(early)


def test_copies_in_turns_take_longer() -> None:
    """Two rounds to two peers: a half more of `turning`. One round, or one peer, is as before."""
    problem = Problem(op="all_gather_matmul", m=12, n=12, k=8, world_size=3)
    machine = tiny(world_size=3, link_gbps=0.064)
    copies = dataclasses.replace(machine.copies, gbps=0.064, several_gbps=0.064)
    uniform = dataclasses.replace(machine, copies=copies)
    turning = with_numbers(uniform, "copies.turning", copies=dataclasses.replace(copies, turning=1.0))
    for chunks, slower in ((1, 1.0), (2, 1.5)):
        before, after = (spans(problem, "hetero_unfused_1d", on, "copy", chunks)[0].duration_us for on in (uniform, turning))
        assert after - 2.0 == pytest.approx(slower * (before - 2.0), rel=1e-3)
    pair = dataclasses.replace(problem, world_size=2)
    assert (
        run(build(pair, "hetero_unfused_1d", 2), turning).total_us == run(build(pair, "hetero_unfused_1d", 2), uniform).total_us
    )


def test_rows_around_the_own_ones_are_copied_in_two_runs() -> None:
    """Of four ranks' shards the first and the last rank's peers have rows that follow each other; the others' lie around their
    own: two kernels put the product of three pieces in its places. The pieces themselves land together."""
    problem = dataclasses.replace(GATHER, m=16, world_size=4)
    staged = dataclasses.replace(tiny(world_size=4), stages=True)
    plain, more = (
        [
            [
                span.duration_us
                for span in run(build(problem, "hetero_fused_1d", 1), machine).spans
                if (span.rank, span.kind) == (rank, "gemm")
            ]
            for rank in range(4)
        ]
        for machine in (tiny(world_size=4), staged)
    )
    added = [after[1] - before[1] for before, after in zip(plain, more, strict=True)]
    assert added == pytest.approx([0.0, 6.0, 6.0, 0.0], abs=0.01)
