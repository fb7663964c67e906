"""Options that a campaign would stumble over at its end are refused at once, and what is written says what ran."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import fuzz
import pytest
import races
import soak
import torch
from campaign import append


@pytest.mark.parametrize(
    ("made", "words", "says"),
    [
        (races, ["--only", "nothing"], "--only 'nothing'"),
        (soak, ["--device", "cuda"], "--device cuda"),
        (soak, ["--calls", "0"], "--calls: '0'"),
        (fuzz, ["--device", "cpu", "--trials", "1", "--json", "/dev/null/x"], "--json"),
    ],
)
def test_a_campaign_of_nothing_is_refused(
    made: Any, words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["campaign", *words])
    with pytest.raises(SystemExit) as ended:
        made.main()
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_lines_are_appended_with_versions_and_commit(tmp_path: Path) -> None:
    given = argparse.Namespace(json=tmp_path / "lines", commit="abc", device="cpu")
    append(given, [{"case": 1}])
    append(given, [{"case": 2}])
    lines = [json.loads(text) for text in given.json.read_text().splitlines()]
    assert [(line["case"], line["commit"], line["versions"]["torch"]) for line in lines] == [
        (1, "abc", torch.__version__),
        (2, "abc", torch.__version__),
    ]
    append(argparse.Namespace(json=None), [{"case": 3}])
