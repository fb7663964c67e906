"""Selects the tile shape of weft's own kernel for a GEMM step: the shape whose estimated end is first.

A step without gates, or whose gates are late (`Part.adds`), takes waves of tiles times a tile's time. If tiles go to peers, it
ends when the last one has arrived. A step whose tiles wait for chunks runs its tiles in the kernel's order, each after its
chunk may have arrived. Smaller tiles, or fewer row tiles that share their columns, can then end first: with one wave of large
tiles, all of the last chunk's work starts when it arrives (512 rows on 4 GPUs: 153 us against 135 for the sequential program).
A part with inner gates waits for slices of K. SMs store the first slices of all ranks first, so all tiles start early and one
wave of large tiles is best again. The kernel and its time prediction both use this module.

The result depends only on the step, the GPU's capabilities and the Machine, so that ranks which wait for another rank's tiles
know their number. Ranks compare the digests of their profiles before they run a kernel. Shapes that do not fit the GPU are no
candidates. Rates and fixed costs are the Machine's, which the simulator uses, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from weft.core.hardware import Capabilities
from weft.core.machine import Machine
from weft.core.problem import RATE_ITEMSIZE, Problem, Scaling
from weft.core.schedule import Gemm, Part


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileShape:
    """A tile of m x n elements, computed in steps of k, and how a block computes it.

    group: the number of row tiles that take turns on the same columns.
    halves: tiles that fill no more than half of the last wave are cut into a left and a right half.
    pairs: one iteration of the loop over K takes two steps, so that a stage holds two.
    itemsize: the bytes of an operand's element.
    """

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
        """Return the shared memory of a block with this many stages of operands. If hardware stores a tile of the result, which
        has 16-bit elements, the tile is in shared memory, too."""
        return stages * (1 + self.pairs) * (self.m + self.n) * self.k * self.itemsize + tma * self.m * self.n * _ITEMSIZE


SHAPES = (
    TileShape(m=128, n=256, k=64, warps=8, stages=3, halves=True),
    TileShape(m=128, n=128, k=64, warps=8, stages=5),
    TileShape(m=64, n=256, k=64, warps=4, stages=4),
    TileShape(m=64, n=128, k=64, warps=4, stages=5),
)
"""The shapes with which kernels are launched, the best for large sizes first."""
FP8_SHAPES = (
    TileShape(m=128, n=256, k=128, warps=8, stages=3, halves=True, itemsize=1),
    TileShape(m=128, n=128, k=128, warps=8, stages=5, itemsize=1),
    TileShape(m=64, n=128, k=128, warps=4, stages=5, itemsize=1),
)
"""The shapes for FP8 operands whose products are summed by tensor cores alone. 64 x 256 is left out: at FP8's rate it took
longer than 128 x 128 for each of 28 sizes on an H200."""
PROMOTED_SHAPES = (
    TileShape(m=128, n=128, k=128, warps=8, stages=3, pairs=True, itemsize=1),
    TileShape(m=64, n=128, k=128, warps=4, stages=4, pairs=True, itemsize=1),
)
"""The shapes for FP8 operands whose products of each 128 of K are added in float32. Registers hold three tiles of float32: the
sum and two products. Larger tiles leave no room for them."""
_FEWEST_STAGES = 2
"""With a single stage, no load would run ahead of the products."""
_SINGLE_STAGES = 5
"""The number of stages of PROMOTED_SHAPES that take one step over K in each iteration."""
_FEW_ROWS = 4096
"""Up to this number of rows, the order of row tiles may matter. With more rows, each chunk has enough groups of its own."""
_ITEMSIZE = 2
"""The bytes of an element of a result's tile."""
_DTYPE = "bfloat16"
"""The dtype of 16-bit operands, whose peak decides the choice. float16 has the same peak."""


EXCHANGED_BYTES = 16
"""The minimum bytes of a piece's row, which a thread stores at once."""


