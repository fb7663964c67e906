"""The commands weft schedules and weft machines, which list the families of schedules and the machines."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import choices, output
from weft.core import codec
from weft.core.problem import (
    COLLECTIVE_OPS,
    COLUMN_OPS,
    LOOKUP_OPS,
    OPS,
    CollectiveProblem,
    ColumnProblem,
    LookupProblem,
    Op,
    Problem,
)
from weft.report.tables import Column, ReportTable

if TYPE_CHECKING:
    from weft.core.machine import Machine

EXAMPLE_RANKS, EXAMPLE_CHUNKS, EXAMPLE_NODES = 3, 2, (2, 2)
"""The size of the example. On two ranks a ring would look like any other schedule."""
MODEL_OPS = (*OPS, *LOOKUP_OPS)
"""The operators that models call, and so those of weft run."""
Values = dict[tuple[int, ...], float]
"""The values of one path of a profile, by sizes. A number has the key (), and a table has the sizes of each row."""


def schedules(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only this one.")] = None,
    op: Annotated[
        str | None, typer.Option(metavar="NAME", help="Operator of the example. Default: the first that has NAME.")
    ] = None,
    imports: choices.IMPORT = None,
) -> None:
    """List the families of schedules: what each does, where it is from, and its timeline on a small example."""
    from weft.schedules import FAMILIES, build, check_op, names
    from weft.schedules.timelines import timeline

    if name is not None and name not in FAMILIES:
        known = f"weft has {', '.join(FAMILIES)}; weft.schedule.register adds others{choices.IMPORTS}"
        raise ValueError(f"schedule is {name!r}; {known}")
    asked = next(iter(FAMILIES[name or next(iter(FAMILIES))].builders)) if op is None else choices.choose_op(op)
    problem = _example(asked)
    if name is not None:
        check_op(name, problem.op)
    out = output.console()
    for family in (FAMILIES[each] for each in names(problem.op) if name in (None, each)):
        # On one node, a family for several nodes is another family's program.
        drawn = _example(asked, EXAMPLE_NODES) if family.across and family.overlaps else problem
        schedule = build(drawn, family.name, EXAMPLE_CHUNKS)
        out.print(family.name, style="bold")
        out.print(f"{family.summary} [{family.source}]")
        out.print(timeline(schedule, width=max(40, out.width)), soft_wrap=True)
        out.print()
    others = [each for each in FAMILIES if each not in names(problem.op)]
    if others and name is None:
        out.print(f"Not for {problem.op}: {', '.join(others)}.")
    out.print("Time runs downward. --> is a flag from lane to lane, ~> from rank to rank.")
    out.print("`prev` is a signal of the previous call.")
    out.print(f"Example: {drawn if name else problem}, {EXAMPLE_CHUNKS} chunks a shard where chunks are free.")
    in_python = "in a call of weft.collectives" if asked in COLLECTIVE_OPS else "in a call"
    before, after = ("weft run --schedule ", "") if asked in MODEL_OPS else ("schedule=", f" {in_python}")
    out.print(f"Use one with {before}NAME or NAME:CHUNKS{after}.")
    if imports and name is None:
        added = [family.name for family in FAMILIES.values() if family.registered]
        modules = " ".join(f"--import {module}" for module in imports)
        shown = f": weft schedules {added[-1]} {modules} shows {added[-1]} alone" if added else ""
        out.print(f"Registered by {', '.join(imports)}: {', '.join(added) or 'none'}{shown}.", soft_wrap=True)


def _example(op: Op, nodes: tuple[int, ...] = ()) -> Problem:
    ranks = sum(nodes) or EXAMPLE_RANKS
    if op in LOOKUP_OPS:
        return replace(LookupProblem.of(batch=12, dims=((4,),) * ranks), nodes=nodes)
    if op in COLLECTIVE_OPS:
        return CollectiveProblem(op=op, m=48, world_size=ranks)
    kind = ColumnProblem if op in COLUMN_OPS else Problem
    return kind(op=op, m=4 * ranks, n=12, k=12, world_size=ranks, nodes=nodes)


def machines(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only this one, whole: a name or a JSON file.")] = None,
    json: choices.JSON = None,
    diff: Annotated[
        tuple[str, str] | None, typer.Option(metavar="A B", help="Compare two: names or files, number by number.")
    ] = None,
) -> None:
    """List the machines that predictions can be made for, and where their numbers are from; of one, each number."""
    from weft.core.machine import load, names

    if diff is not None:
        if name is not None or json is not None:
            raise ValueError(f"--diff compares two by itself; leave {name or '--json'} out")
        print_difference(load(diff[0]), load(diff[1]))
        return
    output.require_distinct({"NAME": None if name is None else choices.find_machine_file(name), "--json": json})
    output.require_json(json)
    found = [load(each) for each in (names() if name is None else (name,))]
    if json is not None and output.write_json(json, output.as_json(codec.dump(found if name is None else found[0]))):
        return
    if name is not None:
        from weft.cli.profile import print_profile

        print_profile(found[0], name)
    else:
        _print_list(found)
    if json is not None:
        print(f"wrote {json}")


def _print_list(found: Sequence[Machine]) -> None:
    out = output.console()
    columns = (
        *(Column("machine", words=True), Column("GPUs"), Column("topology", words=True), Column("matrix", "TFLOP/s")),
        *(Column("link", "GB/s"), Column("per copy", "us"), Column("copy", "GB/s"), Column("launch", "us")),
    )
    output.print_table(out, ReportTable(title="Machines", columns=columns, rows=[_row(machine) for machine in found]))
    out.print()
    for machine in found:
        out.print(f"{machine.name}: {machine.description}. Numbers: {sources(machine)}.")
    out.print("Each number, its unit, and where it is from: weft machines NAME.")
    out.print("A machine of your own: weft plan MODEL --machine FILE.json, with the fields of weft machines NAME --json FILE.")


def print_difference(a: Machine, b: Machine) -> None:
    """Print the numbers that both machines have and that differ, with their ratio, then the names that only one of them has.
    A difference that is no larger than the spreads of both measurements is marked."""
    left, right = _by_path(a), _by_path(b)
    both = sorted(left.keys() & right.keys())
    different = [path for path in both if left[path] != right[path]]
    rows = [
        (path, _numbers(left[path]), _numbers(right[path]), *_compared(left[path], right[path], spread))
        for path in different
        for spread in (a.spreads.get(path, 0.0) + b.spreads.get(path, 0.0),)
    ]
    columns = (Column("number", words=True), *(Column(name) for name in (a.name, b.name, "ratio", "spread")))
    out = output.console()
    output.print_table(out, ReportTable(title="Differences", columns=columns, rows=rows))
    out.print(f"{len(both) - len(different)} numbers are the same.")
    for name, only in ((a.name, left.keys() - right.keys()), (b.name, right.keys() - left.keys())):
        if only:
            out.print(f"Only {name} has {', '.join(sorted(only))}.")
    out.print(f"ratio: {b.name} over {a.name}; of a table, what both have for the same sizes, at the geometric mean.")
    out.print("spread: how much both measurements differ by themselves; within: the ratio is no more than that.")


def _by_path(machine: Machine) -> dict[str, Values]:
    from weft.core.hardware import Table, numbers

    gpu, found = machine.gpu, dict[str, Values]()
    for name, tiles in {"tiles": gpu.tiles, "kernel_tiles": gpu.kernel_tiles}.items():
        found[f"gpu.{name}"] = {(tile.rows, tile.cols): tile.efficiency for tile in tiles}
    found["stores.gbps"] = {(sms,): gbps for sms, gbps in machine.stores.gbps}
    for op, model in machine.collectives.items():
        if isinstance(model, Table):
            path = f"collectives.{op}"
            found[f"{path}.points"] = {(size,): us for size, us in model.points}
            found[f"{path}.also"] = {(table.world_size, size): us for table in model.also for size, us in table.points}
    found = {path: values for path, values in found.items() if values}
    for path, value in numbers(machine):
        found.setdefault(path, {(): value})
    return found


def _numbers(values: Values) -> str:
    return f"{values[()]:,.10g}" if () in values else f"a table of {len(values)}"


def _compared(left: Values, right: Values, spread: float) -> tuple[str, str]:
    """Return the ratio of the second to the first, and the spread of the measurements, as text."""
    pairs = [(left[key], right[key]) for key in left if key in right]
    if not pairs or any(value <= 0 for pair in pairs for value in pair):
        return "-", ""
    ratio = math.exp(statistics.fmean(math.log(b / a) for a, b in pairs))
    return f"{ratio:.2f}", f"within {spread:.1%}" if abs(ratio - 1) <= spread > 0 else f"{spread:.1%}" if spread else ""


def sources(machine: Machine) -> str:
    """Return how many of a machine's numbers come from each kind of source, the most frequent kind first."""
    counted = Counter(_kind_of_source(text) for text in machine.sources.values())
    return ", ".join(f"{count} {kind}" for kind, count in counted.most_common())


def _kind_of_source(text: str) -> str:
    if (kind := text.split()[0].rstrip(":,")) in ("assumed", "measured", "fitted", "derived"):
        return {"fitted": "fitted to measurements"}.get(kind, kind)
    return "from data sheets" if "data sheet" in text else "from papers and other documents"


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
