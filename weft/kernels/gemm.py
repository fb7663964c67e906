"""The launcher of the GEMM kernel whose tiles wait for flags, add received data, count when done, or are stored at a peer.

    gemm_kernel    persistent blocks; row tiles in the order of the step's parts; TMA loads
    gemm()         its launcher; Tables  a step's parts in the form that the kernel reads, computed once

A tile does the following; constexpr arguments select what applies. It waits for its part's gates (GATED) and multiplies,
waiting again between slices of K (INNER). It adds its part's sources (ADDS), is stored in `out` or at another address, also at
a peer (ADDRESSED), by TMA if it is a whole tile (OUT_TMA), and adds to its part's flag (COUNTED). A tile adds 1; where the
shape allows half tiles, a whole tile adds 2 and a half tile 1. The part is done when its flag has reached the sum over its
tiles (`tiles_of`), and that sum is what a waiter waits for. Where the last wave would leave half of the blocks idle, its tiles
are cut in two (HALVES).

    block 0: tile 0, 132, 264 ...    gate open? -> load a, b; dot ... -> store    and some steps into tile 132:
                                     all written? -> barrier -> count (release, system)
    block 1: tile 1, 133, ...        ^ acquire, system scope: written by a copy engine's stream, or by a peer's kernel
    block 2: a tile that adds        load a, b; dot ... -> gate open? -> load a source, add ... -> divide -> store
    block 3: a tile of slices        gate open? -> load a, b; dot ... -> inner gate open? -> load a, b; dot ... -> store

Sources are added to the unrounded product in float32. Up to three loads are in flight, in the shared memory that the
multiplication has released, so that their latencies overlap.

Slices are a loop around the loop over K. Loads run some steps ahead of the products, and no load may run ahead of its gate, so
each slice refills the pipeline, which costs one memory latency.

A block takes its tiles in order, so a waiting tile delays those behind it. Tiles take turns among the row tiles of a group. No
group mixes parts that count with later parts that wait, because two ranks could then wait for each other (`in_order`):

    rank 0, block 7: own tile, waits for a tile of rank 1 ...   then a tile that rank 1 waits for
    rank 1, block 7: own tile, waits for a tile of rank 0 ...   then a tile that rank 0 waits for

A gate's flag is lowered only after the kernel has ended, so a block that looks late still sees it raised. A wait gives up after
`tries` looks: the tile continues with the data that is there, and `status` records the gate. Under the interpreter the host
then raises WaitTimeout. On GPUs the watchdog's timeout ends first, and nobody reads `status`. The checker proves that waiting
blocks never occupy the SMs that the work they wait for needs (weft.checker.starvation).

TMA stores through descriptors, and a launch takes one for each tensor. Results at several peers would need one descriptor each.
But all of them have the same row width and stride, and a GPU maps its peers' memory into its own address space. So the row
tiles are slices of one tensor [slots, rows, N], whose first stride skips the memory between them (ScatteredTiles):

    address   base            base + pitch              base + 2 pitch        ...
              row tile 0      (not ours, never touched)  row tile 1, at a peer

Memory between tiles is never accessed: a store names a slot and has at most a tile's rows.

Legend: M N K of one GEMM; a tile is BLOCK_M x BLOCK_N. Sources: `a` may be in two tensors (own shard, gathered rows).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.compat.device import capabilities
from weft.core.hardware import Capabilities
from weft.core.machine import Machine
from weft.core.problem import SCALE_BLOCK, Recipe, Scaling
from weft.core.schedule import Flag, Gemm, Part, Region, Wait
from weft.kernels.gemm_kernel import Pointers, Variant, gemm_kernel
from weft.kernels.launch import Launcher
from weft.kernels.scaled import FLOAT8_DTYPES, scales_of, specialised
from weft.perf.shapes import TileShape, promotes, shape_of, whole_tiles
from weft.triton.flags import asynchronous, table

INTERPRETED = TileShape(m=32, n=32, k=32, warps=4, stages=1, halves=True)
"""The tile shape under the interpreter, which runs element by element."""
INTERPRETED_FP8 = TileShape(m=32, n=32, k=SCALE_BLOCK, warps=4, stages=1, halves=True, pairs=True, itemsize=1)
"""The tile shape under the interpreter for FP8 operands. A step over K is one block of scales."""


def blocks_for(step: Gemm, device: torch.device, machine: Machine, scaling: Scaling | None = None) -> TileShape:
    """Return the tile shape for a step.

    machine: the profile that all ranks share.
    scaling: the scaling of FP8 operands.
    """
    if device.type == "cuda":
        return shape_of(step, capabilities(device), machine, scaling)
    return INTERPRETED if scaling is None else INTERPRETED_FP8


_MOST_PITCH_BYTES, _MOST_SLOTS = 1 << 40, 1 << 31
"""TMA's bounds of a stride and of a coordinate."""


