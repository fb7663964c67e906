"""What a call does on this GPU, kernel by kernel: a trace for ui.perfetto.dev, times by kind, and a chart of the streams.

`taken` is for benchmarks, inside torchrun; from the command line, traces that lie in files are described again:

    python -m benchmarks.traces docs/traces/torch.json.gz docs/traces/weft.json.gz

A trace has the GPU's side alone (kernels, copies by copy engines, named ranges), so that it is small enough to keep; names of
kernels are cut. exposed: the time in which something communicates and nothing else runs. idle: in which nothing runs; between
kernels, most of it. Traps: a profiled call is slower by the profiler's own work, so times are compared with each other alone;
streams that wait for a word in memory (cuStreamWaitValue32) show nothing while they do, so that such a wait is a gap.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

Event = dict[str, Any]
KEPT = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
NAME_LETTERS = 100
KINDS: tuple[tuple[str, str, str], ...] = (
    ("NCCL", "~", r"nccl"),
    ("copy engine", "=", r"memcpy ptop"),
    ("weft's exchange", "=", r"^(_?push|pull|_words|collect|layout)_kernel"),
    ("waiting", ".", r"^(await|_flag)_kernel"),
    ("weft's sum", "+", r"^_sum_kernel"),
    ("local copy", "-", r"memcpy|memset|CatArray|copy_kernel"),
    ("attention", "%", r"flash|fmha|sdpa"),
    ("matmul", "#", r"gemm|nvjet|cutlass|xmma|splitk|cublas|^(dispatch|combine|_all_reduce)_kernel"),
    ("norm", "n", r"norm"),
    ("the rest", ":", r""),
)
"""Name, mark in the chart, and what names of kernels have, the first that fits."""
COMMUNICATES = ("NCCL", "copy engine", "weft's exchange")
COMPUTES = tuple(kind for kind, _, _ in KINDS if kind not in (*COMMUNICATES, "waiting"))
BUDGET: Mapping[str, tuple[str, ...]] = {
    "matmul": ("matmul",),
    "attention": ("attention",),
    "elementwise, norms": ("norm", "weft's sum", "the rest"),
    "copies and cat": ("local copy",),
    "communication kernels": ("NCCL", "weft's exchange"),
    "copies over NVLink": ("copy engine",),
    "waiting": ("waiting",),
}
"""The lines of a time budget, and their kinds."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One kernel or copy, in us from the first one's start."""

    name: str
    kind: str
    stream: int
    start_us: float
    end_us: float


def taken(name: str, work: Callable[[], object], folder: Path | None) -> list[Part]:
    """Profile one call, after one that is not, into folder / NAME.json.gz. All ranks call it, one of them with a folder."""
    if folder is None:
        for _ in range(2):
            work()
        _settle()
        return []
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "whole.json"
        ready: Callable[[Any], None] = lambda made: made.export_chrome_trace(str(path))  # noqa: E731
        with profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=1), on_trace_ready=ready) as profiler:
            for _ in range(2):
                with record_function(name):
                    work()
                _settle()
                profiler.step()
        events = trimmed(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])
    folder.mkdir(parents=True, exist_ok=True)
    written(events, folder / f"{re.sub(r'[^a-z0-9]+', '_', name.lower()).strip('_')}.json.gz")
    return parts(events)


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def profiled(works: Mapping[str, Callable[[], object]], part: str, folder: Path | None) -> Iterator[dict[str, Any]]:
    """Profile each work, after some calls, and print its times: its name, and what a row keeps. folder: as `taken` has it."""
    for name, work in works.items():
        for _ in range(3):
            work()
        found = taken(f"{part} {name}", work, folder)
        if folder is not None:
            print(*describe(name, found, top=12), sep="\n", flush=True)
        yield {"method": name, **figures(found)}


