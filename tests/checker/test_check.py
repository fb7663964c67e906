"""What the checker says, what it costs, and the kinds of fault one by one. That it misses none: test_check_damage.py."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from brute import verdict
from damage import places, step_at, with_lanes, with_step
from instructions import calls
from refusals import change, change_part, first, refused, region

from weft.checker import ScheduleError, check
from weft.core.problem import Problem
from weft.core.schedule import Buffer, Collective, Copy, Flag, Gemm, Lane, Part, Reduce, Schedule, Signal, Wait
from weft.schedules import build

GATHER = Problem(op="all_gather_matmul", m=8, n=4, k=6, world_size=2)
SCATTER = Problem(op="matmul_reduce_scatter", m=8, n=4, k=6, world_size=2)


def test_a_dropped_wait_for_free_races_with_the_call_before() -> None:
    schedule = build(GATHER, "shard_p2p")
    message = refused(
        with_step(schedule, first(schedule, Wait)),
        "rank 0, lane copy, step 0 (copy a@0[0:4, 0:6] -> a_full@1[0:4, 0:6])",
        "touches a_full@1[0:4, 0:6]",
        "rank 1, lane compute, step 2 (gemm 4x2x6) of the call before reads",
    )
    assert message.endswith("nothing orders the two")


def test_a_circle_of_waits_names_who_waits_for_whom() -> None:
    schedule = build(GATHER, "shard_p2p")
    for rank in (0, 1):
        lane = next(i for i, lane in enumerate(schedule.ranks[rank]) if lane.name == "copy")
        steps = schedule.ranks[rank][lane].steps
        late = Wait(Flag("arrived", rank, 1 - rank))
        lanes = list(schedule.ranks[rank])
        lanes[lane] = dataclasses.replace(lanes[lane], steps=(late, *steps))
        schedule = with_lanes(schedule, rank, lanes)
    refused(
        schedule,
        "deadlock: rank 0, lane copy, step 0 (wait arrived[1]@0) waits for a signal of arrived[1]@0, which needs rank 1",
        "rank 1, lane copy, step 0 (wait arrived[0]@1) waits for a signal of arrived[0]@1, which needs rank 0",
    )


def test_what_a_product_adds_is_proved() -> None:
    schedule = build(SCATTER, "track_and_trigger", 2)
    own = step_at(schedule, first(schedule, Gemm)).parts[2]
    short = change_part(schedule, Gemm, 2, adds=(), gates=())
    refused(short, "rank 0, lane compute", "leaves out@0", "over K of 0:3; the result there is (A @ B)[0:2, 0:4] over K of 0:6")
    refused(change_part(schedule, Gemm, 2, adds=own.adds * 2), "leaves out@0", "K summed twice")
    other = step_at(schedule, first(schedule, Gemm)).parts[3]
    both = own.gates + other.gates
    refused(change_part(schedule, Gemm, 2, adds=other.adds, gates=both), "leaves out@0", "a sum of different elements")
    refused(change(schedule, Gemm, divide_by=2), "leaves out@0", "divided by 2; the result there is")
    early = refused(change_part(schedule, Gemm, 2, gates=()), "rank 0, lane compute", "recv@0[0:2, 0:4]")
    assert "no write of all of it is ordered before" in early or "nothing orders the two" in early
    average = build(dataclasses.replace(SCATTER, reduce_op="avg"), "track_and_trigger", 2)
    check(average)
    refused(change(average, Gemm, divide_by=1), "leaves out@0", "divided by 2")


def test_what_lies_behind_an_inner_gate_is_proved_by_it_alone() -> None:
    schedule = build(GATHER, "flag_gated_2d", 2)
    check(schedule)
    part = step_at(schedule, first(schedule, Gemm)).parts[1]
    ((column, wait),) = part.inner
    assert (part.gates, column, wait) == ((Wait(Flag("arrived", 0, 2)),), 3, Wait(Flag("arrived", 0, 3)))
    unordered = "no write of all of it is ordered before|nothing orders the two"
    for fields, columns in [
        ({"inner": ()}, "0:6"),
        ({"inner": ((column + 1, wait),)}, "[0-9]:4"),
        ({"gates": ()}, "0:3"),
    ]:
        damaged = change_part(schedule, Gemm, 1, **fields)
        with pytest.raises(ScheduleError, match=rf"rank 0, lane compute, .*a_full@0\[4:8, {columns}\].*({unordered})"):
            check(damaged)
        assert verdict(damaged)
    early = change_part(schedule, Gemm, 1, inner=((column - 1, wait),))
    check(early)
    assert verdict(early) == ""


def test_an_inner_gate_holds_the_sms_as_a_gate_does() -> None:
    """Rank 0's own rows are staged by a copy, a kernel, for whose second half tiles wait that may fill all SMs."""
    for lane in ("copy", "blocks"):
        schedule = _staged(lane)
        step = step_at(schedule, first(schedule, Gemm))
        own = dataclasses.replace(
            step.parts[0], a=region("a", 0, (0, 4), (0, 6)), inner=((3, step.parts[0].gates[0]),), gates=()
        )
        schedule = change(schedule, Gemm, parts=(own, *step.parts[1:]))
        if lane == "blocks":
            check(schedule)
        else:
            refused(schedule, "possible deadlock", "part 0", "at column 3) may fill all SMs of rank 0")
        assert bool(verdict(schedule)) == (lane == "copy")


