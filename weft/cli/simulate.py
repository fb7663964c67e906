"""weft simulate: a published evaluation, simulated, with its figures beside ours; or one schedule on one machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from weft.cli import options, output
from weft.cli.progress import Progress, progress_bar
from weft.cli.simulate_schedule import Outputs, machine_with, simulate_schedule
from weft.core.span import Span

STUDIES = ("t3", "ficco", "dlrm")
M = TypeVar("M")
S = TypeVar("S")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Done:
    """A study that was simulated: as data, on the console, as a page in a folder whose path it returns, as spans by call."""

    record: Callable[[], dict[str, Any]]
    show: Callable[[], None]
    write: Callable[[Path], Path]
    calls: Callable[[], dict[str, tuple[Span, ...]]] | None = None


def command(
    study: Annotated[
        str,
        typer.Argument(
            metavar="STUDY|FILE",
            help="t3: track and trigger (arXiv 2401.16677). ficco: overlap finer than the shard (arXiv 2512.10236). "
            "dlrm: DLRM at scale (arXiv 2305.06942). "
            "A JSON file: a schedule, as weft plan --save has it.",
        ),
    ],
    machine: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of a schedule: a name from weft machines, or a JSON file. Default: h200x8."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a number: links.gbps=200 of a schedule's machine or of ficco, hbm.gbps=2000 of t3, nodes=128 of dlrm. "
            "Repeatable.",
        ),
    ] = None,
    scenarios: Annotated[
        list[str] | None,
        typer.Option("--scenario", metavar="NAME", help="ficco: of its GEMMs this one, such as g5. Repeatable. Default: all."),
    ] = None,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Also take each assumed number a quarter lower and higher: a minute or two.")
    ] = False,
    json: options.JSON = None,
    report: Annotated[Path | None, typer.Option(metavar="DIR", help="Write an HTML report, DIR/index.html.")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev.")] = None,
) -> None:
    """Simulate a published evaluation, if need be on hardware that does not exist, and compare with what was published; or one
    schedule on one machine."""
    outputs = Outputs(json=json, report=report, trace=trace)
    if study not in STUDIES and (study.endswith(".json") or os.path.isfile(study)):
        if sensitivity or scenarios:
            raise ValueError(f"--{'sensitivity' if sensitivity else 'scenario'} is for studies; a schedule takes --set")
        simulate_schedule(Path(study), machine or options.DEFAULT_MACHINE, changes or [], outputs)
        return
    if study not in STUDIES:
        raise ValueError(f"study is {study!r}; weft simulates {', '.join(STUDIES)}, or a schedule in a JSON file")
    if machine is not None:
        raise ValueError(f"--machine is for a schedule in a JSON file, not for {study}")
    if trace is not None and study == "dlrm":
        raise ValueError("--trace is for t3, ficco and schedules; dlrm's timelines are in its --report")
    outputs.require({})
    simulate = {"t3": _t3, "ficco": _ficco, "dlrm": _dlrm}[study]
    done = simulate(changes or [], scenarios or [], sensitivity)
    written = [] if report is None else [done.write(report)]  # before anything is shown: a reader of that may go away
    if trace is not None and done.calls is not None:
        from weft.report.trace import write_calls

        written.append(write_calls(done.calls(), trace, about=study))
    if json is not None:
        if output.write_json(json, output.as_json(done.record())):
            return
        written.append(json)
    done.show()
    for path in written:
        print(f"wrote {path}")


def _t3(changes: Sequence[str], scenarios: Sequence[str], sensitivity: bool) -> Done:
    from weft.report.t3 import write_t3_report
    from weft.studies.profile import changed
    from weft.studies.t3 import sensitivity as sensitivities
    from weft.studies.t3 import study, tables
    from weft.studies.t3.record import calls, record
    from weft.studies.t3.system import load

    _all("t3", scenarios, "sub-layers")
    system = _set(load(), changed, changes, "hbm.gbps=2000")
    done, rows = _run(system, study.run, sensitivities.sensitivity if sensitivity else None)
    return Done(
        record=lambda: record(done, rows),
        show=lambda: _show(tables.shown(done, rows)),
        write=lambda folder: write_t3_report(done, rows, folder),
        calls=lambda: calls(done),
    )


def _dlrm(changes: Sequence[str], scenarios: Sequence[str], sensitivity: bool) -> Done:
    from weft.report.dlrm import write_dlrm_report
    from weft.studies.dlrm import sensitivity as sensitivities
    from weft.studies.dlrm import study, tables
    from weft.studies.dlrm.record import record
    from weft.studies.dlrm.system import load
    from weft.studies.profile import changed

    _all("dlrm", scenarios, "fabrics")
    system = _set(load(), changed, changes, "nodes=128")
    done, rows = _run(system, study.run, sensitivities.sensitivity if sensitivity else None)
    return Done(
        record=lambda: record(done, rows),
        show=lambda: _show(tables.shown(done, rows)),
        write=lambda folder: write_dlrm_report(done, rows, folder),
    )


def _ficco(changes: Sequence[str], scenarios: Sequence[str], sensitivity: bool) -> Done:
    from weft.planner.models.gemms import FICCO_GEMMS, ficco_gemm
    from weft.report.ficco import write_ficco_report
    from weft.studies.ficco import sensitivity as sensitivities
    from weft.studies.ficco import study, tables
    from weft.studies.ficco.paper import figures
    from weft.studies.ficco.record import record

    machine = machine_with(study.MACHINE, changes, "links.gbps=64")
    cases = tuple(map(ficco_gemm, scenarios)) or FICCO_GEMMS
    done, rows = _run(
        machine,
        lambda machine, progress: study.run(machine, cases, progress=progress),
        partial(sensitivities.sensitivity, cases=cases) if sensitivity else None,
    )

    def show() -> None:
        output.console().print(str(machine))
        _print(tables.scenarios_table(done.mesh))
        # A correlation over one or two scenarios says nothing.
        correlations = [tables.correlations_table] if len(cases) > 2 else []
        for made in (tables.topologies_table, *correlations, tables.choosers_table):
            _print(made(done))
        _print(tables.figures_table(done))
        if done.whole:
            _verdict([figure.ok for figure in figures(done)])
        else:
            output.console().print(f"FiCCO's other figures are maxima over all {len(FICCO_GEMMS)} scenarios: these are a part.")
        if rows:
            _print(tables.sensitivity_table(rows))

    return Done(
        record=lambda: record(done, rows),
        show=show,
        write=lambda folder: write_ficco_report(done, rows, folder),
        calls=lambda: study.calls(done),
    )


def _set(what: M, changed: Callable[[M, str, str], M], changes: Sequence[str], example: str) -> M:
    """What is simulated, with every --set applied."""
    from weft.core import settings

    for given in changes:
        what = changed(what, *settings.parse(given, example))
    return what


def _run(
    what: M, study: Callable[[M, Progress], S], sweep: Callable[[M, Progress], Iterable[R]] | None
) -> tuple[S, tuple[R, ...]]:
    """(the study, its sensitivity's rows: none without a sweep), under one progress bar."""
    with progress_bar() as progress:
        return study(what, progress), tuple(sweep(what, progress)) if sweep else ()


def _all(study: str, scenarios: Sequence[str], what: str) -> None:
    """Raises ValueError if a part of a study was asked for that is simulated whole."""
    if scenarios:
        raise ValueError(f"--scenario is {', '.join(scenarios)}; it is for ficco, {study} simulates all of its {what}")


def _verdict(good: Sequence[bool]) -> None:
    output.console().print(f"{sum(good)} of {len(good)} figures are within their tolerance.")


def _show(parts: Iterable[str | list[tuple[str, ...]]]) -> None:
    """Lines, and tables."""
    for part in parts:
        if isinstance(part, str):
            output.console().print(part)
        else:
            _print(part)


def _print(rows: Sequence[tuple[str, ...]]) -> None:
    """A table whose first row has the heads, with a line before it."""
    listed = output.table(*rows[0])
    for row in rows[1:]:
        listed.add_row(*row)
    out = output.console()
    out.print()
    output.print_table(out, listed)
