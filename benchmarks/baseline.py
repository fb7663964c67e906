"""Did a change make anything slower or larger? One row for each figure: host time, first calls, kernels, graphs, memory.

The script uses weft's public operators, and for kernels alone the functions of gemm.py, products.py, embedding.py and moe.py.
So it runs unchanged before and after the internals of weft change.

    python -m benchmarks.baseline --commit abc --json before.jsonl                      every GPU part, on one GPU
    python -m benchmarks.baseline --part cpu_host,cpu_first --commit abc --json before.jsonl
    python -m benchmarks.baseline --tree ../old --commit abc --tree . --commit def --json both.jsonl
    python -m benchmarks.baseline --compare both.jsonl abc def

    host        host time of an eager warm call, until Python goes on; two ranks share one GPU
    first       host time of a first call by a named schedule: build, check, bind and enqueue, without autotuning
    memory      bytes that a bound program holds; two ranks share one GPU
    replay      time of a graph's replay; two ranks share one GPU
    replay1     time of a graph's replay in a world of one rank, which has the GPU for itself
    gemm, products, lookup, ragged      kernels alone on one GPU
    cpu_host, cpu_first                 as host and first, on two CPU ranks

Protocol: each part runs in processes of its own, under a limit, --runs times. Within a part, methods take turns round by round,
in an order that changes each round. A sample of a rank is the time of one call, or of one replay. A run's figure is the median
of the slowest rank. A row's value is the median over runs; `extra` has each run's figure, and the 10th and 90th percentile of
each run's samples. A part that fails, or is late, is named at the end, and the status is then 1; its other runs stay.

Several trees take turns, part by part. A difference of a few percent counts only if both trees ran on the same machine in the
same command, and for host times only over many runs: a virtual machine's cores may be half as fast for seconds, so that runs of
one tree differed by 57% (16 cores beside one H200). `--compare` therefore has two ratios: of runs that followed each other
(their median), and of the floors, the least 10th percentile of all runs. It calls a figure worse where both are. Of 87
figures of kernels and graphs 60 lay within 3% over three runs, 85 within 9%; the two others are kernels of 8 us. All figures of
memory were the same.

Traps: two ranks on one GPU take turns in slices of a millisecond or more. Host times do not wait for the GPU, but times on the
GPU (`replay`) are mostly waiting for the other rank's slices: use them to compare two trees, not to say how fast weft is. NCCL
takes the two for two hosts and goes by sockets. Rows of `torch` are controls: weft does not run in them, so if they differ, the
machine does. Host times are those of calls in bursts of BURST; the first LEADS of each are not counted, and Python's garbage
collector is off. A call with the tensors of an earlier one may be replayed; `new tensors` are calls whose input lies elsewhere
each time. Figures of CPU ranks need idle cores: on 2 busy ones, six runs of a tree beside six of itself had ratios of 0.72 to
1.37, and 9 of 50 figures were called worse.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, read, text_of

ROOT = Path(__file__).resolve().parents[1]
BURST, LEADS, ROUNDS = 10, 3, 10
"""Calls of a method in a row, of those not counted, and rounds."""
WARM_CALLS = 4
FIRST_CALLS, FIRST_WARM = 9, 3
REPLAYS, REPLAY_WARM = 21, 3
BUDGET_S, LEAST_ROUNDS = 20.0, 6
"""Of a part's rounds: no round is begun after that, but so many are."""
_ALARM_S = 75
_TOLERANCE = 0.03
Figure = dict[str, Any]
Thunk = Callable[[], object]


# What ranks do.


