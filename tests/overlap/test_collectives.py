"""Collectives alone on real ranks: every schedule, any type and size, bounded room, in place, the same bits, errors."""

from __future__ import annotations

import weakref
from contextlib import nullcontext, suppress

import pytest
import torch
import torch.distributed as dist
from collective_work import GATHERS, SUMS, Case, in_place, moves, straight, sums
from conftest import RankFixture
from launch_counts import counting
from rank_pools import interpreted_ranks, on_ranks
from rank_work import slowed

import weft
from weft import collectives
from weft.comm.shared_memory import SharedSegment, unlink
from weft.core.errors import RankMismatch
from weft.core.problem import COLLECTIVE_OPS, CollectiveProblem
from weft.core.schedule import Collective
from weft.overlap.collectives import check_overlap
from weft.runtime import collective_calls
from weft.runtime.bindings import Bindings
from weft.runtime.collective_calls import affordable
from weft.runtime.groups import GROUPS
from weft.runtime.network import NcclCollective
from weft.schedules import build

pytestmark = pytest.mark.ranks
LEAST = 1 << 16
MOVED = (torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn)
SUMMED = (torch.float32, torch.bfloat16, torch.float16)


@on_ranks(1, 2, 3, 4)
def test_every_schedule_is_right() -> None:
    for seed, (elements, op) in enumerate(((1, "avg"), (37, "sum"), (2001, "avg"))):
        for spec in GATHERS:
            moves(Case(elements=elements, dtype=torch.int16, seed=seed), spec)
            if seed:
                in_place(Case(elements=elements, dtype=torch.float32, seed=seed), spec)
        for spec in SUMS:
            sums(Case(elements=elements, dtype=SUMMED[seed], seed=seed), spec, op)


@on_ranks(3)
def test_bytes_of_any_type_and_none_at_all() -> None:
    for dtype in MOVED:
        mine = torch.full((5,), dist.get_rank() + 1, dtype=torch.float32).to(dtype)
        for spec in GATHERS:
            found = collectives.all_gather(mine, schedule=spec)
            expected = torch.cat([torch.full((5,), r + 1, dtype=torch.float32).to(dtype) for r in range(dist.get_world_size())])
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    for shape in ((0,), (0, 3), (3, 0)):
        assert collectives.all_gather(torch.empty(shape)).shape == (shape[0] * dist.get_world_size(), *shape[1:])
        collectives.all_reduce(torch.empty(shape), schedule="copy_engine:2")


