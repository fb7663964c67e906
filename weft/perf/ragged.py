"""The simulation of steps whose row counts are known on devices only. It assumes an even routing.

The number of rows that a real call moves is unknown before it runs, so a prediction has to assume one. Here every rank sends
min(capacity, m) rows, spread evenly over its segments, and no row is dropped. A skewed routing takes longer, in proportion to
the extra rows of the busiest rank.

    blocks that copy       | push | push | push | (join the others) ....      stores.sms of the SMs
    blocks that multiply   | expert 0 | (gate closed) | expert 1 | ...        all others

One kernel multiplies the rows of all experts. The segments of an expert share its tiles, and a tile begins once the gates of
all its rows are open. Each expert's b is read from memory once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from weft.core.problem import RaggedProblem
from weft.core.schedule import GroupedGemm, Segment, SegmentCopies, SegmentCopy, SegmentProduct, ShareCounts
from weft.perf.kernels import Ends, FreeSms
from weft.perf.terms import GemmCost, gemm_cost, hbm_us
from weft.perf.world import Process, World, ns

COUNT_BYTES = 8
"""The size of a row count."""


@lru_cache(maxsize=16)
def even_rows(problem: RaggedProblem) -> dict[tuple[int, int, int], int]:
    """Return the rows that each segment moves. They are equal, except for one more in the first segments."""
    each, more = divmod(min(problem.capacity, problem.m), problem.world_size * problem.experts)
    names = [problem.sent_order(rank) for rank in range(problem.world_size)]
    counts = {name: each + (place < more) for order in names for place, name in enumerate(order)}
    return {name: moved for name, (_, _, moved) in problem.places(counts).items()}


def step_of_counts(world: World, rank: int, step: ShareCounts | SegmentCopies | GroupedGemm) -> Process:
    """Launch and run one step of a RaggedProblem."""
    start = world.now
    yield world.env.timeout(ns(world.machine.launch_us))
    yield from STEPS[type(step)](world, rank, step)
    world.kernel_ns[rank] += world.now - start


def _problem(world: World) -> RaggedProblem:
    problem = world.schedule.problem
    assert isinstance(problem, RaggedProblem), problem
    return problem


def _share(world: World, rank: int, step: ShareCounts) -> Process:
    """Write the counts to all ranks concurrently from one block, then wait for those of the others."""
    problem = _problem(world)
    size = COUNT_BYTES * problem.world_size * problem.experts
    peers = [flag.rank for flag in step.flags if flag.rank != rank]
    moves = [world.env.process(world.move(rank, size, world.sm_path(rank, 1, rank, peer))) for peer in peers]
    yield world.env.all_of(moves)
    yield world.env.timeout(ns(world.machine.within_a_kernel.flag_us))
    for flag in step.flags:
        world.post(rank, flag)
    for gate in step.gates:
        yield from world.wait(gate)


def _copy(world: World, rank: int, parts: Sequence[SegmentCopy], sms: int) -> Process:
    """Copy segments one after the other, each at the rate at which `sms` SMs store or load."""
    flag_us = world.machine.within_a_kernel.flag_us
    for part in parts:
        for gate in part.gates:
            yield from world.wait(gate)
        size = _bytes(world, part.src)
        if part.src.rank == part.dst.rank:
            yield from world.access_memory(rank, 2 * size)
        elif size:
            yield from world.move(rank, size, world.sm_path(rank, sms, part.src.rank, part.dst.rank))
        if part.count is not None:
            yield world.env.timeout(ns(flag_us))
            world.post(rank, part.count)


def _bytes(world: World, segment: Segment) -> int:
    problem = _problem(world)
    buffer = world.schedule.buffer[segment.buffer]
    cols = buffer.cols[segment.rank]
    return even_rows(problem)[segment.name] * (problem.row_bytes(cols) if buffer.operand else cols * problem.itemsize)


def _multiply(world: World, rank: int, step: GroupedGemm) -> Process:
    """Multiply expert by expert, concurrently with the blocks that copy, until both have ended."""
    copies = [part for part in step.parts if isinstance(part, SegmentCopy)]
    experts = tuple(_by_expert(step))
    copying = min(world.machine.stores.sms, world.free_sms[rank] - 1) if copies else 0
    moving = world.env.process(_copy(world, rank, copies, copying)) if copying else None
    cost = _cost(world, rank, experts, world.free_sms[rank] - copying)
    with world.network.contention.kernel(rank, cost.shares) as time:
        blocks, end = FreeSms(cost.sms, time.now), time.now
        for products, tiles in zip(experts, cost.tiles, strict=True):
            for product, share in zip(products, _shares(world, products, tiles), strict=True):
                for gate in product.gates:
                    yield from world.wait(gate)
                last = blocks.take(share, Ends(max(1, ns(cost.tile_us)), time.now))[1] if share else time.now
                end = max(end, last)
                if product.count is not None:
                    world.post(rank, product.count, after=time.until(last))
        yield time.until(end)
    if moving is not None:
        yield moving


def _by_expert(step: GroupedGemm) -> Iterator[list[SegmentProduct]]:
    """Yield the products of each expert, in the order of the experts."""
    products = [part for part in step.parts if isinstance(part, SegmentProduct)]
    for expert in dict.fromkeys(part.a.expert for part in products):
        yield [part for part in products if part.a.expert == expert]


def _cost(world: World, rank: int, experts: Sequence[Sequence[SegmentProduct]], sms: int) -> GemmCost:
    """Return the cost of all experts as one kernel. gemm_cost counts b of one expert; the others' are added here."""
    problem = _problem(world)
    rows = tuple(sum(even_rows(problem)[product.a.name] for product in products) for products in experts)
    n = 2 * problem.n if problem.gated else problem.n
    cost = gemm_cost(
        world.machine,
        rows=rows,
        n=n,
        k=problem.k,
        dtype=problem.rate_name,
        sms=sms,
        out_itemsize=problem.itemsize,
        flags=True,
    )
    waves = max(1, -(-sum(cost.tiles) // cost.sms))
    others = max(0, sum(map(bool, rows)) - 1) * problem.k * n * problem.operand_itemsize
    return replace(cost, memory_us=cost.memory_us + hbm_us(world.machine, others) / waves)


def _shares(world: World, products: Sequence[SegmentProduct], tiles: int) -> Iterator[int]:
    """Yield the number of an expert's tiles that each arriving segment enables. A tile of two segments needs the later one."""
    rows = [even_rows(_problem(world))[product.a.name] for product in products]
    given, here = 0, 0
    for each in rows:
        here += each
        share = tiles * here // max(1, sum(rows)) - given
        given += share
        yield share


STEPS: dict[type, Callable[[World, int, Any], Process]] = {
    ShareCounts: _share,
    SegmentCopies: lambda world, rank, step: _copy(world, rank, step.parts, world.free_sms[rank]),
    GroupedGemm: _multiply,
}
"""The function of each type of step."""
