"""`explain` says in two sentences what a plan chose, and the reason that matters most. Its details split the predicted time
into parts. They also have the losses of the other simulated schedules, and the changes of sizes or rates that would make
another family faster. Nothing runs on a GPU. The losses come from simulations of each half alone. The changes come from the
ranking (weft.perf.ranking), corrected by its error for each simulated schedule.

    predicted = whole half alone + more launches + smaller pieces + contention + head, tail, waits

The half is the longer one of the schedule's matmuls alone and its transfers alone.

    more launches       the time that the half would save if launches were free except for one, which the whole half has,
                        too; of a half that is transfers: more copies
    smaller pieces      the other losses of decomposition (DIL)
    contention          the slowdown by the other half (CIL)
    head, tail, waits   the time that nothing hides

The parts add up to the prediction. A part may be negative.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.core.hardware import within
from weft.core.machine import Machine, as_machine
from weft.core.problem import LookupProblem, Problem, RaggedProblem
from weft.core.schedule import Schedule
from weft.perf.ranking import estimates, heuristic
from weft.planner.choose import plan
from weft.planner.simulated import FREE_US, Signature, Taxes, signature, taxes, without_communication, without_computation
from weft.planner.values import Plan
from weft.planner.words import factor, us
from weft.schedules import build, overlaps, parse

FACTORS = (2.0, 4.0, 16.0)
"""Sizes and rates are multiplied and divided by these factors to find what changes the choice."""
NOTHING = (
    f"With rows, links' rates and copies' costs up to {FACTORS[-1]:.0f} times as large or small, no other family's best of now "
    "would be faster."
)
DEFAULT_MACHINE = "h200x8"
_MARGIN = 0.01
_COSTS = {
    "more launches": "starting more kernels",
    "more copies": "starting more copies",
    "smaller pieces": "working in smaller pieces",
    "contention": "computation and communication slowing each other",
    "head, tail, waits": "the start, the end and waits, which nothing hides",
}
"""What a part of the time is, in words that follow "the largest cost is"."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Explanation explains a plan. As text it is two sentences; `details` is the text with everything else.

    why: what was chosen with its gain, and the reason that matters most.
    parts: the parts of the chosen schedule's predicted time in us, by name.
    signatures: the losses of the simulated schedules: the chosen one, the runner-up of another family, then the others.
    taxes: those of the chosen schedule, and of the sequential program if it was simulated.
    by_sizes: the choice of the heuristic.
    changes: sentences, each with a change that would make another family faster, with its present number of chunks."""

    plan: Plan
    why: str
    parts: Mapping[str, float]
    signatures: tuple[Signature, ...]
    taxes: tuple[Taxes, ...]
    by_sizes: str
    changes: tuple[str, ...]

    def __str__(self) -> str:
        return self.why

    @property
    def details(self) -> str:
        """The planner's comparison, the parts, the losses, the taxes, and what would change the choice, each on a line."""
        lines = [self.plan.why, *map(str, self.signatures)]
        named = ", ".join(f"{name} {part_us:+.0f}" for name, part_us in self.parts.items())
        if self.parts:
            lines.insert(1, f"Predicted {us(self.plan.chosen.predicted_us)} us: {named}.")
        changes = self.changes or (NOTHING,) * (len({one.spec.partition(":")[0] for one in self.signatures}) > 1)
        lines += map(str, self.taxes)
        return "\n".join([*lines, f"By sizes alone: {self.by_sizes}.", *changes])


def explain(problem: Problem, machine: Machine | str | Path = DEFAULT_MACHINE) -> Explanation:
    """Explain the planner's choice for `problem`. Print the result or its `details`, or read its attributes.

    machine: a Machine, the name of a shipped profile, or the path of a file. With 8 ranks this takes seconds. Raises ValueError
    as `weft.plan` does.
    """
    where = as_machine(machine)
    return explain_plan(plan(problem, where), where)