def annotated(model: nn.Module, names: Sequence[str]) -> None:
    """Give modules of these names a range in traces."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in names:
            module.register_forward_pre_hook(_begin(name), prepend=True)
            module.register_forward_hook(_end)


def _begin(name: str) -> Callable[..., None]:
    def begin(module: Any, args: Any) -> None:
        module.__dict__["_range"] = record_function(name)
        module.__dict__["_range"].__enter__()

    return begin


def _end(module: Any, args: Any, out: Any) -> None:
    module.__dict__["_range"].__exit__(None, None, None)


def trimmed(events: Iterable[Event]) -> list[Event]:
    """The GPU's events, with times from the first one's start, and the names of what they run on."""
    items = list(events)
    kept = [event for event in items if event.get("cat") in KEPT and not event["name"].startswith("ProfilerStep")]
    first = min((event["ts"] for event in kept if event["cat"] != "gpu_user_annotation"), default=0.0)
    places = {event["pid"] for event in kept}
    named = [event for event in items if event.get("ph") == "M" and event.get("pid") in places]
    return [*named, *(_short(event, first) for event in sorted(kept, key=lambda event: float(event["ts"])))]


def _short(event: Event, first: float) -> Event:
    name = event["name"][:NAME_LETTERS]
    args = {key: event["args"][key] for key in ("stream", "bytes") if key in event.get("args", {})}
    times = {"ts": round(event["ts"] - first, 3), "dur": round(event.get("dur", 0), 3)}
    return {"ph": "X", "cat": event["cat"], "name": name, "pid": event["pid"], "tid": event["tid"], **times, "args": args}


def written(events: Sequence[Event], path: Path) -> None:
    data = json.dumps({"traceEvents": events}, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(data, mtime=0))


def read(path: Path) -> list[Event]:
    found: list[Event] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return found


def parts(events: Iterable[Event]) -> list[Part]:
    """Kernels and copies, in the order of their starts."""
    found = []
    for event in events:
        if event.get("cat") in KEPT[:3]:
            start, stream = float(event["ts"]), int(event["args"].get("stream", 0))
            end = start + float(event["dur"])
            found.append(Part(name=event["name"], kind=kind_of(event["name"]), stream=stream, start_us=start, end_us=end))
    return _by_start(found)


def _by_start(found: Iterable[Part]) -> list[Part]:
    return sorted(found, key=lambda part: part.start_us)


def kind_of(name: str) -> str:
    """
    >>> kind_of("nvjet_tst_256x128"), kind_of("Memcpy PtoP (Device -> Device)"), kind_of("ncclDevKernel_AllGather")
    ('matmul', 'copy engine', 'NCCL')
    """
    return next(kind for kind, _, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))


def by_kind(found: Sequence[Part]) -> dict[str, tuple[int, float]]:
    """(how many, us together) of each kind, in the order of KINDS."""
    same = {kind: [part for part in found if part.kind == kind] for kind, _, _ in KINDS}
    return {kind: (len(some), sum(part.end_us - part.start_us for part in some)) for kind, some in same.items() if some}


def heaviest(found: Sequence[Part], count: int) -> list[tuple[str, int, float]]:
    """(name, how many, us together) of the kernels that take longest."""
    us: dict[str, list[float]] = {}
    for part in found:
        us.setdefault(part.name, []).append(part.end_us - part.start_us)
    return sorted(((name, len(each), sum(each)) for name, each in us.items()), key=lambda item: -item[2])[:count]


def shares(found: Sequence[Part]) -> dict[str, float]:
    """us of: the whole call, exposed, idle."""
    whole = max((part.end_us for part in found), default=0.0)
    busy = _covered(part for part in found if part.kind in COMPUTES)
    any_ = _covered(found)
    return {"whole": whole, "exposed": any_ - busy, "idle": whole - any_}


def _covered(found: Iterable[Part]) -> float:
    """Length of the union."""
    total, reached = 0.0, 0.0
    for part in _by_start(found):
        total += max(0.0, part.end_us - max(reached, part.start_us))
        reached = max(reached, part.end_us)
    return total


def chart(found: Sequence[Part], *, width: int, length_us: float) -> Iterator[str]:
    """Two lines on `width` columns of `length_us`, what computes and what communicates, whatever the stream: that of a copy in
    a CUDA graph is the launch's. Then what the marks mean."""
    marks = {kind: mark for kind, mark, _ in KINDS}
    for lane, sends in (("computing", False), ("sending", True)):
        line = [" "] * width
        for part in (each for each in found if (each.kind not in COMPUTES) is sends):
            low = min(int(part.start_us / length_us * width), width - 1)
            for at in range(low, max(low + 1, min(width, round(part.end_us / length_us * width)))):
                line[at] = marks[part.kind]
        yield f"{lane:12}{''.join(line)}".rstrip()
    yield " " * 12 + "   ".join(f"{marks[kind]} {kind}" for kind in by_kind(found))


