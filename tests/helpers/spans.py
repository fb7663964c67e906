"""What tests read off the spans of a simulation."""

from __future__ import annotations

from weft.core.span import Span


def log(spans: tuple[Span, ...], rank: int = 0) -> list[str]:
    """A line a span of the rank: its lane, its name, when it starts and ends."""
    return [f"{s.lane}: {s.name} {s.start_us:g} {s.end_us:g}" for s in spans if s.rank == rank]
