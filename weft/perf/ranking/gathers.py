"""Estimates for operators that gather: pieces of a arrive from the peers, and are multiplied."""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.perf.lanes import ComputeLane, CopyLanes, CopyLoad, Rank, chunk_lengths, step_matmul, waves_of_last, work_ends_at_us
from weft.perf.shapes import Arriving
from weft.perf.terms import GemmCost, hbm_us, local_copy_us, padded_us, whole_collective_us
from weft.schedules.builder import aligned_slices
from weft.schedules.traits import FamilyTraits


class IncomingPieces:
    """IncomingPieces holds the lanes that bring the pieces of all peers, chunk by chunk.

    lengths: the length of each chunk of a shard. Only their ratios count.
    copies_own: the rank's own pieces are copied, too.
    """

    def __init__(self, rank: Rank, family: FamilyTraits, lengths: Sequence[int], *, copies_own: bool = False) -> None:
        self.rank, self.family, self.lengths, self._copies_own = rank, family, lengths, copies_own
        ring = family.gather == "ring_copies"
        self.lanes = CopyLanes(rank, 1 if ring else len(lengths), one=family.one_lane or ring, matmul_us=rank.matmul_us)
        self._shard_length = sum(lengths) or 1
        self._blocks_free_at_us = rank.fork_us + rank.launch_us + rank.flag_us
        if family.gather == "push_copies":
            self.lanes.enqueue_flags(rank.node_ranks - 1)

    def piece_bytes(self, length: int) -> float:
        """Return the bytes of a piece."""
        return self.rank.shard_bytes * length / self._shard_length

    def enqueue_chunk(self, length: int) -> list[float]:
        """Transfer the next chunk. Return when its pieces arrive: the rank's own, if copied, then those of the peers."""
        piece_bytes, rank = self.piece_bytes(length), self.rank
        if self.family.gather == "push_copies":
            own = [self.lanes.enqueue_local_copy(piece_bytes, signal=True)] if self._copies_own else []
            return own + [self.lanes.enqueue_copy(distance, piece_bytes) for distance in rank.distances]
        arrive_at_us, stores = [], rank.machine.stores
        for distance in rank.distances:
            self._blocks_free_at_us += piece_bytes / (min(stores.rate(stores.sms), rank.link_gbps(distance)) * 1e3)
            arrive_at_us.append(self._blocks_free_at_us + rank.latency_us(distance))
        return arrive_at_us

    def enqueue_all(self) -> list[list[float]]:
        """Transfer all chunks. Return when their pieces arrive, by chunk."""
        if self.family.gather == "ring_copies":
            return self._enqueue_ring()
        return [self.enqueue_chunk(length) for length in self.lengths]

    def _enqueue_ring(self) -> list[list[float]]:
        """Transfer all chunks around a ring, in which each rank forwards what it receives."""
        rank, arrive_at_us = self.rank, [list[float]() for _ in self.lengths]
        self.lanes.enqueue_flags()
        last_hop_at_us = [0.0 for _ in self.lengths]
        for hop in rank.distances:
            for index, length in enumerate(self.lengths):
                if hop > 1:
                    self.lanes.enqueue_wait(1, last_hop_at_us[index])
                arrive_at_us[index].append(self.lanes.enqueue_copy(1, self.piece_bytes(length)))
            last_hop_at_us = [of_chunk[-1] for of_chunk in arrive_at_us]
        if len(rank.distances) > 1:
            self.lanes.enqueue_flags()
        return arrive_at_us

    @property
    def load(self) -> CopyLoad:
        """The load of all copies so far on concurrent kernels."""
        by_engines = self.family.gather in ("push_copies", "ring_copies") and self.lengths
        return self.lanes.load(self.piece_bytes(self.lengths[0])) if by_engines else CopyLoad()

    @property
    def end_at_us(self) -> float:
        """The time at which all transfers so far have ended."""
        return self._blocks_free_at_us if self.family.gather == "store_blocks" else self.lanes.joined_at_us


