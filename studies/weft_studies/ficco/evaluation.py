"""This module simulates FiCCO's evaluation on one Machine. The schedules are weft's own, as `weft run` executes them. The
machine, the sixteen GEMMs and the comparisons are FiCCO's.

    sequential     NCCL's all-gather, which drives all links at once, then cuBLAS's GEMM
    ideal          the longer of these two alone
    shard_p2p      one shard per step from one peer, so that only one link of a full mesh carries data at a time
    bespoke        the best of FiCCO's four, with one chunk for each rank and shard

Contract: `run(machine)` is a pure function: the same machine gives the same FiccoStudy, to the nanosecond.

The losses of its schedules are compared with static sizes of the problem, by the first three of which FiCCO (arXiv 2512.10236)
chooses:

    op_to_byte       2 rows cols inner / traffic, in operations per byte
    traffic_mib      (rows inner + inner cols) elements of operands, and rows cols of the result, in MiB
    m_over_k         M / K of the whole problem
    balance          the matmul's time at the machine's peak / the time of what a rank sends at its links' rate
    shard_rows       M / world_size: the rows that chunks cut

rows x cols x inner is the matmul of the rank with the most work.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple

from weft.core.machine import Machine
from weft.core.machine import load as load_machine
from weft.core.problem import REDUCTIONS, Problem
from weft.core.span import Span
from weft.perf import Outcome, engine
from weft.perf.ranking import estimates
from weft.perf.terms import whole_collective_us, whole_gemm_us
from weft.planner.simulated import Signature, signature
from weft.planner.values import predicted
from weft.schedules import build
from weft_studies.ficco.gemms import FICCO_GEMMS, GemmCase, unseen
from weft_studies.profile import Progress
from weft_studies.workers import results

MACHINE = "mi300x8"
BESPOKE = ("uniform_fused_1d", "hetero_fused_1d", "hetero_unfused_1d", "uniform_fused_2d")
"""FiCCO's four schedules."""
COMPARED = ("sequential", "shard_p2p", *BESPOKE, "flag_gated")
"""The compared schedules. flag_gated comes from AMD's Iris: one undivided GEMM whose tiles wait for chunks."""
CHOSEN_FROM = ("sequential", *BESPOKE)
"""The candidates of the heuristic."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Scenario is a GEMM after an all-gather.

    computation_us, communication_us: the times of each half alone. us: the time of each schedule. scored: the heuristic's
    choice."""

    case: GemmCase
    computation_us: float
    communication_us: float
    us: Mapping[str, float]
    scored: str

    @property
    def ideal(self) -> float:
        """The speed-up over sequential if the shorter half were completely hidden."""
        return self.us["sequential"] / max(self.computation_us, self.communication_us)

    @property
    def bespoke(self) -> str:
        """The fastest of FiCCO's four."""
        return min(BESPOKE, key=lambda name: self.us[name])

    @property
    def best_us(self) -> float:
        """The time of the fastest schedule in CHOSEN_FROM."""
        return min(self.us[name] for name in CHOSEN_FROM)

    @property
    def exact(self) -> bool:
        """True if the heuristic's choice is a fastest candidate."""
        return self.us[self.scored] == self.best_us

    @property
    def wrong_by(self) -> float:
        """The loss of the heuristic's choice against the best, as a share."""
        return self.us[self.scored] / self.best_us - 1

    def speedup(self, name: str) -> float:
        """Return a schedule's speed-up over sequential."""
        return self.us["sequential"] / self.us[name]

    @property
    def p2p_loss(self) -> float:
        """The time of peer to peer, divided by that of sequential."""
        return 1 / self.speedup("shard_p2p")


