"""Every operator's programs, on two CPU ranks with NCCL's default alone: each gives what a reference computes for itself."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_cpu import OnCpu
from rank_pools import on_ranks

from benchmarks import lookups, methods
from benchmarks.measure import ALONE, WrongResult, close_to
from benchmarks.methods import Matmul
from benchmarks.nccl import Transport
from benchmarks.ragged import Ragged, regrouped, shares
from weft.core.problem import COLUMN_OPS, ColumnProblem, LookupProblem, Op, Problem

RANKS = 2


def _default() -> Transport:
    group = dist.group.WORLD
    assert group is not None
    return Transport(name="default", group=group)


def _from_all(tensor: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor) for _ in range(RANKS)]
    dist.all_gather(found, tensor.contiguous())
    return found


def _reference(m: Matmul) -> torch.Tensor:
    """In float32, of all ranks' operands."""
    op, rank = m.problem.op, dist.get_rank()
    all_a, all_b = _from_all(m.a.float()), _from_all(m.b.float())
    products = [a @ b for a, b in zip(all_a, all_b, strict=op != "all_gather_matmul")]
    if op == "all_gather_matmul":
        return torch.cat(all_a) @ all_b[rank]
    if op == "all_to_all_matmul":
        return torch.cat([a.chunk(RANKS)[rank] for a in all_a]) @ all_b[rank]
    if op == "matmul_all_to_all":
        return torch.cat([product.chunk(RANKS)[rank] for product in products])
    if op == "matmul_all_to_all_columns":
        return torch.cat([product.chunk(RANKS, 1)[rank] for product in products])
    if op == "matmul_reduce_scatter":
        return sum(products, torch.zeros(())).chunk(RANKS)[rank]
    return sum(products, torch.zeros(()))


def _columns_reference(m: Matmul) -> torch.Tensor:
    all_a = [a.chunk(RANKS)[dist.get_rank()] for a in _from_all(m.a.float())]
    return torch.cat(all_a, 1) @ m.b.float()


def _problem(op: Op) -> Problem:
    if op in COLUMN_OPS:
        return ColumnProblem(op=op, m=8, n=12, k=16, world_size=RANKS)
    return Problem(op=op, m=8, n=12, k=16, world_size=RANKS)


@on_ranks(RANKS)
@pytest.mark.parametrize("op", methods.EXCHANGES)
def test_all_programs_give_the_same(op: Op) -> None:
    torch.manual_seed(dist.get_rank())
    # PyTorch's symmetric memory is of GPUs. The rank goes on to other tests, which need torch.compile.
    without = mock.patch.multiple(methods, TORCH=(), FLOAT8_SPECS=())
    with without, mock.patch.object(torch, "compile", lambda program, **options: program), OnCpu():
        m = Matmul(_problem(op), turned=op == "matmul_all_reduce")
        works = methods.every(
            m, [_default()], ("sequential", "shard_p2p" if op != "all_to_all_columns_matmul" else "flag_gated:2")
        )
    expected = _columns_reference(m) if op == "all_to_all_columns_matmul" else _reference(m)
    check = close_to(expected)
    works.pop("peer/async_tp", None)
    assert ("peer/torch_compile" in works) == (op not in COLUMN_OPS)
    for name, work in works.items():
        result = work()
        if not name.startswith(ALONE):
            assert isinstance(result, torch.Tensor)
            assert result.shape == expected.shape, name
            check(name, result)
    with pytest.raises(WrongResult, match="weft/sequential is off"):
        check("weft/sequential", expected.roll(1, 0))
    halves = {"communication/default", "computation/cublas"} - (
        {"communication/default"} if op == "matmul_all_reduce" else set()
    )
    assert halves < set(works)


@on_ranks(RANKS)
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("op", [op for op in methods.EXCHANGES if op not in COLUMN_OPS])
def test_both_halves_run(op: Op, drawn: bool) -> None:
    torch.manual_seed(dist.get_rank())
    with OnCpu():
        m = Matmul(_problem(op))
        found = methods.halves(m, drawn=drawn)
    product = found["computation/cublas"]()
    assert isinstance(product, torch.Tensor)
    assert tuple(product.shape) == m.shape
    found["communication/default"]()


