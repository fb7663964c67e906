"""splits on the device: the all-to-all operators with rows in any numbers, on CPU ranks and as interpreted kernels."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from ragged_work import PATTERNS, Case, counts_of, round_trip
from rank_pools import interpreted_ranks, on_ranks

import weft
from weft.comm import shared_memory
from weft.core.errors import WeftError
from weft.core.schedule import ShareCounts
from weft.runtime.bound import BoundProgram
from weft.runtime.groups import GROUPS
from weft.runtime.programs import OVERHEAD_BYTES
from weft.runtime.ragged_kernels import RaggedKernels
from weft.runtime.ranks import Ranks

pytestmark = pytest.mark.ranks


def _patterns(dtype: torch.dtype, k: int, n: int, experts_of: tuple[int, ...] = (1, 3)) -> None:
    for experts in experts_of:
        for seed, pattern in enumerate(PATTERNS if dtype == torch.float32 else PATTERNS[:4]):  # kernels are slow here
            round_trip(pattern, experts, k, n, dtype, seed)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_on_hosts(ranks: RankFixture, world_size: int) -> None:
    ranks(world_size).run(_patterns, torch.float32, 7, 5)


interpreted = interpreted_ranks([2], slow=[4])


@on_ranks(pool="interpreted")
def test_kernels_interpreted() -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    _patterns(torch.float16, 40, 24, (3,) if dist.get_world_size() == 2 else (1,))
    if dist.get_world_size() == 2:
        round_trip("random", 2, 24, 40, torch.float16, 1, most=45)  # segments of more than one tile


def _late(calls: int) -> None:
    """New data each call, each rank late in turn."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for call in range(calls):
        late_s = 0.005 if call % (size + 1) == rank else 0.0
        round_trip(PATTERNS[call % 4], 2, 24, 24, torch.float16, 10 + call, late_s=late_s)


def test_calls_with_a_late_rank(interpreted: Ranks) -> None:
    interpreted.run(_late, 5)


def _gradients(dtype: torch.dtype) -> None:
    """Against autograd of the plain program on one rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    counts = counts_of("random", 2, 3)
    counts[:, :, 1] += torch.arange(size)[:, None]
    case = Case(counts, 16, 8, torch.float64, 3)
    height = int(counts.sum((1, 2)).max()) + 4
    case.rows = [torch.cat([rows, rows.new_zeros(height - rows.shape[0], 16)]) for rows in case.rows]
    for x in (*case.rows, *case.b):
        x.copy_(x.to(dtype))  # what both sides begin with
        x.requires_grad_()
    case_b = case.b
    out = []
    for dst in range(size):
        parts = [(e, _part(case, src, dst, e)) for e in range(2) for src in range(size)]
        out.append(torch.cat([rows @ case_b[dst][e] for e, rows in parts]))
    sum(((o * o).sum() for o in out), torch.zeros(())).backward()
    a, b = (t.detach().to(dtype).requires_grad_() for t in (case.rows[rank], case_b[rank]))
    got, _ = weft.all_to_all_matmul(a, b, splits=counts[rank], max_rows=size * 2 * 14)
    (got * got).sum().backward()
    tolerance = {"rtol": 2e-2, "atol": 2e-1} if dtype == torch.float16 else {"rtol": 1e-4, "atol": 1e-4}
    for mine, wanted in ((a, case.rows[rank]), (b, case_b[rank])):
        torch.testing.assert_close(mine.grad.double(), wanted.grad, **tolerance)  # type: ignore[union-attr, arg-type]
    _combine_gradients(dtype, counts, tolerance)


def _part(case: Case, src: int, dst: int, expert: int) -> torch.Tensor:
    flat = case.counts[src].flatten()
    at = dst * case.experts + expert
    first = int(flat[:at].sum())
    return case.rows[src][first : first + int(flat[at])]


def _combine_gradients(dtype: torch.dtype, counts: torch.Tensor, tolerance: dict[str, float]) -> None:
    """A sum of squares knows no order: rows need not be told apart by where they land."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    height = int(counts.sum((1, 2)).max()) + 1
    drawn = torch.randn(height, 16, generator=generator), torch.randn(2, 16, 8, generator=generator) / 4
    a, b = (t.to(dtype).requires_grad_() for t in drawn)
    wide, weight = (t.detach().double().requires_grad_() for t in (a, b))
    splits = counts[rank].t().contiguous()
    ends = splits.sum(1).cumsum(0).tolist()
    plain = torch.cat([wide[: ends[0]] @ weight[0], wide[ends[0] : ends[1]] @ weight[1]])
    (plain * plain).sum().backward()
    got, _ = weft.matmul_all_to_all(a, b, splits=splits, max_rows=200)
    (got * got).sum().backward()
    for mine, wanted in ((a, wide), (b, weight)):
        torch.testing.assert_close(mine.grad.double(), wanted.grad, **tolerance)  # type: ignore[union-attr, arg-type]


