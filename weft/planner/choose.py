"""Chooses a schedule: ranks all candidates, simulates the best few, takes the fastest, and says why in one or two sentences.

Contract: `plan` is a pure function of the problem and the machine, so ranks agree without communication. The ranking
(weft.perf.ranking) selects the candidates that are built and simulated. The shortest simulated time wins. If times are equal,
the simpler schedule wins: earlier in `weft.schedules.FAMILIES`, then fewer chunks. The sequential program is always simulated,
so a schedule that is predicted to be slower is chosen only if the caller asks for its family by `only`.

`shortlist` chooses the few schedules of a ConcurrentProblem that are worth measuring. It is a pure function, too, so all ranks
measure the same schedules. For other problems the ranking chooses them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from weft.core.concurrent import ConcurrentProblem
from weft.core.errors import require
from weft.core.fused_collective import spelled_out
from weft.core.machine import Machine, as_machine
from weft.core.problem import COLLECTIVE_OPS, LOOKUP_OPS, CollectiveProblem, Problem, RaggedProblem
from weft.core.schedule import Copy, Gemm, Lookup, Push, Reduce, Schedule, Signal, Wait
from weft.core.work import continued
from weft.perf import Outcome, run
from weft.perf.concurrent import computation_us
from weft.perf.ranking import estimates, ranked
from weft.perf.terms import COLLECTIVES, whole_collective_us, whole_gemm_us
from weft.planner.simulated import predict_sequential_us, without_fixed_costs
from weft.planner.values import Candidate, Plan, predicted
from weft.planner.words import us
from weft.schedules import (
    FAMILIES,
    MOST_RANKS,
    build,
    candidates,
    check_op,
    concurrent,
    distinct,
    overlaps,
    ragged,
    simplicity,
    spec,
)

MAX_SIMULATED = 5
"""The number of candidates that are simulated, in addition to the sequential program. In 644 problems measured on 2 and 4 x
H200, the fastest of these was on average at most 0.2% slower than the fastest of all (docs/planner.md, column `auto`)."""
BALANCED = 1.1
"""If computation and communication differ by at most this factor, both bound the call."""

EXPLAINS = 0.5
"""A cost is named as the reason of a difference if it is at least this share of it."""
AT_MOST = 14
"""The largest number of candidates, including the sequential program."""
WITHIN = 1.25
"""The best schedule of each family within this factor of the fastest time is measured first."""


class Option(NamedTuple):
    """Option is a schedule with its prediction."""

    schedule: Schedule
    candidate: Candidate

    @property
    def predicted_us(self) -> float:
        return self.candidate.predicted_us


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

    A RaggedProblem (a call with splits) is planned with the schedule `fused`, and as if every expert got an equal part of the
    rows. `sequential_us` is the time of NCCL and a grouped matmul; a dispatch's host waits for counts (weft.perf.ragged).

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
    if sequential_us is None or isinstance(problem, RaggedProblem):
        sequential_us = predict_sequential_us(problem, machine)
    return Plan(
        problem=problem,
        machine=machine.name,
        candidates=tuple(option.candidate for option in options),
        sequential_us=sequential_us,
        computation_us=whole_gemm_us(machine, problem),
        communication_us=whole_collective_us(machine, problem),
        why=why_chosen(problem, machine, options, sequential_us, asked=only is not None),
        estimates=estimates_us,
        spans=best.spans,
    )


def _rank_candidates(problem: Problem, machine: Machine, only: str | None, chunks: int | None) -> dict[str, float]:
    """Return the estimated time of every candidate in microseconds, shortest first."""
    _check_arguments(problem, None, only, chunks)
    if isinstance(problem, (ConcurrentProblem, RaggedProblem)) or (only is None and not (problem.m and problem.n)):
        return {}
    if only is not None and (chunks is not None or problem.nodes):
        build(problem, only, chunks)  # raises ValueError if the family has no such chunk count, or needs one node
    if only is not None and chunks is not None:
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


def why_chosen(problem: Problem, machine: Machine, options: Sequence[Option], sequential_us: float, *, asked: bool) -> str:
    """Say why options[0] was chosen; options are fastest first. asked: the family was given, not chosen."""
    chosen = options[0]
    if not problem.m or not problem.n:
        return "The result has no elements: there is nothing to do."
    if problem.world_size == 1:
        return f"One rank has nothing to communicate: {chosen.candidate.spec} takes {us(chosen.predicted_us)} us."
    if isinstance(problem, ConcurrentProblem):
        return _explain_concurrent(problem, machine, chosen, sequential_us)
    bound = _describe_bound(whole_gemm_us(machine, problem), whole_collective_us(machine, problem), problem)
    if isinstance(problem, RaggedProblem):
        return f"{bound} A call with splits runs {chosen.candidate.spec}, which {_compare(chosen.predicted_us, sequential_us)}."
    if asked and chosen.schedule.name == "sequential":
        return f"{bound} sequential was asked for and takes {us(chosen.predicted_us)} us."
    if asked:
        return f"{bound} {chosen.candidate.spec} was asked for and {_compare(chosen.predicted_us, sequential_us)}."
    rivals = [option for option in options if option.schedule.name != chosen.schedule.name]
    if chosen.schedule.name == "sequential":
        return f"{bound} {_explain_sequential(chosen, rivals, problem, machine)}"
    hidden = f"{chosen.candidate.spec} {_compare(chosen.predicted_us, sequential_us)}"
    over = us(chosen.candidate.over_ideal_us) if chosen.candidate.over_ideal_us else "no"
    left = f" and {over} more than the longer of the two"
    return f"{bound} {hidden}{left}{_runner_up(chosen, rivals, machine)}."


def _explain_concurrent(problem: ConcurrentProblem, machine: Machine, chosen: Option, sequential_us: float) -> str:
    parts = f"the computation alone takes {us(whole_gemm_us(machine, problem))} us, the collectives alone "
    parts += us(whole_collective_us(machine, problem))
    if chosen.schedule.name == "sequential":
        return f"It stays sequential, since no other schedule is predicted to be faster: {parts}."
    return f"{chosen.schedule.name} {_compare(chosen.predicted_us, sequential_us)}: {parts}."


def _describe_bound(computation_us: float, communication_us: float, problem: Problem) -> str:
    kernel = "lookup" if problem.op in LOOKUP_OPS else "GEMM"
    collective = COLLECTIVES[problem.op].removesuffix("_columns").replace("_", "-")
    if problem.op in COLLECTIVE_OPS:
        return f"NCCL's {collective} takes {us(communication_us)} us."
    times = f"the {kernel} alone takes {us(computation_us)} us, the {collective} alone {us(communication_us)}."
    if max(computation_us, communication_us) <= BALANCED * min(computation_us, communication_us):
        return f"Balanced: {times}"
    return f"{'Computation' if computation_us > communication_us else 'Communication'}-bound: {times}"


def _compare(predicted_us: float, sequential_us: float) -> str:
    more = "less" if predicted_us <= sequential_us else "more"
    return f"takes {us(predicted_us)} us, {us(abs(sequential_us - predicted_us))} {more} than sequential"


def _explain_sequential(chosen: Option, rivals: Sequence[Option], problem: Problem, machine: Machine) -> str:
    if not rivals and problem.world_size > MOST_RANKS:
        beyond = f"of more than {MOST_RANKS} ranks others take minutes to simulate, and are predicted where they are named"
        return f"Only the sequential program was considered: {beyond}."
    if not rivals:
        return "Only the sequential program was considered."
    rival = rivals[0]
    more = rival.predicted_us - chosen.predicted_us
    longer = f"{us(more)} more" if more >= 1 else "no less"
    best = "the best overlap" if overlaps(rival.schedule.name) else "the next best"
    took = f"{best}, {rival.candidate.spec}, would take {us(rival.predicted_us)} us, {longer}"
    return f"It stays sequential: {took}, since {_reason(rival, chosen, machine)}."


def _runner_up(chosen: Option, rivals: Sequence[Option], machine: Machine) -> str:
    if not rivals:
        return ""
    rival = rivals[0]
    slower = rival.predicted_us / chosen.predicted_us - 1
    if slower < 0.001:
        return f"; {rival.candidate.spec} would do as well"
    return f"; the runner-up, {rival.candidate.spec}, is {slower:.1%} slower, since {_reason(rival, chosen, machine)}"


def _reason(slow: Option, fast: Option, machine: Machine) -> str:
    """Return the largest extra cost of `slow` over `fast`: its kernels, its transfers, or fixed costs."""
    if overlaps(fast.schedule.name) and not overlaps(slow.schedule.name):
        return "it hides nothing"
    paid_us, base_us = _fixed_us(slow, machine), _fixed_us(fast, machine)
    kernels = slow.candidate.computation_us - fast.candidate.computation_us
    transfers = slow.candidate.communication_us - fast.candidate.communication_us
    most = max(kernels, transfers, paid_us - base_us)
    hides = overlaps(fast.schedule.name)
    if most < max(0.5, hides * EXPLAINS * (slow.predicted_us - fast.predicted_us)):
        return "less of its communication is hidden"
    if most == kernels:
        return f"its kernels work {us(slow.candidate.computation_us)} us, not {us(fast.candidate.computation_us)}"
    if most == transfers:
        return f"its transfers take {us(slow.candidate.communication_us)} us, not {us(fast.candidate.communication_us)}"
    return f"{us(paid_us)} us of its time are fixed costs, not {us(base_us)} (a rank has {_fixed(slow.schedule, machine)})"


def _fixed_us(option: Option, machine: Machine) -> float:
    """Return the time that the call would save without fixed costs."""
    return max(0.0, option.predicted_us - run(option.schedule, without_fixed_costs(machine)).total_us)


def _fixed(schedule: Schedule, machine: Machine) -> str:
    """Count the steps of rank 0 with a fixed cost. Steps inside a running kernel, and collectives, have none."""
    kinds: Counter[type] = Counter()
    spelled = spelled_out(schedule)
    for lane in spelled.schedule.ranks[0]:
        fused = spelled.of_lane(0, lane.name)
        begun = {low for low, _ in fused}
        for position in set(range(len(lane.steps))) - continued(lane, fused):
            kind = type(lane.steps[position])
            if kind in (Copy, Push) and lane.kind == "blocks":
                continue
            kernel = position in begun or kind is Push or (kind is Copy and lane.kind == "compute")
            kinds[Gemm if kernel else kind] += 1
    lanes = sum(lane.kind != "compute" for lane in schedule.ranks[0]) if machine.fork_us else 0
    words = (
        (lanes, "lane that starts", "lanes that start"),
        (kinds[Gemm] + kinds[Lookup] + kinds[Reduce], "launch", "launches"),
        (kinds[Copy], "copy", "copies"),
        (kinds[Wait] + kinds[Signal], "wait or signal", "waits and signals"),
    )
    return ", ".join(f"{number} {one if number == 1 else more}" for number, one, more in words if number)


def shortlist(found: Plan) -> tuple[str, ...]:
    """Return the specs to measure: the sequential program, two plain streams, the best of each family that is predicted near
    the fastest, and then all others in predicted order.

    Every family near the fastest comes early, because a prediction for unknown user code is less reliable than one for weft's
    kernels. If nothing is communicated, or nothing is computed, only the sequential program is left.
    """
    base, plain = str(concurrent.SEQUENTIAL), str(concurrent.PLAIN)
    if not min(found.computation_us, found.communication_us) > 0:
        return (base,)
    ranked: list[Candidate] = [candidate for candidate in found.candidates if candidate.schedule not in (base, plain)]
    limit_us = WITHIN * found.chosen.predicted_us
    leaders = {concurrent.family(each.schedule): each for each in reversed(ranked) if each.predicted_us <= limit_us}
    others = sorted(ranked, key=lambda candidate: candidate not in leaders.values())
    return (base, plain, *(candidate.schedule for candidate in others[: AT_MOST - 2]))
