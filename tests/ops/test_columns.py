"""Exchanges between parts of rows and parts of columns, on CPU ranks: every family, both ways, and Ulysses' attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_counts import counting
from rank_pools import interpreted_ranks, on_ranks
from rank_work import bound, here

import weft
from weft.checker import ScheduleError, check
from weft.core import codec, machine
from weft.core.problem import COLUMN_OPS, ColumnProblem
from weft.core.schedule import Collective, Copy, Gemm, Lane, Schedule, waits
from weft.perf.terms import gemm_us
from weft.schedules import build, names

SPLIT_SPECS, GATHER_SPECS = map(names, COLUMN_OPS)


@st.composite
def schedules(draw: Any) -> Schedule:
    op, size = draw(st.sampled_from(COLUMN_OPS)), draw(st.integers(1, 5))
    extents = {name: size * draw(st.integers(name == "k", 7)) for name in ("m", "n", "k")}
    handed = op == "all_to_all_columns_matmul" and draw(st.booleans())
    problem = ColumnProblem(op=op, world_size=size, return_gathered=handed, **extents)
    return build(problem, draw(st.sampled_from(names(op))), draw(st.integers(1, 6)))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(schedules())
def test_every_schedule_is_proved_right_and_does_all_work_once(schedule: Schedule) -> None:
    check(schedule)
    problem = schedule.problem
    steps = [step for *_, step in schedule]
    flops = sum(part.a.size * step.b.shape[1] for step in steps if isinstance(step, Gemm) for part in step.parts)
    assert flops == problem.product_rows(0) * problem.columns(0) * problem.k * problem.world_size
    assert not [step for step in steps if isinstance(step, Copy) and not step.src.shape[0]]
    assert {wait.flag for step in steps for wait in waits(step)} == set(schedule.signals_per_call)
    assert codec.loads(Schedule, codec.dumps(schedule)) == schedule


@pytest.mark.parametrize("op", COLUMN_OPS)
def test_overlap_is_predicted_to_win_at_real_sizes(op: Any) -> None:
    problem = ColumnProblem(op=op, m=8192 * (8 if op == "all_to_all_columns_matmul" else 1), n=8192, k=8192, world_size=8)
    plan = weft.plan(problem, machine.load("h200x8"))
    assert plan.chosen.schedule != "sequential"


def test_the_whole_matmul_is_one_of_all_columns() -> None:
    """Narrow columns for each rank are what a schedule pays, not what it is held against."""
    problem = ColumnProblem(op="matmul_all_to_all_columns", m=8192, n=1024, k=1024, world_size=8)
    found = weft.plan(problem, "h200x8", only="sequential")
    assert found.computation_us == gemm_us(machine.load("h200x8"), 8192, 1024, 1024, "bfloat16")
    assert found.computation_us < found.chosen.computation_us


def test_wrong_columns_are_refused() -> None:
    """A product by another rank's columns of b is no result."""
    schedule = build(ColumnProblem(m=4, n=6, k=2, world_size=2), "sequential", 1)
    (lane,) = schedule.ranks[0]
    first, second, exchange = lane.steps
    assert isinstance(first, Gemm)
    assert isinstance(second, Gemm)
    swapped = (Gemm(second.b, first.parts), Gemm(first.b, second.parts), exchange)
    wrong = Lane(lane.name, lane.kind, swapped)
    with pytest.raises(ScheduleError, match="the result there is"):
        check(Schedule(problem=schedule.problem, name="x", buffers=schedule.buffers, ranks=((wrong,), *schedule.ranks[1:])))


