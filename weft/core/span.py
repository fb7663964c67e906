"""Span: the time that a step took on a lane of a rank. Executors measure spans and the simulator predicts them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["gemm", "lookup", "copy", "reduce", "collective", "message", "call", "wait", "signal"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """The time of one step on one rank's lane, in microseconds since the call began.

    kind: the type of work. name: a short text, as the schedule prints it. flops, bytes: the amount of work, or 0. waits: the
    times within the step, each from and to, in which all of its work waits for flags. Only the simulator knows them.
    """

    rank: int
    lane: str
    kind: Kind
    name: str
    start_us: float
    end_us: float
    flops: int = 0
    bytes: int = 0
    waits: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if self.end_us < self.start_us:
            raise ValueError(f"end_us is {self.end_us}; it must not be before start_us {self.start_us}")

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us

    @property
    def waited_us(self) -> float:
        return sum(end - start for start, end in self.waits)

    def pieces(self) -> Iterator[Span]:
        """Yield the step's work and its waits one after the other, each as a span of its own, to draw them."""
        at = self.start_us
        for start, end in self.waits:
            if start > at:
                yield replace(self, start_us=at, end_us=start, waits=())
            yield replace(self, kind="wait", start_us=start, end_us=end, waits=())
            at = end
        if at < self.end_us or not self.waits:
            yield replace(self, start_us=at, waits=()) if self.waits else self

    def __str__(self) -> str:
        return f"rank {self.rank} {self.lane} {self.name}: {self.start_us:.1f} to {self.end_us:.1f} us"


def total_us(spans: Iterable[Span]) -> float:
    """Return the time from the first start to the last end over all ranks, or 0 for no spans."""
    items = list(spans)
    return max(s.end_us for s in items) - min(s.start_us for s in items) if items else 0.0