def streamed_tile(problem: Problem, width: int, pieces: int, height: int, sms: int) -> tuple[int, int]:
    """Return the rows and columns of a tile of the kernel that multiplies and exchanges (weft.kernels.all_reduce).

    These tiles fill the SMs best, if the time of a wave is that of streaming its columns of b. width: the columns of each
    piece of a tile. height: the rows of all tiles."""
    rows = next((size for size in (16, 32, 64) if height <= size), 128)
    row_tiles = -(-height // rows)

    def tiles(cols: int) -> int:
        return row_tiles * -(-width // (cols // pieces))

    def streamed(cols: int) -> int:
        """Return the columns that a block streams, one wave after the other."""
        return -(-tiles(cols) // sms) * cols

    if streams_wide(problem, rows) and tiles(128) >= sms:
        return rows, 128
    choices = [cols for cols in (128, 64, 32) if cols // pieces * problem.itemsize >= EXCHANGED_BYTES]
    return rows, min(choices or [128], key=streamed)


def streams_wide(problem: Problem, rows: int) -> bool:
    """Return whether tiles of 128 columns, 8 warps and 4 stages are the fastest wherever they fill the SMs.

    On an H100, one row by 28672 x 8192 of FP8 takes 87 us with them, 98 with 64 columns and 104 with 32. Blockwise scales and
    16-bit operands were not measured."""
    return problem.scaling is not None and problem.scaling.recipe != "blockwise" and rows == 16


def push_sms(machine: Machine, sms: int, *, alone: bool) -> int:
    """Return the number of SMs, of `sms`, that stores to peers get. alone: no kernel multiplies at the same time."""
    return max(1, min(machine.stores.sms_alone if alone else machine.stores.sms, sms - 1))


def pull_sms(machine: Machine, blocks: TileShape, *, k: int, world_size: int, rate_name: str) -> int:
    """Return the number of SMs that pull the products of peers while all others multiply (weft.kernels.ragged): 1.5 times as
    many as keep up with the multiplying ones.

    At least 4 pull, so that one slow peer does not block all, and at most 12, so that most SMs multiply. blocks: the shape of
    the tiles. k, world_size: the problem's. rate_name: the name of the operands' rate."""
    efficiency = machine.gpu.flag_efficiency * machine.gpu.kernel_efficiency(blocks.m, blocks.n)
    # A product's element takes 2 k operations and has 2 bytes.
    per_us = efficiency * machine.tflops(rate_name) * 1e6 / k * (world_size - 1) / world_size
    return min(12, max(4, math.ceil(1.5 * per_us / (1e3 * machine.kernels.pull_gbps))))


def tallest(rows: int, gpu: Capabilities, scaling: Scaling | None) -> TileShape:
    """Return the best shape that fits a GPU and has at most `rows` rows, or else the best of those with fewest rows."""
    fitting = shapes_for(gpu, scaling)
    low = min(blocks.m for blocks in fitting)
    return next(blocks for blocks in fitting if blocks.m <= max(rows, low))


@lru_cache(maxsize=64)
def shapes_for(gpu: Capabilities, scaling: Scaling | None = None) -> tuple[TileShape, ...]:
    """Return the shapes for 16-bit operands, or for FP8 operands with this scaling, that fit a GPU.

    They have as many stages as shared memory holds. There are none if matrix units do not take the operands. Every GPU with TMA
    has matrix units for FP8."""
    fitting = []
    for blocks in _candidates(gpu, scaling) if gpu.matrix_16bit and (scaling is None or gpu.tma) else ():
        stages = blocks.stages
        while stages >= _FEWEST_STAGES and blocks.shared_bytes(stages, tma=gpu.tma) > gpu.shared_bytes:
            stages -= 1
        if stages >= _FEWEST_STAGES:
            fitting.append(dataclasses.replace(blocks, stages=stages))
    return tuple(fitting)


def promotes(gpu: Capabilities, scaling: Scaling) -> bool:
    """Return whether CUDA cores add the products of each 128 of K in float32. They do if each 128 has a scale of its own, or if
    matrix units would round too much."""
    return scaling.recipe == "blockwise" or not (scaling.use_fast_accum or gpu.exact_fp8)


def _candidates(gpu: Capabilities, scaling: Scaling | None) -> tuple[TileShape, ...]:
    if scaling is None:
        return SHAPES
    if not promotes(gpu, scaling):
        return FP8_SHAPES
    if not gpu.exact_fp8:
        return PROMOTED_SHAPES
    # Blackwell's matrix units have a memory for their sums: two steps at once save nothing, and Triton cannot pipeline them.
    return tuple(dataclasses.replace(blocks, pairs=False, stages=_SINGLE_STAGES) for blocks in PROMOTED_SHAPES)


def tiles_of(part: Part, blocks: TileShape) -> int:
    """Return how much a part's count grows in a call: by 1 for each tile, or by 2 if some tiles may be cut into halves."""
    rows, cols = part.out.shape
    return -(-rows // blocks.m) * -(-cols // blocks.n) * (1 + blocks.halves)


def whole_tiles(tiles: int, at_once: int, blocks: TileShape) -> int:
    """Return how many of `tiles` tiles are not cut in two, if `at_once` run at a time. Tiles of the last wave are cut if their
    halves take at most one wave."""
    last = tiles % at_once
    return tiles - last if blocks.halves and 2 * last <= at_once else tiles


def shape_of(step: Gemm, gpu: Capabilities, machine: Machine, scaling: Scaling | None = None) -> TileShape:
    """Return the tile shape for a step on a GPU. machine: its rates order the shapes. scaling: that of FP8 operands."""
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
    """A part of a step.

    rows, cols: the size of its result. gated: it waits for data to arrive. ends: the columns of a at which the slices end that
    it waits for; a single slice is all of K. away: its tiles go to a peer.
    """

    rows: int
    cols: int
    gated: bool
    ends: tuple[int, ...]
    away: bool = False


def best_shape(
    parts: tuple[Arriving, ...], gpu: Capabilities, machine: Machine, *, stored: bool, scaling: Scaling | None = None
) -> TileShape:
    """Return the tile shape for a step of these parts. stored: hardware stores the tiles. scaling: that of FP8 operands."""
    numbers = _numbers(machine, gpu.sms, machine.kernel_rate(scaling, _DTYPE))
    choices = shapes_for(gpu, scaling)
    if any(part.gated for part in parts):
        return _gated_blocks(parts, choices, numbers, stored)
    if any(part.away for part in parts):
        return min(choices, key=lambda blocks: _sent_us(parts, blocks, numbers))
    return min(choices, key=lambda blocks: _waves_us(parts, blocks, numbers, stored=stored))


def by_hardware(step: Gemm) -> bool:
    """Return whether hardware stores the step's tiles: none of them counts, adds, or goes to a peer."""
    return not any(part.count or part.adds or part.out.rank != step.b.rank for part in step.parts)


class _Numbers(NamedTuple):
    """The numbers of a Machine on which a choice depends, for a GPU with `sms` SMs.

    itemsize: the bytes of an operand's element. rates, stored_rates: the rates of tiles by (rows, columns) in operations/us;
    the latter are for tiles that hardware stores. copy_us: the time of a copy and its flag. Other rates are in bytes/us.
    """

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
        """Return the time that a tile takes for one column of a."""
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
    """Return when the last tile has ended and has arrived at its peer. A tile is sent when its wave ends."""
    tile_us, sms = numbers.whole_us(blocks, parts[0].ends[-1]), numbers.sms
    tile_bytes = blocks.m * blocks.n * _ITEMSIZE
    away, total = sum(_count(part, blocks) for part in parts if part.away), sum(_count(part, blocks) for part in parts)
    waves, sending = -(-total // sms), -(-away // sms)
    halved = whole_tiles(total, sms, blocks) < total

    def ends(wave: int) -> float:
        return tile_us * (wave - (1 - numbers.half_tile) * (halved and wave == waves))

    # A wave's tiles queue behind those of earlier waves: the first wave, or one of the last two, decides when sending ends.
    full_us, last_us = (tiles * tile_bytes / numbers.sent for tiles in (sms, away - (sending - 1) * sms))
    late = [ends(wave) + (sending - wave) * full_us + last_us for wave in {1, sending - 1, sending} if 0 < wave <= sending]
    return max(ends(waves), *late)


@lru_cache(maxsize=1024)
def _gated_blocks(parts: tuple[Arriving, ...], shapes: tuple[TileShape, ...], numbers: _Numbers, stored: bool) -> TileShape:
    few = sum(part.rows for part in parts) <= _FEW_ROWS
    choices = [dataclasses.replace(blocks, group=group) for blocks in shapes for group in ((8, 4, 2, 1) if few else (8,))]
    return min(choices, key=lambda blocks: _gated_us(parts, blocks, numbers, stored=stored))


def _gated_us(parts: tuple[Arriving, ...], blocks: TileShape, numbers: _Numbers, *, stored: bool) -> float:
    """Return when the last tile ends, if chunks arrive one after the other from the start on."""
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
    """Return when the tiles of each part may begin."""
    if all(len(arrives) == 1 for arrives in arrivals):
        return np.array(arrivals)[:, 0]
    return np.array([_opens(part.ends, arrives, step_us) for part, arrives in zip(parts, arrivals, strict=True)])


def _opens(ends: tuple[int, ...], arrives: tuple[float, ...], step_us: float) -> float:
    """Return when a tile could begin that waits for all slices together and ends as early as one that waits for each slice.
    step_us: the time for one column of a."""
    return max(ready - done * step_us for done, ready in zip((0, *ends), arrives, strict=False))


def _runs(row_tiles: Sequence[int], group: int, col_tiles: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield tiles in the kernel's order: the numbers of parts, and how often they repeat. row_tiles: those of each part.

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
    """Assign tiles to blocks in turn, starting with block `at`, and return the block that is next. free: when each block ends.
    ready: when tiles may begin, repeated cyclically. After a block has had each tile of its cycle, it never waits again."""
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
    """Return when the rows of each part arrive if copy engines copy one part after the other."""
    now = 0.0
    found: list[tuple[float, ...]] = []
    for part in parts:
        now += (numbers.copy_us + part.rows * part.ends[-1] * numbers.itemsize / numbers.copied) if part.gated else 0.0
        found.append((now if part.gated else 0.0,))
    return tuple(found)


@lru_cache(maxsize=16)
def _slice_arrivals(parts: tuple[Arriving, ...], numbers: _Numbers) -> tuple[tuple[float, ...], ...]:
    """Return when each slice of each part arrives if SMs store the first slices of all parts, then the second ones."""
    found: list[list[float]] = [[0.0] * len(part.ends) for part in parts]
    now = numbers.store_us
    for number in range(max(len(part.ends) for part in parts)):
        for part, arrives in zip(parts, found, strict=True):
            if part.gated and number < len(part.ends):
                low = part.ends[number - 1] if number else 0
                now += part.rows * (part.ends[number] - low) * numbers.itemsize / numbers.stored
                arrives[number] = now
    return tuple(tuple(arrives) for arrives in found)