def _late_factor(*, waits_first: bool) -> Schedule:
    """flag_gated, but rank 0's second part adds zeros: its gate is late. waits_first: the lane waits before the kernel, too."""
    schedule = build(GATHER, "flag_gated", 1)
    zeros = region("zeros", 0, (0, 4), (0, 2))
    gate = step_at(schedule, first(schedule, Gemm)).parts[1].gates
    nothing = Gemm(region("b", 0, (0, 0), (0, 2)), (Part(region("a", 0, (0, 4), (0, 0)), zeros),))
    schedule = change_part(schedule, Gemm, 1, adds=(zeros,))
    place = first(schedule, Gemm)
    schedule = with_step(schedule, place, nothing, *(gate if waits_first else ()), step_at(schedule, place))
    return dataclasses.replace(schedule, buffers=(*schedule.buffers, Buffer("zeros", "local", (4, 0), (2, 0))))


def test_the_gates_of_a_part_that_adds_are_too_late_for_its_factors() -> None:
    check(_late_factor(waits_first=True))
    assert verdict(_late_factor(waits_first=True)) == ""
    message = refused(_late_factor(waits_first=False), "rank 0, lane compute, step 1", "a_full@0[4:8, 0:6]")
    assert "no write of all of it is ordered before" in message or "nothing orders the two" in message
    assert verdict(_late_factor(waits_first=False))


def test_an_unwritten_output_is_named() -> None:
    schedule = build(dataclasses.replace(GATHER, return_gathered=True), "shard_p2p")
    own = next(p for p in places(schedule, lambda s: isinstance(s, Copy) and s.dst.buffer == "gathered"))
    refused(with_step(schedule, own), "rank 0: 24 elements of gathered@0[0:8, 0:6] are never written")


STRUCTURE: list[tuple[str, Any, dict[str, Any], str]] = [
    ("shard_p2p", Copy, {"src": region("x", 0, (0, 1), (0, 6))}, "x@0[0:1, 0:6]"),
    ("shard_p2p", Copy, {"src": region("a", 7, (0, 1), (0, 6))}, "a@7[0:1, 0:6]"),
    ("shard_p2p", Copy, {"src": region("a", 0, (1, 5), (0, 6))}, "a@0[1:5, 0:6]"),
    ("shard_p2p", Copy, {"src": region("a", 0, (0, 3), (0, 6))}, "a copy needs them equal"),
    ("shard_p2p", Copy, {"src": region("a", 1, (0, 4), (0, 6))}, "buffer a is input"),
    ("shard_p2p", Copy, {"dst": region("a", 0, (0, 4), (0, 6))}, "a@0[0:4, 0:6]"),
    ("shard_p2p", Copy, {"src": region("a_full", 1, (4, 8), (0, 6))}, "a_full@1[4:8, 0:6]"),
    ("shard_p2p", Wait, {"flag": Flag("free", 1, 0)}, "from rank 0"),
    ("shard_p2p", Signal, {"flag": Flag("arrived", 5)}, "arrived[0]@5 is on no rank"),
    ("shard_p2p", Signal, {"flag": Flag("free", 0, 1)}, "free[1]@0"),
    ("shard_p2p", Gemm, {"b": region("b", 0, (0, 5), (0, 2))}, "b@0[0:5, 0:2]"),
    ("shard_p2p", Gemm, {"b": region("b", 0, (0, 6), (0, 1))}, "out@0[0:4, 0:2]"),
    ("shard_p2p", Gemm, {"accumulate": True}, "out@0[0:4, 0:2]"),
    ("uniform_fused_2d", Reduce, {"divide_by": 0}, "divide_by is 0"),
    ("sequential", Collective, {"dst": region("a_full", 0, (0, 7), (0, 6))}, "all_gather on rank 0"),
    ("sequential", Collective, {"divide_by": 2}, "all_gather"),
]


