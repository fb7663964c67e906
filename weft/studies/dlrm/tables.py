"""Tables of a DlrmStudy, as rows of text whose first one names the columns: for the command line and the documents."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from weft.studies.dlrm.iteration import IterationRun
from weft.studies.dlrm.paper import figures
from weft.studies.dlrm.sensitivity import DlrmSensitivity
from weft.studies.dlrm.study import Case, DlrmStudy, Operator, SliceResult
from weft.studies.published import Row, figures_table

PARTS = {
    "lookup": ("lookup",),
    "wait for pooled rows": ("wait for pooled rows",),
    "MLPs and their steps": ("bottom", "top"),
    "interaction": ("interaction",),
    "repack": ("repack",),
    "sort": ("sort",),
    "wait for gradients": ("wait for gradients",),
    "wait for the MLPs' gradients": ("wait for bottom", "wait for top"),
    "update of the tables": ("update",),
}
"""Parts of an iteration, by how the names of their spans begin."""


def parts(run: IterationRun) -> dict[str, float]:
    """How long a node's GPU does what, in ms; together they are the iteration."""
    spans = [span for span in run.spans if span.lane == "compute"]
    return {
        name: sum(span.duration_us for span in spans if span.name.startswith(starts)) / 1e3 for name, starts in PARTS.items()
    }


def iteration_table(unfused: IterationRun, fused: IterationRun) -> list[Row]:
    """An iteration by its parts, in ms."""
    before, after = parts(unfused), parts(fused)
    rows = [(name, f"{before[name]:.2f}", f"{after[name]:.2f}") for name in PARTS]
    whole = ("iteration", f"{unfused.ns / 1e6:.2f}", f"{fused.ns / 1e6:.2f}")
    return [("the GPU's time, ms", "unfused", "fused"), *rows, whole]


def cases_table(cases: Iterable[Case]) -> list[Row]:
    """Iterations by topology and number of nodes."""
    heads = ("topology", "nodes", "axes", "unfused ms", "of it waits", "fused ms", "of it waits", "saved")
    return [heads, *map(_case, cases)]


def _case(case: Case) -> Row:
    times = (case.unfused_ns, case.unfused_waits_ns, case.fused_ns, case.fused_waits_ns)
    axes = " x ".join(map(str, case.axes))
    return (case.topology, str(case.nodes), axes, *(f"{ns / 1e6:.1f}" for ns in times), f"{100 * case.saved:.1f} %")


def operators_table(operators: Sequence[Operator]) -> list[Row]:
    """What fusing saves on two nodes, by pooling, for the least work, the most, and all."""
    rows = []
    for pooling, found in itertools.groupby(sorted(operators, key=lambda o: o.pooling), key=lambda o: o.pooling):
        same = sorted(found, key=lambda o: o.batch * o.tables)
        mean = sum(o.saved for o in same) / len(same)
        rows.append((str(pooling), *(f"{100 * saved:.1f} %" for saved in (same[0].saved, same[-1].saved, mean))))
    least, most = (f(operators, key=lambda o: o.batch * o.tables) for f in (min, max))
    heads = (f"batch {o.batch}, {o.tables} tables" for o in (least, most))
    return [("rows pooled", *heads, "mean of all"), *rows]


def sliced_table(sliced: Iterable[SliceResult]) -> list[Row]:
    """The published case by the number of slices."""
    return [("slices for each peer", "fused ms"), *((str(each.slices), f"{each.ns / 1e6:.2f}") for each in sliced)]


def sensitivity_table(rows: Iterable[DlrmSensitivity]) -> list[Row]:
    """The headline by assumed number and factor."""
    return [("assumed number", "times", "128 nodes, torus", "128 nodes, fat tree", "two nodes, mean"), *map(_headline, rows)]


def _headline(row: DlrmSensitivity) -> Row:
    values = ["-" if value is None else f"{100 * value:.1f} %" for value in (row.torus, row.tree, row.operator)]
    return (row.path or "as it is", f"{row.factor:g}", *values)


def shown(study: DlrmStudy, rows: Sequence[DlrmSensitivity]) -> Iterator[str | list[Row]]:
    """What the command line prints: lines and tables."""
    found = figures(study)
    yield study.system.words
    yield cases_table(study.cases)
    yield iteration_table(study.unfused, study.fused)
    yield figures_table(found)
    yield f"{sum(figure.ok for figure in found)} of {len(found)} figures are within their tolerance."
    yield operators_table(study.operators)
    yield sliced_table(study.sliced)
    if rows:
        yield sensitivity_table(rows)