def explain_plan(found: Plan, machine: Machine) -> Explanation:
    """Explain a plan for `machine`."""
    problem = found.problem
    if problem.world_size == 1 or not problem.m or not problem.n:
        return Explanation(plan=found, why=found.why, parts={}, signatures=(), taxes=(), by_sizes="sequential", changes=())
    if isinstance(problem, RaggedProblem):  # its losses follow from the routing, which is unknown
        by_sizes = found.chosen.spec
        return Explanation(plan=found, why=found.why, parts={}, signatures=(), taxes=(), by_sizes=by_sizes, changes=())
    specs = [found.chosen.spec, *_rivals(found)]
    simulated = {one.spec: one for one in reversed(found.candidates)}
    first = [spec for spec in specs if spec in simulated][:2]
    shown = dict.fromkeys([*first, *(one.spec for one in found.candidates)])
    signatures = tuple(signature(_build(problem, spec, machine), machine, simulated[spec]) for spec in shown)
    parts = _split_time(signatures[0], machine)
    changes = tuple(_changes(found, specs, machine))
    paid = tuple(
        taxes(_build(problem, one.spec, machine), machine, one)
        for one in dict.fromkeys([signatures[0], *(one for one in signatures if one.spec == "sequential")])
    )
    return Explanation(
        plan=found,
        why=_explain_gain(found, signatures, machine),
        parts=parts,
        signatures=signatures,
        taxes=paid,
        by_sizes=heuristic(problem, machine),
        changes=changes,
    )


def _explain_gain(found: Plan, signatures: Sequence[Signature], machine: Machine) -> str:
    """Say what was chosen and what it gains; then what costs it the most, or keeps others from a gain."""
    chosen, *others = signatures
    computation = "lookup" if isinstance(found.problem, LookupProblem) else "matmul"
    halves = {computation: chosen.computation_us, "collective": chosen.communication_us}
    (short, short_us), (long, long_us) = sorted(halves.items(), key=lambda half: half[1])
    said = f"{chosen.spec} takes {us(chosen.total_us)} us, "
    if chosen.spec == "sequential":
        said += "and no other schedule is predicted to be faster." if others else "and no other was simulated."
    else:
        in_turn = f"the {computation} and NCCL in turn" if short_us else "NCCL"
        said += f"{in_turn} {us(found.sequential_us)}: {factor(found.sequential_us / chosen.total_us)} as fast."
    if overlaps(chosen.spec) and short_us:
        said += f" The {long} alone takes {us(long_us)} us, and the {short} ({us(short_us)}) can run meanwhile"
        more = f"; beyond that, the largest cost is {_largest_cost(chosen, machine)}"
        return f"{said}{more if chosen.total_us > (1 + _MARGIN) * long_us else ''}."
    if others and overlaps(others[0].spec) and short_us:
        other = (
            f" The next best, {others[0].spec}, takes {us(others[0].total_us)} us: it could hide the {short} ({us(short_us)}"
        )
        return f"{said}{other}), but pays for it, most of all for {_largest_cost(others[0], machine)}."
    return f"{said} The next best, {others[0].spec}, takes {us(others[0].total_us)} us." if others else said


def _largest_cost(found: Signature, machine: Machine) -> str:
    parts = _split_time(found, machine)
    name = max(_COSTS, key=lambda name: parts.get(name, 0.0))
    return f"{_COSTS[name]} ({us(parts[name])} us)"


def _rivals(found: Plan) -> list[str]:
    """Return the best schedule of each other family, and the sequential program. Simulated ones come first, then by rank."""
    known = dict.fromkeys([*(one.spec for one in found.candidates), *found.estimates, "sequential"])
    best: dict[str, str] = {}
    for spec in known:
        best.setdefault(parse(spec)[0], spec)
    return [spec for name, spec in best.items() if name != found.chosen.schedule]


