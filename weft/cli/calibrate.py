"""weft calibrate: measure this machine and write its profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli import choices, output
from weft.cli.progress import progress_bar
from weft.core import codec

MOST_UNSTEADY = 8


def command(
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
    from weft.tools.calibrate import calibrate

    with progress_bar("starting ranks") as progress:
        found = calibrate(device=device, ranks=ranks, name=name, progress=progress)
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
