"""weft.overlap_report lists the overlapped layers of a model with schedules and times, and the other layers with the reason.

    report = weft.overlap_report(model)        call it after some steps: it reports the calls made so far
    print(report)                              report.html() returns a self-contained page, and report.write(path) writes it

A place stands for communicating layers that are the same in several blocks of the model. The report reads the calls that the
process group's operators have run and measured (weft.choices). It matches problems to places by their sizes, the requested
schedule, and the calls that each place has recorded, forward and backward. It predicts them as the planner does
(weft.planner.training). The page has no scripts and charts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import nn

from weft import schedules
from weft.core.errors import require
from weft.core.machine import Machine
from weft.core.problem import BACKWARD, REDUCTIONS, Op, Problem
from weft.core.schedule import Schedule
from weft.models.communicating import CommunicatingLayer, LayerCalls, layers_of_places, recorded_layers
from weft.ops.common import choose_backward_schedule
from weft.perf.terms import whole_collective_us, whole_gemm_us
from weft.planner.words import factor, mib, ms, percent, us
from weft.report.tables import Cell, Column, Judged, ReportTable, html_page, join, table, tag
from weft.runtime.autotune import Choice
from weft.runtime.choose import automatic, profile_for, ranks_of_a_host
from weft.runtime.groups import GROUPS
from weft.runtime.tuner import serves

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
    predicted_us: float | None = None
    """The planner's time for this schedule; None if weft has no profile with as many GPUs."""
    kept_bytes: int = 0
    """The memory of a rank for the gathered input that the call keeps for the backward pass."""

    @property
    def share_of_ideal(self) -> float | None:
        """The ideal time divided by the measured time, which is 1 if no communication is exposed; None if one is unknown."""
        return self.ideal_us / self.measured_us if self.measured_us and self.ideal_us else None

    @property
    def gain(self) -> float | None:
        """The speed-up over the sequential schedule; None if one of the times is unknown."""
        return self.sequential_us / self.measured_us if self.measured_us and self.sequential_us else None

    def __str__(self) -> str:
        time = f"{us(self.measured_us)} us" if self.measured_us else "not measured"
        time += f" ({us(self.predicted_us)} us predicted)" if self.predicted_us else ""
        gain = f"{factor(self.gain)} sequential" if self.gain else ""
        share = f"{percent(self.share_of_ideal)} of the predicted ideal" if self.share_of_ideal else ""
        return f"{self.op} M={self.rows} {self.spec} {', '.join(filter(None, (time, gain, share)))} ({self.why})"


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
    def remarks(self) -> list[str]:
        """Why some calls ran in another way than the others."""
        return [] if self.layer.ran is None else [f"some calls: {remark}" for remark in sorted(self.layer.ran.remarks)]

    @property
    def kept_bytes(self) -> int:
        """The memory of a rank for the gathered inputs that all these layers keep for the backward pass, with the most rows."""
        return self.count * max((call.kept_bytes for call in self.calls), default=0)

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
            return schedules.NOT_OVERLAPPED
        if not self.calls:
            return schedules.judge(self.layer.schedule)
        forward = (call for call in self.calls if call.op in self.layer.operators)
        verdicts = {schedules.judge(call.spec, call.measured_us, call.sequential_us) for call in forward}
        return next((verdict for verdict in schedules.VERDICTS if verdict in verdicts), schedules.NOT_OVERLAPPED)

    @property
    def overlapped(self) -> bool:
        return self.verdict in (schedules.OVERLAPPED, IN_BACKWARD)


def describe_place(place: ReportedPlace) -> Iterator[str]:
    """Yield the lines of a place in the report: one for the place, and one for each kind of call that it has made."""
    layer = place.layer
    parts = (", ".join(layer.operators), layer.reason, place.verdict) if layer.operators else (place.verdict, layer.reason)
    yield f"{place.count:4} x {layer.name}: {'; '.join(filter(None, parts))}"
    for line in (*place.calls, *place.remarks):
        yield f"         {line}"
    if place.kept_bytes:
        each = f"{place.count} x {mib(place.kept_bytes / place.count)} MiB"
        yield f"         keeps its gathered input for the backward pass: {each} of memory on a rank"
    if place.awaits_first_call:
        yield "         not called yet"


