"""How the benchmarks measure: one process a GPU, methods that take turns, times of the slowest rank.

A method is a function without arguments that enqueues one call. `trial` takes several through three stages, each of them on
all ranks together: every method's result is checked; every method is captured in a CUDA graph of `repeat` calls (mode graph)
or called `repeat` times (mode eager); then all take turns round by round. Between two methods all GPUs are idle, and ranks
meet at a barrier. A round's time is the slowest rank's, between two GPU events; the figure is the median over rounds. Host
time is what the same calls keep the host busy.

What `auto` chose in an earlier run is not taken over: WEFT_CACHE_DIR counts only for a benchmark that asks for it (PLANS),
since its first run compiles, and is to be followed by another one that finds what the first one chose.

A method that raises on any rank is left out on all, with its reason, and the trial begins anew: what failed may have taken
the programs of other methods with it. A wrong result is no such failure: WrongResult ends the run.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

import weft
from benchmarks import rows
from benchmarks.checked_options import MODES, appended, count, modes_of
from benchmarks.rows import Row
from weft.core import codec
from weft.core.problem import CollectiveProblem, LookupProblem, Problem
from weft.runtime.plan_cache import versions

ALARM_S = 90
"""A stage that takes longer ends the run, with every thread's stack."""
PLANS = ""
"""The folder of kept plans that a benchmark takes over; none."""
WARM_UP = 2
_LEADS = 2
_REASON = 400
"""Letters of an error that a row keeps."""
Work = Callable[[], object]
Check = Callable[[str, object], None]
T = TypeVar("T")
AnyProblem: TypeAlias = Problem | LookupProblem | CollectiveProblem


class Failed(Exception):
    """A method that some rank could not run. name: which. reason: of the first such rank."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason


class WrongResult(AssertionError):
    """A method's result is not the reference's."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """A method's medians, for one call. us: on the GPU. host_us: until the call returns."""

    us: float
    host_us: float


@dataclass(frozen=True, kw_only=True)
class Job:
    """A case that waits to be measured. run: measures it; its rows, one a mode. Raises Failed."""

    name: str
    run: Callable[[], Iterable[Row]]


def start(device: str = "cuda") -> int:
    """Join the world as torchrun set it up; this rank. Nothing of weft waits longer than the alarm, and what an earlier run
    chose is taken over from PLANS alone, whatever the user's environment names. device: "cpu" for a run that only shows that a
    benchmark works."""
    alarm()
    os.environ.setdefault("WEFT_TIMEOUT_S", "45")
    os.environ["WEFT_CACHE_DIR"] = PLANS
    rank = int(os.environ["LOCAL_RANK"])
    if device == "cpu":
        dist.init_process_group("gloo")
        return rank
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
    return rank


def stop(left_out: Sequence[str] = ()) -> None:
    """Leave the world; with status 1, and saying so, where cases were left out."""
    alarm()
    release()
    if left_out:
        say(f"{len(left_out)} left out: {', '.join(left_out)}", file=sys.stderr)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    if left_out:
        sys.exit(1)


def alarm() -> None:
    """The run is alive."""
    faulthandler.dump_traceback_later(ALARM_S, exit=True)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def release() -> None:
    """Give back what weft and the allocator hold. Collective."""
    synchronize()
    weft.close()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    dist.barrier()


def say(*words: object, file: Any = None) -> None:
    """Print on rank 0, with the time."""
    if dist.get_rank() == 0:
        print(time.strftime("%H:%M:%S"), *words, file=file or sys.stdout, flush=True)


def together(name: str, work: Callable[[], T]) -> T:
    """work(), on every rank. Raises Failed on all of them if one cannot, and WrongResult as it is."""
    alarm()
    result, reason = None, ""
    try:
        result = work()
        synchronize()
    except WrongResult:
        raise
    except Exception as error:
        reason = describe_error(error)
    _agree(name, reason)
    return result  # type: ignore[return-value]


def describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_REASON]


def _agree(name: str, reason: str) -> None:
    reasons = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    for rank, text in enumerate(reasons):
        if text:
            raise Failed(name, f"rank {rank}: {text}")


