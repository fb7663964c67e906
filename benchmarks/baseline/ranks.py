"""How a rank of benchmarks.baseline measures: it agrees with the others, calls methods in turn, and keeps a row for each."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from typing import Any

import torch
import torch.distributed as dist

import weft
from benchmarks import measure
from benchmarks.baseline.figures import CALL
from benchmarks.measure import alarm, in_turn
from benchmarks.rows import CASE, Row
from weft.runtime.plan_cache import versions

BURST, LEADS, ROUNDS = 10, 3, 10
"""Calls of a method in a row, of those not counted, and rounds."""
WARM_CALLS = 4
REPLAYS, REPLAY_WARM = 21, 3
BUDGET_S, LEAST_ROUNDS = 20.0, 6
"""Of a part's rounds: no round is begun after that, but so many are."""
Thunk = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Method:
    """One thing to time. make: gives the call, ready to run; making it is not timed."""

    op: str
    case: str
    make: Callable[[], Thunk]

    @property
    def name(self) -> str:
        return f"{self.op}, {self.case}"


def method(op: str, case: str, function: Callable[..., object], *given: Any, **options: Any) -> Method:
    """A call with the same tensors each time."""

    def call() -> object:
        return function(*given, **options)

    return Method(op=op, case=case, make=lambda: call)


class World:
    """This process as one rank of a part. Ranks agree by gloo, without their GPUs."""

    def __init__(self, part: str, device: str, note: str) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.part, self.note = part, note
        options: dict[str, Any] = {}
        if device == "cpu":
            torch.set_num_threads(1)
            self.on = torch.device("cpu")
        else:
            self.on = torch.device("cuda", self.rank % torch.cuda.device_count())
            if torch.cuda.device_count() < self.size:
                os.environ["NCCL_HOSTID"] = f"rank {self.rank}"  # NCCL refuses two ranks of one GPU, but not of two hosts
                os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
            torch.cuda.set_device(self.on)
            options["device_id"] = self.on
        dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", **options)
        self.versions = versions(device)
        if util.find_spec("triton"):
            self.versions["triton"] = metadata.version("triton")
        self.rows: list[Row] = []
        torch.manual_seed(self.rank)

    @property
    def machine(self) -> str:
        if self.on.type == "cpu":
            return f"{os.cpu_count()} cores, {platform.machine()}"
        return f"{min(self.size, torch.cuda.device_count())} x {torch.cuda.get_device_name()}"

    def wait(self) -> None:
        """Until the GPU is idle and all ranks are here."""
        alarm()
        self.idle()
        dist.all_reduce(torch.zeros(1))

    def idle(self) -> None:
        if self.on.type == "cuda":
            torch.cuda.synchronize()

    def everyone(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine)
        return found

    def tensor(self, *shape: int, dtype: str, zero: bool = False) -> torch.Tensor:
        made = torch.zeros(*shape) if zero else torch.randn(*shape) * shape[-1] ** -0.5
        return made.to(self.on, getattr(torch, dtype))

    def keep(self, op: str, case: str, unit: str, figures: Mapping[str, float], *, dtype: str, **about: Any) -> None:
        """A figure of this run as a row. unit: us, host_us or bytes. figures: value, with p10, p90 and samples of the samples.
        about: mode (eager), control, and what else the row's `extra` has."""
        value, mode = round(figures["value"], 2), about.pop("mode", "eager")
        extra = {"part": self.part, "control": about.pop("control", False) or op == "torch", "runs": [value], **about}
        extra |= {what: [round(figures[what], 2)] for what in ("p10", "p90") if what in figures}
        given: dict[str, Any] = (
            {"extra": extra | {"bytes": value}} if unit == "bytes" else {"extra": extra, unit: {CALL: value}}
        )
        self.rows.append(self._row(op, case, dtype=dtype, mode=mode, samples=int(figures.get("samples", 1)), **given))

    def leave_out(self, op: str, case: str, reason: str) -> None:
        if self.rank == 0:
            print(f"LEFT OUT {op}, {case}: {reason}", file=sys.stderr, flush=True)
        self.rows.append(self._row(op, case, dtype="", mode="eager", missing={CASE: reason}, extra={"part": self.part}))

    def _row(self, op: str, case: str, **fields: Any) -> Row:
        about = {"machine": self.machine, "versions": self.versions, "world_size": self.size, "state": self.note}
        return Row(bench="baseline", op=op, case=case, **about, **fields)


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    ordered = sorted(samples)
    p10, p90 = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
    return {"value": statistics.median(ordered), "p10": p10, "p90": p90, "samples": len(ordered)}


