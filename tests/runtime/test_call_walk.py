"""The path of a call that docs/design.md walks: the files that it names are those that a later call on CPUs passes through."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from call_walk import walked
from conftest import RankFixture

import weft

PACKAGE = Path(weft.__file__).parent
WAITS = (
    "RankGroup.wait_until",
    "RankGroup._await_count",
    "RankGroup.await_same_call",
    "HostProgram.wait",
)
"""Functions that wait for peers, or are called where a lane has to wait. What they call depends on when the peers come."""
MOST_CALLS = 112


def _passed_through() -> list[tuple[str, str]]:
    """(file, function) of weft's functions that a later call calls on the caller's thread, in their order, without those that
    are called within a wait for peers."""
    a, b = torch.ones(8, 16), torch.ones(16, 8)
    weft.close()
    for _ in range(3):
        weft.all_gather_matmul(a, b, schedule="flag_gated:2")
    seen: list[tuple[str, str]] = []
    waiting = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal waiting
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if event not in ("call", "return") or not path.is_relative_to(PACKAGE):
            return
        if event == "return":
            waiting -= name in WAITS
            return
        if not waiting and name not in WAITS:
            seen.append((path.relative_to(PACKAGE).as_posix(), name))
        waiting += name in WAITS

    sys.setprofile(note)
    try:
        weft.all_gather_matmul(a, b, schedule="flag_gated:2")
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.ranks
def test_a_call_passes_through_the_files_of_the_walk(ranks: RankFixture) -> None:
    for found in ranks(2).run(_passed_through):
        assert list(dict.fromkeys(file for file, _ in found)) == walked(), found
        assert len(found) <= MOST_CALLS
