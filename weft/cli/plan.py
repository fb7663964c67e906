"""weft plan: which schedule the planner chooses for each communicating layer of a model, what is gained, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import choices, output
from weft.cli.output import Progress, gantt, progress_bar
from weft.core import codec
from weft.core.problem import EXCHANGES, RAGGED_OPS, RaggedProblem
from weft.planner.models import choose_expert_calls, config_path
from weft.planner.words import count, factor, mib, ms, us
from weft.report.tables import Column, ReportTable, plans_table
from weft.schedules import overlaps

if TYPE_CHECKING:
    from rich.console import Console

    from weft.core.machine import Machine
    from weft.core.problem import DType
    from weft.planner import TrainingPlan
    from weft.planner.explanation import Explanation
    from weft.planner.models import Model
    from weft.planner.values import Plan

    LayerPlan = tuple[str, Plan]

ROWS_OF_A_RANK = (*EXCHANGES, *RAGGED_OPS)
SHARDS_TOKENS = ("all_gather_matmul", "matmul_reduce_scatter")
MOST_NOTES = 4
"""The number of notes on a model that are printed without --all, so that the answer fits on one screen."""
OVER_IDEAL = "Over 100% of ideal: the ideal is the slower of cuBLAS and NCCL alone; the schedule does without that one."
MORE = "More: --why explains choices, --details has all reasons, --all lists all candidates, --report DIR writes a page."
TERMS = """\
ideal: the longer of the matmul alone and the collective alone.
more launches, more copies: those of the longer half after its first one, which the whole half has, too. The third tax counts
  all launches of the call, and only the time by which they delay its end.
head, tail, waits: what nothing hides.
exposed: beyond the longer of the schedule's halves alone, contention included.
DIL: the pieces alone over the whole alone, which is one call of cuBLAS or NCCL. A communication DIL below 1 says that copies or
  stores are faster than NCCL. In sequential it is a little above 1, because the launch of the matmul is counted there, too.
