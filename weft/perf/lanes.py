"""Closed forms for the lanes of one rank: they compute when its matmuls and copies end. weft.perf.ranking is made of these.

All numbers are of the rank with the most work, and its peers are assumed to do the same at the same time. Times are in us from
the begin of the call, and rates are in GB/s. The cost of a single step comes from weft.perf.terms. A peer is named by its
distance: 1 is the next rank.
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
from weft.perf.terms import COPY_WITH_GEMM, GEMM_WITH_COPY, GemmCost, gemm_cost, hbm_us, kernel_cost, slowed


class CopyLoad(NamedTuple):
    """CopyLoad describes copies that run concurrently with kernels from `since` to `until` and move `gbps` through memory."""

    until: float = 0.0
    gbps: float = 0.0
    since: float = 0.0


NOTHING = CopyLoad()


class Rank:
    """Rank is the rank with the most work: its sizes, its links, and what its kernels cost."""

    def __init__(self, problem: Problem, machine: Machine) -> None:
        self.problem, self.machine = problem, machine
        self.ranks = max(problem.nodes or (problem.world_size,))
        """The number of ranks of the largest node."""
        most, reduces = max(problem.b_sizes, default=0), problem.op in REDUCTIONS
        self.inner = max(problem.inner(0), most if reduces else 0)
        self.columns = max(problem.columns(0), 0 if reduces else most)
        self.rows = problem.product_rows(0)
        shards = [high - low for low, high in problem.shards]
        self.own, self.shard_bytes = max(shards), problem.shard_bytes
        self.peers = range(1, min(self.ranks, max(2, sum(map(bool, shards)))))
        """The distances to the peers that have rows."""
        self.launch_us, self.flag_us = machine.launch_us, machine.flag_us
        self.fork_us, self.wake_us = machine.fork_us or 0.0, machine.wake_us or 0.0
        self._library_gemms: dict[tuple[int, int, int, int], GemmCost] = {}
        self._kernels: dict[tuple[tuple[Arriving, ...], int | None, bool], GemmCost] = {}

    # The costs of kernels

    def library_gemm(self, rows: int, *, inner: int = 0, columns: int = 0, sums: int = 0) -> GemmCost:
        """Return the cost of a cuBLAS matmul.

        inner: the part of K that it multiplies; 0 is all of K.
        columns: the part of N that it makes; 0 is all of N.
        sums: 1 if it writes float32 sums, 2 if it adds to them.
        """
        key = rows, inner or self.inner, columns or self.columns, sums
        if key not in self._library_gemms:
            dtype, out = self.problem.rate_name, 4 if sums else self.problem.itemsize
            self._library_gemms[key] = gemm_cost(
                self.machine, rows=(rows,), n=key[2], k=key[1], dtype=dtype, accumulate=sums == 2, out_itemsize=out
            )
        return self._library_gemms[key]

    @cached_property
    def whole_us(self) -> float:
        """The time of the whole matmul."""
        return self.library_gemm(self.rows).busy_us

    def kernel(self, parts: Sequence[Arriving], sms: int | None = None, *, counts: bool = False) -> GemmCost:
        """Return the cost of weft's own kernel with its best tile shape. counts: its tiles are counted, or added to."""
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
        """Return how many times as long a matmul takes because the power limit slows it after `before_us` of other matmuls."""
        paced_us = self.machine.gpu.paced_us
        return (paced_us(before_us + busy_us) - paced_us(before_us)) / busy_us if busy_us else 1.0

    def slowed(self, cost: GemmCost, gbps: float) -> float:
        """Return how many times as long a kernel takes while copies move `gbps` through the rank's memory."""
        known = self.machine.contention.keys() & {GEMM_WITH_COPY, COPY_WITH_GEMM}
        return slowed(self.machine, cost.shares, gbps) if gbps and known else 1.0

    # The links of the rank

    def hops(self, ahead: int) -> int:
        return max(1, min(ahead, self.ranks - ahead)) if self.machine.links.topology == "ring" else 1

    def latency_us(self, ahead: int = 1) -> float:
        return self.hops(ahead) * self.machine.links.latency_us

    def link_gbps(self, ahead: int, at_once: int = 1) -> float:
        """Return the rate to a peer while every rank sends to `at_once` peers."""
        links = self.machine.links
        if links.topology == "mesh":
            return links.gbps
        if links.topology == "ring":
            return links.gbps / (self.hops(ahead) if at_once == 1 else sum(map(self.hops, self.peers)) / 2)
        shared = links.host_gbps / self.ranks if links.topology == "pcie" and links.host_gbps else math.inf
        return min(links.gbps, shared) / at_once

    def stores_us(self, size: float, *, at_once: bool = False) -> float:
        """Return the time to store or load `size` bytes for each peer on all SMs: peer after peer, or for all peers at once."""
        each = [
            size / (min(self.machine.stores.rate(self.machine.gpu.sms), self.link_gbps(ahead)) * 1e3) for ahead in self.peers
        ]
        if not at_once or self.machine.links.topology != "mesh":
            return sum(each)
        return max(max(each, default=0.0), len(each) * size / (self.machine.stores.rate(self.machine.gpu.sms) * 1e3))


