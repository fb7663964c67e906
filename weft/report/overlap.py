"""weft.overlap_report: what of a model is overlapped, how, how fast, and what is not, with the reason.

    report = weft.overlap_report(model)        after some steps: schedules and times are of the calls made so far
    print(report)                              text; report.html() is a page that loads nothing; report.write(path)

It reads what the process group's operators have run and measured (weft.choices), and matches problems to places by their sizes,
the schedule that was asked for, and the calls that each place has written down.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from weft import schedules
from weft.core.errors import require
from weft.core.problem import REDUCTIONS, Op, Problem
from weft.models.sites import CommunicatingLayer, LayerCalls, sites
from weft.ops.common import backward_schedule
from weft.perf.terms import whole_collective_us, whole_gemm_us
from weft.report.overlap_page import page
from weft.report.places import Called, ReportedPlace, lines
from weft.runtime.buckets import serves
from weft.runtime.choose import automatic, profile_for, ranks_of_a_host
from weft.runtime.groups import GROUPS
from weft.runtime.trial import Choice

_BACKWARD: dict[str, Op] = {"all_gather_matmul": "matmul_reduce_scatter", "matmul_reduce_scatter": "all_gather_matmul"}
"""What an operator's gradient communicates by; matmul_all_reduce's is local."""
_BY_SPLITS = "by splits"
"""In a schedule's place, for rows that go in numbers that the device knows: one kernel, stores beside products."""


@dataclass(frozen=True, kw_only=True)
class OverlapReport:
    """What `overlap_report` found."""

    model: str
    places: tuple[ReportedPlace, ...]

    @property
    def total(self) -> int:
        return sum(place.count for place in self.places)

    @property
    def overlapped(self) -> int:
        return sum(place.count for place in self.places if place.overlapped)

    def __str__(self) -> str:
        return "\n".join([self.headline, *(line for place in self.places for line in lines(place))])

    @property
    def headline(self) -> str:
        return f"{self.model}: {self.counted}"

    @property
    def counted(self) -> str:
        waiting = sum(place.count for place in self.places if place.waits)
        later = f", {waiting} of them not called yet" if waiting else ""
        return f"overlapped {self.overlapped} of {self.total} places that communicate{later}"

    def html(self) -> str:
        """A page of its own, without scripts."""
        return page(self.model, self.headline, self.counted, self.places)

    def write(self, path: str | Path) -> None:
        """The page, as a file."""
        Path(path).write_text(self.html(), encoding="utf-8")


def overlap_report(model: nn.Module) -> OverlapReport:
    """Every place of a model where weft's operators run, or where it communicates without them, and why.

    model: after weft.parallelize, or parallelize_module with weft's styles; not collective. Raises ValueError for a model in
    which neither has left anything.
    """
    require("model", model, nn.Module, "pass the model that weft.parallelize or parallelize_module was called with")
    found: dict[CommunicatingLayer, list[CommunicatingLayer]] = {}
    for site in sites(model):
        found.setdefault(_without_layer(site), []).append(site)
    if not found:
        raise ValueError(
            f"model is a {type(model).__name__} in which weft runs nothing; apply weft.parallelize, or parallelize_module with "
            "weft.ColwiseParallel, RowwiseParallel or SharedInput first. What torch.compile overlaps with weft.CompilePass is "
            "reported by that object: overlap = weft.CompilePass(), then overlap.report()"
        )
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    places = []
    for alike in found.values():
        site = replace(_without_layer(alike[0]), ran=_together(alike))
        # Problems that differ in nothing that is told, in their dtype say, are one line.
        places.append(ReportedPlace(site=site, count=len(alike), calls=tuple(dict.fromkeys(_calls(site, device)))))
    return OverlapReport(model=type(model).__name__, places=tuple(places))


def _together(alike: Sequence[CommunicatingLayer]) -> LayerCalls | None:
    """What any of these sites has run; None if one of them has not written that down."""
    all_ran = [site.ran for site in alike if site.ran is not None]
    if len(all_ran) < len(alike):
        return None
    return LayerCalls({call for ran in all_ran for call in ran.calls}, any(ran.compiled for ran in all_ran))


