"""How a part is measured: each method's calls are a CUDA graph, graphs take turns on one GPU, and each case is a row."""

from __future__ import annotations

import argparse
import faulthandler
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

import weft
from benchmarks.rows import Row, append, geomean
from weft.runtime.plan_cache import versions

WARM_UP = 4
"""Rounds that are not counted."""
ALARM_S = 120
"""A case that takes longer ends the run."""
Work = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    """calls: makes and checks each method, by its name in a row; the calls of its graph. shape: for `extra`. groups: of
    each the mean over its cases is shown."""

    op: str
    name: str
    calls: Callable[[], Mapping[str, Sequence[Work]]]
    shape: Sequence[int] = ()
    groups: tuple[str, ...] = ("all",)


@dataclass(frozen=True, kw_only=True)
class Part:
    """about: a module's docstring. baseline: how names of the methods begin that ratios are over; the fastest of them counts.
    found: further fields of a case's row, asked after it was measured. world: whether it needs a process group."""

    bench: str
    about: str | None
    dtype: str
    baseline: str
    rounds: int
    cases: Callable[[argparse.Namespace], Sequence[Case]]
    warm_up: int = WARM_UP
    options: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    found: Callable[[Case], dict[str, Any]] = field(default=lambda case: {"extra": {"shape": list(case.shape)}})
    world: bool = False


def run(part: Part, given: argparse.Namespace) -> None:
    """Measure a part's cases, append their rows to --json, and print each and the means."""
    over: dict[tuple[str, str], list[float]] = {}
    with one_rank() if part.world else nullcontext():
        for case in part.cases(given):
            faulthandler.dump_traceback_later(ALARM_S, exit=True)
            us = medians(case.calls(), rounds=part.rounds, warm_up=part.warm_up)
            append(given.json, row(part, case, us, given.commit))
            ratios = relative(us, part.baseline)
            for group, name in product(case.groups, ratios):
                over.setdefault((group, name), []).append(ratios[name])
            print(
                f"{case.op:22} {case.name:30}", *(f"{name} {us[name]:.1f} us ({ratios[name]:.3f})" for name in us), flush=True
            )
            if part.world:
                weft.close()
    for (group, name), some in over.items():
        print(f"{group} {name}: {geomean(some):.3f} of {part.baseline} (geomean of {len(some)} cases, worst {min(some):.3f})")
    faulthandler.cancel_dump_traceback_later()


def relative(us: Mapping[str, float], baseline: str) -> dict[str, float]:
    """How many times as fast as the fastest baseline each method is."""
    best = min(time for name, time in us.items() if name.startswith(baseline))
    return {name: best / time for name, time in us.items()}


def row(part: Part, case: Case, us: Mapping[str, float], commit: str) -> Row:
    about: dict[str, Any] = {"machine": f"1 x {torch.cuda.get_device_name()}", "versions": versions("cuda"), "commit": commit}
    about |= {"world_size": 1, "mode": "graph", "dtype": part.dtype, "samples": part.rounds, **part.found(case)}
    return Row(bench=part.bench, op=case.op, case=case.name, us=us, **about)


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone. As for measure.start, what an earlier run chose is not taken over."""
    os.environ.setdefault("WEFT_TIMEOUT_S", "45")
    os.environ["WEFT_CACHE_DIR"] = ""
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _graph(calls: Sequence[Work]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def medians(methods: Mapping[str, Sequence[Work]], *, rounds: int, warm_up: int = WARM_UP) -> dict[str, float]:
    """The median time of one call by each method, in us. methods: the calls of each one's graph. rounds: in each, every graph
    is replayed once, after `warm_up` rounds that are not counted."""
    graphs = {name: _graph(calls) for name, calls in methods.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for round_ in range(rounds + warm_up):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if round_ >= warm_up:
                times[name].append(start.elapsed_time(end) * 1e3 / len(methods[name]))
    return {name: statistics.median(values) for name, values in times.items()}
