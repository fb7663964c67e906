"""The waits inside of a step: a sum whose sources arrive late, and a kernel whose tiles wait. They were drawn as work."""

from __future__ import annotations

from itertools import pairwise

import pytest

from weft.cli.output import gantt
from weft.core.machine import load
from weft.core.problem import Problem
from weft.core.span import Span
from weft.perf import run
from weft.planner.simulated import lane_uses
from weft.report.charts import timeline
from weft.schedules import build

H200 = load("h200x8")


def spans_of(op: str, family: str, *, whole: bool = False, n: int = 4096) -> list[Span]:
    problem = Problem(op=op, m=8192, n=n, k=4096, world_size=8)  # type: ignore[arg-type]
    spans = run(build(problem, family, 1), H200, whole=whole).spans
    return [span for span in spans if span.rank == 0 and span.lane == "compute"]


@pytest.mark.parametrize(
    ("op", "family", "kind"),
    [
        ("matmul_reduce_scatter", "shard_p2p", "reduce"),
        ("matmul_reduce_scatter", "track_and_trigger", "gemm"),
        ("all_gather_matmul", "flag_gated", "gemm"),
    ],
)
def test_a_step_that_waits_for_copies_says_when(op: str, family: str, kind: str) -> None:
    (late,) = (span for span in spans_of(op, family) if span.waits)
    edges = [late.start_us, *(edge for wait in late.waits for edge in wait), late.end_us]
    assert late.kind == kind
    assert all(low <= high for low, high in pairwise(edges))
    assert late.waited_us > 0.2 * late.duration_us
    assert spans_of(op, family, whole=True) == spans_of(op, family)


def test_a_kernel_that_nothing_holds_up_does_not_wait() -> None:
    """Its matmul takes much longer than the gather, of which the first chunk is there at the begin."""
    gathers = spans_of("all_gather_matmul", "flag_gated", n=131072)
    assert sum(span.waited_us for span in gathers) < 0.02 * sum(span.duration_us for span in gathers)
    assert not any(span.waits for span in spans_of("all_gather_matmul", "sequential"))


def test_waits_are_drawn_as_waits() -> None:
    spans = spans_of("matmul_reduce_scatter", "shard_p2p")
    (late,) = (span for span in spans if span.waits)
    pieces = list(late.pieces())
    assert [piece.kind for piece in pieces if piece.start_us in dict(late.waits)] == ["wait"] * len(late.waits)
    assert sum(piece.duration_us for piece in pieces) == pytest.approx(late.duration_us)
    traces = {trace["name"]: trace for trace in timeline([late], {})["data"]}
    assert sum(traces["wait"]["x"]) == pytest.approx(late.waited_us, abs=0.1)
    line = gantt([late], rank=0, width=120).plain.splitlines()[0]
    assert line.count(".") > line.count("+") > 0
    (use,) = lane_uses([late])
    assert (use.waiting_us, use.busy_us) == (pytest.approx(late.waited_us), pytest.approx(late.duration_us - late.waited_us))
