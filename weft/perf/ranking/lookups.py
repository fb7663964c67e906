"""Estimate the times of embedding lookups whose results are exchanged between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.perf.lanes import ComputeLane, CopyLanes, CopyLoad, Rank, chunk_lengths, work_ends_at_us
from weft.perf.terms import collective_us, gathered_bytes, hbm_us, local_copy_us
from weft.schedules.traits import FamilyTraits


class _Piece(NamedTuple):
    """A _Piece is one chunk of the results for one peer."""

    distance: int
    """The number of ranks from this rank to the peer."""
    chunk: int
    """The index of the chunk among those for this peer."""
    bytes: float
    lookup_share: float
    """The part of the whole lookup that computes this piece."""


def estimate_lookup_us(rank: Rank, family: FamilyTraits, chunks: int) -> float:
    """Return the time of a lookup and the exchange of its results."""
    problem, machine = rank.problem, rank.machine
    elements = problem.m * max(problem.columns(source) for source in range(problem.world_size))
    reads_us = hbm_us(machine, gathered_bytes(problem, elements, machine))
    writes_us = hbm_us(machine, elements * problem.itemsize)
    if family.matmul == "whole":
        exchange_us = collective_us(machine, "all_to_all_columns", rank.shard_bytes, problem.world_size, problem.nodes)
        return rank.launch_us + reads_us + writes_us + exchange_us
    shares = [length / rank.shard_rows for length in chunk_lengths(rank.shard_rows, chunks)]
    pieces = [
        _Piece(distance, index, rank.shard_bytes * share, share / rank.node_ranks)
        for distance in rank.distances
        for index, share in enumerate(shares)
    ]
    lanes = CopyLanes(rank, 1, one=True)
    if family.scatter == "tile_stores":
        return _stored_lookup_us(rank, lanes, pieces, reads_us, writes_us)
    return _copied_lookup_us(rank, lanes, pieces, reads_us + writes_us)


def _stored_lookup_us(rank: Rank, lanes: CopyLanes, pieces: Sequence[_Piece], reads_us: float, writes_us: float) -> float:
    """Return the time of a lookup whose kernel stores its results at the peers. Each peer copies them into its result."""
    machine = rank.machine
    link_bytes_per_us = min(machine.stores.rate(machine.gpu.sms), rank.link_gbps(1)) * 1e3
    kernel_ends_at_us, arrivals_at_us = rank.flag_us + rank.launch_us, []
    for piece in pieces:
        store_us = piece.bytes / link_bytes_per_us
        stall_us = machine.stores.stall * piece.bytes / link_bytes_per_us
        kernel_ends_at_us += max(reads_us * piece.lookup_share + stall_us, store_us) + 2 * rank.latency_us(piece.distance)
        arrivals_at_us.append(kernel_ends_at_us + rank.latency_us(piece.distance))
    kernel_ends_at_us += (reads_us + writes_us) / rank.node_ranks
    copied_by_kernels = machine.copies.strided == "kernel"  # these copies wait until the lookup has left the SMs
    for piece, piece_at_us in zip(pieces, arrivals_at_us, strict=True):
        lanes.enqueue_wait(1, piece_at_us)
        lanes.enqueue_local_copy(piece.bytes, ready_at_us=kernel_ends_at_us * copied_by_kernels)
    lanes.enqueue_all_read()
    return max(kernel_ends_at_us, lanes.joined_at_us)


def _copied_lookup_us(rank: Rank, lanes: CopyLanes, pieces: Sequence[_Piece], lookup_us: float) -> float:
    """Return the time of a lookup whose pieces are sent while it runs, by kernels or by copy engines.

    The rank copies the pieces that have arrived into its result after the lookup.
    """
    machine, kernels = rank.machine, rank.machine.kernels
    copied_by_kernels = machine.copies.strided == "kernel" and machine.slow_lookups
    gbps, slowdown = lanes.gbps(1), 1.0
    if copied_by_kernels:  # the lookup and the copies share the memory bandwidth equally
        hbm_gbps = machine.gpu.hbm_gbps
        fair_gbps = hbm_gbps / (1 + kernels.lookup_copy_bytes)
        gbps = min(kernels.lookup_copy_gbps, gbps, fair_gbps)
        slowdown = hbm_gbps / max(hbm_gbps - kernels.lookup_copy_bytes * gbps, fair_gbps)
    lookup_ends_at_us, lane_free_at_us, arrivals_at_us = rank.launch_us, rank.fork_us, []
    copies: list[CopyLoad] = []
    for piece in pieces:
        lookup_ends_at_us = work_ends_at_us(
            lookup_ends_at_us, lookup_us * piece.lookup_share, _running_copies(copies, lookup_ends_at_us), slowdown
        )
        computed_at_us = lookup_ends_at_us + kernels.lookup_copy_us * copied_by_kernels
        flags_us = rank.flag_us * (2 if piece.chunk == 0 else 1)
        begins_at_us = max(lane_free_at_us, computed_at_us + rank.wake_us) + flags_us + machine.copies.copy_us
        lane_free_at_us = begins_at_us + piece.bytes / (gbps * 1e3) + rank.flag_us
        copies.append(CopyLoad(lane_free_at_us - rank.flag_us, begins_at_us=begins_at_us))
        arrivals_at_us.append(lane_free_at_us + rank.latency_us(piece.distance))
    load = _running_copies(copies, lookup_ends_at_us)
    lane = ComputeLane(rank, work_ends_at_us(lookup_ends_at_us, lookup_us / rank.node_ranks, load, slowdown))
    for piece, piece_at_us in zip(pieces, arrivals_at_us, strict=True):
        lane.enqueue_wait(piece_at_us)
        lane.enqueue_kernel(local_copy_us(machine, round(piece.bytes)))
    return max(lane.free_at_us + rank.flag_us, lane_free_at_us + rank.fork_us)


def _running_copies(copies: Sequence[CopyLoad], at_us: float) -> CopyLoad:
    """Return the load of the copies that have not ended at `at_us`."""
    running = [copy for copy in copies if copy.ends_at_us > at_us]
    return CopyLoad(running[-1].ends_at_us, begins_at_us=running[0].begins_at_us) if running else CopyLoad()