@dataclass(frozen=True, kw_only=True)
class FiccoStudy:
    """FiccoStudy has the results of the whole evaluation.

    mesh: the scenarios on the machine. switch: the same GPUs and links behind a switch. unseen: scenarios that test the
    heuristic.
    signatures: the losses of FiCCO's four in each scenario of `mesh`."""

    machine: Machine
    mesh: tuple[Scenario, ...]
    switch: tuple[Scenario, ...]
    unseen: tuple[Scenario, ...]
    signatures: tuple[Signature, ...]

    @property
    def whole(self) -> bool:
        """True if the study includes all of FiCCO's GEMMs, as its published maxima do."""
        return {one.case for one in self.mesh} >= set(FICCO_GEMMS)


def load() -> Machine:
    """Load the full mesh on which FiCCO was evaluated."""
    return load_machine(MACHINE)


def contended(machine: Machine, slower: float) -> Machine:
    """Return `machine` with this slowdown of concurrent GEMMs and copies by each other."""
    return replace(machine, contention=dict.fromkeys(machine.contention, slower))


def behind_switch(machine: Machine) -> Machine:
    """Return a mesh whose links all lead to a switch, so that one peer gets the rate of all. Collectives do not change."""
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
    workers: int = 1,
) -> FiccoStudy:
    """Simulate the whole evaluation. Raises ValueError unless the machine is a mesh of at least two GPUs.

    others: scenarios for the heuristic; the default is `unseen()`. progress: called with the next item, the items done and the
    total. workers: the number of processes that share the scenarios. The result is the same for any number."""
    if machine.links.topology != "mesh" or machine.world_size < 2:
        found = f"links.topology is {machine.links.topology!r} and world_size {machine.world_size}"
        raise ValueError(f"{found}; FiCCO's evaluation is of a mesh, of at least 2 GPUs")
    others = unseen() if others is None else others
    switched = behind_switch(machine)
    tasks: list[tuple[str, Callable[[], Any]]] = [
        *((f"mesh {case.name}", partial(_with_losses, machine, case)) for case in cases),
        *((f"switch {case.name}", partial(scenario, switched, case)) for case in cases),
        *((f"heuristic {case.name}", partial(scenario, machine, case, CHOSEN_FROM)) for case in others),
    ]
    done = list(results(tasks, progress, workers))
    all_losses = chain.from_iterable(losses for _, losses in done[: len(cases)])
    return FiccoStudy(
        machine=machine,
        mesh=tuple(one for one, _ in done[: len(cases)]),
        switch=tuple(done[len(cases) : 2 * len(cases)]),
        unseen=tuple(done[2 * len(cases) :]),
        signatures=tuple(all_losses),
    )


def _with_losses(machine: Machine, case: GemmCase) -> tuple[Scenario, tuple[Signature, ...]]:
    outcomes = simulated(machine, case)
    return _scenario(machine, case, outcomes), signatures(machine, outcomes)


def simulated(machine: Machine, case: GemmCase, names: Sequence[str] = COMPARED) -> dict[str, Outcome]:
    """Simulate one GEMM with each of these schedules. Where the number of chunks is free, a shard has one for each rank."""
    problem = case.problem(machine.world_size)
    return {name: engine.run(build(problem, name, fan_out=machine.fans_out), machine) for name in names}


def estimated(machine: Machine, case: GemmCase) -> Scenario:
    """Estimate one GEMM by the ranking, with the schedules of FiCCO's maxima.

    The result is within 3% of the simulation, about a hundred times as fast."""
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
    """Simulate one GEMM with these schedules."""
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
    """Return the spans of every scenario of the mesh under sequential and the fastest of FiCCO's four, by title."""
    found: dict[str, tuple[Span, ...]] = {}
    for one in study.mesh:
        problem = one.case.problem(study.machine.world_size)
        for name in ("sequential", one.bespoke):
            schedule = build(problem, name, fan_out=study.machine.fans_out)
            found[f"{one.case.name} {name}"] = engine.simulate(schedule, study.machine)
    return found


