"""The FP8 norm of matmul_all_reduce_norm and all_reduce_norm: its elements and scales, its proof, and what it refuses."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from launch_counts import counting
from rank_pools import interpreted_ranks
from rank_work import NORM_EPS, agree_with_quantised_norm, check_norm, check_sum_norm

import weft
from weft.checker import ScheduleError, check
from weft.core import codec
from weft.core.machine import load
from weft.core.problem import Problem
from weft.core.schedule import Buffer, FusedCollective, Norm, Schedule
from weft.core.work import region_bytes
from weft.perf import run
from weft.planner import plan
from weft.runtime.ranks import Ranks
from weft.schedules import build, names

FAMILIES = names("matmul_all_reduce")
RECIPES = ("RowWise", "BlockWise1x128")
PROBLEM = Problem(
    op="matmul_all_reduce", m=6, n=256, k=8, world_size=2, addends=("residual",), norm_eps=NORM_EPS, norm_recipe="blockwise"
)


def _every_family() -> None:
    for seed, (name, recipe) in enumerate(itertools.product(FAMILIES, RECIPES)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            check_norm(7, 384, 24, dtype, name, seed, recipe, bias=bool(seed % 2), residual=bool(seed % 3))
    for name, recipe in itertools.product(("sequential", "one_shot", "two_shot", "auto"), RECIPES):
        for m in (0, 5):
            check_sum_norm(m, 256, torch.bfloat16, name, m, recipe)


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_family(ranks: RankFixture, size: int) -> None:
    ranks(size).run(_every_family)


interpreted = interpreted_ranks([2])


def _as_kernels() -> int:
    """Rows that a block of the kernel holds, and longer ones; with blocks of 128, also less than a block holds of them."""
    from weft.kernels import norm as kernel
    from weft.runtime import fused

    with counting(fused.FusedNorm) as launches:
        for widest, recipe, n in itertools.product((128, 8192), RECIPES, (128, 640)):
            kernel.WIDEST = widest
            check_norm(5, n, 16, torch.float16, "one_shot", n, recipe)
            check_sum_norm(3, n, torch.float16, "two_shot", n, recipe)
    kernel.WIDEST = 8192
    weft.close()
    return launches.count


@pytest.mark.ranks
def test_the_kernel(interpreted: Ranks) -> None:
    assert set(interpreted.run(_as_kernels)) == {16}


def _without_conversion() -> int:
    """As on a GPU whose kernels cannot convert to FP8: torch quantises the norm, and kernels do the rest."""
    from weft.runtime import fused, fused_collective
    from weft.runtime.host_resources import HostResources

    cannot = mock.patch.object(HostResources, "quantises", property(lambda resources: False))
    with cannot, counting(fused.FusedNorm) as norms, counting(fused_collective.FusedCollectiveKernel) as sums:
        for recipe in RECIPES:
            check_norm(6, 256, 16, torch.float16, "one_shot", 0, recipe)
            check_norm(6, 256, 16, torch.float16, "two_shot", 0)  # its norm has a kernel all the same
    weft.close()
    assert sums.count == 4
    return norms.count


@pytest.mark.ranks
def test_devices_that_do_not_convert_to_fp8(interpreted: Ranks) -> None:
    assert set(interpreted.run(_without_conversion)) == {2}


def _zeros() -> None:
    """Zeros have a scale above zero. NaN stays within its row, and within the row it makes one scale of blocks NaN."""
    x, weight = torch.zeros(3, 256, dtype=torch.float16), torch.ones(256, dtype=torch.float16)
    x[1], x[2] = 1.0, float("nan")
    for recipe, schedule in itertools.product(RECIPES, ("one_shot", "sequential")):
        normed, scale, r = weft.all_reduce_norm(x, None, weight, schedule=schedule, scale_recipe_normed=recipe)
        assert normed[0].float().eq(0).all()
        assert scale[0].gt(0).all()
        torch.testing.assert_close(normed[1].float() * scale[1, :1], torch.ones(256))
        assert normed[2].float().isnan().all()
        assert scale[2].isnan().all()
        assert r[2].isnan().all()
    weight[130] = float("nan")
    normed, scale, _ = weft.all_reduce_norm(x[1:2], None, weight, scale_recipe_normed="BlockWise1x128")
    assert scale.isnan().tolist() == [[False, True]]
    assert normed[0, :128].float().eq(448).all()
    weft.close()


@pytest.mark.ranks
def test_rows_of_zeros_and_of_nan(interpreted: Ranks) -> None:
    interpreted.run(_zeros)


@pytest.mark.ranks
def test_zeros_and_nan_without_kernels(ranks: RankFixture) -> None:
    ranks(2).run(_zeros)


def _sharded(shape: tuple[int, ...], recipe: str) -> None:
    """FP8 elements and their scales are gathered, while the sum stays at its owners."""
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    a, b, weight = torch.randn(shape), torch.randn(12, 256), torch.randn(256)
    mine = slice(rank * 12 // size, (rank + 1) * 12 // size)
    for name in ("sequential", "token_split:1", "token_split:3", "auto"):
        normed, scale, own = weft.matmul_all_reduce_norm(
            *(a[..., mine].contiguous(), b[mine], None, weight),
            eps=NORM_EPS,
            schedule=name,
            residual_sharded=True,
            scale_recipe_normed=recipe,
        )
        r = a @ b
        part = torch.chunk(r, size)[rank] if rank < len(torch.chunk(r, size)) else r[:0]
        torch.testing.assert_close(own, part, rtol=1e-4, atol=1e-4, msg=name)
        assert normed.shape == r.shape
        assert scale.shape[:-1] == r.shape[:-1]
        agree_with_quantised_norm(normed.flatten(0, -2), scale.flatten(0, -2), r.flatten(0, -2), weight, 1e-4)


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(7, 12), (5, 3, 12), (1, 12)], ids=str)
def test_a_sharded_residual(ranks: RankFixture, size: int, shape: tuple[int, ...], recipe: str) -> None:
    ranks(size).run(_sharded, shape, recipe)


def _compiled() -> None:
    """A compiled call has the bits of the eager one, and so do opcheck's."""
    a, b, residual, weight = torch.randn(2, 3, 8), torch.randn(8, 256), torch.randn(2, 3, 256), torch.randn(256)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (weft.matmul_all_reduce_norm, (a, b, residual, weight)),
        (weft.all_reduce_norm, (residual, None, weight)),
    ]
    for (call, given), recipe in itertools.product(calls, (*RECIPES, torch.nn.functional.ScalingType.RowWise)):
        compiled = torch.compile(call, fullgraph=True)(*given, scale_recipe_normed=recipe)
        eager = call(*given, scale_recipe_normed=recipe)
        assert isinstance(compiled, tuple)
        for one, other in zip(compiled, eager, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one.float(), other.float())
        assert [one.dtype for one in eager] == [torch.float8_e4m3fn, torch.float32, torch.float32]
        blocks = 2 if recipe == "BlockWise1x128" else 1
        assert [one.shape for one in eager] == [(2, 3, 256), (2, 3, blocks), (2, 3, 256)]
    group = dist.group.WORLD
    assert group is not None
    flat: tuple[Any, ...] = (
        [a[0]],
        [b],
        None,
        residual[0],
        weight,
        1e-6,
        "blockwise",
        False,
        3,
        1,
        group.group_name,
        "sequential",
    )
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.weft.matmul_all_reduce_norm, flat, test_utils=tests)
    flat = (residual[0], None, None, weight, 1e-6, "rowwise", group.group_name, "sequential")
    torch.library.opcheck(torch.ops.weft.all_reduce_norm, flat, test_utils=tests)


