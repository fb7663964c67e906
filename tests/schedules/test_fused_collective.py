"""FusedCollective, a collective and its product as one kernel: the proof, what it refuses, and what the step stands for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from brute import verdict

import weft
from weft.checker import ScheduleError, check, fused_collective
from weft.core import codec
from weft.core.fused_collective import spelled_out
from weft.core.problem import Problem
from weft.core.schedule import Buffer, Copy, Flag, FusedCollective, Lane, Norm, Region, Schedule, Signal, Wait
from weft.schedules import build

REDUCE = Problem(op="matmul_all_reduce", m=6, n=8, k=12, world_size=3, addends=("bias", "residual"))
SCATTER = Problem(op="matmul_reduce_scatter", m=7, n=5, k=6, world_size=3, reduce_op="avg")
CASES = [
    (REDUCE, "one_shot"),
    (REDUCE, "two_shot"),
    (REDUCE, "sequential_stores"),
    (SCATTER, "one_shot"),
    (SCATTER, "sequential_stores"),
]


def changed(schedule: Schedule, change: Callable[[FusedCollective], FusedCollective], *ranks: int) -> Schedule:
    """With the kernels of some ranks changed; of all, where none are named."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        found = []
        for lane in schedule.ranks[rank]:
            steps = (change(step) if isinstance(step, FusedCollective) else step for step in lane.steps)
            found.append(dataclasses.replace(lane, steps=tuple(steps)))
        return tuple(found)

    size = len(schedule.ranks)
    changes = ranks or tuple(range(size))
    return dataclasses.replace(
        schedule, ranks=tuple(lanes(rank) if rank in changes else schedule.ranks[rank] for rank in range(size))
    )


@pytest.mark.parametrize(("problem", "name"), CASES)
def test_it_is_proved_with_the_steps_that_it_stands_for(problem: Problem, name: str) -> None:
    schedule = build(problem, name)
    check(schedule)
    assert codec.loads(Schedule, codec.dumps(schedule)) == schedule
    assert sum(isinstance(step, FusedCollective) for _, _, _, step in schedule) == 3
    steps = spelled_out(schedule).schedule
    check(steps)
    assert verdict(steps) == ""
    assert not any(isinstance(step, FusedCollective) for _, _, _, step in steps)
    assert spelled_out(steps).schedule is steps


def test_steps_are_named_by_their_place_in_the_schedule_as_it_was_given() -> None:
    schedule = build(REDUCE, "sequential_stores")
    steps = spelled_out(schedule)
    (lane,) = steps.schedule.ranks[1]
    assert steps.place(1, "compute", 0) == (0, None)
    kernel = schedule.ranks[1][0].steps[1]
    assert steps.place(1, "compute", 1) == steps.place(1, "compute", len(lane.steps) - 1) == (1, kernel)
    more = (*schedule.ranks[1][0].steps, Wait(Flag("never", 1)))
    longer = dataclasses.replace(
        schedule, ranks=(schedule.ranks[0], (dataclasses.replace(schedule.ranks[1][0], steps=more),), schedule.ranks[2])
    )
    with pytest.raises(ScheduleError, match=r"rank 1, lane compute, step 2 \(wait never"):
        check(longer)


def _shorter(step: FusedCollective) -> FusedCollective:
    return dataclasses.replace(step, out=dataclasses.replace(step.out, cols=(0, 4)))


def _elsewhere(step: FusedCollective) -> FusedCollective:
    return dataclasses.replace(step, out=dataclasses.replace(step.out, rank=(step.out.rank + 1) % 3))


