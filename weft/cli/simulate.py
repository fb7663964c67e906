"""weft simulate: a published evaluation, simulated, with its figures next to ours; or one schedule on one machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from weft.cli import options, output
from weft.cli.progress import progress_bar
from weft.cli.simulate_schedule import Outputs, simulate_schedule
from weft.core import settings
from weft.studies.study import STUDIES, Done, load_study, record, tables, words
from weft.studies.study import simulate as simulate_study


def command(
    study: Annotated[
        str,
        typer.Argument(
            metavar="STUDY|FILE",
            help=" ".join(f"{name}: {about}." for name, about in STUDIES.items())
            + " A JSON file: a schedule, as weft plan --save has it.",
        ),
    ],
    machine: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Machine of a schedule: a name from weft machines, or a JSON file. Default: h200x8."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a number: links.gbps=200 of a schedule's machine, of ficco or iso, hbm.gbps=2000 of t3, nodes=128 of "
            "dlrm. Repeatable.",
        ),
    ] = None,
    scenarios: Annotated[
        list[str] | None,
        typer.Option("--scenario", metavar="NAME", help="ficco: only this GEMM, such as g5. Repeatable. Default: all."),
    ] = None,
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity", help="Also take each assumed or derived number a quarter lower and higher, one at a time."
        ),
    ] = False,
    draws: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Also move all assumed and derived numbers together, N times, each by up to 10%, a small whole number "
            "by 1. Try 200.",
        ),
    ] = 0,
    json: options.JSON = None,
    report: options.REPORT = None,
    trace: options.TRACE = None,
) -> None:
    """Simulate a published evaluation and compare it with the published figures, or simulate one schedule on one machine."""
    outputs = Outputs(json=json, report=report, trace=trace)
    if study not in STUDIES and (study.endswith(".json") or os.path.isfile(study)):
        for option, given in (("sensitivity", sensitivity), ("draws", draws), ("scenario", scenarios)):
            if given:
                raise ValueError(f"--{option} is for studies; a schedule takes --set")
        simulate_schedule(Path(study), machine or options.DEFAULT_MACHINE, changes or [], outputs)
        return
    found = load_study(study)
    if machine is not None:
        raise ValueError(f"--machine is for a schedule in a JSON file, not for {study}")
    outputs.require({})
    if scenarios:
        if found.only is None:
            raise ValueError(
                f"--scenario is {', '.join(scenarios)}; {study} has no scenarios to choose from, and is simulated whole"
            )
        found = found.only(scenarios)
    system = found.changed(found.load(), dict(settings.parse(given, found.example) for given in changes or []))
    with progress_bar() as progress:
        done = simulate_study(found, system, progress, sensitivity=sensitivity, draws=draws)
    write(done, outputs)


def write(done: Done, outputs: Outputs) -> None:
    """Write a study's page, trace and record where they are asked for, and print its tables."""
    written = []  # before anything is shown: a reader of that may go away
    if outputs.report is not None:
        from weft.report.study import write_study

        written.append(write_study(done, outputs.report))
    if outputs.trace is not None:
        from weft.report.trace import write_calls

        written.append(write_calls(done.study.spans(done.result), outputs.trace, about=done.study.name))
    if outputs.json is not None:
        if output.write_json(outputs.json, output.as_json(record(done))):
            return
        written.append(outputs.json)
    show(done)
    for path in written:
        print(f"wrote {path}")


def show(done: Done) -> None:
    """Print the system, every table that is for the console, and what the study says in short."""
    out = output.console()
    out.print("; ".join(f"{name.lower()}: {value}" for name, value in done.study.facts(done.system)))
    for each in tables(done):
        if each.console:
            listed = output.table(*each.rows[0])
            for row in each.rows[1:]:
                listed.add_row(*row)
            out.print(f"\n{each.title}")
            output.print_table(out, listed)
            if each.note:
                out.print(each.note)
    for sentence in words(done):
        out.print(f"\n{sentence}")