def _without_layer(site: CommunicatingLayer) -> CommunicatingLayer:
    """A site whose module's name is that of all layers: model.layers.*.mlp."""
    return replace(site, module=re.sub(r"(?<=\.)\d+(?=\.|$)", "*", site.module))


def _calls(site: CommunicatingLayer, device: torch.device) -> Iterator[Called]:
    """What has run of a site's problems, forward and backward, the earliest first."""
    if not site.n:
        yield from _calls_by_splits(site, device)
        return
    state = GROUPS.known(site.group)
    if state is None:
        return
    choices = {choice.problem: choice for choice in state.programs.tuner.choices()}
    seen: set[tuple[Problem, str]] = set()
    for schedule, asked in state.programs.asked():
        problem, spec = schedule.problem, schedules.spec(schedule.name, schedule.chunks)
        if not isinstance(problem, Problem) or (problem, spec) in seen or not _is_of(problem, asked, site):
            continue
        if _was_asked(asked, spec, problem, site, choices.get(problem)):
            seen.add((problem, spec))
            yield _called(problem, spec, choices.get(problem), device)


def _calls_by_splits(site: CommunicatingLayer, device: torch.device) -> Iterator[Called]:
    """Experts' calls, which have no schedule to choose: on CPUs torch.distributed moves rows before or after products."""
    spec = "sequential" if device.type == "cpu" else _BY_SPLITS
    for op, rows in sorted(site.ran.calls if site.ran else ()):
        yield Called(op=op, rows=rows, spec=spec, why="no other for rows by splits")


def _was_asked(asked: str, spec: str, problem: Problem, site: CommunicatingLayer, choice: Choice | None) -> bool:
    """Whether a schedule, which runs what was asked for so, is what the site has asked for, as far as that is known."""
    wanted = backward_schedule(site.schedule, problem.op)
    wanted = automatic() if wanted == "auto" else wanted
    if wanted == "auto" == asked:
        return choice is None or choice.spec == spec
    return wanted in ("", asked)


def _is_of(problem: Problem, asked: str, site: CommunicatingLayer) -> bool:
    """Whether a problem is a site's, forward or backward: by its operator, its sizes, and what the site has run. What gathers
    has n and k swapped where what reduces has them straight."""
    served = partial(serves if asked == "auto" else _has, problem)
    if site.ran is not None and not site.ran.may_have(problem.op, served):
        return False
    if problem.op not in {*site.operators, *(_BACKWARD.get(operator) for operator in site.operators)}:
        return False
    alike = (problem.op in REDUCTIONS) == (site.operators[0] in REDUCTIONS)
    return (problem.n, problem.k) == ((site.n, site.k) if alike else (site.k, site.n))


def _has(problem: Problem, rows: int) -> bool:
    return problem.m == rows


def _called(problem: Problem, spec: str, choice: Choice | None, device: torch.device) -> Called:
    chosen = choice is not None and choice.spec == spec
    us = choice.us if choice is not None and chosen else {}
    return Called(
        op=problem.op,
        rows=problem.m,
        spec=spec,
        why=_why(choice) if choice is not None and chosen else "asked for",
        us=us.get(spec),
        sequential_us=us.get("sequential"),
        ideal_us=_ideal_us(problem, device),
    )


def _why(choice: Choice) -> str:
    if choice.like:
        return f"as with {' and '.join(map(str, choice.like))} rows"
    if choice.kept:
        return "kept from an earlier run"
    return f"fastest of {len(choice.trials)} measured" if choice.trials else "predicted"


def _ideal_us(problem: Problem, device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    try:
        profile = profile_for(device, ranks_of_a_host(problem))
        profile.require_for(problem)
    except ValueError:
        return None
    return max(whole_gemm_us(profile, problem), whole_collective_us(profile, problem))
