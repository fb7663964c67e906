"""What a call on CPUs raises where one of its lanes fails: the reason, whichever lane has it, on whichever thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from single_process_ranks import rank_groups

from weft.core.schedule import Lane
from weft.runtime.host import HostProgram
from weft.runtime.host_resources import LaneThread

COMPUTE, COPY = Lane("compute", "compute", ()), Lane("copy", "copy", ())


@pytest.fixture
def program() -> Iterator[Any]:
    """One that has lanes to run, and no steps."""
    thread = LaneThread("test")
    made: Any = HostProgram.__new__(HostProgram)
    made.rank_group, made._first, made.resources = rank_groups()[0], set(), SimpleNamespace(thread=lambda name: thread)
    yield made
    thread.close()


def _fails() -> None:
    raise MemoryError("planted")


@pytest.mark.parametrize("failing", [COMPUTE, COPY])
def test_the_reason_is_raised_and_not_what_another_lane_makes_of_it(program: Any, failing: Lane) -> None:
    def waits() -> None:
        program.rank_group.wait_until(lambda: False, lambda: "a flag")

    works: list[tuple[Lane, Callable[[], None]]] = [(one, _fails if one is failing else waits) for one in (COMPUTE, COPY)]
    with pytest.raises(MemoryError, match="planted"):
        program._run_lanes(works)
