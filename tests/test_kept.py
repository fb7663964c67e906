"""What was measured before: by an earlier process, or of other row counts; and how it is proved in use."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from logged import logged
from rank_work import check_gather, told_with
from timed_trials import timed_trials, trials_by_a_clock

import weft
from weft.core.errors import PeerLost
from weft.core.problem import Problem
from weft.planner.between import Between
from weft.planner.cache import Cache
from weft.runtime.kept import PROVED_AFTER, Unproved
from weft.runtime.trial import Trial, as_good

PROBLEM = Problem(op="all_gather_matmul", m=64, n=48, k=32, world_size=2)


@contextmanager
def _new_process(folder: str) -> Iterator[None]:
    """What a rank does within is done as if by a process that has just begun, and keeps its plans in a folder."""
    os.environ["WEFT_CACHE_DIR"] = folder
    try:
        weft.close()
        yield
        weft.close()
    finally:
        os.environ["WEFT_CACHE_DIR"] = ""


def _first_calls(folders: list[str]) -> tuple[list[tuple[str, bool, dict[str, float]]], int]:
    """Two calls of auto in a process whose cache is its rank's: what was chosen, and how many schedules were bound."""
    with trials_by_a_clock() as made, _new_process(folders[dist.get_rank()]):
        check_gather(64, 48, 32, torch.float32, "auto", 0)
        check_gather(64, 48, 32, torch.float32, "auto", 1)
        return [(choice.spec, choice.kept, choice.us) for choice in weft.choices()], len(made)


@pytest.mark.ranks
def test_a_second_process_needs_no_trial_and_rank_0_decides(ranks: RankFixture, tmp_path: Path) -> None:
    mine, theirs = str(tmp_path / "mine"), str(tmp_path / "theirs")
    pool = ranks(2)
    times = {"sequential": 4000.0, "shard_p2p": 1000.0}
    for found, binds in pool.run(_first_calls, [mine, mine]):
        assert (found, binds) == ([("shard_p2p", False, times)], 2)
    assert len(list((tmp_path / "mine" / "plans").iterdir())) == 1
    for found, binds in pool.run(_first_calls, [mine, mine]):
        assert (found, binds) == ([("shard_p2p", True, times)], 1)
    for found, binds in pool.run(_first_calls, [theirs, mine]):
        assert (found, binds) == ([("shard_p2p", False, times)], 2), "rank 0 knows of none: all measure"
    (first, binds), (second, _) = pool.run(_first_calls, [mine, str(tmp_path / "none")])
    assert (first, binds) == ([("shard_p2p", True, times)], 1)
    assert second == [("shard_p2p", True, {})], "rank 1 has read nothing, and runs what rank 0 has"


def test_row_counts_between_known_ones() -> None:
    known = Between()
    for m, text in ((1024, "flag_gated:1"), (4096, "flag_gated:1"), (8192, "shard_p2p"), (65536, "shard_p2p")):
        known.add(dataclasses.replace(PROBLEM, m=m), text)

    def found(m: int, **changes: Any) -> object:
        return known.find(dataclasses.replace(PROBLEM, m=m, **changes))

    assert found(2000) == ("flag_gated:1", 1024, 4096)
    assert found(6000) is None, "the two sides differ"
    assert found(20000) is None, "the two sides are far apart"
    assert found(512) is found(100_000) is None, "one side is missing"
    assert found(2000, k=64) is found(2000, dtype="float16") is found(2000, b_sizes=(PROBLEM.n, 0)) is None
    known.add(dataclasses.replace(PROBLEM, m=4096), "sequential")
    assert found(2000) is None


@pytest.mark.parametrize(
    ("fewer", "more", "expected"),
    [
        (["flag_gated:1"], ["shard_p2p"], None),
        (["flag_gated:1", "shard_p2p"], ["shard_p2p"], "shard_p2p"),
        (["flag_gated:1"], ["shard_p2p", "flag_gated:1"], "flag_gated:1"),
        (["flag_gated:1", "shard_p2p"], ["shard_p2p", "flag_gated:1"], "flag_gated:1"),
        (["flag_gated:1", "direct_store:1"], ["shard_p2p", "direct_store:1"], "direct_store:1"),
        (["sequential", "shard_p2p"], ["flag_gated:1", "shard_p2p"], "shard_p2p"),
        (["sequential"], ["shard_p2p", "flag_gated:1"], None),
    ],
)
def test_what_is_as_good_on_the_other_side_stands_for_those_between(
    fewer: list[str], more: list[str], expected: str | None
) -> None:
    known = Between()
    for m, (spec, *close) in ((1024, fewer), (2048, more)):
        known.add(dataclasses.replace(PROBLEM, m=m), spec, close)
    found = known.find(dataclasses.replace(PROBLEM, m=1500))
    assert found == (None if expected is None else (expected, 1024, 2048))


