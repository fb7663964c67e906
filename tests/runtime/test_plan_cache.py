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
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from weft_log import logged, warned

from weft.core.problem import Problem
from weft.runtime.plan_cache import Cache, Entry, Key, decode, digest_of_families, encode, from_environment
from weft.runtime.tuner import GroupPlanCache
from weft.schedules import FAMILIES, spec

PROBLEM = Problem(op="all_gather_matmul", m=64, n=48, k=32, world_size=2)
KEY = Key(machine={"gpu": "made up"}, versions={"weft": "0"}, problem=PROBLEM, families=digest_of_families(PROBLEM))
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


@pytest.mark.parametrize(
    "other",
    [
        {"machine": {"gpu": "another"}},
        {"versions": {"weft": "1"}},
        {"problem": dataclasses.replace(PROBLEM, m=65)},
        {"families": "0123"},
    ],
)
def test_another_key_has_another_entry(other: dict[str, object], tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.write(ENTRY)
    key = dataclasses.replace(KEY, **other)  # type: ignore[arg-type]
    assert cache.read(key) is None
    assert cache.path(key) != cache.path(KEY), "they would replace each other"
    cache.path(KEY).rename(cache.path(key))
    with warned("a cached plan is skipped, .*: it is for all_gather_matmul M=64"):
        assert cache.read(key) is None


def spoiled(text: str) -> list[tuple[str, str]]:
    data = json.loads(text)
    return [
        (json.dumps(data | {"spec": "os.system"}), "schedule is 'os.system'"),
        (json.dumps(data | {"spec": "two_shot"}), "is for matmul_all_reduce, all_reduce alone"),
        (text[:-1] + " " * (1 << 21) + "}", "is not JSON"),
    ]


def test_broken_entries_are_skipped_aloud(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.write(ENTRY)
    path = cache.path(KEY)
    for text, reason in spoiled(path.read_text()):
        path.write_text(text)
        with warned(f"a cached plan is skipped, .*{reason}"):
            assert cache.read(KEY) is None


def test_what_others_could_have_written_is_skipped(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.write(ENTRY)
    path = cache.path(KEY)
    for mode in (0o620, 0o602):
        path.chmod(mode)
        with warned("other users could have written it"):
            assert cache.read(KEY) is None
    real = tmp_path / "elsewhere.json"
    path.rename(real)
    real.chmod(0o600)
    path.symlink_to(real)
    with warned("a cached plan is skipped"):
        assert cache.read(KEY) is None


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with warned("a measured plan is not stored: .*set WEFT_CACHE_DIR"):
        Cache(tmp_path / "file").write(ENTRY)


def test_a_user_without_a_home_keeps_nothing_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user may have no entry and no HOME: the first call of every problem raised."""
    for name in ("WEFT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with mock.patch.object(Path, "home", side_effect=RuntimeError("Could not determine home directory.")):
        with warned("not stored: Could not determine home directory. Set WEFT_CACHE_DIR to a folder"):
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
    with warned(f"a cached plan is skipped, .* chunks is {chunks}; use at most 512"):
        assert cache.read(KEY) is None


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert from_environment() is None, "conftest switches it off"
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    assert from_environment().folder == tmp_path / "plans"  # type: ignore[union-attr]
    monkeypatch.delenv("WEFT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert from_environment().folder == tmp_path / "xdg" / "weft" / "plans"  # type: ignore[union-attr]


def test_specs_are_numbers_between_ranks() -> None:
    specs = [spec(name, chunks) for name in FAMILIES for chunks in (1, 7, 4096)]
    assert [decode(encode(text)) for text in specs] == specs
    assert len({encode(text) for text in specs}) == len(set(specs))
    assert min(encode(text) for text in specs) > 0 == encode(None)
    assert decode(0) is None


WRITER = """
import sys
from pathlib import Path
from weft.runtime.plan_cache import Cache, Entry, Key, digest_of_families
from weft.core.problem import Problem
problem = Problem(op="all_gather_matmul", m=64, n=48, k=32, world_size=2)
key = Key(machine={"gpu": "made up"}, versions={"weft": "0"}, problem=problem, families=digest_of_families(problem))
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
    """Of what has been seen. Nothing is logged."""
    seen: list[str] = []
    deadline = time.monotonic() + 60
    with logged() as said:
        while not enough(seen):
            assert time.monotonic() < deadline, seen
            entry = cache.read(KEY)
            if entry is not None:
                assert set(entry.us.values()) == {float(entry.spec.partition(":")[2]) - 1}
                seen.append(entry.spec)
    assert said == []


def test_what_a_killed_writer_left_goes_after_an_hour(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.write(ENTRY)
    old, new = cache.folder / ".old-x.tmp", cache.folder / ".new-x.tmp"
    for path in (old, new):
        path.write_text("{")
    os.utime(old, (0, 0))
    cache.write(ENTRY)
    assert (old.exists(), new.exists()) == (False, True)


def test_plans_are_kept_by_the_profile_that_says_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, device = GroupPlanCache(SimpleNamespace(world_size=2, nodes=())), torch.device("cpu")  # type: ignore[arg-type]
    before = plans._key(PROBLEM, device)
    assert plans._key(PROBLEM, device) == before
    monkeypatch.setenv("WEFT_MACHINE", "a100x8")
    assert plans._key(PROBLEM, device).digest != before.digest


def test_folders_on_the_way_are_for_their_user_alone(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        Cache(tmp_path / "one" / "two").write(ENTRY)
    finally:
        os.umask(mask)
    assert [mode(tmp_path / name) for name in ("one", "one/two", "one/two/plans")] == [0o700] * 3


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_regular_file_is_skipped(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """A FIFO would make the reader wait for a writer; a directory would leave a descriptor open at each read."""
    cache = Cache(tmp_path)
    cache.write(ENTRY)
    cache.path(KEY).unlink()
    make(cache.path(KEY))
    before = len(os.listdir("/proc/self/fd"))
    with logged() as said:
        for _ in range(3):
            assert cache.read(KEY) is None
    assert len(os.listdir("/proc/self/fd")) == before
    assert any("no regular file" in text for text in said)
