"""Tiles that count and are stored at other addresses: one descriptor where TMA allows it, and signals after the stores."""

from __future__ import annotations

import re

import pytest
import torch
from compiled import for_a_gpu
from devices import BLOCK_OF_H200
from rank_pools import on_ranks

from weft.core.machine import load
from weft.core.problem import Problem
from weft.core.schedule import Flag, Gemm, Part, Region
from weft.schedules import build

pytest.importorskip("triton", reason="Triton is not installed")
from weft.kernels.gemm import blocks_for, index_tiles
from weft.perf.shapes import SHAPES


def test_slots_are_where_the_tiles_are() -> None:
    room = torch.arange(96 * 64, dtype=torch.float16).view(96, 64)
    tiles = [room[64:], room[16:], room[48:], room[16:]]
    scattered, slots = index_tiles(tiles)
    assert scattered is not None
    assert (scattered.pitch, scattered.slots, slots) == (16 * 64, 4, [3, 0, 2, 0])
    for tile, slot in zip(tiles, slots, strict=True):
        assert scattered.base.data_ptr() + 2 * scattered.pitch * slot == tile.data_ptr()
    descriptor = scattered.descriptor([16, 32])
    assert (descriptor.shape, descriptor.strides, descriptor.block_shape) == ([4, 16, 64], [1024, 64, 1], [1, 16, 32])


def test_one_tile_and_none() -> None:
    one = torch.zeros(8, 16, dtype=torch.float16)
    assert index_tiles([]) == (None, [])
    scattered, slots = index_tiles([one])
    assert scattered is not None
    assert (scattered.slots, slots) == (1, [0])


def test_what_one_descriptor_cannot_have() -> None:
    """An odd base, rows of no multiple of 16 bytes, and tiles between the rows of others."""
    flat = torch.zeros(4096, dtype=torch.float16)
    odd = flat[1 : 1 + 1024].view(32, 32)
    narrow = flat[:480].view(32, 15)
    unaligned = flat[: 32 * 32].view(32, 32), flat[16 : 16 + 32 * 32].view(32, 32)
    for tiles in ([odd], [narrow], list(unaligned)):
        assert index_tiles(tiles) == (None, [-1] * len(tiles))


@on_ranks(1, interpreted=True)
@pytest.mark.parametrize("added", [False, True])
def test_tiles_are_stored_where_they_belong_and_counted_once(added: bool) -> None:
    """Two parts in a buffer each and one in `out`, with short tiles; blocks of several tiles, halves at the end.

    added: another product, of a greater depth, is added.
    """
    from weft.kernels import gemm as kernel
    from weft.kernels.gemm import INTERPRETED
    from weft.perf.shapes import tiles_of

    torch.manual_seed(0)
    a, b = torch.randn(150, 40).half(), torch.randn(40, 72).half()
    more = (torch.randn(150, 104).half(), torch.randn(104, 72).half()) if added else None
    product = a.float() @ b.float() + (more[0].float() @ more[1].float() if more else 0.0)
    out, room = torch.zeros(50, 72).half(), torch.zeros(150, 72).half()
    buffers = {"x": room[90:140], "y": room[:80]}
    rows = {"x": (0, 50), "y": (50, 120), "out": (120, 150)}
    parts = tuple(
        Part(Region("a", 0, (low, high), (0, 40)), Region(name, 0, (0, high - low), (0, 72)), count=Flag(name, 0))
        for name, (low, high) in rows.items()
    )
    words = {name: torch.zeros(1, dtype=torch.int32) for name in rows}
    status = torch.zeros(2, dtype=torch.int32)
    step = Gemm(Region("b", 0, (0, 40), (0, 72)), parts)
    plan = kernel.tables(
        step,
        device=torch.device("cpu"),
        source=lambda part: 0,
        gate_address=lambda flag: 0,
        count_address=lambda flag: words[flag.name].data_ptr(),
        stored_at=lambda part, row: buffers[part.out.buffer][row:] if part.out.buffer in buffers else None,
        need=lambda _: 0,
        blocks=INTERPRETED,
    )
    assert plan.scattered is not None
    for calls in (1, 2):
        for tensor in (out, room):
            tensor.fill_(7)
        kernel.gemm((a,), b, out, plan, status, sms=4, added=more)
        for part, name in zip(parts, rows, strict=True):
            low, high = rows[name]
            found = {**buffers, "out": out}[name]
            torch.testing.assert_close(found[: high - low].float(), product[low:high], rtol=2e-3, atol=2e-2)
            assert bool((found[high - low :] == 7).all()), f"rows below the tiles of {name} are not theirs"
            assert int(words[name]) == calls * tiles_of(part, INTERPRETED)
        assert bool((room[80:90] == 7).all()), "the memory between slots was written"


