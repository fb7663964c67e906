"""matmul_all_reduce's kernel, interpreted with the tiles that GPUs take; and what a call that gave up leaves behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pools import Pool, interpreting
from rank_work import bound, whole

from weft.comm.symmetric_heap import heap_of
from weft.core.problem import SCALE_BLOCK, Problem, Scaling, split
from weft.core.schedule import MAILBOX_COPIES
from weft.runtime.ranks import Ranks

Tile = tuple[int, int, int]
CASES = [
    (2, 1, False, (16, 128, 128), 1),
    (2, 50, True, (64, 128, 64), 8),
    pytest.param(2, 128, False, (128, 128, 64), 8, marks=pytest.mark.slow),
    (2, 130, False, (128, 64, 128), 3),
    pytest.param(4, 128, False, (128, 128, 64), 1, marks=pytest.mark.slow),
]
"""Ranks, M, whether in one hop, tile (rows, columns, step along K), blocks: fewer than tiles, and more."""
N, K_EACH = 244, 150
"""No multiples of a tile, nor of a step."""
SHARED_BYTES = 227 << 10
"""What a block of an H100 or H200 may have."""
PATIENT, HASTY = 20_000, 2
"""Looks."""


@pytest.fixture
def interpreted() -> Callable[[int], Pool]:
    return interpreting


def _layout(m: int, one_hop: bool, tile: Tile, blocks: int) -> Any:
    """A plan of this rank with tiles of our choice."""
    from weft.kernels.all_reduce import Tiling, plan

    size = dist.get_world_size()
    problem = Problem(op="matmul_all_reduce", m=m, n=N, k=K_EACH * size, world_size=size, dtype="float16")
    options: dict[str, Any] = {
        "hops": "one" if one_hop else "two",
        "multiply": True,
        "device": torch.device("cpu"),
        "sms": blocks,
    }
    layout = plan(problem, dist.get_rank(), split(N, size), **options)
    rows, cols, step = tile
    return dataclasses.replace(layout, tiling=Tiling(m=rows, n=cols, k=step, warps=4, stages=1))


@contextmanager
def _memory(layout: Any) -> Iterator[Any]:
    """Mailboxes for the bare kernel: no program holds a rank back, or raises what its status says."""
    from weft.comm.rank_group import RankGroup
    from weft.kernels.all_reduce import mailbox

    rank_group = RankGroup(dist.group.WORLD)  # type: ignore[arg-type]
    piece = heap_of(rank_group, torch.device("cpu")).allocate(MAILBOX_COPIES * layout.copy_bytes)
    try:
        yield mailbox(piece.addresses, layout.copy_bytes, layout.blocks, torch.device("cpu"))
    finally:
        dist.barrier()
        rank_group.close()


def _call(layout: Any, memory: Any, seed: int, tries: int = PATIENT) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel leaves, and where it is wrong."""
    from weft.kernels.all_reduce import all_reduce

    p = layout.problem
    a, b, expected = whole(p.m, p.n, p.k, torch.float16, seed)
    mine = slice(K_EACH * layout.rank, K_EACH * (layout.rank + 1))
    out = torch.empty(p.m, p.n, dtype=torch.float16)
    rest: dict[str, Any] = {"partial": None, "bias": None, "residual": None, "live": True, "tries": tries}
    all_reduce(layout, memory, out, factors=(a[:, mine].contiguous(), b[mine]), **rest)
    near = (out.double() - expected).abs() <= bound(torch.float16, p.k, 2 * p.world_size, expected)
    return out, ~near


def _calls(m: int, one_hop: bool, tile: Tile, blocks: int) -> None:
    """Until a copy of a region is filled again."""
    layout = _layout(m, one_hop, tile, blocks)
    with _memory(layout) as memory:
        for call in range(4):
            _, wrong = _call(layout, memory, call)
            assert not wrong.any(), (call, int(wrong.sum()))
            assert memory.status.tolist() == [0, 0]


@pytest.mark.ranks
@pytest.mark.parametrize(("size", "m", "one_hop", "tile", "blocks"), CASES)
def test_tiles_of_gpus(interpreted: Callable[[int], Ranks], size: int, m: int, one_hop: bool, tile: Tile, blocks: int) -> None:
    interpreted(size).run(_calls, m, one_hop, tile, blocks)