REFUSED: list[tuple[Problem, str, Callable[[FusedCollective], FusedCollective], str]] = [
    (REDUCE, "one_shot", lambda s: dataclasses.replace(s, hops=3), "hops is 3"),
    (SCATTER, "one_shot", lambda s: dataclasses.replace(s, hops=2), "hops is 2"),
    (REDUCE, "one_shot", lambda s: dataclasses.replace(s, factors=(*s.factors, s.out)), "3 factors"),
    (REDUCE, "two_shot", _shorter, "has shape"),
    (SCATTER, "one_shot", lambda s: dataclasses.replace(s, op="all_reduce"), "has shape"),
    (REDUCE, "one_shot", _elsewhere, "another rank's"),
    (REDUCE, "one_shot", lambda s: dataclasses.replace(s, addends=s.addends[:1]), "leaves out"),
    (REDUCE, "one_shot", lambda s: dataclasses.replace(s, addends=(*s.addends, s.addends[0])), "leaves out|summed twice"),
    (REDUCE, "one_shot", lambda s: dataclasses.replace(s, addends=(s.factors[0],)), "has shape"),
    (SCATTER, "one_shot", lambda s: dataclasses.replace(s, divide_by=1), "leaves out"),
]


@pytest.mark.parametrize(("problem", "name", "change", "message"), REFUSED, ids=[str(at) for at in range(len(REFUSED))])
def test_steps_that_are_none_of_it_are_refused(problem: Problem, name: str, change: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(changed(build(problem, name), change))


IN_PLACE = Problem(op="matmul_all_reduce", m=8, n=8, k=24, world_size=3)


@pytest.mark.parametrize("left", [0, 4])
@pytest.mark.parametrize("factor", [0, 1])
def test_a_result_that_overlaps_a_factor_is_refused(factor: int, left: int) -> None:
    """Blocks store their tiles of the result while others still read what it would overwrite."""
    schedule = build(IN_PLACE, "one_shot")
    ranks = []
    for rank, (lane,) in enumerate(schedule.ranks):
        (step,) = lane.steps
        assert isinstance(step, FusedCollective)
        work = Region("work", rank, (0, 8), (left, left + 8))
        factors = list(step.factors)
        copied, factors[factor] = factors[factor], Region("work", rank, (0, 8), (0, 8))
        steps = (
            Copy(copied, factors[factor]),
            dataclasses.replace(step, factors=tuple(factors), out=work),
            Copy(work, step.out),
        )
        ranks.append((dataclasses.replace(lane, steps=steps),))
    buffers = (*schedule.buffers, Buffer("work", "local", (8,) * 3, (16,) * 3))
    with pytest.raises(ScheduleError, match=r"rank 0, lane compute, step 1 .* out is work@0"):
        check(dataclasses.replace(schedule, buffers=buffers, ranks=tuple(ranks)))


FEW_COLUMNS = dataclasses.replace(REDUCE, n=2)
FEW_ROWS = dataclasses.replace(SCATTER, m=2)
"""Rank 2 has nothing to sum."""


@pytest.mark.parametrize(
    ("problem", "name", "change"),
    [
        (FEW_ROWS, "one_shot", lambda s: dataclasses.replace(s, out=Region("nowhere", 2, (0, 0), (0, 5)))),
        (FEW_ROWS, "one_shot", lambda s: dataclasses.replace(s, out=Region("out", 2, (9, 9), (0, 5)))),
        (FEW_ROWS, "one_shot", lambda s: dataclasses.replace(s, out=Region("a", 2, (0, 0), (0, 5)))),
        (
            FEW_COLUMNS,
            "two_shot",
            lambda s: dataclasses.replace(s, addends=(s.addends[0], dataclasses.replace(s.addends[1], rows=(3, 9)))),
        ),
    ],
    ids=["no such buffer", "out of bounds", "input", "addend out of bounds"],
)
def test_regions_that_a_rank_has_no_use_for_are_checked(problem: Problem, name: str, change: Any) -> None:
    check(build(problem, name))
    with pytest.raises(ScheduleError, match="rank 2, lane compute, step 0"):
        check(changed(build(problem, name), change, 2))


@pytest.mark.parametrize("copies", [0, -1, 1_000_000_000])
def test_the_number_of_copies_is_bounded(copies: int) -> None:
    with pytest.raises(ScheduleError, match=f"copies is {copies};"):
        check(changed(build(REDUCE, "one_shot"), lambda step: dataclasses.replace(step, copies=copies)))


@pytest.mark.parametrize("mailbox", ["mailbox", "letters"])
def test_flags_of_a_mailbox_cannot_be_named(mailbox: str) -> None:
    """The proof would take them for signals, which the kernel does not send."""
    schedule = changed(build(REDUCE, "one_shot"), lambda step: dataclasses.replace(step, mailbox=mailbox))
    ranks = []
    for rank, (lane,) in enumerate(schedule.ranks):
        plain, own = Flag("arrived", rank, 7), Flag(f"{mailbox}.arrived", rank, 1)
        more = (Wait(own),) if rank == 0 else ()
        ranks.append((dataclasses.replace(lane, steps=(Signal(plain), Wait(plain), *more, *lane.steps)),))
    with pytest.raises(ScheduleError, match=f"{mailbox}.arrived"):
        check(dataclasses.replace(schedule, ranks=tuple(ranks)))


@pytest.mark.parametrize(
    "change",
    [
        lambda s: dataclasses.replace(s, hops=3 - s.hops),
        lambda s: dataclasses.replace(s, mailbox="other"),
        lambda s: dataclasses.replace(s, copies=4),
        lambda s: dataclasses.replace(s, divide_by=3),
    ],
    ids=["hops", "mailbox", "copies", "divide_by"],
)
def test_ranks_that_differ_are_refused(change: Any) -> None:
    for name in ("one_shot", "two_shot"):
        with pytest.raises(ScheduleError, match="rank 1 has other fused collectives"):
            check(changed(build(REDUCE, name), change, 1))


def test_a_rank_without_the_kernel_is_refused() -> None:
    """Its tiles would go nowhere: the steps that the kernel stands for have other places than its mailbox."""
    schedule = build(REDUCE, "one_shot")
    steps = spelled_out(schedule).schedule
    mixed = dataclasses.replace(steps, ranks=(schedule.ranks[0], *steps.ranks[1:]))
    with pytest.raises(ScheduleError, match="rank 1 has other fused collectives"):
        check(mixed)


@pytest.mark.parametrize("name", ["one_shot", "two_shot"])
@pytest.mark.parametrize(("copies", "right"), [(1, False), (2, False), (3, True)])
def test_a_mailbox_is_empty_before_it_is_written(name: str, copies: int, right: bool) -> None:
    """With two copies a peer, a call ahead, may write what its owner still empties; a second hop's words do not say it has."""
    schedule = changed(build(REDUCE, name), lambda step: dataclasses.replace(step, copies=copies))
    if right:
        check(schedule)
        return
    with pytest.raises(ScheduleError, match=f"has {copies} copies: rank . may send .* has not emptied"):
        check(schedule)


def test_copies_that_are_too_few_lose_words_in_some_order() -> None:
    """The proof agrees with all orders that messages allow: in some a rank writes a place that is full, or in none."""
    for name in ("one_shot", "two_shot"):
        (step,) = {step for rank, _, _, step in build(REDUCE, name) if rank == 0}
        assert isinstance(step, FusedCollective)
        for copies in (1, 2, 3):
            proved = not fused_collective.written_too_early(dataclasses.replace(step, copies=copies), 2)
            assert proved == (not _can_overwrite(step.hops, copies))


@pytest.mark.parametrize("hops", [1, 2])
def test_three_copies_are_enough_only_because_ranks_wait_for_each_other(hops: int) -> None:
    assert not _can_overwrite(hops, 3)
    assert _can_overwrite(hops, 3, waits=False)


def _can_overwrite(hops: int, copies: int, calls: int = 5, *, waits: bool = True) -> bool:
    """Whether two ranks can come to write a place that is full, in all states of their programs that messages allow. A rank
    clears slots concurrently with everything else that it does in a call, at any time before the call ends."""
    program = ["send 1", "wait 1", *(["send 2", "wait 2"] if hops == 2 else [])]
    seen, open_ = set(), [((0, 0), (0, 0))]
    while open_:
        state = open_.pop()
        if state in seen:
            continue
        seen.add(state)
        for rank in (0, 1):
            (at, emptied), (other, others) = state[rank], state[1 - rank]
            call, what = at // len(program), program[at % len(program)]
            after = []
            if emptied <= min(call, calls - 1):
                after.append((at, emptied + 1))
            sent = call * len(program) + program.index(what.replace("wait", "send"))
            goes_on = call < calls and emptied >= call and not (waits and what.startswith("wait") and other <= sent)
            if goes_on and what.startswith("send") and call >= copies and others < call - copies + 2:
                return True
            if goes_on:
                after.append((at + 1, emptied))
            open_ += [(one, state[1]) if rank == 0 else (state[0], one) for one in after]
    return False


def test_two_kernels_have_mailboxes_of_their_own() -> None:
    schedule = build(REDUCE, "one_shot")

    def twice(mailbox: str) -> Schedule:
        ranks = []
        for (lane,) in schedule.ranks:
            (step,) = lane.steps
            assert isinstance(step, FusedCollective)
            ranks.append((dataclasses.replace(lane, steps=(step, dataclasses.replace(step, mailbox=mailbox))),))
        return dataclasses.replace(schedule, ranks=tuple(ranks))

    with pytest.raises(ScheduleError, match="two kernels with one mailbox"):
        check(twice("mailbox"))
    check(twice("another"))


def test_it_runs_on_a_compute_lane_alone() -> None:
    schedule = build(REDUCE, "one_shot")
    ranks = tuple((dataclasses.replace(lane, kind="blocks"),) for (lane,) in schedule.ranks)
    with pytest.raises(ScheduleError, match="needs a lane of kind compute"):
        check(dataclasses.replace(schedule, ranks=ranks))


def test_no_other_lane_needs_sms_while_its_blocks_wait() -> None:
    schedule = build(SCATTER, "one_shot")
    side = Buffer("side", "local", (7, 7, 7), (2, 2, 2))
    copy = Copy(Region("a", 0, (0, 7), (0, 2)), Region("side", 0, (0, 7), (0, 2)))

    def with_lane(kind: Any) -> Schedule:
        lanes = (*schedule.ranks[0], Lane("aside", kind, (copy,)))
        return dataclasses.replace(schedule, buffers=(*schedule.buffers, side), ranks=(lanes, *schedule.ranks[1:]))

    check(with_lane("blocks"))
    with pytest.raises(
        ScheduleError, match=r"rank 0, lane aside, step 0.*it needs SMs, but the blocks of rank 0, lane compute"
    ):
        check(with_lane("copy"))


def test_names_of_the_schedule_are_not_taken() -> None:
    """A schedule may have buffers and flags of the names that the spelled-out steps use."""
    schedule = build(REDUCE, "one_shot")
    other = Buffer("recv", "local", (1, 1, 1), (1, 1, 1))
    named = dataclasses.replace(schedule, buffers=(*schedule.buffers, other))
    check(named)
    names = [buffer.name for buffer in spelled_out(named).schedule.buffers]
    assert len(names) == len(set(names))


def test_a_prediction_is_of_the_steps() -> None:
    schedule = build(dataclasses.replace(REDUCE, m=64, n=4096, k=4096, world_size=4), "two_shot")
    spans = weft.schedule.simulate(schedule, "h200x8")
    assert {span.kind for span in spans} >= {"gemm", "copy", "wait", "reduce"}


@pytest.mark.parametrize("name", ["one_shot", "sequential_stores"])
@pytest.mark.parametrize(("m", "fused"), [(64, True), (65, False)])
def test_the_kernel_normalises_few_bytes(name: str, m: int, fused: bool) -> None:
    """Its blocks wait for each other then, which takes longer than a second kernel if there are many bytes."""
    problem = Problem(op="matmul_all_reduce", m=m, n=4096, k=64, world_size=2, addends=("residual",), norm_eps=1e-5)
    schedule = build(problem, name)
    check(schedule)
    for (lane,) in schedule.ranks:
        (kernel,) = (step for step in lane.steps if isinstance(step, FusedCollective))
        assert kernel.hops == 1
        assert (kernel.norm is not None) == fused
        assert [isinstance(step, Norm) for step in lane.steps[-1:]] == [not fused]
