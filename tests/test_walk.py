"""The way of a call that docs/design.md walks: the files that it names are those that a later call on CPUs passes through."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from conftest import RankFixture

import weft

ROOT = Path(__file__).parents[1]
PACKAGE = Path(weft.__file__).parent
IN_LONG_WAITS = "comm/processes.py"
"""Whether peers live is asked only where a wait takes more than 20 ms, as it may on cores that have other work."""


def walked() -> list[str]:
    """The files of the walk, in its order."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = text.partition("\n## The way of a call\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([\w/.]+\.py)` \|", section, re.MULTILINE)


def _passed_through() -> list[str]:
    """The files of weft that a later call enters on the caller's thread, in the order of their first function."""
    a, b = torch.ones(8, 16), torch.ones(16, 8)
    weft.close()
    for _ in range(3):
        weft.all_gather_matmul(a, b, schedule="flag_gated:2")
    seen: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            seen.setdefault(path.relative_to(PACKAGE).as_posix())

    sys.setprofile(note)
    try:
        weft.all_gather_matmul(a, b, schedule="flag_gated:2")
    finally:
        sys.setprofile(None)
    return list(seen)


@pytest.mark.ranks
def test_a_call_passes_through_the_files_of_the_walk(ranks: RankFixture) -> None:
    found, *_ = ranks(2).run(_passed_through)
    assert sorted(set(found) - {IN_LONG_WAITS}) == sorted(walked())