def _in_turns() -> int:
    """Parts of 320 KB through room of 64 KiB, call after call, with new data and one rank late."""
    for seed in range(6):
        with slowed(Bindings, "pieces", 0.0005) if seed >= 2 else nullcontext():
            case = Case(elements=80_003, dtype=torch.float32, seed=seed, staging_bytes=LEAST)
            for spec in ("copy_engine:1", "copy_engine_pull:1"):
                moves(case, spec)
                in_place(case, spec)
            for spec in ("copy_engine:1", "copy_engine_pull:1"):
                sums(case, spec)
    state = GROUPS.state(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    mine = [program for program in state._programs if getattr(program.schedule.problem, "staging_bytes", 0) == LEAST]
    assert len(mine) == 6
    assert all(program.layout.staging <= LEAST + 2 * 256 for program in mine)
    return max(sum(1 for _ in program.schedule) for program in mine)


@pytest.mark.slow
def test_more_bytes_than_room_go_through_it_in_turns(ranks: RankFixture) -> None:
    assert min(ranks(3).run(_in_turns)) > 100


def _straight() -> int:
    """Pushed to the result itself, and summed in turns; one rank late."""
    straight(20_001, "copy_engine:1", 4)
    with slowed(Bindings, "pieces", 0.0005):
        straight(301, "copy_engine:2", 4)
        straight(301, "auto", 1)
    programs = GROUPS.state(dist.group.WORLD.group_name)._programs  # type: ignore[union-attr]
    mine = [p for p in programs if getattr(p.schedule.problem, "reachable", False)]
    return max(p.layout.staging for p in mine if p.schedule.problem.op != "all_reduce" and p.schedule.name == "copy_engine")


def test_results_that_peers_can_write_need_no_room(ranks: RankFixture) -> None:
    assert ranks(3).run(_straight) == [0, 0, 0]


def _other_places() -> str:
    memory = collectives.empty(64)
    first = 4 * dist.get_rank()
    with pytest.raises(RankMismatch) as raised:
        collectives.all_gather_into_tensor(memory[first : first + 16], torch.zeros(8), schedule="copy_engine")
    weft.close()
    return str(raised.value)


def test_results_at_different_places_are_named(ranks: RankFixture) -> None:
    for says in ranks(2).run(_other_places):
        assert "result in symmetric memory: rank" in says
        assert "byte 16" in says


def _bits() -> list[bytes]:
    """Sums whose bits depend on the order; of every chunk count, and several calls."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    mine = torch.randn(5003, generator=generator) * 10.0 ** torch.randint(-6, 6, (5003,), generator=generator)
    found = set()
    for spec in ("copy_engine:1", "copy_engine:2", "copy_engine:7"):
        for staging in (LEAST, 1 << 24):
            given = mine.clone()
            collectives.all_reduce(given, schedule=spec, staging_bytes=staging)
            found.add(given.numpy().tobytes())
    (bits,) = found
    scattered = collectives.reduce_scatter(mine[:5000], schedule="copy_engine:3")
    (low, high) = (size := 5000 // dist.get_world_size()) * dist.get_rank(), size * (dist.get_rank() + 1)
    return [bits, scattered.numpy().tobytes(), bits[4 * low : 4 * high]]


def test_sums_have_the_same_bits_on_every_rank_and_in_every_schedule(ranks: RankFixture) -> None:
    found = ranks(4).run(_bits)
    assert len({bits for bits, _, _ in found}) == 1
    assert all(scattered == part for _, scattered, part in found)


@on_ranks(2)
def test_work_is_like_torchs() -> None:
    mine = torch.full((8,), float(dist.get_rank()))
    out = torch.empty(8 * dist.get_world_size())
    work = collectives.all_gather_into_tensor(out, mine, async_op=True, schedule="copy_engine")
    assert work is not None
    assert work.wait()
    assert work.is_completed()
    assert work.get_future().wait()[0] is out
    assert torch.equal(out, torch.arange(dist.get_world_size()).repeat_interleave(8).float())
    assert collectives.all_reduce(mine, dist.ReduceOp.AVG, schedule="copy_engine") is None
    assert torch.equal(mine, torch.full((8,), (dist.get_world_size() - 1) / 2))
    with pytest.raises(ValueError, match="stream is for calls with async_op=True on GPUs"):
        collectives.all_reduce(mine, stream=object())  # type: ignore[arg-type]


@on_ranks(3)
def test_gradients() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for op in ("sum", "avg"):
        x = torch.arange(size * 2.0).view(-1, 1).mul(rank + 1).t().contiguous().t().requires_grad_()
        weights = torch.arange(2.0).view(2, 1) + 10 * rank
        (collectives.reduce_scatter(x, op, schedule="copy_engine") * weights).sum().backward()
        each = torch.cat([torch.arange(2.0).view(2, 1) + 10 * r for r in range(size)])
        assert x.grad is not None
        assert torch.equal(x.grad, each / (size if op == "avg" else 1))
        whole = torch.full((3,), float(rank), requires_grad=True)
        (collectives.all_reduced(whole, op, schedule="copy_engine") * (rank + 1)).sum().backward()
        assert whole.grad is not None
        total = size * (size + 1) / 2 / (size if op == "avg" else 1)
        assert torch.equal(whole.grad, torch.full((3,), total))
    x = torch.full((2,), float(rank), requires_grad=True)
    (collectives.all_gather(x, schedule="copy_engine_pull") * (rank + 1)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2,), size * (size + 1) / 2))
    y = torch.full((size,), float(rank), requires_grad=True)
    received = collectives.all_to_all(y)
    assert torch.equal(received, torch.arange(float(size)))
    (received * torch.arange(size).add(10 * rank)).sum().backward()
    assert y.grad is not None
    assert torch.equal(y.grad, 10.0 * torch.arange(size) + rank)


def _gathered_doubles() -> list[str]:
    messages = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective_calls, "MOST_ELEMENTS", 5)
        for x in (torch.ones(2, dtype=torch.float64, requires_grad=True), torch.ones(3, requires_grad=True)):
            total = collectives.all_gather(x).sum()
            with pytest.raises(ValueError) as raised:  # noqa: PT011 (the words are compared outside)
                total.backward()
            messages.append(str(raised.value))
    return messages


def test_gradients_that_cannot_be_summed_are_named(ranks: RankFixture) -> None:
    for messages in ranks(2).run(_gathered_doubles):
        assert messages == [
            "the gradient of all_gather is torch.float64; reduce_scatter sums bfloat16, float16, float32",
            "the gradient of all_gather has 6 elements; reduce_scatter takes at most 5: split it",
        ]


@on_ranks(2)
def test_compiles_as_one_graph() -> None:
    """As one graph, forward and backward, where torch.compile works."""
    size, rank = dist.get_world_size(), dist.get_rank()

    def block(x: torch.Tensor) -> torch.Tensor:
        whole = collectives.all_gather(x * 2, schedule="copy_engine:1")
        return collectives.reduce_scatter(whole + 1, "avg", schedule="copy_engine:1")

    x = torch.arange(6.0).view(3, 2).add(rank).requires_grad_()
    out = torch.compile(block, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(out, 2 * x + 1)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3, 2), 2.0))
    assert size == 2


@on_ranks(2)
def test_in_inference_mode() -> None:
    """As functions, into tensors that were made there, and into others."""
    mine, size = torch.full((4,), dist.get_rank() + 1.0), dist.get_world_size()
    total, others = size * (size + 1) / 2, torch.empty(4 * size)
    with torch.inference_mode():
        made = torch.empty(4 * size)
        for spec in ("sequential", "copy_engine:2"):
            for out in (made, others):
                collectives.all_gather_into_tensor(out, mine, schedule=spec)
                assert torch.equal(out, collectives.all_gather(mine, schedule=spec))
                assert out.view(size, 4)[:, 0].tolist() == [rank + 1 for rank in range(size)]
            assert collectives.all_reduced(mine.clone(), schedule=spec).tolist() == [total] * 4
            kinds = [collectives.all_gather(one, schedule=spec).is_inference() for one in (mine[:3], mine[:3], made[:3])]
            assert kinds == [False] * 3, "the first result is a tensor of inference mode, or a later one"


def _mistakes() -> list[str]:
    x, whole = torch.zeros(4), torch.zeros(4 * dist.get_world_size())
    calls = (
        lambda: collectives.all_gather_into_tensor(x, x),
        lambda: collectives.all_gather_into_tensor(whole, whole[1:5]),
        lambda: collectives.all_gather_into_tensor(whole, x.double()),
        lambda: collectives.reduce_scatter_tensor(x, whole[:-1]),
        lambda: collectives.all_to_all_single(whole, whole),
        lambda: collectives.all_to_all_single(torch.zeros_like(whole), whole, [3, 5], [3, 5]),
        lambda: collectives.all_reduce(torch.zeros(4, 4).t()),
        lambda: collectives.all_reduce(x.int()),
        lambda: collectives.all_reduce(x, "max"),
        lambda: collectives.reduce_scatter(x, schedule="copy_engine_pull"),
        lambda: collectives.all_reduce(x, staging_bytes=7),
        lambda: collectives.all_reduce(x, sms=0),
        lambda: collectives.reduce_scatter(torch.zeros(3)),
    )
    found = []
    for call in calls:
        with pytest.raises(ValueError) as raised:  # noqa: PT011 (the words are compared outside)
            call()
        found.append(str(raised.value))
    return found


def test_mistakes_are_named(ranks: RankFixture) -> None:
    expected = (
        "output has 4 elements; 2 ranks give 4 each: it needs 8",
        "output overlaps input; all_gather allows input as this rank's part of output alone",
        "output is torch.float32 on cpu, input torch.float64 on cpu; they must agree",
        "input has 7 elements; 2 ranks get 4 each: it needs 8",
        "output overlaps input; all_to_all allows no overlap",
        "output_split_sizes is [3, 5]; weft exchanges equal parts",
        "tensor is [4, 4] with strides (1, 4); it must be contiguous",
        "tensor is torch.int32; all_reduce sums bfloat16, float16, float32",
        "op is 'max'; use 'sum' or 'avg'",
        "schedule is 'copy_engine_pull', which is for all_gather, all_reduce alone",
        "staging_bytes is 7; it must be a whole number of at least 65536",
        "sms is 0; it must be a whole number of at least 1",
        "x is [3]; its first dimension must be a multiple of world_size, 2",
    )
    for found in ranks(2).run(_mistakes):
        for says, begins in zip(found, expected, strict=True):
            assert says.startswith(begins), says


def _different() -> str:
    x = torch.zeros(4 + dist.get_rank())
    with pytest.raises(RankMismatch) as raised:
        collectives.all_reduce(x, schedule="copy_engine")
    weft.close()
    return str(raised.value)


def test_ranks_that_give_different_sizes_find_out(ranks: RankFixture) -> None:
    for says in ranks(2).run(_different):
        assert "elements given: rank" in says


def _environment(bytes_: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_STAGING_BYTES", bytes_)
        try:
            collectives.all_reduce(torch.zeros(100_000), schedule="copy_engine")
        except ValueError as error:
            return str(error)
        (schedule,) = (s for s in GROUPS.state(dist.group.WORLD.group_name).schedules() if s.problem.m == 100_000)  # type: ignore[union-attr]
        return str(schedule.problem.staging_bytes)  # type: ignore[union-attr]


def test_room_is_set_by_the_environment(ranks: RankFixture) -> None:
    assert ranks(2).run(_environment, "131072") == ["131072", "131072"]
    assert "WEFT_STAGING_BYTES is '12'; it must be" in ranks(2).run(_environment, "12")[0]


@pytest.mark.parametrize(("free", "found"), [(1 << 40, 1 << 28), ((1 << 30) + 5, 1 << 27), (1 << 20, 1 << 17), (100, LEAST)])
def test_a_gpu_gives_an_eighth_of_what_is_free(monkeypatch: pytest.MonkeyPatch, free: int, found: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 40))
    assert affordable(1 << 28, torch.device("cuda", 0)) == found
    assert affordable(1 << 28, torch.device("cpu")) == 1 << 28


interpreted = interpreted_ranks(2)


@on_ranks(pool="interpreted")
def test_sums_run_as_kernels() -> None:
    """Whole and ragged tiles, aligned and not."""
    from weft.runtime.fused import FusedSum

    with counting(FusedSum) as launches:
        for dtype, elements in ((torch.float16, 301), (torch.float32, 64)):
            case = Case(elements=elements, dtype=dtype, seed=elements)
            sums(case, "copy_engine:2", "avg")
            in_place(case, "copy_engine:2")
    assert launches.count >= 10


@on_ranks(pool="interpreted")
def test_few_elements_are_summed_by_one_kernel() -> None:
    """In place, which the first call's rehearsal must respect: as rows of many columns, of few, and as a single row."""
    from weft.runtime.fused_collective import FusedCollectiveKernel

    with counting(FusedCollectiveKernel) as launches:
        for elements in (301, 32, 1024, 1):
            for op in ("sum", "avg"):
                sums(Case(elements=elements, dtype=torch.float16, seed=elements), "one_shot", op)
    assert launches.count == 8


def _rehearsed() -> list[int]:
    """By operator: how many collectives of the group the rehearsal of its sequential program is."""
    group, size = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    found = []
    for op in COLLECTIVE_OPS:
        schedule = build(CollectiveProblem(op=op, m=6 * size, world_size=size, dtype="float32"), "sequential")
        (step,) = (step for rank, _, _, step in schedule if rank == dist.get_rank() and isinstance(step, Collective))
        before = group._get_sequence_number_for_group()
        NcclCollective(group, step, schedule.problem).rehearse(torch.device("cpu"))
        found.append(group._get_sequence_number_for_group() - before)
    return found


def test_collectives_that_may_work_in_place_are_rehearsed_on_other_tensors(ranks: RankFixture) -> None:
    """So that NCCL has made its communicator, which may take longer than a call may, before the first call."""
    assert ranks(2).run(_rehearsed) == [[1] * len(COLLECTIVE_OPS)] * 2


@on_ranks(2)
def test_tensors_that_peers_can_write_outlive_their_group() -> None:
    """The process would end where it reads memory that has gone."""
    rank, memory = dist.get_rank(), collectives.empty(8, 2)
    part = memory[4:].view(-1)
    collectives.all_gather_into_tensor(memory[: 2 * dist.get_world_size()], torch.full((2, 2), rank + 1.0))
    weft.close()
    assert memory[:4, 0].tolist() == [1, 1, 2, 2]
    del memory
    part.fill_(7)
    assert part.tolist() == [7] * 8
    segment = SharedSegment.create("kept", 64)
    unlink(segment.name)
    matrix = segment.view_matrix(0, 2, 4, torch.float32)
    segment.close()
    assert matrix.sum() == 0
    # Once no tensor is left, neither is the memory.
    gone = weakref.ref(segment._mapping)
    del matrix, segment
    assert gone() is None
    assert collectives.all_reduced(torch.ones(3)).tolist() == [2] * 3


@pytest.mark.parametrize(("op", "a", "out"), [("all_gather", 2, 4), ("reduce_scatter", 4, 2), ("all_reduce", 4, 4)])
def test_tensors_overlap_in_place_or_not_at_all(op: str, a: int, out: int) -> None:
    """Of rank 1 of two; a and out have so many elements."""
    memory = torch.zeros(12)
    allowed = []
    for first in range(memory.numel() - out + 1):
        with suppress(ValueError):
            check_overlap(op, memory[first : first + out], memory[4 : 4 + a], 1)
            allowed.append(first)
    in_place = {"all_gather": 4 - a, "reduce_scatter": 4 + out, "all_reduce": 4}[op]
    assert allowed == sorted({first for first in range(13 - out) if first + out <= 4 or first >= 4 + a} | {in_place})