@pytest.mark.parametrize(("name", "kind", "fields", "message"), STRUCTURE)
def test_structure(name: str, kind: Any, fields: dict[str, Any], message: str) -> None:
    said = refused(change(build(GATHER, name, 2), kind, **fields), message)
    assert re.match(r"rank \d, lane (compute|copy), step \d+ \(", said)


def test_structure_of_sums_and_counts() -> None:
    schedule = build(SCATTER, "shard_p2p")
    refused(change_part(schedule, Reduce, 0, srcs=()), "has no source; it needs at least one")
    refused(change_part(schedule, Reduce, 0, srcs=(region("recv", 0, (3, 4), (0, 4)),)), "has shape (1, 4), but it is summed")
    schedule = build(SCATTER, "track_and_trigger", 2)
    refused(change_part(schedule, Gemm, 1, count=Flag("made", 0, 2)), "made[2]@0 is signalled by another step, or part, too")
    refused(change_part(schedule, Gemm, 2, adds=(region("recv", 0, (3, 4), (0, 4)),)), "has shape (1, 4), but it is added")
    refused(change_part(schedule, Gemm, 2, adds=(region("recv", 1, (0, 2), (0, 4)),)), "this operand must be local")
    refused(change_part(schedule, Gemm, 2, adds=(region("out", 0, (0, 2), (0, 4)),)), "while it writes out@0", "overlaps")
    refused(change(schedule, Gemm, divide_by=0), "divide_by is 0; it must be at least 1")
    wide = build(dataclasses.replace(SCATTER, dtype="float32"), "track_and_trigger", 2)
    refused(change(wide, Gemm, accumulate=True), "use one of accumulate and adds")


def test_structure_of_inner_gates() -> None:
    schedule = build(GATHER, "flag_gated_2d", 3)
    (_, one), (_, two) = step_at(schedule, first(schedule, Gemm)).parts[1].inner
    for columns in ((0, 2), (2, 2), (4, 2), (2, 6)):
        inner = tuple(zip(columns, (one, two), strict=True))
        words = f"inner gates of a_full@0[4:8, 0:6] are at columns {list(columns)}; they must ascend, above 0 and below 6"
        refused(change_part(schedule, Gemm, 1, inner=inner), words)
    wide = build(dataclasses.replace(GATHER, dtype="float32"), "flag_gated_2d", 3)
    refused(change(wide, Gemm, accumulate=True), "has inner gates and accumulate; use one of the two")
    out = region("out", 0, (4, 8), (0, 2))
    refused(change_part(schedule, Gemm, 1, adds=(out,)), "has inner gates and adds; use one of the two")
    other = (dataclasses.replace(one, flag=dataclasses.replace(one.flag, rank=1)), two)
    refused(change_part(schedule, Gemm, 1, inner=tuple(zip((2, 4), other, strict=True))), "is waited for from rank 0")


