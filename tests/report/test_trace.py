"""The trace of a run: what Perfetto is given."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from report_run import layer, make_run

from weft.core.span import Span
from weft.report import write_trace
from weft.tools.results import Run


@pytest.fixture(scope="module")
def run() -> Run:
    return make_run(layer("mlp down", error=0.0), layer("mlp up", error=0.0, predicted_ranks=3), model="llama3-8b")


@pytest.fixture(scope="module")
def events(run: Run, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = write_trace(run, tmp_path_factory.mktemp("trace") / "new" / "trace.json")
    found = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    assert isinstance(found, list)
    return found


def names(events: list[dict[str, Any]], kind: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == kind}


def described(events: list[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    """Every complete event by the names of its process and thread, and what it says."""
    processes, threads = names(events, "process_name"), names(events, "thread_name")
    return Counter(
        (processes[e["pid"], 0], threads[e["pid"], e["tid"]], e["cat"], e["name"], e["ts"], e["dur"])
        for e in events
        if e["ph"] == "X"
    )


def expected(group: str, spans: tuple[Span, ...]) -> Counter[tuple[Any, ...]]:
    return Counter((f"{group} rank {s.rank}", s.lane, s.kind, s.name, s.start_us, s.duration_us) for s in spans)


def test_every_span_is_there_once(run: Run, events: list[dict[str, Any]]) -> None:
    wanted: Counter[tuple[Any, ...]] = Counter()
    for of in run.layers:
        wanted += expected(f"llama3-8b {of.name} measured", of.spans)
        wanted += expected(f"llama3-8b {of.name} predicted", of.plan.spans)
    assert described(events) == wanted


def test_measured_and_predicted_are_alike_and_apart(events: list[dict[str, Any]]) -> None:
    complete = [e for e in events if e["ph"] == "X"]
    assert {tuple(sorted(e)) for e in complete} == {("args", "cat", "dur", "name", "ph", "pid", "tid", "ts")}
    groups = {pid: name.split()[-3] for (pid, _), name in names(events, "process_name").items()}
    assert groups == dict.fromkeys(range(8), "measured") | dict.fromkeys(range(1000, 1011), "predicted")


def test_predicted_processes_move_up_where_measured_ones_are_many(tmp_path: Path) -> None:
    span = Span(rank=1100, lane="compute", kind="gemm", name="g", start_us=0.0, end_us=1.0)
    one = layer("wide", error=0.0)
    path = write_trace(make_run(type(one)(**{**vars(one), "spans": (span,)})), tmp_path / "trace.json")
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    assert min(e["pid"] for e in events if "predicted" in str(e["args"].get("name"))) == 2000


def test_a_path_that_cannot_be_written_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="path is "):
        write_trace(run, tmp_path)
