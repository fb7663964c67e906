"""The GEMM kernel with FP8 operands and their scales: interpreted, against products in float64; and what GPUs run."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import BLOCK_OF_H200
from rank_pools import on_ranks

from weft.core.hardware import Capabilities
from weft.core.machine import load
from weft.core.problem import FLOAT8, RECIPES, SCALE_BLOCK, Problem, Recipe, Scaling
from weft.core.schedule import Flag, Gemm, Part, Region, Wait
from weft.schedules import build

pytest.importorskip("triton", reason="Triton is not installed")
from weft.kernels.gemm import blocks_for, fits
from weft.perf.shapes import FP8_SHAPES, PROMOTED_SHAPES, shapes_for

E4M3, E5M2 = (getattr(torch, name) for name in FLOAT8)


def columns_together(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """b of FP8: each column is contiguous."""
    return torch.randn(cols, rows).to(dtype).t()


def strided(matrix: torch.Tensor) -> torch.Tensor:
    """The same numbers, no two of which are neighbours in memory."""
    rows, cols = matrix.shape
    found = torch.full((cols, 3 * rows + 1), torch.nan)[:, 1::3].t()
    found.copy_(matrix)
    assert found.stride() == (3, 3 * rows + 1)
    return found


@dataclass
class Operands:
    """a of two sources with rows of each, and b, with scales that differ from row to row and block to block."""

    recipe: Recipe
    rows: tuple[int, int]
    n: int
    k: int
    a: torch.dtype = E4M3
    b: torch.dtype = E4M3
    sources: tuple[torch.Tensor, ...] = field(init=False)
    matrix: torch.Tensor = field(init=False)
    scale_a: tuple[torch.Tensor, ...] = field(init=False)
    scale_b: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        scaling = Scaling(recipe=self.recipe)
        self.sources = tuple(torch.randn(rows, self.k).to(self.a) for rows in self.rows)
        self.matrix = columns_together(self.k, self.n, self.b)
        self.scale_a = tuple(strided(0.25 + torch.rand(scaling.scales_shape("a", rows, self.k))) for rows in self.rows)
        self.scale_b = strided(0.25 + torch.rand(scaling.scales_shape("b", self.k, self.n)))

    def products(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For all rows of both sources, one below the other: the product in float64, and what its terms add up to without
        their signs."""
        wide = (self.recipe == "blockwise") * (SCALE_BLOCK - 1) + 1
        scale_b = self.scale_b.repeat_interleave(wide, 0).repeat_interleave(wide, 1)
        b = self.matrix.double() * scale_b[: self.k, : self.n].double()
        a = [
            a.double() * scale.repeat_interleave(wide, 1)[:, : self.k].double()
            for a, scale in zip(self.sources, self.scale_a, strict=True)
        ]
        return torch.cat(a) @ b, torch.cat(a).abs() @ b.abs()


def close(found: torch.Tensor, expected: torch.Tensor, size: torch.Tensor) -> None:
    """Equal up to what sums in float32 round, and the result once. size: what the terms add up to without their signs."""
    bound = 2e-6 * size + torch.finfo(found.dtype).eps * expected.abs() + 1e-30
    wrong = (found.double() - expected).abs() > bound
    assert not bool(wrong.any()), f"{int(wrong.sum())} of {wrong.numel()} elements are off, the first at {wrong.nonzero()[0]}"


def part(source: str, rows: tuple[int, int], k: int, n: int, out: int, **more: Any) -> Part:
    """Rows of a source, whose results begin at row `out` of the result."""
    return Part(Region(source, 0, rows, (0, k)), Region("out", 0, (out, out + rows[1] - rows[0]), (0, n)), **more)


def launch(
    given: Operands,
    parts: Sequence[Part],
    out: torch.Tensor,
    *,
    words: torch.Tensor | None = None,
    stored_at: Callable[[Part, int], torch.Tensor | None] | None = None,
    divide_by: int = 1,
    **options: Any,
) -> tuple[list[int], Any]:
    """Run the kernel, interpreted. words: of flags, by index. Returns its status, and the tiles' shape."""
    from weft.kernels import gemm as kernel
    from weft.kernels.gemm import INTERPRETED_FP8

    flags = torch.zeros(64, dtype=torch.int32) if words is None else words
    plan = kernel.tables(
        Gemm(Region("b", 0, (0, given.k), (0, given.n)), tuple(parts), divide_by=divide_by),
        device=torch.device("cpu"),
        source=lambda part: int(part.a.buffer == "gathered"),
        gate_address=lambda flag: flags.data_ptr() + 4 * flag.index,
        count_address=lambda flag: flags.data_ptr() + 4 * flag.index,
        stored_at=stored_at,
        need=lambda _: 1,
        blocks=INTERPRETED_FP8,
    )
    status = torch.zeros(2, dtype=torch.int32)
    scales = given.scale_a, given.scale_b, given.recipe
    assert all(fits(a, given.matrix) for a in given.sources)
    kernel.gemm(given.sources, given.matrix, out, plan, status, scales=scales, **{"sms": 3, **options})
    return status.tolist(), INTERPRETED_FP8


