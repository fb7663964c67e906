"""Estimates for operators that scatter: pieces of the product are computed, and are sent, or pulled by their owners.

weft's own GEMM kernel counts its tiles, or stores them at their owner (_TileKernels). A matmul and an all-reduce is a
reduce-scatter and an all-gather, or one kernel that multiplies and exchanges.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from weft.core.problem import SUMMED_WHOLE, CollectiveProblem, ColumnProblem, Problem
from weft.perf.lanes import (
    ComputeLane,
    CopyLanes,
    CopyLoad,
    LaneEnds,
    Rank,
    chunk_lengths,
    step_matmul,
    waves_after_first,
    waves_of_first,
    waves_of_last,
    work_ends_at_us,
)
from weft.perf.shapes import Arriving
from weft.perf.terms import (
    GemmCost,
    adding_us,
    collective_us,
    hbm_us,
    padded_us,
    stalled_us,
    streamed_cost,
    whole_collective_us,
)
from weft.schedules.builder import fuses_norm
from weft.schedules.matmul_all_reduce import ONE_HOP_BYTES
from weft.schedules.matmul_reduce_scatter import ONE_KERNEL_BYTES
from weft.schedules.traits import FamilyTraits

Piece = tuple[int, int]
"""The index of its chunk, and the distance of the peer that owns it."""


def tile_kernel_ends(rank: Rank, family: FamilyTraits, lengths: Sequence[int]) -> LaneEnds:
    """Return when the lanes end. The kernel computes the rank's own tiles last. lengths: the rows of each chunk of a shard."""
    op = rank.problem.op
    reduces = op == "matmul_reduce_scatter"
    kernels = _TileKernels(rank, family, lengths)
    lane, lanes = kernels.lane, kernels.lanes
    x_at_us = lanes.enqueue_x()
    pieces = [(index, distance) for index in range(len(lengths)) for distance in rank.distances]
    if op == "matmul_all_to_all_columns":  # one kernel for each destination, and one for the rank's own rows
        pieces.sort(key=lambda piece: (piece[1], piece[0]))
        for distance in rank.distances:
            kernels.enqueue_kernel([piece for piece in pieces if piece[1] == distance], ())
        lane.enqueue_matmul(rank.library_gemm(rank.shard_rows))
    elif rank.problem.weight_gradients and family.scatter != "load_kernel":  # the own tiles are a kernel of their own
        kernels.enqueue_kernel(pieces, ())
        lane.enqueue_weight_gradients(lanes.load(kernels.piece_bytes(0)), x_at_us)
        cost, tile_us = kernels.enqueue_kernel((), lengths)
    else:
        cost, tile_us = kernels.enqueue_kernel(pieces, lengths if reduces else (rank.shard_rows,))
    if family.scatter == "load_kernel":
        lane.enqueue_weight_gradients(x_at_us=x_at_us)
        kernels.enqueue_load_and_add()
        return LaneEnds(lane.free_at_us, 0.0)
    if reduces:
        sums_at_us = kernels.sums_end_at_us(cost, tile_us)
        return LaneEnds(sums_at_us, lanes.joined_at_us if family.scatter == "push_copies" else 0.0)
    if family.scatter == "tile_stores":
        for piece in pieces:
            lanes.enqueue_wait(piece[1], kernels.arrive_at_us[piece])
            lanes.enqueue_local_copy(kernels.piece_bytes(piece[0]))
    lanes.enqueue_all_read()
    return LaneEnds(lane.free_at_us, lanes.joined_at_us)