def _rehearsed(one_hop: bool) -> None:
    """In place, as a call of weft.collectives may be: a rehearsal must leave what it reads."""
    from weft.kernels.all_reduce import all_reduce

    layout = dataclasses.replace(_layout(5, one_hop, (16, 64, 128), 2), multiply=False)
    drawn = [torch.randn(5, N, generator=torch.Generator().manual_seed(rank)).half() for rank in range(dist.get_world_size())]
    here = drawn[dist.get_rank()].clone()
    rest: dict[str, Any] = {"factors": None, "bias": None, "residual": None, "tries": PATIENT}
    with _memory(layout) as memory:
        all_reduce(layout, memory, here, partial=here, live=False, **rest)
        assert torch.equal(here, drawn[dist.get_rank()])
        all_reduce(layout, memory, here, partial=here, live=True, **rest)
    assert torch.equal(here, sum(one.float() for one in drawn).half())  # type: ignore[union-attr]


@pytest.mark.ranks
@pytest.mark.parametrize("one_hop", [True, False])
def test_a_rehearsal_leaves_what_is_summed_in_place(interpreted: Callable[[int], Ranks], one_hop: bool) -> None:
    interpreted(2).run(_rehearsed, one_hop)


def _ahead(one_hop: bool) -> None:
    """Rank 1 gives up before the others begin, as when they still compile: no half of a sum is left anywhere."""
    layout = _layout(3, one_hop, (16, 64, 128), 2)
    rank, owned = dist.get_rank(), slice(*split(N, dist.get_world_size())[1])
    with _memory(layout) as memory:
        for turn in (True, False):
            if turn == (rank == 1):
                out, wrong = _call(layout, memory, 0, HASTY if rank == 1 else PATIENT)
            dist.barrier()
        assert torch.equal(wrong, out.isnan()), "wrong values that are numbers"
        hit = torch.zeros_like(wrong)
        if not one_hop:
            hit[:, owned] = True
        assert torch.equal(wrong, hit | (rank == 1))
        assert memory.status.tolist()[1] == (rank == 1)
        _, wrong = _call(layout, memory, 1)
        assert not wrong.any(), "the next call is right"


@pytest.mark.ranks
@pytest.mark.parametrize(("size", "one_hop"), [(2, True), (2, False), (4, False)])
def test_a_call_that_gave_up_leaves_no_number(interpreted: Callable[[int], Ranks], size: int, one_hop: bool) -> None:
    interpreted(size).run(_ahead, one_hop)


@pytest.mark.usefixtures("on_an_h200")
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 128, 2048])
@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize(
    ("dtype", "scaling"),
    [("bfloat16", None), ("float32", None), ("bfloat16", Scaling()), ("float32", Scaling(recipe="blockwise"))],
)
def test_tiles_under_way_fit_shared_memory(rows: int, world_size: int, dtype: str, scaling: Scaling | None) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from weft.kernels.all_reduce import plan

    for n in (1024, 4096, 8192, 16384, 53248):
        problem = Problem(op="matmul_all_reduce", m=rows, n=n, k=n, world_size=world_size, dtype=dtype, scaling=scaling)
        options: dict[str, Any] = {"multiply": True, "device": torch.device("cuda"), "sms": 132}
        for one_hop in (True, False):
            tile = plan(problem, 0, split(n, world_size), hops="one" if one_hop else "two", **options).tiling
            assert tile.stages >= 2
            assert (tile.m + tile.n) * tile.k * problem.operand_itemsize * tile.stages <= SHARED_BYTES, tile
            assert scaling is None or scaling.recipe != "blockwise" or tile.k % SCALE_BLOCK == 0


@pytest.mark.usefixtures("on_an_h200")
@pytest.mark.parametrize(
    ("n", "rows", "scaling", "shape"),
    [
        (28672, 1, Scaling(), (128, 8, 4)),
        (28672, 16, Scaling(recipe="tensorwise"), (128, 8, 4)),
        (28672, 1, Scaling(recipe="blockwise"), (32, 4, 6)),
        (28672, 1, None, (32, 4, 6)),
        (8192, 1, Scaling(), (64, 4, 6)),
        (28672, 32, Scaling(), (32, 4, 6)),
    ],
)
def test_few_rows_by_wide_tiles_of_fp8_take_8_warps(
    n: int, rows: int, scaling: Scaling | None, shape: tuple[int, int, int]
) -> None:
    """Columns, warps and stages, as they were fastest on an H100."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from weft.kernels.all_reduce import plan

    problem = Problem(op="matmul_all_reduce", m=rows, n=n, k=8192, world_size=1, scaling=scaling)
    device = torch.device("cuda")
    tile = plan(problem, 0, split(n, 1), hops="one", multiply=True, device=device, sms=132).tiling
    assert (tile.n, tile.warps, tile.stages) == shape
