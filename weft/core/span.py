"""Span: the time that a step took on a lane of a rank. Executors measure spans and the simulator predicts them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["gemm", "lookup", "copy", "reduce", "collective", "message", "call", "wait", "signal"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """The time of one step on one rank's lane, in microseconds since the call began.

    kind: the type of work. name: a short text, as the schedule prints it. flops, bytes: the amount of work, or 0.
    """

    rank: int
    lane: str
    kind: Kind
    name: str
    start_us: float
    end_us: float
    flops: int = 0
    bytes: int = 0

    def __post_init__(self) -> None:
        if self.end_us < self.start_us:
            raise ValueError(f"end_us is {self.end_us}; it must not be before start_us {self.start_us}")

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us

    def __str__(self) -> str:
        return f"rank {self.rank} {self.lane} {self.name}: {self.start_us:.1f} to {self.end_us:.1f} us"


def total_us(spans: Iterable[Span]) -> float:
    """Return the time from the first start to the last end over all ranks, or 0 for no spans."""
    items = list(spans)
    return max(s.end_us for s in items) - min(s.start_us for s in items) if items else 0.0
