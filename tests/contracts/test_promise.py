"""What is proved is what runs: one thing of a proved schedule is changed, on one rank, and what then runs is changed with it.

For each family and each kind of change (tests/helpers/promise_changes.py) the first changed schedule that `check` accepts
is given to the operator. Its results have to be right. What happens below the schedule (tests/helpers/promise_trace.py) has to
differ from what happens with the unchanged one on the ranks whose lanes are changed, and to be the same on all others. Step by
step on CPUs, each lane also has to wait, signal and copy as its schedule says, in that order.

A new family or kind of step is covered by being listed in families.py and test_every_step.py. One that no change fits makes a
test fail, unless it is listed here with the reason. What execution does not follow is listed in docs/lab/decisions.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import get_args

import pytest
import torch
from conftest import RankFixture
from families import CASES, NODES, PROBLEMS, WORLD, sums_rows
from promise_changes import CHANGES, kinds_changed
from promise_trace import CALLERS_THREAD, Events, done, promised
from promise_work import CALLS, PART, given, named
from rank_pools import Pool, interpreting
from test_every_step import EXAMPLES

import weft
from weft.core.concurrent import ConcurrentProblem
from weft.core.problem import COLLECTIVE_OPS, CollectiveProblem, Op, RaggedProblem
from weft.core.schedule import (
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
)
from weft.runtime.bindings import Where
from weft.runtime.fused_collective import _hops
from weft.runtime.ragged_kernels import RankOrders
from weft.schedules import parse

MOST = 80
"""Changed schedules that are tried for one that the checker accepts."""
Case = tuple[str, str]
"""The name of a family, and what is changed."""


def _name(spec: str) -> str:
    return spec.partition(":")[0]


def _of(op: Op) -> list[tuple[str, tuple[int, ...]]]:
    """The families of an operator, on one node and on several; those with chunks in two. On one node, node_slices has another
    family's steps. All of a sum of rows is in one step, as in matmul_all_reduce."""
    found = [(spec, nodes) for one, spec, nodes in CASES if one == op and (nodes or _name(spec) != "node_slices")]
    found = [(spec, nodes) for spec, nodes in found if not sums_rows(op, spec)]
    return [(spec, nodes) for spec, nodes in found if not (spec.endswith(":1") and (f"{_name(spec)}:2", nodes) in found)]


def _built(problem: object, op: Op, spec: str) -> Schedule:
    chosen = (spec,) if op == "concurrent" or op.startswith("ragged") else parse(spec)
    return weft.schedule.build(problem, *chosen)  # type: ignore[arg-type]


def _proved(schedule: Schedule) -> bool:
    try:
        weft.schedule.check(schedule)
    except (weft.schedule.ScheduleError, ValueError):
        return False
    return True


def _changes(schedule: Schedule, what: str, kind: type[Step] | None = None) -> Iterator[Schedule]:
    """Schedules that the checker accepts and that differ in one thing. kind: of a step that is to be changed."""
    for rank in range(schedule.problem.world_size):
        for other in islice(CHANGES[what](schedule, rank), MOST):
            kinds = kinds_changed(schedule, other)
            if (
                any(_lanes(other, each) != _lanes(schedule, each) for each in range(len(schedule.ranks)))
                and (kind is None or kind in kinds)
                and _proved(other)
            ):
                yield replace(other, name="by hand")


def _lanes(schedule: Schedule, rank: int) -> tuple[object, ...]:
    """All lanes of a rank, also those of parts."""
    return schedule.ranks[rank], *(part.ranks[rank] for part in schedule.parts if part is not None)


def _is_within(some: Sequence[str], all_of_it: Iterable[str]) -> bool:
    """Whether the first are among the others, in the same order."""
    rest = iter(all_of_it)
    return all(one in rest for one in some)


def _kept_promise(before: Schedule, after: Schedule, seen: Sequence[Events], now: Sequence[Events], what: object) -> None:
    """Where a rank's lanes have changed, what it does has, and nowhere else."""
    for rank, (old, new) in enumerate(zip(seen, now, strict=True)):
        changed = _lanes(before, rank) != _lanes(after, rank)
        assert (old != new) == changed, (what, rank, old, new)


def _on_their_threads(schedule: Schedule, rank: int, events: Events, what: object) -> None:
    """The compute lane runs on the thread of the caller, or another one where it has nothing. All others have their own."""
    threads = {lane.name: set[str]() for lane in schedule.ranks[rank]}
    for lane, _, thread in (place.partition(" on ") for place in events):
        threads.setdefault(lane, set()).add(thread)
    compute = {lane.name for lane in schedule.ranks[rank] if lane.kind == "compute" and threads[lane.name]}
    inline = [lane for lane, found in threads.items() if found == {CALLERS_THREAD}]
    assert len(inline) <= 1, (what, rank, inline)
    assert compute <= set(inline), (what, rank, threads)
    for lane in schedule.ranks[rank]:
        if lane.name not in inline:
            assert threads[lane.name] <= {f"weft-{lane.name}-{rank}"}, (what, rank, threads)


