"""Which tile shape weft's own kernel takes for a GEMM step: the one that is estimated to end first.

A step without gates, or whose gates are late (`Part.adds`): waves of tiles, times a tile's time; where tiles go to peers, until
the last one is there. A step whose tiles wait for chunks: tiles run block by block in the kernel's order, each no sooner than
its chunk may have arrived. Then smaller tiles, or fewer row tiles that share their columns, can end first: with one wave of
large tiles, all of the last chunk's work starts when it arrives (512 rows on 4 GPUs: 153 us against 135 for the sequential
program). A part with inner gates waits for slices of K, which are stored from SMs, all ranks' first ones first: its tiles all
start early, so that one wave of large tiles is best again. The kernel and what predicts its time ask here.

What is computed depends on the step, the GPU's capabilities and the Machine alone, so that ranks which wait for tiles that
another one counts know how many there are: ranks compare the digests of their profiles before they run a kernel. Shapes that do
not fit the GPU are no candidates. Rates and fixed costs are the Machine's, those by which the simulator predicts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from weft.core.capabilities import Capabilities
from weft.core.machine import Machine
from weft.core.problem import RATE_ITEMSIZE, Problem, Scaling
from weft.core.schedule import Gemm, Part


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileShape:
    """Tile shape, and how a block runs. group: row tiles that take turns on the same columns. halves: whether tiles that fill
    no more than half of the last wave are cut in two, left and right. pairs: whether a turn of the loop over K takes two steps
    of it, so that a stage holds two. itemsize: bytes of an operand's element."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 8
    halves: bool = False
    pairs: bool = False
    itemsize: int = 2

    def shared_bytes(self, stages: int, *, tma: bool) -> int:
        """Shared memory of a block with so many stages of operands. Hardware stores a tile of the result, which has 16-bit
        elements, from there, too."""
        return stages * (1 + self.pairs) * (self.m + self.n) * self.k * self.itemsize + tma * self.m * self.n * _ITEMSIZE


SHAPES = (
    TileShape(m=128, n=256, k=64, warps=8, stages=3, halves=True),
    TileShape(m=128, n=128, k=64, warps=8, stages=5),
    TileShape(m=64, n=256, k=64, warps=4, stages=4),
    TileShape(m=64, n=128, k=64, warps=4, stages=5),
)
"""The shapes that kernels are launched with, the best for large sizes first."""
FP8_SHAPES = (
    TileShape(m=128, n=256, k=128, warps=8, stages=3, halves=True, itemsize=1),
    TileShape(m=128, n=128, k=128, warps=8, stages=5, itemsize=1),
    TileShape(m=64, n=128, k=128, warps=4, stages=5, itemsize=1),
)
"""The same for FP8 operands whose products are summed by tensor cores alone. 64 x 256 is not among them: at FP8's rate it took
longer than 128 x 128 at each of 28 sizes on an H200."""
PROMOTED_SHAPES = (
    TileShape(m=128, n=128, k=128, warps=8, stages=3, pairs=True, itemsize=1),
    TileShape(m=64, n=128, k=128, warps=4, stages=4, pairs=True, itemsize=1),
)
"""The same for FP8 operands whose products of each 128 of K are added in float32. Three tiles of float32 are in registers: the
sum and two products. Larger tiles leave no room for them."""
_FEWEST_STAGES = 2
"""With one, no load would run ahead of the products."""
_SINGLE_STAGES = 5
"""Of PROMOTED_SHAPES that take one step over K a turn."""
_FEW_ROWS = 4096
"""Up to here, which row tiles take turns may matter; with more, a chunk has groups enough of its own."""
_ITEMSIZE = 2
"""Of the tiles of the result."""
_DTYPE = "bfloat16"
"""What kernels multiply but for FP8: a choice is made by its peak, which is float16's, too."""


EXCHANGED_BYTES = 16
"""A row of a piece, at least: what a thread stores at once."""


