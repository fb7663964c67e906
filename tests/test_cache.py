"""Kept plans: what is written comes back, what is broken or foreign is skipped aloud, writers spoil no file of each other."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from rank_work import check_gather, told_with

import weft
from weft.between import Between
from weft.cache import Cache, Entry, Key, decode, encode, from_environment, space
from weft.execute.kept import PREDICTED_AFTER, PROVED_AFTER, KeptPlans, Unproved
from weft.problem import CollectiveProblem, ColumnProblem, LookupProblem, Problem
from weft.schedules import NAMES, spec

PROBLEM = Problem(op="all_gather_matmul", m=64, n=48, k=32, world_size=2)
KEY = Key(machine={"gpu": "made up"}, versions={"weft": "0"}, problem=PROBLEM, space=space())
ENTRY = Entry(key=KEY, spec="flag_gated:2", us={"sequential": 3.0, "flag_gated:2": 2.0})


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "weft")
    assert cache.read(KEY) is None
    cache.write(ENTRY)
    assert cache.read(KEY) == ENTRY
    assert (mode(cache.folder), mode(cache.path(KEY))) == (0o700, 0o600)
    later = dataclasses.replace(ENTRY, spec="sequential")
    cache.write(later)
    assert cache.read(KEY) == later
    assert [path.name for path in cache.folder.iterdir()] == [cache.path(KEY).name]
    others = (
        LookupProblem.of(batch=4, dims=((2,), (2,))),
        ColumnProblem(m=4, n=4, k=4, world_size=2),
        CollectiveProblem(op="all_to_all", m=4, world_size=2, dtype="uint8"),
    )
    for problem in others:
        entry = Entry(key=dataclasses.replace(KEY, problem=problem), spec="sequential", us={})
        cache.write(entry)
        assert cache.read(entry.key) == entry


@pytest.mark.parametrize(
    "other",
    [
        {"machine": {"gpu": "another"}},
        {"versions": {"weft": "1"}},
        {"problem": dataclasses.replace(PROBLEM, m=65)},
        {"space": "0123"},
    ],
)
def test_another_key_has_another_entry(other: dict[str, object], tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.write(ENTRY)
    key = dataclasses.replace(KEY, **other)  # type: ignore[arg-type]
    assert cache.read(key) is None
    cache.path(KEY).rename(cache.path(key))
    with pytest.warns(UserWarning, match="a kept plan is skipped, .*: it is for all_gather_matmul M=64"):
        assert cache.read(key) is None


def spoiled(text: str) -> list[tuple[str, str]]:
    data = json.loads(text)
    return [
        ("", "is not JSON"),
        (text[: len(text) // 2], "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        (json.dumps(data | {"spec": "os.system"}), "schedule is 'os.system'"),
        (json.dumps(data | {"spec": "two_shot"}), "is for matmul_all_reduce alone"),
        (json.dumps(data | {"code": "import os"}), "code is not a field of Entry"),
        (json.dumps({"key": data["key"], "us": {}}), "spec is missing"),
        (text[:-1] + " " * (1 << 21) + "}", "is not JSON"),
    ]


def test_broken_entries_are_skipped_aloud(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.write(ENTRY)
    path = cache.path(KEY)
    for text, reason in spoiled(path.read_text()):
        path.write_text(text)
        with pytest.warns(UserWarning, match=f"a kept plan is skipped, .*{reason}"):
            assert cache.read(KEY) is None
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.warns(UserWarning, match="a kept plan is skipped"):
        assert cache.read(KEY) is None


def test_what_others_could_have_written_is_skipped(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.write(ENTRY)
    path = cache.path(KEY)
    path.chmod(0o622)
    with pytest.warns(UserWarning, match="other users could have written it"):
        assert cache.read(KEY) is None
    real = tmp_path / "elsewhere.json"
    path.rename(real)
    real.chmod(0o600)
    path.symlink_to(real)
    with pytest.warns(UserWarning, match="a kept plan is skipped"):
        assert cache.read(KEY) is None


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="a measured plan is not kept: .*set WEFT_CACHE_DIR"):
        Cache(tmp_path / "file").write(ENTRY)


def test_a_user_without_a_home_keeps_nothing_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user may have no entry and no HOME: the first call of every problem raised."""
    for name in ("WEFT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with mock.patch.object(Path, "home", side_effect=RuntimeError("Could not determine home directory.")):
        with pytest.warns(UserWarning, match="not kept: Could not determine home directory. Set WEFT_CACHE_DIR to a folder"):
            assert from_environment() is None
        monkeypatch.setenv("WEFT_CACHE_DIR", "/some")
        assert from_environment() is not None


@pytest.mark.parametrize("chunks", [513, 3_000_000])
def test_a_kept_count_that_cannot_be_built_is_skipped_aloud(chunks: int, tmp_path: Path) -> None:
    """As a number between ranks, the second was another family."""
    cache = Cache(tmp_path)
    cache.write(ENTRY)
    path = cache.path(KEY)
    path.write_text(path.read_text().replace('"spec": "flag_gated:2"', f'"spec": "flag_gated:{chunks}"'))
    with pytest.warns(UserWarning, match=f"a kept plan is skipped, .* chunks is {chunks}; use at most 512"):
        assert cache.read(KEY) is None


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert from_environment() is None, "conftest switches it off"
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    assert from_environment().folder == tmp_path / "plans"  # type: ignore[union-attr]
    monkeypatch.delenv("WEFT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert from_environment().folder == tmp_path / "xdg" / "weft" / "plans"  # type: ignore[union-attr]


def test_specs_are_numbers_between_ranks() -> None:
    specs = [spec(name, chunks) for name in NAMES for chunks in (1, 7, 4096)]
    assert [decode(encode(text)) for text in specs] == specs
    assert len({encode(text) for text in specs}) == len(set(specs))
    assert min(encode(text) for text in specs) > 0 == encode(None)
    assert decode(0) is None


WRITER = """
import sys
from pathlib import Path
from weft.cache import Cache, Entry, Key, space
from weft.between import Between
from weft.problem import Problem
problem = Problem(op="all_gather_matmul", m=64, n=48, k=32, world_size=2)
key = Key(machine={"gpu": "made up"}, versions={"weft": "0"}, problem=problem, space=space())
cache, me, enough = Cache(Path(sys.argv[1])), int(sys.argv[2]), Path(sys.argv[3])
while not enough.exists():
    cache.write(Entry(key=key, spec=f"flag_gated:{1 + me}", us={f"flag_gated:{n}": float(me) for n in range(1, 400)}))
"""


def writer(folder: Path, me: int, enough: Path) -> subprocess.Popen[bytes]:
    """enough: it ends, in its own time, once that is there."""
    return subprocess.Popen([sys.executable, "-c", WRITER, str(folder), str(me), str(enough)])


def test_eight_writers_and_a_killed_one(tmp_path: Path) -> None:
    """While eight processes write one entry, and one of them is killed, a reader sees whole entries alone."""
    folder, enough = tmp_path / "plans", tmp_path / "enough"
    *writers, victim = [writer(folder, me, enough) for me in range(8)]
    try:
        _reads_until(Cache(folder), lambda seen: len(set(seen)) > 1 and "flag_gated:8" in seen)
        victim.send_signal(signal.SIGKILL)
        begun = time.monotonic()
        _reads_until(Cache(folder), lambda seen: len(set(seen)) > 1 and time.monotonic() > begun + 0.5)
        assert victim.wait(60) == -signal.SIGKILL
        enough.touch()
        assert [process.wait(60) for process in writers] == [0] * 7
        Cache(folder).write(ENTRY)
        assert Cache(folder).read(KEY) == ENTRY
    finally:
        for process in (*writers, victim):
            process.kill()
            process.wait()


def _reads_until(cache: Cache, enough: Callable[[list[str]], bool]) -> None:
    """Of what has been seen. A warning is an error."""
    seen: list[str] = []
    deadline = time.monotonic() + 60
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while not enough(seen):
            assert time.monotonic() < deadline, seen
            entry = cache.read(KEY)
            if entry is not None:
                assert set(entry.us.values()) == {float(entry.spec.partition(":")[2]) - 1}
                seen.append(entry.spec)


def test_what_a_killed_writer_left_goes_after_an_hour(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.write(ENTRY)
    old, new = cache.folder / ".old-x.tmp", cache.folder / ".new-x.tmp"
    for path in (old, new):
        path.write_text("{")
    os.utime(old, (0, 0))
    cache.write(ENTRY)
    assert (old.exists(), new.exists()) == (False, True)


@contextmanager
def trials_by_a_clock(fast: str = "shard_p2p", rival: str = "shard_p2p") -> Iterator[list[str]]:
    """Trials on CPUs, of sequential and a rival, one of which is four times as fast; what is bound meanwhile."""
    from weft.execute import groups

    bind, timer_for, contenders = groups.GroupState._bind, groups.timer_for, groups.contenders
    made: list[str] = []

    def noted(self: groups.GroupState, schedule: weft.Schedule, device: torch.device) -> object:
        made.append(schedule.name)
        return bind(self, schedule, device)

    def clock(call: Callable[[], object], calls: int) -> int:
        call()
        return 1_000_000 if made[-1] == fast else 4_000_000

    groups.GroupState._bind = noted  # type: ignore[method-assign, assignment]
    groups.timer_for = lambda device: clock  # type: ignore[assignment]
    groups.contenders = lambda problem, device: ("sequential", rival)
    try:
        yield made
    finally:
        groups.GroupState._bind, groups.timer_for = bind, timer_for  # type: ignore[method-assign]
        groups.contenders = contenders


def _first_calls(folders: list[str]) -> tuple[list[tuple[str, bool, dict[str, float]]], int]:
    """Two calls of auto in a process whose cache is its rank's: what was chosen, and how many schedules were bound."""
    os.environ["WEFT_CACHE_DIR"] = folders[dist.get_rank()]
    try:
        with trials_by_a_clock() as made:
            weft.close()
            check_gather(64, 48, 32, torch.float32, "auto", 0)
            check_gather(64, 48, 32, torch.float32, "auto", 1)
            found = [(choice.spec, choice.kept, choice.us) for choice in weft.choices()]
            weft.close()
            return found, len(made)
    finally:
        os.environ["WEFT_CACHE_DIR"] = ""


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


@pytest.mark.ranks
def test_a_row_count_between_measured_ones_needs_no_trial(ranks: RankFixture) -> None:
    """98 to 104 rows run by one program, of 104."""
    for found, binds in ranks(2).run(_serves, [64, 160, 96, 100, 98, 104, 99]):
        assert found == [(m, "shard_p2p", like) for m, like in ((64, ()), (160, ()), (96, (64, 160)), (104, (64, 160)))]
        assert binds == 2 + 2 + 1 + 1


def _in_use(folder: str, fast: str) -> tuple[list[tuple[str, bool]], list[str], list[str]]:
    """Calls of auto with a kept plan, until it has been proved: choices, schedules that are bound, warnings."""
    from weft.execute.groups import GROUPS

    os.environ["WEFT_CACHE_DIR"] = folder
    try:
        with trials_by_a_clock(fast), warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", UserWarning)
            weft.close()
            for call in range(PROVED_AFTER + 4):
                check_gather(64, 48, 32, torch.float32, "auto", call)
            group = dist.group.WORLD
            assert group is not None
            bound = sorted(schedule.name for schedule in GROUPS.state(group.group_name).schedules())
            found = [(choice.spec, choice.kept) for choice in weft.choices()]
            weft.close()
            return found, bound, [str(warning.message) for warning in seen]
    finally:
        os.environ["WEFT_CACHE_DIR"] = ""


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


def _predicted(asked: str, fast: str) -> tuple[list[str], list[str], int]:
    """Calls of "planned" or "heuristic", until they have been proved: schedules that are bound, warnings, binds."""
    from weft.execute import choose
    from weft.execute.groups import GROUPS

    def named(problem: Problem, device: torch.device) -> str:
        return "shard_p2p"

    with (
        mock.patch.multiple(choose, predicted=named, by_sizes=named),
        trials_by_a_clock(fast) as made,
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always", UserWarning)
        weft.close()
        for call in range(PREDICTED_AFTER + 3):
            check_gather(64, 48, 32, torch.float32, asked, call)
        group = dist.group.WORLD
        assert group is not None
        bound = sorted(schedule.name for schedule in GROUPS.state(group.group_name).schedules())
        weft.close()
        return bound, [str(warning.message) for warning in seen], len(made)


@pytest.mark.ranks
@pytest.mark.parametrize("asked", ["planned", "heuristic"])
def test_what_is_predicted_is_held_against_sequential_in_use(ranks: RankFixture, asked: str) -> None:
    pool = ranks(2)
    for bound, seen, binds in pool.run(_predicted, asked, "shard_p2p"):
        assert (bound, seen) == (["shard_p2p"], [])
        assert binds > 1, "it has been proved"
    for bound, seen, _ in pool.run(_predicted, asked, "sequential"):
        assert bound == ["sequential", "shard_p2p"]
        (text,) = seen
        assert text.endswith(f"shard_p2p was chosen by {asked!r}, but is no faster here; sequential is put back")


def test_calls_until_a_proof_are_counted_once() -> None:
    left, program = Unproved(), object()
    assert not left.due(program)  # type: ignore[arg-type]
    left.add(program, "its problem", PROVED_AFTER)  # type: ignore[arg-type]
    assert [left.due(program) for _ in range(PROVED_AFTER + 3)].index(True) == PROVED_AFTER - 1  # type: ignore[arg-type]
    left.add(program, "its problem", PROVED_AFTER)  # type: ignore[arg-type]
    left.forget(program)  # type: ignore[arg-type]
    assert not any(left.due(program) for _ in range(PROVED_AFTER + 3))  # type: ignore[arg-type]
    left.verdicts["its problem"] = "sequential"
    left.add(program, "its problem", PROVED_AFTER)  # type: ignore[arg-type]
    assert not any(left.due(program) for _ in range(PROVED_AFTER + 3)), "bound anew"  # type: ignore[arg-type]


def _come_and_go(asked: str, fast: str) -> tuple[int, int]:
    """More row counts than a group keeps, three times: warnings, and the trials that were made."""
    from weft.execute import choose, groups

    def named(problem: Problem, device: torch.device) -> str:
        return "shard_p2p"

    with (
        mock.patch.multiple(choose, predicted=named, by_sizes=named),
        mock.patch.object(groups, "PROGRAMS_PER_GROUP", 2),
        mock.patch.object(groups.GroupState, "_proved", autospec=True, side_effect=groups.GroupState._proved) as proved,
        trials_by_a_clock(fast),
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always", UserWarning)
        weft.close()
        for _ in range(3):
            for m in (64, 32, 16, 8):
                for call in range(PREDICTED_AFTER + 1):
                    check_gather(m, 48, 32, torch.float32, asked, call)
        weft.close()
        return len(seen), proved.call_count


@pytest.mark.ranks
@pytest.mark.parametrize("fast", ["sequential", "shard_p2p"])
def test_a_verdict_holds_for_programs_that_are_bound_anew(ranks: RankFixture, fast: str) -> None:
    assert ranks(2).run(_come_and_go, "planned", fast) == [(4 if fast == "sequential" else 0, 4)] * 2


def test_plans_are_kept_by_the_profile_that_says_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, device = KeptPlans(SimpleNamespace(world_size=2, nodes=())), torch.device("cpu")  # type: ignore[arg-type]
    before = plans._key(PROBLEM, device)
    assert plans._key(PROBLEM, device) == before
    monkeypatch.setenv("WEFT_MACHINE", "a100x8")
    monkeypatch.setenv("WEFT_MACHINE_FORCE", "1")
    assert plans._key(PROBLEM, device).digest != before.digest


def test_folders_on_the_way_are_for_their_user_alone(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        Cache(tmp_path / "one" / "two").write(ENTRY)
    finally:
        os.umask(mask)
    assert [mode(tmp_path / name) for name in ("one", "one/two", "one/two/plans")] == [0o700] * 3


def _one_cannot_read() -> list[str]:
    """Rank 1 has a profile that is not there; then the group goes on."""
    return told_with([{"WEFT_MACHINE": machine} for machine in ("nothing.json" if dist.get_rank() == 1 else "", "")], "auto")


@pytest.mark.ranks
def test_a_profile_that_one_rank_cannot_read_is_told_to_all(ranks: RankFixture) -> None:
    first, second = ranks(2).run(_one_cannot_read)
    assert first == ["rank 1 cannot read what schedules are chosen by (WEFT_EFFORT, WEFT_MACHINE): see there", "right"]
    assert second[0].startswith("cannot read nothing.json")
    assert second[1] == "right"