def test_gradients(ranks: RankFixture) -> None:
    ranks(3).run(_gradients, torch.float32)


def test_gradients_interpreted(interpreted: Ranks) -> None:
    interpreted.run(_gradients, torch.float16)


@on_ranks(2)
def test_compiles_as_one_graph() -> None:
    rank = dist.get_rank()
    case = Case(counts_of("random", 2, 4), 8, 16, torch.float32, 4)
    splits = case.counts[rank]

    def layer(x: torch.Tensor, up: torch.Tensor, splits: torch.Tensor) -> torch.Tensor:
        hidden, counts = weft.all_to_all_matmul(x, up, splits=splits, max_rows=64)
        return weft.matmul_all_to_all(hidden.relu(), up.transpose(1, 2), splits=counts, max_rows=64)[0]

    height = max(rows.shape[0] for rows in case.rows)
    x = torch.cat([case.rows[rank], torch.zeros(height - case.rows[rank].shape[0], 8)])
    ours, theirs = ([t.clone().requires_grad_() for t in (x, case.b[rank])] for _ in range(2))
    torch.compile(layer, fullgraph=True, backend="aot_eager")(*ours, splits).square().sum().backward()
    layer(*theirs, splits).square().sum().backward()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, two.grad)


def _exchange() -> Any:
    """Of the one program that this rank's group has."""
    (program,) = _programs()
    return program.ragged.exchange  # type: ignore[union-attr]


def _programs() -> list[BoundProgram]:
    return GROUPS.state(dist.group.WORLD.group_name).bound()  # type: ignore[union-attr]


