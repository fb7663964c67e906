"""Study: what FiCCO's evaluation reports, simulated on one Machine, as one value. The schedules are weft's own, as `weft run`
executes them; what is FiCCO's is the machine, the sixteen GEMMs, and which schedules are held against which.

    sequential     NCCL's all-gather, which drives all links at once, then cuBLAS's GEMM
    ideal          the longer of these two, each alone
    shard_p2p      a shard a step from one peer: of a full mesh's links one carries data at a time
    bespoke        the best of FiCCO's four, with a chunk a rank and shard

Contract: `run(machine)` is a pure function: the same machine gives the same FiccoStudy, to the nanosecond.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.core.machine import Machine
from weft.core.machine import load as load_machine
from weft.core.problem import Problem
from weft.core.span import Span
from weft.perf import Outcome, engine
from weft.perf.ranking import estimates
from weft.perf.terms import whole_collective_us, whole_gemm_us
from weft.planner.models.gemms import FICCO_GEMMS, GemmCase
from weft.planner.signature import Signature, signature
from weft.planner.values import predicted
from weft.schedules import build
from weft.studies.ficco.scenarios import unseen
from weft.studies.profile import Progress

MACHINE = "mi300x8"
BESPOKE = ("uniform_fused_1d", "hetero_fused_1d", "hetero_unfused_1d", "uniform_fused_2d")
"""The four schedules that FiCCO keeps."""
COMPARED = ("sequential", "shard_p2p", *BESPOKE, "flag_gated")
"""flag_gated is not FiCCO's: one GEMM whose tiles wait for chunks, which decomposes nothing (AMD's Iris)."""
CHOSEN_FROM = ("sequential", *BESPOKE)
"""What the heuristic chooses from."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A GEMM behind an all-gather. computation_us, communication_us: each half alone. us: of each schedule. scored: what the
    heuristic chooses."""

    case: GemmCase
    computation_us: float
    communication_us: float
    us: Mapping[str, float]
    scored: str

    @property
    def ideal(self) -> float:
        """Speed-up over sequential if the shorter half were hidden whole."""
        return self.us["sequential"] / max(self.computation_us, self.communication_us)

    @property
    def bespoke(self) -> str:
        """The fastest of FiCCO's four."""
        return min(BESPOKE, key=lambda name: self.us[name])

    @property
    def best_us(self) -> float:
        """Of what the heuristic chooses from."""
        return min(self.us[name] for name in CHOSEN_FROM)

    @property
    def exact(self) -> bool:
        """Whether nothing is faster than what the heuristic chooses."""
        return self.us[self.scored] == self.best_us

    @property
    def wrong_by(self) -> float:
        """What the heuristic's choice loses to the best, as a share."""
        return self.us[self.scored] / self.best_us - 1

    def speedup(self, name: str) -> float:
        """Over sequential."""
        return self.us["sequential"] / self.us[name]

    @property
    def p2p_loss(self) -> float:
        """Times that peer to peer takes as long as sequential."""
        return 1 / self.speedup("shard_p2p")


@dataclass(frozen=True, kw_only=True)
class FiccoStudy:
    """The whole evaluation. mesh: on the machine. switch: the same GPUs and links behind a switch. unseen: what the heuristic
    is held to. signatures: losses on the machine, of each scenario of `mesh` and each of FiCCO's four."""

    machine: Machine
    mesh: tuple[Scenario, ...]
    switch: tuple[Scenario, ...]
    unseen: tuple[Scenario, ...]
    signatures: tuple[Signature, ...]

    @property
    def whole(self) -> bool:
        """Whether all of FiCCO's GEMMs are there, which its maxima are over."""
        return {one.case for one in self.mesh} >= set(FICCO_GEMMS)


def load() -> Machine:
    """The full mesh that FiCCO was evaluated on."""
    return load_machine(MACHINE)


def contended(machine: Machine, slower: float) -> Machine:
    """`machine`, whose GEMMs and copies each take so many times as long beside the other."""
    return replace(machine, contention=dict.fromkeys(machine.contention, slower))


def behind_switch(machine: Machine) -> Machine:
    """A mesh's GPUs, whose links all lead to a switch: one peer, too, gets what all of them carry. The collectives stay."""
    gbps = (machine.world_size - 1) * machine.links.gbps
    return replace(
        machine,
        name=f"{machine.name} behind a switch",
        links=replace(machine.links, topology="switch", gbps=gbps),
        copies=replace(machine.copies, gbps=machine.copies.several_gbps, engines=1),
    )


