"""Grouped GEMMs whose rows go all to all, in numbers that only devices know. See weft.kernels.segments for where they go.

    exchange.start(splits)     layout_kernel: counts exchanged, tables made                             one block
    dispatch()                 _dispatch_kernel: some blocks push rows, the others multiply what arrives
    combine()                  _combine_kernel: tiles are stored at the peer, its own last; then _collect_kernel
    collect()                  _collect_kernel: what has landed, to where the caller has it; zeros below it

    rank r, pushing block             rank p, multiplying block
    push 32 rows of a segment  ~~~>   own rows first, from a
    signal arrived, next one   ~~~>   wait until all rows of a segment are there; multiply its tiles

A tile has rows of one segment, so it knows its expert, and a segment's last tile may be partly empty: segments should have
some 128 rows. Blocks that wait are behind blocks that never do (pushing ones come first; a combining block waits for nothing),
here and on every peer: what is waited for comes.

b has three dimensions, expert by expert; both of its last two may be the contiguous one. Legend: N, K of each GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels.gemm import _place
from weft.kernels.launch import Launcher
from weft.kernels.segments import FIELDS, NOTES, layout_kernel, segment_of
from weft.kernels.shapes import INTERPRETED, SHAPES, Blocks
from weft.triton.device import get, peer_pointer, put, signal, wait
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
        kernels: tuple[Any, ...] = (layout_kernel, _dispatch_kernel, _combine_kernel, _collect_kernel)
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


@triton.jit
def _multiply(
    a_desc,
    b_desc,
    row,
    expert,
    col,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
):
    """One tile in float32, by the expert's b."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        a = a_desc.load([row, step * BLOCK_K])
        if B_TRANSPOSED:
            acc = tl.dot(a, b_desc.load([expert, col, step * BLOCK_K]).reshape(BLOCK_N, BLOCK_K).T, acc)
        else:
            acc = tl.dot(a, b_desc.load([expert, step * BLOCK_K, col]).reshape(BLOCK_K, BLOCK_N), acc)
    return acc


@triton.jit
def _store(base_ptr, row, acc, valid, col, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGN: tl.constexpr):
    """The valid part of a tile, from `row` of a contiguous matrix on, here or at a peer."""
    rows = tl.arange(0, BLOCK_M)[:, None]
    cols = col + tl.arange(0, BLOCK_N)[None, :]
    put(base_ptr + row.to(tl.int64) * N, rows * N + cols, acc, (rows < valid) & (cols < N), ALIGN)


@triton.jit
def _copy_rows(src_ptr, src_row, dst_ptr, dst_row, valid, width, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGN: tl.constexpr):
    """Up to ROWS rows from one contiguous matrix to another, either here or at a peer."""
    src_ptr += src_row.to(tl.int64) * width
    dst_ptr += dst_row.to(tl.int64) * width
    rows = tl.arange(0, ROWS)[:, None]
    for col in range(0, width, COLS):
        cols = col + tl.arange(0, COLS)[None, :]
        there = (rows < valid) & (cols < width)
        put(dst_ptr, rows * width + cols, get(src_ptr, rows * width + cols, there, 0, ALIGN), there, ALIGN)


@triton.jit
def _zero_rows(dst_ptr, dst_row, valid, width, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGN: tl.constexpr):
    dst_ptr += dst_row.to(tl.int64) * width
    rows = tl.arange(0, ROWS)[:, None]
    for col in range(0, width, COLS):
        cols = col + tl.arange(0, COLS)[None, :]
        zeros = tl.zeros((ROWS, COLS), dst_ptr.dtype.element_ty)
        put(dst_ptr, rows * width + cols, zeros, (rows < valid) & (cols < width), ALIGN)


