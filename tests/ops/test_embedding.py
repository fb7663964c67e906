"""embedding_bag_all_to_all on real ranks: every schedule, what bags and tables may be, its gradients, and its errors."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from embedding_work import SPECS, Case, cases, check, check_bad_index, draw, expected
from rank_pools import interpreting, on_ranks
from rank_work import slowed

import weft
from weft.core.errors import RankMismatch
from weft.runtime import arithmetic
from weft.runtime.bindings import Bindings

pytestmark = pytest.mark.ranks


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_schedule_is_right(dtype: torch.dtype) -> None:
    for turn, case in enumerate(cases(dist.get_world_size())):
        for spec in SPECS:
            check(replace(case, dtype=dtype), spec, turn)


@on_ranks(3)
@pytest.mark.parametrize("delay", ["nothing", "lookup", "transport"])
def test_calls_in_a_row_with_a_slow_rank(delay: str) -> None:
    """Many calls in a row, new data each, while one rank is late, or its copies are: buffers and flags are used again early
    and late."""
    late = {"transport": (Bindings, "pieces", 0.001), "lookup": (arithmetic, "pool", 0.005)}.get(delay)
    with slowed(*late) if late else nullcontext():
        for call in range(6):
            for spec in SPECS[::2]:
                check(Case(dims=((8, 4),) * 3), spec, call)


@on_ranks(2)
def test_bags_of_none_and_of_ten_thousand() -> None:
    check(Case(dims=((8,), (16,)), batch=4, lengths=(0, 10_000), exact=True), "direct_store:1", 0)


@on_ranks(2)
def test_lengths_in_place_of_offsets_and_auto() -> None:
    case = Case(dims=((8, 4),) * 2)
    drawn = draw(case, 0, dist.get_rank())
    for offsets, lengths in ((drawn.offsets, None), (None, drawn.offsets.diff())):
        with torch.inference_mode():
            out = weft.embedding_bag_all_to_all(drawn.indices, offsets, drawn.tables, lengths=lengths, schedule="auto")
        torch.testing.assert_close(out, expected(case, 0, dist.get_rank()).float())


@pytest.mark.parametrize("index", [-1, 40, 2**40])
def test_an_index_out_of_range_is_named_and_adds_nothing(ranks: RankFixture, index: int) -> None:
    ranks(2).run(check_bad_index, index)


def _shares(tables: list[torch.Tensor]) -> bool:
    """Whether tables are refused since they share memory."""
    given = [table.detach().requires_grad_() for table in tables]
    nothing = torch.zeros(0, dtype=torch.int64)
    offsets = torch.zeros(2 * dist.get_world_size() + 1, dtype=torch.int64)
    try:
        weft.embedding_bag_all_to_all(nothing, offsets, given, optimizer=weft.SGD(lr=1.0), schedule="sequential")
    except ValueError as error:
        return "share memory" in str(error)
    return False


@on_ranks(2)
def test_tables_beside_each_other_in_one_matrix() -> None:
    """Tables that lie beside each other share no row of memory: an optimizer may have them."""
    matrix = torch.ones(6, 12).requires_grad_()
    tables = [matrix.detach()[:, :8].requires_grad_(), matrix.detach()[:, 8:].requires_grad_()]
    offsets = torch.arange(2 * 4 + 1)
    out = weft.embedding_bag_all_to_all(offsets[:-1] % 6, offsets, tables, optimizer=weft.SGD(lr=1.0), schedule="sequential")
    out.sum().backward()
    assert matrix.sum() == 72 - 4 * 12  # each of 4 samples takes 1 from every column of a row
    row = matrix.detach()[1, 4:12].as_strided((1, 8), (8, 1))
    assert _shares([matrix.detach()[:, :8], row])
    assert not _shares([matrix.detach()[:, :4], row])
    with torch.no_grad():
        assert not _shares([matrix.detach()] * 2)
    weft.close()


def _odd_weights() -> None:
    """An index that its table does not have adds nothing, whatever it weighs."""
    indices, offsets = torch.tensor([0, 1, 7, 2]), torch.tensor([0, 2, 4])
    for odd in (math.inf, math.nan):
        weights = torch.tensor([1.0, 1.0, odd, 1.0])
        options = {"per_sample_weights": weights, "checked": False, "schedule": "direct_store:1"}
        out = weft.embedding_bag_all_to_all(indices, offsets, [torch.ones(4, 8)], **options)
        sums = torch.tensor([2.0, 1.0]).chunk(dist.get_world_size())[dist.get_rank()]
        assert torch.equal(out, sums[:, None].expand_as(out))
    weft.close()


@on_ranks(2)
def test_no_rank_has_tables() -> None:
    """Where no rank has any there is nothing to learn: a result of no columns, which asks for no gradient."""
    nothing = torch.zeros(0, dtype=torch.int64)
    options = {"dims": ((),) * dist.get_world_size(), "batch": 6, "dtype": torch.float32}
    out = weft.embedding_bag_all_to_all(nothing, torch.zeros(1, dtype=torch.int64), [], **options)
    assert out.shape == (6 // dist.get_world_size(), 0)
    assert not out.requires_grad
    weft.close()


def test_what_is_not_there_has_no_weight(ranks: RankFixture) -> None:
    ranks(2).run(_odd_weights)
    interpreting(2).run(_odd_weights)


@on_ranks(2)
def test_mistakes_are_named() -> None:
    drawn = draw(Case(dims=((8, 4),) * 2), 0, dist.get_rank())
    indices, offsets, tables = drawn.indices, drawn.offsets, drawn.tables
    call = weft.embedding_bag_all_to_all
    optimizer, weights = weft.SGD(lr=0.1), torch.ones(indices.shape)
    shared = torch.ones(8, 8, requires_grad=True)
    for says, arguments, options in (
        ("indices is .* of torch.float32; it must be a vector of int32 or int64", (indices.float(), offsets, tables), {}),
        ("offsets and lengths: pass one of them", (indices, offsets, tables), {"lengths": offsets}),
        ("has 21 bags .*; 2 tables of 10 samples need 20", (indices, offsets[1:], tables), {}),
        ("mode is 'max'; use 'sum' or 'mean'", (indices, offsets, tables), {"mode": "max"}),
        (
            "per_sample_weights goes with mode='sum'",
            (indices, offsets, tables),
            {"mode": "mean", "per_sample_weights": weights},
        ),
        ("dims... is .4,., but the tables of rank . have dims .8, 4.", (indices, offsets, tables), {"dims": ((4,), (4,))}),
        ("tables.1. is torch.float16 on cpu", (indices, offsets, [tables[0], tables[1].half()]), {}),
        ("batch is None; a rank without tables", (indices, offsets, []), {"dtype": torch.float32}),
        (
            "schedule is 'flag_gated', which is for .* alone; embedding_bag_all_to_all has",
            (indices, offsets, tables),
            {"schedule": "flag_gated"},
        ),
        ("let all of them require a gradient", (indices, offsets, tables), {"optimizer": optimizer}),
        ("tables.0. and tables.1. share memory", (indices, offsets, [shared, shared[:, 4:]]), {"optimizer": optimizer}),
        (
            "sparse is True, and there is an optimizer",
            (indices, offsets, tables),
            {"optimizer": optimizer, "sparse": True},
        ),
    ):
        with pytest.raises(ValueError, match=says):
            call(*arguments, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lr is -1; it must be"):
        weft.SGD(lr=-1)
    if dist.get_rank():
        tables = tables[:1]
        offsets = offsets[: len(offsets) // 2 + 1]
    with pytest.raises(RankMismatch, match=r"dims of rank 0: rank . has 1 x 8.* has 1 x 8, 1 x 4|dims of rank 0"):
        call(indices, offsets, tables, schedule="sequential")
    weft.close()
