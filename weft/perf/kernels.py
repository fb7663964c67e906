"""Kernels, simulated: GEMMs whose tiles wait, count and store, and reductions whose parts wait.

GEMM. FreeSms stay on their SMs and take tiles in the order of the parts; a block whose tile's gate is closed waits with it.
All tiles of a kernel take the same time, so tile j starts when tile j - SMs has ended and its gate is open, exactly:

    SM 0  | part 0 | part 0 | part 1 | (gate closed) | part 2 |
    SM 1  | part 0 | part 1 | part 1 | (gate closed) | part 2 |

Hence one gated kernel pays one ragged last wave, where a kernel for each part pays one each. Stores to a peer leave while
later tiles are computed, and stretch the tiles that issue them by the machine's `stores.stall`. A tile that adds is multiplied
before it waits, and then reads what it adds, at the share of memory bandwidth that tiles which run together leave it. A tile
with inner gates takes its time slice by slice, each no sooner than its gate is open; its SM waits with it. Times of tiles
are a kernel's own, which copies slow (weft.perf.contention).
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import simpy

from weft.core.capabilities import H200
from weft.core.machine import Tile
from weft.core.schedule import FusedCollective, Gemm, Part, Reduce, Sum
from weft.core.work import is_plain, region_bytes
from weft.perf import staging
from weft.perf.contention import Time
from weft.perf.shapes import by_hardware, shape_of, streamed_tile
from weft.perf.terms import GemmCost, gemm_cost, hbm_us
from weft.perf.world import Filled, Process, World, ns

WAVES = 2
"""More tiles than so many for each SM are given out at once."""


@dataclass(frozen=True, slots=True)
class Ends:
    """When a tile ends, in ns: takes_ns after its SM is free, but not before not_before."""

    takes_ns: int
    not_before: int = 0

    def __call__(self, free: int) -> int:
        """free: when its SM is."""
        return max(free + self.takes_ns, self.not_before)


class FreeSms:
    """SMs by the time at which they are free, earliest first; those that are free together stay together."""

    def __init__(self, sms: int, now: int) -> None:
        assert sms > 0, "a kernel has an SM"
        self._free = [(now, sms)]
        self._sms = sms

    def take(self, tiles: int, ends: Ends) -> tuple[int, int]:
        """Give `tiles` out. ends: of each of them. Returns when the first and the last one end."""
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
        """Give out all but the last ones of tiles that wait for nothing but an SM: those that start before the latest time
        that leaves some. Returns how many."""

        def begun(free: int, before: int) -> int:
            """By an SM."""
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
    """Parts that share tiles: neighbours without conditions of their own, or a single part."""

    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        return sum(part.a.shape[0] for part in self.parts)


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


def gemm(world: World, rank: int, step: Gemm) -> Process:
    """Launch, then each group's tiles once its gates are open; ends when all tiles and stores have. Without rows or
    columns nothing is launched, but what is counted is told all the same."""
    if not any(part.out.size for part in step.parts):
        yield from _nothing(world, rank, step)
        return
    ended = world.env.event()
    groups = tuple(_groups(step, rank))
    cost = _paced(world, rank, _cost(world, rank, step, groups))
    if all(is_plain(part, rank) for part in step.parts):
        world.filled[rank] = Filled(ended, world.now + ns(world.machine.launch_us), ns(cost.tile_us))
    exchanging_us = world.machine.kernels.exchange_us if _streams(world, rank, step) else 0.0
    yield world.env.timeout(ns(world.machine.launch_us + exchanging_us))
    yield from staging.staged(world, step)
    with world.network.contention.kernel(rank, cost.shares) as time:
        slower = yield from _tiles(world, rank, groups, cost, time)
    ended.succeed()
    added = hbm_us(world.machine, sum(_added_bytes(world, part) for part in step.parts))
    world.kernels[rank] += ns(world.machine.launch_us + slower * (cost.busy_us + added))


def _nothing(world: World, rank: int, step: Gemm) -> Process:
    for part in step.parts:
        for gate in part.waits:
            yield from world.wait(gate)
        if part.count is not None:
            world.post(rank, part.count)


def _tiles(world: World, rank: int, groups: Sequence[_Group], cost: GemmCost, time: Time) -> Generator[simpy.Event, Any, float]:
    """All tiles and stores. Returns how many times as long they took as in the kernel's own time."""
    start, own = world.now, time.now
    blocks = FreeSms(cost.sms, own)
    stores: list[simpy.Event] = []
    end = ready = own
    whole = sum(cost.tiles) - cost.halves
    # All at once: a part whose tiles have SMs of their own does not wait for the inner gates of those before it.
    opening = [world.env.process(_opened(world, group.parts[0], time)) for group in groups]
    for group, tiles, opened in zip(groups, cost.tiles, opening, strict=True):
        now, *inner = yield opened
        ready = max(ready, now)
        uncut, whole = min(tiles, whole), max(0, whole - tiles)
        first, last = blocks.take(uncut, _ends(world, rank, group, tiles, cost, (ready, *inner)))
        if uncut < tiles:
            cut = _ends(world, rank, group, 2 * tiles, cost.slower(cost.half_tile), (ready, *inner))
            begun, last = blocks.take(2 * (tiles - uncut), cut)
            first = first or begun
        end = max(end, last)
        stores += _finish(world, rank, group, cost.sms, time, first, last)
    yield time.until(end)
    slower = (world.now - start) / (time.now - own) if time.now > own else 1.0
    if stores:
        yield world.env.all_of(stores)
    return slower


