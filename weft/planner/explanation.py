"""`explain`: a plan taken apart. Where the chosen schedule's predicted time goes, what each other schedule that was simulated
loses, and what would have to be otherwise for another family's best schedule to be faster. Nothing runs. All of these are
simulated, each half alone; what changes the choice is read off the ranking (weft.perf.ranking), corrected by what it missed of
each schedule that was simulated.

    predicted = whole half alone + fixed costs + smaller pieces + contention + head, tail, waits

for the half that binds, the longer one of the schedule's matmuls alone and of its transfers alone. Fixed costs are by how much
that half would be shorter if launches, or copies, cost nothing beyond their bytes, less one of them; smaller pieces what else
decomposition loses (DIL), contention what the other half costs it meanwhile (CIL), head, tail, waits what nothing hides. They
add up to the prediction; of what is gained, a part may be negative.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.core.machine import Machine, as_machine, within
from weft.core.problem import LookupProblem, Problem
from weft.core.schedule import Schedule
from weft.perf.ranking import estimates, heuristic
from weft.planner.choose import plan
from weft.planner.signature import FREE_US, Signature, signature, without_communication, without_computation
from weft.planner.taxes import Taxes, taxes
from weft.planner.values import Plan
from weft.schedules import build, parse

FACTORS = (2.0, 4.0, 16.0)
"""By which sizes and rates are varied, both ways, to see what changes the choice."""
NOTHING = (
    f"With rows, links' rates and copies' costs up to {FACTORS[-1]:.0f} times as large or small, no other family's best of now "
    "would be faster."
)
DEFAULT_MACHINE = "h200x8"
_MARGIN = 0.01


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """parts: of the chosen schedule's predicted time, by name, in us; they add up to it. signatures: the losses of those that
    were simulated: first the chosen one, then the runner-up, of another family, where there is one, then the others. by_sizes:
    what the heuristic names. changes: sentences, each of what would let another family be faster, in as many chunks as are best
    for it now. taxes: of the chosen schedule, and of the sequential program where it was simulated and is another one."""

    plan: Plan
    parts: Mapping[str, float]
    signatures: tuple[Signature, ...]
    taxes: tuple[Taxes, ...]
    by_sizes: str
    changes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [self.plan.why, *(_describe_losses(found) for found in self.signatures)]
        named = ", ".join(f"{name} {us:+.0f}" for name, us in self.parts.items())
        if self.parts:
            lines.insert(1, f"Predicted {self.plan.chosen.predicted_us:.0f} us: {named}.")
        changes = self.changes or (NOTHING,) * (len({one.spec.partition(":")[0] for one in self.signatures}) > 1)
        lines += map(str, self.taxes)
        return "\n".join([*lines, f"By sizes alone: {self.by_sizes}.", *changes])


def explain(problem: Problem, machine: Machine | str | Path = DEFAULT_MACHINE) -> Explanation:
    """Why the planner chooses what it does for `problem`: print it, or read its parts.

    machine: a Machine, a shipped profile's name, or a file's path. Takes seconds for 8 ranks, since it simulates what would
    have to change. Raises ValueError as `weft.plan` does.
    """
    where = as_machine(machine)
    return explain_plan(plan(problem, where), where)


def explain_plan(found: Plan, machine: Machine) -> Explanation:
    """A plan for `machine`, taken apart."""
    problem = found.problem
    if problem.world_size == 1 or not problem.m or not problem.n:
        return Explanation(plan=found, parts={}, signatures=(), taxes=(), by_sizes="sequential", changes=())
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
        parts=parts,
        signatures=signatures,
        taxes=paid,
        by_sizes=heuristic(problem, machine),
        changes=changes,
    )


def _rivals(found: Plan) -> list[str]:
    """The best of each other family, the runner-up first, and the sequential program: those that were simulated, then the
    others as they are ranked."""
    known = dict.fromkeys([*(one.spec for one in found.candidates), *found.estimates, "sequential"])
    best: dict[str, str] = {}
    for spec in known:
        best.setdefault(parse(spec)[0], spec)
    return [spec for name, spec in best.items() if name != found.chosen.schedule]


def _build(problem: Problem, spec: str, machine: Machine) -> Schedule:
    return build(problem, *parse(spec), fan_out=machine.fans_out)


def _split_time(found: Signature, machine: Machine) -> dict[str, float]:
    """See the module's text."""
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
        "launches" if computes else "copies": fixed,
        "smaller pieces": pieces - whole - fixed,
        "contention": contention,
        "head, tail, waits": found.total_us - pieces - contention,
    }


def _fixed_us(found: Signature, machine: Machine, *, computes: bool) -> float:
    """Of a half alone, by how much the ranking would have it shorter if launches, or copies, cost nothing beyond their bytes,
    less one."""
    if computes:
        one_us, cheaper = machine.launch_us, dataclasses.replace(machine, launch_us=FREE_US)
        alone = without_communication
    else:
        one_us = machine.copies.copy_us
        cheaper = dataclasses.replace(machine, copies=dataclasses.replace(machine.copies, copy_us=FREE_US))
        alone = without_computation
    now, then = (estimates(found.problem, alone(where), [found.spec])[found.spec] for where in (machine, cheaper))
    return max(0.0, now - then - one_us)


def _describe_losses(found: Signature) -> str:
    losses = (
        ("matmul DIL", found.gemm_dil),
        ("CIL", found.gemm_cil),
        ("communication DIL", found.communication_dil),
        ("CIL", found.communication_cil),
    )
    named = ", ".join(f"{name} {loss:.2f}" for name, loss in losses if loss is not None)
    return f"{found.spec}: {found.total_us:.0f} us, {found.of_ideal}, {found.exposed_us:.0f} us exposed; {named}."


def _changes(found: Plan, specs: Sequence[str], machine: Machine) -> Iterator[str]:
    """Of each kind of change the smallest that lets a rival win, both ways; nothing where there is none. specs: the chosen one
    first."""
    problem, now = found.problem, estimates(found.problem, machine, specs)
    missed = {one.spec: one.predicted_us / now[one.spec] for one in found.candidates if now.get(one.spec)}
    for words, vary in _variations(problem, machine) if specs[1:] else ():
        for factor in FACTORS:
            changed = vary(factor)
            if changed is None:
                break
            us = {spec: us * missed.get(spec, 1.0) for spec, us in estimates(*changed, specs).items()}
            winner = min(us, key=us.__getitem__)
            if us[winner] < (1 - _MARGIN) * us[specs[0]]:
                yield f"{words(factor)} {winner} would be faster."
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
