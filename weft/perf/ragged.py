"""The simulation of steps whose row counts are known on devices only. It assumes an even routing.

The number of rows that a real call moves is unknown before it runs, so a prediction has to assume one. Here every rank sends
min(capacity, m) rows, spread evenly over its segments, and no row is dropped. A skewed routing takes longer, in proportion to
the extra rows of the busiest rank.

    dispatch   blocks that push       | push | push | push | (join the others) ....      stores.sms of the SMs
               blocks that multiply   | expert 0 | (gate closed) | expert 1 | ...        all others
    combine    blocks that pull       | (not made yet) | pull | pull |                   pull_sms of the SMs
               blocks that multiply   | expert 0 | expert 1 | ...    | (join the others)

One kernel multiplies the rows of all experts. The segments of an expert share its tiles, and a tile begins once the gates of
all its rows are open. A dispatch multiplies its own rows from where they lie. Each expert's b is read from memory once.

`program_us` predicts what a user has without weft: NCCL, and a grouped matmul of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import simpy

from weft.core.machine import Machine
from weft.core.problem import RaggedProblem
from weft.core.schedule import GroupedGemm, Segment, SegmentCopies, SegmentCopy, SegmentProduct, ShareCounts
from weft.perf.contention import Time
from weft.perf.kernels import Ends, FreeSms, paced
from weft.perf.shapes import pull_sms, shapes_for, tallest
from weft.perf.terms import GemmCost, collective_us, gemm_cost, hbm_us, whole_collective_us
from weft.perf.world import Process, World, ns

COUNT_BYTES = 8
"""The size of a row count."""
PIECE_BYTES = 1 << 19
"""What a block copies before it looks for the next piece: 64 rows of 8 KiB."""


@lru_cache(maxsize=16)
def even_rows(problem: RaggedProblem) -> dict[tuple[int, int, int], int]:
    """Return the rows that each segment moves. They are equal, except for one more in the first segments."""
    each, more = divmod(min(problem.capacity, problem.m), problem.world_size * problem.experts)
    names = [problem.sent_order(rank) for rank in range(problem.world_size)]
    counts = {name: each + (place < more) for order in names for place, name in enumerate(order)}
    return {name: moved for name, (_, _, moved) in problem.places(counts).items()}


def program_us(machine: Machine, problem: RaggedProblem, *, known: bool) -> float:
    """Return the time of the program that a call with splits replaces, whose host has to know the numbers of rows.

        dispatch   counts, host waits   all_to_all of rows   rows by expert   grouped matmul
        combine                                              grouped matmul   rows by rank     all_to_all of rows

    known: the host knows the counts before, and does not wait. A combine's are always known: they are those of the dispatch.

    The counts are an NCCL all-to-all as small as any. The host reads them by a copy (copies.copy_us), and then enqueues the
    exchange of rows, while the GPU is idle (host_wait_us). Enqueuing the rest is taken to be hidden by that exchange. Rows that
    have to be put in order are read and written once, by one kernel. The order itself is taken as known; sorting is left out.
    """
    size, counts = problem.world_size, even_rows(problem)
    ranks, experts = range(size), range(problem.experts)
    multiplied = [
        [sum(counts[(other, rank, one) if problem.dispatches else (rank, other, one)] for other in ranks) for one in experts]
        for rank in ranks
    ]
    busy_us = max(_cost(machine, problem, rows, machine.gpu.sms, flags=False).busy_us for rows in multiplied)
    us = machine.launch_us + machine.gpu.paced_us(busy_us) + whole_collective_us(machine, problem)
    rows = max(map(sum, multiplied))
    if problem.gated:
        us += machine.launch_us + hbm_us(machine, 3 * rows * problem.n * problem.itemsize)
    if size > 1 and problem.experts > 1:
        row_bytes = problem.row_bytes(problem.k) if problem.dispatches else problem.n * problem.itemsize
        us += machine.launch_us + hbm_us(machine, 2 * rows * row_bytes)
    if size > 1 and problem.dispatches and not known:
        us += collective_us(machine, "all_to_all", COUNT_BYTES * problem.experts, size)
        us += machine.copies.copy_us + (machine.host_wait_us or 0.0)
    return us


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


def _copy(world: World, rank: int, parts: Sequence[SegmentCopy], sms: Callable[[], int]) -> Process:
    """Copy segments one after the other, each at the rate at which that many SMs store or load. sms: their number now. Each
    copies a piece of a segment, then all copy the next pieces."""
    flag_us = world.machine.within_a_kernel.flag_us
    for part in parts:
        for gate in part.gates:
            yield from world.wait(gate)
        size = _bytes(world, part.src)
        if part.src.rank == part.dst.rank and (part.src.buffer != "a" or _problem(world).return_received):
            yield from world.access_memory(rank, 2 * size)
        while size and part.src.rank != part.dst.rank:
            piece = min(size, PIECE_BYTES * sms())
            yield from world.move(rank, piece, world.sm_path(rank, sms(), part.src.rank, part.dst.rank))
            size -= piece
        if part.count is not None:
            yield world.env.timeout(ns(flag_us))
            world.post(rank, part.count)


def _bytes(world: World, segment: Segment) -> int:
    problem = _problem(world)
    buffer = world.schedule.buffer[segment.buffer]
    cols = buffer.cols[segment.rank]
    return even_rows(problem)[segment.name] * (problem.row_bytes(cols) if buffer.operand else cols * problem.itemsize)


def _multiply(world: World, rank: int, step: GroupedGemm) -> Process:
    """Multiply expert by expert, concurrently with the blocks that copy, until both have ended. Blocks that have pushed help to
    multiply, and blocks that have multiplied help to pull."""
    problem, sms = _problem(world), world.free_sms[rank]
    copies = [part for part in step.parts if isinstance(part, SegmentCopy)]
    experts = tuple(_by_expert(step))
    copying = min(_movers(world.machine, problem), sms - 1) if copies else 0
    multiplied = world.env.event()
    moving = world.env.process(_copy(world, rank, copies, lambda: sms if multiplied.triggered else copying))
    rows = [sum(even_rows(problem)[product.a.name] for product in products) for products in experts]
    cost = paced(world, rank, _cost(world.machine, problem, rows, sms - copying, flags=True))
    tile_ns = max(1, ns(cost.tile_us))
    with world.network.contention.kernel(rank, cost.shares) as time:
        blocks, end = FreeSms(cost.sms, time.now), time.now
        opening = [[world.env.process(_opened(world, rank, product, time)) for product in products] for products in experts]
        if copying and problem.dispatches:  # no peer waits for its tiles, so they may be assigned once all have helpers
            yield moving
            blocks.join(copying, time.now)
        for products, tiles, opened in zip(experts, cost.tiles, opening, strict=True):
            for product, share, ready in zip(products, _shares(world, products, tiles), opened, strict=True):
                begin = yield ready
                last = blocks.take(share, Ends(tile_ns, begin + tile_ns))[1] if share else begin
                end = max(end, last)
                if product.count is not None:
                    world.post(rank, product.count, after=time.until(last))
        yield time.until(end)
    multiplied.succeed()
    yield moving


def _movers(machine: Machine, problem: RaggedProblem) -> int:
    """Return the number of blocks that copy, as the kernel has them (weft.kernels.exchange)."""
    gpu = machine.gpu.capabilities
    if problem.dispatches or not (gpu and shapes_for(gpu, problem.scaling)):
        return machine.stores.sms
    shape = tallest(problem.m // problem.experts, gpu, problem.scaling)
    return pull_sms(machine, shape, k=problem.k, world_size=problem.world_size, rate_name=problem.rate_name)


def _opened(world: World, rank: int, product: SegmentProduct, time: Time) -> Generator[simpy.Event, Any, int]:
    """Wait until the rows of a product are here, and return the time. A rank's own rows are, if `a` has them."""
    own = product.a.src == rank and _problem(world).dispatches
    for gate in () if own else product.gates:
        yield from world.wait(gate)
    return time.now