def _is_promised(schedule: Schedule, seen: Sequence[Events], what: object) -> None:
    """On CPUs, without kernels, every lane waits, signals and copies as the schedule says, in its order, on its own thread."""
    for rank, events in enumerate(seen):
        wanted = promised(schedule, rank, CALLS)
        _on_their_threads(schedule, rank, events, what)
        found = done(events, wanted)
        assert set(found) >= set(wanted), (what, rank)
        for lane, of_lane in found.items():
            flags = [one for one in of_lane if not one.startswith("at ")]
            assert flags == [one for one in wanted.get(lane, []) if not one.startswith("at ")], (what, rank, lane)
            assert _is_within(wanted.get(lane, []), of_lane), (what, rank, lane)


def _check_changes(
    pool: Pool,
    op: Op,
    nodes: tuple[int, ...],
    unchanged: dict[str, Schedule],
    changed: dict[Case, Schedule],
    *,
    dtype: torch.dtype = torch.float32,
    kernels: bool = False,
) -> None:
    """Runs every unchanged schedule twice and every changed one once, and compares."""
    runs = [(f"{spec}, {turn}", schedule) for spec, schedule in unchanged.items() for turn in ("unchanged", "again")]
    runs += [(", ".join(case), schedule) for case, schedule in changed.items()]
    by_rank = pool.run(given, op, runs, nodes[0] if nodes else 0, dtype, kernels)
    seen = {name: [found[name] for found in by_rank] for name, _ in runs}
    for spec, schedule in unchanged.items():
        assert seen[f"{spec}, unchanged"] == seen[f"{spec}, again"], spec
        if not kernels and op != "concurrent":
            _is_promised(schedule, seen[f"{spec}, unchanged"], spec)
    for case, schedule in changed.items():
        before = unchanged[case[0]]
        _kept_promise(before, schedule, seen[f"{case[0]}, unchanged"], seen[", ".join(case)], (op, *case))
        if not kernels and op != "concurrent":
            _is_promised(schedule, seen[", ".join(case)], (op, *case))


def _schedules(
    pool: Pool, op: Op, names: list[str], nodes: tuple[int, ...], dtype: torch.dtype, kernels: bool
) -> dict[str, Schedule]:
    """By name, the schedule of the problem that calls of this file have."""
    if op == "concurrent":
        return {spec: _built(_make_concurrent_problem(spec), op, spec) for spec in names}
    (found, *_) = pool.run(named, op, names[:1], nodes[0] if nodes else 0, dtype, kernels)
    problem = found[names[0]].problem
    return {spec: _built(problem, op, spec) for spec in names}


def _make_concurrent_problem(spec: str) -> ConcurrentProblem:
    ops = [op for op in COLLECTIVE_OPS if "pull" not in spec or op in ("all_gather", "all_reduce")]
    return ConcurrentProblem(
        collectives=tuple(
            CollectiveProblem(op=op, m=PART * WORLD, world_size=WORLD, dtype="float32", staging_bytes=1 << 16) for op in ops
        ),
        world_size=WORLD,
    )


# Every family.

NO_FLAGS = "no step of it signals or waits"
NO_ORDER = "each step needs what the one before it has made, and none has several parts"
BESIDE = "its steps are collectives of NCCL's or gloo's and the computation, on lanes that have nothing else"
SEGMENTS = "a segment is not cut, and lies in the buffer that the problem has for it"
RAGGED: tuple[Op, ...] = tuple(op for op in PROBLEMS if op.startswith("ragged"))
ALONE: tuple[Op, ...] = tuple(op for op in PROBLEMS if op != "concurrent" and not op.startswith("ragged"))
WITH_ONE_KERNEL: dict[Op, tuple[str, ...]] = {
    "matmul_reduce_scatter": ("sequential_stores", "one_shot"),
    "matmul_all_reduce": ("sequential_stores", "one_shot", "two_shot"),
}
IN_ONE_ORDER: tuple[Op, ...] = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_to_all",
    "all_to_all_matmul",
    "all_to_all_columns_matmul",
    *COLLECTIVE_OPS,
)
EXCEPTIONS: dict[tuple[Op, str, str], str] = {
    **{(op, "sequential", "flag"): NO_FLAGS for op in ALONE},
    **{(op, "sequential", "order"): NO_ORDER for op in IN_ONE_ORDER},
    **{(op, name, "flag"): NO_FLAGS for op, names in WITH_ONE_KERNEL.items() for name in names},
    **{(op, name, "order"): NO_ORDER for op, names in WITH_ONE_KERNEL.items() for name in names},
    **{(op, name, "region"): SEGMENTS for op in RAGGED for name in ("sequential", "fused")},
    **{
        ("concurrent", name, what): BESIDE
        for name in ("sequential", "nccl", "nccl+late")
        for what in ("gate", "flag", "region")
    },
}
"""(operator, family, what would be changed): why nothing of that kind can be changed there."""