_COLUMNS = (
    *(Column("place", words=True), Column("times"), Column("verdict", words=True), Column("operator", words=True)),
    *(Column("rows"), Column("schedule", words=True), Column("time", "us"), Column("predicted", "us")),
    *(Column("sequential", "us"), Column("speed-up", "x"), Column("of the ideal", "%"), Column("kept", "MiB")),
    Column("why", words=True),
)
_WORDS = (
    "Times were measured when a schedule was chosen, at the first call of a size; so was the sequential program. The ideal, "
    "the larger of the matmul alone and the collective alone, is predicted for this machine; 100% hides one of them wholly. "
    "Kept is the memory of a rank for the gathered input that each of these layers keeps for the backward pass."
)


def page(model: str, headline: str, lead: str, places: Sequence[ReportedPlace], sums: Sequence[str]) -> str:
    """Return the page as HTML. lead: the sentence below the model's name. sums: sentences about all places together."""
    rows = [row for place in places for row in _rows(place)]
    header = tag("header", tag("h1", model), tag("p", lead, class_="lead"))
    listed = table(ReportTable(title="Places, and the problems that each has run", columns=_COLUMNS, rows=rows))
    return html_page(headline, header, tag("section", *(tag("p", words) for words in (_WORDS, *sums)), listed))


def _rows(place: ReportedPlace) -> Iterator[Sequence[Cell]]:
    """Yield a row for the place, and one for each kind of call that it has made."""
    said = "; ".join(filter(None, (place.layer.reason, *place.remarks, "not called yet" if place.awaits_first_call else "")))
    verdict = Judged(place.verdict, place.overlapped)
    yield place.layer.name, place.count, verdict, ", ".join(place.layer.operators), *[""] * 8, said
    for call in place.calls:
        measured = "not measured" if call.measured_us is None else call.measured_us
        meter: Cell = None
        if (share := call.share_of_ideal) is not None:
            meter = join([tag("meter", value=f"{min(1.0, share):.2f}"), f" {percent(share)}"])
        times = measured, call.predicted_us, call.sequential_us, call.gain, meter
        yield "", "", "", call.op, call.rows, call.spec, *times, call.kept_bytes or "", call.why


_BY_SPLITS = "by splits"
"""Stands for a schedule if only the device knows how many rows go to each rank. One kernel stores results as it multiplies."""


@dataclass(frozen=True, kw_only=True)
class OverlapReport:
    """OverlapReport is the result of `overlap_report`."""

    model: str
    places: tuple[ReportedPlace, ...]
    machine: str = ""
    """The name of the profile by which times are predicted; "" if weft has none."""

    @property
    def kept_bytes(self) -> int:
        """The memory of a rank for all gathered inputs that are kept for the backward pass."""
        return sum(place.kept_bytes for place in self.places)

    def step_us(self, rows: int) -> tuple[float | None, float | None]:
        """Return the predicted and the measured time of all calls with this number of rows, each once for each of its layers.

        With one number of rows, and without checkpointing, they are the calls of a training step. A time is None if that of one
        call is unknown."""
        calls = [(place.count, call) for place in self.places for call in place.calls if call.rows == rows]
        predicted = [None if call.predicted_us is None else count * call.predicted_us for count, call in calls]
        measured = [None if call.measured_us is None else count * call.measured_us for count, call in calls]
        return _total(predicted), _total(measured)

    def _sums(self) -> Iterator[str]:
        """Yield sentences about all places together."""
        for rows in sorted({call.rows for place in self.places for call in place.calls}):
            predicted, measured = self.step_us(rows)
            times = [] if predicted is None else [f"{ms(predicted)} ms predicted on {self.machine}"]
            times += [] if measured is None else [f"{ms(measured)} ms measured"]
            times += [f"{percent(predicted / measured)} of it predicted"] if predicted and measured else []
            if times:
                yield f"all calls with {rows:,} rows, forward and backward, each once: {', '.join(times)}"
        if self.kept_bytes:
            yield f"gathered inputs kept for the backward pass: {mib(self.kept_bytes)} MiB of memory on a rank"

    @property
    def total(self) -> int:
        return sum(place.count for place in self.places)

    @property
    def overlapped(self) -> int:
        return self._count(schedules.OVERLAPPED)

    def _count(self, verdict: str) -> int:
        return sum(place.count for place in self.places if place.verdict == verdict)

    def __str__(self) -> str:
        return "\n".join([self.headline, *(line for place in self.places for line in describe_place(place)), *self._sums()])

    @property
    def headline(self) -> str:
        return f"{self.model}: {self.counted}"

    @property
    def counted(self) -> str:
        waiting = sum(place.count for place in self.places if place.awaits_first_call)
        counts = {verdict: self._count(verdict) for verdict in (IN_BACKWARD, schedules.FASTER)}
        others = "".join(f", {number} {verdict}" for verdict, number in counts.items() if number)
        later = f", {waiting} not called yet" if waiting else ""
        return f"overlapped {self.overlapped} of {self.total} places that communicate{others}{later}"

    def html(self) -> str:
        """Return the report as an HTML page without scripts."""
        return page(self.model, self.headline, self.counted, self.places, tuple(self._sums()))

    def write(self, path: str | Path) -> None:
        """Write the HTML page to a file."""
        Path(path).write_text(self.html(), encoding="utf-8")


