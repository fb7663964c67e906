"""The Study of FiCCO's evaluation: the published figures beside those of a FiccoStudy, tables, charts and spans.

The accepted range of each figure was set before the comparison. No constant of the machine was set for a single scenario. All
published values are from FiCCO, arXiv 2512.10236. The losses of peer to peer and of a wrong choice are from its evaluation, the
others from its abstract.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.core.machine import Machine
from weft.planner.simulated import Signature
from weft_studies.ficco import evaluation
from weft_studies.ficco.evaluation import (
    BESPOKE,
    CHOSEN_FROM,
    COMPARED,
    FEATURES,
    Feature,
    FiccoStudy,
    Scenario,
    chosen_exactly,
    correlations,
    sizes,
    wrong_costs,
)
from weft_studies.ficco.gemms import FICCO_GEMMS, GemmCase, ficco_gemm
from weft_studies.figures import Evidence, Figure, Row, geomean
from weft_studies.profile import Progress
from weft_studies.study import Chart, ColumnChart, PointChart, Study, StudyTable
from weft_studies.workers import count_workers

NEAR = 0.05
BY_RATES = Evidence(
    label="predicted",
    because="It follows from the rates of links, collectives and GEMMs, none of which was chosen with the figure in view.",
)
BY_CONSTRUCTION = Evidence(
    label="derived",
    because="The ranking that chooses and the simulator that judges share their cost terms, so they agree by construction.",
)


def figures(study: FiccoStudy) -> tuple[Figure, ...]:
    """Return the published figures that the study has. The maxima are left out unless it has all of FiCCO's scenarios."""
    unseen = study.unseen
    exact, costs = chosen_exactly(unseen), wrong_costs(unseen)
    return (
        *(maxima(study.mesh) if study.whole else ()),
        BY_CONSTRUCTION.figure("heuristic chooses the best of unseen scenarios", 0.81, exact, (0.81, 1.0), "percent"),
        BY_CONSTRUCTION.figure("a wrong choice costs", 0.14, costs, (0.0, 0.14), "percent"),
    )


