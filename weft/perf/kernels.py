"""The simulation of kernels: GEMMs whose tiles wait, count and store, and reductions whose parts wait.

GEMM. Blocks stay on their SMs and take tiles in the order of the parts. A block whose tile has a closed gate waits with it.
All tiles of a kernel take the same time, so tile j starts exactly when tile j - SMs has ended and its gate is open:

    SM 0  | part 0 | part 0 | part 1 | (gate closed) | part 2 |
    SM 1  | part 0 | part 1 | part 1 | (gate closed) | part 2 |

So one gated kernel has one ragged last wave, while one kernel for each part has one each. Stores to a peer leave while later
tiles are computed, and stretch the tiles that issue them by the machine's `stores.stall`. A tile that adds is multiplied before
it waits. It then reads its addends at its share of the memory bandwidth. A tile with inner gates computes slice by slice, each
after its gate is open, and its SM waits with it. Copies slow the tiles of a kernel (weft.perf.contention).
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from weft.core.schedule import FusedCollective, Gemm, Norm, Part, Reduce, Sum, regions
from weft.core.work import is_plain, region_bytes
from weft.perf import transfers
from weft.perf.contention import Time
from weft.perf.shapes import by_hardware, shape_of, shapes_for
from weft.perf.terms import GemmCost, adding_us, gemm_cost, hbm_us, kernel_cost, stalled_us, streamed_cost
from weft.perf.world import FullKernel, Process, StepProcess, Waits, World, ns

WAVES = 2
"""If there are more tiles than this number for each SM, they are assigned at once."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Ends gives the end of a tile in ns: takes_ns after its SM is free, and not before not_before."""

    takes_ns: int
    not_before: int = 0

    def __call__(self, free: int) -> int:
        """Return the end of a tile whose SM is free at `free`."""
        return max(free + self.takes_ns, self.not_before)


