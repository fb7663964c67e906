"""The kernels on one GPU, each alone, small: what compute-sanitizer is run over.

compute-sanitizer --tool memcheck python -m pytest tests/gpu/test_kernels_cuda.py -p no:cacheprovider
"""

from __future__ import annotations

import pytest
import torch
from on_gpus import NEEDS_ONE

from weft.core.schedule import Bags, Flag, Gemm, Lookup, Part, Reduce, Region, Sum, Wait

GPU = torch.device("cuda")
pytestmark = NEEDS_ONE
M, N, K = 253, 136, 200


def _operands(transposed: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    a = torch.randn(M, K, device=GPU, dtype=torch.bfloat16)
    b = torch.randn(N, K, device=GPU, dtype=torch.bfloat16).t() if transposed else torch.randn(K, N, device=GPU).bfloat16()
    return a, b, a.double() @ b.double()


def _step(gated: bool, counted: bool, sliced: bool = False) -> Gemm:
    """Three parts; sliced: the second waits for words 3 and 4 between slices of K, the third for word 5."""
    slices: list[tuple[tuple[int, Wait], ...]] = [(), (), ()]
    if sliced:
        slices[1:] = [((64, Wait(Flag("open", 0, 3))), (192, Wait(Flag("open", 0, 4)))), ((128, Wait(Flag("open", 0, 5))),)]
    cuts = [(0, 100), (100, 130), (130, M)]
    parts = [
        Part(
            Region("a", 0, rows, (0, K)),
            Region("out", 0, rows, (0, N)),
            (Wait(Flag("open", 0, i)),) if gated else (),
            Flag("made", 0, i) if counted else None,
            inner=slices[i],
        )
        for i, rows in enumerate(cuts)
    ]
    return Gemm(Region("b", 0, (0, K), (0, N)), tuple(parts))


@pytest.mark.parametrize("shape", range(4))
@pytest.mark.parametrize("kind", ["plain", "gated", "counted", "sliced", "sliced and counted", "stored by address"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("halved", [False, True])
def test_gemm(shape: int, kind: str, transposed: bool, halved: bool) -> None:
    """halved: the last wave is one tile."""
    from weft.kernels.gemm import gemm, tables
    from weft.perf.shapes import SHAPES, tiles_of

    a, b, expected = _operands(transposed)
    step, blocks = _step(kind == "gated", "counted" in kind, "sliced" in kind), SHAPES[shape]
    words, status = torch.ones(64, device=GPU, dtype=torch.int32), torch.zeros(2, device=GPU, dtype=torch.int32)
    out = torch.full((M, N), torch.nan, device=GPU, dtype=torch.bfloat16)
    plan = tables(
        step,
        device=GPU,
        blocks=blocks,
        source=lambda part: int(part.a.rows[0] > 0),
        gate_address=lambda flag: words.data_ptr() + 4 * flag.index,
        count_address=lambda flag: words.data_ptr() + 4 * (32 + flag.index),
        stored_at=(lambda part, row: out[part.out.rows[0] + row :]) if kind == "stored by address" else None,
        need=lambda _: 1,
    )
    tiles = plan.rows.shape[0] * -(-N // blocks.n)
    gemm((a, a.clone()), b, out, plan, status, sms=tiles - 1 if halved else tiles)
    assert status.tolist() == [0, 0]
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=0.3)
    if "counted" in kind:
        assert words[32:35].tolist() == [1 + tiles_of(part, blocks) for part in step.parts]


@pytest.mark.parametrize("sliced", [False, True])
def test_a_gate_that_never_opens_ends_at_its_bound(sliced: bool) -> None:
    """sliced: the gates of parts are open, those between slices are not."""
    from weft.core.schedule import waits
    from weft.kernels.gemm import gemm, tables
    from weft.perf.shapes import SHAPES

    a, b, _ = _operands(False)
    step = _step(True, False, sliced)
    words, status = torch.zeros(64, device=GPU, dtype=torch.int32), torch.zeros(2, device=GPU, dtype=torch.int32)
    words[:3] = int(sliced)
    plan = tables(
        step,
        device=GPU,
        source=lambda part: 0,
        gate_address=lambda flag: words.data_ptr() + 4 * flag.index,
        count_address=lambda flag: 0,
        stored_at=None,
        need=lambda _: 1,
        blocks=SHAPES[0],
    )
    gemm((a,), b, torch.empty(M, N, device=GPU, dtype=torch.bfloat16), plan, status, tries=1000, sms=7)
    gate, seen = status.tolist()
    assert waits(step)[gate - 1].flag.index in ((3, 4, 5) if sliced else (0, 1, 2))
    assert seen == 0


@pytest.mark.parametrize("cols", [136, 77])
def test_reduce(cols: int) -> None:
    from weft.kernels.sums import region_table, sum_regions

    srcs = torch.randn(3 * M, cols, device=GPU, dtype=torch.bfloat16)
    out = torch.empty(M, cols, device=GPU, dtype=torch.bfloat16)
    regions = tuple(Region("recv", 0, (i * M, (i + 1) * M), (0, cols)) for i in range(3))
    plan = region_table(
        Reduce((Sum(regions, Region("out", 0, (0, M), (0, cols))),), divide_by=3),
        address=lambda region: srcs[region.rows[0] :].data_ptr(),
        stride=cols,
        dtype=srcs.dtype,
        device=GPU,
    )
    sum_regions(plan, out, sms=4)
    torch.testing.assert_close(out, (srcs.float().view(3, M, cols).sum(0) / 3).bfloat16(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("cols", [4096, 77])
def test_push(cols: int) -> None:
    from weft.kernels.push import push, push_tables, tiles_of_copy

    src, dst = torch.randn(M, cols, device=GPU).bfloat16(), torch.zeros(2 * M, cols, device=GPU, dtype=torch.bfloat16)
    words = torch.zeros(2, device=GPU, dtype=torch.int32)
    copies = [
        (Region("a", 0, (0, M), (0, cols)), Region("r", i, (i * M, (i + 1) * M), (0, cols)), Flag("f", i)) for i in (0, 1)
    ]
    plan = push_tables(
        copies,
        device=GPU,
        itemsize=2,
        address=lambda region: 0 if region.buffer == "a" else dst[region.rows[0] :].data_ptr(),
        stride=lambda region: 2 * cols,
        count_address=lambda flag: words.data_ptr() + 4 * flag.rank,
    )
    push(plan, sms=5, src_base=src.data_ptr())
    assert torch.equal(dst.view(2, M, cols)[0], src)
    assert torch.equal(dst.view(2, M, cols)[1], src)
    assert words.tolist() == [tiles_of_copy(copies[0][0], itemsize=2, device=GPU)] * 2


def test_words() -> None:
    from weft.kernels.flag_operations import Phase, make_flag_table, run_flag_operations

    words = torch.tensor([5, 0, 0, 0, 0, 9], device=GPU, dtype=torch.int32)
    at = [words.data_ptr() + 4 * i for i in range(6)]
    first = Phase(progress=[(at[4], 3)], waits=[(at[0], 5)], lowers=[(at[0], 0)], signals=[(at[1], 7), (at[2], 8)])
    never = Phase(waits=[(at[1], 7), (at[3], 1)], lowers=[(at[5], 0)])  # it gives up, and goes on
    run_flag_operations(make_flag_table([first, never], GPU), tries=1000)
    assert words.tolist() == [0, 7, 8, 0, 3, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mean", [False, True])
def test_lookup_and_its_backward(dtype: torch.dtype, mean: bool) -> None:
    """Odd and wide columns, bags of none and of many, indices that no table has; then the rows' gradients."""
    from weft.kernels.lookup import OutputPlace, lookup, lookup_tables
    from weft.kernels.tables import locate_indices, sort_indices
    from weft.kernels.update import update, weight_gradients

    torch.manual_seed(0)
    dims, batch, rows = (92, 7, 1500), 37, (50, 3, 400)
    tables = [torch.randn(r, d, device=GPU, dtype=dtype) for r, d in zip(rows, dims, strict=True)]
    lengths = torch.randint(0, 30, (3 * batch,), device=GPU)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    held = [int(part.sum()) for part in lengths.split(batch)]
    drawn = [torch.randint(-1, r + 1, (count,), device=GPU) for r, count in zip(rows, held, strict=True)]
    indices = torch.cat(drawn)
    columns = [(0, 92), (92, 99), (99, 1599)]
    out = torch.full((batch, 1599), torch.nan, device=GPU, dtype=dtype)
    words = torch.zeros(1, device=GPU, dtype=torch.int32)
    whole = Region("bags", 0, (0, batch), (0, 1599))
    plan = lookup_tables(
        Lookup((Bags(whole, whole, Flag("made", 0)),)),
        tables,
        columns=columns,
        batch=batch,
        device=GPU,
        target=lambda _: OutputPlace(0, out.stride(0) * out.element_size(), True),
        count_address=lambda _: words.data_ptr(),
    )
    lookup(plan, indices, offsets, None, mean=mean, dtype=dtype, out=out, sms=7)
    assert int(words) == plan.tiles
    places = locate_indices(indices, offsets, None, rows, mean=mean)
    grad = torch.randn(batch, 1599, device=GPU, dtype=dtype)
    found = sort_indices(indices, places, rows, batch)
    base = torch.zeros(16 * 1024 * 1024, device=GPU, dtype=torch.uint8).view(dtype)
    sizes = [-(-t.numel() // 8) * 8 for t in tables]
    grads = [part[: t.numel()].view(t.shape) for part, t in zip(base[: sum(sizes)].split(sizes), tables, strict=True)]
    update("gradient", grad, found, grads, base=base, sms=7)
    factors = weight_gradients(grad, indices, places, tables, sms=7)
    assert bool((factors[~places.counts] == 0).all())
    for at, (table, (low, high)) in enumerate(zip(tables, columns, strict=True)):
        own = places.counts & (places.bag // batch == at)
        sample, row = places.bag[own] % batch, indices[own]
        weight = places.factor[own].double()[:, None]
        pooled = torch.zeros(batch, high - low, device=GPU, dtype=torch.float64).index_add_(
            0, sample, table[row].double() * weight
        )
        added = grad[sample, low:high].double() * weight
        reduced = torch.zeros(table.shape, device=GPU, dtype=torch.float64).index_add_(0, row, added)
        # A row's sum in float32 errs by as much as its terms are large, not by as much as it is.
        terms = torch.zeros(table.shape, device=GPU, dtype=torch.float64).index_add_(0, row, added.abs()).max()
        for mine, wanted, size in ((out[:, low:high], pooled, pooled.abs().max()), (grads[at], reduced, terms)):
            rounding = 2 * wanted.abs().max() * torch.finfo(dtype).eps + 8 * size * torch.finfo(torch.float32).eps
            assert (mine.double() - wanted).abs().max() <= rounding + 1e-5
        product = (grad[sample, low:high].double() * table[row].double()).sum(1)
        torch.testing.assert_close(factors[own].double(), product, atol=1e-3, rtol=1e-4)
