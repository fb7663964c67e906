"""benchmarks.baseline without a GPU: how runs become rows, how two commits compare, and how processes end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.baseline import figures, runs
from benchmarks.baseline.figures import CALL, compared, merged, ratios
from benchmarks.baseline.parts import WORK
from benchmarks.rows import CASE, Row, append, read


def _row(value: float, *, p10: float | None = None, unit: str = "host_us", commit: str = "a", control: bool = False) -> Row:
    extra: dict[str, Any] = {"part": "host", "control": control, "runs": [value]}
    extra |= {"p10": [p10]} if p10 is not None else {}
    given: dict[str, Any] = {"extra": extra | {"bytes": value}} if unit == "bytes" else {"extra": extra, unit: {CALL: value}}
    about: dict[str, Any] = {"dtype": "float32", "world_size": 2, "mode": "eager", "machine": "2 cores", "commit": commit}
    return Row(bench="baseline", op="torch", case="mm", **about, **given)


def test_the_runs_of_a_figure_are_one_row() -> None:
    earlier = merged([_row(9.0, p10=5.0), _row(1.0, p10=1.0)])
    row = merged([earlier, _row(3.0, p10=2.0)])
    assert (row.host_us, row.us) == ({CALL: 3.0}, {})
    assert (row.extra["runs"], row.extra["p10"], "p90" in row.extra) == ([9.0, 1.0, 3.0], [5.0, 1.0, 2.0], False)
    assert merged([_row(64, unit="bytes"), _row(96, unit="bytes")]).extra["bytes"] == 80


def test_ratios_are_of_runs_that_followed_each_other_and_of_floors() -> None:
    before, after = (merged([_row(v, p10=v / 2) for v in values]) for values in ((1.0, 10.0, 100.0), (2.0, 10.0, 150.0)))
    assert ratios(before, after) == (1.5, 2.0)
    assert ratios(_row(0, unit="bytes"), _row(0, unit="bytes")) == (1.0, 1.0)
    assert ratios(merged([_row(1.0), _row(3.0)]), _row(4.0)) == (2.0, 4.0)  # of values, where the runs are not as many


@pytest.mark.parametrize(("after", "control", "good"), [(1.02, False, True), (1.05, False, False), (1.05, True, True)])
def test_a_figure_is_worse_beyond_the_tolerance(
    after: float, control: bool, good: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    for row in (_row(1.0, control=control), _row(after, commit="b", control=control)):
        append(path, row)
    assert compared(path, "a", "b") is good
    assert ("WORSE" in capsys.readouterr().out) is not good


def test_trees_take_turns() -> None:
    found = list(runs.turns(["x", "y"], ["a", "b"], 2))
    assert [commit for _, _, commit in found] == ["a", "b", "a", "b", "b", "a", "b", "a"]
    assert [name for _, name, _ in found] == ["x", "x", "y", "y"] * 2


def test_a_campaign_adds_to_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are added to a commit's row; what a rank left out, and how a part failed, is named."""
    path, values = tmp_path / "rows.jsonl", iter((4.0, 8.0))
    append(path, _row(2.0, commit="a"))
    lost = Row(**{**vars(_row(1.0)), "host_us": {}, "missing": {CASE: "no room"}})
    monkeypatch.setattr(runs, "ran", lambda *given: ([_row(next(values), commit=""), lost], "status [1]"))
    failed = runs.campaign(["host"], {"a": tmp_path}, 2, float("inf"), path)
    (row,) = read(path)
    assert (row.commit, row.extra["runs"], figures.value_of(row)) == ("a", [2.0, 4.0, 8.0], 4.0)
    assert len(failed) == 4
    assert {text.rpartition(": ")[2] for text in failed} == {"no room", "status [1]"}


def test_what_is_left_at_the_limit_is_killed() -> None:
    quick, slow = (
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({s})"], start_new_session=True) for s in (0, 60)
    )
    assert runs.ended([quick], 30) == ""
    assert "ended after" in runs.ended([quick, slow], 0.5)
    assert slow.poll() == -9


def test_every_part_has_something_to_do() -> None:
    assert {part.work for part in runs.PARTS.values()} == set(WORK)


@pytest.mark.ranks
@pytest.mark.slow
def test_first_calls_of_two_cpu_ranks(tmp_path: Path) -> None:
    """A part from beginning to end, in processes of its own."""
    path = tmp_path / "rows.jsonl"
    assert runs.campaign(["cpu_first"], {"abc": runs.ROOT}, 1, float("inf"), path) == []
    found = read(path)
    assert {row.op for row in found} == {"any", "all_gather_matmul", "matmul_reduce_scatter"}
    assert all(row.commit == "abc" and row.host_us[CALL] > 0 and len(row.extra["p90"]) == 1 for row in found)
    assert compared(path, "abc", "abc")