def estimate_gather_us(rank: Rank, family: FamilyTraits, chunks: int) -> float:
    """Return the time of a gather and its matmul."""
    return _sequential_us(rank, family) if family.matmul == "whole" else _overlapped_us(rank, family, chunks)


def _sequential_us(rank: Rank, family: FamilyTraits) -> float:
    machine, problem, lane = rank.machine, rank.problem, ComputeLane(rank)
    if family.gather == "nccl":
        lane.free_at_us += whole_collective_us(machine, problem)
        if problem.op == "all_gather_matmul":
            lane.free_at_us += padded_us(machine, "all_gather", problem, rank.node_ranks * rank.shard_bytes)
        if problem.op == "all_to_all_columns_matmul":
            lane.free_at_us += local_copy_us(machine, rank.node_ranks * rank.shard_bytes)
        lane.enqueue_matmul(rank.library_gemm(rank.rows))
        return lane.free_at_us + _copy_to_caller_us(rank, 1)
    lane.enqueue_wait(0.0)
    lane.enqueue_kernel(local_copy_us(machine, rank.shard_bytes) + rank.stores_us(rank.shard_bytes) + rank.latency_us())
    lane.enqueue_wait(0.0)
    lane.enqueue_matmul(rank.library_gemm(rank.rows))
    return lane.free_at_us + _copy_to_caller_us(rank, rank.node_ranks) + rank.flag_us


def _overlapped_us(rank: Rank, family: FamilyTraits, chunks: int) -> float:
    # In this operator, a matmul multiplies the columns of all ranks for the rows of a chunk.
    by_columns = rank.problem.op == "all_to_all_columns_matmul"
    lane = ComputeLane(rank)
    if by_columns:
        lane.enqueue_kernel(local_copy_us(rank.machine, rank.shard_bytes))
    lengths = chunk_lengths(rank.inner if family.matmul == "per_slice" else rank.shard_rows, chunks)
    if family.matmul == "tiles":
        if family.cuts_own_shard:
            lengths = [high - low for low, high in aligned_slices(rank.inner, chunks)]
        incoming = IncomingPieces(rank, family, lengths)
        lane.free_at_us = _run_waiting_kernel(rank, incoming, lane.free_at_us + rank.launch_us)
    else:
        copies_own = family.cuts_own_shard and family.matmul == "per_step" and not by_columns
        incoming = IncomingPieces(rank, family, lengths, copies_own=copies_own)
        _enqueue_matmuls(lane, incoming, by_columns=by_columns)
    lane.free_at_us += _copy_to_caller_us(rank, rank.node_ranks) + rank.flag_us
    return max(lane.free_at_us, incoming.end_at_us)


def _enqueue_matmuls(lane: ComputeLane, incoming: IncomingPieces, *, by_columns: bool) -> None:
    """Run a cuBLAS matmul for each piece or step when its data have arrived."""
    rank, family, lengths = lane.rank, incoming.family, incoming.lengths
    copied_by_kernels = (by_columns or family.matmul == "per_slice") and rank.machine.copies.strided == "kernel"
    arrive_at_us = [] if copied_by_kernels else incoming.enqueue_all()
    load = incoming.load
    if not family.cuts_own_shard:
        lane.enqueue_matmul(rank.library_gemm(rank.shard_rows), load)
    for index, length in enumerate(lengths):
        chunk_at_us = incoming.enqueue_chunk(length) if copied_by_kernels else arrive_at_us[index]
        if copied_by_kernels:  # copies run concurrently until the last chunk has arrived
            load = incoming.lanes.load(incoming.piece_bytes(length), math.inf if index < len(lengths) - 1 else None)
        if family.matmul == "per_piece":
            for piece_at_us in chunk_at_us:
                lane.enqueue_wait(piece_at_us)
                lane.enqueue_matmul(rank.library_gemm(rank.shard_rows if len(lengths) == 1 else length), load)
            continue
        lane.enqueue_wait(*chunk_at_us)
        if by_columns:
            lane.enqueue_matmul(rank.library_gemm(length), load)
        else:
            cost, staging_us = step_matmul(rank, family, length, index, len(lengths), gathers=True)
            lane.enqueue_matmul(cost, load, staging_us)
        if copied_by_kernels:
            incoming.lanes.compete_for_sms(lane)
    if family.matmul == "per_slice":  # the float32 sums of the slices become the result
        lane.enqueue_kernel(hbm_us(rank.machine, rank.rows * rank.columns * (4 + rank.problem.itemsize)))