def test_structure_of_the_whole() -> None:
    schedule = build(GATHER, "sequential")
    lanes = schedule.ranks[0]
    refused(dataclasses.replace(schedule, ranks=schedule.ranks[:1]), "the schedule has 1 ranks; its problem has 2")
    refused(with_lanes(schedule, 0, [*lanes, *lanes]), "rank 0 has two lanes of one name")
    refused(with_step(schedule, first(schedule, Collective)), "runs collectives", "all ranks need the same, in order")
    two = Lane("more", "blocks", (step_at(schedule, first(schedule, Collective)),))
    refused(with_lanes(schedule, 0, [*lanes, two]), "rank 0 has collectives on lanes compute, more; one lane must run them all")
    second = Lane("more", "compute", (Signal(Flag("x", 0)),))
    refused(with_lanes(schedule, 0, [*lanes, second]), "rank 0 has lanes compute, more of kind compute, which is the caller's")
    unknown = [*lanes, Lane("copy", "dma", ())]  # type: ignore[arg-type]
    refused(with_lanes(schedule, 0, unknown), "rank 0, lane copy: kind is 'dma'; use compute, copy, blocks or network")
    shared = [dataclasses.replace(buffer, kind="shared") if buffer.name == "a_full" else buffer for buffer in schedule.buffers]
    message = "buffer a_full: kind is 'shared'; use input, output, symmetric or local"
    refused(dataclasses.replace(schedule, buffers=tuple(shared)), message)
    engine = [dataclasses.replace(lanes[0], kind="copy")]
    refused(with_lanes(schedule, 0, engine), "a copy engine runs copies, waits and signals")
    for buffers, message in [
        (schedule.buffers[1:], "buffer a is missing; the problem has it as input"),
        ((*schedule.buffers, schedule.buffers[0]), "two buffers share a name"),
        ((*schedule.buffers, Buffer("x", "input", (1, 1), (1, 1))), "buffer x is input"),
        ((*schedule.buffers, Buffer("x", "local", (1,), (1, 1))), "buffer x has rows (1,)"),
        ((*schedule.buffers, Buffer("x", "local", (1, -1), (1, 1))), "none below 0"),
    ]:
        refused(dataclasses.replace(schedule, buffers=buffers), message)


def test_float32_sums_are_rounded_by_a_reduce_only() -> None:
    schedule = build(GATHER, "uniform_fused_2d", 2)
    copy = Copy(region("sums", 0, (0, 8), (0, 2)), region("out", 0, (0, 8), (0, 2)))
    refused(with_step(schedule, first(schedule, Reduce), copy), "differ in dtype; a copy moves bytes, a reduce rounds")
    wide = build(dataclasses.replace(GATHER, dtype="float32"), "uniform_fused_2d", 2)
    check(with_step(wide, first(wide, Reduce), copy))


def _staged(lane: str, *, first_stage: bool = False) -> Schedule:
    """flag_gated, but rank 0's own rows go through a_full too, by a copy within the rank. first_stage: before the GEMM."""
    schedule = build(GATHER, "flag_gated", 1)
    flag, own, landed = Flag("staged", 0), region("a", 0, (0, 4), (0, 6)), region("a_full", 0, (0, 4), (0, 6))
    schedule = change_part(schedule, Gemm, 0, a=landed, gates=(Wait(flag),))
    if first_stage:
        place = first(schedule, Gemm)
        schedule = with_step(schedule, place, Wait(flag), step_at(schedule, place))
    stage = Lane("stage", lane, (Copy(own, landed), Signal(flag)))  # type: ignore[arg-type]
    return with_lanes(schedule, 0, [*schedule.ranks[0], stage])


def test_a_gated_kernel_that_waits_for_a_concurrent_kernel_may_starve_it() -> None:
    schedule = _staged("copy")
    refused(
        schedule,
        "possible deadlock: rank 0, lane compute, step 0 (gemm 8x2x6 in 2 parts, part 0",
        "may fill all SMs of rank 0 with waiting blocks, while",
        "rank 0, lane stage, step 0 (copy a@0[0:4, 0:6] -> a_full@0[0:4, 0:6]) has not started",
    )
    assert verdict(schedule).startswith("deadlock")


def test_no_starvation_from_blocks_of_their_own_or_in_order() -> None:
    for schedule in (_staged("blocks"), _staged("copy", first_stage=True)):
        check(schedule)
        assert verdict(schedule) == ""


@pytest.mark.parametrize("name", ["hetero_unfused_1d", "flag_gated", "flag_gated_2d"])
def test_what_a_proof_costs_grows_with_the_steps_and_not_with_their_square(name: str) -> None:
    problem = Problem(op="all_gather_matmul", m=16384, n=8192, k=8192, world_size=4)
    few, many = (build(problem, name, chunks) for chunks in (2, 16))
    parts = [sum(len(getattr(step, "parts", "1")) for *_, step in schedule) for schedule in (few, many)]
    assert calls(lambda: check(many)) / parts[1] < 3 * calls(lambda: check(few)) / parts[0]
