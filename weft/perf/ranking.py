"""The ranking estimates the time of every schedule of a problem by three recurrences over cost terms. It takes milliseconds.

Contract: `estimates` is a pure function of a problem, a machine and names of schedules. It builds no schedule and simulates
nothing. It has no constants of its own: the costs of matmuls, copies and flags come from `weft.perf.terms`, as in the event
engine (weft.perf.engine), which adds ordering and contention. A test compares the two over hundreds of problems.

`ROWS` has one row for each family of schedules: its cut of the matmul, and its transport of the data. Three recurrences cover
the families that overlap a matmul with communication inside a node:

    gather       t_i = max(t_{i-1}, start + i c + latency) + flags + kappa g_i          pieces arrive, and are multiplied
    scatter      s_i = max(s_{i-1}, u_i + flag + wake) + c                              pieces are computed (u_i), and sent
    one kernel   max(launch + ceil(sum T / S) tau, arrival_i + ceil(T_i.. / S) tau)     tiles wait for pieces

    i            piece 1 .. n, in the order of arrival or computation; t_0 and s_0 are when the lane is ready
    c, g_i       the time to transfer a piece, and the time of the work on it
    kappa        how many times as long work takes concurrently with copies
    flag, wake   the time of a flag operation; the time from raising a flag until a lane that waited for it goes on
    T_i, S, tau  the tiles of a piece, the number of SMs, and the time of a tile

A kernel that counts or stores its tiles is the reverse of the third: piece i is ready after the waves of its own tiles and of
all tiles before them. Sequential programs, lookups, kernels that multiply and exchange at once, and slices between nodes have
short formulas of their own, below. All of them use the lanes of weft.perf.lanes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from weft.core.errors import require
from weft.core.machine import Machine
from weft.core.problem import (
    COLLECTIVE_OPS,
    COLUMN_OPS,
    EXCHANGES,
    GATHERS,
    LOOKUP_OPS,
    CollectiveProblem,
    ColumnProblem,
    Problem,
)
from weft.perf.lanes import ComputeLane, CopyLanes, CopyLoad, Rank, end_under_load, lengths, waves, waves_before, waves_behind
from weft.perf.shapes import Arriving
from weft.perf.terms import (
    GemmCost,
    adding_us,
    collective_us,
    gathered_bytes,
    hbm_us,
    local_copy_us,
    padded_us,
    staged_us,
    stalled_us,
    streamed_cost,
    whole_collective_us,
)
from weft.schedules import collectives, parse, specs
from weft.schedules.builder import aligned_slices
from weft.schedules.matmul_all_reduce import ONE_HOP_BYTES
from weft.schedules.matmul_reduce_scatter import ONE_KERNEL_BYTES

MARGIN = 0.01
"""An overlapping schedule must be estimated to be faster than sequential by more than 1%, as in an autotuning run."""
Transport = Literal["none", "nccl", "stores", "copies", "ring", "blocks", "tiles", "loads", "pulls"]


class Row(NamedTuple):
    """A Row holds the properties of a family of schedules that its time depends on.

    kernels: "whole" is one matmul. "piece", "step" and "slice" are one matmul for each piece, for all pieces of a step, or for
        a slice of K or N. "one" is one kernel whose tiles wait, count or store. "exchange" is one kernel that also
        communicates. "none" is no matmul.
    gather: what brings the data before the matmul.
    scatter: what sends the data after the matmul.

        nccl     NCCL                                 blocks   a few blocks that store while a kernel multiplies
        stores   a kernel that stores to all peers    tiles    the tiles of the matmul, which store their results
        copies   copy engines, to every peer          loads    the receiver's kernel, which loads what it adds up
        ring     copy engines, to the next rank       pulls    copy engines of the receiver

    joined: the rank's own shard is cut like the others. In flag_gated_2d, K is cut.
    hops: the number of hops of an "exchange" kernel.
    one_lane: all copies share one lane.
    """

    kernels: Literal["whole", "piece", "step", "slice", "one", "exchange", "none"]
    gather: Transport = "none"
    scatter: Transport = "none"
    joined: bool = False
    hops: int = 0
    one_lane: bool = False


ROWS: dict[str, Row] = {
    "sequential": Row("whole", "nccl", "nccl"),
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
WITHIN_A_NODE = {"matmul_all_to_all": "track_and_trigger", "matmul_all_reduce": "two_shot"}
"""The families whose rows node_slices uses on a single node, by operator. Other operators use its own row."""


def ranked(problem: Problem, machine: Machine, only: str | None = None) -> dict[str, float]:
    """Return the estimates of all candidates in us, by name, fastest first. only: candidates of this family.

    On few ranks some families are the same program. Candidates with the same number of chunks and equal estimates are listed
    once, by the simplest name.

    Raises ValueError if the machine has fewer GPUs than the problem, or no rate for its dtype.
    """
    named: dict[tuple[float, int], str] = {}
    for spec, us in estimates(problem, machine, specs(problem, only)).items():
        named.setdefault((round(us, 6), parse(spec)[1] or 1), spec)
    return {spec: us for (us, _), spec in sorted(named.items())}


def best(problem: Problem, machine: Machine, count: int) -> tuple[str, ...]:
    """Return "sequential" and the `count` fastest other schedules. Return only "sequential" if there is nothing to overlap."""
    if problem.world_size == 1 or not problem.m or not problem.n:
        return ("sequential",)
    others = [spec for spec in ranked(problem, machine) if spec != "sequential"]
    return ("sequential", *others[:count])


def heuristic(problem: Problem, machine: Machine) -> str:
    """Return the schedule that is ranked first, as `schedule=` takes it, without a simulation.

    It is "sequential" if there is nothing to overlap, or if no other schedule is estimated to be more than 1% faster.

    Raises ValueError if the machine has fewer GPUs than the problem, or no rate for its dtype.
    """
    known = "use a weft.Machine; weft.core.machine.load gives one by its name, once for many problems"
    require("machine", machine, Machine, known)
    if problem.world_size == 1 or not problem.m or not problem.n:
        estimates(problem, machine, ())
        return "sequential"
    return choice(ranked(problem, machine))


def choice(us: Mapping[str, float]) -> str:
    """Return the fastest schedule, or "sequential" if none is faster by more than MARGIN. us: the times, by schedule."""
    first = min(us, key=us.__getitem__)
    return first if us[first] < (1 - MARGIN) * us["sequential"] else "sequential"


def estimates(problem: Problem, machine: Machine, named: Iterable[str]) -> dict[str, float]:
    """Return the estimates in us of these schedules, named as `schedule=` takes them. Raises ValueError as `ranked` does."""
    machine.require_for(problem)
    if problem.op not in COLLECTIVE_OPS:
        machine.tflops(problem.rate_name)
    if not problem.m or not problem.n:
        return dict.fromkeys(named, 0.0)
    rank = Rank(problem, machine)
    return {spec: _estimate_us(rank, spec) for spec in named}


def _estimate_us(rank: Rank, spec: str) -> float:
    problem = rank.problem
    (name, count), op = parse(spec), problem.op
    row, chunks = ROWS[name], 1 if name == "shard_p2p" else count or problem.world_size
    if name == "node_slices":
        if problem.nodes:
            return _across_nodes_us(rank, chunks)
        row = ROWS[WITHIN_A_NODE.get(op, name)]
    if row.kernels == "exchange":
        return _exchanging_kernel_us(rank, row.hops)
    if op in COLLECTIVE_OPS:
        return _collective_us(rank, row, chunks)
    if op in LOOKUP_OPS:
        return _lookup_us(rank, row, chunks)
    if op == "matmul_all_reduce":
        return _all_reduce_us(rank, row, chunks)
    if op in GATHERS:
        return _sequential_gather_us(rank, row) if row.kernels == "whole" else _overlapped_gather_us(rank, row, chunks)
    return _sequential_scatter_us(rank, row) if row.kernels == "whole" else max(_overlapped_scatter_us(rank, row, chunks))


# Gathers: pieces arrive and are multiplied


class _IncomingPieces:
    """_IncomingPieces computes when the pieces of all peers arrive, chunk by chunk. sizes: the chunks' shares of a shard."""

    def __init__(self, rank: Rank, row: Row, sizes: Sequence[int], *, own_too: bool = False) -> None:
        self.rank, self.row, self.sizes, self._own_too = rank, row, sizes, own_too
        ring = row.gather == "ring"
        self.lanes = CopyLanes(rank, 1 if ring else len(sizes), one=row.one_lane or ring, work_us=rank.whole_us)
        self._whole = sum(sizes) or 1
        self._blocks = rank.fork_us + rank.launch_us + rank.flag_us
        if row.gather == "copies":
            self.lanes.flags(rank.ranks - 1)

    def part(self, size: int) -> float:
        """Return the bytes of a piece."""
        return self.rank.shard_bytes * size / self._whole

    def chunk(self, size: int) -> list[float]:
        """Return when the pieces of the next chunk arrive: the rank's own, if it is copied too, then those of the peers."""
        part, rank = self.part(size), self.rank
        if self.row.gather == "copies":
            own = [self.lanes.copy_here(part, signal=True)] if self._own_too else []
            return own + [self.lanes.copy(ahead, part) for ahead in rank.peers]
        found, stores = [], rank.machine.stores
        for ahead in rank.peers:
            self._blocks += part / (min(stores.rate(stores.sms), rank.link_gbps(ahead)) * 1e3)
            found.append(self._blocks + rank.latency_us(ahead))
        return found

    def all(self) -> list[list[float]]:
        """Return the arrival times of all pieces, by chunk."""
        return self._around_ring() if self.row.gather == "ring" else [self.chunk(size) for size in self.sizes]

    def _around_ring(self) -> list[list[float]]:
        """Return the arrival times around a ring, in which each rank forwards what it receives."""
        rank, found = self.rank, [list[float]() for _ in self.sizes]
        self.lanes.flags()
        before = [0.0 for _ in self.sizes]
        for hop in rank.peers:
            for index, size in enumerate(self.sizes):
                if hop > 1:
                    self.lanes.wait(1, before[index])
                found[index].append(self.lanes.copy(1, self.part(size)))
            before = [arrivals[-1] for arrivals in found]
        if len(rank.peers) > 1:
            self.lanes.flags()
        return found

    @property
    def load(self) -> CopyLoad:
        """The load of all these copies on concurrent kernels."""
        engines = self.row.gather in ("copies", "ring") and self.sizes
        return self.lanes.load(self.part(self.sizes[0])) if engines else CopyLoad()

    @property
    def end(self) -> float:
        return self._blocks if self.row.gather == "blocks" else self.lanes.end


