"""Row counts that change: calls that are padded to a bucket give what they would give by a program of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from fake_gpu import fake_gpu
from rank_pools import on_ranks
from rank_work import bound, check_all_reduce, check_gather, check_scatter, here
from timed_autotuning import autotuning_by_a_clock

import weft
from weft.core.errors import WeftError
from weft.core.problem import COLUMN_OPS, ColumnProblem, Op, Problem
from weft.runtime import programs, tuner
from weft.runtime.groups import GROUPS
from weft.runtime.programs import Programs
from weft.runtime.tuner import OWN_COUNTS, bucket, serves
from weft.schedules import parse

DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32


def _problem(op: Op, m: int, world_size: int = 4, **options: Any) -> Problem:
    return Problem(op=op, m=m, n=64, k=64, world_size=world_size, **options)


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_to_all", "all_to_all_matmul"])
def test_buckets_are_a_fixed_series(op: Op) -> None:
    """At most an eighth more; each bucket is its own; every rank's shard has as many rows."""
    found = set()
    for m in range(1, 4096):
        padded = bucket(_problem(op, m))
        assert m <= padded.m <= -(-m // 4) * 4 * 1.125
        assert padded.m % 4 == 0
        assert bucket(padded) == padded
        found.add(padded.m)
    assert len(found) < 64 + 4 * 8 * 7


def test_what_is_not_padded() -> None:
    assert bucket(_problem("matmul_all_reduce", 17)).m == 18, "rows are not cut by rank"
    for rows in (9, 16):
        assert bucket(_problem("matmul_all_reduce", rows)).m == rows
    for op in COLUMN_OPS:
        columns = ColumnProblem(op=op, m=1000, n=64, k=64, world_size=4)
        assert bucket(columns) == columns
        assert not serves(columns, 999)
    assert bucket(_problem("all_gather_matmul", 0)).m == 0
    assert bucket(_problem("all_gather_matmul", 1000, 4, nodes=(2, 2))).m == 1000
    assert bucket(_problem("all_gather_matmul", 3 * 1000, 4, row_multiple=3)).m == 3 * 1024


def test_which_row_counts_a_program_serves() -> None:
    program = _problem("all_gather_matmul", 416)
    assert [rows for rows in range(1, 500) if serves(program, rows)] == list(range(385, 417))
    assert serves(_problem("all_gather_matmul", 413), 413)
    assert not serves(_problem("all_gather_matmul", 413), 412)
    assert serves(_problem("all_gather_matmul", 4), 1)
    assert not serves(_problem("all_gather_matmul", 4), 0)
    entries = _problem("all_gather_matmul", 3 * 416, row_multiple=3)
    assert [rows for rows in range(1, 1500) if serves(entries, rows)] == list(range(3 * 385, 3 * 416 + 1, 3))


OWN = (64, 192, 32, 16)
"""Rows of a shard, of the row counts that get programs of their own."""
assert len(OWN) == OWN_COUNTS


@contextmanager
def clocked(spec: str) -> Iterator[None]:
    """In a group that is new, `auto` finds that one schedule beats sequential."""
    weft.close()
    with autotuning_by_a_clock(parse(spec)[0], spec):
        yield
        weft.close()


def _programs() -> list[int]:
    state = GROUPS.state(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    return sorted({schedule.problem.m for schedule in state.schedules()})


def _check_exchange(rows: int, seed: int, operator: Callable[..., torch.Tensor]) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(seed)
    every = torch.randn(size, rows, 16, generator=generator).to(here(), DTYPE)
    b = torch.randn(16, 24, generator=generator).to(here(), DTYPE)
    out = operator(every[rank], b)
    expected = torch.cat([a.chunk(size)[rank] for a in every]).double() @ b.double()
    error = (out.double() - expected).abs().max().item()
    assert error <= bound(DTYPE, 16, 1, expected), (rows, seed, error)


def _call(op: Op, rows: int, seed: int) -> None:
    if op == "all_gather_matmul":
        check_gather(rows, 24, 16, DTYPE, "auto", seed)
    elif op == "matmul_reduce_scatter":
        check_scatter(rows, 24, 16, DTYPE, "auto", seed)
    elif op == "matmul_all_reduce":
        check_all_reduce(rows, 24, 16, DTYPE, "auto", seed, addends=3)
    elif op == "matmul_all_to_all":
        _check_exchange(rows, seed, weft.matmul_all_to_all)
    else:
        _check_exchange(rows, seed, weft.all_to_all_matmul)


def changing(op: Op, spec: str, uneven: bool) -> tuple[list[int], list[int]]:
    """The row counts of programs: after those that get one of their own, and after many more."""
    size = dist.get_world_size()
    with clocked(spec):
        for seed, shard in enumerate(OWN):
            _call(op, shard * size, seed)
        own = _programs()
        for seed, shard in enumerate(range(97, 112)):
            _call(op, shard * size - (1 if uneven else 0), seed)
        _call(op, OWN[0] * size, 9)
        return own, _programs()


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("op", "spec"),
    [
        ("all_gather_matmul", "shard_p2p"),
        ("matmul_reduce_scatter", "hetero_unfused_1d:2"),
        ("matmul_all_reduce", "two_shot"),
        ("matmul_all_to_all", "shard_p2p"),
        ("all_to_all_matmul", "shard_p2p"),
    ],
)
def test_results_are_right_and_programs_few(ranks: RankFixture, world_size: int, op: Op, spec: str) -> None:
    for uneven in (False, op not in ("matmul_all_to_all", "all_to_all_matmul")):
        for own, after in ranks(world_size).run(changing, op, spec, uneven):
            assert own == sorted(shard * world_size for shard in OWN)
            step = 16 if op == "matmul_all_reduce" and world_size > 2 else 8
            assert len(after) <= len(own) + 4, after
            assert all(rows % step == 0 for rows in after)


@on_ranks(3)
def test_results_without_padding_are_contiguous() -> None:
    """Also of one row from each rank, which lie equally far from each other in the padded result."""
    weft.close()
    for rows in (11, 2, 5, 4, 10, 8, 7):
        assert weft.matmul_all_to_all(torch.ones(rows, 9), torch.ones(9, 6)).is_contiguous(), rows
    weft.close()


@on_ranks(2)
def test_in_training() -> None:
    """Gradients, and results that are changed in place."""
    size, rank = dist.get_world_size(), dist.get_rank()
    with clocked("shard_p2p"):
        for seed, rows in enumerate((*(size * shard for shard in OWN), 101 * size, 102 * size)):
            generator = torch.Generator().manual_seed(seed)
            whole, up, down = (
                torch.randn(*shape, generator=generator) for shape in ((rows, 16), (16, 8 * size), (8 * size, 16))
            )
            a = whole.chunk(size)[rank].clone().requires_grad_()
            one, two = (
                up[:, 8 * rank : 8 * rank + 8].clone().requires_grad_(),
                down[8 * rank : 8 * rank + 8].clone().requires_grad_(),
            )
            out = weft.matmul_reduce_scatter(weft.all_gather_matmul(a, one), two)
            out += a
            out.square().sum().backward()
            full = [tensor.requires_grad_() for tensor in (whole, up, down)]
            expected = whole @ up @ down + whole
            expected.square().sum().backward()
            torch.testing.assert_close(out, expected.chunk(size)[rank], rtol=1e-4, atol=1e-3)
            grads = (
                full[0].grad.chunk(size)[rank],
                full[1].grad[:, 8 * rank : 8 * rank + 8],
                full[2].grad[8 * rank : 8 * rank + 8],
            )
            for found, wanted in zip((a.grad, one.grad, two.grad), grads, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-2)


@on_ranks(3)
@pytest.mark.parametrize("uneven", [False, True])
def test_what_is_gathered_and_several_b(uneven: bool) -> None:
    """Several b, what is gathered, and entries of several rows."""
    size, rank = dist.get_world_size(), dist.get_rank()
    bs = [torch.randn(16, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    with clocked("shard_p2p"):
        for seed, entries in enumerate((*(size * shard for shard in OWN), 101 * size - uneven, 102 * size - uneven)):
            whole = torch.randn(entries, 3, 16, generator=torch.Generator().manual_seed(seed))
            a = torch.chunk(whole, size)[rank]
            outs, gathered = weft.all_gather_matmul(a, bs, rows=entries, return_gathered=True)
            assert torch.equal(gathered, whole)
            for out, b in zip(outs, bs, strict=True):
                torch.testing.assert_close(out, whole @ b, rtol=1e-4, atol=1e-4)
        assert len(_programs()) == len(OWN) + 1


@on_ranks(2)
def test_where_nothing_is_summed() -> None:
    """K is 0, and what is gathered has no columns."""
    size = dist.get_world_size()
    with clocked("shard_p2p"):
        for shard in (*OWN, 101, 101):
            out, gathered = weft.all_gather_matmul(torch.ones(shard, 0), torch.ones(0, 8), return_gathered=True)
            assert out.eq(0).all()
            assert (out.shape, gathered.shape) == ((shard * size, 8), (shard * size, 0))


def _no_room() -> tuple[str, float]:
    """Rank 1 has no room for the rows that are added; what each rank is told, and after how long."""
    size = dist.get_world_size()
    with clocked("shard_p2p"), pytest.MonkeyPatch.context() as patch:
        for seed, shard in enumerate((*OWN, 101)):
            check_gather(shard * size, 24, 16, DTYPE, "auto", seed)
        if dist.get_rank() == 1:

            def full(*given: Any, **options: Any) -> torch.Tensor:
                raise torch.OutOfMemoryError("no room")

            patch.setattr(tuner, "_pad_pieces", full)
        begun = time.monotonic()
        with pytest.raises((torch.OutOfMemoryError, WeftError)) as caught:
            check_gather(102 * size, 24, 16, DTYPE, "auto", 3)
        return f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - begun


@pytest.mark.ranks
def test_a_rank_without_room_is_told_of(ranks: RankFixture) -> None:
    (first, seconds), (second, _) = ranks(2).run(_no_room)
    assert first.startswith("PeerLost: rank 1 failed: no room")
    assert second == "OutOfMemoryError: no room"
    assert seconds < 15, "before the bound of waits, which is 20 s"


def _gather(shard: int, seed: int) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.randn(shard * size, 16, generator=torch.Generator().manual_seed(seed))
    b = torch.randn(16, 8, generator=torch.Generator().manual_seed(rank))
    dist.barrier()  # programs of CPUs share their buffers
    torch.testing.assert_close(weft.all_gather_matmul(whole.chunk(size)[rank], b), whole @ b, rtol=1e-4, atol=1e-4)


def _captured() -> list[int]:
    """A padded call can be captured after one call."""
    size = dist.get_world_size()
    with fake_gpu() as capture, clocked("shard_p2p"):
        for seed, shard in enumerate((*OWN, 101)):
            _gather(shard, seed)
        capture.on = True
        _gather(101, 9)
        capture.on = False
        return [rows // size for rows in _programs()]


@pytest.mark.ranks
def test_a_padded_call_can_be_captured(ranks: RankFixture) -> None:
    assert ranks(2).run(_captured) == [sorted((*OWN, 104))] * 2


def _likes() -> tuple[list[tuple[int, tuple[int, ...], bool]], int]:
    """Of the choices for buckets: rows of a shard, the row counts that were measured in their place, whether any was."""
    size = dist.get_world_size()
    with clocked("shard_p2p"):
        for seed, shard in enumerate((*OWN, 97, 105, 120, 250, 240, 400)):
            _gather(shard, seed)
        found = [(choice.problem.m // size, choice.like, bool(choice.measurements)) for choice in weft.choices()[OWN_COUNTS:]]
        return found, len(weft.choices())


@pytest.mark.ranks
def test_one_bucket_of_each_doubling_is_measured(ranks: RankFixture) -> None:
    """64 to 127 and 128 to 255 rows of a shard were measured by the row counts that have programs of their own."""
    for found, _ in ranks(2).run(_likes):
        like = [(104, (128,), False), (112, (128,), False), (120, (128,), False), (256, (), True), (240, (384,), False)]
        assert found == [*like, (416, (512,), False)]


def _other_counts() -> str:
    """New counts of one step, another one on each rank."""
    with fake_gpu(), clocked("shard_p2p"):
        for seed, shard in enumerate((*OWN, 97)):
            _gather(shard, seed)
        dist.barrier()
        b = torch.ones(16, 8)
        a = torch.ones(98 + dist.get_rank(), 16)
        try:
            for _ in range(2000):
                weft.all_gather_matmul(a, b)
        except WeftError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing noticed"


@pytest.mark.ranks
def test_row_counts_that_differ_in_one_bucket_are_named(ranks: RankFixture) -> None:
    messages = ranks(2).run(_other_counts)
    assert any("RankMismatch" in text and "rank 0 has 196, rank 1 has 198" in text for text in messages), messages


def _bound_in(rounds: Iterable[Iterable[int]], gpu: bool) -> list[int]:
    """Programs that are bound in each round of calls, each given by a shard's rows."""
    made: list[int] = []
    bind = Programs._bind

    def noted(self: Programs, schedule: weft.schedule.Schedule, device: torch.device) -> object:
        made[-1] += 1
        return bind(self, schedule, device)

    with fake_gpu() if gpu else nullcontext(), clocked("shard_p2p"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "KNOWN_CALLS", 16)
        for seed, shard in enumerate(OWN):
            _gather(shard, seed)
        patch.setattr(Programs, "_bind", noted)
        for seed, shards in enumerate(rounds):
            made.append(0)
            for shard in shards:
                _gather(shard, seed)
        state = GROUPS.state(dist.group.WORLD.group_name)  # type: ignore[union-attr]
        assert len(state._known) <= 16
    return made


@pytest.mark.ranks
@pytest.mark.parametrize("gpu", [True, False])
def test_row_counts_that_come_back_bind_nothing(ranks: RankFixture, gpu: bool) -> None:
    """More of them than calls are known."""
    rounds = [range(97, 128)] * 3
    for made in ranks(2).run(_bound_in, rounds, gpu):
        assert made == [4, 0, 0]


_COLUMNS = {17: (9, 8), 18: (9, 9)}


@on_ranks(2)
def test_a_step_of_one_weight_serves_no_other() -> None:
    """Rank 0 has as many columns of both; no row count is used with both."""
    rank = dist.get_rank()
    with fake_gpu(), clocked("shard_p2p"):
        for n, shard in (
            *((17, shard) for shard in OWN),
            *((18, shard + 1) for shard in OWN),
            (18, 100),
            (17, 97),
            (17, 98),
            (18, 99),
            (18, 99),
        ):
            dist.barrier()
            whole = torch.randn(2 * shard, 16, generator=torch.Generator().manual_seed(shard))
            b = torch.randn(16, _COLUMNS[n][rank], generator=torch.Generator().manual_seed(rank))
            torch.testing.assert_close(weft.all_gather_matmul(whole.chunk(2)[rank], b), whole @ b, rtol=1e-4, atol=1e-4)