def trial(
    works: Mapping[str, Work], modes: Sequence[str], *, check: Check, needed: Collection[str], rounds: int, repeat: int
) -> tuple[dict[str, dict[str, Times]], dict[str, str]]:
    """(each mode's times by method, why methods are missing). Collective.

    check(name, result) raises WrongResult. needed: methods without which there is nothing to say: Failed is raised.
    """
    missing: dict[str, str] = {}
    while True:
        left = {name: work for name, work in works.items() if name not in missing}
        try:
            return _stages(left, modes, check, rounds, repeat), missing
        except Failed as failed:
            if failed.name in needed:
                raise
            missing[failed.name] = failed.reason
            say(f"LEFT OUT {failed}", file=sys.stderr)
        release()


def _stages(
    works: Mapping[str, Work], modes: Sequence[str], check: Check, rounds: int, repeat: int
) -> dict[str, dict[str, Times]]:
    for name, work in works.items():
        together(name, lambda name=name, work=work: check(name, work()))  # type: ignore[misc]
    found = {}
    for mode in modes:
        make = partial(captured if mode == "graph" else repeated, repeat=repeat)
        runs = {name: together(name, partial(make, work)) for name, work in works.items()}
        found[mode] = timed(runs, {} if mode == "graph" else works, rounds, repeat)
    return found


def captured(work: Work, repeat: int) -> Callable[[], None]:
    """`repeat` calls as one CUDA graph. The mode lets NCCL's watchdog thread work meanwhile."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(repeat):
            work()
    return graph.replay


def repeated(work: Work, repeat: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(repeat):
            work()

    return run


def timed(runs: Mapping[str, Callable[[], None]], leads: Mapping[str, Work], rounds: int, repeat: int) -> dict[str, Times]:
    """Each method's times. leads: calls that go before the clock starts, so that it finds the host ahead of the GPU, as it is
    in a model, and the ranks' GPUs together. A rank that fails goes on meeting the others, so that none waits for it; Failed
    names the first."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    failures: list[tuple[int, str, str]] = []
    turn = 0
    for round_ in range(rounds + WARM_UP):
        alarm()
        for name, run in in_turn(runs, round_):
            turn += 1
            synchronize()
            dist.barrier()
            try:
                sample = _once(run, leads.get(name))
            except Exception as error:
                failures.append((turn, name, describe_error(error)))
                sample = (math.nan, math.nan)
            if round_ >= WARM_UP:
                samples[name].append(sample)
    raise_first(failures)
    return _slowest(samples, repeat)


def in_turn(runs: Mapping[str, T], round_: int) -> list[tuple[str, T]]:
    """The methods in this round's order, the same on all ranks and another one each round: a GPU that the method before has
    heated runs slower (by 5% after 40 ms of large matmuls, on 4 x H200)."""
    shuffled = list(runs.items())
    random.Random(round_).shuffle(shuffled)
    return shuffled


def _once(run: Callable[[], None], lead: Work | None) -> tuple[float, float]:
    """(GPU time, host time) in us. Without a GPU both are the wall time."""
    for _ in range(_LEADS if lead else 0):
        lead()  # type: ignore[misc]
    if not torch.cuda.is_available():
        called_ns = time.perf_counter_ns()
        run()
        us = (time.perf_counter_ns() - called_ns) / 1e3
        return us, us
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    called_ns = time.perf_counter_ns()
    run()
    returned_ns = time.perf_counter_ns()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3, (returned_ns - called_ns) / 1e3


