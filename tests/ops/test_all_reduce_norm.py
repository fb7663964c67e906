"""matmul_all_reduce_norm: on real ranks step by step and as the interpreted kernel, its proof, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from launch_counts import counting
from rank_pools import interpreted_ranks
from rank_work import NORM_EPS, check_norm, check_sum_norm

import weft
from weft.checker import ScheduleError, check
from weft.core import codec
from weft.core.machine import load
from weft.core.problem import Problem
from weft.core.schedule import FusedCollective, Norm, Schedule, Step
from weft.perf import run
from weft.planner import plan
from weft.runtime.ranks import Ranks
from weft.schedules import build, names

FAMILIES = names("matmul_all_reduce")
PROBLEM = Problem(op="matmul_all_reduce", m=6, n=12, k=8, world_size=2, addends=("residual",), norm_eps=NORM_EPS)


def _every_family() -> None:
    for seed, name in enumerate(FAMILIES):
        for dtype in (torch.float32, torch.bfloat16):
            check_norm(7, 24, 16, dtype, name, seed, bias=bool(seed % 2), residual=bool(seed % 3))
            check_norm(7, 24, 16, dtype, name, seed)


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_family(ranks: RankFixture, size: int) -> None:
    ranks(size).run(_every_family)


interpreted = interpreted_ranks([2], slow=[3])


def _as_kernel(name: str) -> int:
    """Calls of new data with one and with several tiles of rows and of columns; how often the kernel ran."""
    from weft.runtime import fused_collective

    size = dist.get_world_size()
    with counting(fused_collective.FusedCollectiveKernel) as launches:
        for m, n in ((3, 40), (18, 17), (33, 70)):
            for seed in range(5):
                check_norm(m, n, 8 * size, torch.float16, name, seed, bias=bool(seed % 2))
    weft.close()
    return launches.count


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["one_shot", "two_shot", "sequential_stores"])
def test_the_kernel(interpreted: Ranks, name: str) -> None:
    assert set(interpreted.run(_as_kernel, name)) == {15}


def _sum_alone(name: str) -> int:
    """The same of a sum that is there already."""
    from weft.runtime import fused_collective

    with counting(fused_collective.FusedCollectiveKernel) as launches:
        for m, n in ((3, 40), (18, 17), (33, 70)):
            for seed in range(5):
                check_sum_norm(m, n, torch.float16, name, seed, bias=bool(seed % 2))
    weft.close()
    return launches.count


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["one_shot", "two_shot"])
def test_the_kernel_without_a_product(interpreted: Ranks, name: str) -> None:
    assert set(interpreted.run(_sum_alone, name)) == {15}


def _every_family_of_sums() -> None:
    for seed, name in enumerate(("sequential", "one_shot", "two_shot", "auto")):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            check_sum_norm(7, 24, dtype, name, seed, bias=bool(seed % 2), residual=bool(seed % 3))
            check_sum_norm(7, 24, dtype, name, seed)
            check_sum_norm(0, 24, dtype, name, seed)


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_family_of_sums(ranks: RankFixture, size: int) -> None:
    ranks(size).run(_every_family_of_sums)


def _sums_with_addends(name: str) -> int:
    """The owners' sums, with what is added; how many ran as kernels. Some shards are empty, and columns are of any number."""
    from weft.runtime import fused

    with counting(fused.FusedSum) as launches:
        for m, n in ((1, 40), (18, 17), (33, 72)):
            for seed in range(4):
                check_norm(m, n, 16, torch.float16, name, seed, bias=bool(seed % 2), residual=seed < 2)
    weft.close()
    return launches.count


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "parts"), [("token_split:1", 1), ("token_split:2", 2), ("hetero_unfused_1d:2", 1)])
def test_a_sum_with_addends_is_one_kernel(interpreted: Ranks, name: str, parts: int) -> None:
    """A rank without rows sums nothing."""
    for rank, found in enumerate(interpreted.run(_sums_with_addends, name)):
        assert found == 8 * parts + (4 if rank == 0 else 0)


def _long_rows(widest: int) -> None:
    """The kernel of a norm alone, with rows that fit a block and that do not, and with fewer blocks than rows."""
    from weft.kernels import norm as kernel

    kernel.WIDEST = widest
    for rows, n in ((1, 1), (3, 40), (5, 130), (0, 8), (20, 64)):
        src, weight, out = torch.randn(rows, n), torch.randn(1, n), torch.empty(rows, n)
        kernel.norm(src, weight, out, eps=NORM_EPS, sms=1)
        torch.testing.assert_close(out, torch.nn.functional.rms_norm(src, (n,), weight[0], NORM_EPS))


