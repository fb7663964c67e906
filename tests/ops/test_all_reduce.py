"""matmul_all_reduce: on real ranks step by step, as the interpreted kernel, its proof, its gradients, and what it refuses."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compiled import all_reduce_for_a_gpu
from conftest import RankFixture
from launch_counts import counting
from own_schedules import check_from_parts
from rank_pools import interpreted_ranks, interpreting
from rank_work import check_all_reduce, whole

import weft
from weft.checker import ScheduleError, check
from weft.comm.symmetric_heap import heap_of
from weft.core.errors import WaitTimeout
from weft.core.fused_collective import spelled_out
from weft.core.problem import RECIPES, Problem, Recipe, Scaling, split
from weft.core.schedule import (
    MAILBOX_COPIES,
    Buffer,
    Copy,
    FusedCollective,
    Reduce,
    Region,
    Schedule,
    Signal,
    Step,
    Wait,
)
from weft.planner.models import decode_calls, load_model
from weft.runtime.ranks import Ranks
from weft.schedules import build, names
from weft.tools.run import Measured, measure_layer, tolerance

FAMILIES = names("matmul_all_reduce")
KERNELS = ("one_shot", "two_shot", "sequential_stores")


def _same_everywhere(out: torch.Tensor) -> bool:
    """Whether every rank has the same bits."""
    bits = out.contiguous().view(torch.int16 if out.element_size() == 2 else torch.int32).to(torch.int32)
    found = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(found, bits)
    return all(torch.equal(one, found[0]) for one in found)


@pytest.mark.ranks
@pytest.mark.parametrize("harm", [0.0, 0.2])
def test_weft_run_checks_decode_sites(ranks: RankFixture, harm: float) -> None:
    assert [call.op for call in decode_calls(load_model("llama3-8b"))] == ["matmul_all_reduce"] * 2
    problem = Problem(op="matmul_all_reduce", m=2, n=64, k=96, world_size=3)
    errors = [measured.max_error for measured in ranks(3).run(_harmed, problem, harm)]
    assert (max(errors) <= tolerance(build(problem, "two_shot"))) == (harm == 0.0)


def _harmed(problem: Problem, harm: float) -> Measured:
    """measure_layer, with an element of rank 1's partial result off by `harm`."""
    from weft.runtime.host import HostProgram

    matmul = HostProgram.multiply

    def wrong(self: HostProgram, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **options: Any) -> None:
        matmul(self, a, b, out, **options)
        out[0, 0] += harm * (dist.get_rank() == 1)

    HostProgram.multiply = wrong  # type: ignore[method-assign]
    try:
        return measure_layer(problem, "two_shot", 5, "cpu")
    finally:
        HostProgram.multiply = matmul  # type: ignore[method-assign]


def _calls_in_a_row(late: bool) -> None:
    """New data each call, the same bits for the same data; one rank comes late to every call."""
    for call in range(6):
        for name in FAMILIES:
            if late and dist.get_rank() == 1:
                time.sleep(0.003)
            first = check_all_reduce(7, 23, 19, torch.float32, name, call, addends=3)
            again = check_all_reduce(7, 23, 19, torch.float32, name, call, addends=3)
            assert torch.equal(first, again)


@pytest.mark.ranks
@pytest.mark.parametrize("late", [False, True])
def test_calls_in_a_row(ranks: RankFixture, late: bool) -> None:
    ranks(3).run(_calls_in_a_row, late)


interpreted = interpreted_ranks([2], slow=[3])


def _as_kernel(name: str) -> int:
    """Six calls of new data, one rank late to half of them; how often the kernel ran."""
    from weft.runtime import fused_collective

    assert os.environ["TRITON_INTERPRET"] == "1"
    with counting(fused_collective.FusedCollectiveKernel) as launches:
        for m, n, k in ((3, 40, 19), (18, 17, 8)):
            for call in range(6):
                if call % 2 and dist.get_rank() == 1:
                    time.sleep(0.02)
                out = check_all_reduce(m, n, k, torch.float16, name, call, addends=call % 4)
                assert _same_everywhere(out)
        again = check_all_reduce(m, n, k, torch.float16, name, call, addends=call % 4)
        assert torch.equal(out, again)
    weft.close()
    return launches.count


