"""weft run: predict a model's sites on a machine, then run, check and time them here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import choices, options, output, tables
from weft.cli.progress import progress_bar
from weft.core import codec
from weft.planner.models import config_path

if TYPE_CHECKING:
    from weft.core.machine import Machine
    from weft.tools.results import Run

CPU_TOKENS, GPU_TOKENS = 512, 8192


def command(
    model: options.MODEL,
    ranks: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Ranks. Default: 4 on the CPU, every GPU on cuda.")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="auto, cpu or cuda. auto takes the GPUs if there are enough.")
    ] = "auto",
    op: options.OP = None,
    schedule: options.SCHEDULE = "auto",
    machine: options.MACHINE = options.DEFAULT_MACHINE,
    machine_tokens: Annotated[
        int, typer.Option(min=1, max=options.MOST_TOKENS, metavar="N", help="Tokens to predict for.")
    ] = options.DEFAULT_MACHINE_TOKENS,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, max=options.MOST_TOKENS, metavar="N", help="Tokens to run. Default: 512 on the CPU, 8192 on cuda."),
    ] = None,
    dtype: options.DTYPE = "bfloat16",
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of the random inputs.")] = 0,
    json: options.JSON = None,
    report: Annotated[Path | None, typer.Option(metavar="DIR", help="Write an HTML report, DIR/index.html.")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev.")] = None,
) -> None:
    """Run a model's distributed sites: predicted on a machine, then checked and timed here."""
    from weft.core.machine import load

    sizes, sites = choices.choose_sites(model, op)
    dtype = choices.choose_dtype(dtype)
    choices.choose_schedule(schedule, sites)
    target = load(machine)
    read = {"MODEL": config_path(model), "--machine": choices.machine_file(machine)}
    output.require_apart({**read, "--json": json, "--report": output.page(report), "--trace": trace})
    _require_outputs(json, report, trace)
    device, ranks = choices.choose_device(device, ranks)
    tokens = tokens or (CPU_TOKENS if device == "cpu" else GPU_TOKENS)
    out = output.console(quiet=json == output.STANDARD_OUTPUT)
    chosen = {"cuda": ", chosen by measurement"}.get(device, f", chosen for {ranks} ranks of {target.name}")
    how = schedule + (chosen if schedule == "auto" else "")
    some = "1 site" if len(sites) == 1 else f"{len(sites)} sites"
    out.print(
        f"{sizes.name}: {some} of one layer on {ranks} {tables.DEVICES[device]} ranks, {tokens} tokens, {dtype}, "
        f"schedule {how}, seed {seed}; predicted for {target.name}, {target.world_size} ranks, {machine_tokens} tokens"
    )
    for note in sizes.notes:
        out.print(f"note: {note}")

    from weft.tools.run import run_model

    with progress_bar("starting ranks") as progress:
        done = run_model(
            sizes,
            ranks=ranks,
            device=device,
            tokens=tokens,
            op=op,
            schedule=schedule,
            machine=target,
            machine_ranks=target.world_size,
            machine_tokens=machine_tokens,
            dtype=dtype,
            seed=seed,
            progress=progress,
        )
    try:
        if json != output.STANDARD_OUTPUT:
            _show(done, target)
    finally:  # also when the reader of the tables has gone away
        _write(done, json, report, trace)
    if not done.ok:
        raise typer.Exit(1)


def _require_outputs(json: Path | None, report: Path | None, trace: Path | None) -> None:
    """Try every path now, so that nothing is lost after the work. Raises ValueError."""
    output.require_folder(report, "--report")
    output.require_json(json)
    output.require_file(trace, "--trace")


def _show(run: Run, machine: Machine) -> None:
    out = output.console()
    if not run.sites:
        return
    plans = [(site.site, site.plan) for site in run.sites]
    title = f"Predicted on {machine.words}: {run.machine_ranks} ranks, {run.machine_tokens} tokens, {run.dtype}"
    out.print()
    tables.print_predictions(out, title, plans)
    tables.print_chart(out, plans)
    tables.print_measured(out, run)
    wrong = [site.site for site in run.sites if not site.ok]
    out.print(f"WRONG results at {', '.join(wrong)}" if wrong else "All results are right.")


def _write(run: Run, json: Path | None, report: Path | None, trace: Path | None) -> None:
    """Write what was asked for and say where. Raises ValueError if a path that worked before fails now."""
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