@dataclass(frozen=True, kw_only=True)
class Method:
    """One thing to time. make: gives the call, ready to run; making it is not timed."""

    op: str
    case: str
    make: Callable[[], Thunk]

    @property
    def name(self) -> str:
        return f"{self.op}, {self.case}"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Extents of host calls. few: rows of a decode step. experts: of each rank, for `splits`."""

    m: int
    n: int
    k: int
    few: int
    experts: int
    batch: int
    dtype: str


GPU_SIZES = Sizes(m=2048, n=2048, k=1024, few=8, experts=4, batch=1024, dtype="bfloat16")
CPU_SIZES = Sizes(m=64, n=64, k=64, few=4, experts=2, batch=64, dtype="float32")


class World:
    """This process as one rank. Ranks meet by gloo, without their GPUs."""

    def __init__(self, device: str) -> None:
        import torch
        import torch.distributed as dist

        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
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
        self.rows: list[Figure] = []
        torch.manual_seed(self.rank)

    def wait(self) -> None:
        """Until the GPU is idle and all ranks are here."""
        import torch
        import torch.distributed as dist

        alarm()
        self.idle()
        dist.all_reduce(torch.zeros(1))

    def idle(self) -> None:
        import torch

        if self.on.type == "cuda":
            torch.cuda.synchronize()

    def everyone(self, mine: Any) -> list[Any]:
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine)
        return found

    def tensor(self, *shape: int, dtype: str, zero: bool = False) -> Any:
        import torch

        made = torch.zeros(*shape) if zero else torch.randn(*shape) * shape[-1] ** -0.5
        return made.to(self.on, getattr(torch, dtype))

    def tell(self, op: str, case: str, figures: Mapping[str, float], unit: str, *, mode: str, dtype: str, **more: Any) -> None:
        """A figure of this run. figures: value, and p10 and p90 where there are samples."""
        self.rows.append({"op": op, "case": case, "unit": unit, "mode": mode, "dtype": dtype, **figures, **more})

    def leave_out(self, name: str, reason: str) -> None:
        if self.rank == 0:
            print(f"LEFT OUT {name}: {reason}", file=sys.stderr, flush=True)
        self.rows.append({"left_out": name, "reason": reason})


def alarm(seconds: float = _ALARM_S) -> None:
    """The process ends after so long, with every thread's stack, unless this is called again."""
    faulthandler.dump_traceback_later(seconds, exit=True)


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    ordered = sorted(samples)
    last = len(ordered) - 1
    return {
        "value": statistics.median(ordered),
        "p10": ordered[round(0.1 * last)],
        "p90": ordered[round(0.9 * last)],
        "samples": len(ordered),
    }


def slowest(world: World, mine: Sequence[float]) -> dict[str, float]:
    """Of each figure the largest of all ranks."""
    found = world.everyone(percentiles(mine))
    return {key: max(one[key] for one in found) for key in found[0]}


def agreed(world: World, name: str, work: Callable[[], Any]) -> tuple[Any, str]:
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
    import weft

    left = list(methods)
    while True:
        done: dict[str, tuple[Method, Any]] = {}
        for method in left:
            found, reason = agreed(world, method.name, lambda method=method: prepare(method))  # type: ignore[misc]
            if reason:
                world.leave_out(method.name, reason)
                left.remove(method)
                weft.close()
                world.wait()
                break
            done[method.name] = (method, found)
        else:
            return done


def in_turn(names: Sequence[str], round_: int) -> list[str]:
    """This round's order, the same on all ranks."""
    shuffled = list(names)
    random.Random(round_).shuffle(shuffled)
    return shuffled


def rounds(world: World, names: Sequence[str], most: int, one: Callable[[str, int], None]) -> None:
    """one(name, round) for each method in turn, until the rounds or the time are used up, but LEAST_ROUNDS at least."""
    begun = time.monotonic()
    for round_ in range(most):
        if round_ >= LEAST_ROUNDS and world.everyone(time.monotonic() - begun > BUDGET_S)[0]:
            print(f"stopped after {round_} of {most} rounds", file=sys.stderr)
            return
        for name in in_turn(names, round_):
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
        world.tell(method.op, method.case, slowest(world, samples[name]), "us", mode="eager, host", dtype=dtype)


