"""One operator of one shape with splits on the device: what it keeps there between calls, and the launches of its kernels.

    start(splits)   layout_kernel, one block: counts exchanged, tables made        first in every call
    dispatch()      dispatch_kernel
    combine()       combine_kernel, then collect_kernel
    collect()       collect_kernel

What they do is in weft.kernels.segments and weft.kernels.ragged. Legend: N, K of each GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels.launch import Launcher
from weft.kernels.ragged import collect_kernel, combine_kernel, dispatch_kernel
from weft.kernels.segments import FIELDS, NOTES, layout_kernel
from weft.kernels.shapes import INTERPRETED, SHAPES, Blocks
from weft.triton.host import SymmetricTensor

MOST_SEGMENTS = 256
"""World size times experts: the layout compares each of a rank's segments with each."""
_ALIGN = 8
"""Elements of 16 bits that are accessed at once: widths and row strides are multiples of it."""
_PUSH_SMS = 16


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of an exchange; the same on every rank but for rank. width: columns of the rows that travel."""

    rank: int
    world_size: int
    experts: int
    max_rows: int
    n: int
    k: int
    dtype: torch.dtype
    dispatch: bool
    device: torch.device = field(compare=False)

    @property
    def width(self) -> int:
        return self.k if self.dispatch else self.n

    @property
    def segments(self) -> int:
        """Rows of a table: a power of two."""
        return max(2, int(triton.next_power_of_2(self.world_size * self.experts)))

    @property
    def blocks(self) -> Blocks:
        """The tile shape: lower where segments are short; the same on every rank."""
        if self.device.type != "cuda":
            return INTERPRETED
        return SHAPES[0] if self.max_rows // (self.world_size * self.experts) >= SHAPES[0].m else SHAPES[2]

    @property
    def push_rows(self) -> int:
        """Rows that a block moves at once."""
        return 32 if self.device.type == "cuda" else 16

    @property
    def send_columns(self) -> int:
        """Signals for each unit that is sent."""
        return 1 if self.dispatch else -(-self.n // self.blocks.n)


class Exchange:
    """What one operator of one shape keeps on a device between calls, and its kernels.

    counts, told, arrived, landing: symmetric tensors of `symmetric_shapes`, zero at first. sms: blocks that may run at once.
    """

    def __init__(self, shape: Shape, symmetric: dict[str, SymmetricTensor], *, sms: int, tries: int) -> None:
        self.shape, self.sms, self.tries = shape, sms, tries
        self.counts, self.told, self.arrived, self.landing = (symmetric[name] for name in symmetric_shapes(shape))

        def words(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=shape.device)

        self.calls, self.goals = words(1), words(shape.world_size * shape.experts)
        self.send, self.recv = (words(FIELDS * shape.segments + 1) for _ in range(2))
        self.notes = words(NOTES, torch.int64)
        self.host_notes = torch.zeros(NOTES, dtype=torch.int64, pin_memory=shape.device.type == "cuda")
        kernels: tuple[Any, ...] = (layout_kernel, dispatch_kernel, combine_kernel, collect_kernel)
        self._layout, self._dispatch, self._combine, self._collect = map(Launcher, kernels)

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
            self.send,
            self.recv,
            received,
            self.notes,
            self.host_notes.data_ptr(),
            a_rows,
            shape.max_rows,
            self.tries,
            shape.rank,
            shape.send_columns,
        )
        sent, arriving = (shape.push_rows, blocks.m) if shape.dispatch else (blocks.m, shape.push_rows)
        constants = {
            **self._sizes(),
            "NOTES": NOTES,
            "DISPATCH": int(shape.dispatch),
            "SEND_ROWS": sent,
            "RECV_ROWS": arriving,
        }
        key = (splits.dtype, *_alignments(splits, received))
        # Each segment is compared with each, in registers.
        self._layout(1, arguments, constants, key=key, num_warps=max(8, shape.segments // 8))

    def dispatch(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        """out = what arrives @ b, by expert; zeros below. a: [rows, K], contiguous."""
        shape, blocks = self.shape, self.shape.blocks
        pushers = min(_PUSH_SMS, self.sms // 2) if shape.device.type == "cuda" else 1
        a_block = [blocks.m, blocks.k]
        arguments = (
            TensorDescriptor.from_tensor(a, a_block),
            TensorDescriptor.from_tensor(self.landing.local, a_block),
            _b_descriptor(b, blocks),
            a,
            out,
            self.landing.local,
            self.landing.peers,
            self.arrived.local,
            self.arrived.peers,
            self.send,
            self.recv,
            self.goals,
            self.notes,
            self.tries,
            shape.rank,
            shape.n,
            shape.k,
            shape.max_rows,
        )
        constants = {**self._sizes(), "PUSHERS": pushers, "PUSH_ROWS": shape.push_rows, **_tile_constants(b, blocks)}
        self._dispatch(
            max(self.sms, pushers + 1),
            arguments,
            constants,
            key=(b.stride(), *_alignments(a, b, out)),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )

    def combine(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        """out = what arrives of all ranks' a @ b, by expert; zeros below. a: [rows, K], contiguous."""
        shape, blocks = self.shape, self.shape.blocks
        arguments = (
            TensorDescriptor.from_tensor(a, [blocks.m, blocks.k]),
            _b_descriptor(b, blocks),
            out,
            self.landing.local,
            self.landing.peers,
            self.arrived.local,
            self.arrived.peers,
            self.send,
            shape.rank,
            shape.n,
            shape.k,
        )
        constants = {**self._sizes(), **_tile_constants(b, blocks)}
        self._combine(
            self.sms,
            arguments,
            constants,
            key=(b.stride(), *_alignments(a, b, out)),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
        self.collect(out, out)

    def collect(self, a: torch.Tensor, out: torch.Tensor) -> None:
        """out = what has landed, in its order, with the own rows from a where `dispatch` left them there; zeros below."""
        shape = self.shape
        arguments = (
            a,
            self.landing.local,
            out,
            self.arrived.local,
            self.recv,
            self.goals,
            self.notes,
            self.tries,
            shape.rank,
            shape.width,
            shape.max_rows,
        )
        unit = shape.blocks.m if shape.dispatch else shape.push_rows
        constants = {
            **self._sizes(),
            "UNIT": unit,
            "ROWS": min(unit, shape.push_rows),
            "COLS": _columns(shape),
            "ALIGN": _ALIGN,
        }
        self._collect(self.sms, arguments, constants, key=_alignments(a, out), num_warps=8)

    def _sizes(self) -> dict[str, int]:
        return {"W": self.shape.world_size, "E": self.shape.experts, "Q": self.shape.segments, "WIDTH": FIELDS}


def symmetric_shapes(shape: Shape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What an Exchange needs of symmetric memory, by name."""
    ranks, segments = shape.world_size, shape.world_size * shape.experts
    return {
        "counts": ((2, ranks, segments), torch.int32),
        "told": ((ranks,), torch.int32),
        "arrived": ((segments,), torch.int32),
        "landing": ((shape.max_rows, shape.width), shape.dtype),
    }


def _alignments(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() % 16 for tensor in tensors)


def _columns(shape: Shape) -> int:
    return 512 if shape.device.type == "cuda" else 64


def _transposed(b: torch.Tensor) -> bool:
    return b.stride(2) != 1


def _b_descriptor(b: torch.Tensor, blocks: Blocks) -> TensorDescriptor:
    """b [experts, K, N], either stride 1. Without columns nothing is loaded: any descriptor will do."""
    if not b.numel():
        b = b.new_empty(1, _ALIGN, _ALIGN)
    if _transposed(b):
        return TensorDescriptor.from_tensor(b.transpose(1, 2), [1, blocks.n, blocks.k])
    return TensorDescriptor.from_tensor(b, [1, blocks.k, blocks.n])


def _tile_constants(b: torch.Tensor, blocks: Blocks) -> dict[str, int]:
    return {
        "BLOCK_M": blocks.m,
        "BLOCK_N": blocks.n,
        "BLOCK_K": blocks.k,
        "GROUP": blocks.group,
        "COLS": 512 if b.is_cuda else 64,
        "ALIGN": _ALIGN,
        "B_TRANSPOSED": int(bool(b.numel()) and _transposed(b)),
    }
