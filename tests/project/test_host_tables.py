"""Tables of host time: each figure comes from the column of its method, and the newest row of a case counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import generate
import pytest
import text_tables

from benchmarks.rows import Row, append

VERSIONS = {"torch": "2", "cuda": "13", "nccl": "2.28"}


def write(path: Path, op: str, state: str, host_us: dict[str, float], **changes: Any) -> None:
    us = {name: 2 * value for name, value in host_us.items()}
    about: dict[str, Any] = {"dtype": "bfloat16", "world_size": 2, "mode": "eager", "machine": "2 x GPU", "versions": VERSIONS}
    append(path, Row(bench="host", op=op, case="one", state=state, us=us, host_us=host_us, **{**about, **changes}))


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(text_tables, "RESULTS", tmp_path)
    monkeypatch.setattr(text_tables, "date_of", lambda commit: "a day")
    path = tmp_path / "host.jsonl"
    call = {"weft/auto": 30.0, "weft/sequential": 80.0, "weft/flag_gated:2": 35.0, "sequential/new": 60.0}
    write(path, "all_gather_matmul", "same tensors", call | {"weft/auto": 99.0}, chosen="sequential")
    write(path, "all_gather_matmul", "same tensors", call | {"computation/cublas": 17.0}, chosen="sequential")
    write(path, "all_gather_matmul", "new addresses", call | {"weft/auto": 90.0}, chosen="sequential")
    steps = {"weft/eager": 5000.0, "peer/hand": 2500.0}
    found = {"output": 0.001, "input": 0.004}
    extra = {"difference": {"weft/eager": found, "peer/hand": found}, "step_bytes": {"weft/eager": 3 << 20}}
    write(path, "training", "", steps, extra=extra)
    return path


def cells(words: str) -> list[list[str]]:
    return [line.split() for line in generate.made(words).splitlines()]


@pytest.mark.usefixtures("results")
@pytest.mark.parametrize(("clock", "auto"), [("host", "30.0"), ("loop", "60.0")])
def test_calls_by_both_clocks(clock: str, auto: str) -> None:
    same, new = [row for row in cells(f"host_calls host {clock}") if row[:1] == ["all_gather_matmul"]]
    assert same[2:5] == ["same", "tensors", auto]
    assert same[-2:] == ["0.50", "sequential"]
    assert new[2:4] == ["new", "addresses"]


@pytest.mark.usefixtures("results")
def test_steps_are_compared_with_the_hand_written_one() -> None:
    _, _, case, hand, weft, *_ = cells("host_steps host training")
    assert case == ["one"]
    assert hand == ["PyTorch", "by", "hand", "2,500", "1.00", "5,000", "1.00", "-"]
    assert weft == ["weft", "5,000", "2.00", "10,000", "2.00", "3"]