@pytest.mark.ranks
@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel(interpreted: Ranks, name: str) -> None:
    assert set(interpreted.run(_as_kernel, name)) == {13}


@pytest.mark.ranks
@pytest.mark.parametrize("multiplies", [False, True], ids=["partial", "factors"])
@pytest.mark.parametrize(("op", "hops"), [("matmul_all_reduce", 1), ("matmul_all_reduce", 2), ("matmul_reduce_scatter", 1)])
def test_the_kernel_reads_parts_of_buffers(interpreted: Ranks, op: str, hops: int, multiplies: bool) -> None:
    interpreted.run(check_from_parts, op, hops, multiplies)


def _addend_elsewhere() -> str:
    """The kernel finds its addends by their names, so one that lies in a part of another buffer has to be refused."""
    rank, size = dist.get_rank(), dist.get_world_size()
    problem = Problem(op="matmul_all_reduce", m=6, n=8, k=8 * size, world_size=size, dtype="float16", addends=("residual",))
    schedule = build(problem, "one_shot")
    ranks = []
    for owner, (lane,) in enumerate(schedule.ranks):
        (step,) = lane.steps
        assert isinstance(step, FusedCollective)
        part = Region("copied", owner, (2, 8), (0, 8))
        steps = (Copy(step.addends[0], part), dataclasses.replace(step, addends=(part,)))
        ranks.append((dataclasses.replace(lane, steps=steps),))
    buffers = (*schedule.buffers, Buffer("copied", "local", (9,) * size, (8,) * size))
    schedule = dataclasses.replace(schedule, buffers=buffers, ranks=tuple(ranks))
    check(schedule)
    a, b, _ = whole(6, 8, 8 * size, torch.float16, 0)
    mine = slice(8 * rank, 8 * rank + 8)
    try:
        weft.matmul_all_reduce(a[:, mine].contiguous(), b[mine], residual=torch.ones(6, 8).half(), schedule=schedule)
    except ValueError as error:
        return str(error)
    finally:
        weft.close()
    return "ran"


@pytest.mark.ranks
def test_an_addend_in_a_part_of_a_buffer_is_refused(interpreted: Ranks) -> None:
    for rank, message in enumerate(interpreted.run(_addend_elsewhere)):
        assert f"rank {rank}, lane compute, step 1" in message


def _of_zeros() -> None:
    """Zeros are values, though a word of zeros is an empty place; infinities and NaN arrive as such."""
    a = torch.tensor([0.0, -0.0, float("inf"), float("nan")], dtype=torch.float16)[:, None].expand(4, 8).contiguous()
    b = torch.ones(8, 20, dtype=torch.float16)
    for name in KERNELS:
        out = weft.matmul_all_reduce(a, b, schedule=name)
        torch.testing.assert_close(out, dist.get_world_size() * (a @ b), equal_nan=True)
    weft.close()


@pytest.mark.ranks
def test_zeros_are_values(interpreted: Ranks) -> None:
    interpreted.run(_of_zeros)


def _without_meeting(one_hop: bool) -> None:
    """Calls of the bare kernel, one block each: nothing holds a rank back but the kernel, and rank 1 sums late."""
    from weft.comm.rank_group import RankGroup
    from weft.kernels import all_reduce as kernel

    rank, size = dist.get_rank(), dist.get_world_size()
    problem = Problem(op="matmul_all_reduce", m=2, n=8, k=8 * size, world_size=size, dtype="float16")
    received = kernel.received
    device = torch.device("cpu")
    layout = kernel.plan(problem, rank, split(8, size), hops="one" if one_hop else "two", multiply=True, device=device, sms=1)
    rank_group = RankGroup(dist.group.WORLD)  # type: ignore[arg-type]
    piece = heap_of(rank_group, device).allocate(MAILBOX_COPIES * layout.copy_bytes)
    memory = kernel.mailbox(piece.addresses, layout.copy_bytes, 1, device)

    def late(*arguments: Any) -> Any:
        time.sleep(0.01 * (rank == 1))
        return received(*arguments)

    kernel.received = late  # type: ignore[assignment]
    try:
        for call in range(6):
            a, b, expected = whole(2, 8, 8 * size, torch.float16, call)
            mine, out = slice(8 * rank, 8 * rank + 8), torch.empty(2, 8, dtype=torch.float16)
            operands = (a[:, mine].contiguous(), b[mine])
            rest: dict[str, Any] = {"partial": None, "bias": None, "residual": None, "live": True, "tries": 20_000}
            kernel.all_reduce(layout, memory, out, factors=operands, **rest)
            torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2)
            assert memory.status.tolist() == [0, 0]
            assert memory.epochs[:, 0].tolist() == [call + 1]
    finally:
        kernel.received = received
        dist.barrier()
        rank_group.close()


