"""Tables of the published evaluations that `weft simulate` redoes, for generate.py.

t3 WHAT      figures, sublayers, mappings, sensitivity or system
ficco WHAT   figures, choosers, scenarios, switch, topologies, losses, correlations, sensitivity or machine
dlrm WHAT    figures, iteration, nodes, two_nodes, slices, sensitivity or system

What takes long to make lies in files beside this one: `keep_sensitivity` and `keep_ficco` write them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import TypeVar

from text_tables import ROOT, table

from weft.core import codec
from weft.studies.dlrm import sensitivity as dlrm_sensitivity
from weft.studies.dlrm import study as dlrm_study
from weft.studies.dlrm import system as dlrm_system
from weft.studies.dlrm import tables as dlrm_tables
from weft.studies.dlrm.paper import figures as dlrm_figures
from weft.studies.ficco import sensitivity as ficco_sensitivity
from weft.studies.ficco import study as ficco_study
from weft.studies.ficco import tables as ficco_tables
from weft.studies.published import figures_table, numbers_table
from weft.studies.t3 import sensitivity as t3_sensitivity
from weft.studies.t3 import study as t3_study
from weft.studies.t3 import system as t3_system
from weft.studies.t3 import tables as t3_tables
from weft.studies.t3.paper import figures as t3_figures

T = TypeVar("T")
T3_SENSITIVITY = ROOT / "docs" / "t3_sensitivity.json"
FICCO = ROOT / "docs" / "ficco.json"
DLRM = ROOT / "docs" / "dlrm_study.json"
Tables = dict[str, Callable[[], Sequence[Sequence[str]]]]


@functools.cache
def _t3_study() -> t3_study.T3Study:
    """T3's whole evaluation, once for all of its tables."""
    return t3_study.run(t3_system.load())


def t3(what: str) -> str:
    """A table of the simulated T3."""
    makers: Tables = {
        "figures": lambda: figures_table(t3_figures(_t3_study())),
        "sublayers": lambda: t3_tables.sublayers_table((*_t3_study().sublayers, *_t3_study().large)),
        "mappings": lambda: t3_tables.mappings_table(_t3_study()),
        "sensitivity": lambda: t3_tables.sensitivity_table(_kept_t3()),
        "system": lambda: numbers_table(t3_system.load()),
    }
    return table(makers[what]())


def _kept_t3() -> Sequence[t3_sensitivity.T3Sensitivity]:
    return codec.loads(tuple[t3_sensitivity.T3Sensitivity, ...], T3_SENSITIVITY.read_text(encoding="utf-8"))  # type: ignore[arg-type]


def ficco(what: str) -> str:
    """A table of the simulated FiCCO."""
    found, rows = _kept_ficco()
    makers: Tables = {
        "figures": lambda: ficco_tables.figures_table(found),
        "scenarios": lambda: ficco_tables.scenarios_table(found.mesh),
        "switch": lambda: ficco_tables.scenarios_table(found.switch),
        "choosers": lambda: ficco_tables.choosers_table(found),
        "topologies": lambda: ficco_tables.topologies_table(found),
        "losses": lambda: ficco_tables.losses_table(found),
        "correlations": lambda: ficco_tables.correlations_table(found),
        "sensitivity": lambda: ficco_tables.sensitivity_table(rows),
        "machine": lambda: [row[:2] for row in ficco_tables.machine_table(found)],
    }
    return table(makers[what]())


@functools.cache
def _kept_ficco() -> tuple[ficco_study.FiccoStudy, Sequence[ficco_sensitivity.FiccoSensitivity]]:
    """FiCCO's evaluation and what its assumed numbers do, as they were kept."""
    data = json.loads(FICCO.read_text(encoding="utf-8"))
    rows = codec.load(tuple[ficco_sensitivity.FiccoSensitivity, ...], data["sensitivity"])
    return codec.load(ficco_study.FiccoStudy, data["study"]), rows


def keep_ficco() -> None:
    """Simulate it, and keep it."""
    where = ficco_study.load()
    data = {"study": ficco_study.run(where), "sensitivity": tuple(ficco_sensitivity.sensitivity(where))}
    FICCO.write_text(codec.dumps(data, indent=1) + "\n", encoding="utf-8")


def dlrm(what: str) -> str:
    """A table of the simulated DLRM. The published case and two nodes are made anew."""
    system = dlrm_system.load()
    makers: Tables = {
        "figures": lambda: figures_table(dlrm_figures(_dlrm_study())),
        "iteration": lambda: dlrm_tables.iteration_table(_dlrm_study().unfused, _dlrm_study().fused),
        "nodes": lambda: dlrm_tables.cases_table(_dlrm_study().cases),
        "two_nodes": lambda: dlrm_tables.operators_table(_dlrm_study().operators),
        "slices": lambda: dlrm_tables.sliced_table(_dlrm_study().sliced),
        "sensitivity": lambda: dlrm_tables.sensitivity_table(_kept_dlrm("sensitivity", dlrm_sensitivity.DlrmSensitivity)),
        "system": lambda: numbers_table(system),
    }
    return table(makers[what]())


@functools.cache
def _dlrm_study() -> dlrm_study.DlrmStudy:
    """DLRM's study: node counts and slices as they are kept, the rest made anew."""
    system = dlrm_system.load()
    unfused, fused = dlrm_study.runs(system, *dlrm_study.PUBLISHED)
    return dlrm_study.DlrmStudy(
        system=system,
        unfused=unfused,
        fused=fused,
        cases=_kept_dlrm("cases", dlrm_study.Case),
        operators=tuple(dlrm_study.two_nodes(system)),
        sliced=_kept_dlrm("sliced", dlrm_study.SliceResult),
    )


def _kept_dlrm(name: str, kind: type[T]) -> tuple[T, ...]:
    made: tuple[T, ...] = codec.load(tuple[kind, ...], json.loads(DLRM.read_text(encoding="utf-8"))[name])  # type: ignore[valid-type]
    return made


def keep_sensitivity() -> None:
    """Simulate what T3's and DLRM's tables take from files, and keep it."""
    rows = tuple(t3_sensitivity.sensitivity(t3_system.load()))
    T3_SENSITIVITY.write_text(codec.dumps(rows, indent=1) + "\n", encoding="utf-8")
    system = dlrm_system.load()
    done = dlrm_study.run(system)
    data = {"cases": done.cases, "sliced": done.sliced, "sensitivity": tuple(dlrm_sensitivity.sensitivity(system))}
    DLRM.write_text(codec.dumps(data, indent=1) + "\n", encoding="utf-8")


MAKERS: dict[str, Callable[[str], str]] = {"t3": t3, "ficco": ficco, "dlrm": dlrm}