CIL: the time while the other kind runs, over the time alone.
By sizes alone: what the ranking puts first, before anything is simulated."""


def command(
    model: choices.MODEL,
    machine: choices.MACHINE = choices.DEFAULT_MACHINE,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of ranks that share a layer. Default: all GPUs of the machine. More are on several such nodes.",
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, max=choices.MOST_TOKENS, metavar="N", help="Number of tokens: rows of every matmul.")
    ] = choices.DEFAULT_MACHINE_TOKENS,
    op: choices.OP = None,
    schedule: choices.SCHEDULE = "auto",
    dtype: choices.OPERAND_DTYPE = "bfloat16",
    recipe: choices.RECIPE = None,
    out_dtype: choices.OUT_DTYPE = None,
    layer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this communicating layer, by its name in the output.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a number of the machine: gpu.sms=264. Repeatable."),
    ] = None,
    why: Annotated[
        bool, typer.Option("--why", help="Explain each choice in two sentences: what it gains, and what most of the rest is.")
    ] = False,
    details: Annotated[
        bool, typer.Option("--details", help="With --why: also its time in parts, its losses, and what would change it.")
    ] = False,
    training: Annotated[
        bool,
        typer.Option("--training", help="Also predict a training step of a layer, forward and backward."),
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Also print every candidate's time, sizes, all notes and a timeline.")
    ] = False,
    json: choices.JSON = None,
    report: choices.REPORT = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the schedule of the one layer, for weft simulate FILE.")
    ] = None,
    trace: choices.TRACE = None,
    imports: choices.IMPORT = None,
) -> None:
    """Choose a schedule for each communicating layer of a model, and predict what it gains. Nothing runs."""
    from weft.cli.simulate import machine_with

    target = machine_with(machine, changes or [])
    nodes = target.nodes_for(ranks or target.world_size)
    sizes, layers = choices.choose_layers(model, op, layer, ranks=ranks or target.world_size)
    if save is not None and len(layers) != 1:
        raise ValueError(f"--save takes one schedule; name its layer by --layer, of {', '.join(one.name for one in layers)}")
    read = {"MODEL": config_path(model), "--machine": choices.find_machine_file(machine)}
    written = {"--json": json, "--report": output.page_path(report), "--save": save, "--trace": trace}
    output.require_distinct({**read, **written})
    output.require_json(json)
    output.require_folder(report, "--report")
    output.require_file(save, "--save")
    output.require_file(trace, "--trace")
    only, chunks = choices.choose_schedule(schedule, layers)
    even = "" if only is None else f"calls with splits have no schedule {only}"
    sizes, layers = choose_expert_calls(sizes, layers, ranks or target.world_size, even=even, nodes=nodes)
    result, scaling = choices.choose_elements(dtype, recipe, out_dtype)
    _check_heads(sizes, ranks)
    ranks = ranks or target.world_size
    given = {"--op": op, "--layer": layer, "--schedule": only, f"--dtype {dtype}": scaling}
    step = _plan_training(sizes, target, tokens, ranks, result, given) if training else None
    from weft.planner import plan
    from weft.planner.accuracy import accuracy_notes

    plans: list[LayerPlan] = []
    reasons: dict[str, Explanation] = {}
    with progress_bar() as progress:
        for at, one in enumerate(layers):
            progress(f"planning {one.name}", at, len(layers))
            problem = choices.make_problem(one, tokens, ranks, result, scaling, nodes)
            plans.append((one.name, plan(problem, target, only=only, chunks=chunks)))
        if why or details:
            reasons = _explain_all(target, plans, progress)
    accuracy = accuracy_notes(target, plans)
    dtypes = result if scaling is None else f"{scaling}, to {result}"
    files = _write(sizes, target, tokens, dtypes, plans, report, save, trace)  # before printing: a pipe's reader may close it
    if json is not None:
        if output.write_json(json, output.as_json(_as_data(sizes, target, plans, accuracy, reasons, step))):
            return
        files.append(json)
    counts = [one.layers or sizes.layers for one in layers]
    hosts = f"{len(nodes)} nodes of " if nodes else ""
    setting = f"{hosts}{target.description}: {count(ranks, 'rank')}, {count(tokens, 'token')}, {dtypes}"
    _show(sizes, setting, plans, counts, accuracy, reasons, step, every=every, details=details)
    for path in files:
        print(f"wrote {path}")


def _plan_training(
    model: Model, machine: Machine, tokens: int, ranks: int, dtype: DType, given: Mapping[str, object]
) -> TrainingPlan:
    """Plan a training step. given: options that choose some calls, or how they run. Raises ValueError for one of them."""
    from weft.planner import plan_training

    for option, value in given.items():
        if value is not None:
            raise ValueError(f"--training predicts all calls of a layer, as the planner chooses them; leave {option} out")
    return plan_training(model, machine, tokens=tokens, ranks=ranks, dtype=dtype)


def _check_heads(model: Model, asked: int | None) -> None:
    """Raise ValueError if the attention heads cannot be split among the ranks that the user asked for. Key/value heads are
    split, or each of them is on several ranks."""

    shared = model.kv_heads or model.heads

    def fits(ranks: int) -> bool:
        return model.heads % ranks == 0 and (shared % ranks == 0 or ranks % shared == 0)

    if asked is not None and model.heads and not fits(asked):
        fitting = ", ".join(str(ranks) for ranks in range(1, model.heads + 1) if fits(ranks))
        raise ValueError(
            f"--ranks is {asked}; {model.name} has {model.heads} heads, which it must divide, and {shared} kv_heads, which it "
            f"must divide or be a multiple of: use {fitting}"
        )


def _write(
    model: Model,
    machine: Machine,
    tokens: int,
    dtypes: str,
    plans: Sequence[LayerPlan],
    report: Path | None,
    save: Path | None,
    trace: Path | None,
) -> list[Path]:
    """Write the page, the schedule of the only layer, and the predicted spans of all layers, if they were requested."""
    written = []
    if report is not None:
        from weft.report.page import write_plan_report

        written.append(write_plan_report(model.name, machine, plans, report, tokens=tokens, dtypes=dtypes))
    if save is not None:
        from weft.schedules import build

        ((_, plan),) = plans
        name, chunks = plan.chosen.schedule, plan.chosen.chunks
        by_splits = isinstance(plan.problem, RaggedProblem)
        schedule = build(plan.problem, name) if by_splits else build(plan.problem, name, chunks, fan_out=machine.fans_out)
        output.write_text(save, codec.dumps(schedule) + "\n", "--save")
        written.append(save)
    if trace is not None:
        from weft.report.trace import write_calls

        calls = {f"{layer} {plan.chosen.spec} predicted": plan.spans for layer, plan in plans}
        written.append(write_calls(calls, trace, about=f"predicted on {machine.name}"))
    return written


def _explain_all(machine: Machine, plans: Sequence[LayerPlan], progress: Progress) -> dict[str, Explanation]:
    from weft.planner.explanation import explain_plan

    found = {}
    for at, (layer, plan) in enumerate(plans):
        progress(f"explaining {layer}", at, len(plans))
        found[layer] = explain_plan(plan, machine)
    return found


def _as_data(
    model: Model,
    machine: Machine,
    plans: Sequence[LayerPlan],
    accuracy: Sequence[str],
    reasons: Mapping[str, Explanation],
    step: TrainingPlan | None,
) -> dict[str, object]:
    why = {
        layer: {
            "why": one.why,
            "parts": dict(one.parts),
            "losses": codec.dump(one.signatures),
            "taxes": codec.dump(one.taxes),
            "changes": one.changes,
        }
        for layer, one in reasons.items()
    }
    layers = [
        {
            "layer": layer,
            "verdict": plan.verdict,
            "schedule": plan.chosen.spec,
            "plan": codec.dump(plan),
        }
        for layer, plan in plans
    ]
    return {
        "model": model.name,
        "machine": machine.name,
        "layers": layers,
        "accuracy": list(accuracy),
        "places": codec.dump(model.places),
        "notes": list(model.notes),
        "uncovered": codec.dump(model.uncovered),
        **({"why": why} if reasons else {}),
        **({"training": {"kept_bytes": step.kept_bytes, "steps": codec.dump(step.steps())}} if step is not None else {}),
    }


def _show(
    model: Model,
    setting: str,
    plans: Sequence[LayerPlan],
    counts: Sequence[int],
    accuracy: Sequence[str],
    reasons: Mapping[str, Explanation],
    step: TrainingPlan | None,
    *,
    every: bool,
    details: bool,
) -> None:
    """Print the answer, then the requested details. counts: the number of the model's layers that have each of the plans.
    accuracy: sentences on how far such predictions are from what was measured."""
    out = output.console()
    out.print(str(model))
    if plans:
        _print_answer(out, setting, plans, counts, short=not every)
        for note in accuracy:
            out.print(note)
    if step is not None:
        _print_training(out, step)
    others = [place for place in model.places if not place.operators or place.backward_only]
    if others:
        out.print("weft.parallelize also communicates here, without overlap in the forward pass:")
        for place in others:
            out.print(f"  {place}")
        out.print()
    notes = [*_warn_of_shapes(model, plans), *model.notes]
    for note in notes if every else notes[:MOST_NOTES]:
        out.print(f"note: {note}")
    if not every and len(notes) > MOST_NOTES:
        out.print(f"note: --all prints {len(notes) - MOST_NOTES} more")
    if every and plans:
        out.print()
        _print_candidates(out, plans)
        print_chart(out, plans)
        if any(plan.share_of_ideal > 1 for _, plan in plans):
            out.print(f"note: {OVER_IDEAL}")
        if any(plan.problem.op in ROWS_OF_A_RANK for _, plan in plans):
            out.print("note: M of an expert's matmul counts the rows of one rank, each token once per expert that it visits")
    for layer, plan in plans if reasons else ():
        out.print(f"\n{layer}: {plan.problem}", style="bold")
        out.print(str(reasons[layer]))
        if details:
            out.print(reasons[layer].details)
    if reasons and details:
        out.print(f"\n{TERMS}")
    elif plans and not every and not reasons:
        out.print(MORE)


def _print_answer(out: Console, setting: str, plans: Sequence[LayerPlan], counts: Sequence[int], *, short: bool) -> None:
    """Print what the whole model gains, a row for each layer, and why layers do not overlap. setting: machine, ranks and sizes.
    counts: the number of the model's layers that have each of the plans."""
    from weft.planner.values import PREDICTED_VERDICTS

    before = sum(layers * plan.sequential_us for layers, (_, plan) in zip(counts, plans, strict=True))
    after = sum(layers * plan.chosen.predicted_us for layers, (_, plan) in zip(counts, plans, strict=True))
    verdicts = Counter(plan.verdict for _, plan in plans)
    kinds = ", ".join(f"{verdicts[kind]} {kind}" for kind in PREDICTED_VERDICTS if verdicts[kind])
    out.print(f"Predicted on {setting}.\n")
    gain = f"{factor(before / after)} as fast: " if after else ""
    times = f"take {ms(after)} ms instead of {ms(before)} ms with each matmul and NCCL in turn"
    out.print(f"{gain}the communicating layers of one forward pass {times}; {kinds}.\n", style="bold")
    print_plans(out, plans, short=short)


