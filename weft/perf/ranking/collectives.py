"""Estimates for collectives without a matmul.

Copy engines push pieces into slots or pull them from there, and a few SMs add them as they arrive. In an all-reduce, the sum of
a piece is sent back while the next piece arrives.
"""

from __future__ import annotations

from weft.core.problem import CollectiveProblem
from weft.perf.lanes import ComputeLane, CopyLanes, Rank, chunk_lengths
from weft.perf.terms import local_copy_us, whole_collective_us
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
        """Run all pieces. Return the time of the collective."""
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
        """Add up the pieces of all ranks."""
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