@pytest.mark.usefixtures("on_an_h200")
@pytest.mark.parametrize(
    ("world_size", "name", "shape"),
    [(4, "direct_store", (128, 128)), (4, "track_and_trigger", (128, 256)), (2, "direct_store", (128, 256))],
)
def test_tiles_that_go_to_peers_leave_while_others_are_multiplied(world_size: int, name: str, shape: tuple[int, int]) -> None:
    """512 rows: one wave of 128 x 256 tiles sends nothing before all of it ends. On 2 x H200 it was the best all the same."""
    problem = Problem(op="matmul_reduce_scatter", m=512, n=8192, k=28672, world_size=world_size)
    step = next(step for _, _, _, step in build(problem, name, 1) if isinstance(step, Gemm))
    blocks = blocks_for(step, torch.device("cuda"), load("h200x8"))
    assert (blocks.m, blocks.n) == shape


def _gemm(shape: int, *, addressed: bool, tma: bool = True) -> tuple[str, int]:
    """PTX, and bytes of shared memory, of the kernel whose tiles count, and add what arrived, for an H100. Needs no GPU."""
    from kernel_examples import gemm_example, gemm_variant

    blocks = SHAPES[shape]
    variant = gemm_example(blocks, BLOCK_OF_H200, out_tma=tma).constants["V"]
    one = gemm_variant(blocks, variant._replace(TWO_SOURCES=False, ADDRESSED=addressed, DIVIDE_BY=1))
    made = for_a_gpu(one.kernel, one.constants, one.types, multiples=one.multiples, warps=one.warps, stages=one.stages)
    return str(made.asm["ptx"]), int(made.metadata.shared)


@pytest.mark.parametrize(("shape", "addressed", "tma"), [(0, True, True), (1, True, True), (2, False, True), (1, True, False)])
def test_what_gpus_run(shape: int, addressed: bool, tma: bool) -> None:
    """Loads of the next product are hoisted over the signal of a tile, which is released at system scope after its stores."""
    text, shared = _gemm(shape, addressed=addressed, tma=tma)
    loops = 2 if SHAPES[shape].halves else 1
    assert shared <= 227 << 10
    # Of what a gate guards, TMA loads nothing before it is acquired for it, too.
    acquired, fenced = text.index("sys.acquire"), text.index("fence.proxy.async.global")
    assert acquired < fenced < text.index("cp.async.bulk.tensor.2d.shared")
    # Within the loop over K one group of products may still run, behind it none.
    assert re.findall(r"wgmma\.wait_group\.sync\.aligned (\d)", text) == ["1", "0"] * loops
    stores = re.findall(r"cp\.async\.bulk\.tensor\.(\dd)\.global", text)
    assert stores == ([f"{2 + addressed}d"] * loops if tma else [])
    before_releases = [text[: release.start()] for release in re.finditer(r"sys\.release\.add", text)]
    assert len(before_releases) == (4 if loops == 2 else 2)
    for before in before_releases:
        settled = before.rindex("cp.async.bulk.wait_group 0; bar.sync 0;")
        assert "cp.async.bulk.tensor" not in before[settled:], "nothing is stored between what is waited for and the release"
    assert "st.global.b16" not in text
