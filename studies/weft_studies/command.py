"""weft simulate STUDY: simulate a published evaluation and compare it with the published figures."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.cli import choices, output
from weft.cli.output import progress_bar
from weft.cli.simulate import Outputs
from weft.core import settings
from weft_studies.study import STUDIES, Done, load_study, record, simulate, tables, words

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
"""What the entry points of the studies name."""


@app.command()
def command(
    study: Annotated[
        str, typer.Argument(metavar="STUDY", help=" ".join(f"{name}: {about}." for name, about in STUDIES.items()))
    ],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a number, for example links.gbps=200 for ficco or iso, hbm.gbps=2000 for t3, or nodes=128 for dlrm. "
            "Repeatable.",
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
    """Simulate a published evaluation and compare it with the published figures."""
    chosen, outputs = load_study(study), Outputs(json=json, report=report, trace=trace)
    outputs.require({})
    if scenarios:
        if chosen.select_scenarios is None:
            raise ValueError(
                f"--scenario is {', '.join(scenarios)}, but {study} has no scenarios; leave it out to simulate all of {study}"
            )
        chosen = chosen.select_scenarios(scenarios)
    system = chosen.apply_settings(chosen.load(), dict(settings.parse(change, chosen.example) for change in changes or []))
    with progress_bar() as progress:
        done = simulate(chosen, system, progress, sensitivity=sensitivity, draws=draws)
    write_results(done, outputs)


def write_results(done: Done, outputs: Outputs) -> None:
    """Write the page, trace and record of a study that `outputs` names, and print its tables."""
    written = []  # Files are written before anything is printed, because printing fails if the reader of a pipe has ended.
    if outputs.report is not None:
        from weft_studies.page import write_study

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
            console.print(f"\n{study_table.title}")
            output.print_table(console, study_table.table)
            if study_table.note:
                console.print(study_table.note)
    for sentence in words(done):
        console.print(f"\n{sentence}")