@pytest.mark.parametrize(
    ("fewer", "more", "expected"),
    [
        ("flag_gated:1", "shard_p2p", "shard_p2p"),
        ("flag_gated:1", "sequential", "sequential"),
        ("sequential", "shard_p2p", "sequential"),
    ],
)
def test_nothing_is_measured_between_neighbours(fewer: str, more: str, expected: str) -> None:
    known = Between()
    for m, spec in ((1000, fewer), (1250, more), (1563, fewer)):
        known.add(dataclasses.replace(PROBLEM, m=m), spec)
    assert known.find(dataclasses.replace(PROBLEM, m=1100)) == (expected, 1000, 1250)
    assert known.find(dataclasses.replace(PROBLEM, m=1300)) is None, "further apart"


def test_what_could_have_been_chosen_as_well() -> None:
    def good(*times: tuple[str, float, float | None], spec: str = "shard_p2p") -> tuple[str, ...]:
        return as_good([Trial(spec=name, us=us, queued_us=queued) for name, us, queued in times], spec)

    base, chosen = ("sequential", 100.0, None), ("shard_p2p", 90.0, None)
    assert good(base, chosen) == ()
    assert good(base, ("flag_gated:2", 92.7, None), chosen, ("flag_gated:1", 91.0, None), ("flag_gated:4", 92.8, None)) == (
        "flag_gated:1",
        "flag_gated:2",
    )
    assert good(base, ("shard_p2p", 98.0, None), ("flag_gated:2", 100.5, None)) == ("sequential",), "slower than sequential"
    assert good(base, ("flag_gated:1", 99.5, None), ("flag_gated:2", 100.5, None), spec="sequential") == ("flag_gated:1",)
    both = (("sequential", 100.0, 100.0), ("shard_p2p", 90.0, 90.0))
    assert good(*both, ("flag_gated:1", 90.0, 95.0)) == (), "by each clock"
    assert good() == good(chosen) == good(base) == ()


def test_looking_between_takes_less_than_100_us() -> None:
    known = Between()
    for m in range(64, 64 * 500, 64):
        known.add(dataclasses.replace(PROBLEM, m=m), "flag_gated:1")
    times = []
    for m in range(65, 65 + 200):
        problem = dataclasses.replace(PROBLEM, m=m)
        begun = time.perf_counter_ns()
        known.find(problem)
        times.append((time.perf_counter_ns() - begun) / 1e3)
    assert min(times) < 100


def _serves(rows: list[int]) -> tuple[list[tuple[int, str, tuple[int, ...]]], int]:
    """A call of auto for one row count after the other."""
    with trials_by_a_clock() as made:
        weft.close()
        for m in rows:
            check_gather(m, 48, 32, torch.float32, "auto", 0)
        found = [(choice.problem.m, choice.spec, choice.like) for choice in weft.choices()]
        weft.close()
        return found, len(made)


def _times(schedule: weft.Schedule) -> int:
    """Two are as fast; one of them, 2% faster, with few rows, the other one with many; a third with many alone."""
    few = schedule.problem.m < 100
    shown = {"sequential": 4000, "shard_p2p": 1000 if few else 1020, "flag_gated": 1020 if few else 1000}
    return shown.get(schedule.name, 3000 if few else 1000)


def _serves_where_choices_differ(folders: list[str]) -> tuple[list[tuple[int, str, tuple[int, ...]]], int]:
    """A process whose cache is its rank's."""
    specs = ("sequential", "shard_p2p", "flag_gated:1", "hetero_unfused_1d:2")
    with timed_trials(specs, _times) as made, _new_process(folders[dist.get_rank()]):
        for m in (64, 160, 96, 104):
            check_gather(m, 48, 32, torch.float32, "auto", 0)
        return [(choice.problem.m, choice.spec, choice.like) for choice in weft.choices()], len(made)


@pytest.mark.ranks
def test_where_choices_differ_what_is_as_fast_needs_no_trial(ranks: RankFixture, tmp_path: Path) -> None:
    pool, mine, none = ranks(2), str(tmp_path / "mine"), str(tmp_path / "none")
    expected = [(64, "shard_p2p", ()), (160, "flag_gated:1", ()), (96, "shard_p2p", (64, 160)), (104, "shard_p2p", (64, 160))]
    for found, binds in pool.run(_serves_where_choices_differ, [mine, none]):
        assert found == expected
        assert binds == 4 + 1 + 4 + 2 + 2, "all on trial; in the finals the two that are close, and three; 96 and 104 rows"
    for found, binds in pool.run(_serves_where_choices_differ, [mine, none]):
        assert (found, binds) == (expected, 4), "what is as fast is kept, and told by rank 0"


