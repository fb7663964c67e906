"""Kernels and copies that slow each other in the simulator: clocks and spans by hand, and nothing where nothing is known."""

from __future__ import annotations

import dataclasses

import pytest
import simpy
from machine_tiny import tiny

from weft.core.machine import Machine, load
from weft.core.problem import Problem
from weft.core.span import Span
from weft.perf import run
from weft.perf.contention import Contention, SlowedClock, Steady
from weft.schedules import build, names

ONE_TILE = Problem(op="all_gather_matmul", m=8, n=8, k=64, world_size=2)
"""On tiny: a shard's GEMM is one tile of 8.5 us, from 3 us on; a shard's copy is 8 us on the way, from 2.5 us on."""


def slowed(**contention: float) -> Machine:
    """Tiny, whose copies fill its engine; by pairs with _ for blanks."""
    known = {pair.replace("_", " "): times for pair, times in contention.items()}
    plain = tiny(gbps=0.064, several_gbps=0.064)
    sources = {f"contention.{pair}": "made up" for pair in known}
    return dataclasses.replace(plain, contention=known, sources={**plain.sources, **sources})


def first(spans: tuple[Span, ...], kind: str) -> tuple[float, float]:
    """Start and end of rank 0's first step of a kind."""
    found = next(span for span in spans if span.rank == 0 and span.kind == kind)
    return found.start_us, found.end_us


def test_a_clock_runs_at_the_speed_that_is_left() -> None:
    env = simpy.Environment()
    clock, rung = SlowedClock(env, (1.0, 0.0)), []
    for at in (1000, 100, 1200):
        event = clock.until(at)
        assert event.callbacks is not None
        event.callbacks.append(lambda _, at=at: rung.append((at, int(env.now), clock.now)))
    env.run(until=200)
    clock.run_at(0.5)
    env.run(until=1800)
    clock.run_at(1.0)
    env.run()
    assert rung == [(100, 100, 100), (1000, 1800, 1000), (1200, 2000, 1200)]


def test_a_tile_takes_the_longer_of_its_halves() -> None:
    """Copies at 500 of 1000 GB/s of memory double what traffic takes, and at half of their full rate stretch multiplying by
    half of what c adds."""
    machine = slowed(gemm_during_copy=1.4)
    machine = dataclasses.replace(
        machine,
        gpu=dataclasses.replace(machine.gpu, hbm_gbps=1000.0),
        copies=dataclasses.replace(machine.copies, several_gbps=500.0),
    )
    env = simpy.Environment()
    contention = Contention(env, machine, 2, lambda: None)
    for shares, times in (((1.0, 0.2), 1.2), ((0.2, 1.0), 2.0), ((1.0, 0.7), 1.4)):
        with contention.kernel(0, shares) as clock:
            begun, own = int(env.now), clock.now
            contention.moving({0: 500.0})
            env.run(until=env.now + 8400)
            assert clock.now - own == pytest.approx((env.now - begun) / times, abs=1)
            contention.moving({1: 500.0})
            before = clock.now
            env.run(until=env.now + 100)
            assert clock.now - before == 100


def test_a_gemm_during_a_copy_by_hand() -> None:
    """7.5 of its 8.5 us pass while the copy runs, at half speed: 3.75 us of work; the other 4.75 us alone."""
    spans = run(build(ONE_TILE, "shard_p2p"), slowed(gemm_during_copy=2.0)).spans
    assert first(spans, "copy") == (0.5, 10.5)
    assert first(spans, "gemm") == (0.0, 15.25)


def test_a_copy_during_a_gemm_by_hand() -> None:
    """0.5 us at 64 bytes a us, 8.5 us at half of that while the GEMM runs, and the other 208 bytes alone."""
    spans = run(build(ONE_TILE, "shard_p2p"), slowed(copy_during_gemm=2.0)).spans
    assert first(spans, "gemm") == (0.0, 11.5)
    assert first(spans, "copy") == (0.5, 11.5 + 208 / 64)


def test_work_is_told_as_it_took() -> None:
    """What kernels worked grows by what they lost, what copies took as well: the two losses of contention."""
    plain, both = slowed(), slowed(gemm_during_copy=1.5, copy_during_gemm=1.5)
    alone, both_run = (run(build(ONE_TILE, "shard_p2p"), machine) for machine in (plain, both))
    assert both_run.kernel_us[0] > 1.1 * alone.kernel_us[0]
    assert both_run.transfer_us[0] > 1.1 * alone.transfer_us[0]


def test_one_copy_at_a_time_on_a_mesh_slows_little() -> None:
    """A seventh of the full rate stretches kernels by a seventh of 0.2; the link, not the engines, bounds the copy."""
    machine = load("mi300x8")
    machine = dataclasses.replace(machine, contention=dict.fromkeys(machine.contention, 1.2))
    problem = Problem(op="all_gather_matmul", m=65536, n=16384, k=16384, world_size=8)
    found = run(build(problem, "shard_p2p"), machine)
    separate = dataclasses.replace(
        machine,
        contention={},
        sources={path: source for path, source in machine.sources.items() if not path.startswith("contention.")},
    )
    alone = run(build(problem, "shard_p2p"), separate)
    assert found.transfer_us == alone.transfer_us
    assert alone.kernel_us[0] < found.kernel_us[0] < (1 + 0.2 / 7) * alone.kernel_us[0]


@pytest.mark.parametrize("name", names("all_gather_matmul"))
def test_factors_of_one_change_nothing(name: str) -> None:
    """Clocks that run at full speed tell the time that the simulation has, in every family, gates and counts included."""
    problem = Problem(op="all_gather_matmul", m=64, n=32, k=128, world_size=2)
    plain, ones = (run(build(problem, name), machine) for machine in (slowed(), slowed(gemm_during_copy=1.0)))
    assert ones.spans == plain.spans
    assert ones.kernel_us == plain.kernel_us


def test_machines_without_the_numbers_have_steady_clocks() -> None:
    env = simpy.Environment()
    contention = Contention(env, tiny(), 2, lambda: pytest.fail("nothing has changed"))
    with contention.kernel(0, (1.0, 0.0)) as time:
        assert isinstance(time, Steady)
    assert not contention.active
