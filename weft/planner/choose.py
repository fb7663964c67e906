"""Choose a schedule: candidates -> predict each -> the fastest. Pure functions of the problem and the machine.

Contract: `plan` is deterministic, so ranks that plan alone agree. Each candidate is simulated whole; the least predicted
time wins, and of equal times the simpler schedule: earlier in `weft.schedules.NAMES`, then fewer chunks. The sequential
program is always among them, so nothing is chosen that is predicted to lose to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from weft.core.concurrent import ConcurrentProblem
from weft.core.errors import require
from weft.core.machine import Machine, as_machine
from weft.core.problem import CollectiveProblem, Problem
from weft.core.schedule import Schedule
from weft.perf import Outcome, run
from weft.perf.concurrent import computation_us
from weft.perf.terms import whole_collective_us, whole_gemm_us
from weft.planner.explain import Option, explain
from weft.planner.values import Candidate, Plan
from weft.schedules import FAMILIES, NAMES, build, candidates, check_op, simplicity


def plan(
    problem: Problem,
    machine: Machine | str | Path,
    *,
    schedules: Sequence[Schedule] | None = None,
    only: str | None = None,
    chunks: int | None = None,
) -> Plan:
    """The fastest predicted schedule for `problem` on `machine`, all candidates, and why.

    Args:
        problem: what is to be computed.
        machine: a Machine, a shipped profile's name, or a JSON file's path.
        schedules: candidates instead of the default ones; the sequential program joins them.
        only: candidates of this family alone, so that it is chosen even if it loses; `sequential_us` is there to compare.
        chunks: with only, this count alone.

    An empty result has the sequential program alone, unless others are asked for. Raises ValueError if the machine has fewer
    GPUs than the problem, or no rate for its dtype, for a ConcurrentProblem without compute_us, for chunks without only or of a
    family that has none, for a family that weft or the operator lacks, and for a schedule of another problem.
    """
    require("problem", problem, Problem, "use a weft.Problem, LookupProblem or CollectiveProblem")
    machine = as_machine(machine)
    machine.require_for(problem)
    if not isinstance(problem, (CollectiveProblem, ConcurrentProblem)):
        machine.tflops(problem.dtype)
    considered = _considered(problem, machine, schedules, only, chunks)
    ideal_us = max(whole_gemm_us(machine, problem), whole_collective_us(machine, problem))
    options, best = _predict(considered, machine, ideal_us)
    sequential_us = next((o.predicted_us for o in options if o.schedule.name == "sequential"), None)
    if sequential_us is None:
        sequential_us = run(build(problem, "sequential"), machine).total_us
    return Plan(
        problem=problem,
        machine=machine.name,
        candidates=tuple(option.candidate for option in options),
        sequential_us=sequential_us,
        computation_us=whole_gemm_us(machine, problem),
        communication_us=whole_collective_us(machine, problem),
        why=explain(problem, machine, options, sequential_us, asked=only is not None),
        spans=best.spans,
    )


def _considered(
    problem: Problem, machine: Machine, schedules: Sequence[Schedule] | None, only: str | None, chunks: int | None
) -> list[Schedule]:
    _check_asked(problem, schedules, only, chunks)
    if isinstance(problem, ConcurrentProblem):
        computation_us(problem)
    if schedules is not None:
        found = [s for s in schedules if only in (None, s.name) and chunks in (None, s.chunks)]
    elif only is not None and (chunks is not None or not FAMILIES[only].chunked):
        found = [build(problem, only, chunks, fan_out=machine.fans_out)]
    else:
        empty = only is None and not (problem.m and problem.n)
        found = [] if empty else candidates(problem, fan_out=machine.fans_out, only=only)
    if only is None and all(schedule.name != "sequential" for schedule in found):
        found.insert(0, build(problem, "sequential"))
    if not found:
        raise ValueError(f"schedules has none of family {only}" + (f" in {chunks} chunks" if chunks is not None else ""))
    return found


def _check_asked(problem: Problem, schedules: Sequence[Schedule] | None, only: str | None, chunks: int | None) -> None:
    if only is None and chunks is not None:
        raise ValueError(f"chunks is {chunks}, but only is None; name the family that chunks are for")
    if only is not None and isinstance(problem, ConcurrentProblem):
        raise ValueError(f"only is {only!r}; of {problem} every schedule has a name of its own: give schedules instead")
    if only is not None and only not in FAMILIES:
        raise ValueError(f"only is {only!r}; weft has {', '.join(NAMES)}")
    if only is not None:
        check_op(only, problem.op)
        if chunks is not None and not FAMILIES[only].chunked:
            raise ValueError(f"chunks is {chunks}, but only is {only!r}, which has no chunks; leave it out")
    if schedules is not None:
        require("schedules", schedules, Sequence, "use a row of weft.Schedule")  # read more than once
    for schedule in schedules or ():
        require("schedules", schedule, Schedule, "use a row of weft.Schedule, as weft.build makes")
        if schedule.problem != problem:
            raise ValueError(f"schedules holds one for {schedule.problem}; this plan is for {problem}")


def _predict(schedules: Iterable[Schedule], machine: Machine, ideal_us: float) -> tuple[list[Option], Outcome]:
    """All options, fastest first, and the fastest one's outcome; the others' spans are not kept."""
    options: list[Option] = []
    best: tuple[Option, Outcome] | None = None
    for schedule in schedules:
        outcome = run(schedule, machine)
        option = Option(schedule, _candidate(schedule, outcome, ideal_us))
        options.append(option)
        if best is None or _order(option) < _order(best[0]):
            best = option, outcome
    assert best is not None, "plan: there is always the sequential schedule"
    return sorted(options, key=_order), best[1]


def _candidate(schedule: Schedule, outcome: Outcome, ideal_us: float) -> Candidate:
    return Candidate(
        schedule=schedule.name,
        chunks=schedule.chunks,
        predicted_us=outcome.total_us,
        computation_us=max(outcome.kernel_us),
        communication_us=max(outcome.transfer_us),
        over_ideal_us=max(0.0, outcome.total_us - ideal_us),
    )


def _order(option: Option) -> tuple[float, int, int]:
    """Fastest first, then simplest."""
    return option.predicted_us, *simplicity(option.schedule.name, option.schedule.chunks)