def _total(times: Sequence[float | None]) -> float | None:
    known = [us for us in times if us is not None]
    return sum(known) if known and len(known) == len(times) else None


def overlap_report(model: nn.Module) -> OverlapReport:
    """Return a report of every place where a model communicates, with weft's operators or without them, and the reason.

    The call is not collective.

    model: a model after weft.parallelize, or after parallelize_module with weft's styles. Raises ValueError for other models.
    """
    require("model", model, nn.Module, "pass the model that weft.parallelize or parallelize_module was called with")
    found = layers_of_places(model)
    if not any(map(recorded_layers, model.modules())):
        raise ValueError(
            f"model is a {type(model).__name__} in which weft runs nothing; apply weft.parallelize, or parallelize_module with "
            "weft.ColwiseParallel, RowwiseParallel or SharedInput first. What torch.compile overlaps with weft.CompilePass is "
            "reported by that object: overlap = weft.CompilePass(), then overlap.report()"
        )
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    places = []
    for place, same in found.items():
        layer = replace(place, ran=_merge_calls(same))
        places.append(ReportedPlace(layer=layer, count=len(same), calls=tuple(_merge_lines(_find_calls(layer, device)))))
    predicts = any(call.predicted_us is not None for place in places for call in place.calls)
    return OverlapReport(model=type(model).__name__, places=tuple(places), machine=profile_for(device).name if predicts else "")


def _merge_lines(calls: Iterable[ReportedCall]) -> Iterable[ReportedCall]:
    """Return problems that look the same in the report as one line, for example if they differ only in their dtype, or in that
    some calls keep their gathered input."""
    found: dict[ReportedCall, ReportedCall] = {}
    for call in calls:
        line = replace(call, kept_bytes=0)
        found[line] = max(found.get(line, call), call, key=lambda one: one.kept_bytes)
    return found.values()


def _merge_calls(layers: Sequence[CommunicatingLayer]) -> LayerCalls | None:
    """Return the calls of all these layers; None if one of them has no record."""
    all_ran = [layer.ran for layer in layers if layer.ran is not None]
    if len(all_ran) < len(layers):
        return None
    return LayerCalls(
        {call for ran in all_ran for call in ran.calls},
        any(ran.compiled for ran in all_ran),
        remarks={remark for ran in all_ran for remark in ran.remarks},
    )


def _find_calls(layer: CommunicatingLayer, device: torch.device) -> Iterator[ReportedCall]:
    """Yield the problems that a layer has run, forward and backward, the earliest first."""
    if not layer.n:
        yield from _find_calls_by_splits(layer, device)
        return
    state = GROUPS.known(layer.group)
    if state is None:
        return
    choices = {choice.problem: choice for choice in state.tuner.choices()}
    seen: set[tuple[Problem, str]] = set()
    for schedule, asked in state.schedules_and_specs():
        problem, spec = schedule.problem, schedules.spec(schedule.name, schedule.chunks)
        if not isinstance(problem, Problem) or (problem, spec) in seen or not _is_of(problem, asked, layer):
            continue
        if _was_asked(asked, spec, problem, layer, choices.get(problem)):
            seen.add((problem, spec))
            keeps = problem.op in layer.operators and not layer.backward_only
            own = asked.startswith("value:")
            yield _describe_call(schedule, choices.get(problem), device, own=own, keeps=keeps)