def both_sources(given: Operands) -> list[Part]:
    """All rows: of the second source, which come first in the result, then of the first one, cut within a tile."""
    (first, second), k, n = given.rows, given.k, given.n
    return [
        part("gathered", (0, second), k, n, 0),
        part("a", (0, 9), k, n, second),
        part("a", (9, first), k, n, second + 9),
    ]


def in_order_of_parts(given: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(t.roll(given.rows[1], 0) for t in given.products())  # type: ignore[return-value]


@on_ranks(1, interpreted=True)
def test_products_of_every_recipe() -> None:
    """Short tiles at the end of rows and columns, and of K where the recipe allows that; an odd number of steps over K."""
    for recipe in RECIPES:
        k = 3 * SCALE_BLOCK if recipe == "blockwise" else 2 * SCALE_BLOCK + 16
        for a, b in ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)):
            given = Operands(recipe, (50, 37), 144, k, a, b)
            out = torch.full((87, 144), torch.nan, dtype=torch.float32)
            launch(given, both_sources(given), out)
            close(out, *in_order_of_parts(given))
        for dtype, fast in ((torch.float16, False), (torch.float32, True)):
            out = torch.full((87, 144), torch.nan, dtype=dtype)
            launch(given, both_sources(given), out, use_fast_accum=fast)
            close(out, *in_order_of_parts(given))


@on_ranks(1, interpreted=True)
def test_tiles_that_wait_and_count() -> None:
    """Gates and slices of K, the last of which begins at the step that publishes the tile before, behind one of an odd number
    of steps; counts; halves at the end; and the same without flags."""
    from weft.perf.shapes import tiles_of, whole_tiles

    for recipe in RECIPES:
        given = Operands(recipe, (40, 64), 80, 5 * SCALE_BLOCK)
        slices = tuple((step * SCALE_BLOCK, Wait(Flag("arrived", 0, step))) for step in (1, 4))
        first, *others = both_sources(given)
        sliced = part("gathered", (0, 64), given.k, given.n, 0, gates=(Wait(Flag("arrived", 0, 2)),), inner=slices)
        parts = [
            Part(one.a, one.out, one.gates, Flag("made", 0, 8 + at), inner=one.inner)
            for at, one in enumerate((sliced, *others))
        ]
        assert first.a == sliced.a
        for silent in (False, True):
            words = torch.zeros(64, dtype=torch.int32)
            words[1:5] = not silent
            out = torch.full((104, 80), torch.nan)
            status, blocks = launch(given, parts, out, words=words, silent=silent, sms=5)
            tiles = sum(tiles_of(one, blocks) for one in parts) // 2
            assert whole_tiles(tiles, 5, blocks) < tiles, "no tile is cut in two"
            assert status == [0, 0]
            close(out, *in_order_of_parts(given))
            assert words[8:11].tolist() == [(not silent) * tiles_of(one, blocks) for one in parts]


@on_ranks(1, interpreted=True)
def test_a_slice_that_never_arrives_is_reported() -> None:
    given = Operands("blockwise", (32, 16), 48, 2 * SCALE_BLOCK)
    inner = ((SCALE_BLOCK, Wait(Flag("arrived", 0, 1))),)
    out = torch.zeros(16, 48)
    only = part("gathered", (0, 16), given.k, 48, 0, inner=inner)
    status, _ = launch(given, [only], out, words=torch.zeros(64, dtype=torch.int32), tries=3)
    assert status == [1, 0]


@on_ranks(1, interpreted=True)
def test_tiles_that_are_stored_elsewhere_or_add() -> None:
    """The second source's rows are stored in a buffer of their own; those of the first add sources to their scaled sums."""
    for recipe in RECIPES:
        for dtype in (torch.float16, torch.float32):
            given = Operands(recipe, (48, 40), 96, 3 * SCALE_BLOCK)
            room, out = torch.full((60, 96), 7, dtype=dtype), torch.full((48, 96), 7, dtype=dtype)
            received = torch.randn(2 * 48, 96).to(dtype)
            adds = tuple(Region("received", 0, (at, at + 48), (0, 96)) for at in (0, 48))
            parts = [
                part("gathered", (0, 40), given.k, 96, 0),
                Part(Region("a", 0, (0, 48), (0, given.k)), Region("out", 0, (0, 48), (0, 96)), adds=adds),
            ]
            launch(
                given,
                parts,
                out,
                adds=received,
                divide_by=2,
                stored_at=lambda part, row, room=room: room[10 + row :] if part.a.buffer == "gathered" else None,
            )
            product, size = given.products()
            added = received.double().view(2, 48, 96).sum(0)
            close(out, (product[:48] + added) / 2, size[:48] + received.double().abs().view(2, 48, 96).sum(0))
            close(room[10:50], product[48:], size[48:])
            assert bool((torch.cat([room[:10], room[50:]]) == 7).all()), "nothing is stored above or below"