def maxima(mesh: Sequence[Scenario]) -> tuple[Figure, ...]:
    """Return the figures that are maxima, over these scenarios."""
    p2p, ideal = max(one.p2p_loss for one in mesh), max(one.ideal for one in mesh)
    best = max(one.speedup(one.bespoke) for one in mesh)
    return (
        BY_RATES.figure("peer to peer, slower than sequential, max", 3.9, p2p, (3.0, 4.5), "ratio"),
        BY_RATES.figure("ideal, speed-up, max", 1.7, ideal, (1.6, 1.8), "ratio"),
        BY_RATES.figure("best of FiCCO's four, speed-up, max", 1.6, best, (1.45, 1.7), "ratio"),
    )


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Topology has the results of a topology. Pairs are the geometric mean and the maximum over scenarios.

    p2p_loss: the time of peer to peer, divided by that of sequential.
    bespoke, over_p2p: the speed-ups of the best of FiCCO's four, over sequential and over peer to peer.
    realised: the mean share of the ideal's gain that the best of FiCCO's four reaches."""

    name: str
    p2p_loss: tuple[float, float]
    bespoke: tuple[float, float]
    over_p2p: tuple[float, float]
    realised: float


def topologies(study: FiccoStudy) -> Iterator[Topology]:
    """Yield the results of the mesh, and of the same GPUs behind a switch."""
    for name, found in (("full mesh", study.mesh), ("switch", study.switch)):
        yield Topology(
            name=name,
            p2p_loss=_mean_and_most([one.p2p_loss for one in found]),
            bespoke=_mean_and_most([one.speedup(one.bespoke) for one in found]),
            over_p2p=_mean_and_most([one.us["shard_p2p"] / one.us[one.bespoke] for one in found]),
            realised=statistics.fmean(map(_realised, found)),
        )


def _mean_and_most(values: Sequence[float]) -> tuple[float, float]:
    return statistics.geometric_mean(values), max(values)


def _realised(one: Scenario) -> float:
    return (one.speedup(one.bespoke) - 1) / (one.ideal - 1)


@dataclass(frozen=True, kw_only=True)
class ChooserScore:
    """ChooserScore rates a method that chooses among sequential and FiCCO's four, over unseen scenarios.

    exact: the share of best choices. near: the share within NEAR of the best. costs, most: the mean and the largest loss of a
    choice that is not the best."""

    name: str
    exact: float
    near: float
    costs: float
    most: float


def choosers(study: FiccoStudy) -> Iterator[ChooserScore]:
    """Yield the scores of the ranking, and of always choosing the best single schedule."""
    yield _chooser("the ranking", study.unseen)
    fixed = {name: [replace(one, scored=name) for one in study.unseen] for name in CHOSEN_FROM}
    best = min(fixed, key=lambda name: sum(one.wrong_by for one in fixed[name]))
    yield _chooser(f"always {best}", fixed[best])


def _chooser(name: str, found: Sequence[Scenario]) -> ChooserScore:
    return ChooserScore(
        name=name,
        exact=chosen_exactly(found),
        near=statistics.fmean(one.wrong_by <= NEAR for one in found),
        costs=wrong_costs(found),
        most=max(one.wrong_by for one in found),
    )


SIZES: dict[Feature, str] = {"op_to_byte": "operations a byte", "traffic_mib": "memory traffic, MiB", "m_over_k": "M / K"}
"""The static sizes that FiCCO's heuristic reads."""
SHORT = {
    "sequential": "sequential",
    "shard_p2p": "p2p",
    "uniform_fused_1d": "uf-1D",
    "hetero_fused_1d": "hf-1D",
    "hetero_unfused_1d": "hu-1D",
    "uniform_fused_2d": "uf-2D",
    "flag_gated": "gated",
}
"""The short names of schedules, for narrow columns."""
CONCCL_CONTENTION = 1.2
"""The factor by which GEMMs and copies slow each other down. On this machine, collectives by copy engines with concurrent GEMMs
reach 0.66 to 0.72 of the ideal speed-up (ConCCL, arXiv 2412.14335). If both slow by s while both run, a pair of lengths 1 and r
takes 1 + r (s - 1). With r = 3/4, s is 1.23 and 1.18."""
LOSSES: dict[str, Callable[[Signature], float]] = {
    "GEMM DIL": lambda found: found.gemm_dil,
    "GEMM CIL": lambda found: math.nan if found.gemm_cil is None else found.gemm_cil,
    "comm. DIL": lambda found: found.communication_dil,
    "comm. CIL": lambda found: math.nan if found.communication_cil is None else found.communication_cil,
}


def facts(machine: Machine) -> list[tuple[str, str]]:
    """Return a summary of the machine."""
    links = f"{machine.world_size - 1} of {machine.links.gbps:g} GB/s each way"
    return [
        ("Machine", machine.description),
        ("Links", links),
        ("GEMM peak", f"{machine.gpu.tflops['bfloat16']:g} TFLOP/s, bfloat16"),
    ]


def tables(done: FiccoStudy) -> tuple[StudyTable, ...]:
    """Return the tables of scenarios on the mesh and behind a switch, of choices, and of losses."""
    # A correlation over one or two scenarios has no meaning.
    several = len(done.mesh) > 2
    whole = "" if done.whole else f"; FiCCO's maxima are over all {len(FICCO_GEMMS)} scenarios, these are a part"
    return (
        StudyTable(
            name="scenarios",
            title=f"Speed-ups over sequential on the full mesh{whole}",
            rows=scenarios_table(done.mesh),
            words=(0, 1, 11),
        ),
        StudyTable(
            name="switch",
            title="Speed-ups over sequential behind a switch",
            rows=scenarios_table(done.switch),
            words=(0, 1, 11),
            console=False,
        ),
        StudyTable(name="topologies", title="Geometric means and maxima", rows=_topologies(done)),
        StudyTable(
            name="correlations",
            title="Rank correlations of losses with static sizes",
            rows=correlations_table(done),
            words=(0, 1),
            console=several,
        ),
        StudyTable(name="choosers", title="Choices among sequential and FiCCO's four", rows=_choosers(done)),
        StudyTable(name="losses", title="DIL and CIL of each of FiCCO's four", rows=losses_table(done), console=False),
    )


