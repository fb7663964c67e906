"""weft run: predict a model's communicating layers on a machine, then run their schedules here and check the results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import choices, output
from weft.cli.output import progress_bar
from weft.cli.plan import print_chart, print_plans
from weft.core import codec
from weft.planner.models import choose_expert_calls, config_path
from weft.planner.words import count
from weft.report.tables import ReportTable, ran_table, speeds_notes, speeds_table, unpredicted_notes

if TYPE_CHECKING:
    from rich.console import Console

    from weft.core.machine import Machine
    from weft.tools.results import Run

DEVICES = {"cpu": "CPU", "cuda": "GPU"}
CPU_TOKENS, GPU_TOKENS = 256, 8192
"""The number of tokens to run with if --tokens is not given."""


def command(
    model: choices.MODEL,
    ranks: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of ranks. Default: 4 on the CPU, every GPU on cuda.")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="auto, cpu or cuda. auto takes the GPUs if there are enough.")
    ] = "auto",
    op: choices.OP = None,
    schedule: choices.SCHEDULE = "auto",
    machine: choices.MACHINE = choices.DEFAULT_MACHINE,
    machine_tokens: Annotated[
        int, typer.Option(min=1, max=choices.MOST_TOKENS, metavar="N", help="Tokens to predict for.")
    ] = choices.DEFAULT_MACHINE_TOKENS,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, max=choices.MOST_TOKENS, metavar="N", help="Tokens to run. Default: 256 on the CPU, 8192 on cuda."),
    ] = None,
    dtype: choices.OPERAND_DTYPE = "bfloat16",
    recipe: choices.RECIPE = None,
    out_dtype: choices.OUT_DTYPE = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the random inputs.")] = 0,
    json: choices.JSON = None,
    report: choices.REPORT = None,
    trace: choices.TRACE = None,
    imports: choices.IMPORT = None,
) -> None:
    """Predict a model's communicating layers on a machine, run their schedules here, and check the results.

    GPUs are also timed."""
    from weft.core.machine import load

    device, ranks = choices.choose_device(device, ranks)
    sizes, layers = choices.choose_layers(model, op, ranks=ranks)
    sizes, layers = choose_expert_calls(sizes, layers, ranks, even="this command runs the operators without splits")
    result_dtype, scaling = choices.choose_elements(dtype, recipe, out_dtype)
    choices.choose_schedule(schedule, layers)
    target = load(machine)
    inputs = {"MODEL": config_path(model), "--machine": choices.find_machine_file(machine)}
    output.require_distinct({**inputs, "--json": json, "--report": output.page_path(report), "--trace": trace})
    _require_outputs(json, report, trace)
    tokens = tokens or (CPU_TOKENS if device == "cpu" else GPU_TOKENS)
    out = output.console(quiet=json == output.STANDARD_OUTPUT)
    out.print(_describe_steps(sizes.name, len(layers), schedule, target, f"{ranks} {DEVICES[device]} ranks"))
    for note in sizes.notes:
        out.print(f"note: {note}")

    with progress_bar("importing PyTorch, and starting ranks") as progress:
        from weft.tools.run import run_model

        run = run_model(
            sizes,
            ranks=ranks,
            device=device,
            tokens=tokens,
            op=op,
            schedule=schedule,
            machine=target,
            machine_ranks=target.world_size,
            machine_tokens=machine_tokens,
            dtype=result_dtype,
            scaling=scaling,
            seed=seed,
            progress=progress,
            imports=imports or (),
        )
    try:
        if json != output.STANDARD_OUTPUT:
            _print_results(run)
    finally:  # write the files even if printing fails because a pipe was closed
        _write_files(run, json, report, trace)
    if not run.ok:
        raise typer.Exit(1)


def _require_outputs(json: Path | None, report: Path | None, trace: Path | None) -> None:
    """Raise ValueError if a path cannot be written. This is checked before the run, so that its results are not lost."""
    output.require_folder(report, "--report")
    output.require_json(json)
    output.require_file(trace, "--trace")


def _describe_steps(model: str, layers: int, schedule: str, machine: Machine, ranks: str) -> str:
    chosen = "a schedule that weft's planner chooses" if schedule == "auto" else f"the schedule {schedule}"
    return (
        "weft hides communication between GPUs behind computation. "
        f"{model} has {count(layers, 'communicating layer')}: matmuls or lookups with a collective next to them.\n"
        f"1. Predict each of them on {machine.description}, sequentially and with {chosen}.\n"
        f"2. Prove each schedule, run it here on {ranks} (processes), and compare the results with the sequential program in "
        "float32."
    )


def _print_results(run: Run) -> None:
    out = output.console()
    if not run.layers:
        return
    plans = [(layer.name, layer.plan) for layer in run.layers]
    size = f"{run.machine_ranks} ranks, {run.machine_tokens:,} tokens, {run.dtype}"
    out.print(f"\n1. Predicted on {run.machine_words}: {size}", style="bold")
    print_plans(out, plans)
    for note in run.accuracy:
        out.print(note)
    out.print(
        "The column weft has the time of the named schedule; :N says in how many chunks each rank's part is sent. Ideal is the "
        "longer of the matmul alone and the collective alone.\n"
    )
    print_chart(out, plans)
    ranks = f"{run.world_size} {DEVICES[run.device]} ranks"
    _print_titled(out, ran_table(f"2. Run here on {ranks}: {run.tokens:,} tokens, {run.dtype}", run))
    if run.measured_layers:
        _print_titled(out, speeds_table(run))
        for note in speeds_notes(run):
            out.print(note)
    _print_verdict(out, run)


def _print_titled(out: Console, table: ReportTable) -> None:
    out.print(table.title, style="bold")
    output.print_table(out, table)
    out.print()


def _print_verdict(out: Console, run: Run) -> None:
    for note in unpredicted_notes(run):
        out.print(note)
    wrong = [layer.name for layer in run.layers if not layer.ok]
    as_predicted = "" if run.unpredicted_layers else ", and the ranks ran those of the prediction"
    out.print(f"All schedules are proved{as_predicted}." + ("" if wrong else " All results are right."))
    if wrong:
        out.print(f"WRONG results at {', '.join(wrong)}")
    if run.device == "cpu":
        out.print("CPU ranks show order and correctness. Their times say nothing about GPUs, so they are not compared.")


def _write_files(run: Run, json: Path | None, report: Path | None, trace: Path | None) -> None:
    """Write the requested files and print their paths. Raises ValueError if a file cannot be written."""
    written: list[Path] = []
    try:
        if report is not None:
            from weft.report import write_report

            written.append(write_report(run, report))
        if trace is not None:
            from weft.report import write_trace

            written.append(write_trace(run, trace))
    except OSError as error:
        raise ValueError(f"cannot write {error.filename or 'results'}: {error.strerror}") from None
    if json is not None:
        if output.write_json(json, codec.dumps(run, indent=2) + "\n"):
            return
        written.append(json)
    for path in written:
        print(f"wrote {path}")
