"""This module writes spans as a trace in the Trace Event Format, which Perfetto and chrome://tracing load.

A process is one rank of one call, a thread is a lane, and a complete event ("X", microseconds) is a span. In the trace of a
run, the measured ranks have the process numbers from 0. The predicted ranks have those from PREDICTED_PID, or from the next
free multiple of it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.core.span import Span
from weft.planner.simulated import lanes_of
from weft.tools.results import Run

PREDICTED_PID = 1000

Event = dict[str, Any]


def write_trace(run: Run, path: Path) -> Path:
    """Write the measured and the predicted spans of every layer to `path` as JSON, and return `path`.

    Raises ValueError if the file cannot be written.
    """
    return _write(_events(run), {"run": str(run), **run.versions}, path)


def write_calls(calls: Mapping[str, Sequence[Span]], path: Path, *, about: str) -> Path:
    """Write the spans of several calls, by title, to `path` as JSON, and return `path`.

    The process numbers of a call's ranks follow those of the call before. about: a description of the calls.

    Raises ValueError if the file cannot be written.
    """
    firsts = itertools.accumulate((_ranks(spans) for spans in calls.values()), initial=0)
    events = (
        event for first, (title, spans) in zip(firsts, calls.items(), strict=False) for event in _group(title, spans, first)
    )
    return _write(events, {"about": about}, path)


def _write(events: Iterable[Event], about: Mapping[str, str], path: Path) -> Path:
    data = {"displayTimeUnit": "ns", "otherData": dict(about), "traceEvents": list(events)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, separators=(",", ":"), allow_nan=False), encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"path is {str(path)!r}; a trace needs a file that can be written: {reason}") from None
    return path


def _events(run: Run) -> Iterator[Event]:
    pid = 0
    for layer in run.layers:
        yield from _group(f"{run.model} {layer.name} measured", layer.spans, pid)
        pid += _ranks(layer.spans)
    pid = PREDICTED_PID * max(1, -(-pid // PREDICTED_PID))
    for layer in run.layers:
        yield from _group(f"{run.model} {layer.name} predicted", layer.plan.spans, pid)
        pid += _ranks(layer.plan.spans)


def _ranks(spans: Iterable[Span]) -> int:
    return max((s.rank for s in spans), default=-1) + 1


def _group(title: str, spans: Iterable[Span], first_pid: int) -> Iterator[Event]:
    """Yield one call's events: the names of processes and threads, then the spans."""
    items = list(spans)
    lanes = lanes_of(items)
    threads = {lane: index for index, lane in enumerate(lanes)}
    for rank in dict.fromkeys(rank for rank, _ in lanes):
        yield _metadata("process_name", first_pid + rank, 0, name=f"{title} rank {rank}")
        yield _metadata("process_sort_index", first_pid + rank, 0, sort_index=first_pid + rank)
    for (rank, lane), tid in threads.items():
        yield _metadata("thread_name", first_pid + rank, tid, name=lane)
    for span in items:
        yield _complete(span, first_pid + span.rank, threads[span.rank, span.lane])


def _metadata(kind: str, pid: int, tid: int, **arguments: str | int) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": arguments}


def _complete(span: Span, pid: int, tid: int) -> Event:
    work = {name: amount for name, amount in (("flops", span.flops), ("bytes", span.bytes)) if amount}
    event: Event = {"ph": "X", "name": span.name, "cat": span.kind, "pid": pid, "tid": tid}
    return event | {"ts": span.start_us, "dur": span.duration_us, "args": work}