def _cost(world: World, rank: int, step: Gemm, groups: tuple[_Group, ...]) -> GemmCost:
    k, n = step.b.shape
    gpu, flags = world.machine.gpu, not all(is_plain(part, rank) for part in step.parts)
    shape = shape_of(step, replace(H200, sms=gpu.sms), world.machine) if flags and gpu.kernel_tiles else None
    tiles: tuple[Tile, ...] = ()
    if shape:
        efficiency = gpu.kernel_efficiency(shape.m, shape.n, stored=by_hardware(step))
        tiles = (Tile(rows=shape.m, cols=shape.n, efficiency=efficiency),)
    kernel = _streams(world, rank, step)
    if kernel:
        tiles = (_streamed(world, step, kernel),)
    asked: dict[str, Any] = {
        "rows": tuple(group.rows for group in groups),
        "n": n,
        "k": k,
        "sms": world.free_sms[rank],
        "accumulate": step.accumulate,
        "out_itemsize": 4 if world.schedule.buffer[step.parts[0].out.buffer].float32 else None,
        "flags": flags,
        "tiles": tiles,
        "shape": shape,
        "apart": _apart(world, step),
    }
    found = world.costs.get(key := tuple(asked.values()))
    if found is None:
        found = world.costs[key] = gemm_cost(world.machine, dtype=world.schedule.problem.dtype, **asked)
    return found


def _streams(world: World, rank: int, step: Gemm) -> FusedCollective | None:
    """The kernel that multiplies, where it is one of weft's that goes on to exchange and sum (weft.kernels.all_reduce)."""
    if not world.machine.gpu.kernel_tiles:
        return None
    for lane in world.schedule.ranks[rank]:
        for (low, _), kernel in world.spelled_out.of_lane(rank, lane.name).items():
            if lane.steps[low] is step:
                return kernel
    return None