class _TileKernels:
    """_TileKernels runs kernels that count or store their tiles, one after the other.

    arrive_at_us: when this rank has received a piece. All ranks do the same at the same time, so this is when the peer has
        received the piece that this rank sent.
    """

    def __init__(self, rank: Rank, family: FamilyTraits, lengths: Sequence[int]) -> None:
        self.rank, self.family, self.lengths = rank, family, lengths
        self.lane = ComputeLane(rank)
        one, take_turns = family.scatter == "tile_stores", rank.problem.op == "matmul_reduce_scatter"
        self.lanes = CopyLanes(rank, len(lengths), one=one, take_turns=take_turns, matmul_us=rank.matmul_us)
        self.arrive_at_us: dict[Piece, float] = {}
        self._link_free_at_us: dict[int, float] = {}
        self._copies_begin_at_us = math.inf

    def piece_bytes(self, index: int) -> float:
        return self.rank.shard_bytes * self.lengths[index] / self.rank.shard_rows

    def enqueue_kernel(self, pieces: Sequence[Piece], own_rows: Sequence[int]) -> tuple[GemmCost, float]:
        """Run a kernel for these pieces and then these parts of the own shard. Return its cost and the time of a tile."""
        rank, stores = self.rank, self.family.scatter == "tile_stores"
        of_peers = [Arriving(self.lengths[index], rank.columns, False, (rank.inner,), stores) for index, _ in pieces]
        of_own = [Arriving(rows, rank.columns, False, (rank.inner,)) for rows in own_rows]
        cost = rank.weft_gemm([*of_peers, *of_own], counts_tiles=True)
        tile_us = cost.tile_us * rank.power_slowdown(self.lane.multiplied_us, cost)
        self.lane.multiplied_us += cost.speed * cost.busy_us
        begins_at_us, tiles_done, stalls_us = self.lane.free_at_us + rank.launch_us, 0, 0.0
        copy_slowdown = rank.copy_slowdown(cost, self._load.gbps)
        for piece, tiles in zip(pieces, cost.tiles, strict=False):
            first_tile_at_us = begins_at_us + waves_of_first(cost, tiles_done + 1) * tile_us
            tiles_done += tiles
            piece_us = waves_of_first(cost, tiles_done) * tile_us
            if stores:
                stalls_us += self._store_tiles(piece, cost, tiles, first_tile_at_us, begins_at_us + piece_us + stalls_us)
            elif self.family.scatter == "push_copies":
                self._enqueue_copy(piece, work_ends_at_us(begins_at_us, piece_us, self._load, copy_slowdown))
            else:
                self.arrive_at_us[piece] = begins_at_us + piece_us + rank.latency_us(piece[1])
        work_us = waves_of_last(cost, sum(cost.tiles)) * tile_us + stalls_us
        computed_at_us = work_ends_at_us(begins_at_us, work_us, self._load, copy_slowdown)
        self.lane.free_at_us = max(computed_at_us, *self._link_free_at_us.values(), 0.0)
        return cost, tile_us

    @property
    def _load(self) -> CopyLoad:
        if self.family.scatter != "push_copies" or not self.lengths:
            return CopyLoad()
        return self.lanes.load(self.piece_bytes(0), begins_at_us=self._copies_begin_at_us)

    def _store_tiles(self, piece: Piece, cost: GemmCost, tiles: int, first_tile_at_us: float, ends_at_us: float) -> float:
        """Store the tiles of a piece at its owner. Return by how much the stores delay the kernel.

        first_tile_at_us: when the first tile is computed. ends_at_us: when the last one is.
        """
        (index, distance), machine = piece, self.rank.machine
        piece_bytes = self.piece_bytes(index)
        stall_us = stalled_us(machine, piece_bytes, tiles, min(cost.sms, sum(cost.tiles)))
        gbps = min(machine.stores.rate(cost.sms) * (machine.stores.tiles or 1.0), self.rank.link_gbps(distance))
        link = distance if machine.links.topology == "mesh" else 0
        begins_at_us = max(self._link_free_at_us.get(link, 0.0), first_tile_at_us + stall_us)
        self._link_free_at_us[link] = begins_at_us + piece_bytes / (gbps * 1e3)
        delay_us = stall_us * max(tiles / cost.sms, -(-tiles // cost.sms) * (tiles >= cost.sms))
        stored_at_us = max(self._link_free_at_us[link], ends_at_us + delay_us)
        self.arrive_at_us[piece] = stored_at_us + self.rank.latency_us(distance)
        return delay_us

    def _enqueue_copy(self, piece: Piece, counted_at_us: float) -> None:
        """Copy a piece once all its tiles are counted. This rank pushes it, or the owner pulls it."""
        (index, distance), rank = piece, self.rank
        pulls = rank.problem.op != "matmul_reduce_scatter"
        self.lanes.enqueue_wait(distance, counted_at_us + rank.latency_us(distance) * pulls)
        if index == 0 and not pulls and (distance == 1 or not self.lanes.take_turns):
            self.lanes.enqueue_flags(1, distance)
        begins_at_us = counted_at_us + rank.wake_us + 2 * rank.flag_us + rank.machine.copies.copy_us
        self._copies_begin_at_us = min(self._copies_begin_at_us, begins_at_us)
        self.arrive_at_us[piece] = self.lanes.enqueue_copy(distance, self.piece_bytes(index), signal=not pulls)

    def _chunk_arrives_at_us(self, index: int) -> float:
        return max((self.arrive_at_us[index, distance] for distance in self.rank.distances), default=0.0)

    def enqueue_load_and_add(self) -> None:
        """Run a kernel that loads and adds the peers' pieces, chunk by chunk, and then signals the peers."""
        rank = self.rank
        self.lane.enqueue_kernel(0.0)
        for index in range(len(self.lengths)):
            piece_bytes = self.piece_bytes(index)
            loads_us = max(rank.stores_us(piece_bytes, at_once=True), hbm_us(rank.machine, 2 * piece_bytes))
            self.lane.free_at_us = max(self.lane.free_at_us, self._chunk_arrives_at_us(index)) + loads_us
        self.lane.free_at_us += rank.flag_us

    def sums_end_at_us(self, cost: GemmCost, tile_us: float) -> float:
        """Return when the kernel has added arrived pieces to its own tiles, which come last and hold SMs while they wait."""
        rank, own_tiles = self.rank, cost.tiles[len(cost.tiles) - len(self.lengths) :]
        tiles_left, late_at_us, adds_us = sum(own_tiles), 0.0, 0.0
        for index, tiles in enumerate(own_tiles):
            add_us = adding_us(rank.machine, len(rank.distances) * self.piece_bytes(index), tiles, cost.sms)
            adds_us += add_us * max(1, -(-tiles // cost.sms))
            later_us = waves_after_first(cost, tiles_left) * (tile_us + add_us)
            late_at_us = max(late_at_us, self._chunk_arrives_at_us(index) + add_us + later_us)
            tiles_left -= tiles
        return max(self.lane.free_at_us + adds_us, late_at_us) + rank.flag_us


def estimate_scatter_us(rank: Rank, family: FamilyTraits, chunks: int) -> float:
    """Return the time of a matmul and the scatter of its product."""
    return _sequential_us(rank, family) if family.matmul == "whole" else max(overlapped_scatter_ends(rank, family, chunks))


def _sequential_us(rank: Rank, family: FamilyTraits) -> float:
    problem, machine, lane = rank.problem, rank.machine, ComputeLane(rank)
    x_at_us = 0.0
    if problem.weight_gradients == "shard" and family.scatter == "nccl":
        lane.free_at_us = collective_us(machine, "all_gather", rank.shard_bytes, problem.world_size, problem.nodes)
    elif problem.weight_gradients:
        x_at_us = CopyLanes(rank, 1, matmul_us=rank.matmul_us).enqueue_x()
    pulls, by_columns = problem.op != "matmul_reduce_scatter", isinstance(problem, ColumnProblem)
    if family.scatter == "store_kernel" and pulls:
        lane.enqueue_wait(0.0)
    for _ in range(rank.node_ranks if by_columns else 1):  # one kernel for each destination
        lane.enqueue_matmul(rank.library_gemm(rank.shard_rows if by_columns else rank.rows))
    if family.scatter == "nccl":
        padding_us = 0.0 if pulls else padded_us(machine, "reduce_scatter", problem, rank.node_ranks * rank.shard_bytes)
        lane.free_at_us += whole_collective_us(machine, problem) + padding_us
        lane.enqueue_weight_gradients()
        return lane.free_at_us
    stores_us, shard_us = rank.stores_us(rank.shard_bytes), hbm_us(machine, rank.shard_bytes)
    if pulls:
        lane.enqueue_wait(0.0)
        lane.enqueue_kernel(rank.latency_us() + max(stores_us, (rank.node_ranks - 1) * shard_us) + 2 * shard_us)
        return lane.free_at_us + rank.flag_us
    in_one_kernel = problem.m * problem.n * problem.itemsize <= ONE_KERNEL_BYTES
    if not in_one_kernel:
        lane.enqueue_wait(0.0)
        lane.enqueue_kernel(rank.flag_us)
    lane.enqueue_kernel(stores_us + rank.latency_us() + (rank.node_ranks + 1) * shard_us)
    lane.enqueue_weight_gradients(x_at_us=x_at_us)
    return lane.free_at_us


def overlapped_scatter_ends(rank: Rank, family: FamilyTraits, chunks: int) -> LaneEnds:
    """Return when the lanes of an overlapping schedule end."""
    if family.matmul == "tiles":
        return tile_kernel_ends(rank, family, chunk_lengths(rank.shard_rows, chunks))
    reduces = rank.problem.op == "matmul_reduce_scatter"
    lengths = chunk_lengths(rank.columns if family.matmul == "per_slice" else rank.shard_rows, chunks)
    lane = ComputeLane(rank)
    lanes = CopyLanes(rank, len(lengths), one=family.one_lane, take_turns=reduces, matmul_us=rank.matmul_us)
    x_at_us = lanes.enqueue_x()
    if not reduces:
        lane.enqueue_wait(0.0)
    shares = [length / sum(lengths) for length in lengths]
    copied_by_kernels = family.matmul == "per_slice" and rank.machine.copies.strided == "kernel"
    computed_at_us, arrive_at_us = list[list[float]](), list[list[float]]()
    for index, (length, share) in enumerate(zip(lengths, shares, strict=True)):
        load = lanes.load(rank.shard_bytes * share, math.inf if copied_by_kernels and index else None)
        if family.matmul == "per_piece":
            pieces_at_us = []
            for _ in rank.distances:
                lane.enqueue_matmul(rank.library_gemm(rank.shard_rows if len(lengths) == 1 else length), load)
                lane.free_at_us += rank.flag_us
                pieces_at_us.append(lane.free_at_us)
        else:
            cost, staging_us = step_matmul(rank, family, length, index, len(lengths), gathers=False)
            lane.enqueue_matmul(cost, load, staging_us)
            if copied_by_kernels:
                lanes.compete_for_sms(lane)
            lane.free_at_us += rank.flag_us
            pieces_at_us = [lane.free_at_us for _ in rank.distances]
        computed_at_us.append(pieces_at_us)
        if not copied_by_kernels:
            flag_per_piece = family.matmul == "per_piece"
            arrive_at_us.append(_enqueue_chunk(lanes, pieces_at_us, share, first=index == 0, flag_per_piece=flag_per_piece))
    if copied_by_kernels:  # these copies need SMs, so the times of all kernels had to be known first
        arrive_at_us = [
            _enqueue_chunk(lanes, pieces_at_us, shares[index], first=index == 0, flag_per_piece=False)
            for index, pieces_at_us in enumerate(computed_at_us)
        ]
    if not family.cuts_own_shard:
        lane.enqueue_matmul(rank.library_gemm(rank.shard_rows), lanes.load(rank.shard_bytes / max(1, len(lengths))))
    if not reduces:
        lanes.enqueue_all_read()
        return LaneEnds(lane.free_at_us, lanes.joined_at_us)
    lane.enqueue_weight_gradients(lanes.load(rank.shard_bytes / max(1, len(lengths))), x_at_us)
    lane.enqueue_kernel(0.0)
    for chunk_at_us, share in zip(arrive_at_us, shares, strict=True):
        add_us = hbm_us(rank.machine, (rank.node_ranks + 1) * rank.shard_bytes * share)
        lane.free_at_us = max([lane.free_at_us, *chunk_at_us]) + add_us
    return LaneEnds(lane.free_at_us + rank.flag_us, lanes.joined_at_us)


def _enqueue_chunk(
    lanes: CopyLanes, computed_at_us: Sequence[float], share: float, *, first: bool, flag_per_piece: bool
) -> list[float]:
    """Send a piece to each peer, and return when the pieces arrive.

    computed_at_us: when each piece is computed. share: the chunk's share of a shard. first: this is the first chunk.
    flag_per_piece: every piece has its own flag; otherwise one flag serves all pieces of the chunk.
    """
    rank, arrive_at_us = lanes.rank, []
    pulls = rank.problem.op != "matmul_reduce_scatter"
    for distance, piece_at_us in zip(rank.distances, computed_at_us, strict=True):
        if flag_per_piece or pulls or distance == 1 or rank.machine.fans_out:
            lanes.enqueue_wait(distance, piece_at_us + rank.latency_us(distance) * pulls)
        if first and not pulls and (distance == 1 or not lanes.take_turns):
            lanes.enqueue_flags(1, distance)
        arrive_at_us.append(lanes.enqueue_copy(distance, rank.shard_bytes * share, signal=not pulls))
    return arrive_at_us


def estimate_whole_sum_us(rank: Rank) -> float:
    """Return the time of NCCL's all-reduce of a ready product, and of what is added to it and its norm."""
    problem, machine = rank.problem, rank.machine
    whole, lane = problem.m * problem.n * problem.itemsize, ComputeLane(rank, whole_collective_us(machine, problem))
    if problem.addends:
        lane.enqueue_kernel(hbm_us(machine, (2 + len(problem.addends)) * whole))
    return lane.free_at_us + _norm_us(rank)


def _norm_us(rank: Rank) -> float:
    """Return the time of a norm of the whole result as a kernel of its own, if the problem has one."""
    problem = rank.problem
    if problem.norm_eps is None:
        return 0.0
    rows = rank.shard_rows if problem.residual_sharded else problem.m
    return rank.launch_us + hbm_us(rank.machine, rows * (problem.n * problem.itemsize + problem.normed_row_bytes))


def _norm_ratio(problem: Problem) -> float:
    """Return the bytes of the norm, for each byte of the sum."""
    return problem.normed_row_bytes / max(problem.n * problem.itemsize, 1)


def _norm_after_us(rank: Rank, hops: int) -> float:
    """Return the time of a norm after a kernel that exchanges. It is 0 if the kernel computes the norm."""
    return 0.0 if fuses_norm(rank.problem, hops) else _norm_us(rank)


def estimate_exchanging_kernel_us(rank: Rank, hops: int) -> float:
    """Return the time of one kernel that multiplies and exchanges, or only exchanges."""
    machine = rank.machine
    if isinstance(rank.problem, CollectiveProblem):
        return rank.launch_us + _exchange_us(rank, hops) + _norm_after_us(rank, hops)
    if machine.gpu.capabilities:
        cost, fixed_us = streamed_cost(machine, rank.problem, hops), machine.kernels.exchange_us
    else:
        cost, fixed_us = rank.library_gemm(rank.rows), 0.0
    lane, lanes = ComputeLane(rank), CopyLanes(rank, 1, matmul_us=rank.matmul_us)
    x_at_us = lanes.enqueue_x()
    lane.free_at_us = rank.launch_us + fixed_us + cost.busy_us * rank.power_slowdown(0.0, cost) + _exchange_us(rank, hops)
    lane.enqueue_weight_gradients(x_at_us=x_at_us)
    return lane.free_at_us + _norm_after_us(rank, hops)


def estimate_all_reduce_us(rank: Rank, family: FamilyTraits, chunks: int) -> float:
    """Return the time of a matmul and an all-reduce: after each other, or an overlapping reduce-scatter and an all-gather."""
    if family.sends_sums:
        return _token_split_us(rank, chunks)
    hops = _stored_hops(rank) if family.matmul == "whole" and family.scatter == "store_kernel" else 2
    return _sum_us(rank, family, chunks) + _norm_after_us(rank, hops)


def _token_split_us(rank: Rank, chunks: int) -> float:
    """Return the time of a matmul whose chunks of rows are summed by their owners and sent to all, each during the next one."""
    problem, machine = rank.problem, rank.machine
    scatter = Rank(
        dataclasses.replace(
            problem, op="matmul_reduce_scatter", addends=(), norm_eps=None, norm_recipe="", residual_sharded=False
        ),
        machine,
    )
    lengths = chunk_lengths(rank.shard_rows, chunks)
    lane, lanes = ComputeLane(rank), CopyLanes(scatter, 2 * len(lengths), take_turns=True, matmul_us=rank.matmul_us)
    out_at_us, landed, sharded = rank.fork_us, list[float](), problem.residual_sharded
    ratio = _norm_ratio(problem)
    sent = ratio if sharded else 1.0

    def normalise(row_bytes: float) -> None:
        if problem.norm_eps is not None:
            lane.enqueue_kernel(hbm_us(machine, (1 + ratio) * row_bytes))

    def collect(at_us: Sequence[float], piece_bytes: float) -> None:
        nonlocal out_at_us
        for one_at_us in at_us:
            waited_us = max(0.0, one_at_us - out_at_us)
            out_at_us += waited_us + min(rank.wake_us, waited_us) + rank.flag_us
            out_at_us += machine.copies.copy_us + hbm_us(machine, 2 * sent * piece_bytes)
            if not sharded and problem.norm_eps is not None:
                lane.enqueue_wait(out_at_us)
                normalise(piece_bytes)

    piece_bytes = 0.0
    for index, length in enumerate(lengths):
        share, before_bytes = length / rank.shard_rows, piece_bytes
        piece_bytes, made_at_us = rank.shard_bytes * share, list[float]()
        load = lanes.load(piece_bytes)
        for _ in rank.distances:
            lane.enqueue_matmul(rank.library_gemm(length), load)
            lane.free_at_us += rank.flag_us
            made_at_us.append(lane.free_at_us)
        arrive_at_us = _enqueue_chunk(lanes, made_at_us, share, first=index == 0, flag_per_piece=True)
        lane.enqueue_matmul(rank.library_gemm(length), lanes.load(piece_bytes))
        lane.enqueue_kernel(0.0)
        added = rank.node_ranks + 1 + len(problem.addends)
        lane.free_at_us = max([lane.free_at_us, *arrive_at_us]) + hbm_us(machine, added * piece_bytes)
        if sharded:
            normalise(piece_bytes)
        lane.free_at_us += rank.flag_us
        summed_at_us = lane.free_at_us
        if not sharded:
            normalise(piece_bytes)
        collect(landed, before_bytes)
        landed = []
        for number, distance in enumerate(rank.distances):
            if number == 0 or machine.fans_out:
                lanes.enqueue_wait(distance, summed_at_us)
            landed.append(lanes.enqueue_copy(distance, sent * piece_bytes, in_turn=False))
    collect(landed, piece_bytes)
    return max(lane.free_at_us, lanes.joined_at_us, out_at_us + rank.fork_us)


def _stored_hops(rank: Rank) -> int:
    """Return the hops of the kernel that exchanges a ready product."""
    problem = rank.problem
    return 1 if problem.m * problem.n * problem.itemsize * (rank.node_ranks - 1) <= ONE_HOP_BYTES else 2


def _sum_us(rank: Rank, family: FamilyTraits, chunks: int) -> float:
    problem, machine = rank.problem, rank.machine
    product_bytes, lane = problem.m * problem.n * problem.itemsize, ComputeLane(rank)
    if family.matmul == "whole":
        lane.enqueue_matmul(rank.library_gemm(rank.rows))
        if family.scatter == "store_kernel":
            return lane.free_at_us + rank.launch_us + _exchange_us(rank, _stored_hops(rank))
        if problem.residual_sharded:
            return _sharded_sum_us(rank, lane)
        lane.free_at_us += whole_collective_us(machine, problem)
        if problem.addends:
            lane.enqueue_kernel(hbm_us(machine, (2 + len(problem.addends)) * product_bytes))
        return lane.free_at_us
    scattered = dataclasses.replace(problem, op="matmul_reduce_scatter", addends=(), norm_eps=None, norm_recipe="")
    ends = overlapped_scatter_ends(Rank(scattered, machine), family, chunks)
    gather_us = collective_us(machine, "all_gather", scattered.shard_bytes, problem.world_size, problem.nodes)
    padding_us = padded_us(machine, "all_gather", problem, product_bytes)
    return max(ends.compute_at_us + rank.fork_us + gather_us + padding_us, ends.copies_at_us)


def _sharded_sum_us(rank: Rank, lane: ComputeLane) -> float:
    """Return the time at which NCCL has scattered the sum, and gathered the norm that each rank computes of its rows."""
    problem, machine = rank.problem, rank.machine
    for op, ratio in (("reduce_scatter", 1.0), ("all_gather", _norm_ratio(problem))):
        lane.free_at_us += collective_us(machine, op, ratio * rank.shard_bytes, problem.world_size, problem.nodes)
        lane.free_at_us += padded_us(machine, op, problem, ratio * problem.m * problem.n * problem.itemsize)
    if problem.addends:
        lane.enqueue_kernel(hbm_us(machine, (2 + len(problem.addends)) * rank.shard_bytes))
    return lane.free_at_us


def _exchange_us(rank: Rank, hops: int) -> float:
    """Return the time to store the product at the peers and to add what arrives; with two hops, also to send the sums."""
    machine, problem = rank.machine, rank.problem
    product_bytes = problem.m * problem.n * problem.itemsize
    piece_bytes = product_bytes if problem.op in SUMMED_WHOLE and hops == 1 else product_bytes / rank.node_ranks
    stores_us = rank.stores_us(piece_bytes) + rank.latency_us()
    adds_us = hbm_us(machine, (rank.node_ranks + 1 + len(problem.addends)) * piece_bytes)
    return hops * stores_us + adds_us + (hops - 1) * hbm_us(machine, 2 * (rank.node_ranks - 1) * piece_bytes)