@pytest.mark.ranks
def test_a_compiled_call(ranks: RankFixture) -> None:
    ranks(2).run(_compiled)


def _next_layer() -> None:
    """The elements and scales are what the next layer's all_gather_matmul takes."""
    torch.manual_seed(0)
    x, weight, b = torch.randn(4, 256), torch.ones(256), torch.randn(32, 256)
    normed, scale, r = weft.all_reduce_norm(x, None, weight, scale_recipe_normed="RowWise")
    scale_b = b.abs().amax(1, keepdim=True) / 448
    b8 = (b / scale_b).to(torch.float8_e4m3fn)
    out = weft.all_gather_matmul(normed, b8.mT, scale_a=scale, scale_b=scale_b.mT, output_dtype=torch.float32)
    wanted = torch.nn.functional.rms_norm(r, (256,), weight, 1e-6) @ b.mT
    torch.testing.assert_close(out[:4], wanted, rtol=0.1, atol=2.0)


@pytest.mark.ranks
def test_the_next_layer_takes_it(ranks: RankFixture) -> None:
    ranks(2).run(_next_layer)


def _refused() -> list[str]:
    found = []
    for n, recipe in ((256, "TensorWise"), (256, "blocks"), (192, "BlockWise1x128"), (24, "RowWise"), (0, "RowWise")):
        for call, given in (
            (weft.matmul_all_reduce_norm, (torch.ones(4, 8), torch.ones(8, n), None, torch.ones(n))),
            (weft.all_reduce_norm, (torch.ones(4, n), None, torch.ones(n))),
        ):
            try:
                call(*given, scale_recipe_normed=recipe)
                found.append("ran")
            except ValueError as error:
                found.append(str(error))
    weft.close()
    return found


@pytest.mark.ranks
def test_what_is_refused_is_named(ranks: RankFixture) -> None:
    wanted = (
        "scale_recipe_normed is TensorWise; normed is quantised by RowWise or BlockWise1x128",
        "scale_recipe_normed is blocks; normed is quantised by RowWise or BlockWise1x128",
        "N is 192; with scale_recipe_normed=BlockWise1x128 it must be a multiple of 128",
        "N is 24; with scale_recipe_normed=RowWise it must be a multiple of 16",
        "N is 0; with scale_recipe_normed=RowWise it must be a multiple of 16",
    )
    for messages in ranks(2).run(_refused):
        assert messages == [message for message in wanted for _ in range(2)]


