"""Estimates for operators without a matmul: collectives, and embedding lookups with their exchange.

In a collective, copy engines push pieces into slots or pull them from there, and a few SMs add them as they arrive. In an
all-reduce, the sum of a piece is sent back while the next piece arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.core.problem import CollectiveProblem
from weft.perf.lanes import ComputeLane, CopyLanes, CopyLoad, Rank, chunk_lengths, work_ends_at_us
from weft.perf.terms import collective_us, gathered_bytes, hbm_us, local_copy_us, whole_collective_us
from weft.schedules import collectives
from weft.schedules.traits import FamilyTraits


def estimate_collective_us(rank: Rank, family: FamilyTraits, chunks: int) -> float:
    """Return the time of a collective without a matmul."""
    problem = rank.problem
    assert isinstance(problem, CollectiveProblem)
    if family.matmul == "whole" or problem.world_size == 1:
        return whole_collective_us(rank.machine, problem)
    return _CopyEngineCollective(rank, problem, chunks, pulls=family.gather == "pull_copies").estimate_us()


class _CopyEngineCollective:
    """_CopyEngineCollective runs a collective by copy engines, piece by piece, on three kinds of lanes.

    lanes: the copies. out: the compute lane, which copies pieces to and from the caller's tensors. sums: the SMs that add.
    """

    def __init__(self, rank: Rank, problem: CollectiveProblem, chunks: int, *, pulls: bool) -> None:
        self.rank, self.problem, self.machine, self.pulls = rank, problem, rank.machine, pulls
        self.is_all_reduce = problem.op == "all_reduce"
        self.into_result = problem.reachable and not pulls and problem.op != "reduce_scatter"
        """Peers copy into the result itself, so no slots are needed."""
        layout = collectives.cut_into_pieces(problem, chunks, self._staged_parts())
        rows = rank.shard_rows
        whole = self.into_result and not self.is_all_reduce
        lengths = [rows] if whole else chunk_lengths(rows, layout.count_pieces(rows))
        self.slots, self.piece_bytes = layout.slots, [length * problem.itemsize for length in lengths]
        self.lanes = CopyLanes(rank, (1 + self.is_all_reduce) * len(lengths), matmul_us=0.0)
        self.out, self.sums = ComputeLane(rank), ComputeLane(rank, rank.fork_us + rank.launch_us)
        self._summed_at_us: list[float] = []

    def _staged_parts(self) -> int:
        """Return the number of parts of the data that are staged in slots."""
        if self.pulls:
            return self.rank.node_ranks if self.is_all_reduce else 1
        return (2 if self.is_all_reduce and not self.into_result else 1) * (self.rank.node_ranks - 1)

    def estimate_us(self) -> float:
        rank, sums_up, pieces = self.rank, self.problem.sums, len(self.piece_bytes)
        own_copy_us = local_copy_us(self.machine, rank.shard_rows * self.problem.itemsize)
        if not (sums_up or self.pulls):
            self.out.enqueue_kernel(own_copy_us)
        for index in range(pieces + self.is_all_reduce):
            received, arrive_at_us = index, list[float]()
            if index < pieces:
                arrive_at_us = self._offer_and_pull(index) if self.pulls and not sums_up else self._push(index)
                if sums_up:
                    self._add_up(index, arrive_at_us)
            if self.is_all_reduce and index:
                received, arrive_at_us = index - 1, self._exchange_sum(index)
            if self.into_result and arrive_at_us:
                self.out.enqueue_wait(*arrive_at_us)
            elif not self.pulls and (index if self.is_all_reduce else not sums_up):
                for piece_at_us in arrive_at_us:
                    self.out.enqueue_wait(piece_at_us)
                    self.out.enqueue_kernel(local_copy_us(self.machine, self.piece_bytes[received]))
        if self.pulls and not sums_up:
            self.out.enqueue_kernel(own_copy_us)
        return max(self.out.free_at_us, self.sums.free_at_us * sums_up, self.lanes.joined_at_us)

    def _offer_and_pull(self, index: int) -> list[float]:
        """Copy a piece into its slot, from which the peers pull it. Return when the pieces of the peers arrive."""
        rank, piece_bytes, arrive_at_us = self.rank, self.piece_bytes[index], []
        self.out.enqueue_kernel(local_copy_us(self.machine, piece_bytes) + rank.flag_us * (1 + self._waits_for_slot(index)))
        for distance in rank.distances:
            self.lanes.enqueue_wait(distance, self.out.free_at_us + rank.latency_us(distance))
            arrive_at_us.append(self.lanes.enqueue_copy(distance, piece_bytes, signal=self._signals_read(index)))
        return arrive_at_us

    def _push(self, index: int) -> list[float]:
        """Push a piece to each peer. Return when the pieces of the peers arrive."""
        arrive_at_us = []
        for distance in self.rank.distances:
            self.lanes.enqueue_flags(int(self._waits_for_slot(index)), distance)
            arrive_at_us.append(self.lanes.enqueue_copy(distance, self.piece_bytes[index]))
        return arrive_at_us

    def _add_up(self, index: int, arrive_at_us: list[float]) -> None:
        rank, piece_bytes = self.rank, self.piece_bytes[index]
        gbps = min(self.machine.gpu.hbm_gbps, self.problem.sms * self.machine.kernels.sm_gbps)
        self.sums.enqueue_wait(*arrive_at_us)
        self.sums.enqueue_kernel((rank.node_ranks + 1) * piece_bytes / (gbps * 1e3) + rank.flag_us)
        self._summed_at_us.append(self.sums.free_at_us)
        self.sums.free_at_us += local_copy_us(self.machine, piece_bytes) if self.pulls else 0.0

    def _exchange_sum(self, index: int) -> list[float]:
        """Exchange the sums of the piece before `index`. Return when those of the peers arrive."""
        arrive_at_us = []
        for distance in self.rank.distances:
            if self.pulls or distance == 1:
                self.lanes.enqueue_wait(distance, self._summed_at_us[index - 1])
            signal = not self.pulls or self._signals_read(index)
            arrive_at_us.append(self.lanes.enqueue_copy(distance, self.piece_bytes[index - 1], signal=signal))
        return arrive_at_us

    def _waits_for_slot(self, index: int) -> bool:
        """Return whether a piece waits until the piece before it in the same slot, of this call or the last one, was read."""
        return index >= self.slots or index == 0

    def _signals_read(self, index: int) -> bool:
        """Return whether the reader of a piece signals that its slot is free: a later piece waits for that."""
        return index + self.slots < len(self.piece_bytes) or index == len(self.piece_bytes) - 1


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