def slowest(world: World, mine: Sequence[float]) -> dict[str, float]:
    """Of each figure the largest of all ranks."""
    found = world.everyone(percentiles(mine))
    return {key: max(one[key] for one in found) for key in found[0]}


def agreed(world: World, work: Callable[[], Any]) -> tuple[Any, str]:
    """work(), on all ranks; and why some rank could not, or an empty text."""
    alarm()
    result, reason = None, ""
    try:
        result = work()
        world.idle()
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        traceback.print_exc()
    reasons = [text for text in world.everyone(reason) if text]
    return result, reasons[0] if reasons else ""


def prepared(world: World, methods: Sequence[Method], prepare: Callable[[Method], Any]) -> dict[str, tuple[Method, Any]]:
    """Each method with what `prepare` makes of it, less those that fail on some rank. After a failure all begin anew."""
    left = list(methods)
    while True:
        done: dict[str, tuple[Method, Any]] = {}
        for method in left:
            found, reason = agreed(world, lambda method=method: prepare(method))  # type: ignore[misc]
            if reason:
                world.leave_out(method.op, method.case, reason)
                left.remove(method)
                weft.close()
                world.wait()
                break
            done[method.name] = (method, found)
        else:
            return done


def rounds(world: World, names: Sequence[str], most: int, one: Callable[[str, int], None]) -> None:
    """one(name, round) for each method in turn, until the rounds or the time are used up, but LEAST_ROUNDS at least."""
    begun = time.monotonic()
    for round_ in range(most):
        if round_ >= LEAST_ROUNDS and world.everyone(time.monotonic() - begun > BUDGET_S)[0]:
            print(f"stopped after {round_} of {most} rounds", file=sys.stderr)
            return
        for name, _ in in_turn(dict.fromkeys(names), round_):
            one(name, round_)


def host_times(world: World, methods: Sequence[Method], dtype: str) -> None:
    """Host time of warm calls."""

    def warm(method: Method) -> None:
        for _ in range(WARM_CALLS):
            method.make()()

    done = prepared(world, methods, warm)
    samples: dict[str, list[float]] = {name: [] for name in done}

    def burst(name: str, round_: int) -> None:
        make = done[name][0].make
        world.wait()
        for at in range(BURST):
            call = make()
            begun = time.perf_counter_ns()
            call()
            ended = time.perf_counter_ns()
            if round_ and at >= LEADS:
                samples[name].append((ended - begun) / 1e3)

    gc.collect()
    gc.disable()
    rounds(world, list(done), ROUNDS + 1, burst)
    gc.enable()
    for name, (method, _) in done.items():
        world.keep(method.op, method.case, "host_us", slowest(world, samples[name]), dtype=dtype)


def graph_times(world: World, methods: Sequence[Method], dtype: str, calls: int) -> None:
    """Time on the GPU of a call in a graph of `calls`."""

    def capture(method: Method) -> Thunk:
        work = method.make()
        for _ in range(2):
            work()
        world.wait()
        return measure.captured(work, calls)

    with torch.no_grad():
        done = prepared(world, methods, capture)
    samples: dict[str, list[float]] = {name: [] for name in done}

    def replay(name: str, round_: int) -> None:
        world.wait()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        done[name][1]()
        end.record()
        end.synchronize()
        if round_ >= REPLAY_WARM:
            samples[name].append(begin.elapsed_time(end) * 1e3 / calls)

    rounds(world, list(done), REPLAYS + REPLAY_WARM, replay)
    for name, (method, _) in done.items():
        by_round = [max(ranks) for ranks in zip(*world.everyone(samples[name]), strict=True)]
        world.keep(method.op, method.case, "us", percentiles(by_round), dtype=dtype, mode="graph")
