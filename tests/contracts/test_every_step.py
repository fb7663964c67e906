"""What holds of every kind of step: the checker misses it where it is left out, the simulator gives it a time, the runtime a
launch, and the timeline a text. A new kind of step is tested by being listed in EXAMPLES."""

from __future__ import annotations

import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from families import CASES, made
from test_launch_plan import FakeProgram

import weft
from weft.checker.ragged import RaggedCompiler
from weft.checker.structure import Compiler
from weft.core import codec, machine, schedule
from weft.core.parts import joined
from weft.core.problem import Op
from weft.core.schedule import (
    STEP_CONTENTS,
    Collective,
    Copy,
    FusedCollective,
    Gemm,
    GroupedGemm,
    Lookup,
    Norm,
    Push,
    Reduce,
    Schedule,
    SegmentCopies,
    SendReceive,
    ShareCounts,
    Signal,
    Step,
    UserCall,
    Wait,
    regions,
    segments,
    signalled_flags,
    waits,
)
from weft.core.work import WORK, flops, label
from weft.perf import engine, rotation, run
from weft.runtime.bindings import Where
from weft.runtime.bound import KERNELS
from weft.runtime.launch_plan import LaunchPlan
from weft.runtime.launches import CopyLaunch, FlagOperations, KernelLaunch, Launch, TorchLaunch, WaiterWords
from weft.schedules.timelines import LINES

EXAMPLES: dict[type, tuple[Op, str, tuple[int, ...]]] = {
    Wait: ("all_gather_matmul", "shard_p2p", ()),
    Signal: ("all_gather_matmul", "shard_p2p", ()),
    Copy: ("all_gather_matmul", "shard_p2p", ()),
    Push: ("all_gather_matmul", "sequential_stores", ()),
    Gemm: ("matmul_reduce_scatter", "direct_store:1", ()),
    Reduce: ("matmul_reduce_scatter", "shard_p2p", ()),
    Norm: ("matmul_all_reduce", "sequential", ()),
    Lookup: ("embedding_bag_all_to_all", "direct_store:1", ()),
    Collective: ("all_reduce", "sequential", ()),
    FusedCollective: ("matmul_all_reduce", "one_shot", ()),
    SendReceive: ("matmul_all_to_all", "node_slices:1", (2, 2)),
    UserCall: ("concurrent", "nccl", ()),
    ShareCounts: ("ragged_all_to_all_matmul", "sequential", ()),
    SegmentCopies: ("ragged_all_to_all_matmul", "sequential", ()),
    GroupedGemm: ("ragged_all_to_all_matmul", "fused", ()),
}
"""By kind of step, a schedule that has it; a norm is in that of a problem with one."""
IMPLIED = {
    ("all_gather_matmul", "sequential_stores"),
    ("all_to_all_matmul", "sequential_stores"),
    ("matmul_all_reduce", "shard_p2p"),
    ("matmul_all_reduce", "hetero_unfused_1d"),
    ("matmul_all_reduce", "node_slices"),
    ("matmul_reduce_scatter", "node_slices"),
    ("ragged_all_to_all_matmul", "sequential"),
}
"""Families some of whose waits and signals follow from others."""
LAUNCHES: dict[type, type[Launch]] = {
    Wait: FlagOperations,
    Signal: FlagOperations,
    Copy: CopyLaunch,
    Push: CopyLaunch,
    Gemm: TorchLaunch,
    Reduce: TorchLaunch,
    Norm: TorchLaunch,
    Lookup: TorchLaunch,
    Collective: TorchLaunch,
    FusedCollective: KernelLaunch,
    SendReceive: TorchLaunch,
    ShareCounts: TorchLaunch,
    SegmentCopies: TorchLaunch,
    GroupedGemm: TorchLaunch,
}
"""By kind of step, what runs where no kernel of weft does it; a fused collective is always a kernel."""
IN_KERNELS = (Lookup, ShareCounts, SegmentCopies, GroupedGemm)
"""Kinds whose kernels raise their flags themselves."""
SPELLED_OUT = {FusedCollective: "comes as the steps that it stands for"}
BESIDE = {UserCall: "is a step of a ConcurrentProblem alone"}
NO_KERNEL = "is launched by torch, NCCL or the stream"
TABLES: dict[str, tuple[Mapping[Any, object], dict[type, str]]] = {
    "core, what a step names": (STEP_CONTENTS, {}),
    "core, what it is called, and how much it is": (WORK, {}),
    "checker": (Compiler.STEPS, SPELLED_OUT),
    "checker, of row counts on devices": (RaggedCompiler.STEPS, SPELLED_OUT),
    "simulator": (engine.STEPS, SPELLED_OUT | BESIDE),
    "simulator, beside a computation": (engine.CONCURRENT_STEPS, SPELLED_OUT),
    "simulator, whether all ranks do the same": (rotation._READ, SPELLED_OUT),
    "timelines": (LINES, SPELLED_OUT),
    "runtime, kernels": (KERNELS, dict.fromkeys((Signal, Copy, Collective, SendReceive), NO_KERNEL) | BESIDE),
}
"""By room, what gives each type of step its meaning there, and the types that it leaves out, each with the reason."""
PARTS = {"Region", "Flag", "Store", "Part", "Sum", "Bags", "Send", "Receive", "Segment", "SegmentCopy", "SegmentProduct"}
WHOLES = {"Lane", "Buffer", "Schedule"}
every_kind = pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)


