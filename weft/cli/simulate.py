"""weft simulate: a published evaluation, simulated, with its figures beside ours; or one schedule on one machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import options, output
from weft.cli.progress import progress_bar
from weft.cli.simulate_schedule import Outputs, simulate_schedule

if TYPE_CHECKING:
    from weft.sim.t3.sensitivity import Sensitivity
    from weft.sim.t3.study import Study
    from weft.sim.t3.system import System

STUDIES = ("t3",)


def command(
    study: Annotated[
        str,
        typer.Argument(
            metavar="STUDY|FILE",
            help="t3: track and trigger (arXiv 2401.16677). A JSON file: a schedule, as weft plan --save has it.",
        ),
    ],
    machine: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of a schedule: a name from weft machines, or a JSON file. Default: h200x8."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a number of the system or machine, such as hbm.gbps=2000. Repeatable."
        ),
    ] = None,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Also take each assumed number a quarter lower and higher: half a minute.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all results as JSON.")] = False,
    report: Annotated[Path | None, typer.Option(metavar="DIR", help="Write an HTML report, DIR/index.html.")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev.")] = None,
    chakra: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Of a schedule: write Chakra traces, and ASTRA-sim's other files.")
    ] = None,
) -> None:
    """Simulate a published system on hardware that does not exist, and compare with what was published; or a schedule on a
    machine."""
    if study not in STUDIES and (study.endswith(".json") or Path(study).is_file()):
        if sensitivity:
            raise ValueError("--sensitivity is for studies; a schedule takes --set")
        outputs = Outputs(as_json=as_json, report=report, trace=trace, chakra=chakra)
        simulate_schedule(Path(study), machine or options.DEFAULT_MACHINE, settings or [], outputs)
        return
    if study not in STUDIES:
        raise ValueError(f"study is {study!r}; weft simulates {', '.join(STUDIES)}, or a schedule in a JSON file")
    if machine is not None or chakra is not None:
        raise ValueError(
            f"{'--machine' if machine is not None else '--chakra'} is for a schedule in a JSON file, not for {study}"
        )
    system = _system(settings or [])
    output.require_folder(report, "--report")
    output.require_file(trace, "--trace")
    from weft.sim.t3 import sensitivity as sensitivities
    from weft.sim.t3.record import record
    from weft.sim.t3.study import run

    with progress_bar() as progress:
        done = run(system, progress)
        rows = tuple(sensitivities.sensitivity(system, progress)) if sensitivity else ()
    if as_json:
        print(json.dumps(record(done, rows), indent=2, allow_nan=False))
    else:
        _show(done, rows)
    if report is not None:
        from weft.report.t3 import write_t3_report

        path = write_t3_report(done, rows, report)
        if not as_json:
            print(f"wrote {path}")
    if trace is not None:
        from weft.report.trace import write_calls
        from weft.sim.t3.record import calls

        write_calls(calls(done), trace, about=done.system.words)
        if not as_json:
            print(f"wrote {trace}")


def _system(settings: Sequence[str]) -> System:
    from weft.settings import parse
    from weft.sim.t3.system import changed, load

    system = load()
    for setting in settings:
        system = changed(system, *parse(setting, "hbm.gbps=2000"))
    return system


def _show(study: Study, rows: Sequence[Sensitivity]) -> None:
    from weft.sim.t3 import tables
    from weft.sim.t3.paper import figures

    out = output.console()
    out.print(f"{study.system.words}; {study.system.peak_tflops:.0f} TFLOP/s, {study.system.hbm.gbps:g} GB/s of memory")
    _print(tables.sublayers_table((*study.sublayers, *study.large)))
    _print(tables.figures_table(study))
    good = [figure.ok for figure in figures(study)]
    out.print(f"{sum(good)} of {len(good)} figures are within their tolerance.")
    _print(tables.mappings_table(study))
    if rows:
        _print(tables.sensitivity_table(rows))


def _print(rows: Sequence[tuple[str, ...]]) -> None:
    """A table whose first row has the heads, with a line before it."""
    listed = output.table(*rows[0])
    for row in rows[1:]:
        listed.add_row(*row)
    out = output.console()
    out.print()
    out.print(listed)
