"""Estimates for scatters by weft's own GEMM kernel, whose tiles are counted, or are stored at their owner."""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.perf.lanes import (
    ComputeLane,
    CopyLanes,
    CopyLoad,
    LaneEnds,
    Rank,
    waves_after_first,
    waves_of_first,
    waves_of_last,
    work_ends_at_us,
)
from weft.perf.shapes import Arriving
from weft.perf.terms import GemmCost, adding_us, hbm_us, stalled_us
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
        """Return the bytes of a piece of a chunk."""
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
        """The load of the copies so far."""
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
        """Return when a chunk has arrived from all peers."""
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