class FreeSms:
    """FreeSms is a heap of SMs, ordered by the time at which they are free. SMs that are free at the same time are one
    entry."""

    def __init__(self, sms: int, now: int) -> None:
        assert sms > 0, "a kernel has an SM"
        self._free = [(now, sms)]
        self._sms = sms

    def join(self, sms: int, now: int) -> None:
        """Add SMs that are free from now on."""
        heapq.heappush(self._free, (now, sms))
        self._sms += sms

    @property
    def all_free(self) -> int:
        """The time at which the last SM is free."""
        return max(free for free, _ in self._free)

    def take(self, tiles: int, ends: Ends) -> tuple[int, int]:
        """Assign `tiles` to SMs, and return the ends of the first and the last one. ends: gives the end of each tile."""
        first = last = 0
        while tiles:
            free, count = self._pop()
            if tiles > WAVES * self._sms and free + ends.takes_ns >= ends.not_before:
                heapq.heappush(self._free, (free, count))
                tiles -= self._at_once(tiles, ends.takes_ns)
                first = first or ends(free)
                continue
            used = min(tiles, count)
            if used < count:
                heapq.heappush(self._free, (free, count - used))
            last = ends(free)
            first = first or last
            heapq.heappush(self._free, (last, used))
            tiles -= used
        return first, last

    def _at_once(self, tiles: int, takes_ns: int) -> int:
        """Assign all but the last tiles at once if they only wait for an SM, and return their number."""

        def begun(free: int, before: int) -> int:
            """Return the number of tiles that an SM begins."""
            return max(0, -((free - before) // takes_ns))

        low, high = self._free[0][0], self._free[0][0] + tiles * takes_ns
        while high - low > 1:
            middle = (low + high) // 2
            if sum(count * begun(free, middle) for free, count in self._free) < tiles:
                low = middle
            else:
                high = middle
        given = sum(count * begun(free, low) for free, count in self._free)
        self._free = [(free + begun(free, low) * takes_ns, count) for free, count in self._free]
        heapq.heapify(self._free)
        return given

    def _pop(self) -> tuple[int, int]:
        free, count = heapq.heappop(self._free)
        while self._free and self._free[0][0] == free:
            count += heapq.heappop(self._free)[1]
        return free, count


@dataclass(frozen=True, slots=True)
class _Group:
    """_Group has parts that share tiles: neighbours without gates or counts, or a single part."""

    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        return sum(part.out.shape[0] for part in self.parts)


def _groups(step: Gemm, rank: int) -> Iterator[_Group]:
    plain: list[Part] = []
    for part in step.parts:
        if is_plain(part, rank):
            plain.append(part)
            continue
        if plain:
            yield _Group(tuple(plain))
            plain = []
        yield _Group((part,))
    if plain:
        yield _Group(tuple(plain))


def gemm(world: World, rank: int, step: Gemm) -> StepProcess:
    """Launch a GEMM, and run each group's tiles once its gates are open, until all tiles and stores have ended.

    Return the times in which no tile worked because gates were closed.

    A GEMM without rows or columns launches nothing, but raises its flags."""
    if not any(part.out.size for part in step.parts):
        yield from _nothing(world, rank, step)
        return ()
    ended = world.env.event()
    groups = tuple(_groups(step, rank))
    cost = paced(world, rank, _cost(world, rank, step, groups))
    if all(is_plain(part, rank) for part in step.parts):
        world.full_kernels[rank] = FullKernel(ended, world.now + ns(world.machine.launch_us), ns(cost.tile_us))
    exchanging_us = world.machine.kernels.exchange_us if _streams(world, rank, step) else 0.0
    yield world.env.timeout(ns(world.machine.launch_us + exchanging_us))
    yield from transfers.stage_rows(world, step)
    with world.network.contention.kernel(rank, cost.shares) as time:
        slower, waits = yield from _tiles(world, rank, groups, cost, time)
    ended.succeed()
    added = hbm_us(world.machine, sum(_added_bytes(world, part) for part in step.parts))
    world.kernel_ns[rank] += ns(world.machine.launch_us + slower * (cost.busy_us + added))
    return waits


def _nothing(world: World, rank: int, step: Gemm) -> Process:
    for part in step.parts:
        for gate in part.waits:
            yield from world.wait(gate)
        if part.count is not None:
            world.post(rank, part.count)


def _tiles(
    world: World, rank: int, groups: Sequence[_Group], cost: GemmCost, time: Time
) -> Generator[simpy.Event, Any, tuple[float, Waits]]:
    """Run all tiles and stores. Return the factor by which contention slowed them, and the times in which all waited."""
    start, own = world.now, time.now
    blocks = FreeSms(cost.sms, own)
    stores: list[simpy.Event] = []
    sent: dict[tuple[int, int], simpy.Event] = {}
    end = ready = own
    waits: list[tuple[int, int]] = []

    def in_world(at: int) -> int:
        """Convert a time of the kernel that is over, at its average speed until now."""
        return world.now - round((time.now - at) * (world.now - start) / max(1, time.now - own))

    whole = sum(cost.tiles) - cost.halves
    # All gates are awaited concurrently: a part whose tiles have their own SMs need not wait for earlier parts' inner gates.
    opening = [world.env.process(_opened(world, group.parts[0], time)) for group in groups]
    for group, tiles, opened in zip(groups, cost.tiles, opening, strict=True):
        now, *inner = yield opened
        ready = max(ready, now)
        idle = blocks.all_free + _tile_ns(world, rank, group, tiles, cost) * bool(group.parts[0].adds)
        if ready > idle:
            waits.append((in_world(idle), in_world(ready)))
        uncut, whole = min(tiles, whole), max(0, whole - tiles)
        first, last = blocks.take(uncut, _ends(world, rank, group, tiles, cost, (ready, *inner)))
        if uncut < tiles:
            cut = _ends(world, rank, group, 2 * tiles, cost.slower(cost.half_tile), (ready, *inner))
            begun, last = blocks.take(2 * (tiles - uncut), cut)
            first = first or begun
        end = max(end, last)
        stores += _finish(world, rank, group, cost.sms, time, first, last, sent)
    yield time.until(end)
    slower = (world.now - start) / (time.now - own) if time.now > own else 1.0
    if stores:
        yield world.env.all_of(stores)
    return slower, tuple(waits)


def _cost(world: World, rank: int, step: Gemm, groups: tuple[_Group, ...]) -> GemmCost:
    problem, machine, (k, n) = world.schedule.problem, world.machine, step.b.shape
    rows, sms = tuple(group.rows for group in groups), world.free_sms[rank]
    plain, kernel = all(is_plain(part, rank) for part in step.parts), _streams(world, rank, step)
    out_itemsize = 4 if world.schedule.buffer[step.parts[0].out.buffer].float32 else problem.itemsize
    late = tuple(region_bytes(world.schedule, part.a) for part in step.parts if _arrives(part))
    shape, stored, dtype = None, by_hardware(step), problem.rate_name
    if machine.gpu.capabilities and not plain and shapes_for(machine.gpu.capabilities, problem.scaling):
        shape = shape_of(step, machine.gpu.capabilities, machine, problem.scaling)
    key = rows, n, k, sms, step.accumulate, out_itemsize, plain, kernel and kernel.hops, shape, stored, late
    if key not in world.costs:
        if kernel:
            world.costs[key] = streamed_cost(machine, problem, kernel.hops)
        elif plain:
            world.costs[key] = gemm_cost(
                machine,
                rows=rows,
                n=n,
                k=k,
                dtype=dtype,
                sms=sms,
                accumulate=step.accumulate,
                out_itemsize=out_itemsize,
            )
        else:
            world.costs[key] = kernel_cost(
                machine,
                rows=rows,
                n=n,
                k=k,
                dtype=machine.kernel_rate(problem.scaling, problem.dtype),
                shape=shape,
                out_itemsize=problem.itemsize,
                sms=sms,
                stored=stored,
                late_bytes=late,
            )
    return world.costs[key]


def _arrives(part: Part) -> bool:
    """Return whether a part waits for the arrival of its rows."""
    return not part.adds and any(not gate.on_previous_call for gate in part.gates)


def _streams(world: World, rank: int, step: Gemm) -> FusedCollective | None:
    """Return the fused kernel that multiplies, exchanges and sums (weft.kernels.all_reduce), if this step is part of one."""
    if not world.machine.gpu.capabilities:
        return None
    for lane in world.schedule.ranks[rank]:
        for (low, _), kernel in world.spelled_out.of_lane(rank, lane.name).items():
            if lane.steps[low] is step:
                return kernel
    return None


def paced(world: World, rank: int, cost: GemmCost) -> GemmCost:
    """Return the cost at the rate that the power limit allows after the rank's earlier matmuls."""
    before_us = world.matmul_us[rank]
    world.matmul_us[rank] += cost.speed * cost.busy_us
    return cost.slower(world.machine.gpu.power_slowdown(before_us, cost.busy_us, cost.speed))


def _opened(world: World, part: Part, time: Time) -> Generator[simpy.Event, Any, tuple[int, ...]]:
    """Wait for a part's gates, then for each of its inner gates, and return the times."""
    for gate in part.gates:
        yield from world.wait(gate)
    times = [time.now]
    for _, gate in part.inner:
        yield from world.wait(gate)
        times.append(time.now)
    return tuple(times)


def _ends(world: World, rank: int, group: _Group, tiles: int, cost: GemmCost, opened: tuple[int, ...]) -> Ends:
    """Return the end of a tile of the group. opened: the times at which its gates, and each inner gate, are open."""
    part = group.parts[0]
    tile_ns, adding_ns = _tile_ns(world, rank, group, tiles, cost), _adding_ns(world, group, tiles, cost)
    if adding_ns is not None:
        return Ends(tile_ns + adding_ns, opened[0] + adding_ns)
    columns = (0, *(column for column, _ in part.inner))
    # Shares of the tile's time, cut by columns so that they add up to it: from the start of each slice to the tile's end.
    left = (tile_ns - tile_ns * column // max(1, part.a.shape[1]) for column in columns)
    return Ends(tile_ns, max(opens + left_ns for opens, left_ns in zip(opened, left, strict=True)))


def _tile_ns(world: World, rank: int, group: _Group, tiles: int, cost: GemmCost) -> int:
    """Return a tile's time, which is longer if it stores to a peer while all other tiles do."""
    part = group.parts[0]
    if part.out.rank == rank:
        return max(1, ns(cost.tile_us))
    stalled = stalled_us(world.machine, region_bytes(world.schedule, part.out), tiles, min(cost.sms, sum(cost.tiles)))
    return max(1, ns(cost.tile_us + stalled))


def _adding_ns(world: World, group: _Group, tiles: int, cost: GemmCost) -> int | None:
    """Return the time of a tile to read its addends while the other tiles of its group do; None if it adds nothing."""
    (part, *_) = group.parts
    if not part.adds:
        return None
    return ns(adding_us(world.machine, _added_bytes(world, part), tiles, cost.sms))


def _added_bytes(world: World, part: Part) -> int:
    return sum(region_bytes(world.schedule, add) for add in part.adds)


def _finish(
    world: World,
    rank: int,
    group: _Group,
    sms: int,
    time: Time,
    first: int,
    last: int,
    sent: dict[tuple[int, int], simpy.Event],
) -> list[simpy.Event]:
    """Move a group's data and raise its flag, and return the events that the kernel waits for.

    first, last: the ends of its first and last tile. sent: the event at which the last group before it has been moved, by
    source and destination. Stores leave in the order in which they are issued."""
    part = group.parts[0]
    moves = [(part.out, rank, part.out.rank)] * (part.out.rank != rank) + [(part.a, part.a.rank, rank)] * (part.a.rank != rank)
    if not moves:
        if part.count is not None:
            world.post(rank, part.count, after=time.until(last))
        return []

    before = [sent[move[1:]] for move in moves if move[1:] in sent]

    def follow() -> Process:
        yield time.until(first)
        if before:
            yield world.env.all_of(before)
        share = world.machine.stores.tiles or 1.0
        sizes = [region_bytes(world.schedule, region) for region, _, _ in moves]
        paths = [(size, world.sm_path(rank, sms, src, dst, share)) for size, (_, src, dst) in zip(sizes, moves, strict=True)]
        yield world.env.all_of([world.env.process(world.move(rank, size, path)) for size, path in paths])
        moved.succeed()
        yield time.until(last)
        if part.count is not None:
            world.post(rank, part.count)

    moved = world.env.event()
    sent.update(dict.fromkeys((move[1:] for move in moves), moved))
    return [world.env.process(follow())]


def reduce(world: World, rank: int, step: Reduce, sms: int | None = None) -> StepProcess:
    """Launch a reduction, and run its parts in order, each once its gates are open. Its slowest source sets a part's time.

    sms: the number of SMs; the default is all free ones. Each SM reads and writes at most `kernels.sm_gbps`. Return the times
    in which a part waited.
    """
    launch = ns(world.machine.launch_us)
    yield world.env.timeout(launch)
    world.kernel_ns[rank] += launch
    waits = []
    for part in step.parts:
        closed = world.now
        for gate in part.gates:
            yield from world.wait(gate)
        start = world.now
        if start > closed:
            waits.append((closed, start))
        yield from _sum(world, rank, part, sms)
        world.kernel_ns[rank] += world.now - start
        if part.count is not None:
            world.post(rank, part.count)
    return tuple(waits)


def norm(world: World, rank: int, step: Norm) -> Process:
    """Launch a norm, which reads rows twice and writes them once. The second read comes from the cache."""
    launch = ns(world.machine.launch_us)
    yield world.env.timeout(launch)
    start = world.now
    yield from world.access_memory(rank, sum(region_bytes(world.schedule, region) for region in regions(step)))
    world.kernel_ns[rank] += launch + world.now - start


def _sum(world: World, rank: int, part: Sum, sms: int | None) -> Process:
    local = region_bytes(world.schedule, part.out)
    local += sum(region_bytes(world.schedule, src) for src in part.srcs if src.rank == rank)
    limits = () if sms is None else (world.network.limit(("sums", rank, sms), sms * world.machine.kernels.sm_gbps),)
    events: list[simpy.Event] = [world.env.process(world.access_memory(rank, local, *limits))]
    sms = world.free_sms[rank] if sms is None else sms
    for src in part.srcs:
        if src.rank != rank:
            path = world.sm_path(rank, sms, src.rank, rank)
            events.append(world.env.process(world.move(rank, region_bytes(world.schedule, src), path)))
    yield world.env.all_of(events) if len(events) > 1 else events[0]
