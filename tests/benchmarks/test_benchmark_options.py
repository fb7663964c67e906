"""Benchmarks: what they would stumble over at the end is said at once, and what was left out is no success."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import measure
import parts
from measure import Failed, Job


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
    for owner, name in ((measure, "release"), (parts, "release"), (measure, "alarm"), (dist, "destroy_process_group")):
        monkeypatch.setattr(owner, name, lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr("faulthandler.cancel_dump_traceback_later", lambda: None)


def _fails() -> Iterator[dict[str, Any]]:
    yield {"case": "before", "missing": {}}
    raise Failed("auto", "no room")


@pytest.mark.usefixtures("world")
def test_a_case_that_is_left_out_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lines.jsonl"
    jobs = [Job(name="one", run=_fails), Job(name="two", run=lambda: [{"case": "after", "missing": {}}])]
    lines, left_out = parts.run_jobs(jobs, str, argparse.Namespace(json=path))
    assert ([line["case"] for line in lines], left_out) == (["before", "after"], ["one"])
    assert [json.loads(text) for text in path.read_text().splitlines()] == lines
    with pytest.raises(SystemExit) as ended:
        measure.stop(left_out)
    assert ended.value.code == 1
    assert capsys.readouterr().err.endswith("1 left out: one\n")
    measure.stop([])


@pytest.mark.usefixtures("world")
def test_a_line_is_written_before_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    job = Job(name="one", run=lambda: [{"case": "one", "missing": {}}])
    with pytest.raises(KeyError):
        parts.run_jobs([job], lambda line: str(line["us"]), argparse.Namespace(json=path))
    assert json.loads(path.read_text())["case"] == "one"
