"""A rank's lanes in closed form: when its matmuls and its copies end, one behind the other. The ranking is made of these.

Everything is of the rank with most work, whose peers do the same at the same time. Times are in us from the call's begin, rates
in GB/s; what a step takes is weft.perf.terms. A peer is named by how far ahead it is, from 1 on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from weft.core.capabilities import H200
from weft.core.machine import Machine
from weft.core.problem import REDUCTIONS, Problem, split
from weft.perf.shapes import Arriving, best_shape
from weft.perf.terms import COPY_BESIDE_GEMM, GEMM_BESIDE_COPY, GemmCost, gemm_cost, hbm_us, kernel_cost, slowed


class Beside(NamedTuple):
    """Copies that are under way from `since` to `until`, and what they move through a rank's memory."""

    until: float = 0.0
    gbps: float = 0.0
    since: float = 0.0


NOTHING = Beside()


class Rank:
    """The rank with most work of a problem on a machine: its sizes, its links, and what its kernels take."""

    def __init__(self, problem: Problem, machine: Machine) -> None:
        self.problem, self.machine = problem, machine
        self.ranks = max(problem.nodes or (problem.world_size,))
        """How many ranks the largest node has."""
        most, reduces = max(problem.b_sizes, default=0), problem.op in REDUCTIONS
        self.inner = max(problem.inner(0), most if reduces else 0)
        self.columns = max(problem.columns(0), 0 if reduces else most)
        self.rows = problem.product_rows(0)
        shards = [high - low for low, high in problem.shards]
        self.own, self.shard_bytes = max(shards), problem.shard_bytes
        self.peers = range(1, min(self.ranks, max(2, sum(map(bool, shards)))))
        """The peers that have rows."""
        self.launch_us, self.flag_us = machine.launch_us, machine.flag_us
        self.fork_us, self.wake_us = machine.fork_us or 0.0, machine.wake_us or 0.0
        self._vendor: dict[tuple[int, int, int, int], GemmCost] = {}
        self._kernels: dict[tuple[tuple[Arriving, ...], int | None, bool], GemmCost] = {}

    # What kernels take

    def vendor(self, rows: int, *, inner: int = 0, columns: int = 0, sums: int = 0) -> GemmCost:
        """A vendor's matmul, of `inner` of K and `columns` of N where that is not all. sums: 1 where it makes float32 sums, 2
        where it adds to them."""
        key = rows, inner or self.inner, columns or self.columns, sums
        if key not in self._vendor:
            dtype, out = self.problem.rate_name, 4 if sums else self.problem.itemsize
            self._vendor[key] = gemm_cost(
                self.machine, rows=(rows,), n=key[2], k=key[1], dtype=dtype, accumulate=sums == 2, out_itemsize=out
            )
        return self._vendor[key]

    @cached_property
    def whole_us(self) -> float:
        """The whole matmul's time."""
        return self.vendor(self.rows).busy_us

    def kernel(self, parts: Sequence[Arriving], sms: int | None = None, *, counts: bool = False) -> GemmCost:
        """weft's own kernel, with the tile shape that it takes. counts: its tiles are counted, or added to."""
        key, gpu = (tuple(parts), sms, counts), self.machine.gpu
        if key not in self._kernels:
            stored = not counts and not any(part.away for part in parts)
            shape = None
            if gpu.kernel_tiles:
                gpu_like, scaling = dataclasses.replace(H200, sms=gpu.sms), self.problem.scaling
                shape = best_shape(key[0], gpu_like, self.machine, stored=stored, scaling=scaling)
            self._kernels[key] = kernel_cost(
                self.machine,
                rows=tuple(part.rows for part in parts),
                n=self.columns,
                k=self.inner,
                dtype=self.machine.kernel_rate(self.problem.scaling, self.problem.dtype),
                shape=shape,
                out_itemsize=self.problem.itemsize,
                sms=sms,
                stored=stored,
                late_bytes=tuple(part.rows * self.problem.row_bytes(self.inner) for part in parts if part.gated),
            )
        return self._kernels[key]

    def pace(self, before_us: float, busy_us: float) -> float:
        """How many times as long matmuls take that come behind others, at the rate that power allows."""
        paced_us = self.machine.gpu.paced_us
        return (paced_us(before_us + busy_us) - paced_us(before_us)) / busy_us if busy_us else 1.0

    def slowed(self, cost: GemmCost, gbps: float) -> float:
        """How many times as long a kernel takes while copies move so much out of and into the rank's memory."""
        known = self.machine.contention.keys() & {GEMM_BESIDE_COPY, COPY_BESIDE_GEMM}
        return slowed(self.machine, cost.shares, gbps) if gbps and known else 1.0

    # Its links

    def hops(self, ahead: int) -> int:
        return max(1, min(ahead, self.ranks - ahead)) if self.machine.links.topology == "ring" else 1

    def latency_us(self, ahead: int = 1) -> float:
        return self.hops(ahead) * self.machine.links.latency_us

    def link_gbps(self, ahead: int, at_once: int = 1) -> float:
        """To a peer, while every rank sends to so many."""
        links = self.machine.links
        if links.topology == "mesh":
            return links.gbps
        if links.topology == "ring":
            return links.gbps / (self.hops(ahead) if at_once == 1 else sum(map(self.hops, self.peers)) / 2)
        shared = links.host_gbps / self.ranks if links.topology == "pcie" and links.host_gbps else math.inf
        return min(links.gbps, shared) / at_once

    def stores_us(self, size: float, *, at_once: bool = False) -> float:
        """So many bytes for each peer, stored or loaded on all SMs: for one peer after the other, or for all at once."""
        each = [
            size / (min(self.machine.stores.rate(self.machine.gpu.sms), self.link_gbps(ahead)) * 1e3) for ahead in self.peers
        ]
        if not at_once or self.machine.links.topology != "mesh":
            return sum(each)
        return max(max(each, default=0.0), len(each) * size / (self.machine.stores.rate(self.machine.gpu.sms) * 1e3))


