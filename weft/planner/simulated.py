"""Simulates one schedule on one machine: its time, the sequential program's, its losses, and its spans."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from weft.core.machine import Machine
from weft.core.schedule import Schedule
from weft.core.span import Span
from weft.perf import run
from weft.planner.losses import Signature, signature
from weft.planner.values import predicted
from weft.schedules import build

Progress = Callable[[str, int, int], None]
FLAGS = ("wait", "signal")


@dataclass(frozen=True, kw_only=True)
class LaneUse:
    """The use of a lane of one rank in a call.

    busy_us: the time of steps that work, including gates of a kernel. waiting_us: the time of waits. Neither includes signals.
    """

    rank: int
    lane: str
    steps: int
    busy_us: float
    waiting_us: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The simulation of one schedule.

    machine: the name of the machine. sequential_us: the time of the same problem's sequential program.
    losses: the decomposition and contention losses, and the exposed time. spans: the spans of all steps of all ranks.
    """

    machine: str
    sequential_us: float
    losses: Signature
    spans: tuple[Span, ...]

    @property
    def total_us(self) -> float:
        return self.losses.total_us

    @property
    def slowest(self) -> int:
        """The first of the ranks that end last."""
        return max(self.spans, key=lambda span: (span.end_us, -span.rank)).rank if self.spans else 0

    @property
    def lanes(self) -> tuple[LaneUse, ...]:
        """The use of each lane, in the order of ranks and lanes."""
        return tuple(lane_uses(self.spans))


def simulated(schedule: Schedule, machine: Machine, progress: Progress) -> Simulation:
    """Simulate a schedule. Raises ValueError as `weft.perf.run` does."""
    steps = ("the schedule", "its halves alone", "the sequential program")
    progress(steps[0], 0, len(steps))
    whole = run(schedule, machine)
    progress(steps[1], 1, len(steps))
    losses = signature(schedule, machine, predicted(schedule, whole, machine))
    progress(steps[2], 2, len(steps))
    sequential_us = run(build(schedule.problem, "sequential"), machine).total_us
    progress(steps[2], 3, len(steps))
    return Simulation(machine=machine.name, sequential_us=sequential_us, losses=losses, spans=whole.spans)


def lanes_of(spans: Iterable[Span]) -> list[tuple[int, str]]:
    """Return (rank, lane) of the spans in order of rank. The compute lane is first, and numbers in names sort by value."""

    def key(lane: tuple[int, str]) -> tuple[int, bool, list[tuple[int, str]]]:
        parts = re.findall(r"(\D*)(\d*)", lane[1])
        return lane[0], lane[1] != "compute", [(int(digits or 0), words) for words, digits in parts]

    return sorted({(span.rank, span.lane) for span in spans}, key=key)


def lane_uses(spans: Sequence[Span]) -> Iterator[LaneUse]:
    """Yield the use of each lane. A lane runs one step at a time, so durations add up."""
    by_lane: dict[tuple[int, str], list[Span]] = {}
    for span in spans:
        by_lane.setdefault((span.rank, span.lane), []).append(span)
    for rank, lane in lanes_of(spans):
        items = by_lane[rank, lane]
        busy_us = sum(span.duration_us for span in items if span.kind not in FLAGS)
        waiting_us = sum(span.duration_us for span in items if span.kind == "wait")
        yield LaneUse(rank=rank, lane=lane, steps=len(items), busy_us=busy_us, waiting_us=waiting_us)
