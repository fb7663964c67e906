"""Uses of weft.concurrent on CPU ranks: several collectives of one memory, uses that are over, and that never begin."""

from __future__ import annotations

import time
import warnings
import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from rank_pools import on_ranks

import weft
from weft.core.concurrent import ConcurrentProblem
from weft.core.problem import CollectiveProblem
from weft.core.schedule import Copy, Lane, Schedule, Step
from weft.overlap.concurrent.calls import MAX_ENTRIES, get_caches
from weft.runtime.groups import GROUPS

pytestmark = pytest.mark.ranks


def _held() -> list[int]:
    """Uses, by number, whose tensor was there yet when the next one began."""
    weft.close()
    held, last = [], weakref.ref(torch.ones(1))
    for use in range(20):
        tensor = torch.ones(64)
        held += [use - 1] if not _gone(last) else []
        last = weakref.ref(tensor)
        with weft.concurrent(collectives=weft.AllReduce(tensor), key="held"):
            del tensor
    assert len(weft.concurrent_choices()) == 1
    weft.close()
    return held


def _gone(ref: weakref.ref[torch.Tensor]) -> bool:
    """Soon: gloo's threads let go of what they had a little later."""
    deadline = time.monotonic() + 10
    while ref() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    return ref() is None


def test_nothing_keeps_a_tensor_of_a_use_that_is_over(ranks: RankFixture) -> None:
    assert ranks(2).run(_held) == [[]] * 2


def _changing_nothing() -> list[str]:
    messages = []
    ours, sends = weft.AllReduce(torch.zeros(4)), weft.SendReceive(send=torch.zeros(4), to=1 - torch.distributed.get_rank())
    for collective, method in ((ours, "nccl+resident=2"), (sends, "nccl+priority"), (sends, "nccl+ctas=4")):
        with pytest.raises(ValueError, match="method is") as error:
            weft.concurrent(lambda: None, collective, method=method)
        messages.append(str(error.value).partition("; ")[2].partition(":")[0])
    return messages


def test_ways_that_would_change_nothing_are_refused(ranks: RankFixture) -> None:
    sends = "sends and receives keep to a stream and blocks of NCCL's"
    assert ranks(2).run(_changing_nothing) == [["resident is for kernels that are named", sends, sends]] * 2


def _never_entered() -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        weft.concurrent(collectives=weft.AllReduce(torch.zeros(4)), key="forgotten", method="nccl")
        assert weft.concurrent(lambda: None, weft.AllReduce(torch.zeros(4)), method="nccl") is None
    return [str(warning.message) for warning in seen if warning.category is RuntimeWarning]


def test_a_context_that_nobody_enters_says_so(ranks: RankFixture) -> None:
    for messages in ranks(2).run(_never_entered):
        assert messages == [
            "a weft.concurrent was never entered, so that all_reduce of [4] float32 among 2 did not run; use `with`"
        ]


@on_ranks(2)
def test_collectives_of_one_memory_run_one_after_the_other() -> None:
    """What a scatter leaves is gathered, of tensors that take gloo some milliseconds."""
    part, size = 1 << 18, dist.get_world_size()
    whole, own, out = torch.empty(size * part), torch.empty(part), torch.empty(size * part)
    for turn in range(6):
        for method in ("nccl", "nccl+late", "sequential"):
            whole.fill_(turn + dist.get_rank())
            steps = [weft.ReduceScatter(own, whole), weft.AllGather(out, own), weft.AllReduce(out)]
            with weft.concurrent(collectives=steps, key="in order", method=method):
                pass
            assert torch.equal(out, torch.full_like(out, size * sum(turn + rank for rank in range(size)))), (turn, method)


