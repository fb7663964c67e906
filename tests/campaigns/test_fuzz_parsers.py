"""A short form of tests/campaigns/fuzz_parsers.py: whatever a file holds, weft reads it, or refuses it with a ValueError."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fuzz_parsers import Choices, Target, at_random, edited, save_input, targets, text_of, tried

pytestmark = pytest.mark.slow

TARGETS = targets()


@pytest.mark.parametrize("name", TARGETS)
def test_right_files_are_read(name: str) -> None:
    for text in TARGETS[name].seeds:
        TARGETS[name].parser(text)


@pytest.fixture(autouse=True)
def _by_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a parser takes is no matter of what else the machine does."""
    monkeypatch.setattr("fuzz_parsers.time", SimpleNamespace(monotonic=time.process_time))


@pytest.mark.parametrize("name", TARGETS)
def test_no_file_breaks_a_parser(name: str) -> None:
    inputs, found = at_random(TARGETS[name], seconds=10, inputs=300)
    assert inputs == 300
    assert found == {}


CORPUS = [
    "",
    "{",
    "[]",
    "null",
    "3",
    '"a"',
    "{}",
    "NaN",
    "1" * 5000,
    "[" * 100_000,
    '{"a": 1, "a": 2}',
    "\ufeff{}",
    "\x00",
    "\ud800",
]
"""Beside edits: what is no JSON, or JSON of another kind."""


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_no_such_file_is_refused(name: str) -> None:
    for text in CORPUS:
        assert tried(TARGETS[name], text) == "", text[:20]


def test_a_parser_that_breaks_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(text: str) -> None:
        if json.loads(text)["a"] is None:
            raise KeyError("planted")

    _, found = at_random(Target(breaks, ('{"a": 1}',)), seconds=10, inputs=400)
    assert "KeyError: 'planted'" in found
    shown = found["KeyError: 'planted'"]
    assert save_input("test", shown, tmp_path).read_text() == shown
    monkeypatch.setattr("fuzz_parsers.SLOW_S", 0.0)
    assert tried(Target(lambda text: sum(range(100_000)), ()), "").startswith("it took")


def test_edits_follow_from_the_bytes() -> None:
    document = {"a": [1, 2, {"b": "c"}], "d": 3}
    texts = {json.dumps(edited(document, Choices(bytes([n, 0, n, 0, n % 6, 0])))) for n in range(60)}
    assert len(texts) > 20
    assert document == {"a": [1, 2, {"b": "c"}], "d": 3}
    assert text_of(b"\x00plain", ("{}",)) == "plain"
    assert text_of(b"\xff" * 9, ('{"a": 1}',)) == text_of(b"\xff" * 9, ('{"a": 1}',))
