"""The lanes of one rank in closed form: when its matmuls and copies end. weft.perf.ranking builds its estimates from these.

All numbers are of the rank with the most work, and its peers are assumed to do the same at the same time. A name that ends in
`_at_us` is a point in time, in us from the begin of the call. Any other name that ends in `_us` is a duration. The cost of a
single step comes from weft.perf.terms. A peer is identified by its distance: the next rank has distance 1.

A lane executes its operations one after the other. A method `enqueue_...` appends an operation, and so advances the time at
which the lane is free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from weft.core.machine import Machine
from weft.core.problem import REDUCTIONS, Problem, split
from weft.perf.shapes import Arriving, best_shape, shapes_for
from weft.perf.terms import COPY_WITH_GEMM, GEMM_WITH_COPY, GemmCost, gemm_cost, hbm_us, kernel_cost, slowed, staged_us
from weft.schedules.traits import FamilyTraits


class CopyLoad(NamedTuple):
    """CopyLoad describes copies that run concurrently with kernels, and move `gbps` through memory while they run."""

    ends_at_us: float = 0.0
    gbps: float = 0.0
    begins_at_us: float = 0.0


NO_COPIES = CopyLoad()


class LaneEnds(NamedTuple):
    """LaneEnds holds when the compute lane of a rank ends, and when it has joined the copy lanes."""

    compute_at_us: float
    copies_at_us: float


class Rank:
    """Rank is the rank with the most work: its sizes, its links, and what its kernels cost."""

    def __init__(self, problem: Problem, machine: Machine) -> None:
        self.problem, self.machine = problem, machine
        self.node_ranks = max(problem.nodes or (problem.world_size,))
        """The number of ranks of the largest node."""
        most, reduces = max(problem.b_sizes, default=0), problem.op in REDUCTIONS
        self.inner = max(problem.inner(0), most if reduces else 0)
        self.columns = max(problem.columns(0), 0 if reduces else most)
        self.rows = problem.product_rows(0)
        shards = [high - low for low, high in problem.shards]
        self.shard_rows, self.shard_bytes = max(shards), problem.shard_bytes
        self.distances = range(1, min(self.node_ranks, max(2, sum(map(bool, shards)))))
        """The distances to the peers of the node that have rows."""
        self.launch_us, self.flag_us = machine.launch_us, machine.flag_us
        self.fork_us, self.wake_us = machine.fork_us or 0.0, machine.wake_us or 0.0
        self._library_gemms: dict[tuple[int, int, int, int], GemmCost] = {}
        self._weft_gemms: dict[tuple[tuple[Arriving, ...], int | None, bool], GemmCost] = {}

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
    def matmul_us(self) -> float:
        """The time of the rank's matmul as one cuBLAS matmul."""
        return self.library_gemm(self.rows).busy_us

    def weft_gemm(self, parts: Sequence[Arriving], sms: int | None = None, *, counts_tiles: bool = False) -> GemmCost:
        """Return the cost of weft's own kernel with its best tile shape.

        sms: the number of SMs that it uses; None is all of them.
        counts_tiles: its tiles raise flags or add received data.
        """
        key, gpu = (tuple(parts), sms, counts_tiles), self.machine.gpu
        if key not in self._weft_gemms:
            stored = not counts_tiles and not any(part.away for part in parts)
            shape, scaling = None, self.problem.scaling
            if gpu.capabilities and shapes_for(gpu.capabilities, scaling):
                shape = best_shape(key[0], gpu.capabilities, self.machine, stored=stored, scaling=scaling)
            self._weft_gemms[key] = kernel_cost(
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
        return self._weft_gemms[key]

    def power_slowdown(self, before_us: float, cost: GemmCost) -> float:
        """Return how many times as long a matmul takes because the power limit slows it after `before_us` of other matmuls."""
        return self.machine.gpu.power_slowdown(before_us, cost.busy_us, cost.speed)

    def copy_slowdown(self, cost: GemmCost, gbps: float) -> float:
        """Return how many times as long a kernel takes while copies move `gbps` through the rank's memory."""
        measured = self.machine.contention.keys() & {GEMM_WITH_COPY, COPY_WITH_GEMM}
        return slowed(self.machine, cost.shares, gbps) if gbps and measured else 1.0

    # The links of the rank

    def hops(self, distance: int) -> int:
        """Return the number of links between the rank and a peer."""
        return max(1, min(distance, self.node_ranks - distance)) if self.machine.links.topology == "ring" else 1

    def latency_us(self, distance: int = 1) -> float:
        """Return the time until a peer sees data after they have left the rank."""
        return self.hops(distance) * self.machine.links.latency_us

    def link_gbps(self, distance: int, at_once: int = 1) -> float:
        """Return the rate to a peer while every rank sends to `at_once` peers."""
        links = self.machine.links
        if links.topology == "mesh":
            return links.gbps
        if links.topology == "ring":
            return links.gbps / (self.hops(distance) if at_once == 1 else sum(map(self.hops, self.distances)) / 2)
        shared = links.host_gbps / self.node_ranks if links.topology == "pcie" and links.host_gbps else math.inf
        return min(links.gbps, shared) / at_once

    def stores_us(self, piece_bytes: float, *, at_once: bool = False) -> float:
        """Return the time to store or load a piece for each peer on all SMs. at_once: for all peers at the same time."""
        each_us = [
            piece_bytes / (min(self.machine.stores.rate(self.machine.gpu.sms), self.link_gbps(distance)) * 1e3)
            for distance in self.distances
        ]
        if not at_once or self.machine.links.topology != "mesh":
            return sum(each_us)
        return max(
            max(each_us, default=0.0), len(each_us) * piece_bytes / (self.machine.stores.rate(self.machine.gpu.sms) * 1e3)
        )


class ComputeLane:
    """A ComputeLane tracks when the compute lane of a rank is free (`free_at_us`)."""

    def __init__(self, rank: Rank, free_at_us: float = 0.0) -> None:
        self.rank, self.free_at_us = rank, free_at_us
        self.matmul_begins_at_us = self.matmul_tile_us = 0.0
        """The time at which the last matmul begins, and the time of one of its tiles."""
        self.multiplied_us = 0.0
        """The time of all matmuls so far, on which the power limit depends."""

    def enqueue_wait(self, *raised_at_us: float) -> None:
        """Wait for flags that are raised at these times. One flag operation checks all of them."""
        if raised_at_us:
            self.free_at_us = max(max(self.free_at_us, raised_at_us[0]) + self.rank.flag_us, *raised_at_us)

    def enqueue_kernel(self, kernel_us: float) -> None:
        """Run a kernel that takes `kernel_us` after its launch."""
        self.free_at_us += self.rank.launch_us + kernel_us

    def enqueue_matmul(self, cost: GemmCost, load: CopyLoad = NO_COPIES, staged_us: float = 0.0) -> None:
        """Run a cuBLAS matmul, concurrently with the copies of `load`. staged_us: the time of copies that stage its data."""
        if not cost.busy_us:
            return
        slowdown = self.rank.power_slowdown(self.multiplied_us, cost)
        self.multiplied_us += cost.busy_us
        self.matmul_begins_at_us = self.free_at_us + self.rank.launch_us + staged_us
        self.matmul_tile_us = cost.tile_us * slowdown
        self.free_at_us = work_ends_at_us(
            self.matmul_begins_at_us, cost.busy_us * slowdown, load, self.rank.copy_slowdown(cost, load.gbps)
        )

    def enqueue_weight_gradients(self, load: CopyLoad = NO_COPIES, x_at_us: float = 0.0) -> None:
        """Run the matmul of the weights' gradients, if the problem has them. x_at_us: when all shards of x have arrived."""
        rank = self.rank
        if not rank.problem.weight_gradients:
            return
        if x_at_us:
            self.free_at_us += rank.launch_us + hbm_us(rank.machine, 2 * rank.shard_bytes)  # the own shard
            self.enqueue_wait(x_at_us)
        self.enqueue_matmul(rank.library_gemm(rank.columns, inner=rank.rows, columns=rank.inner), load)


class CopyLanes:
    """CopyLanes tracks when the copy lanes of a rank are free. There is one lane, or one for each peer.

    rounds: the number of copies to each peer.
    one: use a single lane, even if the machine profile says one for each peer.
    take_turns: the copies of several ranks to one peer take turns, if they share its port.
    matmul_us: the time of concurrent matmuls, which slow the copies down.
    """

    def __init__(
        self, rank: Rank, rounds: int, *, one: bool = False, take_turns: bool = False, matmul_us: float = math.inf
    ) -> None:
        self.rank, self._slowdown = rank, 1.0
        one = one or not rank.machine.fans_out
        self._rounds = rounds if one and rank.node_ranks > 2 else 1
        self._free_at_us = [rank.fork_us] * (1 if one else rank.node_ranks)
        slowdown = max(1.0, rank.machine.contention.get(COPY_WITH_GEMM, 1.0))
        alone_us = rank.machine.copies.copy_us * rounds + rank.shard_bytes / (self.gbps(1) * 1e3)
        share = min(1.0, matmul_us / (alone_us * max(1, rank.node_ranks - len(self._free_at_us))))
        self._slowdown = 1 + (slowdown - 1) * share
        self.take_turns = take_turns and not rank.machine.fans_out
        self._turns_left = rounds * (rank.node_ranks - 1) - 1 if self.take_turns and rank.node_ranks > 2 else 0
        self._turn_at_us: float | None = None
        """When the next copy may begin: when the sender before, which copies at the same times as this rank, has signalled."""
        self._full_gpu: list[tuple[float, float, float]] = []
        """Matmuls that occupy all SMs: when each begins, the time of a tile, and when it ends."""

    @property
    def _all_free_at_us(self) -> float:
        return max(self._free_at_us)

    @property
    def joined_at_us(self) -> float:
        """The time at which the compute lane can go on after it has joined the copy lanes."""
        return self._all_free_at_us + self.rank.fork_us

    def gbps(self, distance: int) -> float:
        """Return the rate of a copy to or from a peer while all lanes copy."""
        copies = self.rank.machine.copies
        at_once = 1 if len(self._free_at_us) == 1 else min(self.rank.node_ranks - 1, copies.engines)
        total = max(copies.gbps, copies.several_gbps) if at_once == 1 else copies.several_gbps
        rate = min(total / self._slowdown, copies.gbps * at_once) / at_once
        if copies.turning and self._rounds > 1:
            rate = min(rate, copies.turned_gbps(self._rounds))
        return min(rate, self.rank.link_gbps(distance, at_once))

    def load(self, copy_bytes: float, ends_at_us: float | None = None, begins_at_us: float = 0.0) -> CopyLoad:
        """Return the load of copies of `copy_bytes` each that follow each other.

        ends_at_us: when the load ends; None is the end of the last copy so far.
        """
        each_us = self.rank.machine.copies.copy_us + copy_bytes / (self.gbps(1) * 1e3) + self.rank.flag_us
        gbps = 2e-3 * max(1, len(self._free_at_us) - 1) * copy_bytes / each_us
        return CopyLoad(self._all_free_at_us if ends_at_us is None else ends_at_us, gbps, begins_at_us)

    def enqueue_wait(self, distance: int, raised_at_us: float) -> None:
        """Make the lane to a peer wait for a flag.

        A lane that is free before the flag is raised also needs `wake_us`, or the time that it has waited if that is shorter.
        """
        lane, rank = distance % len(self._free_at_us), self.rank
        waited_us = max(0.0, raised_at_us - self._free_at_us[lane])
        self._free_at_us[lane] += waited_us + min(rank.wake_us, waited_us) + rank.flag_us

    def enqueue_flags(self, count: int = 1, distance: int | None = None) -> None:
        """Execute flag operations that do not make a lane wait: signals, or waits for flags that are already raised.

        With `distance`, the lane to that peer executes all of them. Without it, a single lane executes all of them, and each of
        several lanes executes one.
        """
        if distance is None:
            times = count if len(self._free_at_us) == 1 else 1
            self._free_at_us = [free_at_us + times * self.rank.flag_us for free_at_us in self._free_at_us]
        else:
            self._free_at_us[distance % len(self._free_at_us)] += count * self.rank.flag_us

    def enqueue_all_read(self) -> None:
        """Signal to every peer that this rank has read everything."""
        self.enqueue_flags(self.rank.node_ranks - 1)

    def enqueue_x(self) -> float:
        """Send the shard of x to all peers, if ranks have shards of it. Return when the shards of all peers have arrived."""
        at_us = 0.0
        for distance in self.rank.distances if self.rank.problem.weight_gradients == "shard" else ():
            self.enqueue_flags(1, distance)
            at_us = self.enqueue_copy(distance, self.rank.shard_bytes, in_turn=False)
        return at_us

    def enqueue_copy(self, distance: int, copy_bytes: float, *, signal: bool = True, in_turn: bool = True) -> float:
        """Copy to or from a peer, and return when the data have arrived.

        signal: a signal follows the copy. in_turn: the copy takes turns with those of other ranks, if copies do.
        """
        lane, rank = distance % len(self._free_at_us), self.rank
        if in_turn and self._turn_at_us is not None:
            self.enqueue_wait(distance, self._turn_at_us)
        begins_at_us = self._sms_free_at_us(self._free_at_us[lane])
        self._free_at_us[lane] = begins_at_us + rank.machine.copies.copy_us + copy_bytes / (self.gbps(distance) * 1e3)
        if in_turn and self._turns_left > 0:
            self._turns_left -= 1
            self._free_at_us[lane] += rank.flag_us
            self._turn_at_us = self._free_at_us[lane] + rank.latency_us(1)
        self._free_at_us[lane] += rank.flag_us * signal
        return self._free_at_us[lane] + rank.latency_us(distance)

    def enqueue_local_copy(self, copy_bytes: float, *, ready_at_us: float = 0.0, signal: bool = False) -> float:
        """Copy within the rank's memory, and return when the copy ends.

        ready_at_us: when the data are there; the copy cannot begin before.
        signal: a signal follows the copy.
        """
        machine = self.rank.machine
        fixed_us = machine.launch_us if machine.copies.strided == "kernel" else machine.copies.copy_us
        begins_at_us = max(self._free_at_us[0], ready_at_us)
        self._free_at_us[0] = begins_at_us + fixed_us + hbm_us(machine, 2 * copy_bytes) + machine.flag_us * signal
        return self._free_at_us[0]

    def compete_for_sms(self, lane: ComputeLane) -> None:
        """Record that the last matmul of `lane` occupies all SMs, for copies that are made by kernels.

        A copy that would begin while the matmul runs then waits until the tiles that are running at that moment end.
        """
        self._full_gpu.append((lane.matmul_begins_at_us, lane.matmul_tile_us, lane.free_at_us))

    def _sms_free_at_us(self, at_us: float) -> float:
        """Return when SMs are free for a copy that could begin at `at_us`."""
        for begins_at_us, tile_us, ends_at_us in self._full_gpu:
            if begins_at_us <= at_us < ends_at_us and tile_us:
                tiles_done = math.floor((at_us - begins_at_us) / tile_us) + 1
                at_us = min(ends_at_us, begins_at_us + tiles_done * tile_us)
        return at_us


def work_ends_at_us(begins_at_us: float, work_us: float, load: CopyLoad, slowdown: float) -> float:
    """Return when work ends that takes `slowdown` times as long while the copies in `load` run."""
    before_us = min(work_us, max(0.0, load.begins_at_us - begins_at_us))
    begins_at_us, work_us = begins_at_us + before_us, work_us - before_us
    under_load_us = max(0.0, load.ends_at_us - begins_at_us) / slowdown
    if work_us <= under_load_us:
        return begins_at_us + work_us * slowdown
    return max(begins_at_us, load.ends_at_us) + work_us - under_load_us


def waves_of_last(cost: GemmCost, tiles: int) -> float:
    """Return the number of waves of the last `tiles` tiles of a kernel: the number of tiles that an SM computes in a row.

    A half tile counts as less than one wave. Half tiles run concurrently with the last whole tiles if SMs are free then.
    """
    whole, halves = max(0, tiles - cost.halves), min(tiles, cost.halves)
    full_waves = -(-whole // cost.sms)
    return full_waves + (cost.half_tile if 2 * halves > full_waves * cost.sms - whole else 0.0)


def waves_of_first(cost: GemmCost, tiles: int) -> float:
    """Return the number of waves until the first `tiles` tiles of a kernel are done."""
    whole = sum(cost.tiles) - cost.halves
    return -(-min(tiles, whole) // cost.sms) + (cost.half_tile if tiles > whole else 0.0)


def waves_after_first(cost: GemmCost, tiles: int) -> float:
    """Return how many waves of the last `tiles` tiles follow the first of these waves.

    The tiles of that first wave occupy all SMs while they wait for their data.
    """
    halves = min(tiles, cost.halves)
    later_waves = -(-(tiles + halves) // cost.sms) - 1
    return max(0.0, later_waves - (1 - cost.half_tile if halves else 0.0)) if later_waves > 0 else 0.0


def chunk_lengths(extent: int, count: int) -> list[int]:
    """Cut an extent into `count` chunks, and return the lengths of those that are not empty."""
    return [high - low for low, high in split(extent, count) if high > low]


def step_matmul(
    rank: Rank, family: FamilyTraits, length: int, index: int, steps: int, *, gathers: bool
) -> tuple[GemmCost, float]:
    """Return the cost of the matmul of step `index` of `steps`, and the time of the copies that stage its data.

    length: the rows of each piece of the step, or the columns of its slice.
    """
    row_bytes = rank.problem.row_bytes
    if family.matmul == "per_slice" and gathers:
        slice_bytes, sums = rank.rows * row_bytes(length), 2 if index else 1
        staging_us = staged_us(rank.machine, rows=2, row_bytes=slice_bytes, outs=1, out_bytes=0.0)
        return rank.library_gemm(rank.rows, inner=length, sums=sums), staging_us
    if family.matmul == "per_slice":
        return rank.library_gemm(rank.rows, columns=length), 0.0
    pieces = rank.node_ranks if family.cuts_own_shard else rank.node_ranks - 1
    out_runs = pieces if steps > 1 else 1 if family.cuts_own_shard else min(2, pieces)
    a_bytes, out_bytes = pieces * length * row_bytes(rank.inner), pieces * length * rank.columns * rank.problem.itemsize
    # Gathered pieces are stored by step, so the pieces of a step are contiguous. With a single step, the rank's own shard is
    # left out, and splits the rows in two on most ranks.
    a_runs = out_runs if not gathers else 1 if family.cuts_own_shard or steps > 1 else min(2, pieces)
    staging_us = staged_us(rank.machine, rows=a_runs, row_bytes=a_bytes, outs=out_runs, out_bytes=out_bytes)
    return rank.library_gemm(pieces * length), staging_us