@pytest.mark.ranks
@pytest.mark.parametrize("one_hop", [True, False])
def test_a_rank_that_runs_ahead_overwrites_nothing(interpreted: Ranks, one_hop: bool) -> None:
    interpreted.run(_without_meeting, one_hop)


@pytest.mark.usefixtures("on_an_h200")
@pytest.mark.parametrize(("rows", "one_hop"), [(1, True), (128, False)])
def test_accesses_are_16_bytes_wide_on_a_gpu(rows: int, one_hop: bool) -> None:
    """Compiled for an H100, from pointers that are multiples of 16: what travels, is looked at, emptied and stored."""
    text = _compiled_for_a_gpu(rows, one_hop)
    looks = re.findall(r"ld\.volatile\.global\.(\w+)", text)
    assert (looks.count("b32"), set(looks)) == (1 if one_hop else 2, {"b32", "v4"})  # b32: abort, once a wait
    assert set(re.findall(r"st\.global\.(\w+)", text)) == {"v4", "b64"}  # b64: the status, the count of calls
    assert "fence" not in text.replace("fence.proxy", "").replace("wgmma.fence", "")
    assert "membar" not in text
    assert ".sys" not in text


@pytest.mark.usefixtures("on_an_h200")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("rows", "one_hop"), [(1, True), (128, False)])
def test_fp8_on_a_gpu(rows: int, one_hop: bool, recipe: Recipe) -> None:
    """Operands come 16 bytes at a time, ahead of the products; few rows are multiplied exactly, as float16."""
    text = _compiled_for_a_gpu(rows, one_hop, Scaling(recipe=recipe))
    assert "cp.async.cg.shared.global" in text
    assert not re.findall(r"ld\.global\.\w*b8", text)
    few, many = ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3")
    assert (few in text, many in text) == (rows == 1, rows > 1)
    assert set(re.findall(r"st\.global\.(\w+)", text)) == {"v4", "b64"}