@dataclass(frozen=True, kw_only=True)
class ScatteredTiles:
    """ScatteredTiles describes tiles at several addresses as one tensor.

    base: the tile with the lowest address.
    pitch: slot i begins i * `pitch` elements after base.
    slots: the number of slots.
    """

    base: torch.Tensor
    pitch: int
    slots: int

    def descriptor(self, block: list[int]) -> TensorDescriptor:
        """Return the TMA descriptor. block: the rows and columns of one store. A slot has as many rows."""
        rows, cols = block
        width, stride = self.base.shape[1], self.base.stride(0)
        return TensorDescriptor(self.base, [self.slots, rows, width], [self.pitch, stride, 1], [1, rows, cols])


def index_tiles(tiles: Sequence[torch.Tensor]) -> tuple[ScatteredTiles | None, list[int]]:
    """Return one tensor for all tiles, and the slot of each tile. Return None and slots -1 if TMA cannot address them.

    A TMA tensor's strides must be multiples of 16 bytes and of the stride of the next inner dimension.

    tiles: a view of each tile that starts at its first row. All have one dtype, width and stride.
    """
    if not tiles:
        return None, []
    base = min(tiles, key=lambda tile: tile.data_ptr())
    gaps = [tile.data_ptr() - base.data_ptr() for tile in tiles]
    row_bytes = base.stride(0) * base.element_size()
    pitch_bytes = math.gcd(*gaps) or row_bytes
    slots = [gap // pitch_bytes for gap in gaps]
    aligned = base.data_ptr() % 16 == row_bytes % 16 == pitch_bytes % row_bytes == 0
    if not aligned or pitch_bytes >= _MOST_PITCH_BYTES or max(slots) >= _MOST_SLOTS:
        return None, [-1] * len(tiles)
    return ScatteredTiles(base=base, pitch=pitch_bytes // base.element_size(), slots=max(slots) + 1), slots


_MOST_SOURCES = 3
"""At most this many loads of added sources are in flight, if shared memory has room."""
_PUBLISH_STEPS = 6
"""A tile is published this many steps into the next tile's loop over K: about 4 us, after which its stores have completed."""


@dataclass(frozen=True, kw_only=True)
class Tables:
    """A Gemm step's parts as the kernel reads them, on the device.

    A tile that adds waits late: after the multiplication, before it reads its sources.

    rows: for each row tile: source, first row of a, valid rows, first row of out, gates [first, last), count; where parts have
        inner gates, slices [first, last) in place of gates.
    slices: for each slice: the step over K where it ends, and the gates [first, last) that it waits for.
    outs: for each row tile: the address of its first element, or 0 for a tile of the launch's `out`; its slot in `scattered`,
        or -1.
    align_bytes: a number that divides these addresses.
    scattered: all results outside `out` as one TMA tensor; None if there are none or TMA cannot store them.
    at_peers: whether some results are on another GPU.
    adds: for each row tile that adds: gates [first, last), the number of sources, the first row of the first source, and the
        rows from one source to the next.
    first_adding: the first row tile that adds. All row tiles from it on add.
    gates, needs: addresses of flags, and the values to wait for.
    no_needs: zeros; a silent launch uses them, so that every gate is open.
    counts: addresses of the flags that tiles add to.
    """

    rows: torch.Tensor
    slices: torch.Tensor
    outs: torch.Tensor
    adds: torch.Tensor
    gates: torch.Tensor
    needs: torch.Tensor
    no_needs: torch.Tensor
    counts: torch.Tensor
    blocks: TileShape
    gated: bool
    inner: bool
    counted: bool
    addressed: bool
    adding: bool
    divide_by: int
    first_adding: int
    align_bytes: int
    scattered: ScatteredTiles | None
    at_peers: bool


def fits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether TMA can load the operands.

    It needs 16-bit or FP8 elements, one unit stride, and rows that start at multiples of 16 bytes. With FP8, columns of b must
    also be contiguous, because tensor cores take no other layout.
    """
    fp8 = a.dtype in FLOAT8_DTYPES
    if fp8 != (b.dtype in FLOAT8_DTYPES) or not (fp8 or a.element_size() == 2) or min(a.numel(), b.numel()) == 0:
        return False
    if a.stride(1) != 1 or 1 not in b.stride():
        return False
    lead = b.stride(1) if fp8 or b.stride(1) != 1 else b.stride(0)
    strides = (n * a.element_size() for n in (a.stride(0), lead))
    return all(n > 0 and n % 16 == 0 for n in strides) and all(t.data_ptr() % 16 == 0 for t in (a, b))


def loads(matrix: torch.Tensor) -> bool:
    """Return whether TMA can load tiles of a matrix. Rows must be contiguous and start at multiples of 16 bytes."""
    pitch_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.numel() > 0 and matrix.stride(1) == 1 and pitch_bytes % 16 == matrix.data_ptr() % 16 == 0


def in_order(step: Gemm) -> bool:
    """Return whether the kernel's order of tiles respects the order of parts where one may wait for another.

    Parts that add must come last. Among parts that add, and among the others, no part that waits within the call may follow one
    that counts.
    """
    adding = [bool(part.adds) for part in step.parts]
    if adding != sorted(adding):
        return False
    for late in (False, True):
        counting = False
        for part in (part for part in step.parts if bool(part.adds) is late):
            if counting and any(not gate.on_previous_call for gate in part.waits):
                return False
            counting |= part.count is not None
    return True


def whole_slices(step: Gemm, blocks: TileShape) -> bool:
    """Return whether every slice between inner gates consists of whole steps of the kernel's loop over K."""
    return all(column % blocks.k == 0 for part in step.parts for column, _ in part.inner)


def pitch(part: Part) -> int | None:
    """Return the rows from one source of a part to the next.

    Return None unless all sources are equally spaced in one local buffer and are as wide as the result.
    """
    first, *more = (add.rows[0] for add in part.adds)
    step = more[0] - first if more else 0
    regular = all(
        add == Region(part.adds[0].buffer, part.a.rank, (first + i * step, first + i * step + part.out.shape[0]), part.out.cols)
        for i, add in enumerate(part.adds)
    )
    return step if regular else None


def tables(
    step: Gemm,
    *,
    device: torch.device,
    source: Callable[[Part], int],
    gate_address: Callable[[Flag], int],
    count_address: Callable[[Flag], int],
    stored_at: Callable[[Part, int], torch.Tensor | None] | None,
    need: Callable[[Wait], int],
    blocks: TileShape,
) -> Tables:
    """Build the tables of a step.

    source: returns the number of the tensor of a that a part reads.
    gate_address, count_address: return the address of a flag, for waits and for signals.
    stored_at: returns a part's result from a row on, or None if it is in the launch's `out`. It is None instead of a function
        if all results are in `out`.
    need: returns the value of the flag that opens a gate.
    """
    assert whole_slices(step, blocks), f"{step}: its slices end within a step of {blocks.k} over K"
    inner = any(part.inner for part in step.parts)
    slices: list[tuple[int, int, int]] = []
    rows: list[tuple[int, ...]] = []
    outs: list[torch.Tensor | None] = []
    adds: list[tuple[int, ...]] = []
    gates: list[int] = []
    needs: list[int] = []
    counts: list[int] = []
    for part in step.parts:
        first = len(gates)
        gates += [gate_address(gate.flag) for gate in part.waits]
        needs += [need(gate) for gate in part.waits]
        counts += [count_address(part.count)] if part.count else []
        count = len(counts) - 1 if part.count else -1
        early, late = ((0, 0), (first, len(gates))) if part.adds else ((first, first + len(part.gates)), (0, 0))
        if inner:
            slices += _slices(part, early, blocks)
            early = (len(slices) - len(part.inner) - 1, len(slices))
        added, distance = (part.adds[0].rows[0], pitch(part) or 0) if part.adds else (0, 0)
        for at in range(0, part.out.shape[0], blocks.m):
            valid = min(blocks.m, part.out.shape[0] - at)
            rows.append((source(part), part.a.rows[0] + at, valid, part.out.rows[0] + at, *early, count))
            outs.append(stored_at(part, at) if stored_at else None)
            adds.append((*late, len(part.adds), added + at, distance))

    scattered, slots = index_tiles([out for out in outs if out is not None])
    addresses = [out.data_ptr() if out is not None else 0 for out in outs]
    next_slot = iter(slots)
    return Tables(
        rows=table(rows, torch.int32, device),
        slices=table(slices, torch.int32, device),
        outs=table([(address, next(next_slot) if address else -1) for address in addresses], torch.int64, device),
        adds=table(adds, torch.int32, device),
        gates=table(gates, torch.int64, device),
        needs=table(needs, torch.int32, device),
        no_needs=table([0] * len(needs), torch.int32, device),
        counts=table(counts, torch.int64, device),
        blocks=blocks,
        gated=bool(gates),
        inner=inner,
        counted=bool(counts),
        addressed=stored_at is not None,
        adding=any(part.adds for part in step.parts),
        divide_by=step.divide_by,
        first_adding=sum(not sources for _, _, sources, _, _ in adds),
        align_bytes=math.gcd(16, *addresses),
        scattered=scattered,
        at_peers=any(part.out.rank != step.b.rank for part in step.parts),
    )


def _slices(part: Part, gates: tuple[int, int], blocks: TileShape) -> list[tuple[int, int, int]]:
    """Return a part's rows of the table of slices. gates: those of the first slice; the gates of later slices follow them."""
    ends = (*(column for column, _ in part.inner), part.a.shape[1])
    waits = [gates, *((gates[1] + i, gates[1] + i + 1) for i in range(len(part.inner)))]
    return [(-(-end // blocks.k), *pair) for end, pair in zip(ends, waits, strict=True)]


def gemm(
    sources: tuple[torch.Tensor, ...],
    b: torch.Tensor,
    out: torch.Tensor,
    plan: Tables,
    status: torch.Tensor,
    *,
    silent: bool = False,
    tries: int = 1 << 24,
    sms: int = 1,
    adds: torch.Tensor | None = None,
    added: tuple[torch.Tensor, torch.Tensor] | None = None,
    scales: tuple[tuple[torch.Tensor, ...], torch.Tensor, Recipe] | None = None,
    use_fast_accum: bool = False,
    launched_by: Launcher | None = None,
    stream: int | None = None,
) -> None:
    """Compute out = a @ b, tile by tile as `plan` says.

    sources: one or two tensors [rows, K] that parts read a from.
    b: [K, N]; either stride may be 1.
    out: [rows, N], or any tensor of the result's dtype and width if all parts are stored by address.
    adds: [rows, N], the tensor that holds the sources which parts add.
    added: another a [rows, L] and b [L, N], whose product is added before it is rounded. Its b has the layout of the first one,
        there is one source, no scales, and the schedule waits for nothing within K.
    scales: for FP8 operands, whose b has stride (1, ...): the scales of each source, those of b, and their recipe. They are
        float32 of the shapes that weft.core.problem.Scaling names, with any strides. Row i of a source has row i of its scales.
    use_fast_accum: tensor cores sum FP8 products themselves, which rounds more on Hopper. Blockwise scales do not allow it.
    status: int32 [2]; set to [gate + 1, value seen] when a wait gives up.
    silent: neither wait nor count.
    tries: a wait gives up after this many looks.
    sms: the number of blocks.
    launched_by: the launcher of earlier launches on this device with the same plan.
    stream: by default torch's current stream.
    """
    blocks = plan.blocks
    transposed = scales is not None or b.stride(1) != 1
    gpu, recipe = capabilities(out.device), scales[2] if scales is not None else ""
    promoted = recipe != "" and promotes(gpu, Scaling(recipe=recipe, use_fast_accum=use_fast_accum))
    within = blocks.k == SCALE_BLOCK and SCALE_BLOCK % blocks.n == 0
    assert recipe != "blockwise" or within, f"{blocks}: its tiles cross blocks of scales"
    scales_argument = scales_of(*scales) if scales is not None else None
    a_shape = [blocks.m, blocks.k]
    first = TensorDescriptor.from_tensor(sources[0], a_shape)
    out_stride, align = out.stride(0), math.gcd(16, out.data_ptr(), out.stride(0) * out.element_size())
    staged = blocks.shared_bytes(blocks.stages, tma=False) + blocks.m * blocks.n * out.element_size() <= gpu.shared_bytes
    out_tma = align == 16 and staged and (not plan.addressed or plan.scattered is not None)
    if added is not None:
        assert scales is None, "a sum of products without scales"
        assert len(sources) == 1, "a sum of products of one source"
        assert not plan.inner, "a sum of products that waits for nothing within K"
        assert (added[1].stride(1) != 1) == transposed, "a sum of products whose second factors have one layout"
    row_tiles = plan.rows.shape[0]
    tiles = row_tiles * -(-b.shape[1] // blocks.n)
    # Interpreted blocks run one after the other: a waiting block would delay a block whose tile a peer waits for.
    at_once = min(sms, tiles) if out.is_cuda or not plan.adding else 1
    uncut = whole_tiles(tiles, at_once, blocks)
    halves = uncut < tiles
    half = [blocks.m, blocks.n // 2]
    needs, amount = (plan.no_needs, 0) if silent else (plan.needs, 1 + blocks.halves)
    arguments = (
        first,
        TensorDescriptor.from_tensor(sources[1], a_shape) if len(sources) > 1 else first,
        *_b_descriptors(b, blocks, transposed, halves),
        *((None,) * 3 if added is None else _added_descriptors(added, a_shape, blocks, transposed, halves)),
        *_store_descriptors(out, plan, half, halves, out_tma),
        out,
        *(_whole_and_half(adds, [blocks.m, blocks.n], half, halves) if plan.adding and adds is not None else (out, out)),
        Pointers(plan.adds, plan.rows, plan.slices, plan.outs, plan.gates, needs, plan.counts, status),
        scales_argument,
        *(amount, tries, _publish_step(plan, b.shape[0])),
        *(uncut, row_tiles, plan.first_adding),
        *(b.shape[1], b.shape[0], 0 if added is None else added[1].shape[0], out_stride),
    )
    variant = Variant(
        BLOCK_M=blocks.m,
        BLOCK_N=blocks.n,
        BLOCK_K=blocks.k,
        GROUP=blocks.group,
        TWO_SOURCES=len(sources) > 1,
        B_TRANSPOSED=transposed,
        GATED=plan.gated,
        INNER=plan.inner,
        ADDED=added is not None,
        COUNTED=plan.counted,
        ADDRESSED=plan.addressed,
        OUT_TMA=out_tma,
        ASYNCHRONOUS=asynchronous(out.device),
        ALIGN_BYTES=math.gcd(plan.align_bytes, align),
        ADDS=plan.adding,
        ADD_STAGES=_add_stages(blocks, out_tma, gpu, out.element_size()),
        DIVIDE_BY=plan.divide_by,
        HALVES=halves,
        RECIPE=recipe,
        PROMOTED=promoted,
        PAIRS=promoted and blocks.pairs,
    )
    (launched_by or Launcher())(
        gemm_kernel,
        at_once,
        arguments,
        {"V": variant},
        key=(
            b.shape,
            None if added is None else added[1].shape,
            out_stride,
            out.data_ptr() % 16,
            transposed,
            len(sources),
            halves,
            out_tma,
            *specialised(scales_argument),
        ),
        stream=stream,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )


def _b_descriptors(b: torch.Tensor, blocks: TileShape, transposed: bool, halves: bool) -> tuple[object, object]:
    wide, narrow = blocks.n, blocks.n // 2
    if transposed:
        return _whole_and_half(b.t(), [wide, blocks.k], [narrow, blocks.k], halves)
    return _whole_and_half(b, [blocks.k, wide], [blocks.k, narrow], halves)


def _added_descriptors(
    added: tuple[torch.Tensor, torch.Tensor], a_shape: list[int], blocks: TileShape, transposed: bool, halves: bool
) -> tuple[object, object, object]:
    a, b = added
    return TensorDescriptor.from_tensor(a, a_shape), *_b_descriptors(b, blocks, transposed, halves)


class PlainGemm:
    """A PlainGemm multiplies FP8 operands of one size (M, N, K) by the kernel, without flags.

    The constructor makes the tables, because they cannot be made during a CUDA graph capture.
    """

    def __init__(self, size: tuple[int, int, int], device: torch.device, machine: Machine, scaling: Scaling) -> None:
        m, n, k = size
        part = Part(Region("a", 0, (0, m), (0, k)), Region("out", 0, (0, m), (0, n)))
        step = Gemm(Region("b", 0, (0, k), (0, n)), (part,))
        self._plan = tables(
            step,
            device=device,
            source=lambda _: 0,
            gate_address=lambda _: 0,
            count_address=lambda _: 0,
            stored_at=None,
            need=lambda _: 0,
            blocks=blocks_for(step, device, machine, scaling),
        )
        self._status = torch.zeros(2, dtype=torch.int32, device=device)
        self._sms, self._launcher = capabilities(device).sms, Launcher()

    def multiply(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, of: Scaling
    ) -> None:
        """Compute out = a @ b on torch's current stream. Shapes are as for `gemm`. of: the scaling of the operands."""
        scales, fast = ((scale_a,), scale_b, of.recipe), of.use_fast_accum
        gemm(
            (a,), b, out, self._plan, self._status,
            sms=self._sms, scales=scales, use_fast_accum=fast, launched_by=self._launcher,
        )  # fmt: skip


def _publish_step(plan: Tables, inner: int) -> int:
    """Return how many steps into the loop over K of tile i a block publishes tile i-1.

    It is half of the loop if tiles are stored at a peer, because such stores take that long when all SMs store concurrently.
    Otherwise it is _PUBLISH_STEPS, or the last step.
    """
    steps = -(-inner // plan.blocks.k)
    return steps // 2 if plan.at_peers else min(_PUBLISH_STEPS, steps - 1)


def _add_stages(blocks: TileShape, out_tma: bool, gpu: Capabilities, itemsize: int = 2) -> int:
    """Return one more than the number of added sources in flight. A tile that is being stored uses the same shared memory.

    itemsize: bytes of an element.
    """
    tile_bytes = blocks.m * blocks.n * itemsize
    return 1 + min(_MOST_SOURCES, (gpu.shared_bytes - tile_bytes * out_tma) // tile_bytes)


def _store_descriptors(out: torch.Tensor, plan: Tables, half: list[int], halves: bool, out_tma: bool) -> tuple[object, ...]:
    """Return the descriptors that store whole tiles and halves in `out`, then those for other addresses."""
    whole = [plan.blocks.m, plan.blocks.n]
    if not out_tma:
        return (out,) * 4
    if plan.scattered is None:
        return *_whole_and_half(out, whole, half, halves), out, out
    in_out = _whole_and_half(out[None], [1, *whole], [1, *half], halves)
    scattered = plan.scattered.descriptor(whole)
    return *in_out, scattered, plan.scattered.descriptor(half) if halves else scattered


def _whole_and_half(
    matrix: torch.Tensor, shape: list[int], half: list[int], halves: bool
) -> tuple[TensorDescriptor, TensorDescriptor]:
    whole = TensorDescriptor.from_tensor(matrix, shape)
    return whole, TensorDescriptor.from_tensor(matrix, half) if halves else whole
