"""Tables of a FiccoStudy, as rows of text of which the first names the columns: for the command line, report and documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from weft.core.machine import numbers
from weft.planner.signature import Signature, correlations
from weft.planner.sizes import FEATURES, Feature, sizes
from weft.studies.ficco.paper import choosers, figures, topologies
from weft.studies.ficco.sensitivity import FiccoSensitivity
from weft.studies.ficco.study import BESPOKE, COMPARED, FiccoStudy, Scenario

Row = tuple[str, ...]
SIZES: tuple[Feature, ...] = ("op_to_byte", "traffic_mib", "m_over_k")
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
"""The schedules of a FiccoStudy, as narrow columns name them."""
LOSSES: dict[str, Callable[[Signature], float]] = {
    "GEMM DIL": lambda found: found.gemm_dil,
    "GEMM CIL": lambda found: found.gemm_cil or 1.0,
    "comm. DIL": lambda found: found.communication_dil,
    "comm. CIL": lambda found: found.communication_cil or 1.0,
}


def figures_table(study: FiccoStudy) -> list[Row]:
    """Published numbers and ours."""
    rows = [
        (f.name, f.text(f.published), f.text(f.ours), f"{f.text(f.low)} to {f.text(f.high)}", "" if f.ok else "missed")
        for f in figures(study)
    ]
    return [("figure", "published", "ours", "accepted", ""), *rows]


def scenarios_table(found: Iterable[Scenario]) -> list[Row]:
    """Both halves alone in milliseconds, speed-ups over sequential, and what the heuristic chooses."""
    heads = ("GEMM", "M x N x K", "GEMM ms", "AG ms", "ideal", *(SHORT[name] for name in COMPARED[1:]), "heuristic")
    return [heads, *map(_scenario, found)]


def _scenario(one: Scenario) -> Row:
    case = one.case
    halves = (f"{us / 1e3:.1f}" for us in (one.computation_us, one.communication_us))
    gains = (f"{one.speedup(name):.2f}" for name in COMPARED[1:])
    chosen = SHORT[one.scored] + ("" if one.exact else ", wrong")
    return (case.name, f"{case.m} x {case.n} x {case.k}", *halves, f"{one.ideal:.2f}", *gains, chosen)


def topologies_table(study: FiccoStudy) -> list[Row]:
    """The mesh beside the switch: geometric means and maxima."""
    heads = ("", "p2p over sequential's time", "best of four, speed-up", "over p2p", "of the ideal's gain")
    return [
        heads,
        *(
            (row.name, *map(_pair, (row.p2p_loss, row.bespoke, row.over_p2p)), f"{row.realised:.0%}")
            for row in topologies(study)
        ),
    ]


def _pair(values: tuple[float, float]) -> str:
    return f"{values[0]:.2f}, max {values[1]:.2f}"


def choosers_table(study: FiccoStudy) -> list[Row]:
    """How well ways to choose do on unseen scenarios."""
    rows = ((one.name, *(f"{share:.1%}" for share in (one.exact, one.near, one.costs, one.most))) for one in choosers(study))
    return [("chosen by", "exact", "within 5%", "a wrong choice costs", "at most"), *rows]


def losses_table(study: FiccoStudy) -> list[Row]:
    """Of each scenario and each of FiCCO's four: DIL and CIL of the GEMM, then of the communication."""
    heads = (f"{SHORT[name]} {half}" for half in ("GEMM", "comm.") for name in BESPOKE)
    return [("GEMM", "op/byte", "MiB", "M/K", *heads), *(_losses(study, one) for one in study.mesh)]


def _losses(study: FiccoStudy, one: Scenario) -> Row:
    problem = one.case.problem(study.machine.world_size)
    known = sizes(problem, study.machine)
    static = (
        f"{FEATURES['op_to_byte'](known):.0f}",
        f"{FEATURES['traffic_mib'](known):.0f}",
        f"{FEATURES['m_over_k'](known):.3g}",
    )
    by_family = {found.spec.partition(":")[0]: found for found in study.signatures if found.problem == problem}
    dil_and_cil = ((LOSSES[f"{half} DIL"], LOSSES[f"{half} CIL"]) for half in ("GEMM", "comm."))
    cells = (f"{dil(by_family[name]):.2f} {cil(by_family[name]):.2f}" for dil, cil in dil_and_cil for name in BESPOKE)
    return (one.case.name, *static, *cells)


def correlations_table(study: FiccoStudy) -> list[Row]:
    """How each loss of each of FiCCO's four goes with static sizes: rank correlations."""
    return [("schedule", "loss", *SIZES), *_correlations(study)]


def _correlations(study: FiccoStudy) -> Iterator[Row]:
    for family in BESPOKE:
        some = [found for found in study.signatures if found.spec.partition(":")[0] == family]
        for name, of in LOSSES.items():
            known = correlations(some, study.machine, of)
            yield (family, name, *(f"{known[size]:+.2f}" for size in SIZES))


def sensitivity_table(rows: Sequence[FiccoSensitivity]) -> list[Row]:
    """The headline by assumed number and factor."""
    return [
        ("assumed number", "times", "p2p loss, max", "ideal, max", "best of four, max", "heuristic exact", "untold"),
        *map(_headline, rows),
    ]


def _headline(row: FiccoSensitivity) -> Row:
    values = (f"{value:.2f}x" for value in (row.p2p_loss, row.ideal, row.bespoke))
    return (row.path or "as it is", f"{row.factor:g}", *values, f"{row.exact:.0%}", f"{row.untold:.0%}")


def machine_table(study: FiccoStudy) -> list[Row]:
    """Every number of the machine, by its path, and where it is from."""
    values: dict[str, list[str]] = {}
    for path, value in numbers(study.machine):
        values.setdefault(path, []).append(f"{value:g}" if isinstance(value, float) else str(value))
    rows = ((path, ", ".join(found), study.machine.sources[path]) for path, found in values.items())
    return [("number", "value", "from"), *rows]