def example(kind: type) -> Schedule:
    return made(*EXAMPLES[kind], norm=kind is Norm)


def places(found: Schedule, kind: type) -> list[tuple[int, str, int, Step]]:
    """Steps of a kind that have something to do."""
    return [(*at[:1], at[1].name, *at[2:]) for at in found if isinstance(at[3], kind) and getattr(at[3], "parts", True)]


def with_steps(found: Schedule, rank: int, name: str, at: int, *steps: Step) -> Schedule:
    """The schedule with others in the place of one step."""
    lanes = tuple(
        replace(lane, steps=(*lane.steps[:at], *steps, *lane.steps[at + 1 :])) if lane.name == name else lane
        for lane in found.ranks[rank]
    )
    return replace(found, ranks=(*found.ranks[:rank], lanes, *found.ranks[rank + 1 :]))


def test_every_kind_of_step_and_every_part_is_listed() -> None:
    assert set(EXAMPLES) == set(get_args(Step))
    values = {name for name, one in inspect.getmembers(schedule, inspect.isclass) if one.__module__ == schedule.__name__}
    assert {name for name in values if dataclasses.is_dataclass(getattr(schedule, name))} == (
        PARTS | WHOLES | {kind.__name__ for kind in EXAMPLES}
    )


@pytest.mark.parametrize("room", TABLES)
def test_each_room_has_a_meaning_for_every_kind(room: str) -> None:
    """Or leaves it out on purpose, as TABLES says."""
    table, left_out = TABLES[room]
    missing = {kind.__name__ for kind in get_args(Step)} - {kind.__name__ for kind in table}
    assert missing == {kind.__name__ for kind in left_out}, f"{room}: no meaning of {sorted(missing)}"
    assert set(table) <= set(get_args(Step))


def test_a_kind_without_a_meaning_is_named() -> None:
    class Other:
        pass

    for ask in (waits, signalled_flags, regions, segments, flops):
        with pytest.raises(KeyError, match="Other"):
            ask(Other())  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="Other"):
        weft.schedule.check(with_steps(made(*EXAMPLES[Wait]), 0, "compute", 0, Other()))  # type: ignore[arg-type]


@every_kind
def test_the_checker_misses_one_that_is_left_out(kind: type) -> None:
    found = example(kind)
    assert places(found, kind)
    for rank, lane, at, _ in places(found, kind):
        with pytest.raises(weft.schedule.ScheduleError):
            weft.schedule.check(with_steps(found, rank, lane, at))


@pytest.mark.parametrize(("op", "spec", "nodes"), CASES, ids=lambda value: str(value or "node"))
def test_the_checker_misses_a_step_that_any_family_leaves_out(op: Op, spec: str, nodes: tuple[int, ...]) -> None:
    """The first and the last of each kind, on each lane of rank 0. A wait for the call before may follow from others.

    A wait for a turn may be missing: turns make copies faster, and no result depends on them.
    """
    found, rank = made(op, spec, nodes), 0
    flags = (Wait, Signal) if (op, spec.partition(":")[0]) in IMPLIED else ()
    for lane in found.ranks[rank]:
        of_kind: dict[type, list[int]] = defaultdict(list)
        for at, step in enumerate(lane.steps):
            if isinstance(step, Wait) and (step.on_previous_call or step.flag.name == "turn"):
                continue
            if not isinstance(step, flags):
                of_kind[type(step)].append(at)
        left_out = {at: with_steps(found, rank, lane.name, at) for ats in of_kind.values() for at in (ats[0], ats[-1])}
        assert [str(lane.steps[at]) for at, without in left_out.items() if _is_proved(without)] == [], lane.name


