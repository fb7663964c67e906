"""embedding_bag_all_to_all on real ranks: every schedule, what bags and tables may be, its gradients, and its errors."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from embedding_work import Case, cases, check, draw, expected

import weft
from weft.execute import lookups
from weft.execute.bindings import Bindings
from weft.schedules import names_of

pytestmark = pytest.mark.ranks
SPECS = [
    f"{name}:{chunks}" if name != "sequential" else name for name in names_of("embedding_bag_all_to_all") for chunks in (1, 2)
]
SPECS = list(dict.fromkeys(SPECS))


def _every_schedule(dtype: torch.dtype) -> None:
    for turn, case in enumerate(cases(dist.get_world_size())):
        for spec in SPECS:
            for repeat in range(2):
                check(replace(case, dtype=dtype), spec, 10 * turn + repeat)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_schedule_is_right(ranks: RankFixture, world_size: int, dtype: torch.dtype) -> None:
    ranks(world_size).run(_every_schedule, dtype)


def _new_data_each_call(delay: str) -> None:
    """Many calls in a row, new data each, while one rank is late, or its copies are: buffers and flags are used again early
    and late."""
    case, slow = Case(dims=((8, 4),) * 3), dist.get_rank() == 1
    view, pool = Bindings.pieces, lookups.pool
    try:
        if delay == "transport" and slow:
            Bindings.pieces = lambda self, region: (time.sleep(0.001), view(self, region))[1]  # type: ignore[method-assign]
        if delay == "lookup" and slow:
            lookups.pool = lambda *a: (time.sleep(0.005), pool(*a))[1]  # type: ignore[assignment]
        for call in range(6):
            for spec in SPECS:
                check(case, spec, call)
    finally:
        Bindings.pieces, lookups.pool = view, pool  # type: ignore[method-assign]


@pytest.mark.parametrize("delay", ["nothing", "lookup", "transport"])
def test_calls_in_a_row_with_a_slow_rank(ranks: RankFixture, delay: str) -> None:
    ranks(3).run(_new_data_each_call, delay)


def _ten_thousand() -> None:
    check(Case(dims=((8,), (16,)), batch=4, lengths=(0, 10_000)), "direct_store:1", 0)


def test_bags_of_none_and_of_ten_thousand(ranks: RankFixture) -> None:
    ranks(2).run(_ten_thousand)


def _lengths_and_inference() -> None:
    case = Case(dims=((8, 4),) * 2)
    drawn = draw(case, 0, dist.get_rank())
    for offsets, lengths in ((drawn.offsets, None), (None, drawn.offsets.diff())):
        with torch.inference_mode():
            out = weft.embedding_bag_all_to_all(drawn.indices, offsets, drawn.tables, lengths=lengths, schedule="auto")
        torch.testing.assert_close(out, expected(case, 0, dist.get_rank()).float())


def test_lengths_in_place_of_offsets_and_auto(ranks: RankFixture) -> None:
    ranks(2).run(_lengths_and_inference)


def _bad_index(index: int) -> None:
    """The rank that has it is told which; it adds nothing, and the others have their result."""
    case, rank = Case(dims=((8, 4),) * 2, lengths=(2, 3)), dist.get_rank()
    drawn = draw(case, 0, rank)
    wanted = expected(case, 0, rank)
    at = int(drawn.offsets[case.batch + 4]) + 1
    row = draw(case, 0, 1).tables[1][draw(case, 0, 1).indices[at]]
    for spec in SPECS:
        if rank == 1:
            broken = drawn.indices.clone()
            broken[at] = index
            with pytest.raises(IndexError, match=rf"indices\[{at}\], in bag 4 of table 1, is {index}; .* rows 0 to 39"):
                weft.embedding_bag_all_to_all(broken, drawn.offsets, drawn.tables, schedule=spec)
        else:
            out = weft.embedding_bag_all_to_all(drawn.indices, drawn.offsets, drawn.tables, schedule=spec)
            reference = wanted.clone()
            reference[4, 20:] -= row.double()
            torch.testing.assert_close(out, reference.float())
    if rank == 1:
        offsets = drawn.offsets.clone()
        offsets[3] = 10**9
        with pytest.raises(ValueError, match=r"offsets\[3\] is 1000000000 after .* at most the number of indices, 54"):
            weft.embedding_bag_all_to_all(drawn.indices, offsets, drawn.tables, schedule="direct_store:1")
    else:
        weft.embedding_bag_all_to_all(drawn.indices, drawn.offsets, drawn.tables, schedule="direct_store:1")
    check(case, "direct_store:1", 1)


@pytest.mark.parametrize("index", [-1, 40, 2**40])
def test_an_index_out_of_range_is_named_and_adds_nothing(ranks: RankFixture, index: int) -> None:
    ranks(2).run(_bad_index, index)
