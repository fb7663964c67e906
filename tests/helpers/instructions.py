"""How much a call does, counted so that other work on the machine does not change it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def _traced(call: Callable[[], object]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def instructions(call: Callable[[], object]) -> int:
    """How many instructions Python interprets in a call."""
    _traced(lambda: None)  # Python 3.12 reports no instructions the first time
    return _traced(call)


def calls(call: Callable[[], object]) -> int:
    """How many Python functions a call enters."""
    count = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count
