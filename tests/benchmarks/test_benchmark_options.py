"""Benchmarks: what they would stumble over at the end is said at once, and what was left out is no success."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks import measure, rows, runner
from benchmarks.measure import Failed, Job
from benchmarks.rows import Row
from weft.core import codec
from weft.core.problem import Problem


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--modes", "graph,eagre"], "--modes: 'eagre'"),
        (["--modes", "graph,"], "--modes: ''"),
        (["--rounds", "0"], "--rounds: '0'"),
        (["--json", "/dev/null/x"], "--json"),
    ],
)
def test_options_are_looked_at_before_anything_runs(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        measure.parser("text", rounds=3).parse_args(words)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_options_that_will_do(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    given = measure.parser("text", rounds=3, modes="").parse_args(["--json", str(path)])
    assert (given.json, given.modes, given.rounds, path.read_text()) == (path, "", 3, "")
    assert measure.parser("text", rounds=3).parse_args(["--modes", "eager", "--rounds", "1"]).modes == "eager"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one rank, without a GPU."""
    for owner, name in ((measure, "release"), (runner, "release"), (measure, "alarm"), (dist, "destroy_process_group")):
        monkeypatch.setattr(owner, name, lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr("faulthandler.cancel_dump_traceback_later", lambda: None)


def _row(case: str) -> Row:
    return Row(bench="x", op="all_reduce", case=case, dtype="bfloat16", world_size=1, mode="graph", machine="none")


def _fails() -> Iterator[Row]:
    yield _row("before")
    raise Failed("auto", "no room")


@pytest.mark.usefixtures("world")
def test_a_case_that_is_left_out_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lines.jsonl"
    jobs = [Job(name="one", run=_fails), Job(name="two", run=lambda: [_row("after")])]
    found, left_out = runner.run_jobs(jobs, argparse.Namespace(json=path), missing={"communication/symmetric": "no room"})
    assert ([row.case for row in found], left_out) == (["before", "after"], ["one"])
    assert found[0].missing == {"communication/symmetric": "no room"}
    assert rows.read(path) == found
    with pytest.raises(SystemExit) as ended:
        measure.stop(left_out)
    assert ended.value.code == 1
    assert capsys.readouterr().err.endswith("1 left out: one\n")
    measure.stop([])


@pytest.mark.usefixtures("world")
def test_a_row_is_written_before_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines.jsonl"
    monkeypatch.setattr(runner, "sentence", lambda row: row.extra["nothing"])
    with pytest.raises(KeyError):
        runner.run_jobs([Job(name="one", run=lambda: [_row("one")])], argparse.Namespace(json=path))
    assert rows.read(path)[0].case == "one"


@pytest.mark.usefixtures("world")
def test_rows_of_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """One a mode, with the host's times of eager calls alone."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "GPU")
    monkeypatch.setattr(measure, "versions", lambda device: {"torch": "2"})
    times = {mode: {"weft/auto": measure.Times(us=3.0, host_us=2.0)} for mode in ("graph", "eager")}
    problem = Problem(op="all_gather_matmul", m=8, n=4, k=2, world_size=2)
    given = argparse.Namespace(commit="abc", rounds=7)
    made = measure.each_mode(times, bench="x", op=problem.op, case="one", dtype="bfloat16", problem=problem, arguments=given)
    assert [(row.mode, row.us, row.host_us) for row in made] == [
        ("graph", {"weft/auto": 3.0}, {}),
        ("eager", {"weft/auto": 3.0}, {"weft/auto": 2.0}),
    ]
    assert (made[0].machine, made[0].commit, made[0].samples, made[0].world_size) == ("2 x GPU", "abc", 7, 2)
    assert codec.load(Problem, made[0].problem) == problem
