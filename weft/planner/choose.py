"""Choose a schedule: rank all -> simulate the best few -> the fastest. Pure functions of the problem and the machine.

Contract: `plan` is deterministic, so ranks agree without communication. The ranking (weft.perf.ranking) selects the candidates
that are built and simulated. The shortest simulated time wins. If times are equal, the simpler schedule wins: earlier in
`weft.schedules.NAMES`, then fewer chunks. The sequential program is always simulated, so a schedule that is predicted to be
slower is chosen only if the caller asks for its family by `only`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from weft.core.concurrent import ConcurrentProblem
from weft.core.errors import require
from weft.core.machine import Machine, as_machine
from weft.core.problem import CollectiveProblem, Problem
from weft.core.schedule import Schedule
from weft.perf import Outcome, run
from weft.perf.concurrent import computation_us
from weft.perf.ranking import estimates, ranked
from weft.perf.terms import whole_collective_us, whole_gemm_us
from weft.planner.explain import Option, explain
from weft.planner.values import Plan, predicted
from weft.schedules import FAMILIES, NAMES, build, candidates, check_op, distinct, simplicity, spec

SIMULATED = 5
"""The number of candidates that are simulated, in addition to the sequential program. In 644 problems measured on 2 and 4 x
H200, the fastest of these was on average at most 0.2% slower than the fastest of all (docs/planner.md, column `auto`)."""


def plan(
    problem: Problem,
    machine: Machine | str | Path,
    *,
    schedules: Sequence[Schedule] | None = None,
    only: str | None = None,
    chunks: int | None = None,
) -> Plan:
    """Choose the fastest predicted schedule for `problem` on `machine`. The plan has all candidates and the reason.

    Args:
        problem: what is to be computed.
        machine: a Machine, a shipped profile's name, or a JSON file's path.
        schedules: candidates instead of the default ones, all of which are simulated; the sequential program joins them.
        only: candidates of this family alone, so that it is chosen even if it loses; `sequential_us` is there to compare.
        chunks: with only, this count alone.

    A problem whose result is empty has the sequential program as its only candidate, unless others are asked for. Raises
    ValueError if the machine has fewer GPUs than the problem, or no rate for its dtype, for a ConcurrentProblem without
    compute_us, for chunks without only or of a family that has none, for a family that weft or the operator lacks, and for
    a schedule of another problem.
    """
    require("problem", problem, Problem, "use a weft.Problem, LookupProblem or CollectiveProblem")
    machine = as_machine(machine)
    machine.require_for(problem)
    if not isinstance(problem, (CollectiveProblem, ConcurrentProblem)):
        machine.tflops(problem.rate_name)
    found = _estimates(problem, machine, only, chunks) if schedules is None else {}
    considered = _considered(problem, machine, schedules, found, only, chunks)
    options, best = _predict(considered, machine)
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
        estimates=found,
        spans=best.spans,
    )


def _estimates(problem: Problem, machine: Machine, only: str | None, chunks: int | None) -> dict[str, float]:
    """Every candidate's, least first."""
    _check_asked(problem, None, only, chunks)
    if isinstance(problem, ConcurrentProblem) or (only is None and not (problem.m and problem.n)):
        return {}
    if only is not None and chunks is not None:
        build(problem, only, chunks)  # refuses a count that it cannot be cut into
        return estimates(problem, machine, [spec(only, chunks)])
    return ranked(problem, machine, only)


def _considered(
    problem: Problem,
    machine: Machine,
    schedules: Sequence[Schedule] | None,
    ranking: Mapping[str, float],
    only: str | None,
    chunks: int | None,
) -> list[Schedule]:
    """What is simulated."""
    if isinstance(problem, ConcurrentProblem):
        computation_us(problem)
    if schedules is not None:
        _check_asked(problem, schedules, only, chunks)
        found = [s for s in schedules if only in (None, s.name) and chunks in (None, s.chunks)]
    elif isinstance(problem, ConcurrentProblem):
        found = candidates(problem, fan_out=machine.fans_out)
    else:
        overlaps = [spec for spec in ranking if spec != "sequential"]
        found = distinct(problem, overlaps if only is None else ranking, fan_out=machine.fans_out, most=SIMULATED)
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
        require("schedules", schedules, Sequence, "use a row of weft.schedule.Schedule")  # read more than once
    for schedule in schedules or ():
        require("schedules", schedule, Schedule, "use a row of weft.schedule.Schedule, as weft.schedule.build makes")
        if schedule.problem != problem:
            raise ValueError(f"schedules holds one for {schedule.problem}; this plan is for {problem}")


def _predict(schedules: Iterable[Schedule], machine: Machine) -> tuple[list[Option], Outcome]:
    """All options, fastest first, and the fastest one's outcome; the others' spans are dropped."""
    options: list[Option] = []
    best: tuple[Option, Outcome] | None = None
    for schedule in schedules:
        outcome = run(schedule, machine)
        option = Option(schedule, predicted(schedule, outcome, machine))
        options.append(option)
        if best is None or _order(option) < _order(best[0]):
            best = option, outcome
    assert best is not None, "plan: there is always the sequential schedule"
    return sorted(options, key=_order), best[1]


def _order(option: Option) -> tuple[float, int, int]:
    """Fastest first, then simplest."""
    return option.predicted_us, *simplicity(option.schedule.name, option.schedule.chunks)