def describe(name: str, found: Sequence[Part], *, top: int = 0) -> Iterator[str]:
    """Lines: the whole, by kind, and the kernels that take longest."""
    figures = shares(found)
    yield f"{name}: {figures['whole']:.0f} us, exposed {figures['exposed']:.0f}, idle {figures['idle']:.0f}"
    for kind, (count, us) in by_kind(found).items():
        yield f"  {kind:18} {count:4} {us:9.0f} us"
    for kernel, count, us in heaviest(found, top):
        yield f"    {us:9.0f} us {count:4} x {kernel}"


def budget(found: Sequence[Part], steps: int = 1) -> dict[str, float]:
    """Where the time of a step goes, in us. steps: how many are in the trace.

    The lines of BUDGET are sums over kernels, which may run at the same time. gaps: nothing runs. computation, communication:
    at least one kernel of theirs runs. exposed: something communicates or waits, and nothing computes. rest: the step without
    the longer of computation and communication."""
    whole, kinds = shares(found), by_kind(found)
    us = {line: sum(kinds[kind][1] for kind in some if kind in kinds) for line, some in BUDGET.items()}
    both = [_covered(part for part in found if part.kind in some) for some in (COMPUTES, COMMUNICATES)]
    us |= {"gaps": whole["idle"], "step": whole["whole"], "computation": both[0], "communication": both[1]}
    us |= {"exposed": whole["exposed"], "rest": whole["whole"] - max(both)}
    return {line: value / steps for line, value in us.items()}


def budget_table(budgets: Mapping[str, Mapping[str, float]]) -> str:
    """Budgets side by side, and how much more each has than the first."""
    first, *others = budgets
    heads = ["us per step", *budgets, *(f"{name} - {first}" for name in others)]
    lines = [heads]
    for line, us in budgets[first].items():
        more = (f"{budgets[name][line] - us:+,.0f}" for name in others)
        lines.append([line, *(f"{each[line]:,.0f}" for each in budgets.values()), *more])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width) for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def figures(found: Sequence[Part]) -> Mapping[str, Any]:
    """What a row keeps of a trace."""
    return {**shares(found), "kinds": by_kind(found), "heaviest": heaviest(found, 12)}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("traces", type=Path, nargs="+")
    options.add_argument("--width", type=int, default=100, help="columns of the chart (%(default)s)")
    options.add_argument("--top", type=int, default=0, help="so many kernels by name (%(default)s)")
    options.add_argument(
        "--budget", type=int, metavar="STEPS", help="time budgets side by side instead, of so many steps a trace"
    )
    arguments = options.parse_args()
    found = {path.name.partition(".")[0]: parts(read(path)) for path in arguments.traces}
    if arguments.budget:
        print(budget_table({name: budget(each, arguments.budget) for name, each in found.items()}))
        return
    longest = max((each[-1].end_us for each in found.values() if each), default=1.0)
    for name, each in found.items():
        print(*describe(name, each, top=arguments.top), *chart(each, width=arguments.width, length_us=longest), sep="\n")


if __name__ == "__main__":
    main()
