"""weft characterize: where the time of each schedule goes, over sizes and chunk counts."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import choices, options, output
from weft.cli.progress import Progress, progress_bar
from weft.core import codec
from weft.planner.models import config_path

if TYPE_CHECKING:
    from weft.core.machine import Machine
    from weft.core.problem import Problem
    from weft.planner.signature import Signature

SIMULATED = "sim"
LEAST_PROBLEMS = 3
"""Fewer show no correlation."""
HEADS = ("M", "N", "K", "us", "over\nideal", "GEMM\nDIL", "GEMM\nCIL", "comm.\nDIL", "comm.\nCIL", "exposed\nus")


def command(
    model: options.MODEL = "llama3-70b",
    machine: options.MACHINE = options.DEFAULT_MACHINE,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="sim simulates; auto, cpu or cuda run on real ranks.")
    ] = SIMULATED,
    ranks: Annotated[int | None, typer.Option(min=2, metavar="N", help="Default: the machine's GPUs; 4 on the CPU.")] = None,
    tokens: Annotated[str, typer.Option(metavar="N,N", help="Tokens: rows of every matmul, with commas.")] = "1024,8192,65536",
    op: options.OP = None,
    schedule: Annotated[str, typer.Option(metavar="NAME,NAME", help="Families, with commas. Default: all of one node.")] = "",
    chunks: Annotated[str, typer.Option(metavar="N,N", help="Chunk counts, with commas.")] = "1,2,4,8",
    dtype: options.DTYPE = "bfloat16",
    json: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a JSON line for each schedule; - writes them to standard output, and nothing else."
        ),
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write plots of loss against sizes, as HTML.")] = None,
) -> None:
    """Decomposition and contention losses of schedules, for GEMM and communication, over sizes and chunk counts."""
    from weft.core.machine import load

    target = load(machine)
    read = {"MODEL": config_path(model), "--machine": choices.machine_file(machine)}
    output.require_apart({**read, "--json": json, "--report": report})
    output.require_json(json)
    output.require_file(report, "--report")
    _, sites = choices.choose_sites(model, op)
    if device != SIMULATED:
        device, ranks = choices.choose_device(device, ranks)
    size, kind = ranks or target.world_size, choices.choose_dtype(dtype)
    target.tflops(kind)  # what is shown is held against its rates
    problems = [site.problem(rows, size, kind) for rows in _counts("--tokens", tokens) for site in sites]
    cases = [(problem, spec) for problem in problems for spec in _specs(problem, schedule, _counts("--chunks", chunks))]
    if not cases:
        raise ValueError(f"--schedule is {schedule!r}; no site of {model} has such a family")
    found: list[Signature] = []
    try:
        with progress_bar() as progress:
            for one in _simulated(cases, target, progress) if device == SIMULATED else _measured(cases, device, size, progress):
                found.append(one)
    finally:  # also of what is interrupted: to measure took long
        if json and found:
            output.write_json(json, "".join(jsonlib.dumps(codec.dump(one)) + "\n" for one in found))
    if report:
        from weft.report.losses import losses_page

        output.write_text(report, losses_page(found, target), "--report")
    if json != output.STANDARD_OUTPUT:
        _show(found, target)
        for path in (json, report):
            if path is not None:
                print(f"wrote {path}")


def _counts(option: str, text: str) -> list[int]:
    words = [word for word in text.split(",") if word]
    if not words or not all(word.isdecimal() and 0 < int(word) <= options.MOST_TOKENS for word in words):
        raise ValueError(f"{option} is {text!r}; give whole numbers of 1 to {options.MOST_TOKENS}, with commas")
    return [int(word) for word in words]


def _specs(problem: Problem, families: str, counts: Sequence[int]) -> list[str]:
    from weft.schedules import FAMILIES, NAMES, names, spec

    wanted = [name for name in families.split(",") if name]
    for name in wanted:
        if name not in FAMILIES:
            raise ValueError(f"--schedule has {name!r}; weft has {', '.join(NAMES)}")
    usual = set(NAMES) - {"node_slices"}  # ranks are of one node, where it is another family's program
    chosen = [name for name in names(problem.op) if name in (wanted or usual)]
    return [spec(name, count) for name in chosen for count in (counts if FAMILIES[name].chunked else (1,))]


def _simulated(cases: Sequence[tuple[Problem, str]], machine: Machine, progress: Progress) -> Iterator[Signature]:
    from weft.planner.signature import signature
    from weft.schedules import build, parse

    for done, (problem, spec) in enumerate(cases):
        progress(f"{problem.op} {spec}", done, len(cases))
        yield signature(build(problem, *parse(spec), fan_out=machine.fans_out), machine)


def _measured(cases: Sequence[tuple[Problem, str]], device: str, size: int, progress: Progress) -> Iterator[Signature]:
    from weft.runtime.ranks import Ranks
    from weft.tools.characterize import measured

    with Ranks(size, device=device) as pool:
        for done, (problem, spec) in enumerate(cases):
            progress(f"{problem.op} {spec}", done, len(cases))
            yield measured(problem, spec, pool)


def _show(found: Sequence[Signature], machine: Machine) -> None:
    """A table for each operator, and how losses go with sizes."""
    out = output.console()
    for op in dict.fromkeys(one.problem.op for one in found):
        some = [one for one in found if one.problem.op == op]
        listed = output.table("schedule", *HEADS)
        for one in some:
            listed.add_row(*_row(one))
        out.print(f"{op}, {some[0].where}", style="bold")
        output.print_table(out, listed, keys=4)
        if len({one.problem for one in some}) >= LEAST_PROBLEMS:
            _show_correlations(some, machine)
        out.print()
    out.print("DIL: the pieces alone over the whole alone. CIL: beside the other kind over alone; - where it cannot be told.")


def _show_correlations(some: Sequence[Signature], machine: Machine) -> None:
    """With which sizes a family's loss grows (+) and falls (-)."""
    from weft.planner.signature import correlations
    from weft.planner.sizes import FEATURES

    listed = output.table("rank correlation of the loss with", *FEATURES)
    for family in dict.fromkeys(one.spec.partition(":")[0] for one in some):
        alike = [one for one in some if one.spec.partition(":")[0] == family]
        listed.add_row(family, *(f"{value:+.2f}" for value in correlations(alike, machine).values()))
    output.print_table(output.console(), listed)


def _row(one: Signature) -> tuple[str, ...]:
    problem = one.problem
    losses = (one.gemm_dil, one.gemm_cil, one.communication_dil, one.communication_cil)
    cells = tuple("-" if loss is None else f"{loss:.2f}" for loss in losses)
    extents = (str(problem.m), str(problem.n), str(problem.k))
    return (one.spec, *extents, output.us(one.total_us), output.share(one.loss), *cells, output.us(one.exposed_us))