@on_ranks(1, interpreted=True)
def test_every_number_is_multiplied() -> None:
    """Times 1, each of the 256 numbers of a dtype is itself."""
    for a, b in ((E4M3, E4M3), (E5M2, E4M3)):
        given = Operands("rowwise", (256, 1), 16, SCALE_BLOCK, a, b)
        given.sources[0].zero_()
        given.sources[0].view(torch.uint8)[:, 5] = torch.arange(256, dtype=torch.uint8)
        given.matrix.zero_()
        given.matrix[5] = 1.0
        given.scale_a[0].fill_(1)
        given.scale_b.fill_(1)
        out = torch.zeros(256, 16)
        launch(given, [part("a", (0, 256), SCALE_BLOCK, 16, 0)], out)
        assert torch.equal(out[:, 3].nan_to_num(-1), given.sources[0][:, 5].float().nan_to_num(-1))


@on_ranks(1, interpreted=True)
def test_numbers_that_are_none_and_extreme_ones() -> None:
    """NaN, infinity, the largest and the smallest numbers, and scales of 0 and infinity reach the elements that they are a
    factor of, and no others."""
    for recipe in RECIPES:
        given = Operands(recipe, (32, 32), 64, 3 * SCALE_BLOCK, E5M2, E4M3)
        a, b = given.sources[0], given.matrix
        a.view(torch.uint8)[3, 7] = 0x7C  # infinity
        a.view(torch.uint8)[4, 300] = 0x7F  # NaN
        a[5], b[:, 9] = 57344.0, 448.0
        a.view(torch.uint8)[6] = 1  # 2**-16
        b.t().view(torch.uint8)[11] = 1  # 2**-9
        b.t().view(torch.uint8)[13, 200] = 0xFF  # NaN
        if recipe != "tensorwise":
            given.scale_a[0][8:10] = torch.tensor([[0.0], [torch.inf]])
            given.scale_a[0][10:12] = torch.tensor([[torch.nan], [2.0**60]])
        out = torch.zeros(64, 64)
        launch(given, both_sources(given), out)
        expected, size = in_order_of_parts(given)
        finite = expected.isfinite()
        assert bool((out.isfinite() == finite).all())
        out[32 + 9] = expected[32 + 9] = 0  # of infinity times what may be 0
        assert torch.equal(out.isnan(), expected.isnan())
        finite[32 + 9] = False
        close(out[finite], expected[finite], size[finite])
        assert out[32 + 5, 9] > 57344 * 448
        assert 0 < out[32 + 6, 11] < 1e-3


def test_what_the_kernel_loads() -> None:
    a, b = torch.zeros(32, 64).to(E4M3), torch.zeros(48, 64).to(E5M2).t()
    assert fits(a, b)
    assert not fits(a, b.contiguous()), "rows of b are contiguous"
    assert not any(fits(*pair) for pair in ((a, b.half()), (a.half(), b))), "one operand alone is FP8"
    assert not fits(a.view(torch.uint8), b.view(torch.uint8)), "bytes are no numbers"
    odd = torch.zeros(48, 72).to(E4M3).t()[:64]
    assert not any(fits(*pair) for pair in ((a[:, 1:33], b), (a, odd))), "rows begin at odd places"
    assert all(fits(a.half(), other) for other in (b.half(), b.half().contiguous()))


def test_shapes_of_fp8() -> None:
    """Larger tiles where tensor cores add up alone; none where matrix units do not take FP8."""
    step = next(
        step
        for _, _, _, step in build(Problem(op="all_gather_matmul", m=8192, n=28672, k=8192, world_size=8), "flag_gated", 1)
        if isinstance(step, Gemm)
    )
    machine, old = load("h200x8"), Capabilities(sms=108, shared_bytes=163 << 10, tma=False)
    for recipe in RECIPES:
        for fast in (False, True):
            scaling = Scaling(recipe=recipe, use_fast_accum=fast)
            found = shapes_for(BLOCK_OF_H200, scaling)
            assert found == (FP8_SHAPES if fast and recipe != "blockwise" else PROMOTED_SHAPES)
            assert all(blocks.shared_bytes(blocks.stages, tma=True) <= BLOCK_OF_H200.shared_bytes for blocks in found)
            assert all(SCALE_BLOCK % blocks.n == 0 for blocks in found) or recipe != "blockwise"
            assert shapes_for(old, scaling) == ()
            exact = shapes_for(dataclasses.replace(BLOCK_OF_H200, exact_fp8=True), scaling)
            assert not any(blocks.pairs for blocks in exact)
            assert exact == FP8_SHAPES or recipe == "blockwise"
            interpreted = blocks_for(step, torch.device("cpu"), machine, scaling)
            assert (interpreted.k, interpreted.itemsize) == (SCALE_BLOCK, 1)


