"""The places of an overlap report, and the problems that have run there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft import schedules
from weft.models.communicating import CommunicatingLayer

IN_BACKWARD = "overlapped in the backward pass only"
"""The verdict on a place that communicates in the backward pass only, and overlaps there."""


@dataclass(frozen=True, kw_only=True)
class Called:
    """One problem that a place has run. spec: its schedule. why: how it was chosen. us, sequential_us: as measured when it was
    chosen, None where nothing was measured. ideal_us: the larger of the matmul alone and the collective alone, as predicted for
    this machine; None where there is no profile of it."""

    op: str
    rows: int
    spec: str
    why: str
    us: float | None = None
    sequential_us: float | None = None
    ideal_us: float | None = None

    @property
    def share(self) -> float | None:
        """The share of the ideal; 1 if no communication is exposed."""
        return self.ideal_us / self.us if self.us and self.ideal_us else None


@dataclass(frozen=True, kw_only=True)
class ReportedPlace:
    """Communicating layers that differ only in the number of the block that they are in. count: how many. calls: what they have
    run, forward and backward."""

    layer: CommunicatingLayer
    count: int
    calls: tuple[Called, ...]

    @property
    def waits(self) -> bool:
        """Whether the place has a weft operator that has not been called yet."""
        ran = self.layer.ran
        known = bool(self.layer.n) or (ran is not None and not ran.compiled)
        return self.layer.overlapped and known and not self.calls

    @property
    def verdict(self) -> str:
        """One of weft.schedules.VERDICTS, or IN_BACKWARD. A place that communicates in both passes has the best verdict of its
        calls in the forward pass. Before the first call it has the verdict of the schedule that was asked for."""
        found = self._judge()
        return IN_BACKWARD if self.layer.backward_only and found == schedules.OVERLAPPED else found

    def _judge(self) -> str:
        if not self.layer.overlapped:
            return schedules.SEQUENTIAL
        if not self.calls:
            return schedules.judge(self.layer.schedule)
        decisive = (call for call in self.calls if call.op in self.layer.operators)
        found = {schedules.judge(call.spec, call.us, call.sequential_us) for call in decisive}
        return next((verdict for verdict in schedules.VERDICTS if verdict in found), schedules.SEQUENTIAL)

    @property
    def overlapped(self) -> bool:
        return self.verdict in (schedules.OVERLAPPED, IN_BACKWARD)


def describe_place(place: ReportedPlace) -> Iterator[str]:
    """Yield the lines of a place in the report: one for the place, and one for each problem that has run there."""
    layer = place.layer
    words = (", ".join(layer.operators), layer.reason, place.verdict) if layer.operators else (place.verdict, layer.reason)
    yield f"{place.count:4} x {layer.name}: {'; '.join(filter(None, words))}"
    for call in place.calls:
        yield f"         {' '.join(_describe_call(call))}"
    if place.waits:
        yield "         not called yet"


def _describe_call(call: Called) -> Sequence[str]:
    """(operator, rows, schedule, time and what it is to be compared with, why)"""
    time_ = f"{call.us:.0f} us" if call.us else "not measured"
    gain = f"{call.sequential_us / call.us:.2f}x sequential" if call.us and call.sequential_us else ""
    share = f"{call.share:.2f} of the predicted ideal" if call.share else ""
    return call.op, f"M={call.rows}", call.spec, ", ".join(filter(None, (time_, gain, share))), f"({call.why})"
