"""Which tile shape weft's own kernel takes for a GEMM step: the one that is estimated to end first.

A step without gates, or whose gates are late (`Part.adds`): waves of tiles, times a tile's time; where tiles go to peers, until
the last one is there. A step whose tiles wait for chunks: tiles run block by block in the kernel's order, each no sooner than
its chunk may have arrived. Then smaller tiles, or fewer row tiles that share their columns, can end first: with one wave of
large tiles, all of the last chunk's work starts when it arrives (512 rows on 4 GPUs: 153 us against 135 for the sequential
program). A part with inner gates waits for slices of K, which are stored from SMs, all ranks' first ones first: its tiles all
start early, so that one wave of large tiles is best again. The kernel and what predicts its time ask here.

What is computed depends on the step and the GPU's capabilities alone, so that ranks which wait for tiles that another one
counts know how many there are. Shapes that do not fit the GPU are no candidates. The shapes' relative rates and those of links
were measured on H200 (docs/log.md); on other GPUs they only order the candidates, each of which computes the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from weft.core.capabilities import Capabilities
from weft.core.problem import Problem
from weft.core.schedule import Gemm, Part


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileShape:
    """Tile shape, how a block runs, and the rate of full tiles relative to the best shape: rate of those that are only stored,
    stored_rate of those that count, add, or go to peers. group: row tiles that take turns on the same
    columns. halves: whether tiles that fill no more than half of the last wave are cut in two, left and right."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    rate: float = 1.0
    stored_rate: float = 1.0
    group: int = 8
    halves: bool = False

    def shared_bytes(self, stages: int, *, tma: bool) -> int:
        """Shared memory of a block with so many stages of operands. Hardware stores a tile of the result from there, too."""
        return (stages * (self.m + self.n) * self.k + tma * self.m * self.n) * _ITEMSIZE


SHAPES = (
    TileShape(m=128, n=256, k=64, warps=8, stages=3, halves=True),
    TileShape(m=128, n=128, k=64, warps=8, stages=5, rate=0.93, stored_rate=0.87),
    TileShape(m=64, n=256, k=64, warps=4, stages=4, rate=0.95, stored_rate=0.81),
    TileShape(m=64, n=128, k=64, warps=4, stages=5, rate=0.72, stored_rate=0.66),
)
"""The shapes that kernels are launched with, the best for large sizes first."""
_FEWEST_STAGES = 2
"""With one, no load would run ahead of the products."""
_HALF_RATE = 0.9
"""Of half tiles, relative to whole ones."""
_FEW_ROWS = 4096
"""Up to here, which row tiles take turns may matter; with more, a chunk has groups enough of its own."""
_COPY_US, _COPY_BYTES_PER_US = 7.0, 3.0e5
_PUSH_SMS, _PUSH_SHARE = 16, 8
"""SMs that stores to peers get beside a kernel whose blocks wait for them; of small GPUs an eighth. On 4 x H200, 16 reach
218 GB/s at 4 MiB a peer, 32 reach 224, copy engines 175 (docs/log.md)."""
_PUSH_SMS_ALONE, _PUSH_SHARE_ALONE = 64, 2
"""SMs that stores to peers get where nothing runs meanwhile; of small GPUs half."""
_STORE_US, _STORE_BYTES_PER_US = 3.0, 2.2e5
"""How long the first of them takes to start, and their rate."""
_SENT_BYTES_PER_US = 2.3e5
"""Tiles that all SMs store at peers."""
_ITEMSIZE = 2


EXCHANGED_BYTES = 16
"""A row of a piece, at least: what a thread stores at once."""