@pytest.mark.usefixtures("on_an_h200")
def test_the_shape_of_a_large_step() -> None:
    step = next(
        step
        for _, _, _, step in build(Problem(op="all_gather_matmul", m=8192, n=28672, k=8192, world_size=8), "flag_gated", 1)
        if isinstance(step, Gemm)
    )
    for fast, shape in ((True, (128, 256)), (False, (128, 128))):
        blocks = blocks_for(step, torch.device("cuda"), load("h200x8"), Scaling(use_fast_accum=fast))
        assert (blocks.m, blocks.n) == shape


def assembled(text: str, folder: Path) -> str:
    """What NVIDIA's assembler says of PTX: registers that it has stored to memory, and what makes products slow."""
    from triton.backends.nvidia.compiler import get_ptxas

    source = folder / "kernel.ptx"
    source.write_text(text)
    command = [get_ptxas(90).path, "--verbose", "--gpu-name=sm_90a", "--output-file", str(folder / "kernel.cubin"), str(source)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr


@pytest.mark.parametrize(
    ("scaling", "shape"),
    [
        (Scaling(use_fast_accum=True), 0),
        (Scaling(recipe="tensorwise", a="float8_e5m2", use_fast_accum=True), 1),
        (Scaling(b="float8_e5m2"), 0),
        (Scaling(recipe="blockwise"), 0),
        (Scaling(recipe="blockwise"), 1),
    ],
    ids=str,
)
def test_what_hopper_runs(scaling: Scaling, shape: int, tmp_path: Path) -> None:
    """Products of FP8, of operands that TMA loads; one of them is in flight while others are added, or the next one issued."""
    from compiled import for_a_gpu
    from kernel_examples import scaled_example

    blocks = shapes_for(BLOCK_OF_H200, scaling)[shape]
    one = scaled_example(blocks, BLOCK_OF_H200, scaling, plain=True)
    made = for_a_gpu(one.kernel, one.constants, one.types, multiples=one.multiples, warps=one.warps, stages=one.stages)
    text = made.asm["ptx"]
    assert made.metadata.shared <= BLOCK_OF_H200.shared_bytes
    kinds = "".join(f".{name.split('_')[1].removesuffix('fn')}" for name in (scaling.a, scaling.b))
    products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k32\.f32(\.e\dm\d\.e\dm\d)", text)
    assert products == [(str(blocks.n), kinds)] * 4 * (1 + blocks.pairs)
    assert "cp.async.bulk.tensor.2d.shared" in text
    # Of a pair the first product is waited for; the other one is before the next pair's is used, and behind the loop.
    waits = re.findall(r"wgmma\.wait_group\.sync\.aligned (\d)", text)
    assert waits == (["0", "0"] if blocks.pairs else ["1", "0"])
    if blocks.pairs:
        first, second = (found.start() for found in re.finditer(r"wgmma\.commit_group", text))
        assert first < text.index("wgmma.wait_group") < second
        assert text.rindex(
            "fma.rn.f32" if scaling.recipe == "blockwise" else "add.f32", second, text.rindex("wgmma.wait_group")
        )
    said = assembled(text, tmp_path)
    assert "serialized" not in said, "each instruction of a product is waited for"
    assert "0 bytes spill stores" in said
    assert "st.global.b16" not in text


def test_gpus_without_matrix_units_for_fp8_are_refused() -> None:
    """An A100 multiplies no float8_e4m3fn, so that no shape is offered to one."""
    from compiled import for_a_gpu
    from kernel_examples import scaled_example
    from kernel_targets import TARGETS

    old = Capabilities(sms=108, shared_bytes=163 << 10, tma=False)
    one = scaled_example(FP8_SHAPES[-1], old, Scaling(use_fast_accum=True), plain=True)
    options = {"multiples": one.multiples, "warps": one.warps, "stages": one.stages}
    with pytest.raises(Exception, match="fp8e4nv"):
        for_a_gpu(one.kernel, one.constants, one.types, target=TARGETS["sm_80"], **options)