@on_ranks(2)
def test_only_the_number_of_elements_counts() -> None:
    """What counts is how many elements there are: of a matrix, to rows of words; and nothing of it is a graph's."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for method in ("sequential", "nccl", "copy_engine"):
        part, whole = torch.nn.Parameter(torch.full((2, 3), float(rank))), torch.nn.Parameter(torch.zeros(3, 2 * size))
        with weft.concurrent(collectives=weft.AllGather(whole, part), key="gather", method=method):
            pass
        assert torch.equal(whole.view(size, 6)[:, 0], torch.arange(float(size)))
        with weft.concurrent(collectives=weft.ReduceScatter(part, whole), key="scatter", method=method):
            pass
        assert torch.equal(part, torch.full((2, 3), float(size * rank)))


def _of_a_parameter() -> list[float]:
    """Averaged in an autotuning run, and in uses that are planned."""
    parameter = torch.nn.Parameter(torch.full((64,), float(dist.get_rank())))
    mean = weft.AllReduce(parameter, reduction="avg")
    weft.concurrent(lambda: None, [mean], key="in one go", repeatable=True)
    for _ in range(3):
        weft.concurrent(lambda: None, [mean], key="planned")
    weft.close()
    return parameter.unique().tolist()


def test_a_parameter_may_be_reduced(ranks: RankFixture) -> None:
    assert ranks(2).run(_of_a_parameter) == [[0.5], [0.5]]


def _as_a_schedule() -> list[str]:
    """A schedule that was built for these collectives runs them; of others it is refused."""
    tensor = torch.full((64,), float(dist.get_rank()))
    mean = weft.AllReduce(tensor, reduction="avg")
    size = dist.get_world_size()
    messages = []
    for numbers in (tensor.numel(), 2 * tensor.numel()):
        one = CollectiveProblem(op="all_reduce", m=numbers, world_size=size, dtype="float32", reduce_op="avg")
        schedule = weft.schedule.build(ConcurrentProblem(collectives=(one,), world_size=size), "copy_engine+late")
        try:
            with weft.concurrent(collectives=mean, key="schedule", method=schedule) as context:
                messages.append(context.method)
            messages.append(str(float(tensor[0])))
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_a_schedule_is_a_method(ranks: RankFixture) -> None:
    for method, mean, refused in ranks(2).run(_as_a_schedule):
        assert (method, mean) == ("copy_engine+late", "0.5")
        assert refused.startswith("method is a schedule for a computation and all_reduce M=128")
        assert "these are all_reduce M=64" in refused


def _built_for(tensor: torch.Tensor) -> Schedule:
    size = dist.get_world_size()
    one = CollectiveProblem(op="all_reduce", m=tensor.numel(), world_size=size, dtype="float32", reduce_op="avg")
    return weft.schedule.build(ConcurrentProblem(collectives=(one,), world_size=size), "nccl")


def _wrong_schedules() -> str:
    """What is said of a schedule without buffers."""
    tensor = torch.full((64,), float(dist.get_rank()))
    try:
        right = _built_for(tensor)
        wrong = replace(right, parts=tuple(replace(part, buffers=()) for part in right.parts if part is not None))
        weft.concurrent(lambda: None, weft.AllReduce(tensor, reduction="avg"), method=wrong)
    except ValueError as error:
        return str(error)
    finally:
        weft.close()
    return "ran"


def test_a_schedule_that_is_wrong_does_not_run(ranks: RankFixture) -> None:
    for messages in ranks(2).run(_wrong_schedules):
        assert "buffer a is missing" in messages


def _own_lanes() -> list[str]:
    """What happens on this rank, in order: with a schedule as it was built, with one in which rank 1 computes first, and with
    one in which rank 1 has all on one lane, the collective behind the computation."""
    tensor, events = torch.full((64,), float(dist.get_rank())), list[str]()
    right = _built_for(tensor)
    network, compute = right.ranks[1]
    lanes = ((network, compute), (compute, network), (replace(compute, steps=compute.steps + network.steps),))
    begin = dist.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda *args, **options: events.append("collective") or begin(*args, **options))
        for mine in lanes:
            schedule = replace(right, ranks=(right.ranks[0], mine))
            weft.concurrent(lambda: events.append("computation"), weft.AllReduce(tensor, reduction="avg"), method=schedule)
            assert bool((tensor == 0.5).all())
    weft.close()
    return events


def test_each_rank_runs_the_lanes_that_the_schedule_has_for_it(ranks: RankFixture) -> None:
    first, second = ["collective", "computation"], ["computation", "collective"]
    assert ranks(2).run(_own_lanes) == [first * 3, first + second * 2]


def _halved(lane: Lane) -> Lane:
    """Each copy as two."""
    steps: list[Step] = []
    for step in lane.steps:
        if isinstance(step, Copy):
            half = (step.src.rows[1] - step.src.rows[0]) // 2
            for part in (slice(0, half), slice(half, 2 * half)):
                regions = (
                    replace(one, rows=(one.rows[0] + part.start, one.rows[0] + part.stop)) for one in (step.src, step.dst)
                )
                steps.append(Copy(*regions))
        else:
            steps.append(step)
    return replace(lane, steps=tuple(steps))


def _own_steps() -> list[list[int]]:
    """How many copies each rank has in what is bound for a schedule by copy engines, and for one in which rank 1 copies by
    halves. Both give the right result."""
    weft.close()
    size, rank = dist.get_world_size(), dist.get_rank()
    given, out = torch.arange(8.0) + 10 * rank, torch.zeros(8 * size)
    one = CollectiveProblem(op="all_gather", m=8 * size, world_size=size, dtype="float32")
    right = weft.schedule.build(ConcurrentProblem(collectives=(one,), world_size=size), "copy_engine")
    (part,) = right.parts
    assert part is not None
    halves = replace(right, parts=(replace(part, ranks=(part.ranks[0], tuple(map(_halved, part.ranks[1])))),))
    for schedule in (right, halves):
        out.zero_()
        weft.concurrent(lambda: None, weft.AllGather(out, given), method=schedule)
        assert torch.equal(out.view(size, 8), torch.arange(8.0) + 10 * torch.arange(float(size)).unsqueeze(1))
    group = dist.group.WORLD
    assert group is not None
    bound = GROUPS.state(group.group_name).schedules()
    found = [[sum(isinstance(step, Copy) for lane in lanes for step in lane.steps) for lanes in each.ranks] for each in bound]
    weft.close()
    return found


def test_steps_of_one_rank_that_were_changed_run_as_they_are(ranks: RankFixture) -> None:
    for (first, second), (same, halved) in ranks(2).run(_own_steps):
        assert first == second == same > 0
        assert halved == 2 * second


def _proofs() -> int:
    """How often schedules are proved in uses of one value and of an equal one."""
    from weft.overlap.concurrent import calls

    tensor, proofs, prove = torch.full((64,), float(dist.get_rank())), 0, calls.check

    def counted(schedule: Schedule) -> None:
        nonlocal proofs
        proofs += 1
        prove(schedule)

    calls.check = counted
    try:
        for schedule in (one := _built_for(tensor), one, replace(one)):
            weft.concurrent(lambda: None, weft.AllReduce(tensor, reduction="avg"), method=schedule)
            assert bool((tensor == 0.5).all())
    finally:
        calls.check = prove
        weft.close()
    return proofs


def test_a_schedule_is_proved_once(ranks: RankFixture) -> None:
    assert ranks(2).run(_proofs) == [1, 1]


def _many_sizes(most: int) -> tuple[int, int, list[float]]:
    """Use more sizes than a group remembers, with a key and with a named method. Return how many of each are remembered, and
    the result for the first size, which was forgotten."""
    weft.close()
    group = torch.distributed.group.WORLD
    assert group is not None
    for size in (*range(1, most + 4), 1):
        for method in ("auto", "nccl"):
            summed = torch.ones(size)
            with weft.concurrent(collectives=weft.AllReduce(summed), key="sizes", method=method):
                pass
    remembered = get_caches(GROUPS.state(group.group_name))
    found = len(remembered._choices), len(remembered._programs), summed.tolist()
    weft.close()
    return found


def test_the_sizes_that_were_used_last_are_remembered(ranks: RankFixture) -> None:
    assert ranks(2).run(_many_sizes, MAX_ENTRIES) == [(MAX_ENTRIES, MAX_ENTRIES, [2.0])] * 2