# The proof


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_family_is_proved_and_predicted(name: str, recipe: Any, size: int) -> None:
    problem = dataclasses.replace(PROBLEM, world_size=size, k=8 * size, addends=("bias", "residual"), norm_recipe=recipe)
    schedule = build(problem, name)
    check(schedule)
    assert codec.loads(Schedule, codec.dumps(schedule)) == schedule
    assert f"FP8 {recipe}" in str(problem)
    scales = 1 if recipe == "rowwise" else 2
    assert region_bytes(schedule, schedule.buffer["normed"].whole(0)) == 6 * (256 + 4 * scales)
    assert run(schedule, load("h200x8")).total_us > 0
    for lane in schedule.ranks[0]:
        assert all(not isinstance(step, FusedCollective) or step.norm is None for step in lane.steps)
    assert any(isinstance(step, Norm) for lane in schedule.ranks[0] for step in lane.steps)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sharded_schedules_are_proved(world_size: int) -> None:
    for m, recipe in itertools.product((0, 1, 24), ("rowwise", "blockwise")):
        problem = dataclasses.replace(PROBLEM, m=m, world_size=world_size, residual_sharded=True, norm_recipe=recipe)
        for name, chunks in (("sequential", 1), ("token_split", 1), ("token_split", 3)):
            check(build(problem, name, chunks))


def test_fewer_bytes_are_sent() -> None:
    """With a sharded residual the norm travels, which has half of the bytes in FP8."""
    machine, large = load("h200x8"), dataclasses.replace(PROBLEM, m=8192, n=8192, k=8192, world_size=8, residual_sharded=True)
    for name in ("token_split", "sequential"):
        without = run(build(dataclasses.replace(large, norm_recipe=""), name), machine).total_us
        assert run(build(large, name), machine).total_us < without
    with_fp8, without = (plan(one, machine).chosen.predicted_us for one in (large, dataclasses.replace(large, norm_recipe="")))
    assert with_fp8 < without


def _with_buffer(schedule: Schedule, name: str, **changes: Any) -> Schedule:
    def changed(buffer: Buffer) -> Buffer:
        return dataclasses.replace(buffer, **changes) if buffer.name == name else buffer

    return dataclasses.replace(schedule, buffers=tuple(map(changed, schedule.buffers)))


@pytest.mark.parametrize("name", ["one_shot", "two_shot", "sequential"])
def test_a_norm_of_another_format_is_refused(name: str) -> None:
    """The caller's norm is FP8 if the problem has a recipe for it, and only then. Nothing else of the caller's is."""
    schedule = build(PROBLEM, name)
    with pytest.raises(ScheduleError, match=r"buffer normed has operand ''; .* needs 'norm'"):
        check(_with_buffer(schedule, "normed", operand=""))
    with pytest.raises(ScheduleError, match="buffer out has operand 'norm'"):
        check(_with_buffer(schedule, "out", operand="norm"))
    plain = dataclasses.replace(schedule, problem=dataclasses.replace(PROBLEM, norm_recipe=""))
    with pytest.raises(ScheduleError, match="buffer normed has operand 'norm', but the problem has no scaling of it"):
        check(plain)


def test_a_copy_of_a_norm_keeps_its_format() -> None:
    schedule = build(dataclasses.replace(PROBLEM, residual_sharded=True), "sequential")
    with pytest.raises(ScheduleError, match="holds no FP8 elements of a norm"):
        check(_with_buffer(schedule, "own_normed", operand=""))
    schedule = build(dataclasses.replace(PROBLEM, residual_sharded=True), "token_split")
    with pytest.raises(ScheduleError, match="differ in dtype; a copy moves bytes"):
        check(_with_buffer(schedule, "landing", operand=""))


def test_a_kernel_of_few_rows_does_not_quantise() -> None:
    schedule = build(PROBLEM, "one_shot")
    ranks = []
    for (lane,) in schedule.ranks:
        fused, norm = lane.steps
        assert isinstance(fused, FusedCollective)
        assert isinstance(norm, Norm)
        ranks.append((dataclasses.replace(lane, steps=(dataclasses.replace(fused, norm=norm),)),))
    with pytest.raises(ScheduleError, match="a kernel does not quantise its norm"):
        check(dataclasses.replace(schedule, ranks=tuple(ranks)))


def test_a_problem_with_a_wrong_recipe() -> None:
    for changes, message in (
        ({"norm_eps": None}, "norm_recipe is 'blockwise'; use 'rowwise' or 'blockwise' with a norm"),
        ({"norm_recipe": "tensorwise"}, "norm_recipe is 'tensorwise'"),
        ({"n": 192}, "N is 192; a norm that is quantised blockwise needs a multiple of 128"),
        ({"n": 24, "norm_recipe": "rowwise"}, "N is 24; a norm that is quantised rowwise needs a multiple of 16"),
        ({"n": 0}, "N is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(PROBLEM, **changes)  # type: ignore[arg-type]
