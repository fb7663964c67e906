"""weft plan: what the planner would choose for a model on a machine, with every candidate's predicted time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import choices, options, output, tables
from weft.cli.progress import Progress, progress_bar
from weft.core import codec
from weft.planner.models import config_path

if TYPE_CHECKING:
    from weft.core.machine import Machine
    from weft.planner.explanation import Explanation
    from weft.planner.models import Model


ROWS_OF_A_RANK = ("all_to_all_matmul", "matmul_all_to_all")
SHARDS_TOKENS = ("all_gather_matmul", "matmul_reduce_scatter")
OVER_IDEAL = "Over 100% of ideal: the ideal is the vendor's slower half alone, which the schedule does without."
TERMS = (
    "ideal: the longer of the matmul alone and the collective alone. head, tail, waits: what nothing hides. "
    "Exposed: beyond the longer of the schedule's halves alone, contention included. "
    "DIL: the pieces alone over the whole alone. CIL: beside the other kind over alone. By sizes alone: what "
    "the ranking puts first, before anything is simulated."
)


def command(
    model: options.MODEL,
    machine: options.MACHINE = options.DEFAULT_MACHINE,
    tp: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Ranks that share a layer. Default: the machine's GPUs.")
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, max=options.MOST_TOKENS, metavar="N", help="Tokens: rows of every matmul.")
    ] = options.DEFAULT_MACHINE_TOKENS,
    op: options.OP = None,
    schedule: options.SCHEDULE = "auto",
    dtype: options.OPERAND_DTYPE = "bfloat16",
    recipe: options.RECIPE = None,
    out_dtype: options.OUT_DTYPE = None,
    site: Annotated[str | None, typer.Option(metavar="NAME", help="Only this site, as the tables name it.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a number of the machine: gpu.sms=264. Repeatable."),
    ] = None,
    why: Annotated[bool, typer.Option("--why", help="Take each choice apart: its time, and what would change it.")] = False,
    json: options.JSON = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the schedule of the one site, for weft simulate FILE.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the predictions as a trace for ui.perfetto.dev.")
    ] = None,
) -> None:
    """Choose a schedule for each distributed site of a model, without running anything."""
    from weft.cli.simulate_schedule import machine_with

    sizes, sites = choices.choose_sites(model, op, site)
    if save is not None and len(sites) != 1:
        raise ValueError(f"--save takes one schedule; name its site by --site, of {', '.join(one.name for one in sites)}")
    read = {"MODEL": config_path(model), "--machine": choices.machine_file(machine)}
    output.require_apart({**read, "--json": json, "--save": save, "--trace": trace})
    output.require_json(json)
    output.require_file(save, "--save")
    output.require_file(trace, "--trace")
    only, chunks = choices.choose_schedule(schedule, sites)
    result, scaling = choices.choose_elements(dtype, recipe, out_dtype)
    target = machine_with(machine, changes or [])
    ranks = tp or target.world_size
    _check_heads(sizes, tp)
    from weft.planner import plan

    plans, reasons = [], {}
    with progress_bar() as progress:
        for at, site_ in enumerate(sites):
            progress(f"planning {site_.name}", at, len(sites))
            problem = choices.problem_of(site_, tokens, ranks, result, scaling)
            plans.append((site_.name, plan(problem, target, only=only, chunks=chunks)))
        if why:
            reasons = _reasons(target, plans, progress)
    written = _write(target, plans, save, trace)  # before anything is shown: a reader of that may go away
    if json is not None:
        if output.write_json(json, output.as_json(_as_data(sizes, target, plans, reasons))):
            return
        written.append(json)
    dtypes = result if scaling is None else f"{scaling}, to {result}"
    _show(sizes, target, f"{ranks} ranks, {tokens} tokens, {dtypes}", plans, reasons)
    for path in written:
        print(f"wrote {path}")


def _check_heads(model: Model, tp: int | None) -> None:
    """Raises ValueError if attention heads cannot be split by the ranks that were asked for. Key/value heads are split, or each
    is on several ranks."""

    shared = model.kv_heads or model.heads

    def fits(ranks: int) -> bool:
        return model.heads % ranks == 0 and (shared % ranks == 0 or ranks % shared == 0)

    if tp is not None and model.heads and not fits(tp):
        fitting = ", ".join(str(ranks) for ranks in range(1, model.heads + 1) if fits(ranks))
        raise ValueError(
            f"--tp is {tp}; {model.name} has {model.heads} heads, which it must divide, and {shared} kv_heads, which it must "
            f"divide or be a multiple of: use {fitting}"
        )


def _write(machine: Machine, plans: Sequence[tables.SitePlan], save: Path | None, trace: Path | None) -> list[Path]:
    """The chosen schedule of the only site, and the predicted spans of all."""
    written = []
    if save is not None:
        from weft.schedules import build

        ((_, plan),) = plans
        schedule = build(plan.problem, plan.chosen.schedule, plan.chosen.chunks, fan_out=machine.fans_out)
        output.write_text(save, codec.dumps(schedule) + "\n", "--save")
        written.append(save)
    if trace is not None:
        from weft.report.trace import write_calls

        calls = {f"{site} {plan.chosen.spec} predicted": plan.spans for site, plan in plans}
        written.append(write_calls(calls, trace, about=f"predicted on {machine.name}"))
    return written


def _reasons(machine: Machine, plans: Sequence[tables.SitePlan], progress: Progress) -> dict[str, Explanation]:
    """Each site's choice, taken apart."""
    from weft.planner.explanation import explained

    found = {}
    for at, (site, plan) in enumerate(plans):
        progress(f"explaining {site}", at, len(plans))
        found[site] = explained(plan, machine)
    return found