def signatures(machine: Machine, outcomes: Mapping[str, Outcome]) -> tuple[Signature, ...]:
    """Return the losses of FiCCO's four to decomposition and to contention. outcomes: those of one GEMM by schedule."""
    found = [outcomes[name] for name in BESPOKE]
    return tuple(signature(one.schedule, machine, predicted(one.schedule, one, machine)) for one in found)


def pick(problem: Problem, machine: Machine) -> str:
    """Return the schedule in CHOSEN_FROM that the ranking (weft.perf.ranking) puts first, with world_size chunks per shard."""
    us = estimates(problem, machine, CHOSEN_FROM)
    return min(us, key=us.__getitem__)


def chosen_exactly(scenarios: Sequence[Scenario]) -> float:
    """Return the share of scenarios in which the heuristic chooses the fastest."""
    return statistics.fmean(one.exact for one in scenarios)


def wrong_costs(scenarios: Sequence[Scenario]) -> float:
    """Return the mean loss of the choices that are not the fastest. 0 if all are the fastest."""
    return statistics.fmean([one.wrong_by for one in scenarios if not one.exact] or [0.0])


Feature = Literal["op_to_byte", "traffic_mib", "m_over_k", "balance", "shard_rows"]


class Sizes(NamedTuple):
    """The static sizes of a problem on the rank with the most work."""

    problem: Problem
    machine: Machine
    rows: int
    cols: int
    inner: int

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.cols * self.inner

    @property
    def traffic_bytes(self) -> int:
        operands, result = self.rows * self.inner + self.inner * self.cols, self.rows * self.cols
        return operands * self.problem.operand_itemsize + result * self.problem.itemsize

    @property
    def sent_us(self) -> float:
        """The time to send a rank's data at its links' rate. An all-reduce scatters and gathers; a mesh uses all links."""
        trips = 2 if self.problem.op == "matmul_all_reduce" else 1
        links = self.problem.world_size - 1 if self.machine.links.topology == "mesh" else 1
        return trips * (self.problem.world_size - 1) * self.problem.shard_bytes / (self.machine.links.gbps * 1e3 * links)


def sizes(problem: Problem, machine: Machine) -> Sizes:
    """Return the sizes from which the features are computed."""
    most = max(problem.b_sizes, default=0)
    columns, inner = problem.columns(0), problem.inner(0)
    if problem.op in REDUCTIONS:
        inner = max(inner, most)
    else:
        columns = max(columns, most)
    return Sizes(problem, machine, problem.product_rows(0), columns, inner)


FEATURES: dict[Feature, Callable[[Sizes], float]] = {
    "op_to_byte": lambda s: s.flops / s.traffic_bytes,
    "traffic_mib": lambda s: s.traffic_bytes / (1 << 20),
    "m_over_k": lambda s: s.problem.m / s.problem.k,
    "balance": lambda s: s.flops / (s.machine.tflops(s.problem.rate_name) * 1e6) / s.sent_us,
    "shard_rows": lambda s: s.problem.m / s.problem.world_size,
}
"""The features that the module describes, for problems on two or more ranks with a result that is not empty."""


def correlations(
    signatures: Sequence[Signature], machine: Machine, of: Callable[[Signature], float] = lambda found: found.loss
) -> dict[Feature, float]:
    """Return Spearman's rank correlation of a loss with each static size; 0 for fewer than three different values.

    of: returns the loss of a signature. The default is the whole loss."""
    losses = [of(found) for found in signatures]
    known = [sizes(found.problem, machine) for found in signatures]
    return {name: spearman([FEATURES[name](one) for one in known], losses) for name in FEATURES}


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """
    >>> round(spearman([1, 2, 3, 10], [5, 6, 7, 8]), 6), spearman([1, 2, 3], [2, 2, 2])
    (1.0, 0.0)
    """
    if min(len(set(left)), len(set(right))) < 3:
        return 0.0
    return statistics.correlation(_ranked(left), _ranked(right))


def _ranked(values: Sequence[float]) -> list[float]:
    """Return ascending ranks. Equal values share the mean of their ranks."""
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]