@pytest.mark.ranks
@pytest.mark.parametrize("widest", [32, 8192])
def test_the_kernel_of_a_norm_alone(interpreted: Ranks, widest: int) -> None:
    interpreted.run(_long_rows, widest)


def _zeros() -> None:
    """A row of zeros has squares of zero, which are words all the same; its norm is zero. NaN stays within its row."""
    a = torch.zeros(3, 8, dtype=torch.float16)
    a[1], a[2] = 1.0, float("nan")
    b, weight = torch.ones(8, 20, dtype=torch.float16), torch.ones(20, dtype=torch.float16)
    for name in ("one_shot", "sequential"):
        normed, r = weft.matmul_all_reduce_norm(a, b, None, weight, eps=1e-6, schedule=name)
        assert normed[0].eq(0).all()
        torch.testing.assert_close(normed[1], torch.ones(20, dtype=torch.float16))
        assert normed[2].isnan().all()
        assert r[2].isnan().all()
    weft.close()


@pytest.mark.ranks
def test_rows_of_zeros_and_of_nan(interpreted: Ranks) -> None:
    interpreted.run(_zeros)


def _shapes() -> None:
    """Any leading dimensions, none of M's rows, several a and b, and a compiled call."""
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    a, b = torch.randn(2, 3, 8), torch.randn(8, 16)
    residual, weight = torch.randn(2, 3, 16), torch.randn(16)
    mine = slice(rank * 8 // size, (rank + 1) * 8 // size)
    r = a @ b + residual
    for call in (weft.matmul_all_reduce_norm, torch.compile(weft.matmul_all_reduce_norm)):
        found = call(a[..., mine].contiguous(), b[mine], residual, weight, eps=NORM_EPS)
        assert isinstance(found, tuple)
        torch.testing.assert_close(found[1], r, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[0], torch.nn.functional.rms_norm(r, (16,), weight, NORM_EPS), rtol=1e-4, atol=1e-4)
    normed, none = weft.matmul_all_reduce_norm(a[:0, 0, mine], b[mine], residual[:0, 0], weight)
    assert normed.shape == none.shape == (0, 16)
    two, _ = weft.matmul_all_reduce_norm([a[..., mine]] * 2, [b[mine]] * 2, residual, weight, eps=NORM_EPS)
    wanted = torch.nn.functional.rms_norm(2 * (a @ b) + residual, (16,), weight, NORM_EPS)
    torch.testing.assert_close(two, wanted, rtol=1e-4, atol=1e-4)
    weft.close()


@pytest.mark.ranks
def test_shapes(ranks: RankFixture) -> None:
    ranks(2).run(_shapes)


def _sharded(shape: tuple[int, ...]) -> None:
    """Two layers in a row: the first has no residual, and the second has the sum that the first has left on its owners."""
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    b, weight, bias = torch.randn(8, 16), torch.randn(16), torch.randn(16)
    mine = slice(rank * 8 // size, (rank + 1) * 8 // size)
    for name in ("sequential", "token_split:1", "token_split:3", "auto"):
        r, own = torch.zeros(*shape[:-1], 16), None
        for turn in range(3):
            a = torch.randn(shape)
            r = r + a @ b + bias
            given = (a[..., mine].contiguous(), b[mine], own, weight)
            normed, own = weft.matmul_all_reduce_norm(*given, eps=NORM_EPS, schedule=name, bias=bias, residual_sharded=True)
            part = torch.chunk(r, size)[rank] if rank < len(torch.chunk(r, size)) else r[:0]
            torch.testing.assert_close(own, part, rtol=1e-4, atol=1e-4, msg=f"{name}, {turn}")
            wanted = torch.nn.functional.rms_norm(r, (16,), weight, NORM_EPS)
            torch.testing.assert_close(normed, wanted, rtol=1e-4, atol=1e-4, msg=f"{name}, {turn}")


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("shape", [(7, 8), (5, 3, 8), (1, 8)], ids=str)
def test_a_sharded_residual(ranks: RankFixture, size: int, shape: tuple[int, ...]) -> None:
    ranks(size).run(_sharded, shape)


def _many_row_counts() -> None:
    """More than have programs of their own. Other operators would pad the last ones."""
    size, rank, b, weight = dist.get_world_size(), dist.get_rank(), torch.ones(8, 16), torch.ones(16)
    for rows in (8, 9, 10, 11, 33, 35):
        a, residual = torch.full((rows, 8), rank + 1.0), torch.arange(rows * 16.0).view(rows, 16)
        own = torch.chunk(residual, size)[rank]
        normed, r = weft.matmul_all_reduce_norm(a, b, own, weight, residual_sharded=True)
        torch.testing.assert_close(r, own + 8 * size * (size + 1) / 2)
        assert normed.shape == residual.shape


@pytest.mark.ranks
def test_a_sharded_residual_of_many_row_counts(ranks: RankFixture) -> None:
    ranks(2).run(_many_row_counts)


def _sharded_and_compiled() -> None:
    a, b, weight, size = torch.randn(6, 8), torch.randn(8, 16), torch.randn(16), dist.get_world_size()
    call = torch.compile(weft.matmul_all_reduce_norm, fullgraph=True)
    for rows in (6, 4, 5):
        given = (a[:rows], b, None, weight)
        found, eager = call(*given, residual_sharded=True), weft.matmul_all_reduce_norm(*given, residual_sharded=True)
        for one, other in zip(found, eager, strict=True):
            assert torch.equal(one, other)
        assert found[1].shape[0] <= -(-rows // size)


@pytest.mark.ranks
def test_a_sharded_residual_is_compiled(ranks: RankFixture) -> None:
    ranks(2).run(_sharded_and_compiled)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("fan_out", [False, True])
def test_sharded_schedules_are_proved(world_size: int, fan_out: bool) -> None:
    for m in (0, 1, 5, 24):
        for addends in ((), ("residual",), ("bias", "residual")):
            problem = dataclasses.replace(PROBLEM, m=m, world_size=world_size, addends=addends, residual_sharded=True)
            for name, chunks in (("sequential", 1), ("token_split", 1), ("token_split", 2), ("token_split", 5)):
                schedule = build(problem, name, chunks, fan_out=fan_out)
                check(schedule)
                assert codec.loads(Schedule, codec.dumps(schedule)) == schedule


def test_a_norm_of_another_ranks_rows_is_refused() -> None:
    """A rank normalises its own rows of the sum, and stores them as the rows of the whole that they are."""
    schedule = build(dataclasses.replace(PROBLEM, residual_sharded=True), "token_split", 1)
    low, high = schedule.problem.shards[1]

    def moved(step: Step) -> Step:
        rows = (low - 1, high - 1)
        return dataclasses.replace(step, out=dataclasses.replace(step.out, rows=rows)) if isinstance(step, Norm) else step

    lanes = tuple(
        dataclasses.replace(lane, steps=tuple(map(moved, lane.steps))) if lane.kind == "compute" else lane
        for lane in schedule.ranks[1]
    )
    with pytest.raises(ScheduleError, match="normed"):
        check(dataclasses.replace(schedule, ranks=(schedule.ranks[0], lanes)))


def test_only_schedules_that_leave_rows_at_their_owners_take_a_sharded_residual() -> None:
    problem = dataclasses.replace(PROBLEM, residual_sharded=True)
    with pytest.raises(ValueError, match=r"schedule is 'one_shot', after which .* use sequential or token_split"):
        build(problem, "one_shot")
    with pytest.raises(ValueError, match="residual_sharded is True; only a matmul_all_reduce with a norm has it"):
        dataclasses.replace(problem, norm_eps=None)


def _refused() -> list[str]:
    a, b, residual, weight = torch.ones(4, 8), torch.ones(8, 16), torch.ones(4, 16), torch.ones(16)
    found = []
    for arguments, options in (
        ((a, b, residual, torch.ones(8)), {}),
        ((a, b, residual, weight.half()), {}),
        ((a, b, residual[:2], weight), {}),
        ((a, b, residual, weight), {"eps": 1.5}),
        ((a, b, residual, weight), {"eps": "small"}),
        ((a, b.clone().requires_grad_(), residual, weight), {}),
        (([a, a], [b, b.clone().requires_grad_()], residual, weight), {}),
        ((a, b.to(torch.float8_e4m3fn), residual, weight), {}),
        ((a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), residual, weight), {}),
    ):
        try:
            weft.matmul_all_reduce_norm(*arguments, **options)
            found.append("ran")
        except ValueError as error:
            found.append(str(error))
    weft.close()
    return found


@pytest.mark.ranks
def test_what_is_refused_is_named(ranks: RankFixture) -> None:
    for messages in ranks(2).run(_refused):
        for message, begin in zip(
            messages,
            (
                *("weight", "weight", "residual", "eps is 1.5", "eps is 'small'", "b requires a gradient"),
                *("b requires a gradient", "b has dtype", "a has dtype"),
            ),
            strict=True,
        ):
            assert message.startswith(begin), message


# The proof


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_family_is_proved_and_predicted(name: str, size: int) -> None:
    problem = dataclasses.replace(PROBLEM, world_size=size, k=8 * size, addends=("bias", "residual"))
    schedule = build(problem, name)
    check(schedule)
    assert codec.loads(Schedule, codec.dumps(schedule)) == schedule
    machine = load("h200x8")
    without = build(dataclasses.replace(problem, norm_eps=None), name)
    assert run(schedule, machine).total_us >= run(without, machine).total_us
    assert "norm" in str(schedule.problem)


def test_few_rows_are_one_kernel_that_normalises_too() -> None:
    (lane,) = build(PROBLEM, "one_shot").ranks[0]
    (step,) = lane.steps
    assert isinstance(step, FusedCollective)
    assert step.norm is not None
    decode = dataclasses.replace(PROBLEM, m=16, n=8192, k=8192)
    assert plan(decode, load("h200x8")).chosen.schedule == "one_shot"


def changed(schedule: Schedule, change: Any) -> Schedule:
    """The schedule with `change` applied to each norm."""

    def step_of(step: Step) -> Step:
        if isinstance(step, Norm):
            return change(step)  # type: ignore[no-any-return]
        if isinstance(step, FusedCollective) and step.norm is not None:
            return dataclasses.replace(step, norm=change(step.norm))
        return step

    ranks = tuple(
        tuple(dataclasses.replace(lane, steps=tuple(map(step_of, lane.steps))) for lane in lanes) for lanes in schedule.ranks
    )
    return dataclasses.replace(schedule, ranks=ranks)


@pytest.mark.parametrize("name", ["one_shot", "two_shot"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda norm: dataclasses.replace(norm, eps=0.1), "eps is 0.1"),
        (lambda norm: dataclasses.replace(norm, src=dataclasses.replace(norm.src, cols=(0, 6))), "shape|its own result"),
        (lambda norm: dataclasses.replace(norm, weight=dataclasses.replace(norm.src, rows=(0, 1))), "weight|reads"),
        (lambda norm: dataclasses.replace(norm, out=norm.src), "overlaps"),
    ],
)
def test_a_wrong_norm_is_refused(name: str, change: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(changed(build(PROBLEM, name), change))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"buffer": "partial"}, "over K of 0:8;"), ({"buffer": "residual"}, "over K of residual;"), ({"buffer": "a"}, "within")],
)
def test_a_norm_is_of_the_result(changes: dict[str, Any], message: str) -> None:
    """Each source has whole rows, but not of the result: the sum without the residual, the residual alone, another matrix."""

    def source(norm: Norm) -> Norm:
        return dataclasses.replace(norm, src=dataclasses.replace(norm.src, **changes))

    with pytest.raises(ScheduleError, match=message):
        check(changed(build(PROBLEM, "sequential"), source))


def test_a_norm_is_of_its_own_rows() -> None:
    def others(norm: Norm) -> Norm:
        src, out = dataclasses.replace(norm.src, rows=(3, 6)), dataclasses.replace(norm.out, rows=(0, 3))
        return dataclasses.replace(norm, src=src, out=out)

    with pytest.raises(ScheduleError, match="with the norm of"):
        check(changed(build(PROBLEM, "sequential"), others))


def test_a_norm_before_its_sum_is_refused() -> None:
    schedule, ranks = build(PROBLEM, "sequential"), []
    for (lane,) in schedule.ranks:
        ranks.append((dataclasses.replace(lane, steps=(lane.steps[-1], *lane.steps[:-1])),))
    with pytest.raises(ScheduleError, match="no write of all of it"):
        check(dataclasses.replace(schedule, ranks=tuple(ranks)))


def test_an_operator_without_a_norm_has_no_eps() -> None:
    with pytest.raises(ValueError, match="matmul_reduce_scatter has no norm"):
        dataclasses.replace(PROBLEM, op="matmul_reduce_scatter", addends=())
    with pytest.raises(ValueError, match="norm_eps is 2"):
        dataclasses.replace(PROBLEM, norm_eps=2.0)
