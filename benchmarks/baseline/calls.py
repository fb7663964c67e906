"""Parts of benchmarks.baseline that time the host: warm calls of every operator, and first calls."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import weft
from benchmarks.baseline.ranks import Method, Thunk, World, host_times, method, rounds, slowest

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
    return weft.schedule.build(problem, name, int(chunks) if chunks else None)


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
    for how, schedule in (("by name", "direct_store:1"), ("as a Schedule", weft.schedule.build(lookup, "direct_store", 1))):
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

    def concurrent(spec: str) -> object:
        return weft.concurrent(multiply, [weft.AllReduce(gradient)], method=spec)

    for spec in ("sequential", "nccl", "copy_engine") if world.on.type == "cuda" else ("sequential", "nccl"):
        yield method("concurrent", f"mm during all_reduce, {spec}", concurrent, spec)
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
