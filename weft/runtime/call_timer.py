"""A CallTimer measures when each step of a GPU call ran, by events around every launch."""

from __future__ import annotations

import time

import torch

from weft.core.schedule import Schedule
from weft.core.span import Span
from weft.core.work import span
from weft.runtime.bindings import Where
from weft.runtime.cuda_resources import CudaResources
from weft.runtime.launches import IssuedCall, Launch


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class CallTimer:
    """A CallTimer records the times of one call. `begin` starts it."""

    def __init__(self, resources: CudaResources) -> None:
        self._resources, self._zero_us = resources, time.perf_counter_ns() / 1e3
        self._times: list[tuple[Where, torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self, caller: int) -> None:
        """Record the begin of the call on the caller's stream."""
        on = self._resources.torch_stream(caller)
        self._begin, end = _event(), _event()
        self._begin.record(on)
        end.record(on)

    def issue(self, launch: Launch, call: IssuedCall, stream: int) -> None:
        """Enqueue a launch between two events."""
        on = self._resources.torch_stream(stream)
        start, end = _event(), _event()
        start.record(on)
        launch.issue(call, stream)
        end.record(on)
        self._times.append((launch.where, start, end))

    def spans(self, schedule: Schedule) -> list[Span]:
        """Return when each step ran, from its first launch to its last one. The call must have ended."""
        found: dict[Where, tuple[float, float]] = {}
        for where, *events in self._times:
            first, last = (self._zero_us + 1e3 * float(self._begin.elapsed_time(event)) for event in events)
            found[where] = (found.get(where, (first, 0.0))[0], max(first, last))
        return [span(schedule, w.rank, w.lane, w.step, first, last) for w, (first, last) in found.items()]
