"""Schedules of collectives concurrent with a computation: names, lanes, the proof, predictions, and which to measure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import weft
from weft.checker import ScheduleError
from weft.core import machine
from weft.core.concurrent import ConcurrentProblem, OpaqueCollective
from weft.core.parts import joined
from weft.core.problem import CollectiveProblem, Op
from weft.core.schedule import Lane, Region, Schedule, Signal, Step, UserCall, regions
from weft.core.span import total_us
from weft.overlap.concurrent.executor import CollectivePart, Program, program_of
from weft.planner.choose import AT_MOST, shortlist
from weft.schedules import collectives
from weft.schedules.builder import Request
from weft.schedules.concurrent import PLAIN, SEQUENTIAL, Abilities, Method, build, candidates, family, parse

H200 = machine.load("h200x8")


def collective(op: Op = "all_reduce", m: int = 1 << 12, world_size: int = 4) -> CollectiveProblem:
    return CollectiveProblem(op=op, m=m, world_size=world_size, dtype="float32")


def problem(*ops: Op, m: int = 1 << 12, world_size: int = 4, **times: Any) -> ConcurrentProblem:
    return ConcurrentProblem(collectives=tuple(collective(op, m, world_size) for op in ops), world_size=world_size, **times)


GEMMS = problem("all_reduce", m=1 << 28, world_size=2, compute_us=4231.0, communication_us=2645.0)


def test_specs_are_read_as_they_print() -> None:
    found = candidates(GEMMS)
    assert len(found) > 12
    assert [str(parse(spec)) for spec in found] == list(found)
    assert (str(SEQUENTIAL), str(PLAIN)) == ("sequential", "nccl")
    assert parse("nccl+ctas=16+late") == Method(late=True, ctas=16)


@pytest.mark.parametrize("spec", ["", "streams", "nccl+late+late", "nccl+ctas", "nccl+ctas=", "nccl+ctas=-1", "nccl+late=1"])
def test_mistakes_get_the_grammar(spec: str) -> None:
    with pytest.raises(ValueError, match=r"^method is '.*'; use auto, sequential, or nccl or copy_engine with any of \+late"):
        weft.schedule.build(GEMMS, spec)


def test_sequential_takes_no_options() -> None:
    with pytest.raises(ValueError, match="sequential has no left=8: nothing runs concurrently"):
        parse("sequential+left=8")
    with pytest.raises(ValueError, match="ctas is -1; it must be 0"):
        Method(ctas=-1)
    for spec in ("sequential+pull", "nccl+pull"):
        with pytest.raises(ValueError, match="has pull; only copy_engine pulls"):
            parse(spec)


def test_only_what_the_device_has_is_a_candidate() -> None:
    assert candidates(GEMMS, Abilities()) == ("sequential", "nccl", "nccl+late")
    everything = Abilities(priority=True, ctas=True, left=True, copy_engine=True, pull=True, residents=(2, 1))
    for able in (Abilities(), Abilities(priority=True, residents=(1,)), Abilities(ctas=True), Abilities(left=True), everything):
        assert all(able.allow(parse(spec)) for spec in candidates(GEMMS, able))
    for spec in ("nccl+priority", "nccl+ctas=8", "nccl+left=8", "copy_engine", "nccl+resident=1"):
        assert not Abilities().allow(parse(spec))
    assert Abilities(copy_engine=True).allow(parse("copy_engine+ctas=8"))
    assert not Abilities(copy_engine=True).allow(parse("copy_engine+pull"))
    assert Abilities(copy_engine=True, pull=True).allow(parse("copy_engine+pull"))


@pytest.mark.parametrize("spec", ["nccl+ahead=2", "nccl+unsharded+ctas=4", "copy_engine+late+resident=1", "nccl+left=3"])
def test_what_is_asked_of_the_computation_is_in_the_schedule(spec: str) -> None:
    found = program_of(weft.schedule.build(problem("reduce_scatter"), spec), 1).computation
    asked = parse(spec)
    assert (found.left, found.resident, found.ahead, found.unsharded) == (
        asked.left,
        asked.resident,
        asked.ahead,
        asked.unsharded,
    )


def test_lanes_are_in_the_order_in_which_they_are_enqueued() -> None:
    def names(spec: str) -> list[str]:
        return [lane.name for lane in weft.schedule.build(problem("all_reduce"), spec).ranks[0]]

    assert names("sequential") == ["compute"]
    assert names("nccl") == ["network", "compute"]
    assert names("nccl+late") == ["compute", "network"]
    assert names("copy_engine")[-1] == names("copy_engine+late")[0] == "compute"
    heads = weft.schedule.timeline(weft.schedule.build(problem("all_reduce"), "nccl+priority+ctas=16")).splitlines()[2]
    assert heads.split("    ")[0] == "rank 0, network, priority, ctas=16"


def test_what_cannot_be_described_is_called_by_nccl_alone() -> None:
    whole = ConcurrentProblem(collectives=(collective(), OpaqueCollective(name="send_receive")), world_size=4)
    assert not any(spec.startswith("copy_engine") for spec in candidates(whole))
    schedule = weft.schedule.build(whole, "nccl")
    weft.schedule.check(schedule)
    assert [str(step) for step in schedule.ranks[0][0].steps] == ["call all_reduce", "call send_receive"]
    assert [str(step)[:10] for step in joined(schedule).ranks[0][0].steps] == ["all_reduce", "call send_"]
    with pytest.raises(ValueError, match="copy engines do not run send_receive"):
        weft.schedule.build(whole, "copy_engine")
    with pytest.raises(ValueError, match="all_to_all is not pulled"):
        weft.schedule.build(problem("all_to_all"), "copy_engine+pull")


def changed(schedule: Schedule, lane: str, steps: tuple[Step, ...]) -> Schedule:
    """rank 1 with other steps on a lane."""
    mine = tuple(replace(each, steps=steps) if each.name == lane else each for each in schedule.ranks[1])
    return replace(schedule, ranks=(schedule.ranks[0], mine, *schedule.ranks[2:]))


def with_part(schedule: Schedule, number: int, part: Schedule | None) -> Schedule:
    return replace(schedule, parts=(*schedule.parts[:number], part, *schedule.parts[number + 1 :]))


def test_what_is_wrong_is_refused() -> None:
    whole = problem("all_reduce", "all_gather")
    by_nccl, moved = weft.schedule.build(whole, "nccl"), weft.schedule.build(whole, "copy_engine")
    call = by_nccl.ranks[1][1].steps
    first, second = by_nccl.ranks[1][0].steps
    own, gather = moved.parts[0], by_nccl.parts[1]
    assert own is not None
    assert gather is not None
    copies = next(lane.steps for lane in own.ranks[1] if lane.name == "copy")
    signal = next(i for i, step in enumerate(copies) if isinstance(step, Signal))
    (compute,) = gather.ranks[1]
    half: Any = replace(compute.steps[0], dst=Region("out", 1, (0, 8), (0, 1)))  # type: ignore[call-arg]
    other: Any = replace(own.problem, sms=9)  # type: ignore[call-arg]
    wrong = [
        (changed(by_nccl, "compute", ()), "calls the computation on no lane; it needs one"),
        (changed(by_nccl, "compute", call * 2), "calls the computation on compute of kind compute, compute"),
        (changed(by_nccl, "network", (first, *call, second)), "calls the computation on network of kind network, compute"),
        (changed(by_nccl, "compute", (UserCall("x", 0), *call)), "calls collectives on lanes compute, network; use one lane"),
        (changed(by_nccl, "network", (second, first)), r"rank 1 calls collectives \[1, 0\]"),
        (changed(by_nccl, "network", (first,)), r"rank 1 calls collectives \[0\]"),
        (changed(by_nccl, "network", (first, second, second)), r"rank 1 calls collectives \[0, 1, 1\]"),
        (changed(by_nccl, "network", compute.steps), r"rank 1, lane network, step 0 .*: lanes have calls alone"),
        (with_part(by_nccl, 1, changed(gather, "compute", (half,))), "collective 1: .* has shape"),
        (with_part(by_nccl, 1, changed(gather, "compute", ())), "use NCCL for all collectives or for none"),
        (with_part(by_nccl, 1, None), "part 1 is None, for all_gather"),
        (with_part(by_nccl, 1, by_nccl.parts[0]), "part 1 is for all_reduce"),
        (with_part(by_nccl, 1, moved.parts[1]), "use NCCL for all collectives or for none"),
        (replace(by_nccl, parts=by_nccl.parts[:1]), "has 1 parts; its problem has 2 collectives"),
        (replace(by_nccl, buffers=gather.buffers), r"has buffers \['a', 'out'\]; leave them to its parts"),
        (replace(by_nccl, ranks=by_nccl.ranks[:3]), "has 3 ranks; its problem has 4"),
        (with_part(moved, 0, changed(own, "copy", copies[:signal] + copies[signal + 1 :])), "collective 0: .*nothing signals"),
        (with_part(moved, 0, changed(own, "copy", copies[1:])), "collective 0: "),
        (with_part(moved, 0, replace(own, problem=other)), "part 0 is for .* SMs"),
    ]
    for schedule, match in wrong:
        with pytest.raises(ScheduleError, match=match):
            weft.schedule.check(schedule)
    alone = weft.schedule.build(collective(), "sequential")
    lanes = (replace(alone.ranks[0][0], steps=(*alone.ranks[0][0].steps, *call)), *alone.ranks[0][1:])
    with pytest.raises(ScheduleError, match="a call of the user's own is for a ConcurrentProblem"):
        weft.schedule.check(replace(alone, ranks=(lanes, *alone.ranks[1:])))
    with pytest.raises(ValueError, match="schedule sequential has parts; only a schedule for a ConcurrentProblem has some"):
        replace(alone, parts=(alone,))


def test_a_problem_says_what_is_wrong_with_it() -> None:
    with pytest.raises(ValueError, match="collectives is empty"):
        ConcurrentProblem(collectives=(), world_size=2)
    with pytest.raises(ValueError, match=r"collectives\[0\] is .*world_size is 2"):
        ConcurrentProblem(collectives=(collective(),), world_size=2)
    with pytest.raises(ValueError, match=r"compute_us is -1.0; it must be at least 0"):
        problem("all_reduce", compute_us=-1.0)
    with pytest.raises(ValueError, match="compute_us is None"):
        weft.plan(problem("all_reduce"), H200)
    opaque = ConcurrentProblem(collectives=(OpaqueCollective(name="sends"),), world_size=2, compute_us=1.0)
    with pytest.raises(ValueError, match="communication_us is None"):
        weft.plan(opaque, H200)


def predicted_us(whole: ConcurrentProblem, spec: str) -> float:
    return total_us(weft.schedule.simulate(weft.schedule.build(whole, spec), H200))


def test_predictions_lie_between_ideal_and_sequential() -> None:
    loads = [
        problem("all_reduce", m=1 << 24, compute_us=4231.0, communication_us=2645.0),
        problem("all_gather", m=1 << 24, compute_us=100.0, communication_us=900.0),
        problem("all_reduce", compute_us=900.0, communication_us=9.0),
    ]
    for whole in loads:
        assert whole.compute_us is not None
        assert whole.communication_us is not None
        sequential_us = whole.compute_us + whole.communication_us
        assert predicted_us(whole, "sequential") == pytest.approx(sequential_us)
        for spec in ("nccl", "nccl+late", "nccl+priority"):
            fixed_us = 2 * (H200.fork_us or 0.0)
            assert max(whole.compute_us, whole.communication_us) <= predicted_us(whole, spec) <= sequential_us + fixed_us


def test_what_holds_fewer_sms_is_predicted_nearer_to_the_ideal() -> None:
    us = {spec: predicted_us(GEMMS, spec) for spec in ("nccl", "nccl+late", "nccl+priority", "nccl+priority+ctas=16")}
    assert us["nccl+late"] > us["nccl"] > us["nccl+priority"] > us["nccl+priority+ctas=16"]
    # All GEMMs have fewer SMs, also those that run alone.
    short = problem("all_gather", compute_us=4000.0, communication_us=100.0)
    assert predicted_us(short, "nccl+left=24") > predicted_us(short, "nccl")


def test_a_machine_that_does_not_say_treats_all_streams_alike() -> None:
    bare = replace(H200, contention={}, sources={k: v for k, v in H200.sources.items() if not k.startswith("contention")})
    us = {
        spec: total_us(weft.schedule.simulate(weft.schedule.build(GEMMS, spec), bare))
        for spec in ("nccl", "nccl+late", "nccl+priority")
    }
    assert len(set(us.values())) == 1


def test_the_shortlist_begins_with_what_wins_ties() -> None:
    whole = replace(GEMMS, collectives=(collective(m=1 << 20, world_size=2),))
    plan = weft.plan(whole, H200)
    found = shortlist(plan)
    assert found[:2] == ("sequential", "nccl")
    assert len(found) == len(set(found)) <= AT_MOST
    assert any(spec.startswith("copy_engine") for spec in found)
    assert any("left" in spec for spec in found)
    kinds = [family(spec) for spec in found[2:5]]
    assert len(set(kinds)) == 3
    few = weft.plan(whole, H200, schedules=[build(whole, spec) for spec in candidates(whole, Abilities())])
    assert shortlist(few) == ("sequential", "nccl", "nccl+late")


@pytest.mark.parametrize(("compute_us", "communication_us"), [(0.0, 100.0), (100.0, 0.0)])
def test_nothing_to_hide_leaves_sequential(compute_us: float, communication_us: float) -> None:
    whole = problem("all_reduce", compute_us=compute_us, communication_us=communication_us)
    assert shortlist(weft.plan(whole, H200)) == ("sequential",)


def with_lanes(schedule: Schedule, rank: int, *lanes: Lane) -> Schedule:
    return replace(schedule, ranks=(*schedule.ranks[:rank], lanes, *schedule.ranks[rank + 1 :]))


def test_each_rank_runs_its_own_lanes() -> None:
    schedule = weft.schedule.build(problem("all_reduce"), "nccl")
    network, compute = schedule.ranks[1]
    (call,) = compute.steps
    assert isinstance(call, UserCall)
    one = replace(compute, steps=(*network.steps, call))
    for lanes, expected in (
        ((compute, network), Program(name="nccl", computation=call, beside=(CollectivePart(0),), late=True)),
        (
            (replace(network, priority=True), compute),
            Program(name="nccl", computation=call, beside=(CollectivePart(0),), priority=True),
        ),
        ((one,), Program(name="nccl", computation=call, before=(CollectivePart(0),))),
        (
            (replace(compute, steps=(call, *network.steps)),),
            Program(name="nccl", computation=call, after=(CollectivePart(0),)),
        ),
        (
            (network, replace(compute, steps=(replace(call, left=8),))),
            Program(name="nccl", computation=replace(call, left=8), beside=(CollectivePart(0),)),
        ),
    ):
        other = with_lanes(schedule, 1, *lanes)
        weft.schedule.check(other)
        assert program_of(other, 1) == expected
        assert program_of(other, 0) == program_of(schedule, 0) != expected


def test_ranks_do_not_differ_where_collectives_have_to_match() -> None:
    whole = problem("all_reduce", "all_reduce")
    by_nccl, moved = weft.schedule.build(whole, "nccl+ctas=8"), weft.schedule.build(whole, "copy_engine+ctas=8")
    network, compute = by_nccl.ranks[1]
    copy = moved.ranks[1][0]
    (call,) = compute.steps
    first, second = network.steps
    for wrong, match in (
        (
            with_lanes(by_nccl, 1, replace(network, ctas=4), compute),
            "ctas is 4 on rank 1, lane network, and 8 on rank 0, lane net",
        ),
        (with_lanes(moved, 1, replace(copy, ctas=4), compute), "ctas is 4 on rank 1, lane copy, and 8 on rank 0"),
        (with_lanes(moved, 1, network, compute), "rank 1 calls collectives on lane network of kind network"),
        (
            with_lanes(by_nccl, 1, replace(network, steps=(first,)), replace(compute, steps=(call, second))),
            "rank 1 calls collectives on lanes compute, network; use one lane",
        ),
        (
            with_lanes(by_nccl, 1, replace(network, kind="copy"), compute),
            "rank 1 calls collectives on lane network of kind copy",
        ),
    ):
        with pytest.raises(ScheduleError, match=match):
            weft.schedule.check(wrong)


@pytest.mark.parametrize("spec", ["copy_engine", "copy_engine+pull+late", "copy_engine+ctas=8"])
@pytest.mark.parametrize("fan_out", [False, True])
def test_what_runs_is_the_parts_that_were_proved(spec: str, fan_out: bool) -> None:
    """Of each collective the schedule that weft.schedules.collectives makes."""
    whole = problem("all_gather", "all_reduce")
    schedule = build(whole, spec, fan_out=fan_out)
    parts = program_of(schedule, 2).beside
    assert [part.number for part in parts] == [0, 1]
    for part in parts:
        one = whole.collectives[part.number]
        assert isinstance(one, CollectiveProblem)
        made = collectives.PULL_BUILDERS if "pull" in spec else collectives.PUSH_BUILDERS
        own = made[one.op](Request(replace(one, sms=8) if "ctas" in spec else one, "copy_engine", 4, fan_out))
        assert part.steps == replace(own, name=str(parse(spec)), chunks=1) == schedule.parts[part.number]


@pytest.mark.parametrize("spec", ["nccl+ctas=8", "copy_engine+late+ctas=8", "sequential"])
def test_joined_lanes_have_the_steps_of_all_parts(spec: str) -> None:
    """Each once, and on each lane collective by collective."""
    schedule = build(problem("all_gather", "all_reduce"), spec)
    whole = joined(schedule)
    assert joined(whole) == whole
    assert len(whole.buffer) == sum(len(part.buffers) for part in schedule.parts if part is not None)
    for rank, lanes in enumerate(whole.ranks):
        steps = [step for part in schedule.parts if part is not None for lane in part.ranks[rank] for step in lane.steps]
        assert sum(len(lane.steps) for lane in lanes) == len(steps) + 1
        for lane in lanes:
            found = [whole.buffer[region.buffer].collective for step in lane.steps for region in regions(step)]
            assert found == sorted(found)
            assert lane.ctas == (8 if lane.kind in ("network", "blocks") else 0)
        names = [lane.name for lane in lanes]
        assert names.index("compute") == (1 if spec == "nccl+ctas=8" else 0)
        assert ("blocks.local" in names) == ("copy_engine" in spec)


@pytest.mark.parametrize("ops", [("all_gather",), ("all_reduce",), ("all_gather", "all_reduce")])
def test_one_rank_has_the_schedules_of_many(ops: tuple[Op, ...]) -> None:
    alone = problem(*ops, world_size=1)
    for spec in (*candidates(alone), "copy_engine", "copy_engine+pull"):
        schedule, method = weft.schedule.build(alone, spec), parse(spec)
        weft.schedule.check(schedule)
        found = program_of(schedule, 0)
        assert (found.name, found.computation.left, found.priority) == (spec, method.left, method.priority)


def test_numbers_that_nothing_reads_are_refused() -> None:
    with pytest.raises(ValueError, match="ctas is -7"):
        Lane("compute", "compute", (), ctas=-7)
    schedule = weft.schedule.build(collective(), "sequential")
    for chunks in (0, -3):
        with pytest.raises(ValueError, match=f"chunks is {chunks}"):
            replace(schedule, chunks=chunks)
    (lane,) = schedule.ranks[1]
    for name, value in (("priority", True), ("ctas", 16)):
        with pytest.raises(ValueError, match=f"{name} is {value} on rank 1, lane {lane.name}"):
            with_lanes(schedule, 1, replace(lane, **{name: value}))  # type: ignore[arg-type]