def _overlapped_gather_us(rank: Rank, row: Row, chunks: int) -> float:
    columns = rank.problem.op == "all_to_all_columns_matmul"  # all ranks' columns of a chunk's rows are multiplied together
    lane = ComputeLane(rank)
    if columns:
        lane.launch(local_copy_us(rank.machine, rank.shard_bytes))
    sizes = lengths(rank.inner if row.kernels == "slice" else rank.own, chunks)
    if row.kernels == "one":
        if row.joined:
            sizes = [high - low for low, high in aligned_slices(rank.inner, chunks)]
        incoming = _IncomingPieces(rank, row, sizes)
        lane.now = _waiting_kernel_us(rank, row, incoming, lane.now + rank.launch_us)
    else:
        incoming = _IncomingPieces(rank, row, sizes, own_too=row.joined and row.kernels == "step" and not columns)
        _multiply_on_arrival(lane, incoming, columns=columns)
    lane.now += _copy_to_caller_us(rank, rank.ranks) + rank.flag_us
    return max(lane.now, incoming.end)


def _multiply_on_arrival(lane: ComputeLane, incoming: _IncomingPieces, *, columns: bool) -> None:
    """Run a cuBLAS matmul for each piece or step when its data has arrived."""
    rank, row, sizes = lane.rank, incoming.row, incoming.sizes
    by_kernels = (columns or row.kernels == "slice") and rank.machine.copies.strided == "kernel"
    arrivals = [] if by_kernels else incoming.all()
    load = incoming.load
    if not row.joined:
        lane.multiply(rank.library_gemm(rank.own), load)
    for index, size in enumerate(sizes):
        came = incoming.chunk(size) if by_kernels else arrivals[index]
        if by_kernels:  # copies run concurrently until the last chunk has arrived
            load = incoming.lanes.load(incoming.part(size), math.inf if index < len(sizes) - 1 else None)
        if row.kernels == "piece":
            for arrival in came:
                lane.wait(arrival)
                lane.multiply(rank.library_gemm(rank.own if len(sizes) == 1 else size), load)
            continue
        lane.wait(*came)
        if columns:
            lane.multiply(rank.library_gemm(size), load)
        else:
            cost, staged = _step(rank, row, size, index, len(sizes), gathers=True)
            lane.multiply(cost, load, staged)
        if by_kernels:
            incoming.lanes.share_sms(lane)
    if row.kernels == "slice":
        lane.launch(hbm_us(rank.machine, rank.rows * rank.columns * (4 + rank.problem.itemsize)))


