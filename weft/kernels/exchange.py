"""One operator of one shape with splits on the device: what it keeps there between calls, and the launches of its kernels.

    lay_out(rows)   where rows land, or products wait, on every rank               before the first launch
    start(splits)   layout_kernel, one block: counts exchanged, tables made        first in every call
    dispatch()      dispatch_kernel: a step that multiplies what arrives, and pushes rows before
    combine()       combine_kernel: a step that multiplies rows, and pulls those of peers behind
    push() pull()   push_kernel, pull_kernel: a step that does nothing else
    collect()       collect_kernel: a step that hands back the rows that have arrived
    await_words()   await_kernel: waits of the lane

What they do is in weft.kernels.segments, weft.kernels.ragged and weft.kernels.ragged_rows. Legend: N, K of each GEMM.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.compat.device import capabilities
from weft.core.capabilities import Capabilities
from weft.core.machine import Machine
from weft.core.problem import Scaling
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
from weft.kernels.shapes import INTERPRETED, INTERPRETED_FP8, TileShape, promotes, push_sms, shapes_for
from weft.triton.flags import asynchronous

MOST_SEGMENTS = 256
"""World size times experts: the layout compares each of a rank's segments with each."""
_ALIGN = 8
"""Elements of 16 bits that are accessed at once: widths and row strides are multiples of it."""
_COPY_BYTES = 16
"""Bytes of an FP8 row that are accessed at once."""
_MOST_SCALES = 64
"""Scales of an FP8 row that a block copies at once."""
_PULL_SMS = (4, 12)
"""At least, so that one slow peer does not hold up all; at most, so that most SMs multiply."""
_STAGES = 4
_TURN_WORDS = 2
"""A step's words on the device that blocks draw from: the next unit or tile; how many blocks have begun."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of an exchange; the same on every rank but for rank. max_rows: that may arrive. a_rows: of a at most, for a combine. n:
    of what is stored. dtype: of results. gated: b has 2 n columns, of which a dispatch makes silu(left half) * right half.
    scaling: of FP8 operands."""

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
        """Rows of the table of moves: a power of two."""
        return max(2, int(triton.next_power_of_2(self.world_size * self.experts)))

    @property
    def groups(self) -> int:
        """Rows of the table of groups: a power of two."""
        return max(2, int(triton.next_power_of_2(self.experts)))

    @property
    def blocks(self) -> TileShape:
        """The tile shape: lower where experts have few rows; the same on every rank."""
        if self.device.type != "cuda":
            found = INTERPRETED if self.scaling is None else INTERPRETED_FP8
        else:
            found = _tallest(self.max_rows // self.experts, capabilities(self.device), self.scaling)
        return gated_shape(found) if self.gated else found

    @property
    def move(self) -> tuple[int, int]:
        """Rows and columns that a block moves at once."""
        rows, cols = (64, 256) if self.device.type == "cuda" else (16, 64)
        return rows, cols * (1 + (self.dispatch and self.scaling is not None))

    @property
    def movers(self) -> int:
        """Blocks that push, or pull: those that pull keep up with those that multiply, and half as many again."""
        if self.device.type != "cuda":
            return 1
        machine, blocks = self.machine, self.blocks
        if self.dispatch:
            return push_sms(machine, capabilities(self.device).sms, alone=False)
        efficiency = machine.gpu.flag_efficiency * machine.gpu.kernel_efficiency(blocks.m, blocks.n)
        # A product's element takes 2 k operations and has 2 bytes.
        rate = machine.tflops("bfloat16" if self.scaling is None else self.scaling.rate_name)
        per_us = efficiency * rate * 1e6 / self.k * (self.world_size - 1) / self.world_size
        least, most = _PULL_SMS
        return min(most, max(least, math.ceil(1.5 * per_us / (1e3 * machine.kernels.pull_gbps))))


class SegmentPart(NamedTuple):
    """One part of a step: the segment of an expert that goes to another rank, or comes from it. signals: the word that counts
    it, on the rank that its rows go to; -1: none. waits: words of this rank."""

    expert: int
    other: int
    signals: int
    waits: tuple[int, ...]


class StepParts(NamedTuple):
    """What a step copies, and what it multiplies, or hands back by tiles, each in its order."""

    copies: tuple[SegmentPart, ...]
    products: tuple[SegmentPart, ...]


class Orders(NamedTuple):
    """What a rank's steps do, as the schedule says; the same in every call.

    shares: the peers in the order in which they are told of this rank's counts. arriving: by expert and rank, the word that
    counts what comes from there; -1: none.
    """

    shares: tuple[int, ...]
    arriving: tuple[int, ...]
    steps: tuple[StepParts, ...]


class Step(NamedTuple):
    """What a step's kernels read on the device: where one copies and multiplies, where it only copies, and where it hands back
    what has arrived. waits: words that its products wait for, all of them."""

    both: StepTables
    copies: StepTables
    collected: StepTables
    waits: torch.Tensor
    copying: bool


class Shared(NamedTuple):
    """A tensor that every rank has: this rank's, and int64 [world_size], the address of each rank's."""

    local: torch.Tensor
    peers: torch.Tensor


class RaggedScales(NamedTuple):
    """The scales of FP8 operands in one call, float32: of a [rows, .], contiguous, and of b [experts, ., .]."""

    a: torch.Tensor
    b: torch.Tensor


class RaggedExchange:
    """What one operator of one shape keeps on a device between calls, and its kernels.

    addresses, memory: `word_bytes` of symmetric memory, zero at first: by rank where it lies, and this rank's. sms: blocks that
    may run at once. tries: how often a kernel looks at a word.
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

        self.counts, self.told, self.arrived = map(shared, _word_counts(shape))
        self.rows: Shared | None = None
        self.landed_scales: Shared | None = None
        self._row_addresses: list[int] = []

        def words(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=shape.device)

        segments = shape.world_size * shape.experts
        self.calls, self.goals = words(1, torch.int64), words(segments)
        self.groups, self.parts = words(GROUP_FIELDS.value * shape.groups), words(PART_FIELDS.value * segments)
        self.notes = words(NOTES.value, torch.int64)
        self.host_notes = torch.zeros(NOTES.value, dtype=torch.int64, pin_memory=shape.device.type == "cuda")
        self._lay_steps(orders)
        kernels: tuple[Any, ...] = (layout_kernel, dispatch_kernel, combine_kernel, collect_kernel)
        self._layout, self._dispatch, self._combine, self._collect = map(Launcher, kernels)
        others: tuple[Any, ...] = (push_kernel, pull_kernel, await_kernel)
        self._push, self._pull, self._await = map(Launcher, others)

    def _lay_steps(self, orders: Orders) -> None:
        """The constant tables, and room for those that each call makes of them. Steps of one order share these."""
        shape = self.shape

        def table(values: Sequence[object]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=shape.device)

        def rows(parts: Sequence[SegmentPart]) -> tuple[tuple[int, int, int], ...]:
            """Of the table of orders."""
            found = [(part.expert, part.other, part.signals) for part in parts]
            return (*found, *[(shape.experts, 0, -1)] * (shape.segments - len(found)))

        copying = list(dict.fromkeys(rows(step.copies) for step in orders.steps if step.copies))
        multiplying = list(dict.fromkeys(rows(step.products) for step in orders.steps if step.products))
        self._copying, self._multiplying = len(copying), len(multiplying)
        # One more, which stays empty, for steps that copy nothing, or multiply nothing.
        moves = torch.zeros(len(copying) + 1, shape.segments * MOVE_FIELDS.value, dtype=torch.int32, device=shape.device)
        tiles = torch.zeros(len(multiplying) + 1, shape.segments * TILE_FIELDS.value, dtype=torch.int32, device=shape.device)
        self.moves, self.tiles = moves, tiles
        self.turns = table([0] * triton.next_power_of_2(1 + _TURN_WORDS * len(orders.steps)))
        self._tables = LayoutTables(
            shares=table(orders.shares),
            words=table(orders.arriving),
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
            copy_gates, gates = table(self._gates(step.copies)), table(self._gates(step.products))
            both = StepTables(
                groups=self.groups,
                parts=self.parts,
                moves=self.moves[copying.index(rows(step.copies)) if step.copies else -1],
                tiles=self.tiles[multiplying.index(rows(step.products)) if step.products else -1],
                gates=gates if shape.dispatch else copy_gates,
                counters=table(self._by_segment(step.products)),
                turns=self.turns,
                turn=self.turns[1 + _TURN_WORDS * number :],
                goals=self.goals,
                notes=self.notes,
            )
            pushed = StepTables(groups=self.groups, moves=both.moves)
            pulled = both._replace(groups=None, parts=None, tiles=None, counters=None, turns=None)
            collected = both._replace(groups=None, moves=None, counters=None, turn=None)
            waits = table([word for part in step.products for word in part.waits])
            self.steps.append(Step(both, pushed if shape.dispatch else pulled, collected, waits, bool(step.copies)))

    def _places(self, order: Sequence[tuple[int, int, int]]) -> list[int]:
        """By segment, its place in an order."""
        found = [self.shape.segments] * (self.shape.experts * self.shape.world_size)
        for place, (expert, other, _) in enumerate(order):
            if expert < self.shape.experts:
                found[expert * self.shape.world_size + other] = place
        return found

    def _gates(self, parts: Sequence[SegmentPart]) -> list[list[int]]:
        """By segment, the words to wait for, as many for each."""
        shape, most = self.shape, max([1, *(len(part.waits) for part in parts)])
        found = [[-1] * most for _ in range(shape.experts * shape.world_size)]
        for part in parts:
            found[part.expert * shape.world_size + part.other][: len(part.waits)] = part.waits
        return found

    def _by_segment(self, parts: Sequence[SegmentPart]) -> list[int]:
        """By segment, the word that counts it."""
        found = [-1] * (self.shape.experts * self.shape.world_size)
        for part in parts:
            found[part.expert * self.shape.world_size + part.other] = part.signals
        return found

    def lay_out(self, rows: Sequence[torch.Tensor], scales: Sequence[torch.Tensor] = ()) -> None:
        """rows: by rank, where rows land (dispatch), or products wait (combine), contiguous. scales: by rank, where those
        of FP8 rows land."""
        addresses = [each.data_ptr() for each in rows]
        if addresses != self._row_addresses:
            self.rows, self._row_addresses = self._shared(rows), addresses
            self.landed_scales = self._shared(scales) if scales else None

    def _shared(self, by_rank: Sequence[torch.Tensor]) -> Shared:
        peers = torch.tensor([each.data_ptr() for each in by_rank], dtype=torch.int64, device=self.shape.device)
        return Shared(by_rank[self.shape.rank], peers)

    @property
    def _laid(self) -> Shared:
        assert self.rows is not None, "lay_out comes first"
        return self.rows

    def start(self, splits: torch.Tensor, received: torch.Tensor, *, a_rows: int) -> None:
        """Exchange counts and lay out. splits: this rank's, int32 or int64. received: int32, written. a_rows: what a holds."""
        shape, blocks = self.shape, self.shape.blocks
        arguments = (
            *(splits, self.counts, self.told, self._tables, received, self.notes, self.host_notes.data_ptr()),
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
        key = (splits.dtype, *_alignments(splits, received))
        # Each segment is compared with each, in registers.
        self._layout(1, arguments, {"S": sizes}, key=key, num_warps=max(8, shape.segments // 8))

    def _landing(self) -> Shared:
        """Where rows land, those of FP8 as bytes."""
        return Shared(_as_moved(self._laid.local), self._laid.peers)

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
        """out = what arrives @ b, by expert, gated or not; zeros below. step: its number in the orders. a: [rows, K],
        contiguous. keep_own: all own rows are pushed, too. scales: of FP8 operands."""
        blocks = self.shape.blocks
        a_block = [blocks.m, blocks.k]
        first = (
            TensorDescriptor.from_tensor(a, a_block),
            TensorDescriptor.from_tensor(self._laid.local, a_block),
            _b_descriptor(b, blocks),
            _descriptor(out, blocks),
            _as_moved(a),
            self._pushed(None if scales is None else scales.a),
        )
        landed = [] if self.landed_scales is None else [self.landed_scales.local]
        self._grouped(self._dispatch, step, first, (int(keep_own),), a, b, out, self._landing(), scales, landed)
        if not self.shape.n:  # without columns there is no tile, and none that waits
            self.await_words(self.steps[step].waits)

    def combine(
        self, step: int, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, scales: RaggedScales | None = None
    ) -> None:
        """out = what arrives of all ranks' a @ b, by expert; zeros below. step: its number in the orders. a: [rows, K],
        contiguous, of at most a_rows. scales: of FP8 operands."""
        blocks = self.shape.blocks
        first = (
            TensorDescriptor.from_tensor(a, [blocks.m, blocks.k]),
            _b_descriptor(b, blocks),
            _descriptor(self._laid.local, blocks),
        )
        self._grouped(self._combine, step, first, (), a, b, out, self._laid, scales, [])

    def _movers(self, step: int) -> int:
        """How many blocks of a step that multiplies copy."""
        return self.shape.movers if self.steps[step].copying else 0

    def _grouped(
        self,
        launcher: Launcher,
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
        """Launch a kernel that multiplies. first, last: the arguments that the other one does not take in the same order. rows:
        where rows land, or products wait. landed: the scales of rows that have."""
        shape, blocks, movers, tables = self.shape, self.shape.blocks, self._movers(step), self.steps[step].both
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
        launcher(
            max(self.sms, movers + 1),
            arguments,
            {"M": self._moving(tables), "P": product},
            key=(b.stride(), tables.gates.shape[1], *_alignments(a, b, out), pitch, *specialised(read)),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )

    def push(self, step: int, a: torch.Tensor, *, keep_own: bool, scale_a: torch.Tensor | None = None) -> None:
        """Rows of a to where they land. step: its number in the orders. keep_own: of the own rows, all. scale_a: of FP8 rows,
        contiguous."""
        tables, pushed = self.steps[step].copies, self._pushed(scale_a)
        arguments = (
            *(_as_moved(a), self._landing(), pushed, self.arrived, tables),
            *(self.shape.rank, self.shape.k, int(keep_own)),
        )
        key = (*_alignments(a), scale_a is not None and scale_a.data_ptr() % 16)
        self._push(self.sms, arguments, {"M": self._moving(tables)}, key=key, num_warps=8)

    def _pushed(self, scale_a: torch.Tensor | None) -> CopiedScales | None:
        """Where the scales of rows lie that are pushed, and where they land."""
        landed = self.landed_scales
        return None if scale_a is None or landed is None else CopiedScales(scale_a, scale_a.shape[1], *landed)

    def pull(self, step: int, out: torch.Tensor) -> None:
        """What peers have made for this rank to out. step: its number in the orders."""
        tables = self.steps[step].copies
        arguments = (out, self._laid, self.arrived.local, tables, self.tries, self.shape.n)
        key = (tables.gates.shape[1], *_alignments(out))
        self._pull(self.sms, arguments, {"M": self._moving(tables)}, key=key, num_warps=8)

    def await_words(self, words: torch.Tensor) -> None:
        """Wait for words of this rank, int32."""
        arguments = (words, words.numel(), self.arrived.local, self.goals, self.notes, self.tries)
        self._await(1, arguments, {}, key=(), num_warps=1)

    def collect(self, step: int, out: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        """out = what a dispatch has brought, and scales = those of FP8 rows; zeros below. step: its number in the orders."""
        shape, tables, copied = self.shape, self.steps[step].collected, None
        if scales is not None and self.landed_scales is not None:
            copied = CopiedScales(self.landed_scales.local, scales.shape[1], scales)
        arguments = (
            *(self._landing().local, _as_moved(out), copied, self.arrived.local, tables),
            *(self.tries, shape.k, shape.max_rows),
        )
        key = (tables.gates.shape[1], *_alignments(out, *([] if scales is None else [scales])))
        self._collect(self.sms, arguments, {"M": self._moving(tables)}, key=key, num_warps=8)

    def _moving(self, tables: StepTables) -> Moving:
        """How a kernel that reads these tables moves rows."""
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
    """That of both tiles which a block makes at once. A turn of its loop takes one step over K, where `blocks` may take two."""
    return replace(blocks, n=blocks.n // 2, stages=blocks.stages * (1 + blocks.pairs))


def _tallest(rows: int, gpu: Capabilities, scaling: Scaling | None) -> TileShape:
    """The best shape that fits a GPU and is no taller than an expert's rows; the best of the lowest where all are taller."""
    fitting = shapes_for(gpu, scaling)
    low = min(blocks.m for blocks in fitting)
    return next(blocks for blocks in fitting if blocks.m <= max(rows, low))


def _word_counts(shape: Shape) -> tuple[int, int, int]:
    """How many words of 32 bits there are: for counts, and behind them for what is wrong with splits, both in two places for
    each rank; for who has told them; for what arrived."""
    segments = shape.world_size * shape.experts
    return 2 * shape.world_size * (segments + FAULT_FIELDS.value), shape.world_size, segments


def word_bytes(shape: Shape) -> int:
    """The symmetric memory that a RaggedExchange needs beside where rows land."""
    return 4 * sum(_word_counts(shape))


def _as_moved(rows: torch.Tensor) -> torch.Tensor:
    """Rows as kernels copy them: those of FP8 as bytes."""
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows


def _alignments(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() % 16 for tensor in tensors)


def _descriptor(rows: torch.Tensor, blocks: TileShape) -> TensorDescriptor:
    """Of a contiguous matrix that whole tiles are stored to. Without columns nothing is stored: any descriptor will do."""
    return TensorDescriptor.from_tensor(rows if rows.numel() else rows.new_empty(1, _ALIGN), [blocks.m, blocks.n])


def _transposed(b: torch.Tensor) -> bool:
    return b.stride(2) != 1


def _b_descriptor(b: torch.Tensor, blocks: TileShape) -> TensorDescriptor:
    """b [experts, K, N], either stride 1. Without columns nothing is loaded: any descriptor will do."""
    if not b.numel():
        b = b.new_empty(1, _ALIGN, _ALIGN)
    if _transposed(b):
        return TensorDescriptor.from_tensor(b.transpose(1, 2), [1, blocks.n, blocks.k])
    return TensorDescriptor.from_tensor(b, [1, blocks.k, blocks.n])