@pytest.mark.parametrize(
    ("extents", "message"),
    [
        ({"n": 10}, "n is 10; matmul_all_to_all_columns needs a multiple of world_size, 4"),
        ({"op": "all_to_all_columns_matmul", "m": 6}, "m is 6; all_to_all_columns_matmul needs a multiple of world_size, 4"),
        ({"op": "all_to_all_columns_matmul", "k": 6}, "k is 6; all_to_all_columns_matmul needs a multiple of world_size, 4"),
        (
            {"op": "matmul_all_to_all"},
            "op is 'matmul_all_to_all'; weft has matmul_all_to_all_columns, all_to_all_columns_matmul",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(extents: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ColumnProblem(**{"m": 8, "n": 8, "k": 8, "world_size": 4, **extents})


def drawn(rows: int, cols: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """A matrix of every rank, the same list on all."""
    generator = torch.Generator().manual_seed(seed)
    scale = rows**-0.5 if rows else 1.0
    return [(torch.randn(rows, cols, generator=generator) * scale).to(here(), dtype) for _ in range(dist.get_world_size())]


def check_both(m: int, n: int, k: int, dtype: torch.dtype, split_spec: str, gather_spec: str, seed: int) -> None:
    """Both operators against float64 on one rank. m, n, k: for one rank, where they are cut."""
    rank, size = dist.get_rank(), dist.get_world_size()
    a, b = drawn(m, k, dtype, seed), drawn(k, n * size, dtype, seed + 1)
    out = weft.matmul_all_to_all(a[rank], b[rank], schedule=split_spec, split_dim=-1)
    columns = slice(rank * n, (rank + 1) * n)
    _close(out, torch.cat([x.double() @ y[:, columns].double() for x, y in zip(a, b, strict=True)]), k, (split_spec, m, n, k))
    a, b = drawn(m * size, k, dtype, seed + 2), drawn(k * size, n, dtype, seed + 3)
    out, received = weft.all_to_all_matmul(a[rank], b[rank], schedule=gather_spec, gather_dim=-1, return_received=True)
    rows = torch.cat([x[rank * m : (rank + 1) * m] for x in a], 1)
    assert torch.equal(received, rows)
    _close(out, rows.double() @ b[rank].double(), k * size, (gather_spec, m, n, k))
    assert torch.equal(out, weft.all_to_all_matmul(a[rank], b[rank], schedule=gather_spec, gather_dim=-1))


def _close(out: torch.Tensor, expected: torch.Tensor, k: int, what: object) -> None:
    assert out.shape == expected.shape
    error = (out.double() - expected).abs().max().item() if out.numel() else 0.0
    assert error <= bound(out.dtype, k, 0, expected), (what, error)


interpreted = interpreted_ranks(2)


@on_ranks(pool="interpreted")
def test_kernels_interpreted() -> None:
    """One for the peer's columns, one each for two calls the other way; the own columns are cuBLAS's."""
    from weft.runtime import fused

    with counting(fused.FusedGemm) as launches:
        for seed, (split_spec, gather_spec) in enumerate(
            (("track_and_trigger:2", "flag_gated:2"), ("direct_store:1", "direct_store:2"))
        ):
            check_both(37, 40, 48, torch.float16, split_spec, gather_spec, seed)
    assert launches.count == 6


def attention(qkv: torch.Tensor) -> torch.Tensor:
    """qkv [sequence, heads, 3, dim] -> [sequence, heads * dim]."""
    q, k, v = qkv.permute(2, 1, 0, 3)
    mixed: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(0, 1).flatten(1)


def block(x: torch.Tensor, into: torch.Tensor, out: torch.Tensor, split_spec: str, gather_spec: str) -> torch.Tensor:
    """Ulysses' attention: parts of the sequence, then heads, then parts of the sequence."""
    qkv = weft.matmul_all_to_all(x, into, schedule=split_spec, split_dim=-1)
    mixed = attention(qkv.view(qkv.shape[0], -1, 3, DIM))
    return weft.all_to_all_matmul(mixed, out, schedule=gather_spec, gather_dim=-1)


DIM = 4


@on_ranks(3)
@pytest.mark.slow
def test_ulysses() -> None:
    """Forward and backward against the whole sequence on one rank; torch.compile against eager."""
    rank, size = dist.get_rank(), dist.get_world_size()
    heads, hidden, tokens = 2 * size, 10, 6
    x, into, out = (
        drawn(r, c, torch.float32, r + c)[0] for r, c in ((tokens * size, hidden), (hidden, heads * 3 * DIM), (heads * DIM, 7))
    )
    part = slice(rank * tokens, (rank + 1) * tokens)
    whole = [t.clone().requires_grad_() for t in (x, into, out)]
    expected = attention((whole[0] @ whole[1]).view(tokens * size, heads, 3, DIM)) @ whole[2]
    expected.square().sum().backward()
    for split_spec, gather_spec in (
        ("track_and_trigger:2", "flag_gated:2"),
        ("shard_p2p", "uniform_fused_1d:3"),
        ("sequential", "auto"),
    ):
        mine = [x[part].clone().requires_grad_(), into.clone().requires_grad_(), out.clone().requires_grad_()]
        got = block(*mine, split_spec, gather_spec)
        torch.testing.assert_close(got, expected[part].detach())
        got.square().sum().backward()
        torch.testing.assert_close(mine[0].grad, whole[0].grad[part])  # type: ignore[index]
        for one, all_of_it in zip(mine[1:], whole[1:], strict=True):
            total = one.grad.clone()  # type: ignore[union-attr]
            dist.all_reduce(total)
            torch.testing.assert_close(total, all_of_it.grad)
    again = [t.detach().clone().requires_grad_() for t in mine]
    torch.compile(block, fullgraph=True, backend="aot_eager")(*again, "shard_p2p", "flag_gated:1").square().sum().backward()
    for one, two in zip(again, mine, strict=True):
        torch.testing.assert_close(one.grad, two.grad)


@on_ranks(3)
def test_middle_dimensions_gradients_and_mistakes() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    # A middle dimension: sequence first, then batch.
    (x, *_), (w, *_) = drawn(12 * size, 5, torch.float32, 1), drawn(5, 4 * size, torch.float32, 2)
    split = weft.matmul_all_to_all(x.view(6 * size, 2, 5), w, split_dim=-1)
    torch.testing.assert_close(split, (x @ w)[:, 4 * rank : 4 * rank + 4].view(6 * size, 2, 4).repeat(size, 1, 1))
    eye = torch.eye(5 * size)
    home = weft.all_to_all_matmul(x.view(6 * size, 2, 5), eye, gather_dim=-1)
    torch.testing.assert_close(home, x.view(size, 6, 2, 5)[rank].repeat(1, 1, size))
    # What flows into the received rows goes back with the rest.
    a = x.clone().requires_grad_()
    out, received = weft.all_to_all_matmul(a, eye, gather_dim=-1, return_received=True)
    (out.sum() + (received * (rank + 2)).sum()).backward()
    rows = torch.arange(size).repeat_interleave(12)[:, None] + 3.0
    torch.testing.assert_close(a.grad, rows.expand_as(x))
    for call, message in (
        (lambda: weft.matmul_all_to_all(x, w[:, 1:], split_dim=-1), rf"b has {4 * size - 1} columns; .* a multiple of {size}"),
        (lambda: weft.all_to_all_matmul(x[1:], eye, gather_dim=-1), rf"a has {12 * size - 1} rows; .* a multiple of {size}"),
        (lambda: weft.all_to_all_matmul(x, w, gather_dim=-1), rf"b has 5 rows, a has 5 columns on each of {size} ranks"),
        (lambda: weft.matmul_all_to_all(x, w, split_dim=1), "split_dim is 1; it must be 0"),  # type: ignore[arg-type]
        (
            lambda: weft.all_to_all_matmul(x, w, gather_dim=-1, splits=torch.ones(size), max_rows=4),  # type: ignore[call-overload]
            "gather_dim is -1; with splits it must be 0",
        ),
        (
            lambda: weft.matmul_all_to_all(x, w, split_dim=-1, schedule="flag_gated"),
            "schedule is 'flag_gated', which is for .* alone; matmul_all_to_all_columns has sequential",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_nccl_exchanges_once() -> None:
    for op in COLUMN_OPS:
        schedule = build(ColumnProblem(op=op, m=4, n=4, k=4, world_size=2), "sequential", 1)
        assert sum(isinstance(step, Collective) for *_, step in schedule) == 2