class ComputeLane:
    """Where the compute lane of a rank is."""

    def __init__(self, rank: Rank, now: float = 0.0) -> None:
        self.rank, self.now = rank, now
        self.began = self.tile_us = 0.0
        """When the last matmul began, and how long one of its tiles takes."""
        self._multiplied_us = 0.0

    def wait(self, *flags: float) -> None:
        """For flags one after the other: the first costs an operation, in which the others are looked at, too."""
        if flags:
            self.now = max(max(self.now, flags[0]) + self.rank.flag_us, *flags)

    def launch(self, us: float) -> None:
        """A kernel that takes so long."""
        self.now += self.rank.launch_us + us

    def multiply(self, cost: GemmCost, beside: Beside = NOTHING, staged_us: float = 0.0) -> None:
        """A vendor's matmul, beside copies."""
        if not cost.busy_us:
            return
        pace = self.rank.pace(self._multiplied_us, cost.busy_us)
        self._multiplied_us += cost.busy_us
        self.began, self.tile_us = self.now + self.rank.launch_us + staged_us, cost.tile_us * pace
        self.now = stretched(self.began, cost.busy_us * pace, beside, self.rank.slowed(cost, beside.gbps))


class CopyLanes:
    """Where the copy lanes of a rank are: one, or one for each peer. rounds: how often they go to each peer. one: a single
    lane, whatever the machine likes. work_us: how long kernels multiply meanwhile, which slow them."""

    def __init__(self, rank: Rank, rounds: int, *, one: bool = False, work_us: float = math.inf) -> None:
        self.rank, self._slower = rank, 1.0
        one = one or not rank.machine.fans_out
        self._rounds = rounds if one and rank.ranks > 2 else 1
        self._now = [rank.fork_us] * (1 if one else rank.ranks)
        slower = max(1.0, rank.machine.contention.get(COPY_BESIDE_GEMM, 1.0))
        alone_us = rank.machine.copies.copy_us * rounds + rank.shard_bytes / (self.gbps(1) * 1e3)
        self._slower = 1 + (slower - 1) * min(1.0, work_us / (alone_us * max(1, rank.ranks - len(self._now))))
        self._filled: list[tuple[float, float, float]] = []

    @property
    def last(self) -> float:
        return max(self._now)

    @property
    def end(self) -> float:
        """When the compute lane has them back."""
        return self.last + self.rank.fork_us

    def gbps(self, ahead: int) -> float:
        """Of a copy, while all lanes copy."""
        copies = self.rank.machine.copies
        at_once = 1 if len(self._now) == 1 else min(self.rank.ranks - 1, copies.engines)
        together = max(copies.gbps, copies.several_gbps) if at_once == 1 else copies.several_gbps
        rate = min(together / self._slower, copies.gbps * at_once) / at_once
        if copies.turning and self._rounds > 1:
            rate = min(rate, copies.turned_gbps(self._rounds))
        return min(rate, self.rank.link_gbps(ahead, at_once))

    def beside(self, size: float, until: float | None = None, since: float = 0.0) -> Beside:
        """What kernels feel while copies of this size follow each other, until all that are known have ended."""
        us = self.rank.machine.copies.copy_us + size / (self.gbps(1) * 1e3) + self.rank.flag_us
        moved = 2e-3 * max(1, len(self._now) - 1) * size / us
        return Beside(self.last if until is None else until, moved, since)

    def wait(self, ahead: int, until: float) -> None:
        """For a flag; a lane that had to wait takes a while to go on."""
        at, rank = ahead % len(self._now), self.rank
        late = until + rank.wake_us if until > self._now[at] else 0.0
        self._now[at] = max(self._now[at], late) + rank.flag_us

    def flags(self, count: int = 1, ahead: int | None = None) -> None:
        """Operations on flags that make no lane wait: signals, or waits for flags that are raised already. Without `ahead`,
        there are `count` in all, which a single lane does one after the other; with it, all are on the lane to that peer."""
        if ahead is None:
            times = count if len(self._now) == 1 else 1
            self._now = [now + times * self.rank.flag_us for now in self._now]
        else:
            self._now[ahead % len(self._now)] += count * self.rank.flag_us

    def copy(self, ahead: int, size: float, *, told: bool = True) -> float:
        """To a peer, or from it. told: with its signal. Returns when that is seen at the other end."""
        at = ahead % len(self._now)
        rank = self.rank
        self._now[at] = self._room(self._now[at]) + rank.machine.copies.copy_us + size / (self.gbps(ahead) * 1e3)
        self._now[at] += rank.flag_us * told
        return self._now[at] + rank.latency_us(ahead)

    def copy_here(self, size: float, *, after: float = 0.0, told: bool = False) -> float:
        """Within the rank."""
        machine = self.rank.machine
        fixed_us = machine.launch_us if machine.copies.strided == "kernel" else machine.copies.copy_us
        self._now[0] = max(self._now[0], after) + fixed_us + hbm_us(machine, 2 * size) + machine.flag_us * told
        return self._now[0]

    def share_sms(self, lane: ComputeLane) -> None:
        """Tells the copies, where kernels make them, that the last matmul of `lane` fills all SMs: a copy that would begin
        while it runs waits until its tiles at that moment end."""
        self._filled.append((lane.began, lane.tile_us, lane.now))

    def _room(self, now: float) -> float:
        for began, tile_us, ended in self._filled:
            if began <= now < ended and tile_us:
                now = min(ended, began + (math.floor((now - began) / tile_us) + 1) * tile_us)
        return now