def streamed_tile(problem: Problem, width: int, pieces: int, height: int, sms: int) -> tuple[int, int]:
    """Rows and columns of a tile of the kernel that multiplies and exchanges (weft.kernels.all_reduce): those whose tiles fill
    the SMs best, where the time of a wave is that of streaming its columns of b. width: columns of each of the pieces that a
    tile has. height: rows of all tiles."""
    rows = next((size for size in (16, 32, 64) if height <= size), 128)
    row_tiles = -(-height // rows)

    def streamed(cols: int) -> int:
        """Columns that a block streams, one wave after the other."""
        return -(-row_tiles * -(-width // (cols // pieces)) // sms) * cols

    choices = [cols for cols in (128, 64, 32) if cols // pieces * problem.itemsize >= EXCHANGED_BYTES]
    return rows, min(choices or [128], key=streamed)


def push_sms(gpu: Capabilities, *, alone: bool) -> int:
    """SMs that stores to peers get on a GPU. alone: no kernel runs beside them."""
    most, share = (_PUSH_SMS_ALONE, _PUSH_SHARE_ALONE) if alone else (_PUSH_SMS, _PUSH_SHARE)
    return max(1, min(most, gpu.sms // share))


@lru_cache(maxsize=64)
def shapes_for(gpu: Capabilities) -> tuple[TileShape, ...]:
    """Those of SHAPES that fit a GPU, with as many stages as its shared memory holds; none where matrix units take no 16-bit
    types."""
    fitting = []
    for blocks in SHAPES if gpu.matrix_16bit else ():
        stages = blocks.stages
        while stages >= _FEWEST_STAGES and blocks.shared_bytes(stages, tma=gpu.tma) > gpu.shared_bytes:
            stages -= 1
        if stages >= _FEWEST_STAGES:
            fitting.append(dataclasses.replace(blocks, stages=stages))
    return tuple(fitting)


def tiles_of(part: Part, blocks: TileShape) -> int:
    """How far a part's count grows in a call: its tiles, each of them twice where some may come as halves."""
    rows, cols = part.out.shape
    return -(-rows // blocks.m) * -(-cols // blocks.n) * (1 + blocks.halves)


def whole_tiles(tiles: int, at_once: int, blocks: TileShape) -> int:
    """How many of so many tiles, of which `at_once` run at a time, are not cut in two: those of the last wave are, where
    their halves are no more than one wave."""
    last = tiles % at_once
    return tiles - last if blocks.halves and 2 * last <= at_once else tiles


def shape_of(step: Gemm, gpu: Capabilities) -> TileShape:
    """The tile shape for a step, on a GPU that some shapes fit."""
    parts = tuple(
        _Arriving(*part.out.shape, not part.adds and any(g.at_least for g in part.waits), _ends(part)) for part in step.parts
    )
    if any(part.gated for part in parts):
        return _gated_blocks(parts, gpu)
    sends = any(part.out.rank != step.b.rank for part in step.parts)
    return min(shapes_for(gpu), key=lambda blocks: (_sent_us if sends else _waves)(step, blocks, gpu))


def chosen(groups: Sequence[tuple[int, bool]], columns: int, ends: tuple[int, ...], gpu: Capabilities, *, sends: int) -> TileShape:
    """As `shape_of`, for groups of rows, each of which waits or not."""
    from weft.core.schedule import Flag, Region, Wait
    if any(late for _, late in groups):
        return _gated_blocks(tuple(_Arriving(rows, columns, late, ends if late else ends[-1:]) for rows, late in groups), gpu)
    low, parts, inner = 0, [], ends[-1]
    for number, (rows, _) in enumerate(groups):
        away = int(number < sends)
        a, out = Region("a", 0, (low, low + rows), (0, inner)), Region("out", away, (low, low + rows), (0, columns))
        parts.append(Part(a, out, (), Flag("made", 0, number)))
        low += rows
    step = Gemm(Region("b", 0, (0, inner), (0, columns)), tuple(parts))
    return min(shapes_for(gpu), key=lambda blocks: (_sent_us if sends else _waves)(step, blocks, gpu))


def _waves(step: Gemm, blocks: TileShape, gpu: Capabilities) -> float:
    tiles = sum(tiles_of(part, blocks) for part in step.parts) // (1 + blocks.halves)
    by_threads = any(part.count or part.adds or part.out.rank != step.b.rank for part in step.parts)
    whole = whole_tiles(tiles, gpu.sms, blocks)
    waves = -(-whole // gpu.sms) + (0.5 / _HALF_RATE if whole < tiles else 0.0)
    return waves * blocks.m * blocks.n / (blocks.stored_rate if by_threads else blocks.rate)


def _sent_us(step: Gemm, blocks: TileShape, gpu: Capabilities) -> float:
    """When the last tile ends and the last one that goes to a peer is there: with one wave nothing is sent before it ends."""
    tile_us = 2 * blocks.m * blocks.n * step.b.shape[0] / gpu.sm_flop_per_us / blocks.stored_rate
    tile_bytes = blocks.m * blocks.n * _ITEMSIZE
    counts = [(tiles_of(part, blocks) // (1 + blocks.halves), part.out.rank != step.b.rank) for part in step.parts]
    away, total = sum(tiles for tiles, leaves in counts if leaves), sum(tiles for tiles, _ in counts)
    waves, sending = -(-total // gpu.sms), -(-away // gpu.sms)
    halved = whole_tiles(total, gpu.sms, blocks) < total

    def ends(wave: int) -> float:
        return tile_us * (wave - (1 - 0.5 / _HALF_RATE) * (halved and wave == waves))

    # Each wave's tiles go behind those before: what is sent ends late by the first wave, or by one of the last two.
    full_us, last_us = (tiles * tile_bytes / _SENT_BYTES_PER_US for tiles in (gpu.sms, away - (sending - 1) * gpu.sms))
    late = [ends(wave) + (sending - wave) * full_us + last_us for wave in {1, sending - 1, sending} if 0 < wave <= sending]
    return max(ends(waves), *late)


class _Arriving(NamedTuple):
    """Rows and columns of a part's result, whether it waits for what arrives, and where the slices end that it waits for."""

    rows: int
    cols: int
    gated: bool
    ends: tuple[int, ...]


def _ends(part: Part) -> tuple[int, ...]:
    """The columns of a at which a part's slices end; all of K is one slice where there are no inner gates."""
    return (*(column for column, _ in part.inner), part.a.shape[1])


@lru_cache(maxsize=1024)
def _gated_blocks(parts: tuple[_Arriving, ...], gpu: Capabilities) -> TileShape:
    few = sum(part.rows for part in parts) <= _FEW_ROWS
    choices = [
        dataclasses.replace(blocks, group=group) for blocks in shapes_for(gpu) for group in ((8, 4, 2, 1) if few else (8,))
    ]
    return min(choices, key=lambda blocks: _gated_us(parts, blocks, gpu))


def _gated_us(parts: tuple[_Arriving, ...], blocks: TileShape, gpu: Capabilities) -> float:
    """When the last tile ends, if chunks arrive one after the other from the start on."""
    sliced = any(len(part.ends) > 1 for part in parts)
    columns, inner = parts[0].cols, parts[0].ends[-1]
    arrivals = _slice_arrivals(parts) if sliced else _chunk_arrivals(parts)
    step_us = 2 * blocks.m * blocks.n / gpu.sm_flop_per_us / blocks.rate
    half_us = step_us / 2 / _HALF_RATE
    row_tiles = [-(-part.rows // blocks.m) for part in parts]
    col_tiles = -(-columns // blocks.n)
    free, at = [0] * (gpu.sms - push_sms(gpu, alone=False) * sliced), 0
    left, cut = whole_tiles(sum(row_tiles) * col_tiles, len(free), blocks), []
    ready = [_units(_opens(part.ends, arrives, step_us)) for part, arrives in zip(parts, arrivals, strict=True)]
    for pattern, times in _runs(row_tiles, blocks.group, col_tiles):
        tiles = len(pattern) * times
        whole = min(left, tiles)
        at = _advance(free, at, [ready[number] for number in pattern], whole, _units(inner * step_us))
        left -= whole
        cut += [pattern[tile % len(pattern)] for tile in range(whole, tiles)]
    ready = [_units(_opens(part.ends, arrives, half_us)) for part, arrives in zip(parts, arrivals, strict=True)]
    _advance(free, at, [ready[number] for number in cut for _ in range(2)], 2 * len(cut), _units(inner * half_us))
    b_bytes = columns * inner * _ITEMSIZE
    passes = -(-sum(row_tiles) // blocks.group) if b_bytes > gpu.l2_bytes else 1
    return max(max(free) / _UNITS_PER_US, passes * b_bytes / gpu.hbm_bytes_per_us)


_UNITS_PER_US = 1 << 40


def _units(us: float) -> int:
    """Whole ones, so that tiles one by one and many at once come to the same sum, and shapes that are equal stay equal."""
    return round(us * _UNITS_PER_US)


def _opens(ends: tuple[int, ...], arrives: tuple[float, ...], step_us: float) -> float:
    """What a tile that multiplies each slice once it is there ends by, as if it waited for all of them together, and then
    multiplied. step_us: a column of a."""
    return max(ready - done * step_us for done, ready in zip((0, *ends), arrives, strict=False))


def _runs(row_tiles: Sequence[int], group: int, col_tiles: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Tiles in the kernel's order: parts' numbers, and how often these tiles come again. row_tiles: of each part.

    >>> list(_runs([5, 1], group=2, col_tiles=10))
    [((0,), 40), ((0, 1), 10)]
    """
    begun: tuple[int, ...] = ()
    for number, count in enumerate(row_tiles):
        joined = min(count, -len(begun) % group)
        begun += (number,) * joined
        if begun and len(begun) < group:
            continue
        if begun:
            yield begun, col_tiles
        groups, over = divmod(count - joined, group)
        if groups:
            yield (number,), groups * group * col_tiles
        begun = (number,) * over
    if begun:
        yield begun, col_tiles


def _advance(free: list[int], at: int, ready: Sequence[int], tiles: int, tile: int) -> int:
    """Give tiles to blocks in turns, from block `at` on; returns whose turn is next. free: when each block ends. ready: when
    tiles may begin, again and again; once a block has had each that comes to it, it waits for none of them any more."""
    size = len(free)
    first = min(tiles, math.lcm(size, len(ready) or 1))
    for number in range(first):
        begun, opens = free[at], ready[number % len(ready)]
        free[at] = (begun if begun > opens else opens) + tile
        at = at + 1 if at + 1 < size else 0
    waves, over = divmod(tiles - first, size)
    for number in range(size if waves or over else 0):
        free[(at + number) % size] += (waves + (number < over)) * tile
    return (at + over) % size


def _chunk_arrivals(parts: tuple[_Arriving, ...]) -> list[tuple[float, ...]]:
    """By part, when its rows are there if copy engines bring them one part after the other."""
    now = 0.0
    found: list[tuple[float, ...]] = []
    for part in parts:
        now += (_COPY_US + part.rows * part.ends[-1] * _ITEMSIZE / _COPY_BYTES_PER_US) if part.gated else 0.0
        found.append((now if part.gated else 0.0,))
    return found


def _slice_arrivals(parts: tuple[_Arriving, ...]) -> list[tuple[float, ...]]:
    """By part, when each of its slices is there if SMs store the first ones of all parts, then the second ones."""
    found: list[list[float]] = [[0.0] * len(part.ends) for part in parts]
    now = _STORE_US
    for number in range(max(len(part.ends) for part in parts)):
        for part, arrives in zip(parts, found, strict=True):
            if part.gated and number < len(part.ends):
                low = part.ends[number - 1] if number else 0
                now += part.rows * (part.ends[number] - low) * _ITEMSIZE / _STORE_BYTES_PER_US
                arrives[number] = now
    return [tuple(arrives) for arrives in found]