def _by_expert(step: GroupedGemm) -> Iterator[list[SegmentProduct]]:
    """Yield the products of each expert, in the order of the experts."""
    products = [part for part in step.parts if isinstance(part, SegmentProduct)]
    for expert in dict.fromkeys(part.a.expert for part in products):
        yield [part for part in products if part.a.expert == expert]


def _cost(machine: Machine, problem: RaggedProblem, rows: Sequence[int], sms: int, *, flags: bool) -> GemmCost:
    """Return the cost of all experts as one kernel. gemm_cost counts b of one expert; the others' are added here.

    rows: of each expert. flags: it is weft's kernel, not a library's. Its blocks store zeros between tiles, below the rows that
    arrive, and multiply nothing meanwhile."""
    n = 2 * problem.n if problem.gated else problem.n
    cost = gemm_cost(
        machine,
        rows=rows,
        n=n,
        k=problem.k,
        dtype=problem.rate_name,
        sms=sms,
        out_itemsize=problem.itemsize,
        flags=flags,
    )
    waves = max(1, -(-sum(cost.tiles) // cost.sms))
    others = max(0, sum(map(bool, rows)) - 1) * problem.k * n * problem.operand_itemsize
    zeros_us = hbm_us(machine, max(0, problem.m - sum(rows)) * problem.n * problem.itemsize) / waves if flags else 0.0
    return replace(cost, math_us=cost.math_us + zeros_us, memory_us=cost.memory_us + hbm_us(machine, others) / waves + zeros_us)


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
    SegmentCopies: lambda world, rank, step: _copy(world, rank, step.parts, lambda: world.free_sms[rank]),
    GroupedGemm: _multiply,
}
"""The function of each type of step."""
