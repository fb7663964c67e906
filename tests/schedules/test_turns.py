"""Copies of several ranks to one peer take turns, so that each rank receives from one peer at a time."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest

from weft.core.machine import load
from weft.core.problem import Op, Problem
from weft.core.schedule import Copy, Schedule, Signal, Store, Wait
from weft.perf import run
from weft.schedules import build, parse
from weft.schedules.matmul_reduce_scatter import ScatterBuilder

H200 = load("h200x8")
SPECS: dict[Op, tuple[str, ...]] = {
    "matmul_reduce_scatter": (
        *("shard_p2p", "hetero_unfused_1d:2", "uniform_fused_1d:2", "uniform_fused_2d:2", "track_and_trigger:2"),
    ),
    "matmul_all_reduce": ("shard_p2p", "hetero_unfused_1d:2"),
}
"""The schedules that copy pieces to their owners, by operator."""


def uneven(op: Op, world_size: int) -> Problem:
    """Ranks whose products and pieces have different sizes, so that they get out of step."""
    parts = tuple(512 * (1 + rank % 3) for rank in range(world_size))
    return Problem(op=op, m=8000, n=4096, k=sum(parts), world_size=world_size, b_sizes=parts)


def latest_overlap_us(found: Schedule) -> float:
    """By how much a copy begins before the copy to the same rank that began before it has ended, at most."""
    times: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for span in run(found, H200).spans:
        if span.kind == "copy":  # "copy partial[0:8] -> 2"
            times[int(span.name.rpartition("-> ")[2])].append((span.start_us, span.end_us))
    assert times
    return max(first[1] - second[0] for some in times.values() for first, second in pairwise(sorted(some)))


def without_turns(builder: ScatterBuilder, rank: int, store: Store, index: int, chunks: int) -> None:
    builder.copy_to_peers(rank, [store])


@pytest.mark.parametrize(("op", "spec"), [(op, spec) for op, specs in SPECS.items() for spec in specs])
@pytest.mark.parametrize("world_size", [3, 8])
def test_a_rank_receives_from_one_peer_at_a_time(op: Op, spec: str, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = uneven(op, world_size)
    assert latest_overlap_us(build(problem, *parse(spec))) <= 0
    monkeypatch.setattr(ScatterBuilder, "copy_in_turn", without_turns)
    assert latest_overlap_us(build(problem, *parse(spec))) > 0


def test_each_turn_is_signalled_by_the_sender_before() -> None:
    found = build(Problem(op="matmul_reduce_scatter", m=24, n=8, k=16, world_size=4), "hetero_unfused_1d", 2)
    order: dict[int, list[tuple[int, int]]] = defaultdict(list)
    waits, signals = {}, {}
    for rank in range(4):
        lane = next(lane for lane in found.ranks[rank] if lane.name == "copy")
        copies = 0
        for step in lane.steps:
            if isinstance(step, Copy):
                order[step.dst.rank].append((copies, rank))
                copies += 1
            elif isinstance(step, Wait) and step.flag.name == "turn":
                waits[step.flag] = copies, rank
            elif isinstance(step, Signal) and step.flag.name == "turn":
                signals[step.flag] = copies - 1, rank
    turns = [pair for receiver in order.values() for pair in pairwise(sorted(receiver))]
    assert {(signals[flag], waits[flag]) for flag in waits} == set(turns)
    assert len(turns) == 4 * 5


def test_two_ranks_and_lanes_for_each_peer_need_no_turns() -> None:
    for world_size, fan_out in ((2, False), (4, True)):
        problem = Problem(op="matmul_reduce_scatter", m=16, n=8, k=16, world_size=world_size)
        found = build(problem, "shard_p2p", fan_out=fan_out)
        assert not [step for *_, step in found if isinstance(step, Wait) and step.flag.name == "turn"]


def test_only_the_first_sender_waits_until_its_owner_has_read() -> None:
    found = build(Problem(op="matmul_reduce_scatter", m=24, n=8, k=16, world_size=4), "hetero_unfused_1d", 2)
    waits = [step.flag for *_, step in found if isinstance(step, Wait) and step.flag.name == "free"]
    signals = [step.flag for *_, step in found if isinstance(step, Signal) and step.flag.name == "free"]
    assert sorted((flag.rank, flag.index) for flag in waits) == [(rank, (rank + 1) % 4) for rank in range(4)]
    assert sorted(signals, key=lambda flag: flag.rank) == sorted(waits, key=lambda flag: flag.rank)
