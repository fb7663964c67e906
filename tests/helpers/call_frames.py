"""The Python functions of weft that a call runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import weft

MOST_FRAMES = 8
"""The most frames of weft in a warm call without gradients."""
MOST_IN_PLACE = 10
"""The same of collectives that write the caller's tensor: they look whether peers can write it, and return None."""
MOST_STRAIGHT = 32
"""The most frames of weft in such a call that is enqueued launch by launch (weft.runtime.straight)."""
_PACKAGE = Path(weft.__file__).parent


def frames_of(work: Callable[[], object]) -> list[tuple[str, str]]:
    """(file, function) of weft's Python functions that run."""
    seen: list[tuple[str, str]] = []

    def note(frame: Any, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(_PACKAGE):
            seen.append((path.relative_to(_PACKAGE).as_posix(), frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen
