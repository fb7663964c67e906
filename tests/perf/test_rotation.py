"""One rank stands for all: the same outcome as of all ranks simulated, to the nanosecond, whatever the schedule and links."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from weft.core.concurrent import ConcurrentProblem
from weft.core.machine import Machine, load
from weft.core.problem import (
    COLLECTIVE_OPS,
    COLUMN_OPS,
    OPS,
    RAGGED_OPS,
    CollectiveProblem,
    ColumnProblem,
    LookupProblem,
    Problem,
    RaggedProblem,
    Scaling,
)
from weft.core.schedule import Schedule, Step
from weft.perf import run
from weft.schedules import build, concurrent, names, ragged, unfit

H200 = load("h200x8")


def on(topology: str) -> Machine:
    """8 H200 with other links."""
    links = dataclasses.replace(H200.links, topology=topology)  # type: ignore[arg-type]
    if topology != "pcie":
        return dataclasses.replace(H200, links=links)
    links = dataclasses.replace(links, host_gbps=100.0)
    return dataclasses.replace(H200, links=links, sources={**H200.sources, "links.host_gbps": "made up"})


MACHINES = {topology: on(topology) for topology in ("switch", "mesh", "ring", "pcie")}


def even(size: int) -> Iterator[Problem]:
    """A problem of each operator whose ranks have equal parts."""
    each = {"m": 256 * size, "n": 256 * size, "k": 256 * size, "world_size": size}
    yield from (Problem(op=op, **each) for op in OPS)  # type: ignore[arg-type]
    yield from (Problem(op=op, **each, scaling=Scaling()) for op in OPS)  # type: ignore[arg-type]
    yield from (ColumnProblem(op=op, **each) for op in COLUMN_OPS)  # type: ignore[arg-type]
    yield LookupProblem.of(batch=256 * size, dims=((64, 64),) * size, pooling=8)
    yield from collectives(size)


def collectives(size: int) -> list[CollectiveProblem]:
    return [CollectiveProblem(op=op, m=65536 * size, world_size=size, reachable=True) for op in COLLECTIVE_OPS]


def others(size: int) -> Iterator[Schedule]:
    """Schedules of problems that have families of their own, and of several nodes."""
    for op in RAGGED_OPS:
        for rows in (64 * size, 65 * size):
            problem = RaggedProblem(op=op, m=rows, n=4096, k=4096, capacity=rows, experts=2, world_size=size)
            yield from (ragged.build(problem, name) for name in ragged.FAMILIES)
    for one in collectives(size):
        overlapped = ConcurrentProblem(collectives=(one,), world_size=size, compute_us=100.0)
        yield from (build(overlapped, spec) for spec in concurrent.candidates(overlapped)[::5])
    if size > 2:
        sizes = {"m": 256 * size, "n": 256, "k": 256 * size, "world_size": size, "nodes": (size // 2,) * 2}
        yield from (build(Problem(op=op, **sizes), "node_slices", 2) for op in OPS)  # type: ignore[arg-type]


def assert_same(schedule: Schedule, machine: Machine) -> bool:
    """Returns whether one rank stood for all."""
    one, all_ranks = run(schedule, machine), run(schedule, machine, whole=True)
    assert one.spans == all_ranks.spans
    assert (one.total_us, one.kernel_us, one.transfer_us) == (all_ranks.total_us, all_ranks.kernel_us, all_ranks.transfer_us)
    assert one.usage.keys() == all_ranks.usage.keys()
    for resource, carried in all_ranks.usage.items():
        assert one.usage[resource].bytes == pytest.approx(carried.bytes, rel=1e-9)
        assert one.usage[resource].peak_gbps == pytest.approx(carried.peak_gbps, rel=1e-9)
    return one.world.rotation is not None


@pytest.mark.parametrize("topology", list(MACHINES))
@pytest.mark.parametrize("size", [2, 4, 8])
def test_one_rank_stands_for_all(topology: str, size: int) -> None:
    """In every family of every operator, where shards are even."""
    machine = MACHINES[topology]
    for problem in even(size):
        for name in (name for name in names(problem.op) if not unfit(name, problem)):
            assert assert_same(build(problem, name, 2, fan_out=machine.fans_out), machine), (problem.op, name)


def test_products_in_two_runs_of_rows_are_no_rotation_of_those_in_one() -> None:
    """Peers' shards lie around the own one, but for the first and the last rank's. Only where that costs copies it counts."""
    schedule = build(Problem(op="all_gather_matmul", m=1024, n=1024, k=1024, world_size=4), "hetero_fused_1d", 1)
    assert not assert_same(schedule, H200)
    assert assert_same(schedule, dataclasses.replace(H200, stages=False))


@pytest.mark.parametrize("topology", list(MACHINES))
def test_nodes_counts_and_computations_too(topology: str) -> None:
    for schedule in others(4):
        uneven = isinstance(schedule.problem, RaggedProblem) and schedule.problem.m % 8 > 0
        assert assert_same(schedule, MACHINES[topology]) != uneven, schedule


def test_ranks_that_differ_are_simulated() -> None:
    """Shards of two lengths, a rank that sends in another order, one that signals once less, and one that does for another."""
    problem = Problem(op="all_gather_matmul", m=1024, n=1024, k=512, world_size=4)
    uneven = build(dataclasses.replace(problem, m=1027), "flag_gated", 1)
    schedule = build(problem, "flag_gated", 1)
    assert not assert_same(uneven, H200)
    assert assert_same(schedule, H200)
    *same, last = schedule.ranks

    def changed(steps: tuple[Step, ...]) -> Schedule:
        lanes = tuple(dataclasses.replace(lane, steps=steps) if lane.kind == "copy" else lane for lane in last)
        return dataclasses.replace(schedule, ranks=(*same, lanes))

    (steps,) = (lane.steps for lane in last if lane.kind == "copy")
    *before, first_copy, first, second_copy, second = steps
    assert not assert_same(changed((*before, second_copy, second, first_copy, first)), H200)
    for wrong in (steps[:-1], (*before, first_copy, second, second_copy, second)):
        with pytest.raises(ValueError, match="never ends"):
            run(changed(wrong), H200)