def _copy_to_caller_us(rank: Rank, copies: int) -> float:
    """Return the time to copy the gathered tensor to the caller, if the caller asked for it."""
    if not rank.problem.return_gathered:
        return 0.0
    return copies * rank.launch_us + local_copy_us(rank.machine, rank.node_ranks * rank.shard_bytes)


def _run_waiting_kernel(rank: Rank, incoming: IncomingPieces, begins_at_us: float) -> float:
    """Transfer all pieces, run one kernel whose tiles wait for them, and return when the kernel ends."""
    cost, needed_at_us = _waiting_kernel(rank, incoming)
    load, power_slowdown = incoming.load, rank.power_slowdown(0.0, cost)
    copy_slowdown, tiles_left, ends_at_us = rank.copy_slowdown(cost, load.gbps), sum(cost.tiles), begins_at_us
    for tiles, ready_at_us in zip(cost.tiles, needed_at_us, strict=True):
        work_us = waves_of_last(cost, tiles_left) * cost.tile_us * power_slowdown
        ends_at_us = max(ends_at_us, work_ends_at_us(max(begins_at_us, ready_at_us), work_us, load, copy_slowdown))
        tiles_left -= tiles
    return ends_at_us


def _waiting_kernel(rank: Rank, incoming: IncomingPieces) -> tuple[GemmCost, list[float]]:
    """Transfer all pieces. Return the cost of the kernel that waits for them, and when its tiles may begin, by part."""
    machine, family, lengths = rank.machine, incoming.family, incoming.lengths
    arrive_at_us, peers = incoming.enqueue_all(), range(len(rank.distances))
    sms = machine.gpu.sms - (machine.stores.sms if family.gather == "store_blocks" else 0)
    all_k = (rank.inner,)
    if rank.problem.op == "all_to_all_columns_matmul":
        cost = rank.weft_gemm([Arriving(length, rank.columns, True, all_k) for length in lengths], sms)
        return cost, [max(chunk_at_us, default=0.0) for chunk_at_us in arrive_at_us]
    own = Arriving(rank.shard_rows, rank.columns, False, all_k)
    if family.cuts_own_shard:  # K is cut into slices, and each slice holds the rows of all ranks
        slice_ends = tuple(sum(lengths[: index + 1]) for index in range(len(lengths)))
        of_peer = Arriving(rank.shard_rows, rank.columns, True, slice_ends)
        cost = rank.weft_gemm([own, *(of_peer for _ in peers)], sms)
        tile_us = cost.tile_us * rank.power_slowdown(0.0, cost)
        # A tile need not wait for all its slices. It begins so early that it needs each slice just when that has arrived.
        into_tile_us = [tile_us * (end - length) / max(1, rank.inner) for end, length in zip(slice_ends, lengths, strict=True)]
        needed_at_us = [
            max(slice_at_us[peer] - us for slice_at_us, us in zip(arrive_at_us, into_tile_us, strict=True)) for peer in peers
        ]
        return cost, [0.0, *needed_at_us]
    pieces = [(index, peer) for index in range(len(lengths)) for peer in peers]
    if family.gather == "ring_copies":
        pieces.sort(key=lambda piece: (piece[1], piece[0]))
    cost = rank.weft_gemm([own, *(Arriving(lengths[index], rank.columns, True, all_k) for index, _ in pieces)], sms)
    return cost, [0.0, *(arrive_at_us[index][peer] for index, peer in pieces)]