def _compiled_for_a_gpu(rows: int, one_hop: bool, scaling: Scaling | None = None) -> str:
    """PTX of the kernel for a decode step of 4 ranks. Needs no GPU."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from weft.kernels import all_reduce as kernel

    problem = Problem(op="matmul_all_reduce", m=rows, n=8192, k=4 * 3584, world_size=4, scaling=scaling)
    options: dict[str, Any] = {
        "hops": "one" if one_hop else "two",
        "multiply": True,
        "device": torch.device("cuda"),
        "sms": 132,
    }
    layout = kernel.plan(problem, 0, split(8192, 4), **options)
    return str(all_reduce_for_a_gpu(kernel, layout).asm["ptx"])


def _never_sent() -> str:
    """Rank 1 runs its second call without sending; what the others are told, and then all go on."""
    from weft.runtime import fused_collective

    launch = fused_collective.FusedCollectiveKernel.launch
    check_all_reduce(2, 20, 8, torch.float16, "one_shot", 0)
    # Interpreted, a look takes milliseconds, and in this call nothing comes.
    others = {"tries": 6, "silent": dist.get_rank() == 1}
    fused_collective.FusedCollectiveKernel.launch = lambda self, bindings, **options: launch(  # type: ignore[method-assign]
        self, bindings, **(options | others)
    )
    message = ""
    try:
        check_all_reduce(2, 20, 8, torch.float16, "one_shot", 1)
    except (WaitTimeout, AssertionError) as error:
        message = f"{type(error).__name__}: {error}"
    finally:
        fused_collective.FusedCollectiveKernel.launch = launch  # type: ignore[method-assign]
    dist.barrier()
    weft.close()
    check_all_reduce(2, 20, 8, torch.float16, "one_shot", 2)
    weft.close()
    return message


@pytest.mark.ranks
def test_a_tile_that_never_comes_is_named() -> None:
    message, silent = interpreting(2).run(_never_sent)
    assert message.startswith("WaitTimeout: rank 0, lane compute, step 0")
    assert "of rank 1 has not arrived" in message
    assert silent.startswith("AssertionError")  # its own sum lacks everything


def _compiled() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    a, b, expected = whole(4, 8, 6, torch.float32, 6)
    low, high = split(6, size)[rank]
    bias, residual = torch.ones(8), torch.ones(2, 2, 8)

    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return weft.matmul_all_reduce(x.view(2, 2, -1), w, schedule="one_shot", bias=bias, residual=residual) * 2

    x, w = a[:, low:high].contiguous(), b[low:high]
    got = torch.compile(block, fullgraph=True, backend="aot_eager")(x, w)
    torch.testing.assert_close(got, 2 * (expected.float() + 2).view(2, 2, 8))
    group = dist.group.WORLD
    assert group is not None
    for addends in ((bias, None), (None, residual.view(4, 8))):
        arguments = ([x], [w], *addends, group.group_name, "two_shot")
        torch.library.opcheck(torch.ops.weft.matmul_all_reduce, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.ranks
def test_compiles_as_one_graph(ranks: RankFixture) -> None:
    ranks(2).run(_compiled)


def _auto_and_layouts() -> None:
    check_all_reduce(4, 16, 8, torch.bfloat16, "auto", 0, addends=3)
    check_all_reduce(300, 16, 8, torch.bfloat16, "auto", 0, addends=1)
    rank, size = dist.get_rank(), dist.get_world_size()
    a, b, expected = whole(6, 10, 8, torch.float32, 2)
    out = weft.matmul_all_reduce(a[:, rank::size].reshape(2, 3, -1), b[rank::size].t().contiguous().t(), schedule="two_shot")
    torch.testing.assert_close(out, expected.float().view(2, 3, 10))
    assert check_all_reduce(0, 10, 8, torch.float32, "one_shot", 0, addends=3).shape == (0, 10)


@pytest.mark.ranks
def test_auto_and_leading_dimensions(ranks: RankFixture) -> None:
    ranks(2).run(_auto_and_layouts)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"bias": torch.ones(3)}, r"bias is \[3\]; it must be \[2\]"),
    (
        {"bias": torch.ones(2, dtype=torch.float64)},
        "bias is torch.float64 on cpu; it must be torch.float32 on cpu, as the result is",
    ),
    ({"residual": torch.ones(2, 3)}, r"residual is \[2, 3\]; it must be \[5, 2\]"),
    ({"residual": "none"}, r"residual is a str; it must be \[5, 2\]"),
    ({"b": torch.ones(3, 2)}, "b has 3 rows, a has 4 columns"),
    (
        {"schedule": "flag_gated"},
        "schedule is 'flag_gated', which is for .* alone; matmul_all_reduce has .*, two_shot",
    ),
    ({"schedule": "one_shot:2"}, "for families that have chunks"),
]


def _mistakes() -> None:
    for change, message in MISTAKES:
        with pytest.raises(ValueError, match=message):
            weft.matmul_all_reduce(**{"a": torch.ones(5, 4), "b": torch.ones(4, 2), **change})
    with pytest.raises(ValueError, match="schedule is 'two_shot', which is for matmul_all_reduce, all_reduce alone; "):
        weft.matmul_reduce_scatter(torch.ones(2, 4), torch.ones(4, 2), schedule="two_shot")
    nothing = weft.matmul_all_reduce(torch.ones(2, 3, 4), torch.ones(4, 0), residual=torch.ones(2, 3, 0))
    assert nothing.shape == (2, 3, 0)
    assert weft.matmul_all_reduce(torch.ones(2, 3, 0), torch.ones(0, 2)).equal(torch.zeros(2, 3, 2))
    check_all_reduce(4, 6, 8, torch.float32, "two_shot", 1)


@pytest.mark.ranks
def test_mistakes_are_told_and_nothing_is_lost(ranks: RankFixture) -> None:
    ranks(2).run(_mistakes)


def test_problems_that_add_nothing() -> None:
    for op, addends in (("matmul_reduce_scatter", ("bias",)), ("matmul_all_reduce", ("residual", "bias"))):
        with pytest.raises(ValueError, match=rf"addends is \(.*\); {op} takes any of"):
            Problem(op=op, m=2, n=2, k=2, world_size=2, addends=addends)  # type: ignore[arg-type]


PROBLEM = Problem(op="matmul_all_reduce", m=6, n=8, k=12, world_size=3, addends=("bias", "residual"))


def _changed(schedule: Schedule, change: Any) -> Schedule:
    """The schedule, without one kernel, with rank 1's compute lane changed: its steps, as a list, in place."""
    schedule = spelled_out(schedule).schedule
    (lane,) = schedule.ranks[1]
    steps = list(lane.steps)
    change(steps)
    ranks = (schedule.ranks[0], (dataclasses.replace(lane, steps=tuple(steps)),), *schedule.ranks[2:])
    return dataclasses.replace(schedule, ranks=ranks)