def run(
    machine: Machine,
    cases: Sequence[GemmCase] = FICCO_GEMMS,
    others: Sequence[GemmCase] | None = None,
    progress: Progress = lambda text, done, total: None,
) -> FiccoStudy:
    """Simulate all of it. others: scenarios for the heuristic (default: `unseen()`). progress: called with what comes next, how
    much is done, and of how much. Raises ValueError unless the machine is a mesh of two GPUs or more."""
    if machine.links.topology != "mesh" or machine.world_size < 2:
        found = f"links.topology is {machine.links.topology!r} and world_size {machine.world_size}"
        raise ValueError(f"{found}; FiCCO's evaluation is of a mesh, of at least 2 GPUs")
    others = unseen() if others is None else others
    total = 2 * len(cases) + len(others)
    at = 0

    def told(items: Iterable[GemmCase], what: str) -> Iterator[GemmCase]:
        nonlocal at
        for case in items:
            progress(f"{what} {case.name}", at, total)
            yield case
            at += 1

    mesh: list[Scenario] = []
    losses: list[Signature] = []
    for case in told(cases, "mesh"):
        outcomes = simulated(machine, case)
        mesh.append(_scenario(machine, case, outcomes))
        losses += signatures(machine, outcomes)
    switch = tuple(scenario(behind_switch(machine), case) for case in told(cases, "switch"))
    drawn = tuple(scenario(machine, case, CHOSEN_FROM) for case in told(others, "heuristic"))
    progress("done", total, total)
    return FiccoStudy(machine=machine, mesh=tuple(mesh), switch=switch, unseen=drawn, signatures=tuple(losses))


def simulated(machine: Machine, case: GemmCase, names: Sequence[str] = COMPARED) -> dict[str, Outcome]:
    """One GEMM by each of these schedules; a chunk a rank and shard where chunks are free."""
    problem = case.problem(machine.world_size)
    return {name: engine.run(build(problem, name, fan_out=machine.fans_out), machine) for name in names}


def estimated(machine: Machine, case: GemmCase) -> Scenario:
    """One GEMM as the ranking estimates it for the schedules that FiCCO's maxima are of: within 3% of the simulation, and some
    hundred times as fast."""
    problem = case.problem(machine.world_size)
    us = estimates(problem, machine, (*CHOSEN_FROM, "shard_p2p"))
    return Scenario(
        case=case,
        computation_us=whole_gemm_us(machine, problem),
        communication_us=whole_collective_us(machine, problem),
        us=us,
        scored=min(CHOSEN_FROM, key=us.__getitem__),
    )


def scenario(machine: Machine, case: GemmCase, names: Sequence[str] = COMPARED) -> Scenario:
    """One GEMM as these schedules run it."""
    return _scenario(machine, case, simulated(machine, case, names))


def _scenario(machine: Machine, case: GemmCase, outcomes: Mapping[str, Outcome]) -> Scenario:
    problem = case.problem(machine.world_size)
    return Scenario(
        case=case,
        computation_us=whole_gemm_us(machine, problem),
        communication_us=whole_collective_us(machine, problem),
        us={name: outcome.total_us for name, outcome in outcomes.items()},
        scored=pick(problem, machine),
    )


def calls(study: FiccoStudy) -> dict[str, tuple[Span, ...]]:
    """Every scenario of the mesh as sequential and the fastest of FiCCO's four run it, as spans: by title."""
    found: dict[str, tuple[Span, ...]] = {}
    for one in study.mesh:
        problem = one.case.problem(study.machine.world_size)
        for name in ("sequential", one.bespoke):
            schedule = build(problem, name, fan_out=study.machine.fans_out)
            found[f"{one.case.name} {name}"] = engine.simulate(schedule, study.machine)
    return found


def signatures(machine: Machine, outcomes: Mapping[str, Outcome]) -> tuple[Signature, ...]:
    """What each of FiCCO's four loses, to decomposition and to contention. outcomes: by name, of one GEMM."""
    found = [outcomes[name] for name in BESPOKE]
    return tuple(signature(one.schedule, machine, predicted(one.schedule, one, machine)) for one in found)


def pick(problem: Problem, machine: Machine) -> str:
    """What the ranking (weft.perf.ranking) puts first of CHOSEN_FROM, in world_size chunks a shard as FiCCO has them."""
    us = estimates(problem, machine, CHOSEN_FROM)
    return min(us, key=us.__getitem__)


def chosen_exactly(scenarios: Sequence[Scenario]) -> float:
    """Share of scenarios in which the heuristic chooses the fastest."""
    return statistics.fmean(one.exact for one in scenarios)


def wrong_costs(scenarios: Sequence[Scenario]) -> float:
    """What a choice that is not the fastest loses on average; 0 where there is none."""
    return statistics.fmean([one.wrong_by for one in scenarios if not one.exact] or [0.0])
