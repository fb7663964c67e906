"""Ranking: what every schedule of a problem should take, by three recurrences over the cost terms. Milliseconds, and no events.

Contract: `estimates` is a pure function of a problem, a machine and names of schedules. It builds no schedule and simulates
nothing, and it has no number of its own: what a matmul, a copy or a flag takes is `weft.perf.terms`, as in the event engine
(weft.perf.engine), which adds order and contention. A test holds both together over hundreds of problems.

A family is a row of `ROWS`: how it cuts the matmul, what brings the data. With pieces i = 1 .. n, in the order in which they
come or are made, c what the transfer of one takes, g_i the work on it, kappa how many times as long work takes beside copies,
T_i the tiles of a piece, S the SMs and tau a tile's time, three recurrences cover all of them:

    gather       t_i = max(t_{i-1}, start + i c + latency) + waits + kappa g_i           pieces arrive, and are multiplied
    scatter      s_i = max(s_{i-1}, u_i + flag + wake) + c                               pieces are made (u_i), and sent
    one kernel   max(launch + ceil(sum T / S) tau, arrival_i + ceil(T_i.. / S) tau)      tiles wait for pieces, count or store them

All is of the rank with most work. Between nodes (`node_slices`) slices cross one after the other at the adapters' rate, beside
what a node does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from weft.core.capabilities import H200
from weft.core.errors import require
from weft.core.machine import Machine, Tile
from weft.core.problem import COLLECTIVE_OPS, COLUMN_OPS, EXCHANGES, LOOKUP_OPS, REDUCTIONS, CollectiveProblem, ColumnProblem, Problem, split
from weft.perf import terms
from weft.perf.terms import GemmCost, hbm_us
from weft.schedules import collectives, parse, specs
from weft.schedules.builder import aligned_slices
from weft.schedules.matmul_all_reduce import ONE_HOP_BYTES
from weft.schedules.matmul_reduce_scatter import ONE_KERNEL_BYTES

_WITHIN = {
    "all_gather_matmul": "flag_gated",
    "all_to_all_matmul": "flag_gated",
    "matmul_all_to_all": "track_and_trigger",
    "matmul_all_reduce": "two_shot",
}
_PADDED = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
_EXCHANGES = (*EXCHANGES, *COLUMN_OPS, *LOOKUP_OPS)
_GATHERED = ("all_gather_matmul", "all_to_all_matmul", "all_to_all_columns_matmul")
Kernels = Literal["whole", "piece", "step", "slice", "one", "exchange", "none"]
Transport = Literal["vendor", "stores", "copies", "ring", "blocks", "tiles", "loads", "pulls", "none"]


class Row(NamedTuple):
    """kernels: how the matmul is cut. gather, scatter: what brings the data before it, or takes it away. joined: the own
    shard is cut like the others. hops: of a kernel that multiplies and exchanges. one_lane: of copies, where others have one for each
    peer."""

    kernels: Kernels
    gather: Transport = "none"
    scatter: Transport = "none"
    joined: bool = False
    hops: int = 0
    one_lane: bool = False


ROWS: dict[str, Row] = {
    "sequential": Row("whole", "vendor", "vendor"),
    "sequential_stores": Row("whole", "stores", "stores"),
    "shard_p2p": Row("piece", "copies", "copies", one_lane=True),
    "uniform_fused_1d": Row("step", "copies", "copies", joined=True),
    "hetero_fused_1d": Row("step", "copies", "copies"),
    "hetero_unfused_1d": Row("piece", "copies", "copies"),
    "uniform_fused_2d": Row("slice", "copies", "copies", joined=True),
    "flag_gated": Row("one", "copies", "loads"),
    "track_and_trigger": Row("one", "ring", "copies"),
    "direct_store": Row("one", "blocks", "tiles"),
    "flag_gated_2d": Row("one", "blocks", joined=True),
    "one_shot": Row("exchange", hops=1),
    "two_shot": Row("exchange", hops=2),
    "node_slices": Row("one", "copies", "tiles"),
    "copy_engine": Row("none", "copies", "copies"),
    "copy_engine_pull": Row("none", "pulls", "pulls"),
}


MARGIN = 0.01
"""An overlap must be estimated to take less than the sequential program by more than this, as in a trial."""


def ranked(problem: Problem, machine: Machine, only: str | None = None) -> dict[str, float]:
    """Every candidate's estimate in us, by spec, least first; of equal ones the simplest first. only: those of this family.

    Raises ValueError if the machine has fewer GPUs than the problem, or no rate for its dtype.
    """
    found = estimates(problem, machine, specs(problem, only))
    return dict(sorted(found.items(), key=lambda item: item[1]))


def best(problem: Problem, machine: Machine, count: int) -> tuple[str, ...]:
    """The sequential program, and so many of the others that are ranked first, each program once: those of equal estimates are
    one, whose simplest name stands for all. The sequential program alone where nothing is computed, or communicated."""
    if problem.world_size == 1 or not problem.m or not problem.n:
        return ("sequential",)
    named: dict[float, str] = {}
    for spec, us in ranked(problem, machine).items():
        named.setdefault(round(us, 6), spec)
    others = [spec for spec in named.values() if spec != "sequential"]
    return ("sequential", *others[:count])


def heuristic(problem: Problem, machine: Machine) -> str:
    """The schedule that is ranked first, as `schedule=` takes it; sequential where there is nothing to overlap, and where no
    overlap is estimated to be faster. Nothing is simulated.

    Raises ValueError if the machine has fewer GPUs than the problem, or no rate for its dtype.
    """
    known = "use a weft.Machine; weft.core.machine.load gives one by its name, once for many problems"
    require("machine", machine, Machine, known)
    if problem.world_size == 1 or not problem.m or not problem.n:
        estimates(problem, machine, ())
        return "sequential"
    return choice(ranked(problem, machine))


def choice(us: Mapping[str, float]) -> str:
    """The spec with the least time, sequential unless another one takes less by MARGIN. us: by spec."""
    first = min(us, key=us.__getitem__)
    return first if us[first] < (1 - MARGIN) * us["sequential"] else "sequential"


def estimates(problem: Problem, machine: Machine, names: Iterable[str]) -> dict[str, float]:
    """The estimates in us of these schedules, by spec, as `schedule=` takes them. Raises ValueError as `ranked` does."""
    machine.require_for(problem)
    if problem.op not in COLLECTIVE_OPS:
        machine.tflops(problem.dtype)
    call = _Call(problem, machine)
    return {name: call.estimate(name) for name in names}


class _Call:
    """One problem on one machine: sizes of the rank with most work, what its steps take, and the recurrences over them."""

    def __init__(self, problem: Problem, machine: Machine) -> None:
        self.problem, self.machine = problem, machine
        self.ranks = max(problem.nodes or (problem.world_size,))
        most = max(problem.b_sizes, default=0)
        reduces = problem.op in REDUCTIONS
        self.inner = max(problem.inner(0), most if reduces else 0)
        self.columns = max(problem.columns(0), 0 if reduces else most)
        self.rows = problem.product_rows(0)
        self.own = max(high - low for low, high in problem.shards)
        self.shard_bytes = problem.shard_bytes
        self.launch_us, self.flag_us = machine.launch_us, machine.flag_us
        self.fork_us, self.wake_us = machine.fork_us or 0.0, machine.wake_us or 0.0
        filled = sum(high > low for low, high in problem.shards)
        self.peers = range(1, min(self.ranks, max(filled, 2)))
        """Those that have rows, by how far they are."""
        self._vendor: dict[tuple[object, ...], GemmCost] = {}
        self._fused: dict[tuple[object, ...], GemmCost] = {}

    def estimate(self, spec: str) -> float:
        """Of one schedule, in us."""
        name, chunks = parse(spec)
        row, chunks = ROWS[name], chunks or self.problem.world_size
        if name == "shard_p2p":
            chunks = 1
        if name == "node_slices" and self.problem.nodes:
            return self._across(chunks)
        if name == "node_slices":
            row = ROWS[_WITHIN.get(self.problem.op, "direct_store")]
        if self.problem.op in COLLECTIVE_OPS:
            return self._alone(row, chunks)
        if self.problem.op in LOOKUP_OPS:
            return self._lookup(row, chunks)
        if self.problem.op == "matmul_all_reduce":
            return self._everywhere(row, chunks)
        if self.problem.op in _GATHERED:
            return self._gather(row, chunks)
        return max(self._scatter(row, chunks))

    # What steps take

    def vendor(self, rows: int, inner: int = 0, columns: int = 0, *, sums: int = 0) -> GemmCost:
        """A vendor's matmul; of `inner` of K and `columns` of N where that is not all. sums: 1 where it makes float32 sums, 2
        where it adds to them."""
        key = rows, inner or self.inner, columns or self.columns, sums
        if key not in self._vendor:
            self._vendor[key] = terms.gemm_cost(
                self.machine,
                rows=(rows,),
                n=key[2],
                k=key[1],
                dtype=self.problem.dtype,
                accumulate=sums == 2,
                out_itemsize=4 if sums else None,
            )
        return self._vendor[key]

    def store_us(self, size: float, *, at_once: bool = False) -> float:
        """So many bytes for each peer, stored or loaded on all SMs: for one peer after the other, or for all at once."""
        links = self.machine.links.gbps * (self.ranks - 1 if at_once and self.machine.links.topology == "mesh" else 1)
        return (self.ranks - 1) * size / (min(self.machine.stores.rate(self.machine.gpu.sms), links) * 1e3)

    def hops(self, ahead: int) -> int:
        """Links to the rank so far ahead."""
        return min(ahead, self.ranks - ahead) if self.machine.links.topology == "ring" else 1

    def latency_us(self, ahead: int) -> float:
        return self.hops(ahead) * self.machine.links.latency_us

    def link_gbps(self, ahead: int, at_once: int) -> float:
        """A rank's rate to the rank so far ahead while all send alike, so many at once."""
        links = self.machine.links
        if links.topology == "mesh":
            return links.gbps
        if links.topology == "ring":
            return links.gbps / (self.hops(ahead) if at_once == 1 else sum(map(self.hops, self.peers)) / 2)
        shared = links.host_gbps / self.ranks if links.topology == "pcie" and links.host_gbps else math.inf
        return min(links.gbps, shared) / at_once

    def copy_gbps(self, ahead: int, rounds: int, *, alone: bool, one: bool) -> float:
        """A copy engine's, beside a kernel or alone, while it goes to all peers in turns, so many times."""
        copies = self.machine.copies
        slower = 1.0 if alone else max(1.0, self.machine.contention.get("copy beside gemm", 1.0))
        at_once = min(self.ranks - 1, copies.engines) if not one else 1
        together = max(copies.gbps, copies.several_gbps) if at_once == 1 else copies.several_gbps
        rate = min(together / slower, copies.gbps * at_once) / at_once
        if copies.turning and rounds > 1 and self.ranks > 2 and one:
            rate = min(rate, copies.turned_gbps(rounds))
        return min(rate, self.link_gbps(ahead, at_once))

    def slowed(self, cost: GemmCost, gbps: float) -> float:
        """How many times as long a kernel takes while copies move so much out of and into the rank's memory."""
        if not self.machine.contention.keys() & {"gemm beside copy", "copy beside gemm"}:
            return 1.0
        beside = max(1.0, self.machine.contention.get("gemm beside copy", 1.0))
        multiplying, traffic = cost.shares
        slower = 1.0 + (beside - 1.0) * min(1.0, gbps / (2 * self.machine.copies.several_gbps))
        return max(multiplying * slower, traffic / max(0.01, 1.0 - gbps / self.machine.gpu.hbm_gbps))

    # Gathers: pieces arrive, and are multiplied

    def _gather(self, row: Row, chunks: int) -> float:
        problem = self.problem
        if row.kernels == "whole":
            return self._gathered_whole(row)
        sizes = _parts(self.own, chunks)
        frees = self.flag_us if self.ranks > 1 else 0.0
        beside = problem.op == "all_to_all_columns_matmul"
        lane = _Lane(self, self.launch_us + hbm_us(self.machine, 2 * self.shard_bytes) if beside else 0.0)
        if row.kernels == "one":
            if row.joined:
                sizes = [high - low for low, high in aligned_slices(self.inner, chunks)]
            brought = self._brought(row, sizes)
            end = self._gated(row, sizes, brought, lane.now)
            return max(end + self._handed_over(self.ranks) + frees, brought.end)
        if row.kernels == "slice":
            sizes = _parts(self.inner, chunks)
        own_too = row.joined and row.kernels == "step" and not beside
        lanes = _Lanes(self, len(sizes)) if row.kernels == "slice" or beside else None
        if lanes is not None and self.machine.copies.strided == "kernel":
            return self._gathered_by_kernels(row, sizes, lane, lanes, frees)
        brought = self._brought(row, sizes, own_too=own_too)
        if not row.joined:
            lane.multiply(self.vendor(self.own), brought)
        for index, size in enumerate(sizes):
            arrivals = brought.at[index]
            if row.kernels == "piece":
                for arrival in arrivals:
                    lane.wait(arrival)
                    lane.multiply(self.vendor(self.own if len(sizes) == 1 else size), brought)
                continue
            lane.wait(*arrivals, *brought.own[index : index + 1])
            if row.kernels == "slice" or beside:
                cost, staged = self._slice(row, size, index)
                lane.multiply(cost, brought, staged)
            else:
                ranks = self.ranks if row.joined else self.ranks - 1
                runs = 1 if row.joined and chunks == 1 else min(2, ranks) if chunks == 1 else ranks
                moved = 2 * ranks * size * self.columns * problem.itemsize
                lane.multiply(self.vendor(ranks * size), brought, self._staged(runs, moved) if runs > 1 else 0.0)
        if row.kernels == "slice":
            lane.now += self.launch_us + hbm_us(self.machine, self.rows * self.columns * (4 + problem.itemsize))
        return max(lane.now + self._handed_over(self.ranks) + frees, brought.end)

    def _slice(self, row: Row, size: int, index: int) -> tuple[GemmCost, float]:
        """A matmul of a slice of K, added to float32 sums; or of a chunk of rows whose columns all ranks sent."""
        if row.kernels != "slice":
            return self.vendor(size), 0.0
        sums = self.rows * self.columns * 4
        staged = self._staged(2, 2 * self.rows * size * self.problem.itemsize + (3 if index else 2) * sums)
        return self.vendor(self.rows, size, sums=2 if index else 1), staged

    def _gathered_by_kernels(self, row: Row, sizes: Sequence[int], lane: _Lane, lanes: _Lanes, frees: float) -> float:
        """Where kernels copy rows that do not lie together: each waits for SMs of the matmul that runs."""
        lanes.signal_all(self.ranks - 1)
        for index, size in enumerate(sizes):
            part = self.shard_bytes * size / sum(sizes)
            arrivals = []
            for ahead in self.peers:
                lanes.find_room(ahead)
                arrivals.append(lanes.copy(ahead, part) + self.latency_us(ahead))
            lane.wait(*arrivals)
            cost, staged = self._slice(row, size, index)
            last = index == len(sizes) - 1
            lane.multiply(cost, _Brought([], [], lanes.last if last else math.inf, lanes.moved_gbps(part)), staged)
            lanes.fill(lane)
        if row.kernels == "slice":
            lane.now += self.launch_us + hbm_us(self.machine, self.rows * self.columns * (4 + self.problem.itemsize))
        return max(lane.now + self._handed_over(self.ranks) + frees, lanes.end)

    def _gathered_whole(self, row: Row) -> float:
        lane, ranks, flag_us = _Lane(self), self.ranks, self.flag_us
        if row.gather == "vendor":
            lane.now += terms.whole_collective_us(self.machine, self.problem) + self._padded(2, self.ranks * self.shard_bytes)
            if self.problem.op == "all_to_all_columns_matmul":
                lane.now += terms.local_copy_us(self.machine, ranks * self.shard_bytes)
            lane.multiply(self.vendor(self.rows))
            return lane.now + self._handed_over(1)
        lane.now += flag_us + self.launch_us + hbm_us(self.machine, 2 * self.shard_bytes)
        lane.now += self.store_us(self.shard_bytes) + self.latency_us(1)
        lane.now += flag_us
        lane.multiply(self.vendor(self.rows))
        return lane.now + self._handed_over(ranks) + flag_us

    def _handed_over(self, copies: int) -> float:
        """What was gathered, copied to the caller's tensor, where that is asked for."""
        if not self.problem.return_gathered:
            return 0.0
        return copies * self.launch_us + terms.local_copy_us(self.machine, self.ranks * self.shard_bytes)

    def _staged(self, launches: int, moved: float) -> float:
        """What a vendor's matmul needs done around it."""
        return launches * self.launch_us + hbm_us(self.machine, moved) if self.machine.stages else 0.0

    def _padded(self, passes: int, whole: float) -> float:
        """What a vendor's collective needs done around it where shards are uneven."""
        first, *_, last = (high - low for low, high in self.problem.shards)
        if not self.machine.stages or first == last or self.problem.op not in _PADDED:
            return 0.0
        return (self.ranks + 2) * self.launch_us + hbm_us(self.machine, passes * whole)

    def _brought(self, row: Row, sizes: Sequence[int], *, own_too: bool = False) -> _Brought:
        """When pieces of all peers are there. sizes: what a chunk is of the shard, in parts of their sum."""
        machine, whole = self.machine, sum(sizes) or 1
        if row.gather == "blocks":
            sms = machine.stores.sms
            now = self.fork_us + self.launch_us + self.flag_us
            found = _Brought([], [], now, 0.0)
            for size in sizes:
                arrivals = []
                for ahead in self.peers:
                    rate = min(machine.stores.rate(sms), self.link_gbps(ahead, 1))
                    now += self.shard_bytes * size / whole / (rate * 1e3)
                    arrivals.append(now + self.latency_us(ahead))
                found.at.append(arrivals)
            return found._replace(end=now)
        if row.gather == "ring":
            return self._forwarded(_Lanes(self, 1, one=True), sizes)
        lanes = _Lanes(self, len(sizes), one=row.one_lane)
        found = _Brought([], [], self.fork_us, lanes.moved_gbps(self.shard_bytes * sizes[0] / whole if sizes else 0.0))
        lanes.signal_all(self.ranks - 1)
        for size in sizes:
            part = self.shard_bytes * size / whole
            if own_too:
                found.own.append(lanes.copy_here(part, told=True))
            found.at.append([lanes.copy(ahead, part) + self.latency_us(ahead) for ahead in self.peers])
        return found._replace(end=lanes.end)

    def _forwarded(self, lanes: _Lanes, sizes: Sequence[int]) -> _Brought:
        """Round a ring: what arrives is sent on."""
        whole, now = sum(sizes) or 1, self.fork_us + self.flag_us
        found = _Brought([[] for _ in sizes], [], self.fork_us, 0.0)
        before = [0.0] * len(sizes)
        for hop in self.peers:
            for index, size in enumerate(sizes):
                if hop > 1:
                    now = max(now + self.flag_us, before[index] + self.flag_us + self.wake_us * (before[index] > now))
                now += self.machine.copies.copy_us + self.shard_bytes * size / whole / (lanes.gbps(1) * 1e3) + self.flag_us
                found.at[index].append(now + self.latency_us(1))
            before = [arrivals[-1] for arrivals in found.at]
        part = self.shard_bytes * sizes[0] / whole if sizes else 0.0
        return found._replace(end=now + self.flag_us + self.fork_us, gbps=lanes.moved_gbps(part))

    def _gated(self, row: Row, sizes: Sequence[int], brought: _Brought, start: float) -> float:
        """One kernel whose tiles wait for what arrives."""
        sms = self.machine.gpu.sms - (self.machine.stores.sms if row.gather == "blocks" else 0)
        begin = start + self.launch_us
        if row.joined:
            return self._gated_by_slices(sms, sizes, brought, begin)
        if self.problem.op == "all_to_all_columns_matmul":
            cost = self.kernel([(size, True) for size in sizes], sms)
            ready = [max(arrivals, default=0.0) for arrivals in brought.at]
        else:
            pieces = [(size, arrival) for size, arrivals in zip(sizes, brought.at, strict=True) for arrival in arrivals]
            if row.gather == "ring":
                hops = range(len(self.peers))
                pieces = [(size, brought.at[index][hop]) for hop in hops for index, size in enumerate(sizes)]
            cost = self.kernel([(self.own, False), *((size, True) for size, _ in pieces)], sms)
            ready = [0.0, *(arrival for _, arrival in pieces)]
        return self._tiles_end(cost, ready, begin, brought)

    def _gated_by_slices(self, sms: int, sizes: Sequence[int], brought: _Brought, begin: float) -> float:
        """Tiles that wait for slice after slice of K, of the rows of all ranks."""
        whole = sum(sizes) or 1
        ends = tuple(sum(sizes[: index + 1]) for index in range(len(sizes)))
        cost = self.kernel([(self.own, False), *((self.own, True) for _ in self.peers)], sms, ends=ends)
        tile_us = self._paced(cost)
        ready = [begin]
        for peer in range(len(self.peers)):
            # As if the tile began when its slices are there in time for what it has multiplied before.
            opens = (at[peer] - tile_us * (sum(sizes[:index]) / whole) for index, at in enumerate(brought.at))
            ready.append(max(opens, default=begin))
        return self._tiles_end(cost, ready, begin, brought)

    def _tiles_end(self, cost: GemmCost, ready: Sequence[float], begin: float, brought: _Brought) -> float:
        slower = self.slowed(cost, brought.gbps)
        tile_us = self._paced(cost)

        def span(tiles: int) -> float:
            return _waves(cost, tiles) * tile_us

        left, end = sum(cost.tiles), begin
        for tiles, opens in zip(cost.tiles, ready, strict=True):
            from_us = max(begin, opens)
            end = max(end, _stretched(from_us, span(left), brought.end, slower))
            left -= tiles
        return end

    def _paced(self, cost: GemmCost) -> float:
        """A tile's time at the rate that power allows a kernel of this length."""
        busy_us = cost.busy_us
        return cost.tile_us * (self.machine.gpu.paced_us(busy_us) / busy_us if busy_us else 1.0)

    def kernel(
        self,
        groups: Sequence[tuple[int, bool]],
        sms: int | None = None,
        *,
        ends: tuple[int, ...] = (),
        sends: int = 0,
    ) -> GemmCost:
        """weft's own kernel, of the tile shape that it takes. groups: rows, and whether they wait for what arrives. sends: groups that go to peers."""
        key = tuple(groups), sms, ends, sends
        if key not in self._fused:
            self._fused[key] = self._kernel(groups, sms, ends or (self.inner,), sends)
        return self._fused[key]

    def _kernel(self, groups: Sequence[tuple[int, bool]], sms: int | None, ends: tuple[int, ...], sends: int) -> GemmCost:
        from weft.perf import shapes

        machine, gpu = self.machine, self.machine.gpu
        shape, tiles = None, ()
        if gpu.kernel_tiles:
            capabilities = dataclasses.replace(H200, sms=gpu.sms)
            shape = shapes.chosen(groups, self.columns, ends, capabilities, machine, sends=sends)
            stored = not sends and any(late for _, late in groups)
            efficiency = gpu.kernel_efficiency(shape.m, shape.n, stored=stored)
            tiles = (Tile(rows=shape.m, cols=shape.n, efficiency=efficiency),)
        copies = machine.copies
        kept_us = machine.kernels.l2_share * gpu.l2_bytes / (gpu.hbm_gbps * 1e3)
        gaps = (copies.copy_us + rows * self.inner * self.problem.itemsize / (copies.gbps * 1e3) for rows, late in groups if late)
        return terms.gemm_cost(
            machine,
            rows=tuple(rows for rows, _ in groups),
            n=self.columns,
            k=self.inner,
            dtype=self.problem.dtype,
            sms=sms,
            flags=True,
            tiles=tiles,
            shape=shape,
            apart=sum(min(1.0, gap / kept_us) for gap in gaps),
        )

    # Scatters: pieces are made, and sent

    def _scatter(self, row: Row, chunks: int) -> tuple[float, float]:
        """When the compute lane ends, and the copy lanes."""
        if row.kernels == "exchange":
            return self._exchanged(row.hops), 0.0
        if row.kernels == "whole":
            return self._scattered_whole(row), 0.0
        sums = self.problem.op == "matmul_reduce_scatter"
        sizes = _parts(self.own, chunks)
        if row.kernels == "one":
            return self._counted(row, sizes), 0.0
        if row.kernels == "slice":
            sizes = _parts(self.columns, chunks)
        lane = _Lane(self, 0.0 if sums else self.flag_us)
        lanes = _Lanes(self, len(sizes), one=row.one_lane)
        arrived = []
        if row.kernels == "slice" and self.machine.copies.strided == "kernel":
            return self._sent_by_kernels(row, sizes, lane, lanes)
        for index, size in enumerate(sizes):
            if row.kernels == "piece":
                made = []
                for _ in self.peers:
                    lane.multiply(self.vendor(self.own if len(sizes) == 1 else size), lanes.beside(size / sum(sizes)))
                    lane.now += self.flag_us
                    made.append(lane.now)
            else:
                cost, staged_us = self._step(row, size, chunks)
                lane.multiply(cost, lanes.beside(size / sum(sizes)), staged_us)
                lane.now += self.flag_us
                made = [lane.now] * (self.ranks - 1)
            arrived.append(self._sent(lanes, made, size / sum(sizes), first=index == 0, waits=row.kernels == "piece"))
        if not row.joined:
            lane.multiply(self.vendor(self.own), lanes.beside(1 / max(1, len(sizes))))
        if not sums:
            return lane.now, lanes.released
        return self._summed(lane.now + self.launch_us, arrived, sizes), lanes.end

    def _sent_by_kernels(self, row: Row, sizes: Sequence[int], lane: _Lane, lanes: _Lanes) -> tuple[float, float]:
        """As `_gathered_by_kernels`, for slices that are sent."""
        made, arrived = [], []
        moved = lanes.moved_gbps(self.shard_bytes / max(1, len(sizes)))
        for index, size in enumerate(sizes):
            cost, staged_us = self._step(row, size, len(sizes))
            lane.multiply(cost, _Brought([], [], math.inf if index else 0.0, moved), staged_us)
            lanes.fill(lane)
            lane.now += self.flag_us
            made.append(lane.now)
        for index, size in enumerate(sizes):
            arrived.append(self._sent(lanes, [made[index]] * len(self.peers), size / sum(sizes), first=index == 0, waits=False))
        return self._summed(lane.now + self.launch_us, arrived, sizes), lanes.end

    def _step(self, row: Row, size: int, chunks: int) -> tuple[GemmCost, float]:
        """A matmul of one step, and what is staged around it."""
        if row.kernels == "slice":
            return self.vendor(self.rows, columns=size), 0.0
        ranks, itemsize = self.ranks if row.joined else self.ranks - 1, self.problem.itemsize
        runs = 1 if row.joined and chunks == 1 else min(2, ranks) if chunks == 1 else ranks
        moved = 2 * ranks * size * (self.inner + self.columns) * itemsize
        return self.vendor(ranks * size), self._staged(1 + runs, moved) if runs > 1 else 0.0

    def _sent(self, lanes: _Lanes, made: Sequence[float], share: float, *, first: bool, waits: bool) -> list[float]:
        """When what was made is at each peer. waits: for each; else for all of a step."""
        found, pulled = [], self.problem.op != "matmul_reduce_scatter"
        for ahead, ready in zip(self.peers, made, strict=True):
            if waits or pulled or ahead == 1 or self.machine.fans_out:
                lanes.wait(ahead, ready + (self.latency_us(ahead) if pulled else 0.0))
            if first and not pulled:
                lanes.signal(ahead)
            lanes.find_room(ahead)
            found.append(lanes.copy(ahead, self.shard_bytes * share, told=not pulled) + self.latency_us(ahead))
        return found

    def _summed(self, now: float, arrived: Sequence[Sequence[float]], sizes: Sequence[int]) -> float:
        """A kernel that sums, chunk by chunk, and lets the peers go on."""
        for arrivals, size in zip(arrived, sizes, strict=True):
            now = max([now, *arrivals]) + hbm_us(self.machine, (self.ranks + 1) * self.shard_bytes * size / sum(sizes))
        return now + self.flag_us

    def _scattered_whole(self, row: Row) -> float:
        problem, machine, ranks = self.problem, self.machine, self.ranks
        lane, pulled = _Lane(self), problem.op != "matmul_reduce_scatter"
        flags = self.flag_us
        stores = row.scatter == "stores"
        lane.now += flags if stores and pulled else 0.0
        kernels = ranks if isinstance(problem, ColumnProblem) else 1
        for _ in range(kernels):
            lane.multiply(self.vendor(self.own if kernels > 1 else self.rows))
        if not stores:
            padded = self._padded(3, ranks * self.shard_bytes) if not pulled else 0.0
            return lane.now + terms.whole_collective_us(machine, problem) + padded
        sent_us = self.store_us(self.shard_bytes)
        if pulled:
            loads = max(sent_us, (ranks - 1) * hbm_us(machine, self.shard_bytes))
            lane.now += flags + self.launch_us + self.latency_us(1) + loads + hbm_us(machine, 2 * self.shard_bytes)
            return lane.now + flags
        exchanged = sent_us + self.latency_us(1) + hbm_us(machine, (ranks + 1) * self.shard_bytes)
        few = problem.m * problem.n * problem.itemsize <= ONE_KERNEL_BYTES
        return lane.now + self.launch_us + exchanged + (0.0 if few else self.launch_us + 2 * flags)

    def _counted(self, row: Row, sizes: Sequence[int]) -> float:
        """One kernel that counts, or stores, its tiles: those for peers first, then the own ones."""
        problem, machine = self.problem, self.machine
        pulled = problem.op != "matmul_reduce_scatter"
        stores, count = row.scatter == "tiles", len(self.peers)
        lanes = _Lanes(self, len(sizes), one=stores)
        apart = problem.op == "matmul_all_to_all_columns"  # a kernel for each destination
        order = [(i, ahead) for i in range(len(sizes)) for ahead in self.peers]
        if apart:
            order = [(i, ahead) for ahead in self.peers for i in range(len(sizes))]
        groups = [(sizes[i], False) for i, _ in order]
        kernels = [groups[at : at + len(sizes)] for at in range(0, len(groups), len(sizes))] if apart and sizes else [groups]
        now, multiplied = 0.0, 0.0
        arrived: list[list[float]] = [[] for _ in sizes]
        landed: dict[int, float] = {}
        position, sending = 0, math.inf
        for number, own_too in [(n, not apart) for n in range(len(kernels))]:
            mine = kernels[number] + [(size, False) for size in (sizes if not pulled else [self.own])] * own_too
            cost = self.kernel(mine, sends=len(kernels[number]) if stores else 0)
            tile_us = cost.tile_us * self._pace(multiplied, cost.busy_us)
            multiplied += cost.busy_us
            begin, done, busy_until = now + self.launch_us, 0, 0.0
            for (size, _), tiles in zip(kernels[number], cost.tiles, strict=False):
                i, ahead = order[position]
                position += 1
                slower = self.slowed(cost, lanes.moved_gbps(self.shard_bytes * size / self.own)) if not stores else 1.0
                first = begin + _done(cost, done + 1) * tile_us
                done += tiles
                ends = _done(cost, done) * tile_us
                part = self.shard_bytes * size / self.own
                if stores:
                    rate = machine.stores.rate(cost.sms) * (machine.stores.tiles or 1.0)
                    stalled = machine.stores.stall * part / max(1, tiles) * min(cost.sms, sum(cost.tiles)) / (rate * 1e3)
                    rate = min(rate, self.link_gbps(ahead, 1))
                    link = ahead if machine.links.topology == "mesh" else 0
                    landed[link] = max(landed.get(link, 0.0), first + stalled) + part / (rate * 1e3)
                    busy_until += -(-tiles // cost.sms) * stalled if tiles >= cost.sms else stalled * tiles / cost.sms
                    arrived[i].append(max(landed[link], begin + ends + busy_until) + self.latency_us(ahead))
                elif row.scatter == "copies":
                    made = _stretched(begin, ends, lanes.last, slower, sending)
                    sending = min(sending, made + self.wake_us + 2 * self.flag_us + machine.copies.copy_us)
                    arrived[i] += self._sent_one(lanes, ahead, made, part, first=i == 0 and not pulled, pulled=pulled)
                else:
                    arrived[i].append(begin + ends + self.latency_us(ahead))
            whole = _waves(cost, sum(cost.tiles))
            slower = self.slowed(cost, lanes.moved_gbps(self.shard_bytes / max(1, len(sizes)))) if row.scatter == "copies" else 1.0
            now = _stretched(begin, whole * tile_us + busy_until, lanes.last if row.scatter == "copies" else 0.0, slower, sending)
            now = max(now, *landed.values()) if stores and landed else now
        if apart:
            lane = _Lane(self, now)
            lane.multiply(self.vendor(self.own))
            now = lane.now
        if row.scatter == "loads":
            return self._loaded(now, arrived, sizes)
        if not pulled:
            tiles = cost.tiles[len(groups) :]
            adding = [
                hbm_us(machine, count * self.shard_bytes * size / self.own / max(1, one) * min(one, cost.sms))
                for size, one in zip(sizes, tiles, strict=True)
            ]
            now += sum(us * max(1, -(-one // cost.sms)) for us, one in zip(adding, tiles, strict=True))
            left, late = sum(tiles), [0.0]
            for arrivals, us, one in zip(arrived, adding, tiles, strict=True):
                late.append(max(arrivals, default=0.0) + us + _behind(cost, left) * (tile_us + us))
                left -= one
            return max(max(now, *late, *landed.values()) + self.flag_us, lanes.end if not stores else 0.0)
        if stores:
            now = max(now, *landed.values())
            for i, ahead in order:
                lanes.wait(ahead, arrived[i][ahead - 1])
                lanes.copy_here(self.shard_bytes * sizes[i] / self.own)
        return max(now, lanes.released)

    def _sent_one(self, lanes: _Lanes, ahead: int, made: float, part: float, *, first: bool, pulled: bool) -> list[float]:
        lanes.wait(ahead, made + (self.latency_us(ahead) if pulled else 0.0))
        if first:
            lanes.signal(ahead)
        return [lanes.copy(ahead, part, told=not pulled) + self.latency_us(ahead)]

    def _loaded(self, now: float, arrived: Sequence[Sequence[float]], sizes: Sequence[int]) -> float:
        """A sum that loads what the peers have made, chunk by chunk."""
        now += self.launch_us
        for arrivals, size in zip(arrived, sizes, strict=True):
            part = self.shard_bytes * size / self.own
            loaded = self.store_us(part, at_once=True)
            now = max([now, *arrivals]) + max(loaded, hbm_us(self.machine, 2 * part))
        return now + self.flag_us

    def _pace(self, before_us: float, busy_us: float) -> float:
        """How many times as long matmuls take that come behind others."""
        paced = self.machine.gpu.paced_us
        return (paced(before_us + busy_us) - paced(before_us)) / busy_us if busy_us else 1.0

    # One kernel that multiplies and exchanges, and all-reduces

    def _everywhere(self, row: Row, chunks: int) -> float:
        problem, machine = self.problem, self.machine
        if row.kernels == "exchange":
            return self._exchanged(row.hops)
        lane = _Lane(self)
        whole = problem.m * problem.n * problem.itemsize
        added = hbm_us(machine, (2 + len(problem.addends)) * whole) + self.launch_us if problem.addends else 0.0
        if row.kernels == "whole":
            lane.multiply(self.vendor(self.rows))
            if row.scatter == "vendor":
                return lane.now + terms.whole_collective_us(machine, problem) + added
            few = whole * (self.ranks - 1) <= ONE_HOP_BYTES
            return lane.now + self.launch_us + self._exchange(1 if few else 2)
        scattered = dataclasses.replace(problem, op="matmul_reduce_scatter", addends=())
        call = _Call(scattered, machine)
        summed, copied = call._scatter(row, chunks)
        gathered_us = terms.collective_us(machine, "all_gather", call.shard_bytes, problem.world_size, problem.nodes)
        return max(summed + self.fork_us + gathered_us + self._padded(2, whole), copied)

    def _exchanged(self, hops: int) -> float:
        """Such a kernel: its tiles are the streamed ones."""
        from weft.perf import shapes

        problem, machine, gpu = self.problem, self.machine, self.machine.gpu
        if gpu.kernel_tiles:
            pieces = 1 if hops == 1 else 1 << (self.ranks - 1).bit_length()
            width = problem.n if hops == 1 else -(-problem.n // self.ranks)
            rows, cols = shapes.streamed_tile(problem, width, pieces, self.rows, gpu.sms)
            kernels = machine.kernels
            full_us = 2 * rows * cols / (machine.tflops(problem.dtype) * 1e6 / gpu.sms * kernels.streamed)
            tile = Tile(rows=rows, cols=cols, efficiency=kernels.streamed * min(1.0, full_us / kernels.row_us))
            cost = terms.gemm_cost(
                machine, rows=(self.rows,), n=self.columns, k=self.inner, dtype=problem.dtype, tiles=(tile,)
            )
            start_us = kernels.exchange_us
        else:
            cost, start_us = self.vendor(self.rows), 0.0
        return self.launch_us + start_us + gpu.paced_us(cost.busy_us) + self._exchange(hops)

    def _exchange(self, hops: int) -> float:
        """Stores to the peers, and the sum of what came, after the product is there."""
        machine, problem, ranks = self.machine, self.problem, self.ranks
        whole = problem.m * problem.n * problem.itemsize
        part = whole if problem.op == "matmul_all_reduce" and hops == 1 else whole / ranks
        stores_us = self.store_us(part) + self.latency_us(1)
        summed_us = hbm_us(machine, (ranks + 1 + len(problem.addends)) * part)
        if hops == 1:
            return stores_us + summed_us
        return 2 * stores_us + summed_us + hbm_us(machine, 2 * (ranks - 1) * part)

    # Lookups, and collectives alone

    def _lookup(self, row: Row, chunks: int) -> float:
        problem, machine, count = self.problem, self.machine, self.ranks - 1
        columns = max(problem.columns(rank) for rank in range(problem.world_size))
        look_us = hbm_us(machine, terms.gathered_bytes(problem, problem.m * columns, machine))
        written_us = hbm_us(machine, problem.m * columns * problem.itemsize)
        if row.kernels == "whole":
            exchange_us = terms.collective_us(
                machine, "all_to_all_columns", self.shard_bytes, problem.world_size, problem.nodes
            )
            return self.launch_us + look_us + written_us + exchange_us
        sizes = _parts(self.own, chunks)
        kernels_copy = machine.copies.strided == "kernel"
        lanes = _Lanes(self, 1, one=True)
        flags = count * self.flag_us
        if row.scatter == "tiles":
            rate = min(machine.stores.rate(machine.gpu.sms), self.link_gbps(1, 1)) * 1e3
            now, arrivals = flags + self.launch_us, []
            for ahead in self.peers:
                for size in sizes:
                    share, part = size / self.own / self.ranks, self.shard_bytes * size / self.own
                    now += max(look_us * share + machine.stores.stall * part / rate, part / rate) + 2 * self.latency_us(ahead)
                    arrivals.append((now + self.latency_us(ahead), part))
            now += (look_us + written_us) / self.ranks
            for arrival, part in arrivals:
                lanes.wait(1, arrival)
                lanes.copy_here(part, after=now if kernels_copy else 0.0)
            return max(now, lanes.end + flags)
        beside = kernels_copy and machine.slow_lookups
        rate = min(self.machine.kernels.lookup_copy_gbps, lanes.gbps(1)) if beside else lanes.gbps(1)
        hbm = machine.gpu.hbm_gbps
        slower = hbm / max(hbm - self.machine.kernels.lookup_copy_bytes * rate, hbm / (1 + self.machine.kernels.lookup_copy_bytes)) if beside else 1.0
        moving_us = self.shard_bytes / max(1, len(sizes)) / (rate * 1e3)
        slower = 1 + (slower - 1) * moving_us / (moving_us + machine.copies.copy_us + 2 * self.flag_us)
        now = begun = self.launch_us
        sent = self.fork_us
        arrivals = []
        for ahead in self.peers:
            for at, size in enumerate(sizes):
                share, part = size / self.own / self.ranks, self.shard_bytes * size / self.own
                now = _stretched(now, (look_us + written_us) * share, sent, slower, begun)
                made = now + (self.machine.kernels.lookup_copy_us if beside else 0.0)
                sent = max(sent + self.flag_us, made + self.flag_us + self.wake_us) + (self.flag_us if not at else 0.0)
                begun = sent if begun <= self.launch_us else begun
                sent += machine.copies.copy_us + part / (rate * 1e3) + self.flag_us
                arrivals.append((sent + self.latency_us(ahead), part))
        now = _stretched(now, (look_us + written_us) / self.ranks, sent, slower, begun)
        for arrival, part in arrivals:
            now = max(now, arrival) + self.flag_us + self.launch_us + terms.local_copy_us(machine, round(part))
        return max(now + flags, sent + self.fork_us)

    def _alone(self, row: Row, chunks: int) -> float:
        problem, machine = self.problem, self.machine
        assert isinstance(problem, CollectiveProblem)
        if row.kernels == "whole" or problem.world_size == 1:
            return terms.whole_collective_us(machine, problem)
        pulls, twice = row.gather == "pulls", problem.op == "all_reduce"
        straight = problem.reachable and not pulls and not problem.op == "reduce_scatter"
        parts = 1 if pulls and not twice else self.ranks if pulls else (1 if straight or not twice else 2) * (self.ranks - 1)
        turn = collectives.turns(problem, chunks, parts)
        sizes = _parts(self.own, -(-self.own // turn.length))
        if straight and not twice:
            sizes = [self.own]
        lanes = _Lanes(self, (1 + twice) * len(sizes), alone=True)
        flags, own_us = self.flag_us, self.launch_us + terms.local_copy_us(machine, self.own * problem.itemsize)
        out, sums = _Lane(self, 0.0 if problem.sums or pulls else own_us), _Lane(self, self.fork_us + self.launch_us)
        made: list[float] = []
        for index in range(len(sizes) + twice):
            size = (sizes[index] if index < len(sizes) else 0) * problem.itemsize
            asked = index + turn.slots < len(sizes) or index == len(sizes) - 1
            again = index >= turn.slots or index == 0
            arrivals = []
            if index < len(sizes) and pulls and not problem.sums:
                out.now += flags * again + self.launch_us + terms.local_copy_us(machine, size) + flags
                arrivals = [lanes.pulled(ahead, out.now, size, told=asked) for ahead in self.peers]
            elif index < len(sizes):
                for ahead in self.peers:
                    lanes.now_by(ahead, flags * again)
                    arrivals.append(lanes.copy(ahead, size) + self.latency_us(ahead))
            if problem.sums and index < len(sizes):
                summed = min(machine.gpu.hbm_gbps, problem.sms * machine.kernels.sm_gbps)
                sums.wait(*arrivals)
                sums.now += self.launch_us + (self.ranks + 1) * size / (summed * 1e3) + flags
                made.append(sums.now)
                sums.now += hbm_us(machine, 2 * size) if pulls else 0.0
            if twice and index:
                part = sizes[index - 1] * problem.itemsize
                back = []
                for ahead in self.peers:
                    if pulls or ahead == 1:
                        lanes.wait(ahead, made[index - 1])
                    back.append(lanes.copy(ahead, part, told=not pulls or asked) + self.latency_us(ahead))
                arrivals = back
                size = part
            if not pulls and not straight and (twice or not problem.sums) and (index or not twice):
                for arrival in arrivals:
                    out.wait(arrival)
                    out.now += self.launch_us + terms.local_copy_us(machine, size)
            elif straight and arrivals:
                out.wait(*arrivals)
        out.now += own_us if pulls and not problem.sums else 0.0
        return max(out.now, sums.now if problem.sums else 0.0, lanes.end)

    def _across(self, chunks: int) -> float:
        """Between nodes: slices cross, beside what multiplies or looks them up, and what a node does with its own."""
        problem, machine = self.problem, self.machine
        assert machine.network is not None, "the machine of several nodes has a network"
        nodes = len(problem.nodes)
        sent = self.shard_bytes * (problem.world_size - self.ranks if problem.op in _EXCHANGES else nodes - 1)
        trips = 2 if problem.op == "matmul_all_reduce" else 1
        slice_us = machine.network.step_us + machine.network.latency_us + trips * sent / chunks / (machine.network.gbps * 1e3)
        if problem.op in LOOKUP_OPS:
            columns = max(problem.columns(rank) for rank in range(problem.world_size))
            whole = terms.gathered_bytes(problem, problem.m * columns, machine) + problem.m * columns * problem.itemsize
            piece_us = hbm_us(machine, whole / chunks)
        else:
            piece_us = self.vendor(-(-self.rows // chunks)).busy_us
        within = terms.collective_us(machine, "all_gather", self.shard_bytes, self.ranks)
        compute = network = self.fork_us
        for _ in range(chunks):
            if problem.op in _GATHERED:
                network += slice_us
                compute = max(compute, network) + self.launch_us + piece_us
            else:
                compute += self.launch_us + piece_us
                network = max(network, compute + self.flag_us) + slice_us
        return max(compute, network) + within + self.flag_us


class _Brought(NamedTuple):
    """at: by chunk, when each peer's piece is there. own: by chunk, when the own one is. end: when all lanes are back. gbps:
    what copies move meanwhile through a rank's memory."""

    at: list[list[float]]
    own: list[float]
    end: float
    gbps: float


NOTHING = _Brought([], [], 0.0, 0.0)


class _Lane:
    """The compute lane of a rank."""

    def __init__(self, call: _Call, now: float = 0.0) -> None:
        self.call, self.now = call, now
        self._multiplied = 0.0
        self.began = self.tile_us = 0.0
        """Of the last matmul."""

    def wait(self, first: float, *later: float) -> None:
        """For flags one after the other: the first costs an operation, in which the others are looked at, too."""
        self.now = max(max(self.now, first) + self.call.flag_us, *later, 0.0)

    def multiply(self, cost: GemmCost, beside: _Brought = NOTHING, staged_us: float = 0.0) -> None:
        """A vendor's matmul, beside copies."""
        busy_us = cost.busy_us * self.call._pace(self._multiplied, cost.busy_us)
        self._multiplied += cost.busy_us
        if busy_us:
            self.began = self.now + self.call.launch_us + staged_us
            self.now = _stretched(self.began, busy_us, beside.end, self.call.slowed(cost, beside.gbps))
            self.tile_us = cost.tile_us * busy_us / cost.busy_us


class _Lanes:
    """The copy lanes of a rank: one, or one for each peer. rounds: how often they go to each."""

    def __init__(self, call: _Call, rounds: int, *, alone: bool = False, one: bool = False) -> None:
        self.call, self.rounds, self.alone = call, rounds, alone
        self._free = [call.fork_us] * (call.ranks if call.machine.fans_out and not one else 1)
        self._filled: list[tuple[float, float, float]] = []

    def _at(self, ahead: int) -> int:
        return ahead % len(self._free)

    def now(self, ahead: int) -> float:
        return self._free[self._at(ahead)]

    @property
    def last(self) -> float:
        return max(self._free)

    @property
    def end(self) -> float:
        return self.last + self.call.fork_us

    @property
    def released(self) -> float:
        """When the peers have been told, too, that all was read."""
        return self.last + self.call.flag_us * (1 if len(self._free) > 1 else self.call.ranks - 1) + self.call.fork_us

    def gbps(self, ahead: int) -> float:
        return self.call.copy_gbps(ahead, self.rounds, alone=self.alone, one=len(self._free) == 1)

    def moved_gbps(self, size: float) -> float:
        """Out and in, while copies of this size follow each other."""
        lanes = len(self._free) - 1 or 1
        us = self.call.machine.copies.copy_us + size / (self.gbps(1) * 1e3) + self.call.flag_us
        return 2e-3 * lanes * size / us

    def beside(self, share: float) -> _Brought:
        """The copies that are under way now."""
        return _Brought([], [], self.last, self.moved_gbps(self.call.shard_bytes * share))

    def wait(self, ahead: int, until: float) -> None:
        at, call = self._at(ahead), self.call
        self._free[at] = max(self._free[at], until + call.wake_us if until > self._free[at] else 0.0) + call.flag_us

    def signal(self, ahead: int) -> None:
        self._free[self._at(ahead)] += self.call.flag_us

    def fill(self, lane: _Lane) -> None:
        """The last matmul of a lane keeps SMs until its tiles end."""
        self._filled.append((lane.began, lane.tile_us, lane.now))

    def find_room(self, ahead: int) -> None:
        """Until tiles of the matmul that runs end, or all of it."""
        at = self._at(ahead)
        for began, tile_us, ended in self._filled:
            if began <= self._free[at] < ended:
                tiles = math.floor((self._free[at] - began) / tile_us) + 1
                self._free[at] = min(ended, began + tiles * tile_us)

    def signal_all(self, count: int) -> None:
        """One after the other on a single lane."""
        times = count if len(self._free) == 1 else 1
        self._free = [now + times * self.call.flag_us for now in self._free]

    def now_by(self, ahead: int, us: float) -> None:
        self._free[self._at(ahead)] += us

    def pulled(self, ahead: int, ready: float, size: float, *, told: bool) -> float:
        """A copy from a peer, once that has said so."""
        self.wait(ahead, ready + self.call.latency_us(ahead))
        return self.copy(ahead, size, told=told)

    def copy(self, ahead: int, size: float, *, told: bool = True) -> float:
        """To a peer, or from it. told: with its signal. Returns when that is given."""
        at = self._at(ahead)
        self._free[at] += self.call.machine.copies.copy_us + size / (self.gbps(ahead) * 1e3) + self.call.flag_us * told
        return self._free[at]

    def copy_here(self, size: float, *, after: float = 0.0, told: bool = False) -> float:
        """Within the rank."""
        machine = self.call.machine
        fixed_us = machine.launch_us if machine.copies.strided == "kernel" else machine.copies.copy_us
        self._free[0] = max(self._free[0], after) + fixed_us + hbm_us(machine, 2 * size) + machine.flag_us * told
        return self._free[0]


def _waves(cost: GemmCost, last: int) -> float:
    """How many tiles one behind the other an SM has of a kernel's last ones. Halves go beside the last whole ones where there is
    room."""
    whole = max(0, last - cost.halves)
    waves = -(-whole // cost.sms)
    halves = min(last, cost.halves)
    return waves + (cost.half_tile if 2 * halves > waves * cost.sms - whole else 0.0)


def _done(cost: GemmCost, first: int) -> float:
    """As many, until a kernel's first ones are done."""
    whole = sum(cost.tiles) - cost.halves
    return -(-min(first, whole) // cost.sms) + (cost.half_tile if first > whole else 0.0)


def _behind(cost: GemmCost, last: int) -> float:
    """As many, behind the first ones of its last tiles, which wait with their SMs."""
    halves = min(last, cost.halves)
    waves = -(-(last + halves) // cost.sms) - 1
    return max(0.0, waves - (1 - cost.half_tile if halves else 0.0)) if waves else 0.0


def _stretched(begin: float, work: float, until: float, slower: float, since: float = 0.0) -> float:
    """When work ends that takes so many times as long between two times."""
    before = min(work, max(0.0, since - begin))
    begin, work = begin + before, work - before
    slow = max(0.0, until - begin) / slower
    return begin + work * slower if work <= slow else max(begin, until) + work - slow


def _parts(extent: int, count: int) -> list[int]:
    """Lengths of an extent cut into so many, without the empty ones."""
    return [high - low for low, high in split(extent, count) if high > low]
