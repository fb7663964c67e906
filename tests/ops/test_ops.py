"""The operators on real ranks: every schedule, shapes that divide by nothing, dtypes, layouts, groups, and torch.compile."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from families import TP_NAMES
from rank_pools import on_ranks
from rank_work import both_have, check_both, check_gather, check_scatter, slowed, whole

import weft
from weft.core.errors import RankMismatch
from weft.core.problem import split
from weft.runtime import choose
from weft.runtime.host_resources import HostResources
from weft.schedules import FAMILIES

pytestmark = pytest.mark.ranks


@on_ranks(3)
@pytest.mark.parametrize("delay", ["nothing", "compute", "transport"])
def test_calls_in_a_row_with_a_slow_rank(delay: str) -> None:
    """Many calls in a row, new data each, while one lane or one rank is slow: buffers and flags are reused early and late."""
    from weft.runtime.bindings import Bindings
    from weft.runtime.host import HostProgram

    late = {"compute": (HostProgram, "multiply", 0.002), "transport": (Bindings, "pieces", 0.0005)}.get(delay)
    with slowed(*late) if late else nullcontext():
        for call in range(6):
            for name in TP_NAMES:
                check_both(37, 23, 19, torch.float32, f"{name}:2" if FAMILIES[name].chunked else name, 7 * call)


@on_ranks(2, 3)
def test_leading_dimensions_and_strides() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    a = torch.randn(3, 10, 8, generator=torch.Generator().manual_seed(3))
    b = torch.randn(8, 6, generator=torch.Generator().manual_seed(4))
    low, high = split(10, size)[rank]
    # Batch first, sequence sharded, through a transposed view of b.
    out = weft.all_gather_matmul(a[:, low:high], b.t().contiguous().t(), gather_dim=1, rows=10, schedule="flag_gated")
    torch.testing.assert_close(out, a @ b)
    out = weft.matmul_reduce_scatter(a[..., rank::size], b[rank::size], scatter_dim=1, schedule="hetero_fused_1d")
    torch.testing.assert_close(out, (a @ b)[:, low:high])
    # Leading dimensions stay whole: shards are cut between entries of the first one.
    low, high = split(3, size)[rank]
    out = weft.all_gather_matmul(a[low:high], b, rows=3, schedule="uniform_fused_1d:2")
    torch.testing.assert_close(out, a @ b)
    out = weft.matmul_reduce_scatter(a[..., rank::size], b[rank::size], schedule="track_and_trigger:3")
    torch.testing.assert_close(out, (a @ b)[low:high])


@on_ranks(3)
def test_several_b_share_one_gather() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    a, b, _ = whole(12, 30, 8, torch.float32, 5)
    low, high = split(12, size)[rank]
    widths = [4 + rank, 2, 3]  # grouped-query attention on uneven ranks: other ranks' widths differ
    bs = list(b[:, : sum(widths)].split(widths, dim=1))
    for name in TP_NAMES:
        outs, gathered = weft.all_gather_matmul(a[low:high], bs, schedule=name, rows=12, return_gathered=True)
        assert torch.equal(gathered, a)
        for out, each in zip(outs, bs, strict=True):
            torch.testing.assert_close(out, a @ each)


@on_ranks(4)
def test_sub_groups_and_the_world_side_by_side() -> None:
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    mine = pairs[0] if rank in (0, 3) else pairs[1]
    for seed in range(3):
        check_gather(11, 6, 5, torch.float32, "hetero_unfused_1d:2", 10 * seed + (mine is pairs[1]), mine)
        check_scatter(11, 6, 5, torch.float32, "direct_store:2", 10 * seed + (mine is pairs[1]), mine)
        check_gather(11, 6, 5, torch.float32, "flag_gated:2", seed)
    other = pairs[1] if mine is pairs[0] else pairs[0]
    with pytest.raises(ValueError, match="group: this rank is not in it"):
        weft.all_gather_matmul(torch.ones(2, 2), torch.ones(2, 2), other)
    for group in (mine, None):
        weft.close(group)


@on_ranks(2)
def test_ranks_first_call_two_groups_in_orders_of_their_own() -> None:
    """Of two groups, each by a thread of its own; the ranks come to them one after the other, in orders of their own."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        found = []
        for group in groups if dist.get_rank() == 0 else reversed(groups):
            found.append(threads.submit(check_gather, 8, 6, 4, torch.float32, "shard_p2p", 1, group))
            time.sleep(0.3)
        for one in found:
            one.result()
    for group in groups:
        weft.close(group)