def _streamed(world: World, step: Gemm, kernel: FusedCollective) -> Tile:
    """The tile of such a kernel."""
    problem, gpu = world.schedule.problem, world.machine.gpu
    size, whole = problem.world_size, kernel.hops == 1
    pieces = 1 if whole else 1 << (size - 1).bit_length()
    rows, cols = streamed_tile(
        problem, problem.n if whole else -(-problem.n // size), pieces, step.parts[0].a.shape[0], gpu.sms
    )
    kernels = world.machine.kernels
    full_us = 2 * rows * cols / (world.machine.tflops(problem.dtype) * 1e6 / gpu.sms * kernels.streamed)
    return Tile(rows=rows, cols=cols, efficiency=kernels.streamed * min(1.0, full_us / kernels.row_us))


def _apart(world: World, step: Gemm) -> float:
    """How many of the parts that wait start later than those before by more than what the last-level cache keeps of B, which
    streams through it meanwhile; in shares. What brings a part takes its turn, a copy's fixed cost at least."""
    copies, gpu = world.machine.copies, world.machine.gpu
    kept_us = world.machine.kernels.l2_share * gpu.l2_bytes / (gpu.hbm_gbps * 1e3)
    waiting = [part for part in step.parts if not part.adds and any(gate.at_least for gate in part.gates)]
    gaps_us = [copies.copy_us + region_bytes(world.schedule, part.a) / (copies.gbps * 1e3) for part in waiting]
    return sum(min(1.0, gap_us / kept_us) for gap_us in gaps_us)


def _paced(world: World, rank: int, cost: GemmCost) -> GemmCost:
    """At the rate that the rank's power allows after what it has multiplied so far."""
    before, paced_us = world.multiplied[rank], world.machine.gpu.paced_us
    world.multiplied[rank] += cost.busy_us
    if not cost.busy_us:
        return cost
    return cost.slower((paced_us(before + cost.busy_us) - paced_us(before)) / cost.busy_us)


def _opened(world: World, part: Part, time: Time) -> Generator[simpy.Event, Any, tuple[int, ...]]:
    """When a part's gates are open, and then each of its inner gates."""
    for gate in part.gates:
        yield from world.wait(gate)
    times = [time.now]
    for _, gate in part.inner:
        yield from world.wait(gate)
        times.append(time.now)
    return tuple(times)


def _ends(world: World, rank: int, group: _Group, tiles: int, cost: GemmCost, opened: tuple[int, ...]) -> Ends:
    """When a tile of the group ends. opened: when its gates, and each inner gate, are open."""
    part = group.parts[0]
    tile_ns, adding_ns = _tile_ns(world, rank, group, tiles, cost), _adding_ns(world, group, tiles, cost)
    if adding_ns is not None:
        return Ends(tile_ns + adding_ns, opened[0] + adding_ns)
    columns = (0, *(column for column, _ in part.inner))
    # Shares of the tile's time, cut by columns so that they add up to it: from each slice's begin to the tile's end.
    left = (tile_ns - tile_ns * column // max(1, part.a.shape[1]) for column in columns)
    return Ends(tile_ns, max(opens + left_ns for opens, left_ns in zip(opened, left, strict=True)))


def _tile_ns(world: World, rank: int, group: _Group, tiles: int, cost: GemmCost) -> int:
    """A tile's time, stretched where it stores to a peer while all SMs that have a tile do."""
    part = group.parts[0]
    if part.out.rank == rank:
        return max(1, ns(cost.tile_us))
    stores = world.machine.stores
    sms = min(cost.sms, sum(cost.tiles))
    gbps = stores.rate(sms) * (stores.tiles or 1.0)
    store_us = region_bytes(world.schedule, part.out) / tiles * sms / (gbps * 1e3)
    return max(1, ns(cost.tile_us + stores.stall * store_us))


def _adding_ns(world: World, group: _Group, tiles: int, cost: GemmCost) -> int | None:
    """What a tile takes to read what it adds, while all of its group that run do; None if it adds nothing."""
    (part, *_) = group.parts
    if not part.adds:
        return None
    return ns(hbm_us(world.machine, _added_bytes(world, part) / max(1, tiles) * min(tiles, cost.sms)))


def _added_bytes(world: World, part: Part) -> int:
    return sum(region_bytes(world.schedule, add) for add in part.adds)


def _finish(world: World, rank: int, group: _Group, sms: int, time: Time, first: int, last: int) -> list[simpy.Event]:
    """Have the group's data moved and its count raised. first, last: when its tiles end. Returns what the kernel waits for."""
    part = group.parts[0]
    moves = [(part.out, rank, part.out.rank)] * (part.out.rank != rank) + [(part.a, part.a.rank, rank)] * (part.a.rank != rank)
    if not moves:
        if part.count is not None:
            world.post(rank, part.count, after=time.until(last))
        return []

    def follow() -> Process:
        yield time.until(first)
        share = world.machine.stores.tiles or 1.0
        sizes = [region_bytes(world.schedule, region) for region, _, _ in moves]
        paths = [(size, world.sm_path(rank, sms, src, dst, share)) for size, (_, src, dst) in zip(sizes, moves, strict=True)]
        yield world.env.all_of([world.env.process(world.move(rank, size, path)) for size, path in paths])
        yield time.until(last)
        if part.count is not None:
            world.post(rank, part.count)

    return [world.env.process(follow())]


def reduce(world: World, rank: int, step: Reduce, sms: int | None = None) -> Process:
    """Launch, then the parts in order, each once its gates are open: as long as its slowest source takes.

    sms: how many it may use, all that are free if not given; each reads and writes at most `kernels.sm_gbps`.
    """
    launch = ns(world.machine.launch_us)
    yield world.env.timeout(launch)
    world.kernels[rank] += launch
    for part in step.parts:
        for gate in part.gates:
            yield from world.wait(gate)
        start = world.now
        yield from _sum(world, rank, part, sms)
        world.kernels[rank] += world.now - start
        if part.count is not None:
            world.post(rank, part.count)


def _sum(world: World, rank: int, part: Sum, sms: int | None) -> Process:
    local = region_bytes(world.schedule, part.out)
    local += sum(region_bytes(world.schedule, src) for src in part.srcs if src.rank == rank)
    limits = () if sms is None else (world.network.limit(("sums", rank, sms), sms * world.machine.kernels.sm_gbps),)
    events: list[simpy.Event] = [world.env.process(world.local(rank, local, *limits))]
    sms = world.free_sms[rank] if sms is None else sms
    for src in part.srcs:
        if src.rank != rank:
            path = world.sm_path(rank, sms, src.rank, rank)
            events.append(world.env.process(world.move(rank, region_bytes(world.schedule, src), path)))
    yield world.env.all_of(events) if len(events) > 1 else events[0]