def variants(done: FiccoStudy, progress: Progress) -> tuple[StudyTable, ...]:
    """Simulate the effects of more contention, and of staging, which copies rows together around a cuBLAS GEMM."""
    machines = {
        "as it is": done.machine,
        "nothing is staged": replace(done.machine, stages=False),
        f"GEMMs and copies slow each other {CONCCL_CONTENTION}x": evaluation.contended(done.machine, CONCCL_CONTENTION),
        "the same, nothing staged": replace(evaluation.contended(done.machine, CONCCL_CONTENTION), stages=False),
    }
    rows = []
    for at, (name, machine) in enumerate(machines.items()):
        progress(name, at, len(machines))
        found = [evaluation.scenario(machine, one.case, (*CHOSEN_FROM, "shard_p2p")) for one in done.mesh]
        best = [one.speedup(one.bespoke) for one in found]
        gains = f"{max(best):.2f}x", f"{geomean(best):.2f}x"
        exact = f"{sum(one.exact for one in found)} of {len(found)}"
        rows.append((name, f"{max(one.p2p_loss for one in found):.2f}x", *gains, exact))
    heads = ("machine", "p2p loss, max", "best of FiCCO's four, max", "geomean", "chosen exactly")
    return (StudyTable(name="variants", title="Contention and staging", rows=[heads, *rows]),)


def scenarios_table(found: Iterable[Scenario]) -> list[Row]:
    """Return a row per scenario: both halves alone in ms, speed-ups over sequential, and the heuristic's choice."""
    heads = ("GEMM", "M x N x K", "GEMM ms", "AG ms", "ideal", *(SHORT[name] for name in COMPARED[1:]), "heuristic")
    return [heads, *map(_scenario, found)]


def _scenario(one: Scenario) -> Row:
    case = one.case
    halves = (f"{us / 1e3:.1f}" for us in (one.computation_us, one.communication_us))
    gains = (f"{one.speedup(name):.2f}" for name in COMPARED[1:])
    chosen = SHORT[one.scored] + ("" if one.exact else ", wrong")
    return (case.name, f"{case.m} x {case.n} x {case.k}", *halves, f"{one.ideal:.2f}", *gains, chosen)


def _topologies(done: FiccoStudy) -> list[Row]:
    """Compare the mesh with the switch: geometric means and maxima."""
    rows = [
        (row.name, *map(_pair, (row.p2p_loss, row.bespoke, row.over_p2p)), f"{row.realised:.0%}") for row in topologies(done)
    ]
    return [("", "p2p over sequential's time", "best of four, speed-up", "over p2p", "of the ideal's gain"), *rows]


def _pair(values: tuple[float, float]) -> str:
    return f"{values[0]:.2f}, max {values[1]:.2f}"


def _choosers(done: FiccoStudy) -> list[Row]:
    """List the scores of methods of choice on unseen scenarios."""
    rows = ((one.name, *(f"{share:.1%}" for share in (one.exact, one.near, one.costs, one.most))) for one in choosers(done))
    return [("chosen by", "exact", "within 5%", "a wrong choice costs", "at most"), *rows]


def losses_table(done: FiccoStudy) -> list[Row]:
    """Return a row per scenario with DIL and CIL of the GEMM and of the communication, for each of FiCCO's four."""
    heads = (f"{SHORT[name]} {half}" for half in ("GEMM", "comm.") for name in BESPOKE)
    return [("GEMM", "op/byte", "MiB", "M/K", *heads), *(_losses(done, one) for one in done.mesh)]


def _losses(done: FiccoStudy, one: Scenario) -> Row:
    problem = one.case.problem(done.machine.world_size)
    known = sizes(problem, done.machine)
    op_to_byte, traffic, m_over_k = (FEATURES[size](known) for size in SIZES)
    by_family = {found.spec.partition(":")[0]: found for found in done.signatures if found.problem == problem}
    dil_and_cil = ((LOSSES[f"{half} DIL"], LOSSES[f"{half} CIL"]) for half in ("GEMM", "comm."))
    cells = (f"{dil(by_family[name]):.2f} {cil(by_family[name]):.2f}" for dil, cil in dil_and_cil for name in BESPOKE)
    return (one.case.name, f"{op_to_byte:.0f}", f"{traffic:.0f}", f"{m_over_k:.3g}", *cells)