def _unmet(a: torch.Tensor, b: torch.Tensor, splits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A call of the one program that there is, without the meeting that CPU ranks hold before each: as on GPUs."""
    (program,) = _programs()
    program.rank_group.check_usable()
    with program.rank_group.fail_group_on_error():
        found = program.run({"a": (a,), "b": (b[None],), "splits": (splits[:, None],)})
    return found["out"][0], found["counts"][0]


def _run_until_lost(before: int, splits: torch.Tensor, most: int) -> list[str]:
    """Call until a call raises an error on this rank, and return the outcome of each call. Then all ranks close the group.

    before: rank 1 enters this call only after the wait of rank 0 for it has ended. Kernels bound a wait by a number of polls,
        which take any time. The number is low only after the first call, in which each rank may be late.
    """
    weft.close()
    size = dist.get_world_size()
    a, b = torch.ones(24, 8, dtype=torch.float16), torch.eye(8, dtype=torch.float16)
    outcomes = []
    for call in range(8):
        if call == 1:
            _exchange().tries = 500
        if call == before and dist.get_rank() == 1:
            dist.barrier()
        try:
            if call == 0:
                out, counts = weft.all_to_all_matmul(a, b, splits=splits, max_rows=most)
            else:
                out, counts = _unmet((call + 1.0) * a, b, splits)
        except (ValueError, WeftError) as error:
            outcomes.append(f"{call}: {type(error).__name__}: {error}")
            break
        finally:
            if call == before and dist.get_rank() == 0:
                dist.barrier()
        arrived = int(counts.sum())
        mine = torch.equal(out[:arrived], torch.full((arrived, 8), call + 1.0, dtype=torch.float16))
        what = "NaN" if bool(out.isnan().any()) else "right" if mine else "wrong"
        outcomes.append(f"{call}: {what}, {arrived} rows")
    dist.barrier()
    weft.close()
    splits = torch.full((size,), 24 // size, dtype=torch.int32)
    again, counts = weft.all_to_all_matmul(a, b, splits=splits, max_rows=24)
    assert torch.equal(again, torch.ones(24, 8, dtype=torch.float16))
    weft.close()
    return outcomes


pairs = pytest.mark.parametrize("interpreted", [2], indirect=True)


def _same_of_both(interpreted: Ranks, splits: list[int], most: int, rows: tuple[int, int], says: str) -> None:
    """Both ranks make one call, whose results have so many rows, and raise the same ValueError in the next one."""
    outcomes = interpreted.run(_run_until_lost, -1, torch.tensor(splits, dtype=torch.int32), most)
    for rank, (first, second) in enumerate(outcomes):
        assert first == f"0: right, {rows[rank]} rows"
        assert second == f"1: ValueError: {says}"


@pairs
def test_what_does_not_fit_is_left_out_and_ends_the_calls_of_all_ranks(interpreted: Ranks) -> None:
    """A rank that went on, or tried again, would take what the others send in their next call."""
    says = "max_rows is 20, but 32 rows arrived at rank 0 in an earlier call; 12 of them were dropped"
    _same_of_both(interpreted, [16, 0], 20, (20, 0), says)


@pairs
def test_splits_that_a_rank_has_no_rows_for_end_the_calls_of_all_ranks(interpreted: Ranks) -> None:
    says = "splits of an earlier call add up to 30 on rank 0, but a had 24 rows; 6 were not sent"
    _same_of_both(interpreted, [15, 15], 60, (30, 18), says)


@pairs
def test_the_second_rank_is_named_on_both(interpreted: Ranks) -> None:
    says = "max_rows is 20, but 24 rows arrived at rank 1 in an earlier call; 4 of them were dropped"
    _same_of_both(interpreted, [4, 12], 20, (8, 20), says)


@on_ranks(pool="interpreted")
@pairs
def test_own_rows_that_do_not_fit_are_written_nowhere() -> None:
    """A combine in which a rank has more rows for itself than fit into its result, with other memory below that."""
    weft.close()
    size, rank, room = dist.get_world_size(), dist.get_rank(), 12
    a, b = torch.ones(24, 8, dtype=torch.float16), torch.eye(8, dtype=torch.float16)
    weft.matmul_all_to_all(a, b, splits=torch.full((size,), 4, dtype=torch.int32), max_rows=room)
    (program,) = _programs()
    memory, counts = torch.full((24, 8), 7.0, dtype=torch.float16), torch.zeros(size, 1, dtype=torch.int32)
    splits = torch.tensor([[16 if other == rank else 0] for other in range(size)], dtype=torch.int32)
    inputs = {"a": (a,), "b": (b[None],), "splits": (splits.t(),)}
    program.run(inputs, outputs={"out": [memory[:room]], "counts": [counts]})
    assert torch.equal(memory[:room], torch.ones(room, 8, dtype=torch.float16))
    assert torch.equal(memory[room:], torch.full((24 - room, 8), 7.0, dtype=torch.float16))
    dist.barrier()
    weft.close()


@pairs
def test_a_number_of_rows_below_zero_is_none_and_told(interpreted: Ranks) -> None:
    says = "splits has -1 on rank 0 in an earlier call; it must be numbers of rows, 0 or more"
    _same_of_both(interpreted, [-1, 8], 24, (0, 16), says)


def _synchronized() -> str:
    """What weft.synchronize says of a call in which rows did not fit; then all go on."""
    weft.close()
    a, b = torch.ones(24, 8, dtype=torch.float16), torch.eye(8, dtype=torch.float16)
    splits = torch.tensor([12, 0], dtype=torch.int32)
    weft.all_to_all_matmul(a, b, splits=splits, max_rows=20)
    dist.barrier()
    said = "right"
    try:
        weft.synchronize()
    except ValueError as error:
        said = str(error)
    dist.barrier()
    weft.close()
    return said


@pairs
def test_synchronize_says_what_a_call_has_dropped(interpreted: Ranks) -> None:
    says = "max_rows is 20, but 24 rows arrived at rank 0 in an earlier call; 4 of them were dropped"
    assert interpreted.run(_synchronized) == [says, says]


def _after_the_first() -> list[str]:
    """Rank 1 calls once rank 0 has raised that rows did not fit, so that the group has failed. What both raise, then again."""
    weft.close()
    a, b = torch.ones(24, 8, dtype=torch.float16), torch.eye(8, dtype=torch.float16)
    splits = torch.tensor([16, 0], dtype=torch.int32)
    weft.all_to_all_matmul(a, b, splits=splits, max_rows=20)
    outcomes = []
    for _ in range(2):
        if dist.get_rank():
            dist.barrier()
        with pytest.raises((ValueError, WeftError)) as caught:
            _unmet(a, b, splits) if dist.get_rank() == 0 else weft.all_to_all_matmul(a, b, splits=splits, max_rows=20)
        if dist.get_rank() == 0:
            dist.barrier()
        outcomes.append(f"{type(caught.value).__name__}: {caught.value}")
    dist.barrier()
    weft.close()
    return outcomes


@pairs
def test_a_rank_whose_peer_was_faster_raises_the_same(interpreted: Ranks) -> None:
    (first, failed), (second, peers) = interpreted.run(_after_the_first)
    assert first == "ValueError: max_rows is 20, but 32 rows arrived at rank 0 in an earlier call; 12 of them were dropped"
    assert second == first
    assert "this process group has failed" in failed
    assert "this process group has failed" in peers


@on_ranks(pool="interpreted")
@pairs
def test_whatever_the_strides() -> None:
    """Of dimensions of one, where torch lets a stride be anything, and of rows that are all one."""
    splits = torch.zeros(dist.get_world_size(), dtype=torch.int32)
    splits[dist.get_rank()] = 1
    a = torch.randn(3, 17).half()[1:2, :16]
    whole, one = torch.randn(16, 24).half(), torch.randn(1, 24).half()
    for b in (whole[None], whole[..., None].permute(2, 0, 1), whole[..., None].movedim(-1, 0), one.expand(16, 24)[None]):
        for operator in (weft.all_to_all_matmul, weft.matmul_all_to_all):
            out, _ = operator(a, b, splits=splits, max_rows=16)
            torch.testing.assert_close(out[:1], a @ b[0], rtol=1e-2, atol=5e-2)


def _many_calls() -> list[list[int]]:
    """As after 2^31 - 1 calls. The number of a call is then past what 32 bits hold, and flags have wrapped around."""
    size = dist.get_world_size()
    a, eye = torch.ones(2 * size, 8).half(), torch.eye(8).half()
    splits, found = torch.full((size,), 2, dtype=torch.int32), list[list[int]]()
    weft.close()
    for call in range(4):
        out, _ = weft.all_to_all_matmul((1 + call) * a, eye, splits=splits, max_rows=4 * size)
        assert (out[: 2 * size] == 1 + call).all()
        exchange = _exchange()
        dist.barrier()
        if call == 0:
            exchange.calls.fill_(2**31 - 1)
            exchange.notified.local.fill_(2**31 - 1)
            dist.barrier()
        found.append(exchange.calls.tolist())
    weft.close()
    return found


@pairs
def test_after_two_thousand_million_calls(interpreted: Ranks) -> None:
    for found in interpreted.run(_many_calls):
        assert found[1:] == [[2**31], [2**31 + 1], [2**31 + 2]]


@pairs
def test_a_late_rank_gets_no_rows_of_another_call(interpreted: Ranks) -> None:
    """Who did not wait for its counts would send to places that it still reads, or by counts of another call."""
    first, second = interpreted.run(_run_until_lost, 2, torch.tensor([10, 10], dtype=torch.int32), 24)
    for outcomes in (first, second):
        assert outcomes[:2] == ["0: right, 20 rows", "1: right, 20 rows"]
        # What the call returns to which the peer did not come in time is no result; who comes next is told.
        late = [text for text in outcomes[2:-1] if "20 rows" not in text]
        assert all("NaN" in text for text in late), outcomes
        assert not any("right" in text and "20 rows" in text for text in outcomes[3:])
        assert "WaitTimeout" in outcomes[-1] or "PeerLost" in outcomes[-1] or "broken" in outcomes[-1]


def _without_end() -> list[list[int]]:
    """Splits that nobody filled, whose sum wraps around: no row past a's end is read."""
    a, b = torch.ones(32, 8, dtype=torch.float16), torch.eye(8, dtype=torch.float16).repeat(2, 1, 1)
    splits = torch.tensor([[1 << 62, 1 << 62], [1 << 62, 100]])
    _, counts = weft.all_to_all_matmul(a, b, splits=splits, max_rows=256)
    dist.barrier()
    weft.close()
    return counts.tolist()  # type: ignore[no-any-return]


@pairs
def test_splits_past_any_number_of_rows(interpreted: Ranks) -> None:
    assert interpreted.run(_without_end) == [[[32, 32], [0, 0]], [[0, 0], [0, 0]]]


def _nothing_to_multiply(dtype: torch.dtype) -> None:
    a, b, splits = torch.ones(8, 0, dtype=dtype), torch.ones(1, 0, 16, dtype=dtype), torch.full((2, 1), 4, dtype=torch.int32)
    out, counts, received = weft.all_to_all_matmul(a, b, splits=splits, max_rows=12, return_received=True)
    assert torch.equal(out, torch.zeros(12, 16, dtype=dtype))
    assert counts.tolist() == [[4, 4]]
    assert received.shape == (12, 0)
    home, counts = weft.matmul_all_to_all(a, b, splits=splits.t().contiguous(), max_rows=12)
    assert torch.equal(home, torch.zeros(12, 16, dtype=dtype))
    assert counts.tolist() == [[4], [4]]
    weft.close()


@pairs
def test_no_columns_to_multiply(interpreted: Ranks) -> None:
    interpreted.run(_nothing_to_multiply, torch.float16)


def test_no_columns_to_multiply_on_hosts(ranks: RankFixture) -> None:
    ranks(2).run(_nothing_to_multiply, torch.float32)


@on_ranks(pool="interpreted")
@pairs
@pytest.mark.parametrize("family", ["fused", "sequential"])
def test_rows_are_waited_for_where_there_are_no_columns(family: str) -> None:
    """Rank 1 pushes its rows long after its counts. Rank 0 has the counts of all then, and no column to multiply, so no tile
    waits. In each call other rows arrive."""
    weft.close()
    rank, size = dist.get_rank(), dist.get_world_size()
    b, splits = torch.ones(8, 0, dtype=torch.float16), torch.full((size,), 4, dtype=torch.int32)
    kernels: Any = RaggedKernels
    plain = kernels.launch

    def late(self: Any, step: Any, *rest: Any) -> None:
        time.sleep(1.0 * (rank == 1 and not isinstance(step, ShareCounts)))
        plain(self, step, *rest)

    with mock.patch.object(kernels, "launch", late):
        for call in range(3):
            mine = torch.full((4 * size, 8), 10.0 * call + rank, dtype=torch.float16)
            found = weft.all_to_all_matmul(mine, b, splits=splits, max_rows=8, return_received=True, schedule=family)
            wanted = torch.tensor([10.0 * call + sender for sender in range(size)]).repeat_interleave(4)
            assert torch.equal(found[2][:, 0].float(), wanted), (call, found[2][:, 0])
    weft.close()


@on_ranks(pool="interpreted")
def test_as_many_signals_as_are_waited_for() -> None:
    """An empty segment lies between others within a tile, and is told of by nobody."""
    weft.close()
    size, eye = dist.get_world_size(), torch.eye(8, dtype=torch.float16)
    splits = torch.full((size,), 5, dtype=torch.int32)
    splits[1] = 0
    for _ in range(2):
        there, counts = weft.all_to_all_matmul(torch.ones(5 * size, 8, dtype=torch.float16), eye, splits=splits, max_rows=40)
        weft.matmul_all_to_all(there, eye, splits=counts, max_rows=40)
        weft.matmul_all_to_all(there, eye, splits=splits, max_rows=40)
    dist.barrier()
    assert len(_programs()) == 2
    for program in _programs():
        exchange = program.ragged.exchange  # type: ignore[union-attr]
        assert torch.equal(exchange.arrived.local, exchange.goals)


@on_ranks(pool="interpreted")
@pairs
def test_products_have_the_room_of_the_first_call() -> None:
    """A first call with few rows leaves room for as many as max_rows; a later a may not have more."""
    weft.close()
    eye, splits = torch.eye(8, dtype=torch.float16), torch.zeros(dist.get_world_size(), dtype=torch.int32)
    for rows in (3, 20, 11):
        weft.matmul_all_to_all(torch.ones(rows, 8, dtype=torch.float16), eye, splits=splits, max_rows=24)
    (program,) = _programs()
    assert program.ragged is not None
    with pytest.raises(ValueError, match=r"a has 25 rows, but the first call with max_rows=24 reserved memory for 24; "):
        weft.matmul_all_to_all(torch.ones(25, 8, dtype=torch.float16), eye, splits=splits, max_rows=24)
    dist.barrier()
    weft.close()


def _changing() -> list[tuple[int, ...]]:
    """Calls with other numbers of rows each, and memory for two programs: the numbers of rows of those that are bound."""
    weft.close()
    size, rank, found = dist.get_world_size(), dist.get_rank(), []
    splits, eye = torch.ones(size, dtype=torch.int32), torch.eye(8, dtype=torch.float16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_PROGRAM_MEMORY_GB", str(2.5 * OVERHEAD_BYTES / 1e9))
        for step, most in enumerate((8, 16, 24, 8, 8)):
            a = torch.full((size, 8), 10.0 * rank + step, dtype=torch.float16)
            out, _ = weft.all_to_all_matmul(a, eye, splits=splits, max_rows=most)
            wanted = 10.0 * torch.arange(size) + step
            assert torch.equal(out[:size], wanted.half()[:, None].expand(size, 8))
            found.append(tuple(program.schedule.problem.m for program in _programs()))
        weft.close()
    return found


@pairs
def test_numbers_of_rows_that_change_take_no_more_memory(interpreted: Ranks) -> None:
    assert set(map(tuple, interpreted.run(_changing))) == {((8,), (8, 16), (16, 24), (24, 8), (24, 8))}


@on_ranks(3)
def test_mistakes_are_told() -> None:
    size = dist.get_world_size()
    a, b, splits = torch.ones(6, 4), torch.ones(2, 4, 3), torch.zeros(size, 2, dtype=torch.int64)
    calls: list[tuple[dict[str, Any], str]] = [
        ({"splits": splits[0]}, r"splits is \[2\]; for this b and group it must be \(3, 2\) or \(6,\)"),
        ({"splits": splits.float()}, "splits is torch.float32 on cpu; it must be int32 or int64 on cpu"),
        ({"max_rows": None}, "max_rows is None; with splits it must be the most rows that may arrive"),
        ({"schedule": "flag_gated"}, "schedule is 'flag_gated'; with splits use auto, planned, sequential, fused, or a weft"),
        ({"splits": None, "b": b[0]}, "max_rows is 9, but splits is None"),
        ({"a": a[None]}, r"a is \[1, 6, 4\]; with splits it must be a matrix"),
        ({"b": b[:0]}, r"b is \[0, 4, 3\]; with splits it must be"),
    ]
    for change, message in calls:
        with pytest.raises(ValueError, match=message):
            weft.all_to_all_matmul(**{"a": a, "b": b, "splits": splits, "max_rows": 9, **change})
    with pytest.raises(ValueError, match=r"max_rows is 2, but \d+ rows arrived|splits add up to"):
        weft.all_to_all_matmul(a, b, splits=splits + 1, max_rows=2)


def _lost() -> str:
    """Rank 1 stays away: the wait ends at its bound, of a second here, and a later call raises."""
    from weft.runtime.host_resources import _LOOKS_PER_S

    weft.close()
    a, b = torch.ones(8, 8, dtype=torch.float16), torch.eye(8, dtype=torch.float16)
    splits = torch.full((dist.get_world_size(),), 2)
    weft.all_to_all_matmul(a, b, splits=splits, max_rows=64)
    assert _exchange().tries == float(os.environ["WEFT_TIMEOUT_S"]) * _LOOKS_PER_S
    _exchange().tries = _LOOKS_PER_S // 3
    message = ""
    if dist.get_rank() == 0:
        start = time.monotonic()
        try:
            for _ in range(3):
                _unmet(a, b, splits)
        except weft.WeftError as error:
            message = f"{type(error).__name__}: {error}"
        assert time.monotonic() - start < 60
    dist.barrier()
    weft.close()
    return message


@pairs
def test_a_peer_that_does_not_come_is_told_of(interpreted: Ranks) -> None:
    assert interpreted.run(_lost, timeout_s=90)[0].startswith("WaitTimeout: rank 0: counts of rank 1: ")


def _without_room(lacks: str) -> list[str]:
    """Rank 1 has no room for a program's memory: of its own, or shared. What each call raises."""
    from weft.runtime import ragged_kernels

    weft.close()
    error = {"own": torch.OutOfMemoryError("no room"), "shared": ValueError("no room")}[lacks]
    place = (ragged_kernels, "RaggedExchange") if lacks == "own" else (shared_memory.SharedSegment, "create")
    a, b, splits = torch.ones(8, 16).half(), torch.ones(16, 16).half(), torch.full((dist.get_world_size(),), 2)
    weft.all_to_all_matmul(torch.ones(4, 4), torch.ones(4, 4))  # the group is there
    outcomes = []
    for number in range(2):
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1 and not number:
                patch.setattr(*place, mock.Mock(side_effect=error))
            try:
                weft.all_to_all_matmul(a, b, splits=splits, max_rows=16)
            except Exception as raised:
                outcomes.append(f"{type(raised).__name__}: {raised}")
    weft.close()
    out, counts = weft.all_to_all_matmul(a, b, splits=splits, max_rows=16)
    assert out[: int(counts.sum())].eq(16).all()
    return outcomes


@pytest.mark.parametrize("lacks", ["own", "shared"])
def test_a_rank_without_room_for_a_program_is_told_of(interpreted: Ranks, lacks: str) -> None:
    outcomes = interpreted.run(_without_room, lacks)
    kind = {"own": "OutOfMemoryError", "shared": "ValueError"}[lacks]
    for rank, (first, second) in enumerate(outcomes):
        assert first == f"{kind}: no room" if rank == 1 else first.startswith("PeerLost: ") and first.endswith("no room"), (
            outcomes
        )
        assert "this process group has failed" in second
        assert "call weft.close(group) on every rank" in second