def print_plans(out: Console, plans: Sequence[LayerPlan], *, short: bool = False) -> None:
    """Print a row for each layer, and why layers do not overlap. short: without sizes."""
    output.print_table(out, plans_table("", plans, short=short))
    out.print()
    for name, plan in plans:
        if not overlaps(plan.chosen.schedule):
            out.print(f"{name}: {plan.why}")


def print_chart(out: Console, plans: Sequence[LayerPlan]) -> None:
    """Print the predicted timeline on rank 0 of the layer with the most work."""
    name, plan = max(plans, key=lambda item: item[1].problem.flops)
    out.print(f"{name} as predicted on {plan.machine}, rank 0: {plan.chosen.spec}", style="bold")
    out.print(gantt(plan.spans, rank=0, width=min(out.width, 120)))
    out.print()


def _print_training(out: Console, step: TrainingPlan) -> None:
    """Print the times of an average layer's training step, eager and compiled, with and without checkpointing."""
    heads = ("computation alone", "sequential", "weft", "sequential exposes", "weft exposes")
    columns = (Column("program", words=True), *(Column(head, "us") for head in heads), Column("hidden", "%"))
    rows = [
        (name, times.computation_us, times.sequential_us, times.weft_us, *times.exposed_us, times.hidden)
        for name, times in step.steps().items()
    ]
    table = ReportTable(
        title="A training step of a layer, forward and backward, tokens in one sequence:", columns=columns, rows=rows
    )
    out.print(table.title, style="bold")
    output.print_table(out, table)
    out.print(f"Gathered inputs that a layer keeps for the backward pass: {mib(step.kept_bytes)} MiB on a rank.\n")


