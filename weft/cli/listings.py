"""weft schedules and weft machines: what there is to choose from."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from weft import codec
from weft.cli import choices, output
from weft.problem import COLLECTIVE_OPS, LOOKUP_OPS, CollectiveProblem, LookupProblem, Op, Problem

if TYPE_CHECKING:
    from weft.machine import Machine

EXAMPLE_RANKS, EXAMPLE_CHUNKS = 3, 2
"""Of the example. On two ranks a ring would look like any other way."""


def schedules(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only this one.")] = None,
    op: Annotated[str | None, typer.Option(metavar="NAME", help="Operator of the example. Default: the first of it.")] = None,
) -> None:
    """List the ways to overlap: what each does, where it is from, and its timeline on a small example."""
    from weft.schedules import FAMILIES, NAMES, build, check_op, names
    from weft.timelines import timeline

    if name is not None and name not in FAMILIES:
        raise ValueError(f"schedule is {name!r}; weft has {', '.join(NAMES)}")
    asked = next(iter(FAMILIES[name or NAMES[0]].builders)) if op is None else choices.choose_op(op)
    problem = _example(asked)
    if name is not None:
        check_op(name, problem.op)
    out = output.console()
    for family in (FAMILIES[each] for each in names(problem.op) if name in (None, each)):
        schedule = build(problem, family.name, EXAMPLE_CHUNKS)
        out.print(family.name, style="bold")
        out.print(f"{family.words} [{family.source}]")
        out.print(timeline(schedule, width=max(40, out.width)), soft_wrap=True)
        out.print()
    others = [each for each in NAMES if each not in names(problem.op)]
    if others and name is None:
        out.print(f"Not for {problem.op}: {', '.join(others)}.")
    out.print("Time runs downward. --> is a flag from lane to lane, ~> from rank to rank; >=0 waits for the calls before.")
    out.print(f"Example: {problem}, {EXAMPLE_CHUNKS} chunks a shard where chunks are free.")
    out.print("Use one by weft run --schedule NAME or NAME:CHUNKS.")


def _example(op: Op) -> Problem:
    if op in LOOKUP_OPS:
        return LookupProblem.of(batch=12, dims=((4,),) * EXAMPLE_RANKS)
    if op in COLLECTIVE_OPS:
        return CollectiveProblem(op=op, m=48, world_size=EXAMPLE_RANKS)
    return Problem(op=op, m=12, n=12, k=12, world_size=EXAMPLE_RANKS)


def machines(
    as_json: Annotated[bool, typer.Option("--json", help="Print the profiles as JSON.")] = False,
) -> None:
    """List the machines that predictions can be made for, and where their numbers are from."""
    from weft.machine import load, names

    found = [load(name) for name in names()]
    if as_json:
        print(json.dumps(codec.dump(found), indent=2, allow_nan=False))
        return
    out = output.console()
    columns = ("machine", "GPUs", "topology", "matrix\nTFLOP/s", "link\nGB/s", "a copy\nus", "copy\nGB/s", "launch\nus")
    listed = output.table(*columns)
    for machine in found:
        listed.add_row(*_row(machine))
    out.print(listed)
    out.print()
    for machine in found:
        out.print(f"{machine.name}: {machine.words}. Numbers: {sources(machine)}.", soft_wrap=True)
    out.print("A machine of your own: weft plan MODEL --machine FILE.json, with the fields of weft machines --json.")


def sources(machine: Machine) -> str:
    """Where a machine's numbers are from, the most frequent first, each without its remark."""
    counted = Counter(text.split(":")[0].split(", ")[0].strip() for text in machine.sources.values())
    return ", ".join(f"{source} ({count})" for source, count in counted.most_common())


def _row(machine: Machine) -> tuple[str, ...]:
    dtype = "bfloat16" if "bfloat16" in machine.gpu.tflops else next(iter(machine.gpu.tflops))
    return (
        machine.name,
        str(machine.world_size),
        machine.links.topology,
        f"{machine.gpu.tflops[dtype]:g} {dtype}",
        f"{machine.links.gbps:g}",
        f"{machine.copies.copy_us:g}",
        f"{machine.copies.gbps:g}",
        f"{machine.launch_us:g}",
    )