def _build(problem: Problem, spec: str, machine: Machine) -> Schedule:
    return build(problem, *parse(spec), fan_out=machine.fans_out)


def _split_time(found: Signature, machine: Machine) -> dict[str, float]:
    """Split the predicted time of a schedule into the parts that the module describes."""
    computes = found.pieces_us >= found.transfers_us
    name = "matmul" if computes else "communication"
    if isinstance(found.problem, LookupProblem) and computes:
        name = "lookup"
    whole = found.computation_us if computes else found.communication_us
    pieces = found.pieces_us if computes else found.transfers_us
    cil = (found.gemm_cil if computes else found.communication_cil) or 1.0
    fixed = _fixed_us(found, machine, computes=computes)
    contention = min(pieces * (cil - 1), found.total_us - pieces)
    return {
        f"{name} alone": whole,
        "more launches" if computes else "more copies": fixed,
        "smaller pieces": pieces - whole - fixed,
        "contention": contention,
        "head, tail, waits": found.total_us - pieces - contention,
    }


def _fixed_us(found: Signature, machine: Machine, *, computes: bool) -> float:
    """Return the time that a half alone would save in the ranking if launches, or copies, were free except for one."""
    if computes:
        one_us, cheaper = machine.launch_us, dataclasses.replace(machine, launch_us=FREE_US)
        alone = without_communication
    else:
        one_us = machine.copies.copy_us
        cheaper = dataclasses.replace(machine, copies=dataclasses.replace(machine.copies, copy_us=FREE_US))
        alone = without_computation
    now, then = (estimates(found.problem, alone(where), [found.spec])[found.spec] for where in (machine, cheaper))
    return max(0.0, now - then - one_us)


def _changes(found: Plan, specs: Sequence[str], machine: Machine) -> Iterator[str]:
    """Yield the smallest change of each kind, up and down, that makes a rival faster. specs: the chosen schedule comes
    first."""
    problem, now = found.problem, estimates(found.problem, machine, specs)
    missed = {one.spec: one.predicted_us / now[one.spec] for one in found.candidates if now.get(one.spec)}
    for words, vary in _variations(problem, machine) if specs[1:] else ():
        for times in FACTORS:
            changed = vary(times)
            if changed is None:
                break
            us = {spec: us * missed.get(spec, 1.0) for spec, us in estimates(*changed, specs).items()}
            winner = min(us, key=us.__getitem__)
            if us[winner] < (1 - _MARGIN) * us[specs[0]]:
                yield f"{words(times)} {winner} would be faster."
                break


Changed = tuple[Problem, Machine]


def _variations(
    problem: Problem, machine: Machine
) -> Iterable[tuple[Callable[[float], str], Callable[[float], Changed | None]]]:
    # Some operators cut rows into equal parts alone.
    unit = problem.row_multiple * problem.world_size

    def count(factor: float) -> int:
        return round(problem.m * factor / unit) * unit

    def rows(factor: float) -> Changed | None:
        return (dataclasses.replace(problem, m=count(factor)), machine) if count(factor) else None

    def links(factor: float) -> Changed:
        return problem, machine.what_if({"links.gbps": within(machine.links.gbps * factor)})

    def copies(factor: float) -> Changed:
        engines = dataclasses.replace(machine.copies, copy_us=within(machine.copies.copy_us * factor))
        return problem, dataclasses.replace(machine, copies=engines)

    yield lambda f: f"With {count(1 / f)} rows", lambda f: rows(1 / f)
    yield lambda f: f"With {count(f)} rows", rows
    yield lambda f: f"With links at {1 / f:g} of their rate", lambda f: links(1 / f)
    yield lambda f: f"With links {f:g} times as fast", links
    yield lambda f: f"If a copy cost {machine.copies.copy_us / f:.2g} us", lambda f: copies(1 / f)
    yield lambda f: f"If a copy cost {machine.copies.copy_us * f:.2g} us", copies
