"""Explains why a schedule was chosen, in one or two plain sentences with the numbers that decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from weft.core.concurrent import ConcurrentProblem
from weft.core.fused_collective import spelled_out
from weft.core.machine import Machine
from weft.core.problem import COLLECTIVE_OPS, LOOKUP_OPS, Problem, RaggedProblem
from weft.core.schedule import Copy, Gemm, Lookup, Push, Reduce, Schedule, Signal, Wait
from weft.core.work import continued
from weft.perf import run
from weft.perf.terms import COLLECTIVES, whole_collective_us, whole_gemm_us
from weft.planner.losses import without_fixed_costs
from weft.planner.values import Candidate
from weft.planner.words import us
from weft.schedules import MOST_RANKS, overlaps

BALANCED = 1.1
"""If computation and communication differ by at most this factor, both bound the call."""

EXPLAINS = 0.5
"""A cost is named as the reason of a difference if it is at least this share of it."""


class Option(NamedTuple):
    """Option is a schedule with its prediction."""

    schedule: Schedule
    candidate: Candidate

    @property
    def predicted_us(self) -> float:
        return self.candidate.predicted_us


def explain(problem: Problem, machine: Machine, options: Sequence[Option], sequential_us: float, *, asked: bool) -> str:
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