def raise_first(failures: Sequence[tuple[int, str, str]]) -> None:
    """After the first failure others follow, of methods that share its rank_group: the first of all ranks is the one to
    name."""
    everyone: list[list[tuple[int, str, str]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, list(failures))
    first = min(((*failed[0], rank) for rank, failed in enumerate(everyone) if failed), default=None)
    if first is not None:
        _, name, reason, rank = first
        raise Failed(name, f"rank {rank}: {reason}")


def _slowest(samples: Mapping[str, Sequence[tuple[float, float]]], repeat: int) -> dict[str, Times]:
    """Medians over rounds of the slowest rank's times, for one call of `repeat`."""
    slowest = torch.tensor(list(samples.values()), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    found = {}
    for name, rounds in zip(samples, slowest.tolist(), strict=True):
        us, host_us = (statistics.median(column) / repeat for column in zip(*rounds, strict=True))
        found[name] = Times(us=us, host_us=host_us)
    return found


def step_bytes(work: Work, clear: Callable[[], None]) -> int | None:
    """The bytes that torch's allocator hands out during a call, at most, above those in use before it; None without a GPU.
    weft's symmetric buffers and NCCL's are not counted. clear: drops what a call leaves, before and after it."""
    clear()
    if not torch.cuda.is_available():
        return None
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    synchronize()
    found = torch.cuda.max_memory_allocated() - before
    clear()
    return int(found)


def close_to(expected: torch.Tensor, tolerance: float = 0.03) -> Callable[[str, torch.Tensor], None]:
    """A check: differences of at most `tolerance` of the expected tensor's largest element."""
    largest = float(expected.abs().max())

    def check(name: str, result: torch.Tensor) -> None:
        worst = float((result.detach().float() - expected).abs().max()) / largest
        if not worst <= tolerance:
            raise WrongResult(f"{name} is off by {worst:.3g} of the largest element; {tolerance} is allowed")

    return check


ALONE = ("computation/", "communication/")
"""Methods that do not give the result."""


def check_of(expected: torch.Tensor, *, uncompared: tuple[str, ...] = ALONE, tolerance: float = 0.03) -> Check:
    """A trial's check: `close_to` what is expected, but for methods whose names begin with one of `uncompared`."""
    compare = close_to(expected, tolerance)

    def check(name: str, result: object) -> None:
        if not name.startswith(uncompared):
            compare(name, result)  # type: ignore[arg-type]

    return check


def parser(
    text: str | None, *, rounds: int, modes: str = "graph,eager", known: Sequence[str] = MODES
) -> argparse.ArgumentParser:
    """The options that all benchmarks have. modes: the default of --modes. known: what it takes."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=appended, help="append a row for each case and mode (rows.py)")
    made.add_argument("--commit", default="", help="what the tree is, for the rows")
    made.add_argument(
        "--modes", type=partial(modes_of, known=known), default=modes, help=f"of {', '.join(known)} (%(default)s)"
    )
    made.add_argument("--rounds", type=count, default=rounds, help="samples of each method (%(default)s)")
    return made


def row(
    *,
    bench: str,
    op: str,
    case: str,
    dtype: str,
    mode: str,
    arguments: argparse.Namespace,
    times: Mapping[str, Times] | None = None,
    problem: AnyProblem | None = None,
    device: str = "cuda",
    **figures: Any,
) -> Row:
    """A row of what `trial` found in one mode, with host times of eager calls. figures: further fields of a Row, or `us` and
    `host_us` of what another clock found."""
    if times is not None:
        figures["us"] = {name: t.us for name, t in times.items()}
        figures["host_us"] = {name: t.host_us for name, t in times.items()} if mode == "eager" else {}
    return Row(
        bench=bench,
        op=op,
        case=case,
        problem=codec.dump(problem) if problem else {},
        dtype=dtype,
        world_size=dist.get_world_size(),
        mode=mode,
        machine=f"{dist.get_world_size()} x {torch.cuda.get_device_name()}" if device == "cuda" else f"{os.cpu_count()} cores",
        versions=versions(device),
        commit=arguments.commit,
        samples=arguments.rounds,
        **figures,
    )


def each_mode(times: Mapping[str, Mapping[str, Times]], **about: Any) -> list[Row]:
    """A row for each mode of a trial. about: arguments of `row`."""
    return [row(mode=mode, times=found, **about) for mode, found in times.items()]


def bytes_text(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >> 20 else f"{nbytes >> 10} KiB"


def append(path: Path | None, row: Row) -> None:
    """Write a row, on rank 0."""
    rows.append(path if dist.get_rank() == 0 else None, row)
