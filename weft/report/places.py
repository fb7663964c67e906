"""The places of an overlap report, and the calls that have run there.

A place stands for communicating layers that are the same in several blocks of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft import schedules
from weft.models.communicating import CommunicatingLayer

IN_BACKWARD = "overlapped in the backward pass only"
"""The verdict on a place that communicates in the backward pass only, and overlaps there."""


@dataclass(frozen=True, kw_only=True)
class ReportedCall:
    """ReportedCall represents the calls of one operator with one number of rows at a place."""

    op: str
    rows: int
    spec: str
    """The schedule that the calls run."""
    why: str
    """The reason for this schedule."""
    measured_us: float | None = None
    """The time that was measured when the schedule was chosen; None if nothing was measured."""
    sequential_us: float | None = None
    """The time of the sequential schedule, measured at the same time; None if nothing was measured."""
    ideal_us: float | None = None
    """The larger of the predicted times of the matmul alone and the collective alone; None if weft has no profile of this
    machine."""

    @property
    def share_of_ideal(self) -> float | None:
        """The ideal time divided by the measured time, which is 1 if no communication is exposed; None if one is unknown."""
        return self.ideal_us / self.measured_us if self.measured_us and self.ideal_us else None


@dataclass(frozen=True, kw_only=True)
class ReportedPlace:
    """ReportedPlace represents communicating layers that differ only in the number of their block."""

    layer: CommunicatingLayer
    """One of these layers."""
    count: int
    """The number of these layers."""
    calls: tuple[ReportedCall, ...]
    """The calls that they have made, forward and backward."""

    @property
    def awaits_first_call(self) -> bool:
        """True if the place has a weft operator that has not been called yet."""
        ran = self.layer.ran
        would_be_known = bool(self.layer.n) or (ran is not None and not ran.compiled)
        return self.layer.overlapped and would_be_known and not self.calls

    @property
    def verdict(self) -> str:
        """One of weft.schedules.VERDICTS, or IN_BACKWARD.

        A place that communicates in both passes has the best verdict of its calls in the forward pass. Before the first call it
        has the verdict on the schedule that the layer asks for.
        """
        found = self._judge()
        return IN_BACKWARD if self.layer.backward_only and found == schedules.OVERLAPPED else found

    def _judge(self) -> str:
        if not self.layer.overlapped:
            return schedules.SEQUENTIAL
        if not self.calls:
            return schedules.judge(self.layer.schedule)
        forward = (call for call in self.calls if call.op in self.layer.operators)
        verdicts = {schedules.judge(call.spec, call.measured_us, call.sequential_us) for call in forward}
        return next((verdict for verdict in schedules.VERDICTS if verdict in verdicts), schedules.SEQUENTIAL)

    @property
    def overlapped(self) -> bool:
        return self.verdict in (schedules.OVERLAPPED, IN_BACKWARD)


def describe_place(place: ReportedPlace) -> Iterator[str]:
    """Yield the lines of a place in the report: one for the place, and one for each kind of call that it has made."""
    layer = place.layer
    parts = (", ".join(layer.operators), layer.reason, place.verdict) if layer.operators else (place.verdict, layer.reason)
    yield f"{place.count:4} x {layer.name}: {'; '.join(filter(None, parts))}"
    for call in place.calls:
        yield f"         {' '.join(_describe_call(call))}"
    if place.awaits_first_call:
        yield "         not called yet"


def _describe_call(call: ReportedCall) -> Sequence[str]:
    """Return the operator, its rows, its schedule, its time with comparisons, and the reason for the schedule."""
    time = f"{call.measured_us:.0f} us" if call.measured_us else "not measured"
    gain = f"{call.sequential_us / call.measured_us:.2f}x sequential" if call.measured_us and call.sequential_us else ""
    share = f"{call.share_of_ideal:.2f} of the predicted ideal" if call.share_of_ideal else ""
    return call.op, f"M={call.rows}", call.spec, ", ".join(filter(None, (time, gain, share))), f"({call.why})"