def _on_cpus(names: Iterable[str]) -> list[str]:
    """What of a schedule's name means something on CPUs: who moves, and when. Priorities and numbers of blocks are a GPU's."""
    words = (spec.split("+") for spec in names)
    return list(
        dict.fromkeys(
            "+".join(one for one in spec if one in ("sequential", "nccl", "copy_engine", "late", "pull")) for spec in words
        )
    )


def _first_changes(op: Op, unchanged: dict[str, Schedule]) -> dict[Case, Schedule]:
    """The first change of each kind in each family; all of them, but for the exceptions."""
    found, missing, needless = dict[Case, Schedule](), [], []
    for spec, schedule in unchanged.items():
        for what in CHANGES:
            change = next(_changes(schedule, what), None)
            if change is not None:
                found[spec, what] = change
            excepted = (op, _name(spec), what) in EXCEPTIONS
            if excepted == (change is not None):
                (needless if excepted else missing).append((op, spec, what))
    assert not missing, f"change these in promise_changes.py, or say in EXCEPTIONS why they cannot be: {missing}"
    assert not needless, f"these can be changed: {needless}"
    return found


FAMILIES = [(op, nodes) for op in PROBLEMS for nodes in ((), NODES) if any(one == nodes for _, one in _of(op))]


def _rarely(op: Op, nodes: tuple[int, ...]) -> tuple[pytest.MarkDecorator, ...]:
    """Where the ranks of several nodes run the sequential family alone, which has the same steps on one."""
    return (pytest.mark.slow,) * (bool(nodes) and [_name(spec) for spec, one in _of(op) if one == nodes] == ["sequential"])


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("op", "nodes"),
    [pytest.param(op, nodes, marks=_rarely(op, nodes), id=f"{op}{'-nodes' * bool(nodes)}") for op, nodes in FAMILIES],
)
def test_every_family_runs_what_is_changed(ranks: RankFixture, op: Op, nodes: tuple[int, ...]) -> None:
    names = [spec for spec, one in _of(op) if one == nodes]
    names = _on_cpus(names) if op == "concurrent" else names
    pool = ranks(sum(nodes) or WORLD)
    unchanged = _schedules(pool, op, names, nodes, torch.float32, False)
    _check_changes(pool, op, nodes, unchanged, _first_changes(op, unchanged))


# Every kind of step.

STEP_EXCEPTIONS: dict[type[Step], str] = {
    Norm: "its regions and its epsilon are those of the problem; test_all_reduce_norm.py has schedules that change them"
}
"""Kinds of step of which nothing can be changed: why."""


def _example(kind: type[Step]) -> tuple[Op, str, tuple[int, ...]]:
    """As in EXAMPLES, where of a chunked family two chunks have more to change."""
    op, spec, nodes = EXAMPLES[kind]
    return op, spec.replace(":1", ":2"), nodes


def test_every_kind_of_step_has_an_example() -> None:
    assert set(EXAMPLES) == set(get_args(Step))


@pytest.mark.ranks
@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
def test_every_kind_of_step_runs_as_it_is_changed(ranks: RankFixture, kind: type[Step]) -> None:
    """By every kind of change that fits it."""
    op, spec, nodes = _example(kind)
    pool = ranks(sum(nodes) or WORLD)
    unchanged = _schedules(pool, op, [spec], nodes, torch.float32, False)
    found = {what: next(_changes(unchanged[spec], what, kind), None) for what in CHANGES}
    changed = {(spec, what): other for what, other in found.items() if other is not None}
    assert bool(changed) != (kind in STEP_EXCEPTIONS), f"change a {kind.__name__}, or say in STEP_EXCEPTIONS why it cannot be"
    _check_changes(pool, op, nodes, unchanged, changed)


# As kernels, by Triton's interpreter.