def _first(steps: list[Step], kind: type[Step]) -> int:
    return next(i for i, step in enumerate(steps) if isinstance(step, kind))


def _reduce(steps: list[Step], change: Any) -> None:
    at = _first(steps, Reduce)
    step = steps[at]
    assert isinstance(step, Reduce)
    (part,) = step.parts
    steps[at] = dataclasses.replace(step, parts=(dataclasses.replace(part, srcs=change(part.srcs)),))


DAMAGE: list[tuple[str, str, Any, str]] = [
    ("one_shot", "bias twice", lambda s: _reduce(s, lambda srcs: (*srcs, srcs[-2])), "K summed twice|leaves out@1"),
    (
        "one_shot",
        "no residual",
        lambda s: _reduce(s, lambda srcs: srcs[:-1]),
        r"leaves out@1.* and residual$",
    ),
    ("two_shot", "a rank left out", lambda s: _reduce(s, lambda srcs: srcs[1:]), "leaves out@1"),
    ("one_shot", "no wait for the last call", lambda s: s.pop(_first(s, Wait)), "nothing orders the two"),
    ("two_shot", "sent too early", lambda s: s.insert(0, s.pop(_first(s, Copy))), "no write of all of it|nothing orders"),
    ("two_shot", "never signalled", lambda s: s.pop(_first(s, Signal)), "nothing signals"),
]


@pytest.mark.parametrize(("name", "what", "change", "message"), DAMAGE, ids=[f"{d[0]}-{d[1]}" for d in DAMAGE])
def test_damage_is_refused(name: str, what: str, change: Any, message: str) -> None:
    schedule = build(PROBLEM, name)
    check(schedule)
    with pytest.raises(ScheduleError, match=message):
        check(_changed(schedule, change))


def _four_copies() -> str:
    """A mailbox with more copies than the kernel has."""
    problem = Problem(op="matmul_all_reduce", m=4, n=8, k=6, world_size=2, dtype="float16")
    schedule = build(problem, "one_shot")
    ranks = tuple(
        (dataclasses.replace(lane, steps=tuple(dataclasses.replace(step, copies=4) for step in lane.steps)),)
        for (lane,) in schedule.ranks
    )
    rank = dist.get_rank()
    a, b, _ = whole(4, 8, 6, torch.float16, 0)
    mine = slice(*split(6, 2)[rank])
    try:
        weft.matmul_all_reduce(a[:, mine], b[mine], schedule=dataclasses.replace(schedule, ranks=ranks))
    except ValueError as error:
        return str(error)
    finally:
        weft.close()
    return "ran"


@pytest.mark.ranks
def test_a_step_that_the_kernel_does_not_run_is_refused() -> None:
    for message in interpreting(2).run(_four_copies):
        assert "cannot run it: copies is 4, where it has 3" in message


def test_what_each_hop_moves() -> None:
    """one_shot sends everything to everyone; two_shot the columns of others, and its own ones to all."""
    for name, elements in (("one_shot", 2 * 6 * 8), ("two_shot", 6 * (3 + 2) + 2 * 6 * 3)):
        (lane,) = spelled_out(build(PROBLEM, name)).schedule.ranks[0]
        sent = [step.dst for step in lane.steps if isinstance(step, Copy) and step.dst.rank != 0]
        assert sum(map(_size, sent)) == elements


def _size(region: Region) -> int:
    return region.size