def _as_data(
    model: Model, machine: Machine, plans: Sequence[tables.SitePlan], reasons: Mapping[str, Explanation]
) -> dict[str, object]:
    why = {
        site: {
            "parts": dict(one.parts),
            "losses": codec.dump(one.signatures),
            "taxes": codec.dump(one.taxes),
            "changes": one.changes,
        }
        for site, one in reasons.items()
    }
    return {
        "model": model.name,
        "machine": machine.name,
        "sites": [{"site": site, "schedule": plan.chosen.spec, "plan": codec.dump(plan)} for site, plan in plans],
        "notes": list(model.notes),
        "uncovered": codec.dump(model.uncovered),
        **({"why": why} if reasons else {}),
    }


def _show(
    model: Model, machine: Machine, what: str, plans: Sequence[tables.SitePlan], reasons: Mapping[str, Explanation]
) -> None:
    out = output.console()
    out.print(str(model))
    if plans and model.heads % plans[0][1].problem.world_size:
        out.print(f"note: {plans[0][1].problem.world_size} ranks do not divide the {model.heads} attention heads; see --tp")
    for note in model.notes:
        out.print(f"note: {note}")
    few = [name for name, plan in plans if plan.problem.op in SHARDS_TOKENS and plan.problem.m < plan.problem.world_size]
    if few:
        out.print(
            f"note: fewer tokens than ranks: some ranks of {', '.join(few)} have none, and a gain says little; "
            "decoding does not shard tokens: use --op matmul_all_reduce"
        )
    if any(plan.share_of_ideal > 1 for _, plan in plans):
        out.print(f"note: {OVER_IDEAL}")
    if any(plan.problem.op in ROWS_OF_A_RANK for _, plan in plans):
        out.print(
            "note: M of experts' matmuls is the rows of one rank: its share of the tokens, once for each expert of a token"
        )
    out.print()
    if plans:
        tables.print_candidates(out, plans, every=bool(reasons))
        tables.print_chart(out, plans)
        tables.print_predictions(out, f"Chosen for {machine.words}: {what}", plans)
    if reasons:
        _explain(plans, reasons)
    else:
        for site, plan in plans:
            out.print(f"{site}: {plan.why}")


def _explain(plans: Sequence[tables.SitePlan], reasons: Mapping[str, Explanation]) -> None:
    from weft.planner.explanation import summary

    out = output.console()
    for site, plan in plans:
        out.print(f"{site}: {plan.problem}", style="bold")
        out.print(str(reasons[site]))
        out.print()
    out.print(TERMS)
    out.print()
    out.print(summary(plans))