def _step(rank: Rank, row: Row, size: int, index: int, count: int, *, gathers: bool) -> tuple[GemmCost, float]:
    """Return the cost of the matmul of step `index` of `count`, and the time of the copies that stage its data."""
    row_bytes = rank.problem.row_bytes
    if row.kernels == "slice" and gathers:
        whole, sums = rank.rows * row_bytes(size), 2 if index else 1
        staged = staged_us(rank.machine, rows=2, row_bytes=whole, outs=1, out_bytes=0.0)
        return rank.library_gemm(rank.rows, inner=size, sums=sums), staged
    if row.kernels == "slice":
        return rank.library_gemm(rank.rows, columns=size), 0.0
    pieces = rank.ranks if row.joined else rank.ranks - 1
    runs = pieces if count > 1 else 1 if row.joined else min(2, pieces)
    a, out = pieces * size * row_bytes(rank.inner), pieces * size * rank.columns * rank.problem.itemsize
    # Gathered pieces are stored by step, so the pieces of a step are contiguous. With a single step, the rank's own shard is
    # left out, and splits the rows in two on most ranks.
    rows = runs if not gathers else 1 if row.joined or count > 1 else min(2, pieces)
    return rank.library_gemm(pieces * size), staged_us(rank.machine, rows=rows, row_bytes=a, outs=runs, out_bytes=out)


def _sequential_gather_us(rank: Rank, row: Row) -> float:
    machine, problem, lane = rank.machine, rank.problem, ComputeLane(rank)
    if row.gather == "nccl":
        lane.now += whole_collective_us(machine, problem)
        if problem.op == "all_gather_matmul":
            lane.now += padded_us(machine, "all_gather", problem, rank.ranks * rank.shard_bytes)
        if problem.op == "all_to_all_columns_matmul":
            lane.now += local_copy_us(machine, rank.ranks * rank.shard_bytes)
        lane.multiply(rank.library_gemm(rank.rows))
        return lane.now + _copy_to_caller_us(rank, 1)
    lane.wait(0.0)
    lane.launch(local_copy_us(machine, rank.shard_bytes) + rank.stores_us(rank.shard_bytes) + rank.latency_us())
    lane.wait(0.0)
    lane.multiply(rank.library_gemm(rank.rows))
    return lane.now + _copy_to_caller_us(rank, rank.ranks) + rank.flag_us


