"""Estimates for operators that scatter: pieces of the product are computed, and are sent, or pulled by their owners."""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.core.problem import ColumnProblem
from weft.perf.lanes import ComputeLane, CopyLanes, LaneEnds, Rank, chunk_lengths
from weft.perf.ranking.steps import step_matmul
from weft.perf.ranking.tile_kernels import tile_kernel_ends
from weft.perf.terms import collective_us, hbm_us, padded_us, whole_collective_us
from weft.schedules.matmul_reduce_scatter import ONE_KERNEL_BYTES
from weft.schedules.traits import FamilyTraits


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