def correlations_table(done: FiccoStudy) -> list[Row]:
    """Return the rank correlations of each loss of each of FiCCO's four with static sizes."""
    return [("schedule", "loss", *SIZES), *_correlations(done)]


def _correlations(done: FiccoStudy) -> Iterator[Row]:
    for family in BESPOKE:
        for name, of in LOSSES.items():
            losses = _of_family(done, family)
            known = correlations(losses, done.machine, of)
            # A correlation needs losses that differ.
            varies = len({round(of(found), 3) for found in losses}) > 2
            yield (family, name, *(f"{known[size]:+.2f}" if varies else "-" for size in SIZES))


def _of_family(done: FiccoStudy, family: str) -> list[Signature]:
    return [found for found in done.signatures if found.spec.partition(":")[0] == family]


def charts(done: FiccoStudy) -> tuple[Chart, ...]:
    """Return charts of speed-ups on the mesh and behind a switch, and of losses against static sizes."""
    losses = [
        PointChart(name=f"loss{place}", title=f"{loss} against static sizes", panels=_points(done, of))
        for place, (loss, of) in enumerate(LOSSES.items())
    ]
    return (_speedups("mesh", "On the full mesh", done.mesh), _speedups("switch", "Behind a switch", done.switch), *losses)


def _speedups(name: str, title: str, found: Sequence[Scenario]) -> ColumnChart:
    series = {
        "ideal": [one.ideal for one in found],
        "best of FiCCO's four": [one.speedup(one.bespoke) for one in found],
        **{name: [one.speedup(name) for one in found] for name in ("shard_p2p", "flag_gated")},
    }
    return ColumnChart(name=name, title=title, places=[one.case.name for one in found], series=series, unit="over sequential")


def _points(done: FiccoStudy, loss: Callable[[Signature], float]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    return {
        words: {
            family: [(FEATURES[size](sizes(one.problem, done.machine)), loss(one)) for one in _of_family(done, family)]
            for family in BESPOKE
        }
        for size, words in SIZES.items()
    }


def changed(machine: Machine, settings: Mapping[str, str]) -> Machine:
    """Return the machine with these settings and the numbers that follow from them."""
    return machine.what_if(settings)


def of(cases: Sequence[GemmCase]) -> Study:
    """Return the study of these scenarios. Both sweeps use estimates."""

    def sample(machine: Machine) -> tuple[Figure, ...]:
        return maxima([evaluation.estimated(machine, case) for case in cases])

    def run(machine: Machine, progress: Progress) -> FiccoStudy:
        return evaluation.run(machine, cases, progress=progress, workers=count_workers())

    return replace(STUDY, run=run, sample=sample)


def only(names: Sequence[str]) -> Study:
    """Return the study of the named scenarios. Raises ValueError for a name that is not in FiCCO's list."""
    return of(tuple(map(ficco_gemm, names)))


STUDY = Study(
    name="ficco",
    title="FiCCO",
    paper="2512.10236",
    example="links.gbps=64",
    load=evaluation.load,
    apply_settings=changed,
    facts=facts,
    run=lambda machine, progress: evaluation.run(machine, progress=progress, workers=count_workers()),
    figures=figures,
    tables=tables,
    charts=charts,
    spans=evaluation.calls,
    variants=variants,
    sample=lambda machine: maxima([evaluation.estimated(machine, case) for case in FICCO_GEMMS]),
    headlines={
        "peer to peer, slower than sequential, max": "ratio",
        "ideal, speed-up, max": "ratio",
        "best of FiCCO's four, speed-up, max": "ratio",
    },
    left_out="The sweeps leave out the heuristic's two figures, and take estimates, which are within 3% of the simulation.",
    select_scenarios=only,
)
