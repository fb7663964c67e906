"""weft.overlap_report lists the overlapped layers of a model with schedules and times, and the other layers with the reason.

    report = weft.overlap_report(model)        call it after some steps: it reports the calls made so far
    print(report)                              report.html() returns a self-contained page, and report.write(path) writes it

It reads the calls that the process group's operators have run and measured (weft.choices). It matches problems to places by
their sizes, the requested schedule, and the calls that each place has recorded, forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from weft import schedules
from weft.core.errors import require
from weft.core.problem import REDUCTIONS, Op, Problem
from weft.models.communicating import CommunicatingLayer, LayerCalls, layers_of_places, recorded_layers
from weft.ops.common import choose_backward_schedule
from weft.perf.terms import whole_collective_us, whole_gemm_us
from weft.report.overlap_page import page
from weft.report.places import IN_BACKWARD, ReportedCall, ReportedPlace, describe_place
from weft.runtime.autotune import Choice
from weft.runtime.buckets import serves
from weft.runtime.choose import automatic, profile_for, ranks_of_a_host
from weft.runtime.groups import GROUPS

_BACKWARD: dict[str, Op] = {"all_gather_matmul": "matmul_reduce_scatter", "matmul_reduce_scatter": "all_gather_matmul"}
"""The operator that communicates in an operator's backward pass. The one of matmul_all_reduce is local."""
_BY_SPLITS = "by splits"
"""Stands for a schedule if only the device knows how many rows go to each rank. One kernel stores results as it multiplies."""


@dataclass(frozen=True, kw_only=True)
class OverlapReport:
    """OverlapReport is the result of `overlap_report`."""

    model: str
    places: tuple[ReportedPlace, ...]

    @property
    def total(self) -> int:
        return sum(place.count for place in self.places)

    @property
    def overlapped(self) -> int:
        return self._count(schedules.OVERLAPPED)

    def _count(self, verdict: str) -> int:
        return sum(place.count for place in self.places if place.verdict == verdict)

    def __str__(self) -> str:
        return "\n".join([self.headline, *(line for place in self.places for line in describe_place(place))])

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
        return page(self.model, self.headline, self.counted, self.places)

    def write(self, path: str | Path) -> None:
        """Write the HTML page to a file."""
        Path(path).write_text(self.html(), encoding="utf-8")


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
        # Problems that look the same in the report, because they differ only in their dtype for example, are one line.
        places.append(ReportedPlace(layer=layer, count=len(same), calls=tuple(dict.fromkeys(_find_calls(layer, device)))))
    return OverlapReport(model=type(model).__name__, places=tuple(places))


def _merge_calls(layers: Sequence[CommunicatingLayer]) -> LayerCalls | None:
    """Return the calls of all these layers; None if one of them has no record."""
    all_ran = [layer.ran for layer in layers if layer.ran is not None]
    if len(all_ran) < len(layers):
        return None
    return LayerCalls({call for ran in all_ran for call in ran.calls}, any(ran.compiled for ran in all_ran))


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
            yield _describe_call(problem, spec, choices.get(problem), device)


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
    if layer.ran is not None and not layer.ran.may_have(problem.op, served):
        return False
    if problem.op not in {*layer.operators, *(_BACKWARD.get(operator) for operator in layer.operators)}:
        return False
    straight = (problem.op in REDUCTIONS) == (layer.operators[0] in REDUCTIONS)
    size = (problem.n, problem.k) if straight else (problem.k, problem.n)
    return size in ((layer.n, layer.k), *layer.other_sizes)


def _has_rows(problem: Problem, rows: int) -> bool:
    return problem.m == rows


def _describe_call(problem: Problem, spec: str, choice: Choice | None, device: torch.device) -> ReportedCall:
    chosen = choice is not None and choice.spec == spec
    us = choice.us if choice is not None and chosen else {}
    return ReportedCall(
        op=problem.op,
        rows=problem.m,
        spec=spec,
        why=_explain_choice(choice) if choice is not None and chosen else "asked for",
        measured_us=us.get(spec),
        sequential_us=us.get("sequential"),
        ideal_us=_predict_ideal_us(problem, device),
    )


def _explain_choice(choice: Choice) -> str:
    if choice.like:
        return f"as with {' and '.join(map(str, choice.like))} rows"
    if choice.from_cache:
        return "from an earlier run"
    return f"fastest of {len(choice.measurements)} measured" if choice.measurements else "predicted"


def _predict_ideal_us(problem: Problem, device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    try:
        profile = profile_for(device, ranks_of_a_host(problem))
        profile.require_for(problem)
    except ValueError:
        return None
    return max(whole_gemm_us(profile, problem), whole_collective_us(profile, problem))