@on_ranks(RANKS)
def test_all_lookups_give_the_same() -> None:
    torch.manual_seed(dist.get_rank())
    case = lookups.LookupCase(tables=2, dim=4, pooling=3, batch=8, rows=16)
    with OnCpu():
        tables = lookups.Tables(case)
        tables.lookup = lambda: lambda: tables.pooled  # type: ignore[method-assign]
        works = tables.works(("direct_store:1", "auto"))
    bags = tables.indices.view(2, 8, 3)
    mine = torch.cat([tables.tables[t][bags[t]].sum(1) for t in range(2)], 1)
    expected = torch.cat([part.chunk(RANKS)[dist.get_rank()] for part in _from_all(mine)], 1)
    for name, work in works.items():
        result = work()
        if name.startswith(("sequential/", "weft/")):
            torch.testing.assert_close(result, expected, msg=name)
        elif name.startswith("computation/torch"):
            torch.testing.assert_close(result, mine, msg=name)


@on_ranks(RANKS)
def test_tables_of_a_problem() -> None:
    torch.manual_seed(dist.get_rank())
    problem = LookupProblem.of(batch=8, dims=((4, 8), (4,)), pooling=3)
    with OnCpu():
        tables = lookups.ProblemTables(problem)
    first, second = (tables.weft(spec)() for spec in ("sequential", "direct_store:1"))
    torch.testing.assert_close(first, second)
    assert isinstance(first, torch.Tensor)
    assert first.shape == (4, 16)


def _by_expert(rows: torch.Tensor, groups: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    parts = rows.split(groups.tolist())  # type: ignore[no-untyped-call]
    return torch.cat([part @ one for part, one in zip(parts, b, strict=True)])


@on_ranks(RANKS)
@pytest.mark.parametrize("op", ["matmul_all_to_all", "all_to_all_matmul"])
def test_ragged_programs(op: Op) -> None:
    torch.manual_seed(dist.get_rank())
    rank = dist.get_rank()
    with OnCpu():
        r = Ragged(op, 16, 8, 8, 2)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int32), r.offsets]).diff()
        r.matmul = lambda rows: _by_expert(rows, offsets, r.b)  # type: ignore[method-assign]
        works = r.works()
    result = works["sequential/default"]()
    counts, all_a, all_b = r.counts, _from_all(r.a.float()), _from_all(r.b.float())
    if op == "all_to_all_matmul":  # a rank's rows lie by destination and expert there; what arrives, by expert and source
        pieces = [a.split(counts[src].flatten().tolist()) for src, a in enumerate(all_a)]  # type: ignore[no-untyped-call]
        expected = [pieces[src][rank * 2 + e] @ all_b[rank][e] for e in range(2) for src in range(RANKS)]
    else:  # they lie by expert and destination; what arrives, by source and expert
        pieces = [a.split(counts[src].t().flatten().tolist()) for src, a in enumerate(all_a)]  # type: ignore[no-untyped-call]
        expected = [pieces[src][e * RANKS + rank] @ all_b[src][e] for src in range(RANKS) for e in range(2)]
    close_to(torch.cat(expected))("sequential/default", result)  # type: ignore[arg-type]


def test_shares_of_ragged_rows() -> None:
    counts = shares(64, 3, 2)
    assert counts.sum((1, 2)).tolist() == [64, 64]
    with OnCpu():
        order = regrouped(torch.tensor([[1, 2], [2, 1]]))
    assert order.tolist() == [0, 3, 4, 1, 2, 5]


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("all_gather_matmul", (4 * 16 * 2, 8 * 16 * 2)),
        ("matmul_reduce_scatter", (4 * 12 * 2, 8 * 12 * 2)),
        ("matmul_all_reduce", (8 * 12 * 2, 8 * 12 * 2)),
        ("matmul_all_to_all", (8 * 12 * 2, 8 * 12 * 2)),
        ("all_to_all_matmul", (8 * 16 * 2, 8 * 16 * 2)),
    ],
)
def test_windows_hold_what_the_methods_ask_for(op: Op, expected: tuple[int, int]) -> None:
    assert methods.windows(_problem(op)) == expected