def stretched(begin: float, work: float, beside: Beside, slower: float) -> float:
    """When work ends that takes `slower` times as long beside copies."""
    before = min(work, max(0.0, beside.since - begin))
    begin, work = begin + before, work - before
    slow = max(0.0, beside.until - begin) / slower
    return begin + work * slower if work <= slow else max(begin, beside.until) + work - slow


def waves(cost: GemmCost, last: int) -> float:
    """How many tiles in a row an SM computes for the last `last` tiles of a kernel. A half tile counts as less than one, and
    runs beside the last whole tiles if SMs are free then."""
    whole, halves = max(0, last - cost.halves), min(last, cost.halves)
    count = -(-whole // cost.sms)
    return count + (cost.half_tile if 2 * halves > count * cost.sms - whole else 0.0)


def waves_before(cost: GemmCost, first: int) -> float:
    """How many tiles in a row an SM computes until the first `first` tiles of a kernel are done."""
    whole = sum(cost.tiles) - cost.halves
    return -(-min(first, whole) // cost.sms) + (cost.half_tile if first > whole else 0.0)


def waves_behind(cost: GemmCost, last: int) -> float:
    """How many more tiles in a row an SM computes after the first of the last `last` tiles, where those first ones hold all SMs
    while they wait for their data."""
    halves = min(last, cost.halves)
    count = -(-(last + halves) // cost.sms) - 1
    return max(0.0, count - (1 - cost.half_tile if halves else 0.0)) if count > 0 else 0.0


def lengths(extent: int, count: int) -> list[int]:
    """Of an extent cut into so many parts, without the empty ones."""
    return [high - low for low, high in split(extent, count) if high > low]
