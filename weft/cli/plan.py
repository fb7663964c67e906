"""weft plan: what the planner would choose for a model on a machine, with every candidate's predicted time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from weft import codec
from weft.cli import choices, options, output, tables

if TYPE_CHECKING:
    from weft.machine import Machine
    from weft.models import Model


def command(
    model: options.MODEL,
    machine: options.MACHINE = options.DEFAULT_MACHINE,
    tp: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Ranks that share a layer. Default: the machine's GPUs.")
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens: rows of every matmul.")
    ] = options.DEFAULT_MACHINE_TOKENS,
    op: options.OP = None,
    schedule: options.SCHEDULE = "auto",
    dtype: options.DTYPE = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="Print the plans as JSON, candidates and spans included.")] = False,
) -> None:
    """Choose a schedule for each distributed site of a model, without running anything."""
    from weft.machine import load

    sizes, sites = choices.choose_sites(model, op)
    only, chunks = choices.choose_schedule(schedule, sites)
    kind = choices.choose_dtype(dtype)
    target = load(machine)
    ranks = tp or target.world_size
    from weft.planner import plan

    plans = [(site.name, plan(site.problem(tokens, ranks, kind), target, only=only, chunks=chunks)) for site in sites]
    if as_json:
        print(json.dumps(_as_data(sizes, target, plans), indent=2, allow_nan=False))
        return
    _show(sizes, target, f"{ranks} ranks, {tokens} tokens, {kind}", plans)


def _as_data(model: Model, machine: Machine, plans: Sequence[tables.SitePlan]) -> dict[str, object]:
    return {
        "model": model.name,
        "machine": machine.name,
        "sites": [{"site": site, "schedule": plan.chosen.spec, "plan": codec.dump(plan)} for site, plan in plans],
    }


def _show(model: Model, machine: Machine, what: str, plans: Sequence[tables.SitePlan]) -> None:
    out = output.console()
    out.print(str(model))
    for note in model.notes:
        out.print(f"note: {note}")
    out.print()
    if plans:
        tables.print_candidates(out, plans)
        tables.print_chart(out, plans)
        tables.print_predictions(out, f"Chosen for {machine.words}: {what}", plans)
    for site, plan in plans:
        out.print(f"{site}: {plan.why}")