@pytest.mark.ranks
def test_a_row_count_between_measured_ones_needs_no_trial(ranks: RankFixture) -> None:
    """98 to 104 rows run by one program, of 104."""
    for found, binds in ranks(2).run(_serves, [64, 160, 96, 100, 98, 104, 99]):
        assert found == [(m, "shard_p2p", like) for m, like in ((64, ()), (160, ()), (96, (64, 160)), (104, (64, 160)))]
        assert binds == 2 + 2 + 1 + 1


def _in_use(folder: str, fast: str) -> tuple[list[tuple[str, bool]], list[str], list[str]]:
    """Calls of auto with a kept plan, until it has been proved: choices, schedules that are bound, warnings."""
    from weft.runtime.groups import GROUPS

    with trials_by_a_clock(fast), logged() as seen, _new_process(folder):
        for call in range(PROVED_AFTER + 4):
            check_gather(64, 48, 32, torch.float32, "auto", call)
        group = dist.group.WORLD
        assert group is not None
        bound = sorted(schedule.name for schedule in GROUPS.state(group.group_name).schedules())
        found = [(choice.spec, choice.kept) for choice in weft.choices()]
        return found, bound, seen


@pytest.mark.ranks
def test_what_is_taken_over_is_held_against_sequential_in_use(ranks: RankFixture, tmp_path: Path) -> None:
    pool, folder = ranks(2), str(tmp_path)
    pool.run(_first_calls, [folder, folder])
    assert pool.run(_in_use, folder, "shard_p2p") == [([("shard_p2p", True)], ["shard_p2p"], [])] * 2
    for found, bound, seen in pool.run(_in_use, folder, "sequential"):
        assert found == [("sequential", False)]
        assert bound == ["sequential", "shard_p2p"], "a graph of the caller's may be replaying the loser"
        (text,) = seen
        assert text.endswith("shard_p2p was taken over, but is no faster here; sequential is put back")
    for found, bound, seen in pool.run(_in_use, folder, "sequential"):
        assert (found, bound, seen) == ([("sequential", True)], ["sequential"], []), "it is kept so, and said once"


def test_calls_until_a_proof_are_counted_once() -> None:
    left, program = Unproved(), object()
    assert not left.due(program)  # type: ignore[arg-type]
    left.add(program, "its problem", PROVED_AFTER)  # type: ignore[arg-type]
    assert [left.due(program) for _ in range(PROVED_AFTER + 3)].index(True) == PROVED_AFTER - 1  # type: ignore[arg-type]
    left.add(program, "its problem", PROVED_AFTER)  # type: ignore[arg-type]
    left.forget(program)  # type: ignore[arg-type]
    assert not any(left.due(program) for _ in range(PROVED_AFTER + 3))  # type: ignore[arg-type]
    left.proved.add("its problem")
    left.add(program, "its problem", PROVED_AFTER)  # type: ignore[arg-type]
    assert not any(left.due(program) for _ in range(PROVED_AFTER + 3)), "bound anew"  # type: ignore[arg-type]


def _one_cannot_read() -> list[str]:
    """Rank 1 has a profile that is not there; then the group goes on."""
    return told_with([{"WEFT_MACHINE": machine} for machine in ("nothing.json" if dist.get_rank() == 1 else "", "")], "auto")


@pytest.mark.ranks
def test_a_profile_that_one_rank_cannot_read_is_told_to_all(ranks: RankFixture) -> None:
    first, second = ranks(2).run(_one_cannot_read)
    assert first == ["rank 1 cannot read its machine profile (WEFT_MACHINE): see the error there", "right"]
    assert second[0].startswith("cannot read nothing.json")
    assert second[1] == "right"


def _strict(folder: str) -> str:
    """Rank 0 has no memory to read a kept plan."""
    os.environ["WEFT_CACHE_DIR"] = folder if dist.get_rank() == 0 else ""
    try:
        with trials_by_a_clock("shard_p2p"):
            weft.close()
            with mock.patch.object(Cache, "read", side_effect=MemoryError("planted")):
                try:
                    check_gather(64, 48, 32, torch.float32, "auto", 0)
                except (MemoryError, PeerLost) as error:
                    return f"{type(error).__name__}: {error}"
        return "right"
    finally:
        os.environ["WEFT_CACHE_DIR"] = ""
        weft.close()


@pytest.mark.ranks
def test_what_one_rank_raises_on_reading_a_plan_is_told_to_all(ranks: RankFixture, tmp_path: Path) -> None:
    first, second = ranks(2).run(_strict, str(tmp_path), timeout_s=15)
    assert first == "MemoryError: planted"
    assert second == "PeerLost: rank 0 failed: planted"