def _is_proved(found: Schedule) -> bool:
    try:
        weft.schedule.check(found)
    except weft.schedule.ScheduleError:
        return False
    return True


@every_kind
def test_the_checker_refuses_one_that_is_there_twice_or_elsewhere(kind: type) -> None:
    """What only reads, or writes the same again, may be there twice: on a rank that is none it may not."""
    found = example(kind)
    rank, lane, at, step = places(found, kind)[0]
    if signalled_flags(step) or isinstance(step, (Collective, FusedCollective, SendReceive, UserCall)):
        with pytest.raises(weft.schedule.ScheduleError):
            weft.schedule.check(with_steps(found, rank, lane, at, step, step))
    elsewhere = (
        codec.dumps(step).replace('"rank": 0', '"rank": 9').replace('"to": 1', '"to": 9').replace('"src": 0', '"src": 9')
    )
    if elsewhere != codec.dumps(step):
        moved = codec.loads(kind, elsewhere)
        with pytest.raises(weft.schedule.ScheduleError):
            weft.schedule.check(with_steps(found, rank, lane, at, moved))


@every_kind
def test_it_comes_back_from_json_by_its_name(kind: type) -> None:
    for _, _, _, step in places(example(kind), kind):
        data = codec.dump(step)
        assert data["type"] == kind.__name__
        assert codec.load(Step, data) == step


@every_kind
def test_the_simulator_gives_it_a_time_and_a_text(kind: type) -> None:
    found = example(kind)
    outcome = run(found, machine.load("h200x8"))
    wanted = {label(rank, step) for rank, _, _, step in places(joined(found), kind)}
    assert all(wanted)
    if kind is FusedCollective:  # is simulated as the steps that it stands for
        assert outcome.total_us > 0
        return
    spans = [span for span in outcome.spans if span.kind == WORK[kind].kind and span.name in wanted]
    assert {span.name for span in spans} == wanted
    assert max(span.duration_us for span in spans) > 0


@every_kind
def test_a_timeline_has_a_line_for_it(kind: type) -> None:
    found = example(kind)
    words = {
        FusedCollective: "one kernel,",
        UserCall: "call",
        ShareCounts: "share counts",
        SegmentCopies: "copy",
        GroupedGemm: "grouped gemm",
        SendReceive: "send",
        Collective: "all_reduce",
    }
    text = weft.schedule.timeline(found, width=300)
    assert f" {words.get(kind, kind.__name__.lower())} " in " ".join(text.split()) + " "


class Planned(FakeProgram):
    """With the steps that are always kernels."""

    def __init__(self, found: Schedule, rank: int) -> None:
        super().__init__(found, rank)
        self.schedule, self.flags = found, WaiterWords(found)
        wheres = [Where(at_rank, lane.name, at, step) for at_rank, lane, at, step in found if at_rank == rank]
        fused = [where for where in wheres if isinstance(where.step, FusedCollective)]
        self.kernels = {(where.lane, where.position): SimpleNamespace(where=where, manages_own_flags=True) for where in fused}
        self.row_counts = object()  # type: ignore[assignment]


@every_kind
def test_the_runtime_launches_it(kind: type) -> None:
    found = example(kind)
    mine = [(lane, at, step) for rank, lane, at, step in places(found, kind) if rank == 0]
    program = Planned(found, 0)
    if kind is UserCall:  # is no part of a program: `concurrent` calls it
        with pytest.raises(AssertionError):
            LaunchPlan(program, frozenset())  # type: ignore[arg-type]
        return
    launched: dict[tuple[str, int], list[Launch]] = defaultdict(list)
    for _, launches in LaunchPlan(program, frozenset(program.kernels)).lanes:  # type: ignore[arg-type]
        for one in launches:
            launched[one.where.lane, one.where.position].append(one)
    for lane, at, step in mine:
        assert any(isinstance(one, LAUNCHES[kind]) for one in launched[lane, at]), step
        words = [word for one in launched[lane, at] if isinstance(one, FlagOperations) for word in one.words]
        raised = {word.address for word in words if word.kind == "signal"}
        if kind not in IN_KERNELS:
            assert raised == {address for flag in signalled_flags(step) for address in program.waiters(flag)}


@every_kind
def test_what_it_touches_is_known(kind: type) -> None:
    """A step that computes or moves names regions or flags: whoever renames or reads them asks these functions."""
    for _, _, _, step in places(example(kind), kind):
        if kind in (UserCall, SegmentCopies, GroupedGemm):
            continue
        assert regions(step) or signalled_flags(step) or waits(step)
