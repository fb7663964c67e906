"""weft doctor: lists the requirements of weft that this machine lacks, and how to install them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from weft.cli import options, output
from weft.cli.progress import progress_bar
from weft.core import codec
from weft.tools.doctor import diagnose
from weft.tools.requirements import Finding

STYLES = {"ok": "green", "warn": "yellow", "missing": "bold red"}


def command(
    json: options.JSON = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip the timing of transports, which takes up to 20 s on GPUs.")
    ] = False,
) -> None:
    """Check this machine: packages, shared memory, GPUs, transfers between ranks and their speed, and whether overlap pays."""
    output.require_json(json)
    with progress_bar("looking at packages, memory, GPUs and links"):
        found = diagnose(quick=quick)
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
