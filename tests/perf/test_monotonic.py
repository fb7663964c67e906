"""A machine of which one number is better is never predicted to be slower, but for what list scheduling may lose.

Starting a step sooner may start another one later, so that a schedule can lose a little when something gets faster.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weft.core.machine import Machine, load
from weft.core.problem import Op, Problem
from weft.core.schedule import Schedule
from weft.perf import run
from weft.schedules import FAMILIES, build

H200 = load("h200x8")
TOLERANCE = 0.02
ANOMALY = 0.09
"""The most that an exception may lose."""
_LONG_WAVE = "a copy by kernel waits for the end of a wave: a GEMM that memory binds is one long one in place of two short ones"
_BEFORE_THE_END = "a copy by kernel that comes earlier comes before the end of a wave, and waits for it"
_LARGER_TILES = "the kernel takes the tiles with which its product ends first: one wave of larger ones; parts come later"
_ONE_WAVE = "one wave stores what two did, and nothing is computed meanwhile"
EXCEPTIONS = {
    ("gpu.sms", "uniform_fused_2d", "all_gather_matmul"): _LONG_WAVE,
    ("gpu.tflops.bfloat16", "uniform_fused_2d", "all_gather_matmul"): _LONG_WAVE,
    ("gpu.sms", "track_and_trigger", "matmul_all_to_all"): _LARGER_TILES,
    ("gpu.sms", "direct_store", "matmul_reduce_scatter"): _ONE_WAVE,
    ("links.gbps", "hetero_unfused_1d", "matmul_all_to_all"): _BEFORE_THE_END,
    ("copies.copy_us", "hetero_unfused_1d", "matmul_all_to_all"): _BEFORE_THE_END,
    ("wake_us", "hetero_unfused_1d", "matmul_all_to_all"): _BEFORE_THE_END,
    ("gpu.tile_us", "uniform_fused_2d", "matmul_reduce_scatter"): _BEFORE_THE_END,
}
"""By number, schedule and operator: why list scheduling loses more than TOLERANCE on some problem."""
RATES = (
    *("links.gbps", "copies.gbps", "copies.several_gbps", "gpu.hbm_gbps", "gpu.sms", "gpu.tflops.bfloat16", "kernels.sm_gbps"),
    *("gpu.l2_bytes", "stores.gbps"),
)
COSTS = (
    *("copies.copy_us", "launch_us", "flag_us", "wake_us", "fork_us", "links.latency_us", "gpu.tile_us"),
    *("stores.stall", "kernels.exchange_us"),
)
OPERATORS: tuple[Op, ...] = (
    *("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_to_all_matmul", "matmul_all_to_all"),
)
SIZES = ((512, 3584, 4096), (4096, 7168, 2048))


def better(path: str) -> Machine:
    if path == "stores.gbps":
        return H200.what_if({path: [[sms, 2 * gbps] for sms, gbps in H200.stores.gbps]})
    value: object = H200
    for name in path.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    assert isinstance(value, (int, float))
    return H200.what_if({path: 2 * value if path in RATES else value / 2})


def schedules(sizes: tuple[tuple[int, int, int], ...], ranks: tuple[int, ...]) -> Iterator[Schedule]:
    for op in OPERATORS:
        for name, family in FAMILIES.items():
            for world_size in ranks:
                for m, n, k in sizes:
                    problem = Problem(op=op, m=m, n=n, k=k, world_size=world_size)
                    if op in family.builders and name != "node_slices":
                        yield build(problem, name)


Slower = tuple[float, str]


def slower(path: str, sizes: tuple[tuple[int, int, int], ...], ranks: tuple[int, ...]) -> tuple[int, list[Slower]]:
    """How many schedules there are, and by how much those that are slower are slower, but for EXCEPTIONS."""
    machine, found, count = better(path), list[Slower](), 0
    for schedule in schedules(sizes, ranks):
        before, after = run(schedule, H200).total_us, run(schedule, machine).total_us
        count += 1
        excepted = (path, schedule.name, schedule.problem.op) in EXCEPTIONS
        if after > (1 + (ANOMALY if excepted else TOLERANCE)) * before:
            found.append((after / before - 1, f"{schedule.name} for {schedule.problem}: {before:.1f} -> {after:.1f} us"))
    return count, found


@pytest.mark.parametrize("path", [*RATES, *COSTS])
def test_what_is_better_is_not_slower(path: str) -> None:
    count, found = slower(path, SIZES[:1], (4,))
    assert count >= 40
    assert not found


@pytest.mark.slow
@pytest.mark.parametrize("path", [*RATES, *COSTS])
def test_what_is_better_is_not_slower_in_any_family(path: str) -> None:
    count, found = slower(path, SIZES, (2, 4, 8))
    assert count >= 200
    assert not found