def streamed_tile(problem: Problem, width: int, pieces: int, height: int, sms: int) -> tuple[int, int]:
    """Rows and columns of a tile of the kernel that multiplies and exchanges (weft.kernels.all_reduce): those whose tiles fill
    the SMs best, where the time of a wave is that of streaming its columns of b. width: columns of each of the pieces that a
    tile has. height: rows of all tiles."""
    rows = next((size for size in (16, 32, 64) if height <= size), 128)
    row_tiles = -(-height // rows)

    def tiles(cols: int) -> int:
        return row_tiles * -(-width // (cols // pieces))

    def streamed(cols: int) -> int:
        """Columns that a block streams, one wave after the other."""
        return -(-tiles(cols) // sms) * cols

    if streams_wide(problem, rows) and tiles(128) >= sms:
        return rows, 128
    choices = [cols for cols in (128, 64, 32) if cols // pieces * problem.itemsize >= EXCHANGED_BYTES]
    return rows, min(choices or [128], key=streamed)


def streams_wide(problem: Problem, rows: int) -> bool:
    """Whether tiles of 128 columns are the fastest wherever they fill the SMs, with 8 warps and 4 stages. On an H100, one row
    by 28672 x 8192 of FP8 takes 87 us with them, 98 with 64 columns and 104 with 32. Blockwise scales and 16-bit operands were
    not tried."""
    return problem.scaling is not None and problem.scaling.recipe != "blockwise" and rows == 16


def push_sms(machine: Machine, sms: int, *, alone: bool) -> int:
    """SMs that stores to peers get on a GPU that has `sms`. alone: no kernel multiplies meanwhile."""
    return max(1, min(machine.stores.sms_alone if alone else machine.stores.sms, sms - 1))


@lru_cache(maxsize=64)
def shapes_for(gpu: Capabilities, scaling: Scaling | None = None) -> tuple[TileShape, ...]:
    """The shapes for 16-bit operands, or for FP8 ones of this scaling, that fit a GPU, with as many stages as its shared memory
    holds; none where matrix units do not take the operands. Every GPU with TMA has matrix units for FP8."""
    fitting = []
    for blocks in _candidates(gpu, scaling) if gpu.matrix_16bit and (scaling is None or gpu.tma) else ():
        stages = blocks.stages
        while stages >= _FEWEST_STAGES and blocks.shared_bytes(stages, tma=gpu.tma) > gpu.shared_bytes:
            stages -= 1
        if stages >= _FEWEST_STAGES:
            fitting.append(dataclasses.replace(blocks, stages=stages))
    return tuple(fitting)


def promotes(gpu: Capabilities, scaling: Scaling) -> bool:
    """Whether products of each 128 of K are added in float32, by CUDA cores: where each has a scale of its own, and where
    matrix units would round too much."""
    return scaling.recipe == "blockwise" or not (scaling.use_fast_accum or gpu.exact_fp8)


def _candidates(gpu: Capabilities, scaling: Scaling | None) -> tuple[TileShape, ...]:
    if scaling is None:
        return SHAPES
    if not promotes(gpu, scaling):
        return FP8_SHAPES
    if not gpu.exact_fp8:
        return PROMOTED_SHAPES
    # Blackwell's matrix units have a memory for their sums: two steps a turn spare nothing, and Triton cannot pipeline them.
    return tuple(dataclasses.replace(blocks, pairs=False, stages=_SINGLE_STAGES) for blocks in PROMOTED_SHAPES)


def tiles_of(part: Part, blocks: TileShape) -> int:
    """How far a part's count grows in a call: its tiles, each of them twice where some may come as halves."""
    rows, cols = part.out.shape
    return -(-rows // blocks.m) * -(-cols // blocks.n) * (1 + blocks.halves)


def whole_tiles(tiles: int, at_once: int, blocks: TileShape) -> int:
    """How many of so many tiles, of which `at_once` run at a time, are not cut in two: those of the last wave are, where
    their halves are no more than one wave."""
    last = tiles % at_once
    return tiles - last if blocks.halves and 2 * last <= at_once else tiles


def shape_of(step: Gemm, gpu: Capabilities, machine: Machine, scaling: Scaling | None = None) -> TileShape:
    """The tile shape for a step, on a GPU that some shapes fit. machine: whose numbers order them. scaling: of FP8 operands."""
    parts = tuple(
        Arriving(
            *part.out.shape,
            not part.adds and any(not gate.on_previous_call for gate in part.waits),
            (*(column for column, _ in part.inner), part.a.shape[1]),
            part.out.rank != step.b.rank,
        )
        for part in step.parts
    )
    return best_shape(parts, gpu, machine, stored=by_hardware(step), scaling=scaling)


class Arriving(NamedTuple):
    """A part of a step: rows and columns of its result, whether it waits for what arrives, at which columns of a the slices end
    that it waits for (all of K is one slice where it waits once), and whether its tiles go to a peer."""

    rows: int
    cols: int
    gated: bool
    ends: tuple[int, ...]
    away: bool = False


def best_shape(
    parts: tuple[Arriving, ...], gpu: Capabilities, machine: Machine, *, stored: bool, scaling: Scaling | None = None
) -> TileShape:
    """The tile shape for a step of these parts. stored: by hardware. scaling: of FP8 operands."""
    numbers = _numbers(machine, gpu.sms, machine.kernel_rate(scaling, _DTYPE))
    choices = shapes_for(gpu, scaling)
    if any(part.gated for part in parts):
        return _gated_blocks(parts, choices, numbers, stored)
    if any(part.away for part in parts):
        return min(choices, key=lambda blocks: _sent_us(parts, blocks, numbers))
    return min(choices, key=lambda blocks: _waves_us(parts, blocks, numbers, stored=stored))


def by_hardware(step: Gemm) -> bool:
    """Whether hardware stores the step's tiles, since none of them counts, adds, or goes to a peer."""
    return not any(part.count or part.adds or part.out.rank != step.b.rank for part in step.parts)


class _Numbers(NamedTuple):
    """What a choice depends on of a Machine, for a GPU of so many SMs. stored_rates: of tiles that hardware stores.
    copy_us: of a copy and its flag. itemsize: bytes of an operand's element. Rates are in bytes/us, those of tiles by (rows,
    columns) in operations/us."""

    sms: int
    itemsize: int
    rates: tuple[tuple[tuple[int, int], float], ...]
    stored_rates: tuple[tuple[tuple[int, int], float], ...]
    tile_us: float
    half_tile: float
    copy_us: float
    copied: float
    store_us: float
    stored: float
    sent: float
    memory: float
    cached_bytes: float
    push_sms: int

    def step_us(self, blocks: TileShape, *, stored: bool = False) -> float:
        """A column of a, in a tile."""
        return 2 * blocks.m * blocks.n / dict(self.stored_rates if stored else self.rates)[blocks.m, blocks.n]

    def whole_us(self, blocks: TileShape, k: int, *, stored: bool = False) -> float:
        return self.step_us(blocks, stored=stored) * k + self.tile_us


def _numbers(machine: Machine, sms: int, rate: str = _DTYPE) -> _Numbers:
    gpu, copies, stores = machine.gpu, machine.copies, machine.stores
    flop_per_us = gpu.flag_efficiency * machine.tflops(rate) * 1e6 / gpu.sms
    shapes = [(blocks.m, blocks.n) for blocks in SHAPES]
    pushing = push_sms(machine, sms, alone=False)
    return _Numbers(
        sms=sms,
        itemsize=RATE_ITEMSIZE[rate],
        rates=tuple((shape, flop_per_us * gpu.kernel_efficiency(*shape)) for shape in shapes),
        stored_rates=tuple((shape, flop_per_us * gpu.kernel_efficiency(*shape, stored=True)) for shape in shapes),
        tile_us=gpu.tile_us,
        half_tile=gpu.half_tile,
        copy_us=copies.copy_us + machine.flag_us,
        copied=1e3 * (copies.several_gbps if machine.fans_out else copies.gbps),
        store_us=machine.launch_us,
        stored=1e3 * stores.rate(pushing),
        sent=1e3 * stores.rate(gpu.sms) * (stores.tiles or 1.0),
        memory=1e3 * gpu.hbm_gbps,
        cached_bytes=machine.kernels.l2_share * gpu.l2_bytes,
        push_sms=pushing,
    )


def _count(part: Arriving, blocks: TileShape) -> int:
    return -(-part.rows // blocks.m) * -(-part.cols // blocks.n)


def _waves_us(parts: Sequence[Arriving], blocks: TileShape, numbers: _Numbers, *, stored: bool) -> float:
    tiles = sum(_count(part, blocks) for part in parts)
    whole = whole_tiles(tiles, numbers.sms, blocks)
    waves = -(-whole // numbers.sms) + (numbers.half_tile if whole < tiles else 0.0)
    return waves * numbers.whole_us(blocks, parts[0].ends[-1] if parts else 0, stored=stored)


def _sent_us(parts: Sequence[Arriving], blocks: TileShape, numbers: _Numbers) -> float:
    """When the last tile ends and the last one that goes to a peer is there: with one wave nothing is sent before it ends."""
    tile_us, sms = numbers.whole_us(blocks, parts[0].ends[-1]), numbers.sms
    tile_bytes = blocks.m * blocks.n * _ITEMSIZE
    away, total = sum(_count(part, blocks) for part in parts if part.away), sum(_count(part, blocks) for part in parts)
    waves, sending = -(-total // sms), -(-away // sms)
    halved = whole_tiles(total, sms, blocks) < total

    def ends(wave: int) -> float:
        return tile_us * (wave - (1 - numbers.half_tile) * (halved and wave == waves))

    # Each wave's tiles go behind those before: what is sent ends late by the first wave, or by one of the last two.
    full_us, last_us = (tiles * tile_bytes / numbers.sent for tiles in (sms, away - (sending - 1) * sms))
    late = [ends(wave) + (sending - wave) * full_us + last_us for wave in {1, sending - 1, sending} if 0 < wave <= sending]
    return max(ends(waves), *late)


@lru_cache(maxsize=1024)
def _gated_blocks(parts: tuple[Arriving, ...], shapes: tuple[TileShape, ...], numbers: _Numbers, stored: bool) -> TileShape:
    few = sum(part.rows for part in parts) <= _FEW_ROWS
    choices = [dataclasses.replace(blocks, group=group) for blocks in shapes for group in ((8, 4, 2, 1) if few else (8,))]
    return min(choices, key=lambda blocks: _gated_us(parts, blocks, numbers, stored=stored))


def _gated_us(parts: tuple[Arriving, ...], blocks: TileShape, numbers: _Numbers, *, stored: bool) -> float:
    """When the last tile ends, if chunks arrive one after the other from the start on."""
    sliced = any(len(part.ends) > 1 for part in parts)
    columns, inner = parts[0].cols, parts[0].ends[-1]
    arrivals = _slice_arrivals(parts, numbers) if sliced else _chunk_arrivals(parts, numbers)
    step_us = numbers.step_us(blocks, stored=stored)
    half_us = step_us * numbers.half_tile
    row_tiles = [-(-part.rows // blocks.m) for part in parts]
    col_tiles = -(-columns // blocks.n)
    free, at = np.zeros(numbers.sms - numbers.push_sms * sliced), 0
    left, cut = whole_tiles(sum(row_tiles) * col_tiles, len(free), blocks), []
    ready = _ready(parts, arrivals, step_us)
    for pattern, times in _runs(row_tiles, blocks.group, col_tiles):
        tiles = len(pattern) * times
        whole = min(left, tiles)
        at = _advance(free, at, ready[list(pattern)], whole, inner * step_us + numbers.tile_us)
        left -= whole
        cut += [pattern[tile % len(pattern)] for tile in range(whole, tiles)]
    if cut:
        ready = _ready(parts, arrivals, half_us)
    _advance(free, at, np.repeat(ready[cut], 2), 2 * len(cut), inner * half_us + numbers.half_tile * numbers.tile_us)
    b_bytes = columns * inner * numbers.itemsize
    passes = -(-sum(row_tiles) // blocks.group) if b_bytes > numbers.cached_bytes else 1
    return max(float(free.max()), passes * b_bytes / numbers.memory)


def _ready(parts: Sequence[Arriving], arrivals: tuple[tuple[float, ...], ...], step_us: float) -> np.ndarray:
    """By part, when its tiles may begin."""
    if all(len(arrives) == 1 for arrives in arrivals):
        return np.array(arrivals)[:, 0]
    return np.array([_opens(part.ends, arrives, step_us) for part, arrives in zip(parts, arrivals, strict=True)])


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


def _advance(free: np.ndarray, at: int, ready: np.ndarray, tiles: int, tile_us: float) -> int:
    """Give tiles to blocks in turns, from block `at` on; returns whose turn is next. free: when each block ends. ready: when
    tiles may begin, again and again; once a block has had each that comes to it, it waits for none of them any more."""
    size, turn = len(free), (np.arange(len(free)) - at) % len(free)
    waves, over = divmod(tiles, size)
    waiting = min(waves, len(ready) // math.gcd(size, len(ready)) if len(ready) else 0)
    for wave in range(waiting):
        np.maximum(free, ready[(wave * size + turn) % len(ready)], out=free)
        free += tile_us
    free += (waves - waiting) * tile_us
    if over:
        last = turn < over
        free[last] = np.maximum(free[last], ready[(waves * size % len(ready) + turn[last]) % len(ready)]) + tile_us
    return (at + over) % size


@lru_cache(maxsize=16)
def _chunk_arrivals(parts: tuple[Arriving, ...], numbers: _Numbers) -> tuple[tuple[float, ...], ...]:
    """By part, when its rows are there if copy engines bring them one part after the other."""
    now = 0.0
    found: list[tuple[float, ...]] = []
    for part in parts:
        now += (numbers.copy_us + part.rows * part.ends[-1] * numbers.itemsize / numbers.copied) if part.gated else 0.0
        found.append((now if part.gated else 0.0,))
    return tuple(found)


@lru_cache(maxsize=16)
def _slice_arrivals(parts: tuple[Arriving, ...], numbers: _Numbers) -> tuple[tuple[float, ...], ...]:
    """By part, when each of its slices is there if SMs store the first ones of all parts, then the second ones."""
    found: list[list[float]] = [[0.0] * len(part.ends) for part in parts]
    now = numbers.store_us
    for number in range(max(len(part.ends) for part in parts)):
        for part, arrives in zip(parts, found, strict=True):
            if part.gated and number < len(part.ends):
                low = part.ends[number - 1] if number else 0
                now += part.rows * (part.ends[number] - low) * numbers.itemsize / numbers.stored
                arrives[number] = now
    return tuple(tuple(arrives) for arrives in found)
