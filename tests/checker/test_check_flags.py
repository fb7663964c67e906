"""Flags are lowered by who waits for them: what would lose a signal is refused, and by name."""

from __future__ import annotations

import dataclasses

import pytest

from weft.checker import ScheduleError, check
from weft.core.problem import Problem
from weft.core.schedule import Flag, Gemm, Lane, Part, Region, Schedule, Signal, Step, Wait
from weft.schedules import build


def pair(*lanes: tuple[Step, ...]) -> Schedule:
    """One lane a rank, of signals and waits; there is nothing to compute."""
    problem = Problem(op="all_gather_matmul", m=0, n=0, k=2, world_size=len(lanes))
    ranks = tuple((Lane("compute", "compute", lane),) for lane in lanes)
    return Schedule(problem=problem, name="pair", buffers=build(problem, "sequential").buffers, ranks=ranks)


def test_a_signal_that_does_not_wait_for_its_reader_is_refused() -> None:
    ready, read = Flag("ready", 1), Flag("read", 0)
    with pytest.raises(ScheduleError, match=r"ready\[0\]@1 may be signalled again before rank 1, lane compute, step 0"):
        check(pair((Signal(ready),), (Wait(ready),)))
    check(pair((Wait(read, on_previous_call=True), Signal(ready)), (Wait(ready), Signal(read))))
    with pytest.raises(ScheduleError, match=r"re[a-z]+\[0\]@\d may be signalled again before rank"):
        check(pair((Signal(ready), Wait(read, on_previous_call=True)), (Wait(ready), Signal(read))))


@pytest.mark.parametrize("inner", [True, False])
def test_an_inner_gate_orders_what_follows_its_kernel(inner: bool) -> None:
    """Rank 1 may raise `sent` again once rank 0 has said so, whose kernel waited for rank 2, which waited for `sent`."""
    sent, ready, read = Flag("sent", 2), Flag("ready", 0), Flag("read", 1)
    a, b, out = Region("a_full", 0, (0, 0), (0, 2)), Region("b", 0, (0, 2), (0, 0)), Region("out", 0, (0, 0), (0, 0))
    part = Part(a, out, inner=((1, Wait(ready)),) if inner else ())
    ring = pair(
        (Gemm(b, (part,)), Signal(read)), (Wait(read, on_previous_call=True), Signal(sent)), (Wait(sent), Signal(ready))
    )
    if inner:
        check(ring)
    else:
        with pytest.raises(ScheduleError, match=r"(sent|ready|read)\[0\]@\d may be signalled again"):
            check(ring)


def test_a_kernel_passes_its_gates_on_the_call_before_where_it_starts() -> None:
    """The peer may go on once any part of the kernel has signalled it: all gates on the call before are behind each part."""
    free, sent = Flag("free", 0), (Flag("sent", 1, 0), Flag("sent", 1, 1))
    a, b, out = Region("a_full", 0, (0, 0), (0, 2)), Region("b", 0, (0, 2), (0, 0)), Region("out", 0, (0, 0), (0, 0))
    parts = (Part(a, out, (), sent[0]), Part(a, out, (Wait(free, on_previous_call=True),), sent[1]))
    first_tells = (Wait(sent[0]), Signal(free), Wait(sent[1]))
    kernel_waits = (Wait(Flag("over", 0), on_previous_call=True), Gemm(b, parts))
    check(pair(kernel_waits, (*first_tells, Signal(Flag("over", 0)))))


def test_a_flag_is_signalled_once_a_call() -> None:
    ready = Flag("ready", 1)
    with pytest.raises(ScheduleError, match=r"ready\[0\]@1 is signalled by another step"):
        check(pair((Signal(ready), Signal(ready)), (Wait(ready),)))


def test_what_a_kernel_counts_has_one_waiter() -> None:
    done = Flag("done", 0)
    a, b, out = Region("a_full", 0, (0, 0), (0, 2)), Region("b", 0, (0, 2), (0, 0)), Region("out", 0, (0, 0), (0, 0))
    with pytest.raises(ScheduleError, match=r"done\[0\]@0 is counted by a kernel, but rank 0, .* and rank 0, .* wait for it"):
        check(pair((Gemm(b, (Part(a, out, (), done),)), Wait(done), Wait(done))))


def test_what_a_kernel_counts_has_a_waiter() -> None:
    """Where other flags order everything, nothing but the kernel would notice that nobody waits."""
    done = Flag("done", 0)
    a, b, out = Region("a_full", 0, (0, 0), (0, 2)), Region("b", 0, (0, 2), (0, 0)), Region("out", 0, (0, 0), (0, 0))
    with pytest.raises(ScheduleError, match=r"rank 0, lane compute, step 0 .*it counts done\[0\]@0, for which no step waits"):
        check(pair((Gemm(b, (Part(a, out, (), done),)),)))
    check(pair((Gemm(b, (Part(a, out, (), done),)), Wait(done))))


def test_a_lost_release_is_found() -> None:
    """Without `free`, a peer may raise `arrived` again while the last one is not yet lowered."""
    schedule = build(Problem(op="all_gather_matmul", m=8, n=8, k=8, world_size=2), "flag_gated", 1)
    lanes = [
        tuple(
            dataclasses.replace(lane, steps=tuple(s for s in lane.steps if not (isinstance(s, Wait) and s.flag.name == "free")))
            for lane in rank
        )
        for rank in schedule.ranks
    ]
    with pytest.raises(ScheduleError, match=r"arrived\[.\]@. may be signalled again|nothing orders"):
        check(dataclasses.replace(schedule, ranks=tuple(lanes)))