def _print_candidates(out: Console, plans: Sequence[LayerPlan]) -> None:
    """Print the predicted time of every candidate, with a column for each layer. The chosen candidate is marked, and so are
    those that were ranked but not simulated."""
    cells = [
        {one.spec: f"{us(one.predicted_us)}{'*' if one == plan.chosen else ' '}" for one in plan.candidates}
        | {
            spec: f"~{us(estimate)} "
            for spec, estimate in plan.estimates.items()
            if all(spec != c.spec for c in plan.candidates)
        }
        for _, plan in plans
    ]
    rows = [(name, *(each.get(name, "") for each in cells)) for name in dict.fromkeys(name for each in cells for name in each)]
    columns = (Column("schedule", words=True), *(Column(layer) for layer, _ in plans))
    table = ReportTable(title="Predicted us of every candidate (* chosen, ~ ranked, not simulated)", columns=columns, rows=rows)
    out.print(table.title, style="bold")
    output.print_table(out, table)
    out.print()


def _warn_of_shapes(model: Model, plans: Sequence[LayerPlan]) -> list[str]:
    """Return notes on numbers of ranks and tokens that fit the model badly."""
    notes = []
    if plans and model.heads % plans[0][1].problem.world_size:
        ranks = plans[0][1].problem.world_size
        notes.append(f"{ranks} ranks do not divide the {model.heads} attention heads; use --ranks with a number that does")
    few = [name for name, plan in plans if plan.problem.op in SHARDS_TOKENS and plan.problem.m < plan.problem.world_size]
    if few:
        notes.append(
            f"there are fewer tokens than ranks: some ranks of {', '.join(few)} have none. Decoding does not shard tokens: use "
            "--op matmul_all_reduce"
        )
    return notes
