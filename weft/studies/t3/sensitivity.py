"""Sensitivity: what the assumed numbers of a T3System do to the headline, each taken a quarter lower and a quarter higher."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from weft.studies.profile import Progress, scaled, swept
from weft.studies.published import geomean
from weft.studies.t3.study import run_sublayers
from weft.studies.t3.system import T3System
from weft.studies.t3.work import SUBLAYERS


@dataclass(frozen=True, kw_only=True)
class T3Sensitivity:
    """The headline with one number changed. path: None for none. t3, t3_mca: speed-ups over sequential of the 16 sub-layers,
    geometric means, less 1; saved: of the memory's traffic by T3-MCA. refused: why such a system cannot be; then all are 0."""

    path: str | None
    factor: float
    t3: float = 0.0
    t3_mca: float = 0.0
    saved: float = 0.0
    refused: str = ""


def headline(system: T3System, path: str | None = None, factor: float = 1.0) -> T3Sensitivity:
    """The headline of a T3System with the number at `path` times `factor`; whole numbers are rounded."""
    try:
        runs = list(run_sublayers(system if path is None else scaled(system, path, factor), SUBLAYERS))
    except ValueError as error:
        return T3Sensitivity(path=path, factor=factor, refused=str(error))
    traffic = [sum(run.traffic("t3_mca").values()) / sum(run.traffic("sequential").values()) for run in runs]
    t3, mca = (geomean(run.speedup(configuration) for run in runs) - 1 for configuration in ("t3", "t3_mca"))
    return T3Sensitivity(path=path, factor=factor, t3=t3, t3_mca=mca, saved=1 - geomean(traffic))


def sensitivity(system: T3System, progress: Progress = lambda text, done, total: None) -> Iterator[T3Sensitivity]:
    """The headline as it is, then with each assumed number a STEP lower and higher."""
    return swept(system.assumed(), partial(headline, system), progress)
