"""Two schedules that are one program under two names, and those that only look like it."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from typing import Any

import pytest
from families import of_one_node

from weft.core.problem import OPS, Op, Problem
from weft.core.schedule import Gemm, Lane, Schedule, Signal, Wait
from weft.schedules import FAMILIES, build, candidates, parse, programs, simplicity, spec, synonym
from weft.schedules.same_program import is_same_program

PAIRS = {
    "all_gather_matmul": {
        ("shard_p2p", "hetero_fused_1d:1"),
        ("shard_p2p", "hetero_unfused_1d:1"),
        ("hetero_fused_1d:1", "hetero_unfused_1d:1"),
        ("hetero_fused_1d:2", "hetero_unfused_1d:2"),
        ("flag_gated:1", "track_and_trigger:1"),
        ("flag_gated:2", "track_and_trigger:2"),
        ("direct_store:1", "flag_gated_2d:1"),
    },
    "matmul_reduce_scatter": {
        ("shard_p2p", "hetero_fused_1d:1"),
        ("shard_p2p", "hetero_unfused_1d:1"),
        ("hetero_fused_1d:1", "hetero_unfused_1d:1"),
        ("hetero_fused_1d:2", "hetero_unfused_1d:2"),
    },
}
"""On two ranks: with one peer, a step has one piece, and what has come is sent on to nobody. Whole shards, stored from SMs, are
one slice of K, too."""


def problem(op: Op, world_size: int = 2) -> Problem:
    return Problem(op=op, m=96, n=64, k=128, world_size=world_size)


def built(op: Op, text: str, world_size: int = 2) -> Schedule:
    return build(problem(op, world_size), *parse(text))


@pytest.mark.parametrize("op", PAIRS)
def test_with_one_peer_some_families_are_one_program(op: Op) -> None:
    texts = dict.fromkeys(spec(name, chunks if FAMILIES[name].chunked else 1) for name in of_one_node(op) for chunks in (1, 2))
    schedules = {text: built(op, text) for text in texts}
    found = {(one, other) for one, other in combinations(schedules, 2) if is_same_program(schedules[one], schedules[other])}
    assert found == PAIRS[op]
    assert all(is_same_program(schedules[other], schedules[one]) for one, other in found)


def test_with_more_peers_only_whole_shards_are() -> None:
    three = {text: built("all_gather_matmul", text, 3) for text in ("hetero_fused_1d:2", "hetero_unfused_1d:2")}
    assert not is_same_program(*three.values())
    assert is_same_program(built("all_gather_matmul", "shard_p2p", 3), built("all_gather_matmul", "hetero_unfused_1d:1", 3))
    assert not is_same_program(
        built("all_gather_matmul", "flag_gated:1", 3), built("all_gather_matmul", "track_and_trigger:1", 3)
    )


def changed(schedule: Schedule, rank: int, lane: str, position: int, step: object) -> Schedule:
    """With another step in its place."""

    def of(one: Lane) -> Lane:
        steps = tuple(step if at == position else old for at, old in enumerate(one.steps))
        return dataclasses.replace(one, steps=steps) if one.name == lane else one  # type: ignore[arg-type]

    ranks = tuple(tuple(map(of, lanes)) if at == rank else lanes for at, lanes in enumerate(schedule.ranks))
    return dataclasses.replace(schedule, ranks=ranks)


def moved(part: Any, here: object, there: object) -> Any:
    """A part of a schedule with a place or flag renamed wherever it is named."""
    if part == here:
        return there
    if isinstance(part, tuple):
        return tuple(moved(one, here, there) for one in part)
    if not dataclasses.is_dataclass(part):
        return part
    names = [field.name for field in dataclasses.fields(part)]
    return type(part)(**{name: moved(getattr(part, name), here, there) for name in names})  # type: ignore[operator]


def test_flags_and_places_are_renamed_one_for_one() -> None:
    whole = built("all_gather_matmul", "hetero_unfused_1d:2")
    waits = [(at, step) for rank, lane, at, step in whole if (rank, lane.name) == (0, "compute") and isinstance(step, Wait)]
    (_, first), (at, _) = waits
    assert not is_same_program(whole, changed(whole, 0, "compute", at, first)), "the second chunk is not waited for"
    (_, last) = waits[-1]
    assert not is_same_program(whole, dataclasses.replace(whole, ranks=moved(whole.ranks, last.flag, first.flag))), (
        "two flags are one"
    )
    signals = [at for rank, lane, at, step in whole if (rank, lane.name) == (0, "copy") and isinstance(step, Signal)]
    swapped = changed(whole, 0, "copy", signals[0], whole.ranks[0][1].steps[signals[1]])
    swapped = changed(swapped, 0, "copy", signals[1], whole.ranks[0][1].steps[signals[0]])
    assert not is_same_program(whole, swapped), "the second chunk's flag is raised by the first copy"


def test_rows_that_no_longer_lie_together_are_another_program() -> None:
    """Of uniform_fused_1d, whose matmuls take rows that lie one after the other; others take one part."""
    for text, alone in (("uniform_fused_1d:2", False), ("hetero_unfused_1d:2", True)):
        whole = built("all_gather_matmul", text)
        gemms = [step for rank, _, _, step in whole if rank == 0 and isinstance(step, Gemm)]
        here = gemms[-1].parts[-1].a
        there = dataclasses.replace(here, rows=(here.rows[0] + 1000, here.rows[1] + 1000))
        assert here.buffer == "a_full"
        assert is_same_program(whole, dataclasses.replace(whole, ranks=moved(whole.ranks, here, there))) is alone


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_candidates_are_programs_once_each_by_their_simplest_names(op: Op, world_size: int) -> None:
    found = candidates(problem(op, world_size))
    assert not [(str(a), str(b)) for a, b in combinations(found, 2) if is_same_program(a, b)]
    specs = [spec(schedule.name, schedule.chunks) for schedule in found]
    for name in of_one_node(op):
        text = spec(name, 1)
        assert text in specs or simplicity(*parsed(synonym(problem(op, world_size), text, specs))) < simplicity(name, 1)


def parsed(text: str | None) -> tuple[str, int]:
    assert text is not None
    name, chunks = parse(text)
    return name, chunks or 1


def test_programs_keep_their_order() -> None:
    texts = ("hetero_unfused_1d:2", "flag_gated:1", "hetero_fused_1d:2", "track_and_trigger:1", "sequential")
    assert programs(problem("all_gather_matmul"), texts) == ("flag_gated:1", "hetero_fused_1d:2", "sequential")
    assert programs(problem("all_gather_matmul", 4), texts) == texts
    assert synonym(problem("all_gather_matmul"), "hetero_unfused_1d:2", texts[1:]) == "hetero_fused_1d:2"
    assert synonym(problem("all_gather_matmul"), "direct_store:1", texts) is None
