"""Sensitivity: what the assumed numbers of a DlrmSystem do to the headline, each taken a quarter lower and a quarter higher."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from weft.studies.dlrm.study import PUBLISHED, case, two_nodes
from weft.studies.dlrm.system import DlrmSystem, Topology
from weft.studies.profile import Progress, scaled, swept


@dataclass(frozen=True, kw_only=True)
class DlrmSensitivity:
    """The headline with one number changed. path: None for none.

    torus, tree, operator: what fusing saves of an iteration of the published nodes on the published torus, of one on a fat
    tree, and of two nodes' embedding and all-to-all (mean), as a share of the unfused time. None: that cannot be simulated;
    refused says why.
    """

    path: str | None
    factor: float
    torus: float | None = None
    tree: float | None = None
    operator: float | None = None
    refused: str = ""


def headline(system: DlrmSystem, path: str | None = None, factor: float = 1.0) -> DlrmSensitivity:
    """The headline of a DlrmSystem with the number at `path` times `factor`; whole numbers are rounded."""
    try:
        changed = system if path is None else scaled(system, path, factor)
    except ValueError as error:
        return DlrmSensitivity(path=path, factor=factor, refused=str(error))
    topology, nodes = PUBLISHED
    torus, _ = _saved(changed, topology, nodes)
    tree, refused = _saved(changed, "fat_tree", nodes)
    operators = [operator.saved for operator in two_nodes(changed)]
    mean = sum(operators) / len(operators)
    return DlrmSensitivity(path=path, factor=factor, torus=torus, tree=tree, operator=mean, refused=refused)


def _saved(system: DlrmSystem, topology: Topology, nodes: int) -> tuple[float | None, str]:
    try:
        return case(system, topology, nodes).saved, ""
    except ValueError as error:
        return None, str(error)


def sensitivity(system: DlrmSystem, progress: Progress = lambda text, done, total: None) -> Iterator[DlrmSensitivity]:
    """The headline as it is, then with each assumed number a STEP lower and higher."""
    return swept(system.assumed(), partial(headline, system), progress)