KERNELS: dict[type[Step], list[tuple[Op, str]]] = {
    Gemm: [("all_gather_matmul", "flag_gated:2"), ("matmul_reduce_scatter", "direct_store:2")],
    Reduce: [("matmul_reduce_scatter", "shard_p2p")],
    Lookup: [("embedding_bag_all_to_all", "direct_store:2")],
    Push: [("all_gather_matmul", "sequential_stores"), ("all_to_all_columns_matmul", "direct_store:2")],
    FusedCollective: [("matmul_all_reduce", "one_shot")],
    Norm: [],
    ShareCounts: [("ragged_all_to_all_matmul", "fused")],
    SegmentCopies: [("ragged_all_to_all_matmul", "sequential")],
    GroupedGemm: [("ragged_all_to_all_matmul", "fused"), ("ragged_matmul_all_to_all", "fused")],
}
"""By kind of step that is a kernel, schedules that have it and can be changed."""
NO_KERNELS = (Wait, Signal, Copy, Collective, SendReceive, UserCall)
"""Copies, gloo's collectives and messages; flags of their own steps. They run as on CPUs without kernels."""
INVISIBLE = {(ShareCounts, "flag"): "its kernel has a word for each rank, whatever its flags are called"}
"""What the proof reads and kernels do not follow, as docs/lab/decisions.md lists it."""
RUN_BY_KERNELS = list(dict.fromkeys(case for cases in KERNELS.values() for case in cases))


def test_every_kind_of_step_has_a_kernel_or_none() -> None:
    assert {*KERNELS, *NO_KERNELS} == set(get_args(Step))


def _kernel_lanes(schedule: Schedule, rank: int) -> int:
    """Lanes with kernels; the interpreter runs one at a time in a process."""
    return sum(any(isinstance(step, tuple(KERNELS)) for step in lane.steps) for lane in schedule.ranks[rank])


def _interpretable(before: Schedule, after: Schedule) -> bool:
    """Whether kernels take the changed schedule: what they do not run they refuse, when it is bound."""
    try:
        for rank in range(after.problem.world_size if isinstance(after.problem, RaggedProblem) else 0):
            RankOrders(after, rank)
        for rank, lane, position, step in after:
            if isinstance(step, FusedCollective):
                _hops(after, Where(rank, lane.name, position, step), step)
    except ValueError:
        return False
    return all(_kernel_lanes(after, rank) <= _kernel_lanes(before, rank) for rank in range(after.problem.world_size))


@pytest.mark.ranks
@pytest.mark.parametrize(("op", "spec"), RUN_BY_KERNELS, ids=lambda value: str(value))
def test_kernels_run_what_is_changed(op: Op, spec: str) -> None:
    pool, dtype = interpreting(2), torch.float16
    unchanged = _schedules(pool, op, [spec], (), dtype, True)
    schedule, changed = unchanged[spec], dict[Case, Schedule]()
    for kind in (kind for kind, cases in KERNELS.items() if (op, spec) in cases):
        for what in CHANGES:
            fits = (other for other in _changes(schedule, what, kind) if _interpretable(schedule, other))
            other = next(fits, None)
            if other is not None and (kind, what) not in INVISIBLE:
                changed[spec, f"{what} of a {kind.__name__}"] = other
        assert changed, f"change a {kind.__name__} of {op}, {spec}"
    _check_changes(pool, op, (), unchanged, changed, dtype=dtype, kernels=True)


WITH_KERNELS = [
    (op, spec) for op in PROBLEMS for spec, nodes in _of(op) if not nodes and op != "concurrent" and op != "all_gather"
]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("op", "spec"), WITH_KERNELS, ids=lambda value: str(value))
def test_every_family_runs_what_is_changed_as_kernels(op: Op, spec: str) -> None:
    pool, dtype = interpreting(2), torch.float16
    unchanged = _schedules(pool, op, [spec], (), dtype, True)
    schedule, changed = unchanged[spec], dict[Case, Schedule]()
    for what in CHANGES:
        fits = (other for other in _changes(schedule, what) if _interpretable(schedule, other))
        for number, other in enumerate(islice(fits, 3)):
            changed[spec, f"{what} {number}"] = other
    runs = [("unchanged", schedule), *((name, other) for (_, name), other in changed.items())]
    by_rank = pool.run(given, op, runs, 0, dtype, True)
    seen = {name: [found[name] for found in by_rank] for name, _ in runs}
    shown = dict.fromkeys((name.partition(" ")[0] for _, name in changed), False)
    for (_, name), other in changed.items():
        differ = [old != new for old, new in zip(seen["unchanged"], seen[name], strict=True)]
        own = [before != after for before, after in zip(schedule.ranks, other.ranks, strict=True)]
        assert all(mine for mine, differs in zip(own, differ, strict=True) if differs), (op, spec, name)
        shown[name.partition(" ")[0]] |= differ == own
    # One change of a kind may be of what execution does not follow (docs/lab/decisions.md), but not all three.
    assert all(shown.values()), (op, spec, shown)
