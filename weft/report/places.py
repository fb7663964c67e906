"""What an overlap report has of each place that communicates, and of each problem that has run there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft import schedules
from weft.models.sites import CommunicatingLayer


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
        """Of the ideal; 1 if nothing is exposed."""
        return self.ideal_us / self.us if self.us and self.ideal_us else None


@dataclass(frozen=True, kw_only=True)
class ReportedPlace:
    """Sites alike but for their layer. count: how many. calls: what they have run, forward and backward."""

    site: CommunicatingLayer
    count: int
    calls: tuple[Called, ...]

    @property
    def waits(self) -> bool:
        """Whether weft's operator is there, and has not been called yet: nothing has been hidden so far."""
        ran = self.site.ran
        known = bool(self.site.n) or (ran is not None and not ran.compiled)
        return self.site.overlapped and known and not self.calls

    @property
    def overlapped(self) -> bool:
        """Whether a call of the forward pass was overlapped; before the first call, whether one will be. A place whose backward
        pass alone is overlapped does not count: its lines show that."""
        forward = [call.spec for call in self.calls if call.op in self.site.operators]
        specs = forward or [call.spec for call in self.calls] or [self.site.schedule]
        return self.site.overlapped and any(map(schedules.overlaps, specs))

    @property
    def state(self) -> str:
        """In words: what runs there overlaps, or could and does not, or cannot."""
        return "overlapped" if self.overlapped else "one after the other" if self.site.overlapped else "not overlapped"


def lines(place: ReportedPlace) -> Iterator[str]:
    """A place as the report lists it: a line, and one for each problem that has run there."""
    # A place without an operator says itself that it is not overlapped.
    yield f"{place.count:4} x {place.site}" + (f"; {place.state}" if place.state == "one after the other" else "")
    for call in place.calls:
        yield f"         {' '.join(_words(call))}"
    if place.waits:
        yield "         not called yet"


def _words(call: Called) -> Sequence[str]:
    """(operator, rows, schedule, time and what it is to be compared with, why)"""
    time_ = f"{call.us:.0f} us" if call.us else "not measured"
    gain = f"{call.sequential_us / call.us:.2f}x sequential" if call.us and call.sequential_us else ""
    share = f"{call.share:.2f} of the predicted ideal" if call.share else ""
    return call.op, f"M={call.rows}", call.spec, ", ".join(filter(None, (time_, gain, share))), f"({call.why})"