class ComputeLane:
    """A ComputeLane tracks the time `now` at which the compute lane of a rank is free."""

    def __init__(self, rank: Rank, now: float = 0.0) -> None:
        self.rank, self.now = rank, now
        self.began = self.tile_us = 0.0
        """When the last matmul began, and the time of one of its tiles."""
        self._multiplied_us = 0.0

    def wait(self, *flags: float) -> None:
        """Wait for several flags. The cost is one flag operation, because it checks all of them."""
        if flags:
            self.now = max(max(self.now, flags[0]) + self.rank.flag_us, *flags)

    def launch(self, us: float) -> None:
        """Launch a kernel that takes `us`."""
        self.now += self.rank.launch_us + us

    def multiply(self, cost: GemmCost, load: CopyLoad = NOTHING, staged_us: float = 0.0) -> None:
        """Run a cuBLAS matmul, concurrently with the copies of `load`."""
        if not cost.busy_us:
            return
        pace = self.rank.pace(self._multiplied_us, cost.busy_us)
        self._multiplied_us += cost.busy_us
        self.began, self.tile_us = self.now + self.rank.launch_us + staged_us, cost.tile_us * pace
        self.now = end_under_load(self.began, cost.busy_us * pace, load, self.rank.slowed(cost, load.gbps))