def _find_calls_by_splits(layer: CommunicatingLayer, device: torch.device) -> Iterator[ReportedCall]:
    """Yield the calls of experts, which have only one schedule. On CPUs, torch.distributed moves the rows sequentially."""
    spec = "sequential" if device.type == "cpu" else _BY_SPLITS
    for op, rows in sorted(layer.ran.calls if layer.ran else ()):
        yield ReportedCall(op=op, rows=rows, spec=spec, why="no other for rows by splits")


def _was_asked(asked: str, spec: str, problem: Problem, layer: CommunicatingLayer, choice: Choice | None) -> bool:
    """Return whether a schedule that ran for the request `asked` may be the one that the layer has requested."""
    wanted = choose_backward_schedule(layer.schedule, problem.op)
    wanted = automatic() if wanted == "auto" else wanted
    if wanted == "auto" == asked:
        return choice is None or choice.spec == spec
    return wanted in ("", asked)


def _is_of(problem: Problem, asked: str, layer: CommunicatingLayer) -> bool:
    """Return whether a problem may be a layer's, forward or backward, by its operator, its sizes and the layer's calls.

    n and k are swapped between operators that gather and operators that reduce."""
    served = partial(serves if asked == "auto" else _has_rows, problem)
    operator = _operator_of(problem)
    if layer.ran is not None and not layer.ran.may_have(operator, served):
        return False
    if operator not in {*layer.operators, *(BACKWARD.get(cast(Op, operator)) for operator in layer.operators)}:
        return False
    if layer.keeps is False and (problem.op == "all_gather_matmul" and problem.return_gathered):
        return False
    if layer.keeps is not None and problem.weight_gradients not in ("", "whole" if layer.keeps else "shard"):
        return False
    straight = (problem.op in REDUCTIONS) == (layer.operators[0] in REDUCTIONS)
    size = (problem.n, problem.k) if straight else (problem.k, problem.n)
    return size in ((layer.n, layer.k), *layer.other_sizes)


def _operator_of(problem: Problem) -> str:
    return problem.op if problem.norm_eps is None else f"{problem.op}_norm"


def _has_rows(problem: Problem, rows: int) -> bool:
    return problem.m == rows


def _describe_call(schedule: Schedule, choice: Choice | None, device: torch.device, *, own: bool, keeps: bool) -> ReportedCall:
    from weft.planner.training import kept_bytes, predict_call_us  # the simulator's packages are needed here alone

    problem, spec = schedule.problem, schedules.spec(schedule.name, schedule.chunks)
    chosen = choice is not None and choice.spec == spec
    profile = _profile(problem, device)
    us = choice.us if choice is not None and chosen else {}
    return ReportedCall(
        op=_operator_of(problem),
        rows=problem.m,
        spec=spec,
        why=_explain_choice(choice) if choice is not None and chosen else "asked for",
        measured_us=us.get(spec),
        sequential_us=us.get("sequential"),
        ideal_us=None if profile is None else max(whole_gemm_us(profile, problem), whole_collective_us(profile, problem)),
        predicted_us=None if profile is None else predict_call_us(schedule, profile, own=own),
        kept_bytes=kept_bytes(problem) if keeps else 0,
    )


def _explain_choice(choice: Choice) -> str:
    if choice.like:
        return f"as with {' and '.join(map(str, choice.like))} rows"
    if choice.from_cache:
        return "from an earlier run"
    predicted = f"predicted for {choice.predicted_for}" if choice.predicted_for else "predicted"
    return f"fastest of {len(choice.measurements)} measured" if choice.measurements else predicted


def _profile(problem: Problem, device: torch.device) -> Machine | None:
    """Return the machine profile by which the planner chooses; None if it lacks data for the problem.

    Calls on CPUs are predicted only for a machine that WEFT_MACHINE names."""
    if device.type != "cuda" and not os.environ.get("WEFT_MACHINE"):
        return None
    try:
        profile = profile_for(device, ranks_of_a_host(problem))
        profile.require_for(problem)
        profile.tflops(problem.rate_name)
    except ValueError:
        return None
    return profile