def _copy_to_caller_us(rank: Rank, copies: int) -> float:
    """Return the time to copy the gathered tensor to the caller, if the caller asked for it."""
    if not rank.problem.return_gathered:
        return 0.0
    return copies * rank.launch_us + local_copy_us(rank.machine, rank.ranks * rank.shard_bytes)


def _waiting_kernel_us(rank: Rank, row: Row, incoming: _IncomingPieces, begin: float) -> float:
    """Return when a single kernel ends whose tiles wait for arriving data."""
    machine, arrivals, sizes = rank.machine, incoming.all(), incoming.sizes
    sms = machine.gpu.sms - (machine.stores.sms if row.gather == "blocks" else 0)
    whole = (rank.inner,)
    if rank.problem.op == "all_to_all_columns_matmul":
        cost = rank.kernel([Arriving(size, rank.columns, True, whole) for size in sizes], sms)
        ready = [max(came, default=0.0) for came in arrivals]
    elif row.joined:  # K is cut into slices, and each slice holds the rows of all ranks
        ends = tuple(sum(sizes[: index + 1]) for index in range(len(sizes)))
        own, others = Arriving(rank.own, rank.columns, False, whole), Arriving(rank.own, rank.columns, True, ends)
        cost = rank.kernel([own, *(others for _ in rank.peers)], sms)
        tile_us = cost.tile_us * rank.pace(0.0, cost.busy_us)
        # A tile need not wait for all its slices. It begins so early that it needs each slice just when that has arrived.
        done = [tile_us * (end - size) / max(1, rank.inner) for end, size in zip(ends, sizes, strict=True)]
        ready = [0.0, *(max(came[at] - us for came, us in zip(arrivals, done, strict=True)) for at in range(len(rank.peers)))]
    else:
        order = [(index, at) for index in range(len(sizes)) for at in range(len(rank.peers))]
        if row.gather == "ring":
            order.sort(key=lambda piece: (piece[1], piece[0]))
        own = Arriving(rank.own, rank.columns, False, whole)
        cost = rank.kernel([own, *(Arriving(sizes[index], rank.columns, True, whole) for index, _ in order)], sms)
        ready = [0.0, *(arrivals[index][at] for index, at in order)]
    load, pace = incoming.load, rank.pace(0.0, cost.busy_us)
    slower, left, end = rank.slowed(cost, load.gbps), sum(cost.tiles), begin
    for tiles, opens in zip(cost.tiles, ready, strict=True):
        end = max(end, end_under_load(max(begin, opens), waves(cost, left) * cost.tile_us * pace, load, slower))
        left -= tiles
    return end


# Scatters: pieces are computed, and sent, or pulled by their owners


def _overlapped_scatter_us(rank: Rank, row: Row, chunks: int) -> tuple[float, float]:
    """Return when the compute lane ends, and when the copy lanes end."""
    if row.kernels == "one":
        return _tile_kernels_us(rank, row, lengths(rank.own, chunks))
    sums = rank.problem.op == "matmul_reduce_scatter"
    sizes = lengths(rank.columns if row.kernels == "slice" else rank.own, chunks)
    lanes, lane = CopyLanes(rank, len(sizes), one=row.one_lane, work_us=rank.whole_us), ComputeLane(rank)
    if not sums:
        lane.wait(0.0)
    shares = [size / sum(sizes) for size in sizes]
    by_kernels = row.kernels == "slice" and rank.machine.copies.strided == "kernel"
    made, arrived = list[list[float]](), list[list[float]]()
    for index, (size, share) in enumerate(zip(sizes, shares, strict=True)):
        load = lanes.load(rank.shard_bytes * share, math.inf if by_kernels and index else None)
        if row.kernels == "piece":
            ready = []
            for _ in rank.peers:
                lane.multiply(rank.library_gemm(rank.own if len(sizes) == 1 else size), load)
                lane.now += rank.flag_us
                ready.append(lane.now)
        else:
            cost, staged = _step(rank, row, size, index, len(sizes), gathers=False)
            lane.multiply(cost, load, staged)
            if by_kernels:
                lanes.share_sms(lane)
            lane.now += rank.flag_us
            ready = [lane.now for _ in rank.peers]
        made.append(ready)
        if not by_kernels:
            arrived.append(_send(rank, lanes, ready, share, first=index == 0, each=row.kernels == "piece"))
    if by_kernels:  # these copies need SMs, so the times of all kernels had to be known first
        arrived = [_send(rank, lanes, ready, shares[i], first=i == 0, each=False) for i, ready in enumerate(made)]
    if not row.joined:
        lane.multiply(rank.library_gemm(rank.own), lanes.load(rank.shard_bytes / max(1, len(sizes))))
    if not sums:
        return lane.now, _signal_all_read(rank, lanes)
    lane.launch(0.0)
    for came, share in zip(arrived, shares, strict=True):
        lane.now = max([lane.now, *came]) + hbm_us(rank.machine, (rank.ranks + 1) * rank.shard_bytes * share)
    return lane.now + rank.flag_us, lanes.end


