"""FP8 operands in predictions: their bytes and scales, their rate, and what a plan makes of both."""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest
from machine_tiny import tiny
from spans import log

import weft
from weft.core import codec
from weft.core.machine import Machine, load
from weft.core.problem import Op, Problem, Recipe, Scaling
from weft.core.schedule import Copy, Schedule, steps_of
from weft.core.work import work_bytes
from weft.perf import gemm_us, run
from weft.perf.ranking import heuristic
from weft.perf.terms import gemm_cost, streamed_cost, whole_collective_us, whole_gemm_us
from weft.planner import Plan
from weft.schedules import build

H200 = load("h200x8")
ROWWISE, BLOCKWISE = Scaling(), Scaling(recipe="blockwise")

MEASURED = (
    ((8192, 1792, 4096), 83.9),
    ((8192, 4096, 1792), 85.4),
    ((8192, 3584, 8192), 313.1),
    ((8192, 8192, 3584), 309.0),
    ((8192, 6656, 16384), 1272.4),
    ((8192, 16384, 6656), 1249.2),
    ((2048, 3584, 8192), 96.4),
    ((2048, 8192, 3584), 87.5),
    ((512, 3584, 8192), 29.9),
    ((512, 8192, 3584), 26.7),
    ((32768, 3584, 8192), 1346.5),
    ((32768, 8192, 3584), 1367.6),
)
"""M, N and K, and us of torch._scaled_mm with a scale for each row, alone on an H200, 2026-11-23."""


def llama_70b(op: Op, scaling: Scaling | None = ROWWISE, m: int = 8192) -> Problem:
    n, k = (28672, 8192) if op == "all_gather_matmul" else (8192, 28672)
    return Problem(op=op, m=m, n=n, k=k, world_size=8, scaling=scaling)


def twice_as_fast() -> Machine:
    """The made-up machine, which multiplies FP8 at twice the rate: 512 operations a us on each of two SMs."""
    machine = tiny()
    gpu = dataclasses.replace(machine.gpu, tflops={**machine.gpu.tflops, "float8": 1024e-6})
    return dataclasses.replace(machine, gpu=gpu, sources={**machine.sources, "gpu.tflops.float8": "made up"})


def test_story_rows_travel_with_their_scales() -> None:
    """4 rows of 16 bytes and a scale of 4 are 80 bytes: 1.25 us, after 2 of fixed cost. A GEMM is 4 tiles on 2 SMs, each of
    1.5 us: 4 x 4 x 16 at 512 operations a us, and 0.5."""
    problem = Problem(op="all_gather_matmul", m=8, n=32, k=16, world_size=2, scaling=ROWWISE)
    assert log(run(build(problem, "shard_p2p"), twice_as_fast()).spans) == [
        "compute: gemm 4x16x16 0 6",
        "copy: wait free[1] 0 0.5",
        "copy: copy a[0:4] -> 1 0.5 3.75",
        "copy: signal arrived[0]@1 3.75 4.25",
        "compute: wait arrived[1] 6 6.5",
        "compute: gemm 4x16x16 6.5 12.5",
        "compute: signal free[0]@1 12.5 13",
    ]


@pytest.mark.parametrize(("scaling", "row_bytes"), [(None, 2 * 8192), (ROWWISE, 8192 + 4), (BLOCKWISE, 8192 + 4 * 64)], ids=str)
def test_a_copy_of_rows_of_a_moves_elements_and_scales(scaling: Scaling | None, row_bytes: int) -> None:
    schedule = build(llama_70b("all_gather_matmul", scaling), "shard_p2p")
    sizes = {work_bytes(schedule, step) for step in steps_of(Copy, schedule.ranks[0])}
    assert sizes == {1024 * row_bytes}


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_to_all", "matmul_all_reduce"])
def test_results_travel_in_their_own_dtype(op: Op) -> None:
    for dtype in ("bfloat16", "float32"):
        plain = dataclasses.replace(llama_70b(op, None), dtype=dtype)
        scaled = dataclasses.replace(plain, scaling=ROWWISE)
        assert whole_collective_us(H200, scaled) == whole_collective_us(H200, plain)