@on_ranks(2)
def test_auto_and_schedule_values() -> None:
    check_both(64, 32, 16, torch.bfloat16, "auto", 0)
    rank, size = dist.get_rank(), dist.get_world_size()
    a, b, expected = whole(8, 6, 4, torch.float32, 1)
    problem = weft.Problem(op="all_gather_matmul", m=8, n=6, k=4, world_size=size, dtype="float32")
    (low, high), (left, right) = split(8, size)[rank], split(6, size)[rank]
    out = weft.all_gather_matmul(a[low:high], b[:, left:right], schedule=weft.schedule.build(problem, "flag_gated", 2))
    torch.testing.assert_close(out, expected[:, left:right].float())
    with pytest.raises(ValueError, match=r"schedule is for .* M=8 .*; this call is .* M=16"):
        weft.all_gather_matmul(
            torch.cat([a[low:high]] * 2), b[:, left:right], schedule=weft.schedule.build(problem, "flag_gated", 2)
        )
    check_gather(8, 6, 4, torch.float32, "flag_gated", 2)  # a mistake that all ranks share breaks nothing


@on_ranks(3)
def test_nan_and_inf_travel() -> None:
    """NaN and inf come out where the sequential program has them, whatever the schedule."""
    rank, size = dist.get_rank(), dist.get_world_size()
    a, b, _ = whole(12, 6, 8, torch.float32, 2)
    a[1, 3], a[7, 0], b[2, 4], b[5, 1] = torch.nan, torch.inf, -torch.inf, torch.nan
    expected = a @ b
    (low, high), (left, right), (first, last) = split(12, size)[rank], split(6, size)[rank], split(8, size)[rank]
    partial_sums = sum((a[:, x:y] @ b[x:y] for x, y in split(8, size)), torch.zeros(12, 6))
    for name in TP_NAMES:
        out = weft.all_gather_matmul(a[low:high], b[:, left:right], schedule=name)
        torch.testing.assert_close(out, expected[:, left:right], equal_nan=True)
        if both_have(name):
            out = weft.matmul_reduce_scatter(a[:, first:last], b[first:last], schedule=name)
            torch.testing.assert_close(out, partial_sums[low:high], equal_nan=True)


def _compiled_sizes() -> int:
    """A dimension that is moved, of three sizes. How many graphs were compiled."""
    torch.manual_seed(0)
    b, graphs = torch.randn(10, 10), []

    def block(a: torch.Tensor) -> torch.Tensor:
        return weft.matmul_reduce_scatter(weft.all_gather_matmul(a, b, gather_dim=1).relu(), b, scatter_dim=1)

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=count)
    for rows in (4, 6, 8):
        for batch in (3, 1):
            a = torch.randn(batch, rows, 10)
            torch.testing.assert_close(compiled(a), block(a))
    return len(graphs)


def test_one_graph_serves_all_numbers_of_rows(ranks: RankFixture) -> None:
    """A batch of 1 has a graph of its own, as in torch."""
    assert ranks(2).run(_compiled_sizes) == [2, 2]