def _send(rank: Rank, lanes: CopyLanes, ready: Sequence[float], share: float, *, first: bool, each: bool) -> list[float]:
    """Return when each peer has received its piece. each: every piece has its own flag, not every step."""
    found, pulled = [], rank.problem.op != "matmul_reduce_scatter"
    for ahead, made in zip(rank.peers, ready, strict=True):
        if each or pulled or ahead == 1 or rank.machine.fans_out:
            lanes.wait(ahead, made + rank.latency_us(ahead) * pulled)
        if first and not pulled:
            lanes.flags(1, ahead)
        found.append(lanes.copy(ahead, rank.shard_bytes * share, signal=not pulled))
    return found


def _signal_all_read(rank: Rank, lanes: CopyLanes) -> float:
    """Return when the peers have received the signal that everything was read."""
    lanes.flags(rank.ranks - 1)
    return lanes.end


def _sequential_scatter_us(rank: Rank, row: Row) -> float:
    problem, machine, lane = rank.problem, rank.machine, ComputeLane(rank)
    pulled, columns = problem.op != "matmul_reduce_scatter", isinstance(problem, ColumnProblem)
    if row.scatter == "stores" and pulled:
        lane.wait(0.0)
    for _ in range(rank.ranks if columns else 1):  # one kernel for each destination
        lane.multiply(rank.library_gemm(rank.own if columns else rank.rows))
    whole = rank.ranks * rank.shard_bytes
    if row.scatter == "nccl":
        padded = 0.0 if pulled else padded_us(machine, "reduce_scatter", problem, whole)
        return lane.now + whole_collective_us(machine, problem) + padded
    stores_us, own_us = rank.stores_us(rank.shard_bytes), hbm_us(machine, rank.shard_bytes)
    if pulled:
        lane.wait(0.0)
        lane.launch(rank.latency_us() + max(stores_us, (rank.ranks - 1) * own_us) + 2 * own_us)
        return lane.now + rank.flag_us
    few = problem.m * problem.n * problem.itemsize <= ONE_KERNEL_BYTES
    if not few:
        lane.wait(0.0)
        lane.launch(rank.flag_us)
    lane.launch(stores_us + rank.latency_us() + (rank.ranks + 1) * own_us)
    return lane.now


def _tile_kernels_us(rank: Rank, row: Row, sizes: Sequence[int]) -> tuple[float, float]:
    """Return when the lanes end if a kernel counts its tiles or stores them at their owner, the rank's own tiles last."""
    sums, columns = rank.problem.op == "matmul_reduce_scatter", rank.problem.op == "matmul_all_to_all_columns"
    tile_kernels = _TileKernels(rank, row, sizes)
    order = [(index, ahead) for index in range(len(sizes)) for ahead in rank.peers]
    if columns:  # one kernel for each destination, and one for the rank's own rows
        order.sort(key=lambda piece: (piece[1], piece[0]))
        for ahead in rank.peers:
            tile_kernels.kernel([piece for piece in order if piece[1] == ahead], ())
        tile_kernels.lane.multiply(rank.library_gemm(rank.own))
    else:
        cost, tile_us = tile_kernels.kernel(order, sizes if sums else (rank.own,))
    lane, lanes = tile_kernels.lane, tile_kernels.lanes
    if row.scatter == "loads":
        return tile_kernels.add_loaded_pieces(), 0.0
    if sums:
        return tile_kernels.add_arrived_pieces(cost, tile_us), lanes.end if row.scatter == "copies" else 0.0
    if row.scatter == "tiles":
        for piece in order:
            lanes.wait(piece[1], tile_kernels.arrived[piece])
            lanes.copy_here(tile_kernels.part(piece[0]))
    return lane.now, _signal_all_read(rank, lanes)


