"""One operator of one shape with splits on the device: what it keeps there between calls, and the launches of its kernels.

    lay_out(rows)   where rows land, or products wait, on every rank               before the first launch
    start(splits)   layout_kernel, one block: counts exchanged, tables made        first in every call
    dispatch()      dispatch_kernel
    collect()       collect_kernel, after a dispatch
    combine()       combine_kernel

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
from weft.kernels.launch import Launcher
from weft.kernels.ragged import combine_kernel, dispatch_kernel
from weft.kernels.ragged_rows import collect_kernel
from weft.kernels.segments import GROUP_FIELDS, MOVE_FIELDS, NOTES, PART_FIELDS, layout_kernel
from weft.kernels.shapes import INTERPRETED, TileShape, push_sms, shapes_for
from weft.triton.flags import asynchronous

MOST_SEGMENTS = 256
"""World size times experts: the layout compares each of a rank's segments with each."""
_ALIGN = 8
"""Elements of 16 bits that are accessed at once: widths and row strides are multiples of it."""
_PULL_SMS = (4, 12)
"""At least, so that one slow peer does not hold up all; at most, so that most SMs multiply."""
_STAGES = 4


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of an exchange; the same on every rank but for rank. max_rows: that may arrive. a_rows: of a at most, for a combine. n:
    of what is stored. gated: b has 2 n columns, of which a dispatch makes silu(left half) * right half."""

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
            found = INTERPRETED
        else:
            found = _tallest(self.max_rows // self.experts, capabilities(self.device))
        return replace(found, n=found.n // 2) if self.gated else found

    @property
    def move(self) -> tuple[int, int]:
        """Rows and columns that a block moves at once."""
        return (64, 256) if self.device.type == "cuda" else (16, 64)

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
        per_us = efficiency * machine.tflops("bfloat16") * 1e6 / self.k * (self.world_size - 1) / self.world_size
        least, most = _PULL_SMS
        return min(most, max(least, math.ceil(1.5 * per_us / (1e3 * machine.kernels.pull_gbps))))


class Shared(NamedTuple):
    """A tensor that every rank has: this rank's, and int64 [world_size], the address of each rank's."""

    local: torch.Tensor
    peers: torch.Tensor


class RaggedExchange:
    """What one operator of one shape keeps on a device between calls, and its kernels.

    addresses, memory: `word_bytes` of symmetric memory, zero at first: by rank where it lies, and this rank's. sms: blocks that
    may run at once. tries: how often a kernel looks at a word.
    """

    def __init__(self, shape: Shape, addresses: Sequence[int], memory: torch.Tensor, *, sms: int, tries: int) -> None:
        self.shape, self.sms, self.tries = shape, sms, tries
        at = 0

        def shared(count: int) -> Shared:
            nonlocal at
            first, at = at, at + 4 * count
            peers = torch.tensor([address + first for address in addresses], dtype=torch.int64, device=shape.device)
            return Shared(memory[first:at].view(torch.int32), peers)

        self.counts, self.told, self.arrived = map(shared, _word_counts(shape))
        self.rows: Shared | None = None
        self._row_addresses: list[int] = []

        def words(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=shape.device)

        segments = shape.world_size * shape.experts
        self.calls, self.turn, self.goals = words(1, torch.int64), words(2), words(segments)
        self.groups, self.parts = words(GROUP_FIELDS * shape.groups), words(PART_FIELDS * segments)
        self.moves = words(MOVE_FIELDS * shape.segments + 1)
        self.notes = words(NOTES, torch.int64)
        self.host_notes = torch.zeros(NOTES, dtype=torch.int64, pin_memory=shape.device.type == "cuda")
        kernels: tuple[Any, ...] = (layout_kernel, dispatch_kernel, combine_kernel, collect_kernel)
        self._layout, self._dispatch, self._combine, self._collect = map(Launcher, kernels)

    def lay_out(self, rows: Sequence[torch.Tensor]) -> None:
        """rows: by rank, where rows land (dispatch), or products wait (combine), contiguous."""
        addresses = [each.data_ptr() for each in rows]
        if addresses != self._row_addresses:
            peers = torch.tensor(addresses, dtype=torch.int64, device=self.shape.device)
            self.rows, self._row_addresses = Shared(rows[self.shape.rank], peers), addresses

    @property
    def _laid(self) -> Shared:
        assert self.rows is not None, "lay_out comes first"
        return self.rows

    def start(self, splits: torch.Tensor, received: torch.Tensor, *, a_rows: int) -> None:
        """Exchange counts and lay out. splits: this rank's, int32 or int64. received: int32, written. a_rows: what a holds."""
        shape, blocks = self.shape, self.shape.blocks
        arguments = (
            splits,
            self.counts.local,
            self.counts.peers,
            self.told.local,
            self.told.peers,
            self.calls,
            self.goals,
            self.groups,
            self.parts,
            self.moves,
            self.turn,
            received,
            self.notes,
            self.host_notes.data_ptr(),
            a_rows,
            shape.max_rows,
            self.tries,
            shape.rank,
            -(-shape.n // blocks.n),
        )
        constants = {
            **self._sizes(),
            "NOTES": NOTES,
            "DISPATCH": int(shape.dispatch),
            "MOVE_ROWS": shape.move[0],
            "TILE_ROWS": blocks.m,
        }
        key = (splits.dtype, *_alignments(splits, received))
        # Each segment is compared with each, in registers.
        self._layout(1, arguments, constants, key=key, num_warps=max(8, shape.segments // 8))

    def dispatch(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, keep_own: bool = False) -> None:
        """out = what arrives @ b, by expert, gated or not; zeros below. a: [rows, K], contiguous. keep_own: for `collect` after
        it."""
        blocks = self.shape.blocks
        a_block = [blocks.m, blocks.k]
        arguments = (
            TensorDescriptor.from_tensor(a, a_block),
            TensorDescriptor.from_tensor(self._laid.local, a_block),
            _b_descriptor(b, blocks),
            _descriptor(out, blocks),
            a,
            out,
            *self._grouped_arguments(),
            int(keep_own),
        )
        self._grouped(self._dispatch, arguments, {"GATED": int(self.shape.gated)}, a, b, out)

    def combine(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        """out = what arrives of all ranks' a @ b, by expert; zeros below. a: [rows, K], contiguous, of at most a_rows."""
        blocks = self.shape.blocks
        arguments = (
            TensorDescriptor.from_tensor(a, [blocks.m, blocks.k]),
            _b_descriptor(b, blocks),
            _descriptor(self._laid.local, blocks),
            out,
            *self._grouped_arguments(),
        )
        self._grouped(self._combine, arguments, {}, a, b, out)

    def _grouped_arguments(self) -> tuple[object, ...]:
        """What both kernels with GEMMs take in the same order."""
        shape = self.shape
        return (
            self._laid.local,
            self._laid.peers,
            self.arrived.local,
            self.arrived.peers,
            self.groups,
            self.parts,
            self.moves,
            self.turn,
            self.goals,
            self.notes,
            self.tries,
            shape.rank,
            shape.n,
            shape.k,
            shape.max_rows,
            shape.movers,
        )

    def _grouped(
        self,
        launcher: Launcher,
        arguments: tuple[object, ...],
        more: dict[str, int],
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        blocks = self.shape.blocks
        constants = {
            **self._sizes(),
            **self._moving(),
            "BLOCK_M": blocks.m,
            "BLOCK_N": blocks.n,
            "BLOCK_K": blocks.k,
            "GROUP": blocks.group,
            "ALIGN": _ALIGN,
            "B_TRANSPOSED": int(bool(b.numel()) and _transposed(b)),
            "ASYNCHRONOUS": int(asynchronous(out.device)),
            **more,
        }
        launcher(
            max(self.sms, self.shape.movers + 1),
            arguments,
            constants,
            key=(b.stride(), *_alignments(a, b, out)),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )

    def collect(self, out: torch.Tensor) -> None:
        """out = what a dispatch has brought, in its order; zeros below."""
        shape = self.shape
        arguments = (
            self._laid.local,
            out,
            self.arrived.local,
            self.groups,
            self.parts,
            self.moves,
            self.goals,
            self.notes,
            self.tries,
            shape.k,
            shape.max_rows,
        )
        constants = {**self._sizes(), **self._moving(), "BLOCK_M": shape.blocks.m, "ALIGN": _ALIGN}
        self._collect(self.sms, arguments, constants, key=_alignments(out), num_warps=8)

    def _sizes(self) -> dict[str, int]:
        shape = self.shape
        return {
            "W": shape.world_size,
            "E": shape.experts,
            "Q": shape.segments,
            "EQ": shape.groups,
            "GROUP_FIELDS": GROUP_FIELDS,
            "PART_FIELDS": PART_FIELDS,
            "MOVE_FIELDS": MOVE_FIELDS,
        }

    def _moving(self) -> dict[str, int]:
        rows, cols = self.shape.move
        return {"MOVE_ROWS": rows, "COLS": cols, "STAGES": _STAGES}


def _tallest(rows: int, gpu: Capabilities) -> TileShape:
    """The best shape that fits a GPU and is no taller than an expert's rows; the best of the lowest where all are taller."""
    fitting = shapes_for(gpu)
    low = min(blocks.m for blocks in fitting)
    return next(blocks for blocks in fitting if blocks.m <= max(rows, low))


def _word_counts(shape: Shape) -> tuple[int, int, int]:
    """How many words of 32 bits there are: for counts, in two places for each rank; for who has told them; for what arrived."""
    segments = shape.world_size * shape.experts
    return 2 * shape.world_size * segments, shape.world_size, segments


def word_bytes(shape: Shape) -> int:
    """The symmetric memory that a RaggedExchange needs beside where rows land."""
    return 4 * sum(_word_counts(shape))


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
