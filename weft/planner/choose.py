"""Choose a schedule: rank all candidates, simulate the best few, and take the fastest.

Contract: `plan` is a pure function of the problem and the machine, so ranks agree without communication. The ranking
(weft.perf.ranking) selects the candidates that are built and simulated. The shortest simulated time wins. If times are equal,
the simpler schedule wins: earlier in `weft.schedules.FAMILIES`, then fewer chunks. The sequential program is always simulated,
so a schedule that is predicted to be slower is chosen only if the caller asks for its family by `only`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from weft.core.concurrent import ConcurrentProblem
from weft.core.errors import require
from weft.core.machine import Machine, as_machine
from weft.core.problem import CollectiveProblem, Problem, RaggedProblem
from weft.core.schedule import Schedule
from weft.perf import Outcome, run
from weft.perf.concurrent import computation_us
from weft.perf.ranking import estimates, ranked
from weft.perf.terms import whole_collective_us, whole_gemm_us
from weft.planner.explain import Option, explain
from weft.planner.values import Plan, predicted
from weft.schedules import FAMILIES, build, candidates, check_op, distinct, ragged, simplicity, spec

MAX_SIMULATED = 5
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
        schedules: the candidates, which replace the default ones. All of them are simulated, and so is the sequential program.
        only: the name of a family. Candidates of other families are left out, so the plan chooses this family even if the
            sequential program is faster. The plan's `sequential_us` shows the difference.
        chunks: the number of chunks of the candidates. It needs `only`.

    A RaggedProblem (a call with splits) is planned with the schedule `fused`, the only one that runs on GPUs, and as if every
    expert got an equal part of the rows. `sequential_us` is the time of the sequential one, with no wait for counts.

    If the result of the problem is empty, the sequential program is the only candidate, unless `schedules` or `only` is given.

    Raises ValueError if

    - the machine has fewer GPUs than the problem, or has no rate for its dtype
    - the problem is a ConcurrentProblem without compute_us
    - chunks is given without only, or for a family without chunks
    - weft or the operator lacks the family
    - a schedule is for a different problem
    """
    require("problem", problem, Problem, "use a weft.Problem, LookupProblem, RaggedProblem or CollectiveProblem")
    machine = as_machine(machine)
    machine.require_for(problem)
    if not isinstance(problem, (CollectiveProblem, ConcurrentProblem)):
        machine.tflops(problem.rate_name)
    if isinstance(problem, RaggedProblem) and schedules is None and only is None:
        only = "fused"
    estimates_us = _rank_candidates(problem, machine, only, chunks) if schedules is None else {}
    selected = _select_schedules(problem, machine, schedules, estimates_us, only, chunks)
    options, best = _simulate(selected, machine)
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
        estimates=estimates_us,
        spans=best.spans,
    )


def _rank_candidates(problem: Problem, machine: Machine, only: str | None, chunks: int | None) -> dict[str, float]:
    """Return the estimated time of every candidate in microseconds, shortest first."""
    _check_arguments(problem, None, only, chunks)
    if isinstance(problem, (ConcurrentProblem, RaggedProblem)) or (only is None and not (problem.m and problem.n)):
        return {}
    if only is not None and chunks is not None:
        build(problem, only, chunks)  # raises ValueError if the problem cannot be cut into so many chunks
        return estimates(problem, machine, [spec(only, chunks)])
    return ranked(problem, machine, only)


def _select_schedules(
    problem: Problem,
    machine: Machine,
    schedules: Sequence[Schedule] | None,
    ranking: Mapping[str, float],
    only: str | None,
    chunks: int | None,
) -> list[Schedule]:
    """Return the schedules to simulate."""
    if isinstance(problem, ConcurrentProblem):
        computation_us(problem)  # raises ValueError without compute_us
    if schedules is not None:
        _check_arguments(problem, schedules, only, chunks)
        selected = [s for s in schedules if only in (None, s.name) and chunks in (None, s.chunks)]
    elif isinstance(problem, RaggedProblem):
        selected = [build(problem, only or "fused")]
    elif isinstance(problem, ConcurrentProblem):
        selected = candidates(problem, fan_out=machine.fans_out)
    else:
        overlaps = [spec for spec in ranking if spec != "sequential"]
        selected = distinct(problem, overlaps if only is None else ranking, fan_out=machine.fans_out, most=MAX_SIMULATED)
    if only is None and all(schedule.name != "sequential" for schedule in selected):
        selected.insert(0, build(problem, "sequential"))
    if not selected:
        raise ValueError(f"schedules has none of family {only}" + (f" in {chunks} chunks" if chunks is not None else ""))
    return selected


def _check_arguments(problem: Problem, schedules: Sequence[Schedule] | None, only: str | None, chunks: int | None) -> None:
    """Raise ValueError if the arguments of `plan` do not fit together."""
    if only is None and chunks is not None:
        raise ValueError(f"chunks is {chunks}, but only is None; set only to the family that chunks are for")
    if only is not None and isinstance(problem, ConcurrentProblem):
        raise ValueError(f"only is {only!r}, but the schedules of {problem} have no families; use schedules instead")
    known = ragged.FAMILIES if isinstance(problem, RaggedProblem) else FAMILIES
    if only is not None and only not in known:
        raise ValueError(f"only is {only!r}; weft has {', '.join(known)}")
    if isinstance(problem, RaggedProblem) and chunks is not None:
        raise ValueError(f"chunks is {chunks}; schedules of {problem.op} have no chunks, leave it out")
    if only is not None and not isinstance(problem, RaggedProblem):
        check_op(only, problem.op)
        if chunks is not None and not FAMILIES[only].chunked:
            raise ValueError(f"chunks is {chunks}, but only is {only!r}, which has no chunks; leave it out")
    if schedules is not None:
        require(
            "schedules", schedules, Sequence, "use a list of weft.schedule.Schedule"
        )  # it is read twice, which an iterator does not allow
    for schedule in schedules or ():
        require("schedules", schedule, Schedule, "use a list of weft.schedule.Schedule, as weft.schedule.build returns them")
        if schedule.problem != problem:
            raise ValueError(f"schedules has a schedule for {schedule.problem}; this plan is for {problem}")


def _simulate(schedules: Iterable[Schedule], machine: Machine) -> tuple[list[Option], Outcome]:
    """Return all options, fastest first, and the outcome of the fastest. The spans of the others are not kept in memory."""
    options: list[Option] = []
    best: tuple[Option, Outcome] | None = None
    for schedule in schedules:
        outcome = run(schedule, machine)
        option = Option(schedule, predicted(schedule, outcome, machine))
        options.append(option)
        if best is None or _get_sort_key(option) < _get_sort_key(best[0]):
            best = option, outcome
    assert best is not None, "plan: at least one schedule is always selected"
    return sorted(options, key=_get_sort_key), best[1]


def _get_sort_key(option: Option) -> tuple[float, int, int]:
    """Return a key that sorts the fastest option first, and of equally fast options the simplest."""
    return option.predicted_us, *simplicity(option.schedule.name, option.schedule.chunks)