class CopyLanes:
    """CopyLanes tracks when the copy lanes of a rank are free. There is one lane, or one for each peer.

    rounds: the number of copies to each peer.
    one: use a single lane, even if the machine profile says one for each peer.
    work_us: the time of concurrent matmuls, which slow the copies down.
    """

    def __init__(self, rank: Rank, rounds: int, *, one: bool = False, work_us: float = math.inf) -> None:
        self.rank, self._slowdown = rank, 1.0
        one = one or not rank.machine.fans_out
        self._rounds = rounds if one and rank.ranks > 2 else 1
        self._now = [rank.fork_us] * (1 if one else rank.ranks)
        slower = max(1.0, rank.machine.contention.get(COPY_WITH_GEMM, 1.0))
        alone_us = rank.machine.copies.copy_us * rounds + rank.shard_bytes / (self.gbps(1) * 1e3)
        self._slowdown = 1 + (slower - 1) * min(1.0, work_us / (alone_us * max(1, rank.ranks - len(self._now))))
        self._full_gpu: list[tuple[float, float, float]] = []

    @property
    def last(self) -> float:
        return max(self._now)

    @property
    def end(self) -> float:
        """When the compute lane can go on after it has joined the copy lanes."""
        return self.last + self.rank.fork_us

    def gbps(self, ahead: int) -> float:
        """Return the rate of a copy while all lanes copy."""
        copies = self.rank.machine.copies
        at_once = 1 if len(self._now) == 1 else min(self.rank.ranks - 1, copies.engines)
        together = max(copies.gbps, copies.several_gbps) if at_once == 1 else copies.several_gbps
        rate = min(together / self._slowdown, copies.gbps * at_once) / at_once
        if copies.turning and self._rounds > 1:
            rate = min(rate, copies.turned_gbps(self._rounds))
        return min(rate, self.rank.link_gbps(ahead, at_once))

    def load(self, size: float, until: float | None = None, since: float = 0.0) -> CopyLoad:
        """Return the load of copies of `size` bytes that follow each other. It ends with the last copy, or at `until`."""
        us = self.rank.machine.copies.copy_us + size / (self.gbps(1) * 1e3) + self.rank.flag_us
        moved = 2e-3 * max(1, len(self._now) - 1) * size / us
        return CopyLoad(self.last if until is None else until, moved, since)

    def wait(self, ahead: int, until: float) -> None:
        """Wait for a flag that is raised at `until`. A lane that really had to wait also needs `wake_us` to go on."""
        at, rank = ahead % len(self._now), self.rank
        late = until + rank.wake_us if until > self._now[at] else 0.0
        self._now[at] = max(self._now[at], late) + rank.flag_us

    def flags(self, count: int = 1, ahead: int | None = None) -> None:
        """Add flag operations that do not make a lane wait: signals, or waits for flags that are already raised.

        Without `ahead`, there are `count` in all: a single lane executes all of them, and each of several lanes executes one.
        With it, the lane to that peer executes all of them.
        """
        if ahead is None:
            times = count if len(self._now) == 1 else 1
            self._now = [now + times * self.rank.flag_us for now in self._now]
        else:
            self._now[ahead % len(self._now)] += count * self.rank.flag_us

    def copy(self, ahead: int, size: float, *, signal: bool = True) -> float:
        """Copy to or from a peer, and return when the peer sees it. signal: include the signal that follows the copy."""
        at = ahead % len(self._now)
        rank = self.rank
        self._now[at] = self._wait_for_sms(self._now[at]) + rank.machine.copies.copy_us + size / (self.gbps(ahead) * 1e3)
        self._now[at] += rank.flag_us * signal
        return self._now[at] + rank.latency_us(ahead)

    def copy_here(self, size: float, *, after: float = 0.0, signal: bool = False) -> float:
        """Copy within the rank's memory, not before `after`. signal: include the signal that follows the copy."""
        machine = self.rank.machine
        fixed_us = machine.launch_us if machine.copies.strided == "kernel" else machine.copies.copy_us
        self._now[0] = max(self._now[0], after) + fixed_us + hbm_us(machine, 2 * size) + machine.flag_us * signal
        return self._now[0]

    def share_sms(self, lane: ComputeLane) -> None:
        """Record that the last matmul of `lane` occupies all SMs, for copies that are made by kernels.

        A copy that would begin while the matmul runs then waits until the tiles that are running at that moment end.
        """
        self._full_gpu.append((lane.began, lane.tile_us, lane.now))

    def _wait_for_sms(self, now: float) -> float:
        for began, tile_us, ended in self._full_gpu:
            if began <= now < ended and tile_us:
                now = min(ended, began + (math.floor((now - began) / tile_us) + 1) * tile_us)
        return now


def end_under_load(begin: float, work: float, load: CopyLoad, slower: float) -> float:
    """Return when work ends that takes `slower` times as long while the copies in `load` run."""
    before = min(work, max(0.0, load.since - begin))
    begin, work = begin + before, work - before
    slow = max(0.0, load.until - begin) / slower
    return begin + work * slower if work <= slow else max(begin, load.until) + work - slow


def waves(cost: GemmCost, last: int) -> float:
    """Return the number of waves of the last `last` tiles of a kernel: the number of tiles that an SM computes in a row.

    A half tile counts as less than one wave. Half tiles run concurrently with the last whole tiles if SMs are free then.
    """
    whole, halves = max(0, last - cost.halves), min(last, cost.halves)
    count = -(-whole // cost.sms)
    return count + (cost.half_tile if 2 * halves > count * cost.sms - whole else 0.0)


def waves_before(cost: GemmCost, first: int) -> float:
    """Return the number of waves until the first `first` tiles of a kernel are done."""
    whole = sum(cost.tiles) - cost.halves
    return -(-min(first, whole) // cost.sms) + (cost.half_tile if first > whole else 0.0)


def waves_behind(cost: GemmCost, last: int) -> float:
    """Return the number of waves after the first wave of the last `last` tiles.

    The tiles of that first wave occupy all SMs while they wait for their data.
    """
    halves = min(last, cost.halves)
    count = -(-(last + halves) // cost.sms) - 1
    return max(0.0, count - (1 - cost.half_tile if halves else 0.0)) if count > 0 else 0.0


def lengths(extent: int, count: int) -> list[int]:
    """Cut an extent into `count` parts, and return the lengths of those that are not empty."""
    return [high - low for low, high in split(extent, count) if high > low]