def test_a_product_reads_bytes_and_writes_its_result() -> None:
    """256 x 256 x 4096, whose operands the cache holds: 2 x 2^20 bytes of them, and 2^16 elements of the result."""
    for out_itemsize in (2, 4):
        cost = gemm_cost(H200, rows=(256,), n=256, k=4096, dtype="float8", out_itemsize=out_itemsize)
        waves = -(-sum(cost.tiles) // cost.sms)
        moved = 2 * (1 << 20) + out_itemsize * (1 << 16)
        assert cost.memory_us * waves == pytest.approx(moved / (H200.gpu.hbm_gbps * 1e3))


def test_products_take_what_was_measured() -> None:
    off = [abs(math.log(gemm_us(H200, *sizes, "float8") / us)) for sizes, us in MEASURED]
    assert statistics.fmean(off) < 0.07
    assert max(off) < 0.16


def test_one_row_takes_half_the_time_where_weights_are_streamed() -> None:
    """One row by weights of 3584 x 8192 took 10.0 us in FP8, and 19.5 in bfloat16."""
    plain = Problem(op="matmul_all_reduce", m=1, n=3584, k=8 * 8192, world_size=8)
    scaled = dataclasses.replace(plain, scaling=ROWWISE)
    assert streamed_cost(H200, scaled, 1).memory_us == pytest.approx(streamed_cost(H200, plain, 1).memory_us / 2, rel=0.01)


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_a_plan_computes_in_half_the_time(op: Op) -> None:
    plain, rowwise, blockwise = (weft.plan(llama_70b(op, scaling), H200) for scaling in (None, ROWWISE, BLOCKWISE))
    assert 0.48 < rowwise.computation_us / plain.computation_us < 0.54
    assert 1.1 < blockwise.computation_us / rowwise.computation_us < 1.25
    assert rowwise.chosen.predicted_us < 0.7 * plain.chosen.predicted_us
    gathers = op == "all_gather_matmul"
    assert rowwise.communication_us == pytest.approx(plain.communication_us * (0.57 if gathers else 1), rel=0.02)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_schedules_and_plans_are_read_back(recipe: Recipe) -> None:
    problem = llama_70b("all_gather_matmul", Scaling(a="float8_e5m2", recipe=recipe, use_fast_accum=True))
    found = weft.plan(problem, H200)
    schedule = build(problem, found.chosen.schedule, found.chosen.chunks)
    assert codec.loads(Plan, codec.dumps(found)) == found
    assert codec.loads(Schedule, codec.dumps(schedule)) == schedule
    assert found.problem.scaling == problem.scaling


def test_problems_of_other_operands_are_others() -> None:
    scalings = (None, ROWWISE, BLOCKWISE, Scaling(a="float8_e5m2"), Scaling(use_fast_accum=True))
    problems = [llama_70b("all_gather_matmul", scaling) for scaling in scalings]
    assert len({codec.dumps(problem) for problem in problems}) == len(scalings)
    assert [codec.loads(Problem, codec.dumps(problem)) for problem in problems] == problems


def test_a_machine_without_the_rate_says_what_would_work() -> None:
    problem, a100 = llama_70b("all_gather_matmul"), load("a100x8")
    for predict in (weft.plan, heuristic, whole_gemm_us):
        arguments = (a100, problem) if predict is whole_gemm_us else (problem, a100)
        with pytest.raises(ValueError, match=r"'float8'; machine a100x8 has rates for bfloat16.*add gpu\.tflops\.float8"):
            predict(*arguments)  # type: ignore[arg-type]


def test_a_file_without_the_rates_is_read_and_plans_as_before() -> None:
    data = codec.dump(H200)
    for name in ("float8", "float8_blockwise"):
        del data["gpu"]["tflops"][name], data["sources"][f"gpu.tflops.{name}"]
    older, plain = codec.load(Machine, data), llama_70b("all_gather_matmul", None)
    assert weft.plan(plain, older) == weft.plan(plain, H200)
    with pytest.raises(ValueError, match="'float8_blockwise'"):
        weft.plan(llama_70b("all_gather_matmul", BLOCKWISE), older)
