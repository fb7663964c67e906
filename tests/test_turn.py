"""Programs that wait on SMs take turns: a stream waits for the stream of the program before, and for nothing else."""

from __future__ import annotations

import pytest

from weft.runtime import turn
from weft.runtime.turn import Turn


class FakeDriver:
    def __init__(self) -> None:
        self.ordered: list[tuple[int, int]] = []
        drivers.append(self)

    def event(self) -> str:
        return "event"

    def after(self, later: int, earlier: int, event: object) -> None:
        assert event == "event"
        self.ordered.append((earlier, later))


drivers: list[FakeDriver] = []


def test_a_program_on_another_stream_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "Driver", FakeDriver)
    drivers.clear()
    one = Turn()
    for stream in (7, 7, 0, 0, 7):
        one.take(stream)
    assert [driver.ordered for driver in drivers] == [[(7, 0), (0, 7)]]


def test_programs_on_one_stream_need_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "Driver", FakeDriver)
    drivers.clear()
    one = Turn()
    for _ in range(3):
        one.take(0)
    assert drivers == []