class _TileKernels:
    """_TileKernels runs kernels that count or store their tiles, one after the other.

    arrived: when this rank has received a piece, by chunk and peer. All ranks do the same at the same time, so this is when
        the peer has received the piece that this rank sent.
    """

    def __init__(self, rank: Rank, row: Row, sizes: Sequence[int]) -> None:
        self.rank, self.row, self.sizes = rank, row, sizes
        self.lane = ComputeLane(rank)
        self.lanes = CopyLanes(rank, len(sizes), one=row.scatter == "tiles", work_us=rank.whole_us)
        self.arrived: dict[tuple[int, int], float] = {}
        self._landed: dict[int, float] = {}
        self._since, self._multiplied_us = math.inf, 0.0

    def part(self, index: int) -> float:
        """Return the bytes of a piece."""
        return self.rank.shard_bytes * self.sizes[index] / self.rank.own

    def kernel(self, pieces: Sequence[tuple[int, int]], own: Sequence[int]) -> tuple[GemmCost, float]:
        """Run a kernel for `pieces` (chunk, peer) and `own` rows of the own shard. Return its cost and the time of a tile."""
        rank, stores = self.rank, self.row.scatter == "tiles"
        arriving = [Arriving(self.sizes[index], rank.columns, False, (rank.inner,), stores) for index, _ in pieces]
        cost = rank.kernel([*arriving, *(Arriving(rows, rank.columns, False, (rank.inner,)) for rows in own)], counts=True)
        pace = rank.pace(self._multiplied_us, cost.busy_us)
        self._multiplied_us += cost.busy_us
        begin, tile_us, done, stalled = self.lane.now + rank.launch_us, cost.tile_us * pace, 0, 0.0
        slower = rank.slowed(cost, self._load.gbps)
        for piece, tiles in zip(pieces, cost.tiles, strict=False):
            first = begin + waves_before(cost, done + 1) * tile_us
            done += tiles
            ends_us = waves_before(cost, done) * tile_us
            if stores:
                stalled += self._store(piece, cost, tiles, first, begin + ends_us + stalled)
            elif self.row.scatter == "copies":
                self._send(piece, end_under_load(begin, ends_us, self._load, slower))
            else:
                self.arrived[piece] = begin + ends_us + rank.latency_us(piece[1])
        work_us = waves(cost, sum(cost.tiles)) * tile_us + stalled
        self.lane.now = max(end_under_load(begin, work_us, self._load, slower), *self._landed.values(), 0.0)
        return cost, tile_us

    @property
    def _load(self) -> CopyLoad:
        if self.row.scatter != "copies" or not self.sizes:
            return CopyLoad()
        return self.lanes.load(self.part(0), since=self._since)

    def _store(self, piece: tuple[int, int], cost: GemmCost, tiles: int, first: float, ends: float) -> float:
        """Store the tiles of a piece at the peer from the first one on. Return by how much the stores delay the kernel."""
        (index, ahead), machine = piece, self.rank.machine
        stall = stalled_us(machine, self.part(index), tiles, min(cost.sms, sum(cost.tiles)))
        gbps = min(machine.stores.rate(cost.sms) * (machine.stores.tiles or 1.0), self.rank.link_gbps(ahead))
        link = ahead if machine.links.topology == "mesh" else 0
        self._landed[link] = max(self._landed.get(link, 0.0), first + stall) + self.part(index) / (gbps * 1e3)
        waiting = stall * max(tiles / cost.sms, -(-tiles // cost.sms) * (tiles >= cost.sms))
        self.arrived[piece] = max(self._landed[link], ends + waiting) + self.rank.latency_us(ahead)
        return waiting

    def _send(self, piece: tuple[int, int], made: float) -> None:
        """Copy a piece once all its tiles are counted. The copy is this rank's, or the owner pulls it."""
        (index, ahead), rank = piece, self.rank
        pulled = rank.problem.op != "matmul_reduce_scatter"
        self.lanes.wait(ahead, made + rank.latency_us(ahead) * pulled)
        if index == 0 and not pulled:
            self.lanes.flags(1, ahead)
        self._since = min(self._since, made + rank.wake_us + 2 * rank.flag_us + rank.machine.copies.copy_us)
        self.arrived[piece] = self.lanes.copy(ahead, self.part(index), signal=not pulled)

    def _chunk_arrival(self, index: int) -> float:
        """Return when a chunk has arrived from all peers."""
        return max((self.arrived[index, ahead] for ahead in self.rank.peers), default=0.0)

    def add_loaded_pieces(self) -> float:
        """Return when a kernel has loaded and added the peers' pieces, chunk by chunk, and has signalled the peers."""
        rank = self.rank
        self.lane.launch(0.0)
        for index in range(len(self.sizes)):
            part = self.part(index)
            loads_us = max(rank.stores_us(part, at_once=True), hbm_us(rank.machine, 2 * part))
            self.lane.now = max(self.lane.now, self._chunk_arrival(index)) + loads_us
        return self.lane.now + rank.flag_us

    def add_arrived_pieces(self, cost: GemmCost, tile_us: float) -> float:
        """Return when the kernel has added arrived pieces to its own tiles, which come last and hold SMs while they wait."""
        rank, tiles = self.rank, cost.tiles[len(cost.tiles) - len(self.sizes) :]
        left, late, longer = sum(tiles), 0.0, 0.0
        for index, count in enumerate(tiles):
            us = adding_us(rank.machine, len(rank.peers) * self.part(index), count, cost.sms)
            longer += us * max(1, -(-count // cost.sms))
            late = max(late, self._chunk_arrival(index) + us + waves_behind(cost, left) * (tile_us + us))
            left -= count
        return max(self.lane.now + longer, late) + rank.flag_us


# Kernels that multiply and exchange, and other all-reduces


def _exchanging_kernel_us(rank: Rank, hops: int) -> float:
    machine, gpu = rank.machine, rank.machine.gpu
    if gpu.kernel_tiles:
        cost, more = streamed_cost(machine, rank.problem, hops), machine.kernels.exchange_us
    else:
        cost, more = rank.library_gemm(rank.rows), 0.0
    return rank.launch_us + more + gpu.paced_us(cost.busy_us) + _exchange_us(rank, hops)


def _exchange_us(rank: Rank, hops: int) -> float:
    """Return the time to store the product at the peers and to add what arrives; with two hops, also to send the sums."""
    machine, problem = rank.machine, rank.problem
    whole = problem.m * problem.n * problem.itemsize
    part = whole if problem.op == "matmul_all_reduce" and hops == 1 else whole / rank.ranks
    stores_us = rank.stores_us(part) + rank.latency_us()
    summed_us = hbm_us(machine, (rank.ranks + 1 + len(problem.addends)) * part)
    return hops * stores_us + summed_us + (hops - 1) * hbm_us(machine, 2 * (rank.ranks - 1) * part)


def _all_reduce_us(rank: Rank, row: Row, chunks: int) -> float:
    problem, machine = rank.problem, rank.machine
    whole, lane = problem.m * problem.n * problem.itemsize, ComputeLane(rank)
    if row.kernels == "whole":
        lane.multiply(rank.library_gemm(rank.rows))
        if row.scatter == "stores":
            return lane.now + rank.launch_us + _exchange_us(rank, 1 if whole * (rank.ranks - 1) <= ONE_HOP_BYTES else 2)
        lane.now += whole_collective_us(machine, problem)
        if problem.addends:
            lane.launch(hbm_us(machine, (2 + len(problem.addends)) * whole))
        return lane.now
    scattered = dataclasses.replace(problem, op="matmul_reduce_scatter", addends=())
    summed, copied = _overlapped_scatter_us(Rank(scattered, machine), row, chunks)
    gathered_us = collective_us(machine, "all_gather", scattered.shard_bytes, problem.world_size, problem.nodes)
    return max(summed + rank.fork_us + gathered_us + padded_us(machine, "all_gather", problem, whole), copied)


# Lookups, and collectives alone


def _lookup_us(rank: Rank, row: Row, chunks: int) -> float:
    problem, machine = rank.problem, rank.machine
    elements = problem.m * max(problem.columns(one) for one in range(problem.world_size))
    look_us = hbm_us(machine, gathered_bytes(problem, elements, machine))
    written_us = hbm_us(machine, elements * problem.itemsize)
    if row.kernels == "whole":
        exchange = collective_us(machine, "all_to_all_columns", rank.shard_bytes, problem.world_size, problem.nodes)
        return rank.launch_us + look_us + written_us + exchange
    shares = [size / rank.own for size in lengths(rank.own, chunks)]
    pieces = [
        (ahead, index, rank.shard_bytes * share, share / rank.ranks)
        for ahead in rank.peers
        for index, share in enumerate(shares)
    ]
    lanes, kernels_copy = CopyLanes(rank, 1, one=True), machine.copies.strided == "kernel"
    if row.scatter == "tiles":
        rate = min(machine.stores.rate(machine.gpu.sms), rank.link_gbps(1)) * 1e3
        now, arrived = rank.flag_us + rank.launch_us, []
        for ahead, _, part, share in pieces:
            now += max(look_us * share + machine.stores.stall * part / rate, part / rate) + 2 * rank.latency_us(ahead)
            arrived.append((now + rank.latency_us(ahead), part))
        now += (look_us + written_us) / rank.ranks
        for arrival, part in arrived:
            lanes.wait(1, arrival)
            lanes.copy_here(part, after=now * kernels_copy)
        return max(now, _signal_all_read(rank, lanes))
    return _copied_lookup_us(rank, lanes, pieces, look_us + written_us)


def _copied_lookup_us(rank: Rank, lanes: CopyLanes, pieces: Sequence[tuple[int, int, float, float]], look_us: float) -> float:
    """Return the time of a lookup whose pieces are sent concurrently, by kernels or by copy engines.

    The rank copies arrived pieces to their places after the lookup. pieces: (distance of the peer, chunk, bytes, share of the
    lookup) of each.
    """
    machine, kernels = rank.machine, rank.machine.kernels
    by_kernels = machine.copies.strided == "kernel" and machine.slow_lookups
    rate, slower = lanes.gbps(1), 1.0
    if by_kernels:  # lookup and copies share the memory bandwidth equally
        hbm = machine.gpu.hbm_gbps
        rate = min(kernels.lookup_copy_gbps, rate, fair := hbm / (1 + kernels.lookup_copy_bytes))
        slower = hbm / max(hbm - kernels.lookup_copy_bytes * rate, fair)
    now, sent, moving, arrived = rank.launch_us, rank.fork_us, list[CopyLoad](), list[tuple[float, float]]()
    for ahead, index, part, share in pieces:
        now = end_under_load(now, look_us * share, _running_copies(moving, now), slower)
        made = now + kernels.lookup_copy_us * by_kernels
        begun = max(sent, made + rank.wake_us) + rank.flag_us * (2 if index == 0 else 1) + machine.copies.copy_us
        sent = begun + part / (rate * 1e3) + rank.flag_us
        moving.append(CopyLoad(sent - rank.flag_us, since=begun))
        arrived.append((sent + rank.latency_us(ahead), part))
    lane = ComputeLane(rank, end_under_load(now, look_us / rank.ranks, _running_copies(moving, now), slower))
    for arrival, part in arrived:
        lane.wait(arrival)
        lane.launch(local_copy_us(machine, round(part)))
    return max(lane.now + rank.flag_us, sent + rank.fork_us)


def _running_copies(moving: Sequence[CopyLoad], now: float) -> CopyLoad:
    """Return the load of the copies that have not ended at `now`."""
    left = [one for one in moving if one.until > now]
    return CopyLoad(left[-1].until, since=left[0].since) if left else CopyLoad()


def _collective_us(rank: Rank, row: Row, chunks: int) -> float:
    """Return the time of a collective without a matmul.

    Copy engines push pieces into slots or pull them from there, and a few SMs add them as they arrive. In an all-reduce, the
    sum of a piece is sent back while the next piece arrives.
    """
    problem, machine = rank.problem, rank.machine
    assert isinstance(problem, CollectiveProblem)
    if row.kernels == "whole" or problem.world_size == 1:
        return whole_collective_us(machine, problem)
    pulls, twice, itemsize = row.gather == "pulls", problem.op == "all_reduce", problem.itemsize
    straight = problem.reachable and not pulls and problem.op != "reduce_scatter"
    parts = 1 if pulls and not twice else rank.ranks if pulls else (2 if twice and not straight else 1) * (rank.ranks - 1)
    turns = collectives.turns(problem, chunks, parts)
    sizes = [rank.own] if straight and not twice else lengths(rank.own, turns.pieces(rank.own))
    lanes, flags = CopyLanes(rank, (1 + twice) * len(sizes), work_us=0.0), rank.flag_us
    out, sums = ComputeLane(rank), ComputeLane(rank, rank.fork_us + rank.launch_us)
    keep_us = local_copy_us(machine, rank.own * itemsize)
    if not (problem.sums or pulls):
        out.launch(keep_us)
    made: list[float] = []
    for index in range(len(sizes) + twice):
        size, here = (sizes[index] if index < len(sizes) else 0) * itemsize, index < len(sizes)
        asked = index + turns.slots < len(sizes) or index == len(sizes) - 1
        arrived: list[float] = []
        if here and pulls and not problem.sums:
            out.launch(local_copy_us(machine, size) + flags * (1 + (index >= turns.slots or index == 0)))
            for ahead in rank.peers:
                lanes.wait(ahead, out.now + rank.latency_us(ahead))
                arrived.append(lanes.copy(ahead, size, signal=asked))
        elif here:
            for ahead in rank.peers:
                lanes.flags(int(index >= turns.slots or index == 0), ahead)
                arrived.append(lanes.copy(ahead, size))
        if problem.sums and here:
            gbps = min(machine.gpu.hbm_gbps, problem.sms * machine.kernels.sm_gbps)
            sums.wait(*arrived)
            sums.launch((rank.ranks + 1) * size / (gbps * 1e3) + flags)
            made.append(sums.now)
            sums.now += local_copy_us(machine, size) if pulls else 0.0
        if twice and index:
            size, arrived = sizes[index - 1] * itemsize, []
            for ahead in rank.peers:
                if pulls or ahead == 1:
                    lanes.wait(ahead, made[index - 1])
                arrived.append(lanes.copy(ahead, size, signal=not pulls or asked))
        if straight and arrived:
            out.wait(*arrived)
        elif not pulls and (index if twice else not problem.sums):
            for arrival in arrived:
                out.wait(arrival)
                out.launch(local_copy_us(machine, size))
    if pulls and not problem.sums:
        out.launch(keep_us)
    return max(out.now, sums.now * problem.sums, lanes.end)


# Between nodes


def _across_nodes_us(rank: Rank, chunks: int) -> float:
    """Return the time of a problem on several nodes.

    Slices cross the network one after the other, concurrently with the matmul or lookup. The exchange inside a node follows.
    """
    problem, machine, network = rank.problem, rank.machine, rank.machine.network
    assert network is not None, "the machine of several nodes has a network"
    each = problem.op in (*EXCHANGES, *COLUMN_OPS, *LOOKUP_OPS)  # every rank of another node gets different data
    sent = rank.shard_bytes * (problem.world_size - rank.ranks if each else len(problem.nodes) - 1)
    trips = 2 if problem.op == "matmul_all_reduce" else 1
    slice_us = network.step_us + network.latency_us + trips * sent / chunks / (network.gbps * 1e3)
    if problem.op in LOOKUP_OPS:
        elements = problem.m * max(problem.columns(one) for one in range(problem.world_size))
        piece_us = hbm_us(machine, (gathered_bytes(problem, elements, machine) + elements * problem.itemsize) / chunks)
    else:
        piece_us = rank.library_gemm(-(-rank.rows // chunks)).busy_us
    compute = crossed = rank.fork_us
    for _ in range(chunks):
        if problem.op in GATHERS:
            crossed += slice_us
            compute = max(compute, crossed) + rank.launch_us + piece_us
        else:
            compute += rank.launch_us + piece_us
            crossed = max(crossed, compute + rank.flag_us) + slice_us
    return max(compute, crossed) + collective_us(machine, "all_gather", rank.shard_bytes, rank.ranks) + rank.flag_us
