"""IncomingPieces enqueues the transfers of gathered pieces, and computes when each piece arrives."""

from __future__ import annotations

from collections.abc import Sequence

from weft.perf.lanes import CopyLanes, CopyLoad, Rank
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
