"""weft simulate: one schedule on one machine, from a file that `weft plan --save` or the codec wrote. And the entry of studies.

A study is a published evaluation. Studies are distributions of their own: each names a Typer application, by the name that
`weft simulate` takes, in the entry point group `weft.studies`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import choices, output
from weft.cli.output import gantt, progress_bar
from weft.core import codec
from weft.report.tables import lanes_table, losses_table, simulation_table

if TYPE_CHECKING:
    from weft.core.machine import Machine
    from weft.core.schedule import Schedule
    from weft.planner.simulated import Simulation

EXAMPLE = "links.gbps=200"
STUDIES = "weft.studies"
"""The entry point group of studies."""
NOT_INSTALLED = "The studies t3, ficco, dlrm and iso are not installed; in a clone of weft's repository: pip install ./studies"


def command(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="STUDY|FILE",
            help="A JSON file with a schedule, as weft plan --save writes it. Or the name of an installed study, such as t3, "
            "which has options of its own: weft simulate t3 --help.",
        ),
    ],
    machine: Annotated[
        str,
        typer.Option(metavar="NAME", help="Machine to simulate: a name from weft machines, or a JSON file."),
    ] = choices.DEFAULT_MACHINE,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help=f"Change a number of the machine, for example {EXAMPLE}. Repeatable."),
    ] = None,
    json: choices.JSON = None,
    report: choices.REPORT = None,
    trace: choices.TRACE = None,
) -> None:
    """Simulate one schedule on one machine, or simulate a published evaluation and compare it with the published figures."""
    if not str(file).endswith(".json") and not os.path.isfile(file):
        known = ", ".join(installed_studies())
        raise ValueError(
            f"study is '{file}', which is no file. "
            + (f"Studies, whose names come before all options: {known}" if known else NOT_INSTALLED)
        )
    simulate_schedule(file, machine, changes or [], Outputs(json=json, report=report, trace=trace))


def installed_studies() -> dict[str, EntryPoint]:
    """Return the entry points of the installed studies by name, none of which is imported."""
    return {point.name: point for point in sorted(entry_points(group=STUDIES), key=lambda point: point.name)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outputs:
    """The paths for results besides the terminal. json: see weft.cli.choices.JSON. report: a folder. trace: a file."""

    json: Path | None = None
    report: Path | None = None
    trace: Path | None = None

    def require(self, read: Mapping[str, Path | None]) -> None:
        """Check all paths before the work starts. Raises ValueError that names the option.

        read: the files, by argument, that no output may overwrite."""
        report = output.page_path(self.report)
        output.require_distinct({**read, "--json": self.json, "--report": report, "--trace": self.trace})
        output.require_json(self.json)
        output.require_folder(self.report, "--report")
        output.require_file(self.trace, "--trace")


def simulate_schedule(path: Path, machine: str, settings: Sequence[str], outputs: Outputs) -> None:
    """Read a schedule, prove it, simulate it, and print and write the results.

    Raises ValueError for a file without a schedule, for a wrong schedule, for a machine that cannot run it, and for a setting
    that the machine does not have."""
    from weft.checker import check
    from weft.core.schedule import Schedule
    from weft.planner.simulated import simulated

    schedule, target = codec.read(Schedule, path), machine_with(machine, settings)
    outputs.require({"FILE": path, "--machine": choices.find_machine_file(machine)})
    with progress_bar("checking the schedule") as progress:
        check(schedule)
        found = simulated(schedule, target, progress)
    written = _write(schedule, target, found, outputs)  # before printing, because the reader of a pipe may close it
    if outputs.json is not None:
        if output.write_json(outputs.json, output.as_json(as_data(schedule, found))):
            return
        written.append(outputs.json)
    _show(schedule, target, found)
    for file in written:
        print(f"wrote {file}")


def machine_with(name: str, settings: Sequence[str], example: str = EXAMPLE) -> Machine:
    """Return a machine with some numbers or its topology changed, and with all numbers that depend on them (weft.core.what_if).
    Raises ValueError for a setting that is not allowed."""
    from weft.core.machine import load
    from weft.core.settings import parse

    machine, changes = load(name), dict(parse(setting, example) for setting in settings)
    return machine.what_if(changes)


def as_data(schedule: Schedule, found: Simulation) -> dict[str, object]:
    """Return all results as plain data, with times in microseconds."""
    losses = found.losses
    return {
        "schedule": losses.spec,
        "problem": codec.dump(schedule.problem),
        "machine": found.machine,
        "total_us": found.total_us,
        "sequential_us": found.sequential_us,
        "ideal_us": losses.ideal_us,
        "computation_us": losses.computation_us,
        "communication_us": losses.communication_us,
        "losses": {
            "gemm_dil": losses.gemm_dil,
            "gemm_cil": losses.gemm_cil,
            "communication_dil": losses.communication_dil,
            "communication_cil": losses.communication_cil,
            "exposed_us": losses.exposed_us,
        },
        "lanes": [dataclasses.asdict(lane) for lane in found.lanes],
        "spans": codec.dump(found.spans),
    }


def _show(schedule: Schedule, machine: Machine, found: Simulation) -> None:
    out = output.console()
    out.print(f"{found.losses.spec} for {schedule.problem}", style="bold")
    out.print(f"on {machine.description}\n")
    slowest = [lane for lane in found.lanes if lane.rank == found.slowest]
    for table in (
        simulation_table(found),
        losses_table(found.losses),
        lanes_table(f"Lanes of rank {found.slowest}, which ends last", slowest, found.total_us),
    ):
        out.print(table.title, style="bold")
        output.print_table(out, table)
        out.print()
    out.print(gantt(found.spans, rank=found.slowest, width=min(out.width, 120)))


def _write(schedule: Schedule, machine: Machine, found: Simulation, outputs: Outputs) -> list[Path]:
    written = []
    if outputs.report is not None:
        from weft.report.page import write_schedule_report

        written.append(write_schedule_report(schedule, machine, found, outputs.report))
    if outputs.trace is not None:
        from weft.report.trace import write_calls

        title = f"{found.losses.spec} on {found.machine}"
        written.append(write_calls({title: found.spans}, outputs.trace, about=str(schedule.problem)))
    return written