@triton.jit
def _push(
    block,
    blocks,
    a_ptr,
    landing_ptr,
    landing_peers_ptr,
    arrived_ptr,
    arrived_peers_ptr,
    send_ptr,
    rank,
    K,
    E: tl.constexpr,
    Q: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Rows of a to where they land, unit by unit, each with a signal."""
    for unit in range(block, tl.load(send_ptr + WIDTH * (Q - 1)), blocks):
        fields, within = segment_of(send_ptr, unit, Q, WIDTH)
        at = within * ROWS
        peer = tl.load(fields + 4)
        landing = peer_pointer(landing_ptr, landing_peers_ptr, peer)
        here, there = tl.load(fields + 2) + at, tl.load(fields + 3) + at
        _copy_rows(a_ptr, here, landing, there, tl.load(fields + 1) - at, K, ROWS, COLS, ALIGN)
        signal(peer_pointer(arrived_ptr, arrived_peers_ptr, peer) + rank * E + tl.load(fields + 5))


@triton.jit(do_not_specialize=["tries", "rank"])
def _dispatch_kernel(
    a_desc,
    landing_desc,
    b_desc,
    a_ptr,
    out_ptr,
    landing_ptr,
    landing_peers_ptr,
    arrived_ptr,
    arrived_peers_ptr,
    send_ptr,
    recv_ptr,
    goals_ptr,
    notes_ptr,
    tries,
    rank,
    N,
    K,
    max_rows,
    W: tl.constexpr,
    E: tl.constexpr,
    Q: tl.constexpr,
    WIDTH: tl.constexpr,
    PUSHERS: tl.constexpr,
    PUSH_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    COLS: tl.constexpr,
    ALIGN: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
):
    block = tl.program_id(0) - PUSHERS
    blocks = tl.num_programs(0) - PUSHERS
    if block < 0:
        _push(
            block + PUSHERS,
            PUSHERS,
            a_ptr,
            landing_ptr,
            landing_peers_ptr,
            arrived_ptr,
            arrived_peers_ptr,
            send_ptr,
            rank,
            K,
            E,
            Q,
            WIDTH,
            PUSH_ROWS,
            COLS,
            ALIGN,
        )
    else:
        row_tiles, col_tiles = tl.load(recv_ptr + WIDTH * (Q - 1)), tl.cdiv(N, BLOCK_N)
        for tile in range(block, row_tiles * col_tiles, blocks):
            row_tile, col_tile = _place(tile, row_tiles, col_tiles, GROUP)
            fields, within = segment_of(recv_ptr, row_tile, Q, WIDTH)
            at = within * BLOCK_M
            peer, expert = tl.load(fields + 4), tl.load(fields + 5)
            there = tl.load(fields + 3) + at
            row, desc = there, landing_desc
            if peer == rank:
                row, desc = tl.load(fields + 2) + at, a_desc
            else:
                wait(arrived_ptr + peer * E + expert, tl.load(goals_ptr + peer * E + expert), tries, notes_ptr)
            col = col_tile * BLOCK_N
            acc = _multiply(desc, b_desc, row, expert, col, K, BLOCK_M, BLOCK_N, BLOCK_K, B_TRANSPOSED)
            _store(out_ptr, there, acc, tl.load(fields + 1) - at, col, N, BLOCK_M, BLOCK_N, ALIGN)
        rows = tl.load(recv_ptr + WIDTH * Q)
        for unit in range(block, tl.cdiv(max_rows - rows, PUSH_ROWS), blocks):
            first = rows + unit * PUSH_ROWS
            _zero_rows(out_ptr, first, max_rows - first, N, PUSH_ROWS, COLS, ALIGN)


@triton.jit(do_not_specialize=["rank"])
def _combine_kernel(
    a_desc,
    b_desc,
    out_ptr,
    landing_ptr,
    landing_peers_ptr,
    arrived_ptr,
    arrived_peers_ptr,
    send_ptr,
    rank,
    N,
    K,
    W: tl.constexpr,
    E: tl.constexpr,
    Q: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    COLS: tl.constexpr,
    ALIGN: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
):
    row_tiles, col_tiles = tl.load(send_ptr + WIDTH * (Q - 1)), tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0)):
        row_tile, col_tile = _place(tile, row_tiles, col_tiles, GROUP)
        fields, within = segment_of(send_ptr, row_tile, Q, WIDTH)
        at = within * BLOCK_M
        peer, expert = tl.load(fields + 4), tl.load(fields + 5)
        col = col_tile * BLOCK_N
        here, there = tl.load(fields + 2) + at, tl.load(fields + 3) + at
        acc = _multiply(a_desc, b_desc, here, expert, col, K, BLOCK_M, BLOCK_N, BLOCK_K, B_TRANSPOSED)
        base_ptr = tl.where(peer == rank, out_ptr, peer_pointer(landing_ptr, landing_peers_ptr, peer))
        # The choice of two pointers has no alignment that the compiler knows of.
        base_ptr = tl.multiple_of(base_ptr, 16)
        _store(base_ptr, there, acc, tl.load(fields + 1) - at, col, N, BLOCK_M, BLOCK_N, ALIGN)
        if peer != rank:
            signal(peer_pointer(arrived_ptr, arrived_peers_ptr, peer) + rank * E + expert)


@triton.jit(do_not_specialize=["tries", "rank"])
def _collect_kernel(
    a_ptr,
    landing_ptr,
    out_ptr,
    arrived_ptr,
    recv_ptr,
    goals_ptr,
    notes_ptr,
    tries,
    rank,
    width,
    max_rows,
    W: tl.constexpr,
    E: tl.constexpr,
    Q: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    block, blocks = tl.program_id(0), tl.num_programs(0)
    for unit in range(block, tl.load(recv_ptr + WIDTH * (Q - 1)), blocks):
        fields, within = segment_of(recv_ptr, unit, Q, WIDTH)
        peer, expert = tl.load(fields + 4), tl.load(fields + 5)
        rows, there = tl.load(fields + 1), tl.load(fields + 3)
        src_ptr, src_row = landing_ptr, there
        if peer == rank:
            src_ptr, src_row = a_ptr, tl.load(fields + 2)
        else:
            wait(arrived_ptr + peer * E + expert, tl.load(goals_ptr + peer * E + expert), tries, notes_ptr)
        for at in range(within * UNIT, within * UNIT + UNIT, ROWS):
            _copy_rows(src_ptr, src_row + at, out_ptr, there + at, rows - at, width, ROWS, COLS, ALIGN)
    total = tl.load(recv_ptr + WIDTH * Q)
    for unit in range(block, tl.cdiv(max_rows - total, ROWS), blocks):
        first = total + unit * ROWS
        _zero_rows(out_ptr, first, max_rows - first, width, ROWS, COLS, ALIGN)
