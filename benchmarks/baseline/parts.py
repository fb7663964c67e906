"""What each part of benchmarks.baseline times. runs.py starts each rank by `python -m benchmarks.baseline.parts PART FILE`.

Names of rows stay what they are, so that rows of earlier commits can be compared. Kernels are imported where they are timed:
a first call of a process is to load them itself.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

import weft
from benchmarks import cases, measure
from benchmarks.baseline.ranks import Method, Thunk, World, agreed, graph_times, host_times, rounds, slowest
from benchmarks.baseline.runs import PARTS
from benchmarks.rows import append, name_of

ALARM_S = 75
FIRST_CALLS, FIRST_WARM = 9, 3


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


def sizes_of(world: World) -> Sizes:
    return CPU_SIZES if world.on.type == "cpu" else GPU_SIZES


def method(op: str, case: str, function: Callable[..., object], *given: Any, **options: Any) -> Method:
    """A call with the same tensors each time."""

    def call() -> object:
        return function(*given, **options)

    return Method(op=op, case=case, make=lambda: call)


def moving(world: World, op: str, case: str, a: torch.Tensor, b: torch.Tensor, spec: str, dtype: str) -> Method:
    """`a` lies 512 bytes further each time; of 4096 calls none has the address of another."""
    step, function = 512 // a.element_size(), getattr(weft, op)
    room, turn = world.tensor(a.numel() + 4096 * step, dtype=dtype, zero=True), [0]

    def make() -> Thunk:
        turn[0] = (turn[0] + 1) % 4096
        begin = turn[0] * step
        there = room[begin : begin + a.numel()].view(a.shape)
        return lambda: function(there, b, schedule=spec)

    return Method(op=op, case=case, make=make)


def built(op: str, spec: str, m: int, n: int, k: int, world_size: int, dtype: str) -> Any:
    """The Schedule that a spec names."""
    name, _, chunks = spec.partition(":")
    problem = weft.Problem(op=op, m=m, n=n, k=k, world_size=world_size, dtype=dtype)  # type: ignore[arg-type]
    return weft.build(problem, name, int(chunks) if chunks else None)


def host(world: World) -> None:
    """Every operator: by name, by a Schedule, with new tensors."""
    sizes = sizes_of(world)
    size, dtype, half = world.size, sizes.dtype, sizes.m // world.size
    shard, right = world.tensor(half, sizes.k, dtype=dtype), world.tensor(sizes.k, sizes.n // size, dtype=dtype)
    left, below = world.tensor(sizes.m, sizes.k // size, dtype=dtype), world.tensor(sizes.k // size, sizes.n, dtype=dtype)
    some = world.tensor(sizes.few, sizes.k // size, dtype=dtype)
    own, whole = world.tensor(half, sizes.k, dtype=dtype), world.tensor(sizes.k, sizes.n, dtype=dtype)
    made: list[Method] = []
    for op, a, b, spec, m, new in (
        ("all_gather_matmul", shard, right, "flag_gated:2", sizes.m, True),
        ("all_gather_matmul", shard, right, "shard_p2p", sizes.m, True),
        ("matmul_reduce_scatter", left, below, "track_and_trigger:2", sizes.m, True),
        ("matmul_reduce_scatter", left, below, "shard_p2p", sizes.m, True),
        ("matmul_all_reduce", some, below, "two_shot", sizes.few, True),
        ("matmul_all_reduce", left, below, "hetero_unfused_1d:2", sizes.m, False),
        ("matmul_all_to_all", own, whole, "track_and_trigger:1", half, True),
        ("all_to_all_matmul", own, whole, "flag_gated:1", half, False),
    ):
        function, title, schedule = getattr(weft, op), f"M={m} {spec}", built(op, spec, m, sizes.n, sizes.k, size, dtype)
        made.append(method(op, f"{title}, by name", function, a, b, schedule=spec))
        made.append(method(op, f"{title}, as a Schedule", function, a, b, schedule=schedule))
        made += [moving(world, op, f"{title}, by name, new tensors", a, b, spec, dtype)] if new else []
    made += [*_lookups(world, sizes), *_experts(world, sizes, own), *_concurrent(world, sizes, own, whole)]
    host_times(world, made, dtype)


def _lookups(world: World, sizes: Sizes) -> Iterator[Method]:
    tables = [world.tensor(1000, 64, dtype="float32") for _ in range(4)]
    bags = len(tables) * sizes.batch
    indices = torch.randint(0, 1000, (4 * bags,), device=world.on)
    offsets = torch.arange(0, 4 * bags + 1, 4, device=world.on)
    lookup = weft.LookupProblem.of(batch=sizes.batch, dims=((64,) * len(tables),) * world.size, pooling=4)
    op, given = "embedding_bag_all_to_all", (weft.embedding_bag_all_to_all, indices, offsets, tables)
    for how, schedule in (("by name", "direct_store:1"), ("as a Schedule", weft.build(lookup, "direct_store", 1))):
        yield method(op, f"batch={sizes.batch} direct_store:1, {how}", *given, schedule=schedule, pooling=4)


def _experts(world: World, sizes: Sizes, own: torch.Tensor) -> Iterator[Method]:
    experts, rows = world.tensor(sizes.experts, sizes.k, sizes.n, dtype=sizes.dtype), own.shape[0]
    each = rows // (world.size * sizes.experts)
    splits = torch.full((world.size, sizes.experts), each, dtype=torch.int32, device=world.on)
    case = f"M={rows} experts={sizes.experts}, splits"
    for op, given in (("all_to_all_matmul", splits), ("matmul_all_to_all", splits.t().contiguous())):
        yield method(op, case, getattr(weft, op), own, experts, splits=given, max_rows=2 * rows)


def _concurrent(world: World, sizes: Sizes, own: torch.Tensor, whole: torch.Tensor) -> Iterator[Method]:
    gradient = world.tensor(sizes.m * 64, dtype=sizes.dtype, zero=True)
    product = torch.empty(own.shape[0], sizes.n, device=world.on).to(own)

    def multiply() -> torch.Tensor:
        return torch.mm(own, whole, out=product)

    def concurrent(way: str) -> object:
        return weft.concurrent(multiply, [weft.AllReduce(gradient)], way=way)

    for way in ("sequential", "vendor", "copy_engine") if world.on.type == "cuda" else ("sequential", "vendor"):
        yield method("concurrent", f"mm beside all_reduce, {way}", concurrent, way)
    size = f"{gradient.nbytes >> 10} KiB"
    yield method("collectives.all_reduce", f"{size} copy_engine", weft.collectives.all_reduce, gradient)
    yield method("torch", "mm", multiply)
    yield method("torch", "all_reduce", dist.all_reduce, gradient)


def first(world: World) -> None:
    """First calls, each with a row count of its own. The first FIRST_WARM compile kernels, and are not counted."""
    sizes = sizes_of(world)
    size, dtype, step = world.size, sizes.dtype, sizes.m // 16
    right = world.tensor(sizes.k, sizes.n // size, dtype=dtype)
    below = world.tensor(sizes.k // size, sizes.n, dtype=dtype)
    kinds = {
        f"{op}, {spec}, {'as a Schedule' if value else 'by name'}": (op, spec, value)
        for op, fused in (("all_gather_matmul", "flag_gated:2"), ("matmul_reduce_scatter", "track_and_trigger:2"))
        for spec, value in ((fused, False), (fused, True), ("shard_p2p", False))
    }
    samples: dict[tuple[str, str], list[float]] = {}
    cold: list[float] = []

    def once(title: str, round_: int) -> None:
        op, spec, by_value = kinds[title]
        # Of each kind other row counts, so that a Schedule and its name do not find each other's program.
        m = sizes.m + step * (round_ * 2 + by_value)
        rows, b = (m // size, right) if op == "all_gather_matmul" else (m, below)
        a = world.tensor(rows, b.shape[0], dtype=dtype)
        schedule = built(op, spec, m, sizes.n, sizes.k, size, dtype) if by_value else spec
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

    rounds(world, list(kinds), FIRST_WARM + FIRST_CALLS, once)
    case = "first call of a process, until done; kernels compile"
    world.keep("any", case, "host_us", slowest(world, cold), dtype=dtype)
    for (title, which), found in samples.items():
        op, _, rest = title.partition(", ")
        world.keep(op, f"{rest}, {which}", "host_us", slowest(world, found), dtype=dtype)


def memory(world: World) -> None:
    """What is held once a problem is bound and has been called three times, of one program in a group of its own."""
    for op, spec, m, n, k in (
        ("all_gather_matmul", "flag_gated:2", 8192, 8192, 8192),
        ("all_gather_matmul", "shard_p2p", 8192, 8192, 8192),
        ("matmul_reduce_scatter", "track_and_trigger:2", 8192, 8192, 8192),
        ("matmul_all_reduce", "two_shot", 8, 8192, 8192),
    ):
        name = f"{spec} {m}x{n}x{k}"
        # Once before, so that what CUDA loads with a kernel is not counted.
        for counts in (False, True):
            found, reason = agreed(world, lambda: _held(world, op, spec, m, n, k))  # noqa: B023 - called at once
            if reason:
                world.leave_out(op, name, reason)
                weft.close()
                break
            for what, nbytes in found.items() if counts else ():
                most = max(world.everyone(nbytes))
                world.keep(op, f"{name}, {what}", "bytes", {"value": most}, dtype="bfloat16")


def _held(world: World, op: str, spec: str, m: int, n: int, k: int) -> dict[str, int]:
    """Bytes that a program takes: of symmetric memory, of torch's allocator, and of the GPU."""
    gather, size = op == "all_gather_matmul", world.size
    a = torch.zeros(m // size if gather else m, k if gather else k // size, device=world.on, dtype=torch.bfloat16)
    b = torch.zeros(a.shape[1], n // size if gather else n, device=world.on, dtype=torch.bfloat16)
    symmetric, usual = list[int](), symmetric_memory.empty

    def counted(*given: Any, **options: Any) -> torch.Tensor:
        found = usual(*given, **options)
        symmetric.append(found.nbytes)
        return found

    before = _used(world)
    with mock.patch.object(symmetric_memory, "empty", counted):
        for _ in range(3):
            out = getattr(weft, op)(a, b, schedule=spec)
            world.idle()
    del out
    allocated, reserved, driver = (now - then for now, then in zip(_used(world), before, strict=True))
    weft.close()
    rest, _, driver_rest = (now - then for now, then in zip(_used(world), before, strict=True))
    return {
        "symmetric": sum(symmetric),
        "torch, allocated": allocated,
        "torch, reserved": reserved,
        "driver, both ranks": driver,
        "torch, allocated, after close": rest,
        "driver, both ranks, after close": driver_rest,
    }


def _used(world: World) -> tuple[int, int, int]:
    """(torch's allocations, what torch's allocator holds, what the driver has given to all)."""
    gc.collect()
    torch.cuda.empty_cache()
    world.wait()
    free, total = torch.cuda.mem_get_info()
    found = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free
    world.wait()
    return found


def replay_methods(world: World, m: int, n: int, k: int) -> list[Method]:
    """Tensor parallel operators of these global extents; an exchange and a decode step of the like."""
    size, dtype = world.size, "bfloat16"
    shard, right = world.tensor(m // size, k, dtype=dtype), world.tensor(k, n // size, dtype=dtype)
    left, below = world.tensor(m, n // size, dtype=dtype), world.tensor(n // size, k, dtype=dtype)
    some = world.tensor(8, n // size, dtype=dtype)
    made = []
    for op, a, b, specs in (
        ("all_gather_matmul", shard, right, ("flag_gated:2", "shard_p2p", "sequential_stores")),
        ("matmul_reduce_scatter", left, below, ("track_and_trigger:2", "direct_store:1", "shard_p2p")),
        ("matmul_all_reduce", some, below, ("one_shot", "two_shot")),
        ("matmul_all_to_all", shard, right, ("track_and_trigger:1", "direct_store:1")),
        ("all_to_all_matmul", shard, right, ("flag_gated:1",)),
    ):
        sizes = f"M={a.shape[0] * (size if op == 'all_gather_matmul' else 1)} {a.shape[1]}x{b.shape[1]}"
        made += [method(op, f"{sizes} {spec}", getattr(weft, op), a, b, schedule=spec) for spec in specs]
    return [*made, method("torch", f"mm {m}x{k}x{n // size}", torch.mm, left, below)]


def replay(world: World) -> None:
    graph_times(world, replay_methods(world, 2048, 4096, 4096), "bfloat16", 1)


def replay1(world: World) -> None:
    """As one of 8 ranks of Llama 3 70B has it."""
    graph_times(world, replay_methods(world, 2048, 3584, 8192), "bfloat16", 5)


def gemm(world: World) -> None:
    from benchmarks.kernels import gemm as bench
    from benchmarks.kernels.operands import ROUNDS
    from benchmarks.kernels.single_gpu import medians

    wanted = {
        *(("all_gather_matmul", f"llama3-70b M={m}") for m in (8192, 2048, 512)),
        ("matmul_reduce_scatter", "llama3-70b M=8192"),
        ("matmul_reduce_scatter", "t-nlg M=8192"),
    }
    for case in cases.CASES:
        if (case.op, case.name) in wanted:
            measure.alarm()
            for method_name, us in medians(bench.calls(case, False), rounds=ROUNDS).items():
                name = name_of(method_name)
                about: dict[str, Any] = {"dtype": "bfloat16", "mode": "graph", "control": name == "cublas"}
                world.keep("gemm", f"{case.op} {case.name}, {name}", "us", {"value": us}, **about)


def products(world: World) -> None:
    from benchmarks.kernels import products as bench

    for k, n in ((8192, 3584), (14336, 4096), (4096, 5120)):
        for m, linear in itertools.product((16, 128, 512, 2048, 8192), (False, True)):
            measure.alarm()
            us = bench.measure(m, n, k, linear)
            algorithm, case = [weft.matmul_choices()[-1].algorithm], bench.name_of(m, n, k, linear)
            about: dict[str, Any] = {"dtype": "bfloat16", "mode": "graph"}
            world.keep("matmul", f"{case}, weft", "us", {"value": us[bench.WEFT]}, algorithm=algorithm, **about)
            world.keep("matmul", f"{case}, torch", "us", {"value": us[bench.TORCH]}, control=True, **about)


def lookup(world: World) -> None:
    from benchmarks import embedding

    for number in (0, 1, 4):
        case = embedding.CASES[number]
        works = embedding.Site(case).works(())
        methods = [
            method("lookup", f"bags {case.name}, weft", works["computation/weft"]),
            method("torch", f"bags {case.name}, torch", works["computation/torch as one"]),
        ]
        graph_times(world, methods, "float32", embedding.REPEAT)
        del works, methods
        gc.collect()
        torch.cuda.empty_cache()


def ragged(world: World) -> None:
    """The pieces of a Mixtral layer in a world of one rank, which has all experts."""
    from benchmarks import moe

    wanted = ("spread", "dispatch", "dispatch, gated", "swiglu", "combine", "gather", "torch up", "torch down")
    for tokens in (512, 8192):
        torch.manual_seed(0)
        layer = moe.Layer(tokens, 1.25)
        works = {name.partition("/")[2]: work for name, work in layer.works("pieces").items()}
        ops = {name: "torch" if name.startswith("torch") else "experts" for name in wanted}
        methods = [method(ops[name], f"mixtral-8x7b layer tokens={tokens}, {name}", works[name]) for name in wanted]
        graph_times(world, methods, "bfloat16", 2)
        del layer, works, methods
        gc.collect()
        torch.cuda.empty_cache()


def main(name: str, raw: Path) -> None:
    """This process is one rank of a part: its rows go to `raw`."""
    measure.ALARM_S = ALARM_S
    measure.alarm()
    part = PARTS[name]
    world = World(name, part.device, part.note)
    globals()[part.work](world)
    world.wait()
    weft.close()
    for row in world.rows if world.rank == 0 else ():
        append(raw, row)
    world.wait()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
