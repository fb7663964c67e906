"""The commands about this machine: `weft calibrate` measures it, `weft doctor` lists the requirements that it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from weft.cli import choices, output
from weft.cli.output import progress_bar
from weft.core import codec
from weft.tools.doctor import diagnose
from weft.tools.requirements import Finding

MOST_UNSTEADY = 8
STYLES = {"ok": "green", "warn": "yellow", "missing": "bold red"}


def calibrate(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the profile goes, as JSON.")] = Path("machine.json"),
    ranks: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="N",
            help="Number of ranks. Default: every GPU on cuda, 4 on the CPU. With --from: GPUs of the new profile.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="auto, cpu or cuda.")] = "auto",
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of the profile. Default: that of the file.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="NAME", help="Measure nothing: derive the profile from this one, for --ranks GPUs."),
    ] = None,
) -> None:
    """Measure this machine: matmuls, copies, stores, collectives, flags. Writes a profile for --machine."""
    name = name or out.stem
    if not name.isprintable():
        raise ValueError(f"--name is {name!r}; it must be one line of letters that print")
    if choices.find_machine_file(str(out)) is None:
        raise ValueError(f"--out is {out}, the name of a profile that weft has, which --machine takes; use {out}.json")
    if source is not None and ranks is None:
        raise ValueError("--from needs --ranks: --from h100x2.json --ranks 8 --out h100x8.json")
    if source is not None and ranks is not None:
        from weft.core.machine import load
        from weft.tools.calibrate.profile import derive

        machine = derive(load(source), ranks, name)
        output.write_text(out, codec.dumps(machine, indent=2) + "\n", "--out")
        output.console().print(f"{machine}\nwrote {out}")
        return
    device, ranks = choices.choose_device(device, ranks)
    output.require_file(out, "--out")
    with progress_bar("importing PyTorch, and starting ranks") as progress:
        from weft.tools import calibrate as calibration

        found = calibration.calibrate(device=device, ranks=ranks, name=name, progress=progress)
    machine = found.machine
    output.write_text(out, codec.dumps(machine, indent=2) + "\n", "--out")
    console = output.console()
    console.print(f"{machine}: {len(found.samples)} samples in {sum(found.seconds.values()):.0f} s: ", end="")
    console.print(", ".join(f"{probe} {seconds:.1f}" for probe, seconds in found.seconds.items()))
    for check in found.checks:
        console.print(f"check: {check}")
    for paths, reason in found.failed.items():
        console.print(f"not measured: {paths}: {reason}", markup=False)
    unsteady = sorted(machine.spreads.items(), key=lambda item: -item[1])[:MOST_UNSTEADY]
    console.print(
        "Least steady, by half of what repeated measurements spread: "
        + ", ".join(f"{path} +-{spread:.1%}" for path, spread in unsteady)
    )
    console.print(f"wrote {out}; use it with --machine {out}, compare it with weft machines --diff h200x8 {out}")


def doctor(
    json: choices.JSON = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip the timing of transports, which takes up to 20 s on GPUs.")
    ] = False,
) -> None:
    """Check this machine: packages, shared memory, GPUs, transfers between ranks and their speed, and whether overlap pays."""
    output.require_json(json)
    with progress_bar() as progress:
        found = diagnose(quick=quick, progress=progress)
    if json is None or not output.write_json(json, output.as_json(codec.dump(found))):
        _show(found)
        if json is not None:
            print(f"wrote {json}")
    if any(finding.state == "missing" for finding in found):
        raise typer.Exit(1)


def _show(found: Sequence[Finding]) -> None:
    out = output.console()
    for finding in found:
        out.print(Text.assemble((f"{finding.state:<8}", STYLES[finding.state]), f"{finding.what}: {finding.detail}"))
        if finding.cure:
            out.print(Padding(f"-> {finding.cure}", (0, 0, 0, 8)))
    out.print(_verdict(found))


def _verdict(found: Sequence[Finding]) -> str:
    missing = [finding.what for finding in found if finding.state == "missing"]
    if missing:
        return f"Missing: {', '.join(missing)}."
    warned = sum(finding.state == "warn" for finding in found)
    return f"Nothing is missing{f'; {warned} to look at' if warned else ''}."
