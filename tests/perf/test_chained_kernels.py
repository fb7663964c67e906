"""Which steps run in the kernel of the step before them, and what a push costs in the simulator."""

from __future__ import annotations

import dataclasses

import pytest
from machine_tiny import tiny

from weft.core.problem import Problem
from weft.core.schedule import Copy, Flag, FusedCollective, Gemm, Lane, LaneKind, Part, Push, Region, Signal, Step, Store, Wait
from weft.core.work import continued
from weft.perf import simulate
from weft.schedules import build

A, B = Flag("a", 1), Flag("b", 2)
OWN, OTHER = Flag("own", 0), Flag("other", 0)
ROWS = Region("x", 0, (0, 4), (0, 8))


def push(*flags: Flag) -> Push:
    return Push(tuple(Store(ROWS, dataclasses.replace(ROWS, rank=flag.rank), flag) for flag in flags))


def lane(*steps: Step, kind: LaneKind = "compute") -> Lane:
    return Lane("lane", kind, steps)


GEMM = Gemm(ROWS, (Part(ROWS, ROWS),))


@pytest.mark.parametrize(
    ("made", "along"),
    [
        (lane(Wait(OWN), Wait(OTHER), push(A, B), Wait(OWN)), {1}),
        (lane(GEMM, Signal(A), Signal(B), GEMM, Signal(A)), {2}),
        (lane(Wait(OWN), Copy(ROWS, ROWS), Signal(A), Signal(B), kind="copy"), set()),
        (lane(Wait(OWN), Wait(OTHER), kind="network"), set()),
    ],
)
def test_which_steps_run_in_the_kernel_before_them(made: Lane, along: set[int]) -> None:
    assert continued(made) == along


def test_steps_of_one_kernel_are_launched_once() -> None:
    kernel = FusedCollective("all_reduce", (ROWS,), ROWS)
    assert continued(lane(GEMM, Wait(OWN), GEMM, Signal(A), Signal(B)), {(0, 3): kernel}) == {1, 2, 4}


def test_stores_to_two_peers_are_launched_once() -> None:
    """Of three ranks: 64 bytes to each peer take 1 us each behind a launch of 3; the own rows' copy is launched with them."""
    problem = Problem(op="all_gather_matmul", m=12, n=12, k=8, world_size=3)
    spans = [s for s in simulate(build(problem, "sequential_stores"), tiny(world_size=3)) if not s.rank]
    assert [(s.name, round(s.duration_us, 2)) for s in spans if s.kind == "copy"] == [("push a, 12 rows, -> 2, 1, 0", 5.0)]
