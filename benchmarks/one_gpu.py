"""What the benchmarks of single kernels share: methods timed as CUDA graphs that take turns on one GPU, and their rows.

Imported by gemm.py, gemm_fp8.py, grouped_fp8.py and one_row_fp8.py; it is no benchmark of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import rows
from benchmarks.rows import Row
from weft.runtime.versions import versions

WARM_UP = 4


def _graph(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def medians(methods: Mapping[str, Sequence[Callable[[], object]]], *, rounds: int) -> dict[str, float]:
    """The median time of one call by each method, in us. methods: the calls of each one's graph. rounds: in each, every graph
    is replayed once, after WARM_UP rounds that are not counted."""
    graphs = {name: _graph(calls) for name, calls in methods.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for round_ in range(rounds + WARM_UP):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if round_ >= WARM_UP:
                times[name].append(start.elapsed_time(end) * 1e3 / len(methods[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def append(path: Path, us: Mapping[str, float], **about: Any) -> None:
    """Append one case's row. about: its other fields, such as bench, op, case, commit, dtype and samples."""
    times = {f"computation/{name}": value for name, value in us.items()}
    machine = torch.cuda.get_device_name()
    rows.append(path, Row(**about, machine=machine, versions=versions("cuda"), world_size=1, mode="graph", us=times))