def host_methods(world: World, sizes: Sizes) -> list[Method]:
    """Every operator: by name, by a Schedule, with new tensors."""
    import torch
    import torch.distributed as dist

    import weft

    size, dtype = world.size, sizes.dtype
    many, half = sizes.m, sizes.m // size
    made: list[Method] = []

    def add(op: str, case: str, function: Callable[..., object], *given: Any, **options: Any) -> None:
        def call() -> object:
            return function(*given, **options)

        made.append(Method(op=op, case=case, make=lambda: call))

    def moving(op: str, case: str, function: Callable[..., object], a: torch.Tensor, b: torch.Tensor, **options: Any) -> None:
        """a lies 512 bytes further each time; of 4096 calls none has the address of another."""
        step = 512 // a.element_size()
        room, turn = world.tensor(a.numel() + 4096 * step, dtype=dtype, zero=True), [0]

        def make() -> Thunk:
            turn[0] = (turn[0] + 1) % 4096
            begin = turn[0] * step
            there = room[begin : begin + a.numel()].view(a.shape)
            return lambda: function(there, b, **options)

        made.append(Method(op=op, case=case, make=make))

    def matmul(
        op: str, a: torch.Tensor, b: torch.Tensor, spec: str, extents: tuple[int, int, int], *, new: bool = False
    ) -> None:
        function, (m, n, k) = getattr(weft, op), extents
        name, _, chunks = spec.partition(":")
        problem = weft.Problem(op=op, m=m, n=n, k=k, world_size=size, dtype=dtype)  # type: ignore[arg-type]
        value = weft.build(problem, name, int(chunks) if chunks else None)
        shape = f"M={m}"
        add(op, f"{shape} {spec}, by name", function, a, b, schedule=spec)
        add(op, f"{shape} {spec}, as a Schedule", function, a, b, schedule=value)
        if new:
            moving(op, f"{shape} {spec}, by name, new tensors", function, a, b, schedule=spec)

    shard, right = world.tensor(half, sizes.k, dtype=dtype), world.tensor(sizes.k, sizes.n // size, dtype=dtype)
    left, below = world.tensor(many, sizes.k // size, dtype=dtype), world.tensor(sizes.k // size, sizes.n, dtype=dtype)
    some = world.tensor(sizes.few, sizes.k // size, dtype=dtype)
    own, whole = world.tensor(half, sizes.k, dtype=dtype), world.tensor(sizes.k, sizes.n, dtype=dtype)
    tp = (many, sizes.n, sizes.k)
    matmul("all_gather_matmul", shard, right, "flag_gated:2", tp, new=True)
    matmul("all_gather_matmul", shard, right, "shard_p2p", tp, new=True)
    matmul("matmul_reduce_scatter", left, below, "track_and_trigger:2", tp, new=True)
    matmul("matmul_reduce_scatter", left, below, "shard_p2p", tp, new=True)
    matmul("matmul_all_reduce", some, below, "two_shot", (sizes.few, sizes.n, sizes.k), new=True)
    matmul("matmul_all_reduce", left, below, "hetero_unfused_1d:2", tp)
    matmul("matmul_all_to_all", own, whole, "track_and_trigger:1", (half, sizes.n, sizes.k), new=True)
    matmul("all_to_all_matmul", own, whole, "flag_gated:1", (half, sizes.n, sizes.k))

    tables = [world.tensor(1000, 64, dtype="float32") for _ in range(4)]
    bags = len(tables) * sizes.batch
    indices = torch.randint(0, 1000, (4 * bags,), device=world.on)
    offsets = torch.arange(0, 4 * bags + 1, 4, device=world.on)
    lookup = weft.LookupProblem.of(batch=sizes.batch, dims=((64,) * len(tables),) * size, pooling=4)
    for how, schedule in (("by name", "direct_store:1"), ("as a Schedule", weft.build(lookup, "direct_store", 1))):
        case, options = f"batch={sizes.batch} direct_store:1, {how}", {"schedule": schedule, "pooling": 4}
        add("embedding_bag_all_to_all", case, weft.embedding_bag_all_to_all, indices, offsets, tables, **options)

    experts = world.tensor(sizes.experts, sizes.k, sizes.n, dtype=dtype)
    each = half // (size * sizes.experts)
    splits = torch.full((size, sizes.experts), each, dtype=torch.int32, device=world.on)
    room, case = {"max_rows": 2 * half}, f"M={half} experts={sizes.experts}, splits"
    add("all_to_all_matmul", case, weft.all_to_all_matmul, own, experts, splits=splits, **room)
    add("matmul_all_to_all", case, weft.matmul_all_to_all, own, experts, splits=splits.t().contiguous(), **room)

    gradient, product = world.tensor(sizes.m * 64, dtype=dtype, zero=True), torch.empty(half, sizes.n, device=world.on).to(own)

    def beside() -> torch.Tensor:
        return torch.mm(own, whole, out=product)

    for way in ("sequential", "vendor", "copy_engine") if world.on.type == "cuda" else ("sequential", "vendor"):
        add(
            "concurrent",
            f"mm beside all_reduce, {way}",
            lambda way=way: weft.concurrent(beside, [weft.AllReduce(gradient)], way=way),
        )
    add("collectives.all_reduce", f"{gradient.nbytes >> 10} KiB copy_engine", weft.collectives.all_reduce, gradient)
    add("torch", "mm", beside)
    add("torch", "all_reduce", dist.all_reduce, gradient)
    return made


def host(world: World) -> None:
    sizes = CPU_SIZES if world.on.type == "cpu" else GPU_SIZES
    host_times(world, host_methods(world, sizes), sizes.dtype)


def first(world: World) -> None:
    """First calls: each of a row count of its own. The first FIRST_WARM compile kernels, and are not counted."""
    import weft

    sizes = CPU_SIZES if world.on.type == "cpu" else GPU_SIZES
    size, dtype, step = world.size, sizes.dtype, sizes.m // 16
    right = world.tensor(sizes.k, sizes.n // size, dtype=dtype)
    below = world.tensor(sizes.k // size, sizes.n, dtype=dtype)
    kinds = [
        ("all_gather_matmul", "flag_gated:2", False),
        ("all_gather_matmul", "flag_gated:2", True),
        ("all_gather_matmul", "shard_p2p", False),
        ("matmul_reduce_scatter", "track_and_trigger:2", False),
        ("matmul_reduce_scatter", "track_and_trigger:2", True),
        ("matmul_reduce_scatter", "shard_p2p", False),
    ]
    titles = [f"{op}, {spec}, {'as a Schedule' if value else 'by name'}" for op, spec, value in kinds]
    samples: dict[tuple[str, str], list[float]] = {}
    cold: list[float] = []

    def once(title: str, round_: int) -> None:
        number = titles.index(title)
        op, spec, by_value = kinds[number]
        # Of each kind other row counts, so that a Schedule and its name do not find each other's program.
        m = sizes.m + step * (round_ * 2 + by_value)
        rows = m // size if op == "all_gather_matmul" else m
        b = right if op == "all_gather_matmul" else below
        a = world.tensor(rows, b.shape[0], dtype=dtype)
        schedule: Any = spec
        if by_value:
            name, _, chunks = spec.partition(":")
            problem = weft.Problem(op=op, m=m, n=sizes.n, k=sizes.k, world_size=size, dtype=dtype)  # type: ignore[arg-type]
            schedule = weft.build(problem, name, int(chunks))
        for which in ("first call", "second call"):
            world.wait()
            begun = time.perf_counter_ns()
            getattr(weft, op)(a, b, schedule=schedule)
            returned = time.perf_counter_ns()
            world.idle()
            ended = time.perf_counter_ns()
            if not cold:
                cold.append((ended - begun) / 1e3)
            if round_ >= FIRST_WARM:
                samples.setdefault((title, which), []).append((returned - begun) / 1e3)
                if which == "first call":
                    samples.setdefault((title, "first call, until done"), []).append((ended - begun) / 1e3)

    rounds(world, titles, FIRST_WARM + FIRST_CALLS, once)
    options: dict[str, Any] = {"mode": "eager, host", "dtype": dtype}
    world.tell("any", "first call of a process, until done; kernels compile", slowest(world, cold), "us", **options)
    for (title, which), found in samples.items():
        op, _, rest = title.partition(", ")
        world.tell(op, f"{rest}, {which}", slowest(world, found), "us", **options)


def memory(world: World) -> None:
    """What is held once a problem is bound and has been called three times, of one program in a group of its own."""
    import torch
    import torch.distributed._symmetric_memory as symmetric_memory

    import weft

    taken = [0]
    usual = symmetric_memory.empty

    def counted(*given: Any, **options: Any) -> torch.Tensor:
        found = usual(*given, **options)
        taken[0] += found.nbytes
        return found

    symmetric_memory.empty = counted
    cases = (
        ("all_gather_matmul", "flag_gated:2", 8192, 8192, 8192),
        ("all_gather_matmul", "shard_p2p", 8192, 8192, 8192),
        ("matmul_reduce_scatter", "track_and_trigger:2", 8192, 8192, 8192),
        ("matmul_all_reduce", "two_shot", 8, 8192, 8192),
    )
    size, dtype = world.size, "bfloat16"

    def used() -> tuple[int, int, int]:
        """(torch's allocations, what torch's allocator holds, what the driver has given to all)."""
        gc.collect()
        torch.cuda.empty_cache()
        world.wait()
        free, total = torch.cuda.mem_get_info()
        found = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free
        world.wait()
        return found

    def run(op: str, spec: str, m: int, n: int, k: int) -> dict[str, int]:
        gather = op == "all_gather_matmul"
        a = torch.zeros(m // size if gather else m, k if gather else k // size, device=world.on, dtype=torch.bfloat16)
        b = torch.zeros(a.shape[1], n // size if gather else n, device=world.on, dtype=torch.bfloat16)
        before, taken[0] = used(), 0
        for _ in range(3):
            out = getattr(weft, op)(a, b, schedule=spec)
            world.idle()
        del out
        after = used()
        found = {
            "symmetric": taken[0],
            "torch, allocated": after[0] - before[0],
            "torch, reserved": after[1] - before[1],
            "driver, both ranks": after[2] - before[2],
        }
        weft.close()
        rest = used()
        return found | {
            "torch, allocated, after close": rest[0] - before[0],
            "driver, both ranks, after close": rest[2] - before[2],
        }

    for op, spec, m, n, k in cases:
        name = f"{spec} {m}x{n}x{k}"
        # Once before, so that what CUDA loads with a kernel is not counted.
        for counts in (False, True):
            found, reason = agreed(world, name, lambda: run(op, spec, m, n, k))  # noqa: B023 - called at once
            if reason:
                world.leave_out(name, reason)
                weft.close()
                break
            if counts:
                for what, nbytes in found.items():
                    most = max(world.everyone(nbytes))
                    world.tell(op, f"{name}, {what}", {"value": most}, "bytes", mode="eager", dtype=dtype)


def graph_times(world: World, methods: Sequence[Method], dtype: str, calls: int) -> None:
    """Time on the GPU of a call in a graph of `calls`."""
    import torch

    from benchmarks import measure

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
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        done[name][1]()
        end.record()
        end.synchronize()
        if round_ >= REPLAY_WARM:
            samples[name].append(begin.elapsed_time(end) * 1e3 / calls)

    rounds(world, list(done), REPLAYS + REPLAY_WARM, replay)
    for name, (method, _) in done.items():
        by_round = [max(ranks) for ranks in zip(*world.everyone(samples[name]), strict=True)]
        world.tell(method.op, method.case, percentiles(by_round), "us", mode="graph", dtype=dtype)


def replay_methods(world: World, m: int, n: int, k: int) -> list[Method]:
    """Tensor parallel operators of these global extents; an exchange and a decode step of the like."""
    import torch

    import weft

    size, dtype = world.size, "bfloat16"
    shard, right = world.tensor(m // size, k, dtype=dtype), world.tensor(k, n // size, dtype=dtype)
    left, below = world.tensor(m, n // size, dtype=dtype), world.tensor(n // size, k, dtype=dtype)
    some = world.tensor(8, n // size, dtype=dtype)
    made = [
        Method(op=op, case=f"M={a.shape[0] * (size if op == 'all_gather_matmul' else 1)} {a.shape[1]}x{b.shape[1]} {spec}",
               make=lambda op=op, a=a, b=b, spec=spec: lambda: getattr(weft, op)(a, b, schedule=spec))
        for op, a, b, specs in (
            ("all_gather_matmul", shard, right, ("flag_gated:2", "shard_p2p", "sequential_stores")),
            ("matmul_reduce_scatter", left, below, ("track_and_trigger:2", "direct_store:1", "shard_p2p")),
            ("matmul_all_reduce", some, below, ("one_shot", "two_shot")),
            ("matmul_all_to_all", shard, right, ("track_and_trigger:1", "direct_store:1")),
            ("all_to_all_matmul", shard, right, ("flag_gated:1",)),
        )
        for spec in specs
    ]  # fmt: skip
    return [*made, Method(op="torch", case=f"mm {m}x{k}x{n // size}", make=lambda: lambda: torch.mm(left, below))]


def replay(world: World) -> None:
    graph_times(world, replay_methods(world, 2048, 4096, 4096), "bfloat16", 1)


def replay1(world: World) -> None:
    """As one of 8 ranks of Llama 3 70B has it."""
    graph_times(world, replay_methods(world, 2048, 3584, 8192), "bfloat16", 5)


def gemm(world: World) -> None:
    from benchmarks import cases
    from benchmarks import gemm as bench
    from benchmarks.one_gpu import medians

    wanted = (
        ("all_gather_matmul", "llama3-70b M=8192"),
        ("all_gather_matmul", "llama3-70b M=2048"),
        ("all_gather_matmul", "llama3-70b M=512"),
        ("matmul_reduce_scatter", "llama3-70b M=8192"),
        ("matmul_reduce_scatter", "t-nlg M=8192"),
    )
    for case in cases.CASES:
        if (case.op, case.name) in wanted:
            alarm()
            works = {name: [work] * bench.CALLS for name, work in bench.methods(case, False).items()}
            for name, us in medians(works, rounds=bench.ROUNDS).items():
                control = {"control": True} if name == "cublas" else {}
                world.tell(
                    "gemm", f"{case.op} {case.name}, {name}", {"value": us}, "us", mode="graph", dtype="bfloat16", **control
                )


def products(world: World) -> None:
    import weft
    from benchmarks import products as bench

    for k, n in ((8192, 3584), (14336, 4096), (4096, 5120)):
        for m in (16, 128, 512, 2048, 8192):
            for linear in (False, True):
                alarm()
                matrices, found = bench.case(m, n, k, linear)
                algorithm = weft.matmul_choices()[-1].algorithm
                torch_us, us = bench.measure(matrices, found)
                case = f"{m}x{k}x{n}{' linear' if linear else ''}"
                options: dict[str, Any] = {"mode": "graph", "dtype": "bfloat16"}
                world.tell("matmul", f"{case}, weft", {"value": us}, "us", algorithm=algorithm, **options)
                world.tell("matmul", f"{case}, torch", {"value": torch_us}, "us", control=True, **options)


def lookup(world: World) -> None:
    import torch

    from benchmarks import embedding

    for number in (0, 1, 4):
        case = embedding.CASES[number]
        works = embedding.Site(case).works(())
        named = {"weft": works["computation/weft"], "torch": works["computation/torch as one"]}
        methods = [
            Method(op="torch" if name == "torch" else "lookup", case=f"bags {case.name}, {name}", make=lambda work=work: work)
            for name, work in named.items()
        ]
        graph_times(world, methods, "float32", embedding.REPEAT)
        del works, named, methods
        gc.collect()
        torch.cuda.empty_cache()


def ragged(world: World) -> None:
    """The pieces of a Mixtral layer in a world of one rank, which has all experts."""
    import torch

    from benchmarks import moe

    wanted = ("spread", "dispatch", "dispatch, gated", "swiglu", "combine", "gather", "torch up", "torch down")
    for tokens in (512, 8192):
        torch.manual_seed(0)
        layer = moe.Layer(tokens, 1.25)
        works = {name.partition("/")[2]: work for name, work in layer.works("pieces").items()}
        methods = [
            Method(
                op="torch" if name.startswith("torch") else "experts",
                case=f"mixtral-8x7b layer tokens={tokens}, {name}",
                make=lambda work=works[name]: work,
            )
            for name in wanted
        ]
        graph_times(world, methods, "bfloat16", 2)
        del layer, works, methods
        gc.collect()
        torch.cuda.empty_cache()


# What starts them.


@dataclass(frozen=True, kw_only=True)
class Part:
    """work: on each of `ranks` processes. limit_s: until they are ended."""

    work: Callable[[World], None]
    ranks: int = 1
    device: str = "cuda"
    limit_s: float = 90
    environment: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


_SHARED = "two ranks share one GPU"
PARTS = {
    "host": Part(work=host, ranks=2, limit_s=130, note=_SHARED),
    "first": Part(work=first, ranks=2, limit_s=110, environment={"TRITON_CACHE_DIR": "fresh"}, note=_SHARED),
    "memory": Part(work=memory, ranks=2, note=_SHARED),
    "replay": Part(work=replay, ranks=2, note=f"{_SHARED} in turns: slow, only to compare two trees"),
    "replay1": Part(work=replay1, note="world of one rank: no traffic"),
    "gemm": Part(work=gemm),
    "products": Part(work=products),
    "lookup": Part(work=lookup),
    "ragged": Part(work=ragged, note="world of one rank: rows do not travel"),
    "cpu_host": Part(work=host, ranks=2, device="cpu"),
    "cpu_first": Part(work=first, ranks=2, device="cpu"),
}


def rank(part: str, raw: Path) -> None:
    """This process is one rank of a part: figures go to `raw`, a JSON line each."""
    alarm()
    world = World(PARTS[part].device)
    PARTS[part].work(world)
    import torch.distributed as dist

    import weft

    world.wait()
    weft.close()
    if world.rank == 0:
        about = {"machine": machine(world), "versions": versions(world.on.type), "world_size": world.size}
        raw.write_text("".join(json.dumps(row if "left_out" in row else row | about) + "\n" for row in world.rows))
    world.wait()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def machine(world: World) -> str:
    import torch

    if world.on.type == "cpu":
        return f"{os.cpu_count()} cores, {platform.machine()}"
    gpus = min(world.size, torch.cuda.device_count())
    return f"{gpus} x {torch.cuda.get_device_name()}"


def versions(device: str) -> dict[str, str]:
    import torch

    import weft

    found = {"weft": weft.__version__, "torch": torch.__version__, "python": platform.python_version()}
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        pass
    if device == "cuda":
        found["cuda"], found["nccl"] = str(torch.version.cuda), ".".join(map(str, torch.cuda.nccl.version()))
        found["gpu"] = torch.cuda.get_device_name()
    return found


def ran(name: str, tree: Path, limit_s: float) -> tuple[list[Figure], str]:
    """One run of a part by a tree's own copy of this script: (its rows, how it failed, or an empty text)."""
    part = PARTS[name]
    with tempfile.TemporaryDirectory() as folder, socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", 0))
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port.getsockname()[1]),
            "WORLD_SIZE": str(part.ranks),
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_NVLS_ENABLE": "0",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
            "OMP_NUM_THREADS": "1",
            "WEFT_TIMEOUT_S": "30",
            "WEFT_CACHE_DIR": "",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        environment = os.environ | shared | dict(part.environment)
        if environment.get("TRITON_CACHE_DIR") == "fresh":
            environment["TRITON_CACHE_DIR"] = f"{folder}/triton"
        port.close()
        raw = Path(folder) / "rows"
        words = [sys.executable, "-m", "benchmarks.baseline", "--rank-of", name, "--json", str(raw)]
        processes = [
            subprocess.Popen(
                words, cwd=tree, env=environment | {"RANK": str(at), "LOCAL_RANK": str(at)}, start_new_session=True
            )
            for at in range(part.ranks)
        ]
        failed = ended(processes, limit_s)
        rows = [json.loads(line) for line in raw.read_text().splitlines()] if raw.exists() else []
        return rows, failed


def ended(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> str:
    """Waits for all; what is left at the limit is killed. How it failed, or an empty text."""
    deadline = time.monotonic() + limit_s
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.poll() not in (None, 0) for process in processes):
                deadline = min(deadline, time.monotonic() + 10)
            time.sleep(0.05)
        late = any(process.poll() is None for process in processes)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    codes = [process.returncode for process in processes]
    return f"status {codes}{f', ended after {limit_s:.0f} s at most' if late else ''}" if any(codes) else ""


def merged(part: str, commit: str, runs: Sequence[Sequence[Figure]], earlier: Mapping[tuple[str, ...], Row]) -> Iterator[Row]:
    """A row for each figure of all runs of a part. earlier: rows to which the runs are added, by `key`."""
    found: dict[tuple[str, str], list[Figure]] = {}
    for figures in runs:
        for figure in figures:
            if "left_out" not in figure:
                found.setdefault((figure["op"], figure["case"]), []).append(figure)
    for (op, case), figures in found.items():
        given = figures[-1]
        row = Row(
            bench="baseline",
            op=op,
            case=case,
            dtype=given["dtype"],
            world_size=given["world_size"],
            mode=given["mode"].partition(",")[0],
            machine=given["machine"],
            versions=given["versions"],
            commit=commit,
            samples=given.get("samples", 1),
            state=PARTS[part].note,
            extra={"part": part, "control": bool(given.get("control")) or op == "torch"},
        )
        before = earlier[key(row)].extra if key(row) in earlier else {}
        spread = {"runs": [*before.get("runs", []), *(round(figure["value"], 2) for figure in figures)]}
        for what in ("p10", "p90", "algorithm"):
            if what in given:
                values = [round(one[what], 2) if isinstance(one[what], float) else one[what] for one in figures]
                spread[what] = [*before.get(what, []), *values]
        middle = round(statistics.median(spread["runs"]), 2)
        kind = "bytes" if given["unit"] == "bytes" else "host_us" if given["mode"].endswith("host") else "us"
        if kind == "bytes":
            yield replace(row, extra={**row.extra, **spread, "bytes": middle})
        else:
            times: dict[str, Any] = {kind: {CALL: middle}}
            yield replace(row, extra={**row.extra, **spread}, **times)


CALL = "weft/call"


def name_of(row: Row) -> str:
    return f"{row.extra['part']}: {row.op}, {row.case}"


def key(row: Row) -> tuple[str, ...]:
    """What rows of one figure have in common."""
    return name_of(row), row.commit, row.machine


def value_of(row: Row) -> float:
    """In us, or in bytes."""
    times = {**row.us, **row.host_us}
    return times[CALL] if times else float(row.extra["bytes"])


def campaign(names: Sequence[str], trees: Mapping[str, Path], runs: int, budget_s: float, path: Path | None) -> list[str]:
    """All parts of all trees, `runs` times, as far as the budget goes; what failed. The file is written anew after each."""
    begun, failed = time.monotonic(), []
    earlier = {key(row): row for row in (read(path) if path and path.exists() else ())}
    lines: dict[tuple[str, ...], Row] = {}
    found: dict[tuple[str, str], list[list[Figure]]] = {(name, commit): [] for name in names for commit in trees}
    for run in range(runs):
        for name in names:
            for commit, tree in list(trees.items())[:: -1 if run % 2 else 1]:
                left_s = budget_s - (time.monotonic() - begun)
                if left_s < 20:
                    failed.append(f"{name} run {run}: not begun, {left_s:.0f} s are left")
                    continue
                started = time.monotonic()
                rows, how = ran(name, tree, min(PARTS[name].limit_s, left_s))
                found[name, commit].append(rows)
                failed += [f"{name} run {run} of {commit}: {how}"] if how else []
                failed += [
                    f"{name} run {run} of {commit}: {row['left_out']}: {row['reason']}" for row in rows if "left_out" in row
                ]
                told = f"{len(rows)} rows in {time.monotonic() - started:.0f} s {how}"
                print(f"[{time.monotonic() - begun:4.0f} s] {name} run {run} of {commit}: {told}", flush=True)
                lines = {key(line): line for (part, of), each in found.items() for line in merged(part, of, each, earlier)}
                if path:
                    path.write_text("".join(text_of(line) + "\n" for line in (earlier | lines).values()), encoding="utf-8")
    for line in lines.values():
        print(sentence(line))
    return failed


def sentence(row: Row) -> str:
    parts = [
        f"{what} " + " ".join(f"{value:.5g}" for value in row.extra[what])
        for what in ("runs", "p10", "p90")
        if what in row.extra
    ]
    unit = "us" if row.us or row.host_us else "bytes"
    return f"{name_of(row)} | {value_of(row):.6g} {unit} | {', '.join(parts)}"


def compared(path: Path, base: str, new: str) -> bool:
    """Prints each figure of two commits: both values, their ratio run by run (median), the ratio of the floors, and how far the
    runs of the base differ. Whether no figure is worse by more than the tolerance in both ratios."""
    by_name: dict[str, dict[str, Row]] = {}
    for row in read(path):
        by_name.setdefault(name_of(row), {})[row.commit] = row
    worse = 0
    for name, rows in by_name.items():
        if base not in rows or new not in rows:
            print(f"{name:100} only of {', '.join(rows)}")
            continue
        before, after = value_of(rows[base]), value_of(rows[new])
        runs, others = (rows[of].extra["runs"] for of in (base, new))
        pairs = zip(runs, others, strict=True) if len(runs) == len(others) else [(before, after)]
        ratio, low = statistics.median(_ratio(*pair) for pair in pairs), _ratio(floor(rows[base]), floor(rows[new]))
        control, is_worse = rows[base].extra["control"], min(ratio, low) > 1 + _TOLERANCE
        worse += is_worse and not control
        flag = "control" if control else "WORSE" if is_worse else ""
        print(
            f"{name:100} {before:12.6g} {after:12.6g} {ratio:6.3f} {low:6.3f}  runs {min(runs):.6g} to {max(runs):.6g} {flag}"
        )
    print(f"{worse} of {len(by_name)} are worse by more than {100 * _TOLERANCE:.0f}%")
    return not worse


def floor(row: Row) -> float:
    """What a figure is where nothing interferes: of its runs the least, and of samples the least 10th percentile."""
    return min(row.extra.get("p10", row.extra["runs"]))


def _ratio(before: float, after: float) -> float:
    return after / before if before else 1.0 if not after else float("inf")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--part", default="", help=f"of {', '.join(PARTS)}, with commas; default: those of GPUs")
    options.add_argument("--json", type=Path, help="runs are added to the rows that are there")
    options.add_argument("--tree", type=Path, action="append", help="a checkout; several take turns (this one)")
    options.add_argument("--commit", action="append", help="what each tree is, for the rows")
    options.add_argument("--runs", type=int, default=2, help="of each part (%(default)s)")
    options.add_argument("--budget-s", type=float, default=float("inf"), help="no part is begun later than that")
    options.add_argument(
        "--compare", nargs=3, metavar=("FILE", "BASE", "NEW"), help="two commits of a file; nothing is measured"
    )
    options.add_argument("--rank-of", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.rank_of:
        rank(given.rank_of, given.json)
        return
    if given.compare:
        sys.exit(0 if compared(Path(given.compare[0]), *given.compare[1:]) else 1)
    trees = [path.resolve() for path in given.tree or [ROOT]]
    commits = given.commit or ["" if at == 0 else str(at) for at in range(len(trees))]
    if len(commits) != len(trees) or len(set(commits)) != len(commits):
        options.error(f"--commit is {commits}; give each of {len(trees)} trees one of its own")
    names = given.part.split(",") if given.part else [name for name, part in PARTS.items() if part.device == "cuda"]
    if unknown := [name for name in names if name not in PARTS]:
        options.error(f"--part has {unknown[0]!r}; use {', '.join(PARTS)}")
    if failed := campaign(names, dict(zip(commits, trees, strict=True)), given.runs, given.budget_s, given.json):
        sys.exit("not right:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
