"""Steps that a device runs as one kernel: which, and what they then cost in the simulator."""

from __future__ import annotations

import dataclasses

import pytest
from machine_tiny import tiny

from weft.core.problem import Problem
from weft.core.schedule import Copy, Flag, Gemm, Lane, LaneKind, Part, Region, Signal, Step, Wait
from weft.perf import simulate
from weft.schedules import build
from weft.schedules.together import riding, runs

A, B = Flag("a", 1), Flag("b", 2)
OWN = Flag("own", 0)
ROWS = Region("x", 0, (0, 4), (0, 8))


def push(rank: int) -> Copy:
    return Copy(ROWS, dataclasses.replace(ROWS, rank=rank))


def lane(*steps: Step, kind: LaneKind = "compute", fused: tuple[tuple[int, int], ...] = ()) -> Lane:
    return Lane("lane", kind, steps, fused)


GEMM = Gemm(ROWS, (Part(ROWS, ROWS),))


@pytest.mark.parametrize(
    ("made", "along"),
    [
        (lane(Wait(OWN), Wait(OWN, 2), push(1), Signal(A), push(2), Signal(B), Wait(OWN, 3)), {1, 3, 4, 5}),
        (lane(push(1), Signal(B), push(2), Signal(B)), {3}),
        (lane(GEMM, Signal(A), Signal(B), GEMM, Signal(A)), {2}),
        (lane(Wait(OWN), push(1), Signal(A), push(2), Signal(B), kind="copy"), set()),
        (lane(Wait(OWN), Wait(OWN, 2), kind="network"), set()),
        (lane(GEMM, Wait(OWN), GEMM, Signal(A), Signal(B), fused=((0, 3),)), {1, 2, 4}),
    ],
)
def test_what_rides_along(made: Lane, along: set[int]) -> None:
    assert riding(made) == along


def test_a_run_of_copies_has_their_flags() -> None:
    (run,) = runs(lane(Wait(OWN), push(1), Signal(A), push(2), Signal(B), Wait(OWN)))
    assert (run.first, run.last, [flag for _, flag in run.copies]) == (1, 5, [A, B])


def test_stores_to_two_peers_are_launched_once() -> None:
    """Of three ranks: 64 bytes to each peer take 1 us each behind a launch of 3; the own rows' copy is launched with them."""
    problem = Problem(op="all_gather_matmul", m=12, n=12, k=8, world_size=3)
    spans = [s for s in simulate(build(problem, "sequential_stores"), tiny(world_size=3)) if not s.rank]
    copies = [round(s.duration_us, 2) for s in spans if s.kind == "copy"]
    assert copies == [4.0, 1.0, 0.0]
    signals = [round(s.duration_us, 2) for s in spans if s.kind == "signal" and "arrived" in s.name]
    assert signals == [0.0, 0.0, 0.0]
