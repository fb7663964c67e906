"""What the command line prints fits the terminal, and cuts nothing off."""

from __future__ import annotations

import pytest

from weft.cli import main, output
from weft.cli.gantt import gantt
from weft.span import Span

LOSSES = [
    "characterize",
    "llama3-8b",
    "--ranks",
    "2",
    "--tokens",
    "65536",
    "--op",
    "all_gather_matmul",
    "--schedule",
    "shard_p2p",
]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_table_that_is_too_wide_comes_in_parts_and_cuts_no_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    assert main(LOSSES) == 0
    wide = capsys.readouterr().out.splitlines()
    monkeypatch.setattr(output, "PIPE_WIDTH", width)
    assert main(LOSSES) == 0
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= width
    rows = [line.split() for line in wide if line.startswith("shard_p2p")]
    assert [row[1] for row in rows] == ["65536"] * 2
    for row in rows:
        parts = [line.split() for line in narrow.splitlines() if line.startswith("shard_p2p") and line.split()[1:4] == row[1:4]]
        assert [cell for part in parts for cell in part[4:]] == row[4:]


def test_machines_are_named_in_every_part_of_a_narrow_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "PIPE_WIDTH", 60)
    assert main(["machines"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert sum(line.split()[:1] == ["h200x8"] for line in lines) == 2


def test_the_legend_of_a_chart_folds_between_entries() -> None:
    spans = [Span(rank=0, lane="compute", kind=kind, name=kind, start_us=0, end_us=9) for kind in ("gemm", "copy", "wait")]
    lines = gantt(spans, rank=0, width=40).plain.splitlines()
    assert lines[-2:] == [" " * 9 + "# gemm   = copy   . wait", " " * 9 + "| a step starts"]


def test_plan_shows_each_familys_best_and_with_why_every_candidate_once(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "llama3-8b", "--tp", "2", "--site", "MLP down"]
    assert main(command) == 0
    short = capsys.readouterr().out
    assert sum(line.startswith("direct_store") for line in short.splitlines()) == 1
    assert main([*command, "--why"]) == 0
    long = capsys.readouterr().out
    assert sum(line.startswith("direct_store:") for line in long.splitlines()) > 1
    assert long.count("-bound: the GEMM alone takes") == 1
    assert "DIL: the pieces alone over the whole alone" in long
