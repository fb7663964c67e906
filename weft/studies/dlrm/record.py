"""Record: a DlrmStudy as plain data, for --json and whoever compares runs. Times in microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.core import codec
from weft.studies.dlrm.iteration import IterationRun
from weft.studies.dlrm.paper import figures
from weft.studies.dlrm.sensitivity import DlrmSensitivity
from weft.studies.dlrm.study import Case, DlrmStudy, Operator, Times


def record(study: DlrmStudy, sensitivity: Sequence[DlrmSensitivity] = ()) -> dict[str, Any]:
    """Everything that a DlrmStudy has; of the published case each span and event."""
    return {
        "system": codec.dump(study.system),
        "figures": [codec.dump(figure) | {"ok": figure.ok} for figure in figures(study)],
        "published": {run.way: _run(run) for run in (study.unfused, study.fused)},
        "cases": [_case(case) for case in study.cases],
        "two_nodes": [_operator(operator) for operator in study.operators],
        "slices": [{"slices": each.slices, "us": each.ns / 1e3} for each in study.sliced],
        "sensitivity": codec.dump(tuple(sensitivity)),
    }


def _run(run: IterationRun) -> dict[str, Any]:
    links = {" ".join(map(str, kind)): {"bytes": use.bytes, "peak_gbps": use.peak_gbps} for kind, use in run.usage.items()}
    return {"nodes": run.nodes, "us": run.ns / 1e3, "spans": codec.dump(run.spans), "log": list(run.log), "links": links}


def _case(case: Case) -> dict[str, Any]:
    waits = {"unfused": case.unfused_waits_ns / 1e3, "fused": case.fused_waits_ns / 1e3}
    return {"topology": case.topology, "nodes": case.nodes, "axes": list(case.axes), **_times(case), "waits_us": waits}


def _operator(operator: Operator) -> dict[str, Any]:
    return {"batch": operator.batch, "tables": operator.tables, "pooling": operator.pooling, **_times(operator)}


def _times(times: Times) -> dict[str, Any]:
    return {"us": {"unfused": times.unfused_ns / 1e3, "fused": times.fused_ns / 1e3}, "saved": times.saved}
