"""weft simulate: simulate a published evaluation and compare it with the published figures, or simulate one schedule."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from weft.cli import choices, output
from weft.cli.output import progress_bar
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
            + " A JSON file with a schedule, as weft plan --save writes it.",
        ),
    ],
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Machine for a schedule: a name from weft machines, or a JSON file. Default: h200x8."
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a number, for example links.gbps=200 for a schedule's machine, ficco or iso, hbm.gbps=2000 for t3, or "
            "nodes=128 for dlrm. Repeatable.",
        ),
    ] = None,
    scenarios: Annotated[
        list[str] | None,
        typer.Option(
            "--scenario", metavar="NAME", help="For ficco: simulate only this GEMM, such as g5. Repeatable. Default: all."
        ),
    ] = None,
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity", help="Also simulate with each assumed or derived number 25% lower and 25% higher, one at a time."
        ),
    ] = False,
    draws: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Also simulate N times with all assumed and derived numbers changed at once, each by up to 10%, a small "
            "whole number by 1. Try 200.",
        ),
    ] = 0,
    json: choices.JSON = None,
    report: choices.REPORT = None,
    trace: choices.TRACE = None,
) -> None:
    """Simulate a published evaluation and compare it with the published figures, or simulate one schedule on one machine."""
    outputs = Outputs(json=json, report=report, trace=trace)
    if study not in STUDIES and (study.endswith(".json") or os.path.isfile(study)):
        for option, value in (("sensitivity", sensitivity), ("draws", draws), ("scenario", scenarios)):
            if value:
                raise ValueError(f"--{option} is for studies; a schedule takes --set")
        simulate_schedule(Path(study), machine or choices.DEFAULT_MACHINE, changes or [], outputs)
        return
    chosen = load_study(study)
    if machine is not None:
        raise ValueError(f"--machine is for a schedule in a JSON file, not for {study}")
    outputs.require({})
    if scenarios:
        if chosen.select_scenarios is None:
            raise ValueError(
                f"--scenario is {', '.join(scenarios)}, but {study} has no scenarios; leave it out to simulate all of {study}"
            )
        chosen = chosen.select_scenarios(scenarios)
    system = chosen.apply_settings(chosen.load(), dict(settings.parse(change, chosen.example) for change in changes or []))
    with progress_bar() as progress:
        done = simulate_study(chosen, system, progress, sensitivity=sensitivity, draws=draws)
    write_results(done, outputs)


def write_results(done: Done, outputs: Outputs) -> None:
    """Write the page, trace and record of a study that `outputs` names, and print its tables."""
    written = []  # Files are written before anything is printed, because printing fails if the reader of a pipe has ended.
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
    print_results(done)
    for path in written:
        print(f"wrote {path}")


def print_results(done: Done) -> None:
    """Print the system, the tables that are meant for the console, and the summary of the study."""
    console = output.console()
    console.print("; ".join(f"{name.lower()}: {value}" for name, value in done.study.facts(done.system)))
    for study_table in tables(done):
        if study_table.console:
            printed = output.table(*study_table.rows[0])
            for row in study_table.rows[1:]:
                printed.add_row(*row)
            console.print(f"\n{study_table.title}")
            output.print_table(console, printed)
            if study_table.note:
                console.print(study_table.note)
    for sentence in words(done):
        console.print(f"\n{sentence}")
