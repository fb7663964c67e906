"""Row counts that come and go: calls by the program of a few rows more give what they would give by their own."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from fake_gpu import fake_gpu
from rank_work import bound, check_all_reduce, check_gather, check_scatter, here
from timed_trials import trials_by_a_clock

import weft
from weft.comm.rank_group import RankGroup
from weft.core.errors import WeftError
from weft.core.problem import COLUMN_OPS, ColumnProblem, Op, Problem
from weft.runtime import groups, widened
from weft.runtime.groups import GROUPS, GroupState
from weft.runtime.widened import Widened, serves, wider
from weft.schedules import parse

DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32


def _problem(op: Op, m: int, world_size: int = 4, **options: Any) -> Problem:
    return Problem(op=op, m=m, n=64, k=64, world_size=world_size, **options)


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_to_all", "all_to_all_matmul"])
def test_a_scale_of_shards(op: Op) -> None:
    """At most an eighth more; each of its counts is its own; every rank's shard has as many rows."""
    found = set()
    for m in range(1, 4096):
        wide = wider(_problem(op, m))
        if wide is None:
            found.add(m)
            continue
        assert m < wide.m <= -(-m // 4) * 4 * 1.125
        assert wide.m % 4 == 0
        assert wider(wide) is None
        found.add(wide.m)
    assert len(found) < 64 + 4 * 8 * 7


def test_what_has_no_wider_program() -> None:
    assert wider(_problem("matmul_all_reduce", 17)) == _problem("matmul_all_reduce", 18)
    assert wider(_problem("matmul_all_reduce", 16)) is None
    assert wider(_problem("matmul_all_reduce", 9)) is None, "rows are not cut by rank"
    for op in COLUMN_OPS:
        columns = ColumnProblem(op=op, m=1000, n=64, k=64, world_size=4)
        assert wider(columns) is None
        assert not serves(columns, 999)
    assert wider(_problem("all_gather_matmul", 0)) is None
    assert wider(_problem("all_gather_matmul", 1000, 4, nodes=(2, 2))) is None
    assert wider(_problem("all_gather_matmul", 3 * 1000, 4, row_multiple=3)) == _problem(
        "all_gather_matmul", 3 * 1024, 4, row_multiple=3
    )


def test_whom_a_program_serves() -> None:
    program = _problem("all_gather_matmul", 416)
    assert [rows for rows in range(1, 500) if serves(program, rows)] == list(range(385, 417))
    measured = _problem("all_gather_matmul", 400)
    assert wider(_problem("all_gather_matmul", 390), at_most=400) == measured, "the next count on the scale is 416"
    assert wider(_problem("all_gather_matmul", 390), at_most=401) == program, "shards of 401 rows differ"
    assert [rows for rows in range(1, 500) if serves(measured, rows)] == list(range(385, 401))
    assert serves(_problem("all_gather_matmul", 413), 413)
    assert not serves(_problem("all_gather_matmul", 413), 412)
    assert serves(_problem("all_gather_matmul", 4), 1)
    assert not serves(_problem("all_gather_matmul", 4), 0)
    entries = _problem("all_gather_matmul", 3 * 416, row_multiple=3)
    assert [rows for rows in range(1, 1500) if serves(entries, rows)] == list(range(3 * 385, 3 * 416 + 1, 3))
    assert wider(_problem("all_gather_matmul", 3 * 390, row_multiple=3), at_most=3 * 401) == entries


def test_a_count_that_stays_gets_its_own_program() -> None:
    left = Widened({}, lambda problem: None)
    assert left.may(100)
    for call in range(widened.CALLS):
        assert left.may(100)
        left.used(100, "alike")
        left.used(1 + call % (widened.RECENT - 1), "alike")
        left.used(call, "others")
    assert not left.may(100)
    assert left.may(1)
    for other in range(widened.RECENT):
        left.used(other, "alike")
    assert left.may(100), "so many others came that it is new again"


@contextmanager
def clocked(spec: str) -> Iterator[None]:
    """In a group that is new, `auto` finds that one schedule beats sequential."""
    weft.close()
    with trials_by_a_clock(parse(spec)[0], spec):
        yield
        weft.close()


def _programs() -> list[int]:
    state = GROUPS.state(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    return sorted({problem.m for problem, _, _ in state._programs.values()})


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


def changing(op: Op, spec: str, uneven: bool) -> tuple[list[int], list[int], list[int]]:
    """The row counts of programs: after two that were measured, after many in between, and after one that stayed."""
    size = dist.get_world_size()
    with clocked(spec), pytest.MonkeyPatch.context() as patch:
        patch.setattr(widened, "CALLS", 5)
        for seed, rows in enumerate((64 * size, 192 * size)):
            _call(op, rows, seed)
        measured = _programs()
        for seed, shard in enumerate(range(97, 104)):
            _call(op, shard * size - (1 if uneven else 0), seed)
        between = _programs()
        for seed in range(7):
            _call(op, 111 * size, seed)
        return measured, between, _programs()


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
        for measured, between, stayed in ranks(world_size).run(changing, op, spec, uneven):
            assert measured == [64 * world_size, 192 * world_size]
            step = 16 if op == "matmul_all_reduce" and world_size > 2 else 8
            assert len(between) <= len(measured) + 3, between
            assert all(rows % step == 0 for rows in between)
            assert 111 * world_size in stayed


def _gathered(uneven: bool) -> None:
    """Several b, what is gathered, and entries of several rows."""
    size, rank = dist.get_world_size(), dist.get_rank()
    bs = [torch.randn(16, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    with clocked("shard_p2p"):
        for seed, entries in enumerate((64 * size, 192 * size, 101 * size - uneven, 102 * size - uneven)):
            whole = torch.randn(entries, 3, 16, generator=torch.Generator().manual_seed(seed))
            a = torch.chunk(whole, size)[rank]
            outs, gathered = weft.all_gather_matmul(a, bs, rows=entries, return_gathered=True)
            assert torch.equal(gathered, whole)
            for out, b in zip(outs, bs, strict=True):
                torch.testing.assert_close(out, whole @ b, rtol=1e-4, atol=1e-4)
        assert len(_programs()) == 3


def _trained() -> None:
    """Gradients, and results that are changed in place."""
    size, rank = dist.get_world_size(), dist.get_rank()
    with clocked("shard_p2p"):
        for seed, rows in enumerate((64 * size, 192 * size, 101 * size, 102 * size)):
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


@pytest.mark.ranks
def test_in_training(ranks: RankFixture) -> None:
    ranks(2).run(_trained)


@pytest.mark.ranks
@pytest.mark.parametrize("uneven", [False, True])
def test_what_is_gathered_and_several_b(ranks: RankFixture, uneven: bool) -> None:
    ranks(3).run(_gathered, uneven)


def _near_the_most() -> list[int]:
    """Counts whose next one on the scale was not measured around: the most rows that were stand for it."""
    size = dist.get_world_size()
    with clocked("shard_p2p"):
        for seed, shard in enumerate((100, 250, *range(242, 250))):
            check_gather(shard * size, 24, 16, DTYPE, "auto", seed)
        return _programs()


@pytest.mark.ranks
def test_below_the_most_rows_that_were_measured(ranks: RankFixture) -> None:
    assert ranks(2).run(_near_the_most) == [[200, 500]] * 2


def _nothing_to_sum() -> None:
    """K is 0, and what is gathered has no columns."""
    size = dist.get_world_size()
    with clocked("shard_p2p"):
        for shard in (64, 192, 101, 101):
            out, gathered = weft.all_gather_matmul(torch.ones(shard, 0), torch.ones(0, 8), return_gathered=True)
            assert out.eq(0).all()
            assert (out.shape, gathered.shape) == ((shard * size, 8), (shard * size, 0))


@pytest.mark.ranks
def test_where_nothing_is_summed(ranks: RankFixture) -> None:
    ranks(2).run(_nothing_to_sum)


def _no_room() -> tuple[str, float]:
    """Rank 1 has no room for the rows that are added; what each rank is told, and after how long."""
    size = dist.get_world_size()
    with clocked("shard_p2p"), pytest.MonkeyPatch.context() as patch:
        for seed, shard in enumerate((64, 192, 101)):
            check_gather(shard * size, 24, 16, DTYPE, "auto", seed)
        if dist.get_rank() == 1:

            def full(*given: Any) -> torch.Tensor:
                raise torch.OutOfMemoryError("no room")

            patch.setattr(widened, "_spread", full)
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


def _captured(calls: int) -> list[int]:
    """After any number of calls a graph can be captured; by a program of its own once one was bound."""
    size = dist.get_world_size()
    with fake_gpu() as capture, clocked("shard_p2p"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(widened, "CALLS", 5)
        _gather(64, 0)
        _gather(192, 1)
        for seed in range(calls):
            _gather(101, seed)
        capture.on = True
        _gather(101, 9)
        capture.on = False
        return [rows // size for rows in _programs()]


@pytest.mark.ranks
@pytest.mark.parametrize("calls", [1, 4, 5, 6])
def test_a_graph_can_be_captured_at_any_time(ranks: RankFixture, calls: int) -> None:
    own = [101] if calls > 5 else []
    assert ranks(2).run(_captured, calls) == [[64, *own, 104, 192]] * 2


def _meetings(op: Op) -> list[int]:
    """Of ranks, in calls of row counts that are new, each given by a shard's rows."""
    size = dist.get_world_size()
    met: list[str] = []
    enter = RankGroup.enter

    def noted(self: RankGroup, text: str, *given: Any, **named: Any) -> tuple[int, ...]:
        met.append(text)
        return enter(self, text, *given, **named)

    found = []
    with fake_gpu(), clocked("shard_p2p"), pytest.MonkeyPatch.context() as patch:
        for seed, shard in enumerate((64, 192)):
            _call(op, shard * size, seed)
        patch.setattr(RankGroup, "enter", noted)
        for seed, shard in enumerate((97, 98, 104, 100, 98, 90, 99, 101, 103)):
            dist.barrier()  # programs of CPUs share their buffers
            before = len(met)
            _call(op, shard * size, seed)
            found.append(len(met) - before)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_to_all"])
def test_ranks_do_not_meet_for_a_new_count_on_a_known_step(ranks: RankFixture, op: Op) -> None:
    for first, *known, other, after_that, fourth, fifth in ranks(2).run(_meetings, op):
        assert first > 1, "its program is bound"
        assert known == [0, 0, 0, 0]
        assert other > 1, "another step's program is bound"
        assert after_that == 1, "what was bound may have changed what runs"
        assert fourth == fifth == 0


def _other_counts() -> str:
    """New counts of one step, another one on each rank."""
    with fake_gpu(), clocked("shard_p2p"):
        for seed, shard in enumerate((64, 192, 97)):
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
def test_new_counts_that_differ_are_told_apart(ranks: RankFixture) -> None:
    told = ranks(2).run(_other_counts)
    assert any("RankMismatch" in text and "rank 0 has 196, rank 1 has 198" in text for text in told), told


def _bound_in(rounds: Iterable[Iterable[int]], gpu: bool) -> list[int]:
    """Programs that are bound in each round of calls, each given by a shard's rows."""
    made: list[int] = []
    bind = GroupState._bind

    def noted(self: GroupState, schedule: weft.Schedule, device: torch.device) -> object:
        made[-1] += 1
        return bind(self, schedule, device)

    with fake_gpu() if gpu else nullcontext(), clocked("shard_p2p"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(widened, "CALLS", 5)
        patch.setattr(groups, "PROGRAMS_PER_GROUP", 12)
        patch.setattr(groups, "SITES_PER_GROUP", 16)
        patch.setattr(groups, "PROVED_AFTER", 10**6)
        _gather(64, 0)
        _gather(192, 1)
        patch.setattr(GroupState, "_bind", noted)
        for seed, shards in enumerate(rounds):
            made.append(0)
            for shard in shards:
                _gather(shard, seed)
        state = GROUPS.state(dist.group.WORLD.group_name)  # type: ignore[union-attr]
        assert len(state._sites) <= 16
        assert len(state._widened._left) <= widened.RECENT
    return made


@pytest.mark.ranks
@pytest.mark.parametrize("gpu", [True, False])
def test_counts_that_come_back_do_not_bind_each_time(ranks: RankFixture, gpu: bool) -> None:
    """More of them than programs are kept for, some called often at a time, as by the layers of a model."""
    rounds = [range(97, 128)] * 8
    for made in ranks(2).run(_bound_in, rounds, gpu):
        assert made == [4] + [0] * 7
    steps = [[shard] * 3 for shard in random.Random(1).choices(range(97, 128), k=60)]
    for made in ranks(2).run(_bound_in, steps, gpu):
        assert sum(made[30:]) <= 3, made


_COLUMNS = {17: (9, 8), 18: (9, 9)}


def _two_weights() -> None:
    """Rank 0 has as many columns of both; no row count is used with both."""
    rank = dist.get_rank()
    with fake_gpu(), clocked("shard_p2p"):
        for n, shard in ((17, 64), (17, 192), (18, 66), (18, 190), (18, 100), (17, 97), (17, 98), (18, 99), (18, 99)):
            dist.barrier()
            whole = torch.randn(2 * shard, 16, generator=torch.Generator().manual_seed(shard))
            b = torch.randn(16, _COLUMNS[n][rank], generator=torch.Generator().manual_seed(rank))
            torch.testing.assert_close(weft.all_gather_matmul(whole.chunk(2)[rank], b), whole @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.ranks
def test_a_step_of_one_weight_serves_no_other(ranks: RankFixture) -> None:
    ranks(2).run(_two_weights)
