"""Views of shared memory survive the garbage collector: a view in a reference cycle ended the process."""

from __future__ import annotations

import gc
from typing import Any

from weft.comm.control import ControlSegment


def test_words_in_a_cycle_are_collected() -> None:
    for _ in range(20):
        cycle: dict[str, Any] = {"control": ControlSegment.private()}
        cycle["itself"] = cycle
        cycle["control"].log(1, 5)
        del cycle
        gc.collect()
