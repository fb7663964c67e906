"""RaggedExchange has the device state and launches the kernels of one operator of one shape, whose splits are on the device.

    lay_out(rows)      set the buffers where rows land, or products are read, on every rank    before the first launch
    start(splits)      layout_kernel, one block: exchange counts, make tables                  first in every call
    dispatch()         dispatch_kernel: a step that pushes rows, then multiplies rows that arrive
    combine()          combine_kernel: a step that multiplies rows, then pulls products of peers
    push() pull()      push_kernel, pull_kernel: a step that only pushes, or only pulls
    collect()          collect_kernel: a step that returns the rows that arrived
    wait_for_flags()   await_kernel: waits of the lane

The kernels are in weft.kernels.segments, weft.kernels.ragged and weft.kernels.ragged_rows. N and K are those of each GEMM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.compat.device import capabilities
from weft.core.machine import Machine
from weft.core.problem import Scaling
from weft.kernels.gemm import INTERPRETED, INTERPRETED_FP8
from weft.kernels.launch import Launcher
from weft.kernels.ragged import GroupedProduct, combine_kernel, dispatch_kernel
from weft.kernels.ragged_rows import (
    CopiedScales,
    Moving,
    StepTables,
    await_kernel,
    collect_kernel,
    pull_kernel,
    push_kernel,
)
from weft.kernels.scaled import scales_of, specialised
from weft.kernels.segments import (
    FAULT_FIELDS,
    GROUP_FIELDS,
    MOVE_FIELDS,
    NOTES,
    PART_FIELDS,
    TILE_FIELDS,
    LayoutSizes,
    LayoutTables,
    layout_kernel,
)
from weft.perf.shapes import TileShape, promotes, pull_sms, push_sms, tallest
from weft.triton.flags import asynchronous

MOST_SEGMENTS = 256
"""The bound of world size times experts, because the layout compares all pairs of a rank's segments in registers."""
_ALIGN = 8
"""The number of 16-bit elements of one access. Widths and row strides are multiples of it."""
_COPY_BYTES = 16
"""The bytes of an FP8 row that one access moves."""
_MOST_SCALES = 64
"""The most scales of an FP8 row that a block copies together."""
_STAGES = 4
_TURN_FIELDS = 2
"""A step has two counters on the device: the next unit or tile to draw, and the number of blocks that have started."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Shape holds the sizes of an exchange. All but rank are the same on every rank.

    max_rows: the most rows that may arrive.
    a_rows: the most rows of a, for a combine.
    n: the columns that are stored.
    dtype: the dtype of results.
    gated: b has 2 n columns, and a dispatch stores silu(left half) * right half.
    scaling: the scaling of FP8 operands.
    """

    rank: int
    world_size: int
    experts: int
    max_rows: int
    a_rows: int
    n: int
    k: int
    dtype: torch.dtype
    dispatch: bool
    gated: bool = False
    scaling: Scaling | None = None
    device: torch.device = field(compare=False)
    machine: Machine = field(compare=False)

    @property
    def segments(self) -> int:
        """The number of rows of the table of moves, a power of two."""
        return max(2, int(triton.next_power_of_2(self.world_size * self.experts)))

    @property
    def groups(self) -> int:
        """The number of rows of the table of groups, a power of two."""
        return max(2, int(triton.next_power_of_2(self.experts)))

    @property
    def blocks(self) -> TileShape:
        """The tile shape, the same on every rank. It has fewer rows if experts have few rows."""
        if self.device.type != "cuda":
            found = INTERPRETED if self.scaling is None else INTERPRETED_FP8
        else:
            found = tallest(self.max_rows // self.experts, capabilities(self.device), self.scaling)
        return gated_shape(found) if self.gated else found

    @property
    def move(self) -> tuple[int, int]:
        """The numbers of rows and columns that a block moves together."""
        rows, cols = (64, 256) if self.device.type == "cuda" else (16, 64)
        return rows, cols * (1 + (self.dispatch and self.scaling is not None))

    @property
    def movers(self) -> int:
        """The number of blocks that push, or pull."""
        if self.device.type != "cuda":
            return 1
        if self.dispatch:
            return push_sms(self.machine, capabilities(self.device).sms, alone=False)
        rate_name = "bfloat16" if self.scaling is None else self.scaling.rate_name
        return pull_sms(self.machine, self.blocks, k=self.k, world_size=self.world_size, rate_name=rate_name)


class SegmentPart(NamedTuple):
    """A SegmentPart is one part of a step: the segment of an expert that goes to another rank, or comes from it.

    signals: its counter on the rank that its rows go to, or -1.
    waits: the counters of this rank that it waits for.
    """

    expert: int
    other: int
    signals: int
    waits: tuple[int, ...]


class StepParts(NamedTuple):
    """StepParts lists the segments that a step copies, and those that it multiplies or returns by tiles, in their order."""

    copies: tuple[SegmentPart, ...]
    products: tuple[SegmentPart, ...]


class Orders(NamedTuple):
    """Orders holds the work of a rank's steps, as the schedule defines it. It is the same in every call.

    shares: the peers in the order in which they get this rank's counts.
    arriving: the counter of the arriving segment, or -1, by expert and source rank.
    """

    shares: tuple[int, ...]
    arriving: tuple[int, ...]
    steps: tuple[StepParts, ...]


class Step(NamedTuple):
    """A Step holds the tables that a step's kernels read on the device.

    both: the tables for a kernel that copies and multiplies.
    copies: the tables for a kernel that only copies.
    collected: the tables for a kernel that returns the rows that arrived.
    waits: all counters that its products wait for.
    copying: whether the step copies.
    """

    both: StepTables
    copies: StepTables
    collected: StepTables
    waits: torch.Tensor
    copying: bool


class Shared(NamedTuple):
    """Shared describes a tensor that every rank has.

    local: this rank's tensor.
    peers: int64 [world_size], the address of each rank's tensor.
    """

    local: torch.Tensor
    peers: torch.Tensor


class RaggedScales(NamedTuple):
    """RaggedScales holds the float32 scales of FP8 operands in one call.

    a: [rows, .], contiguous.
    b: [experts, ., .].
    """

    a: torch.Tensor
    b: torch.Tensor


class RaggedExchange:
    """A RaggedExchange has the device state of one operator of one shape, and launches its kernels.

    addresses: the address of each rank's `symmetric_bytes` of zeroed symmetric memory.
    memory: this rank's symmetric memory.
    sms: the most concurrent blocks.
    tries: a wait gives up after this many looks.
    """

    def __init__(
        self, shape: Shape, orders: Orders, addresses: Sequence[int], memory: torch.Tensor, *, sms: int, tries: int
    ) -> None:
        self.shape, self.sms, self.tries = shape, sms, tries
        at = 0

        def shared(count: int) -> Shared:
            nonlocal at
            first, at = at, at + 4 * count
            peers = torch.tensor([address + first for address in addresses], dtype=torch.int64, device=shape.device)
            return Shared(memory[first:at].view(torch.int32), peers)

        self.counts, self.notified, self.arrived = map(shared, _section_lengths(shape))
        self.rows: Shared | None = None
        self.landed_scales: Shared | None = None
        self._row_addresses: list[int] = []

        def zeros(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=shape.device)

        segments = shape.world_size * shape.experts
        self.calls, self.goals = zeros(1, torch.int64), zeros(segments)
        self.groups, self.parts = zeros(GROUP_FIELDS.value * shape.groups), zeros(PART_FIELDS.value * segments)
        self.notes = zeros(NOTES.value, torch.int64)
        self.host_notes = torch.zeros(NOTES.value, dtype=torch.int64, pin_memory=shape.device.type == "cuda")
        self._make_steps(orders)
        self._launcher = Launcher()

    def _make_steps(self, orders: Orders) -> None:
        """Make the constant tables, and allocate the tables that each call writes. Steps with the same order share tables."""
        shape = self.shape

        def table(values: Sequence[object]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=shape.device)

        def rows(parts: Sequence[SegmentPart]) -> tuple[tuple[int, int, int], ...]:
            """Return the rows of the table of orders."""
            found = [(part.expert, part.other, part.signals) for part in parts]
            return (*found, *[(shape.experts, 0, -1)] * (shape.segments - len(found)))

        copying = list(dict.fromkeys(rows(step.copies) for step in orders.steps if step.copies))
        multiplying = list(dict.fromkeys(rows(step.products) for step in orders.steps if step.products))
        self._copying, self._multiplying = len(copying), len(multiplying)
        # One more table stays empty, for steps that copy nothing, or multiply nothing.
        moves = torch.zeros(len(copying) + 1, shape.segments * MOVE_FIELDS.value, dtype=torch.int32, device=shape.device)
        tiles = torch.zeros(len(multiplying) + 1, shape.segments * TILE_FIELDS.value, dtype=torch.int32, device=shape.device)
        self.moves, self.tiles = moves, tiles
        self.turns = table([0] * triton.next_power_of_2(1 + _TURN_FIELDS * len(orders.steps)))
        self._tables = LayoutTables(
            shares=table(orders.shares),
            arriving=table(orders.arriving),
            orders=table([*copying, *multiplying]),
            places=table([self._places(order) for order in multiplying]),
            calls=self.calls,
            goals=self.goals,
            groups=self.groups,
            parts=self.parts,
            moved=torch.zeros_like(self.parts),
            moves=self.moves,
            tiles=self.tiles,
            turns=self.turns,
        )
        self.steps = []
        for number, step in enumerate(orders.steps):
            copy_gates, gates = (
                table(self._gates_by_segment(step.copies)),
                table(self._gates_by_segment(step.products)),
            )
            both = StepTables(
                groups=self.groups,
                parts=self.parts,
                moves=self.moves[copying.index(rows(step.copies)) if step.copies else -1],
                tiles=self.tiles[multiplying.index(rows(step.products)) if step.products else -1],
                gates=gates if shape.dispatch else copy_gates,
                counters=table(self._counters_by_segment(step.products)),
                turns=self.turns,
                turn=self.turns[1 + _TURN_FIELDS * number :],
                goals=self.goals,
                notes=self.notes,
            )
            pushed = StepTables(groups=self.groups, moves=both.moves)
            pulled = both._replace(groups=None, parts=None, tiles=None, counters=None, turns=None)
            collected = both._replace(groups=None, moves=None, counters=None, turn=None)
            waits = table([word for part in step.products for word in part.waits])
            self.steps.append(Step(both, pushed if shape.dispatch else pulled, collected, waits, bool(step.copies)))

    def _places(self, order: Sequence[tuple[int, int, int]]) -> list[int]:
        found = [self.shape.segments] * (self.shape.experts * self.shape.world_size)
        for place, (expert, other, _) in enumerate(order):
            if expert < self.shape.experts:
                found[expert * self.shape.world_size + other] = place
        return found

    def _gates_by_segment(self, parts: Sequence[SegmentPart]) -> list[list[int]]:
        """Return the counters that each segment waits for, padded to equal numbers with -1."""
        shape, most = self.shape, max([1, *(len(part.waits) for part in parts)])
        found = [[-1] * most for _ in range(shape.experts * shape.world_size)]
        for part in parts:
            found[part.expert * shape.world_size + part.other][: len(part.waits)] = part.waits
        return found

    def _counters_by_segment(self, parts: Sequence[SegmentPart]) -> list[int]:
        """Return the counter of each segment, or -1."""
        found = [-1] * (self.shape.experts * self.shape.world_size)
        for part in parts:
            found[part.expert * self.shape.world_size + part.other] = part.signals
        return found

    def lay_out(self, rows: Sequence[torch.Tensor], scales: Sequence[torch.Tensor] = ()) -> None:
        """Set the shared buffers.

        rows: the buffer of each rank, contiguous, where rows land (dispatch) or products are read (combine).
        scales: the buffer of each rank for the scales of FP8 rows.
        """
        addresses = [each.data_ptr() for each in rows]
        if addresses != self._row_addresses:
            self.rows, self._row_addresses = self._shared(rows), addresses
            self.landed_scales = self._shared(scales) if scales else None

    def _shared(self, by_rank: Sequence[torch.Tensor]) -> Shared:
        peers = torch.tensor([each.data_ptr() for each in by_rank], dtype=torch.int64, device=self.shape.device)
        return Shared(by_rank[self.shape.rank], peers)

    @property
    def _landing_rows(self) -> Shared:
        assert self.rows is not None, "lay_out comes first"
        return self.rows

    def start(self, splits: torch.Tensor, received: torch.Tensor, *, a_rows: int) -> None:
        """Exchange counts and make the tables.

        splits: this rank's splits, int32 or int64.
        received: int32, where the counts of the rows that arrive are written.
        a_rows: the number of rows of a.
        """
        shape, blocks = self.shape, self.shape.blocks
        arguments = (
            *(splits, self.counts, self.notified, self._tables, received, self.notes, self.host_notes.data_ptr()),
            *(a_rows, shape.max_rows, self.tries, shape.rank, -(-shape.n // blocks.n)),
        )
        sizes = LayoutSizes(
            W=shape.world_size,
            E=shape.experts,
            Q=shape.segments,
            EQ=shape.groups,
            RANKS=triton.next_power_of_2(shape.world_size),
            COPYING=self._copying,
            MULTIPLYING=self._multiplying,
            TURNS=self.turns.numel(),
            DISPATCH=int(shape.dispatch),
            MOVE_ROWS=shape.move[0],
            TILE_ROWS=blocks.m,
        )
        key = ("layout", splits.dtype, *_alignments(splits, received))
        # All pairs of segments are compared in registers.
        self._launcher(layout_kernel, 1, arguments, {"S": sizes}, key=key, num_warps=max(8, shape.segments // 8))

    def _landing(self) -> Shared:
        """Return the landing buffers, viewed as bytes for FP8 rows."""
        return Shared(_as_moved(self._landing_rows.local), self._landing_rows.peers)

    def dispatch(
        self,
        step: int,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        *,
        keep_own: bool = False,
        scales: RaggedScales | None = None,
    ) -> None:
        """Multiply the rows that arrive by their expert's b, gated or not. Rows of out below them become zeros.

        step: its number in the orders.
        a: [rows, K], contiguous.
        keep_own: push all of this rank's own rows, too.
        scales: the scales of FP8 operands.
        """
        blocks = self.shape.blocks
        a_block = [blocks.m, blocks.k]
        first = (
            TensorDescriptor.from_tensor(a, a_block),
            TensorDescriptor.from_tensor(self._landing_rows.local, a_block),
            _b_descriptor(b, blocks),
            _descriptor(out, blocks),
            _as_moved(a),
            self._pushed(None if scales is None else scales.a),
        )
        landed = [] if self.landed_scales is None else [self.landed_scales.local]
        self._grouped(dispatch_kernel, step, first, (int(keep_own),), a, b, out, self._landing(), scales, landed)
        if not self.shape.n:  # without columns no tile would wait
            self.wait_for_flags(self.steps[step].waits)

    def combine(
        self, step: int, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, scales: RaggedScales | None = None
    ) -> None:
        """Compute a @ b by expert, and pull this rank's rows of all ranks' products. Rows of out below them become zeros.

        step: its number in the orders.
        a: [rows, K], contiguous, with at most a_rows rows.
        scales: the scales of FP8 operands.
        """
        blocks = self.shape.blocks
        first = (
            TensorDescriptor.from_tensor(a, [blocks.m, blocks.k]),
            _b_descriptor(b, blocks),
            _descriptor(self._landing_rows.local, blocks),
        )
        self._grouped(combine_kernel, step, first, (), a, b, out, self._landing_rows, scales, [])

    def _grouped(
        self,
        kernel: Any,
        step: int,
        first: tuple[object, ...],
        last: tuple[object, ...],
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        rows: Shared,
        scales: RaggedScales | None,
        landed: Sequence[torch.Tensor],
    ) -> None:
        """Launch a multiplying kernel.

        first, last: the arguments in which the two kernels differ.
        rows: the shared buffer of rows or products.
        landed: the scales of rows that landed.
        """
        shape, blocks, tables = self.shape, self.shape.blocks, self.steps[step].both
        movers = shape.movers if self.steps[step].copying else 0  # blocks that copy
        scaling, read, pitch = shape.scaling, None, None
        if scales is not None and scaling is not None:
            read, pitch = scales_of((scales.a, *landed), scales.b[0], scaling.recipe), scales.b.stride(0)
        promoted = scaling is not None and promotes(capabilities(out.device), scaling)
        arguments = (
            *first,
            *(out, rows, self.arrived, tables, read, pitch),
            *(self.tries, shape.rank, shape.n, shape.k, shape.max_rows, movers),
            *last,
        )
        product = GroupedProduct(
            BLOCK_M=blocks.m,
            BLOCK_N=blocks.n,
            BLOCK_K=blocks.k,
            GROUP=blocks.group,
            B_TRANSPOSED=bool(b.numel()) and _transposed(b),
            GATED=shape.gated,
            ASYNCHRONOUS=asynchronous(out.device),
            RECIPE="" if scaling is None else scaling.recipe,
            PROMOTED=promoted,
            PAIRS=promoted and blocks.pairs,
        )
        self._launcher(
            kernel,
            max(self.sms, movers + 1),
            arguments,
            {"M": self._moving(tables), "P": product},
            key=("product", b.stride(), tables.gates.shape[1], *_alignments(a, b, out), pitch, *specialised(read)),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )

    def push(self, step: int, a: torch.Tensor, *, keep_own: bool, scale_a: torch.Tensor | None = None) -> None:
        """Push rows of a to their destinations.

        step: its number in the orders.
        keep_own: push all of this rank's own rows, too.
        scale_a: the scales of FP8 rows, contiguous.
        """
        tables, pushed = self.steps[step].copies, self._pushed(scale_a)
        arguments = (
            *(_as_moved(a), self._landing(), pushed, self.arrived, tables),
            *(self.shape.rank, self.shape.k, int(keep_own)),
        )
        key = ("push", *_alignments(a), scale_a is not None and scale_a.data_ptr() % 16)
        self._launcher(push_kernel, self.sms, arguments, {"M": self._moving(tables)}, key=key, num_warps=8)

    def _pushed(self, scale_a: torch.Tensor | None) -> CopiedScales | None:
        """Return the sources and destinations of the scales of pushed rows."""
        landed = self.landed_scales
        return None if scale_a is None or landed is None else CopiedScales(scale_a, scale_a.shape[1], *landed)

    def pull(self, step: int, out: torch.Tensor) -> None:
        """Pull this rank's products from peers into out. step: its number in the orders."""
        tables = self.steps[step].copies
        arguments = (out, self._landing_rows, self.arrived.local, tables, self.tries, self.shape.n)
        key = ("pull", tables.gates.shape[1], *_alignments(out))
        self._launcher(pull_kernel, self.sms, arguments, {"M": self._moving(tables)}, key=key, num_warps=8)

    def wait_for_flags(self, counters: torch.Tensor) -> None:
        """Wait for counters of this rank. counters: their numbers, int32."""
        arguments = (counters, counters.numel(), self.arrived.local, self.goals, self.notes, self.tries)
        self._launcher(await_kernel, 1, arguments, {}, key="await", num_warps=1)

    def collect(self, step: int, out: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        """Copy the rows that arrived to out, and the scales of FP8 rows to scales. Rows below them become zeros.

        step: its number in the orders.
        """
        shape, tables, copied = self.shape, self.steps[step].collected, None
        if scales is not None and self.landed_scales is not None:
            copied = CopiedScales(self.landed_scales.local, scales.shape[1], scales)
        arguments = (
            *(self._landing().local, _as_moved(out), copied, self.arrived.local, tables),
            *(self.tries, shape.k, shape.max_rows),
        )
        key = ("collect", tables.gates.shape[1], *_alignments(out, *([] if scales is None else [scales])))
        self._launcher(collect_kernel, self.sms, arguments, {"M": self._moving(tables)}, key=key, num_warps=8)

    def _moving(self, tables: StepTables) -> Moving:
        """Return the constexpr parameters of a kernel that moves rows by these tables."""
        shape, (rows, cols), scales = self.shape, self.shape.move, 0
        if shape.dispatch and shape.scaling is not None:
            scales = shape.scaling.scales_shape("a", 1, shape.k)[1]
        return Moving(
            W=shape.world_size,
            E=shape.experts,
            Q=shape.segments,
            GATES=1 if tables.gates is None else tables.gates.shape[1],
            ROWS=rows,
            COLS=cols,
            STAGES=_STAGES,
            ALIGN=_ALIGN,
            TILE_ROWS=shape.blocks.m,
            COPY_ALIGN=_COPY_BYTES if scales else _ALIGN,
            SCALES=min(_MOST_SCALES, triton.next_power_of_2(scales)),
        )


def gated_shape(blocks: TileShape) -> TileShape:
    """Return the shape of the two tiles that a block of a gated GEMM computes. Its loop takes one step over K where `blocks`
    may take two."""
    return replace(blocks, n=blocks.n // 2, stages=blocks.stages * (1 + blocks.pairs))


def _section_lengths(shape: Shape) -> tuple[int, int, int]:
    """Return the int32 elements of each section of symmetric memory.

    The first section has counts and the faults of splits, both in two slots for each rank. The others have notifications and
    arrivals.
    """
    segments = shape.world_size * shape.experts
    return 2 * shape.world_size * (segments + FAULT_FIELDS.value), shape.world_size, segments


def symmetric_bytes(shape: Shape) -> int:
    """Return the symmetric memory that a RaggedExchange needs in addition to the landing buffers."""
    return 4 * sum(_section_lengths(shape))


def _as_moved(rows: torch.Tensor) -> torch.Tensor:
    """Return rows as kernels copy them: FP8 rows as bytes."""
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows


def _alignments(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() % 16 for tensor in tensors)


def _descriptor(rows: torch.Tensor, blocks: TileShape) -> TensorDescriptor:
    """Return the descriptor for storing whole tiles of a contiguous matrix. A matrix without columns gets a dummy."""
    return TensorDescriptor.from_tensor(rows if rows.numel() else rows.new_empty(1, _ALIGN), [blocks.m, blocks.n])


def _transposed(b: torch.Tensor) -> bool:
    return b.stride(2) != 1


def _b_descriptor(b: torch.Tensor, blocks: TileShape) -> TensorDescriptor:
    """Return the descriptor of b [experts, K, N], either stride 1. A b without columns gets a dummy."""
    if not b.numel():
        b = b.new_empty(1, _ALIGN, _ALIGN)
    if _transposed(b):
        return TensorDescriptor.from_tensor(b.transpose(1, 2), [1, blocks.n, blocks.k])
    return TensorDescriptor.from_tensor(b, [1, blocks.k, blocks.n])