class _Gathered(torch.autograd.Function):
    """A function of a user's, whose backward calls an operator."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(b)
        return weft.all_gather_matmul(a, b)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return weft.matmul_reduce_scatter(grad, ctx.saved_tensors[0].t()), None


@on_ranks(2)
def test_a_function_whose_backward_calls_an_operator_compiles_as_one_graph() -> None:
    a, b = torch.ones(2, 4, requires_grad=True), torch.rand(4, 3)
    found: list[torch.Tensor] = []

    def loss(a: torch.Tensor) -> torch.Tensor:
        return _Gathered.apply(a, b).sum()  # type: ignore[no-any-return,no-untyped-call]

    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        found += torch.autograd.grad(run(a), a)
    torch.testing.assert_close(found[1], found[0])


def _resources() -> tuple[int, int, int]:
    import os
    from pathlib import Path

    resident = int(Path("/proc/self/statm").read_text().split()[1])
    segments = [path for path in Path("/dev/shm").glob("weft-*") if path.name.split("-")[2] == str(os.getpid())]
    return resident, len(os.listdir("/proc/self/fd")), len(segments)


def _many_calls() -> list[tuple[int, int, int]]:
    seen = []
    for call in range(240):
        check_both(37, 23, 19, torch.float32, TP_NAMES[call % len(TP_NAMES)], call)
        if call in (40, 239):
            seen.append(_resources())
    return seen


def test_two_hundred_calls_grow_nothing(ranks: RankFixture) -> None:
    for (pages, descriptors, segments), (pages_end, descriptors_end, segments_end) in ranks(3).run(_many_calls):
        assert descriptors_end <= descriptors, "those that tests before have left may go meanwhile"
        assert segments_end == segments == 0
        assert pages_end <= pages + 1024, "resident memory grew by more than 4 MiB"


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("wrong K", {"b": torch.ones(5, 2)}, r"b has 5 rows, a has 4 columns"),
    ("dtype of b", {"b": torch.ones(4, 2, dtype=torch.float64)}, "b is torch.float64 .* they must agree"),
    ("dtype", {"a": torch.ones(2, 4, dtype=torch.int32)}, "a is torch.int32; weft takes bfloat16, float16, float32"),
    ("vector", {"a": torch.ones(4)}, "at least 2 dimensions"),
    ("b of 3 dimensions", {"b": torch.ones(1, 4, 2)}, "it must be a matrix"),
    ("no b", {"b": []}, "b is an empty list"),
    ("schedule", {"schedule": "fast"}, "schedule is 'fast'; all_gather_matmul takes auto"),
    ("chunks", {"schedule": "flag_gated:0"}, "a chunk count is a whole number"),
    ("gather_dim", {"gather_dim": 1}, "gather_dim is 1; for a of 2 dimensions it must be in 0 to 0"),
    ("rows", {"rows": 7}, r"rows is 7: torch.chunk over 2 ranks gives rank \d 4 rows, but a has 2|gives rank 1 3 rows"),
]


@on_ranks(2)
def test_mistakes_are_told_and_nothing_is_lost() -> None:
    for _, change, message in MISTAKES:
        arguments: dict[str, Any] = {"a": torch.ones(2, 4), "b": torch.ones(4, 2), **change}
        with pytest.raises(ValueError, match=message):
            weft.all_gather_matmul(**arguments)
    with pytest.raises(ValueError, match="op is 'max'; use 'sum' or 'avg'"):
        weft.matmul_reduce_scatter(torch.ones(2, 4), torch.ones(4, 2), op="max")
    trace: Any = torch.jit.trace
    with pytest.raises(ValueError, match=r"matmul_all_reduce: torch\.jit\.trace cannot record"):
        trace(lambda a, b: weft.matmul_all_reduce(a, b), (torch.ones(2, 4), torch.ones(4, 2)))
    check_gather(8, 6, 4, torch.float32, "flag_gated", 2)


def test_no_process_group() -> None:
    with pytest.raises(ValueError, match="is not initialised"):
        weft.all_gather_matmul(torch.ones(2, 4), torch.ones(4, 2))


def _disagree(what: str) -> str:
    odd = dist.get_rank() == 1
    rows, dtype, schedule = 4, torch.float32, "flag_gated"
    if what == "shape" and odd:
        rows = 3
    if what == "dtype" and odd:
        dtype = torch.bfloat16
    if what == "schedule" and odd:
        schedule = "shard_p2p"
    patch = pytest.MonkeyPatch()
    if what == "choice":
        schedule = "planned"
        patch.setattr(choose, "planned", lambda *_: "shard_p2p" if odd else "flag_gated:1")
    if what == "SMs" and odd:
        patch.setattr(HostResources, "blocks", 108)
    a, b = torch.ones(rows, 4, dtype=dtype), torch.ones(4, 2, dtype=dtype)
    try:
        if what == "op" and odd:
            weft.matmul_reduce_scatter(a, b, schedule=schedule)
        else:
            weft.all_gather_matmul(a, b, schedule=schedule)
    except RankMismatch as error:
        message = str(error)
    else:
        raise AssertionError(f"ranks that disagree on {what} were not told")
    patch.undo()
    dist.barrier()
    weft.close()
    check_gather(8, 6, 4, torch.float32, "flag_gated", 2)
    return message


@pytest.mark.parametrize(
    ("what", "difference"),
    [
        ("shape", r"(M|rows of a of all ranks .*pass rows=.*): rank . has (12|9), rank . has (12|9)"),
        ("dtype", "dtype: rank . has torch.(float32|bfloat16), rank . has torch.(float32|bfloat16)"),
        ("op", "op: rank . has (all_gather_matmul|matmul_reduce_scatter)"),
        ("schedule", "schedule: rank . has (flag_gated|shard_p2p)"),
        ("choice", "chosen: rank . has (flag_gated:1|shard_p2p), rank . has (flag_gated:1|shard_p2p)"),
        ("SMs", r"SMs: rank . has \d+, rank . has \d+"),
    ],
)
def test_ranks_that_disagree_are_all_told(ranks: RankFixture, what: str, difference: str) -> None:
    import re

    for message in ranks(3).run(_disagree, what):
        assert "ranks disagree in call" in message
        assert re.search(difference, message), message
