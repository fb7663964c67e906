"""Makes the parts of the documents that code can write.

    python docs/generate.py              fill the blocks of README.md, docs/ and studies/README.md (`make docs`)
    python docs/generate.py --print cases h200x2/tp    print what a block shows
    python docs/generate.py studies      also make the stored sweeps of the studies, in about ten minutes; t3, ficco, dlrm or
                                         iso instead makes one of them (docs/*_study.json)

A generated part is a fenced block whose first line says what it shows:

    ```text timeline OP FAMILY    weft.schedule.timeline of the family on the example that `weft schedules` shows
    ```text families BY           which operator has which family: all of them but those of collectives alone
    ```text counts OP             what a rank pays in each family: kernels, copies, flags, bytes
    ```text chart MODEL           the chart that `weft plan MODEL` prints
    ```text ranked MACHINE        what the ranking puts first on it, by operator and rows
    ```text accuracy FILE ...     how good choices are on the problems of these files of results
    ```text simulated BY          benchmarks/simulated.py: predictions against measurements, by operator, family or file
    ```text gains FOLDER          benchmarks/gains.py: `auto` over the fastest alternative, from a folder of results
    ```text cases BENCH           measured_tables.py: every case of a result file; the other kinds of tables are described there
    ```text models BENCH PART     model_tables.py: whole models, layers of them, profiles
    ```text host_calls BENCH CLOCK    host_tables.py: host time of calls; host_steps: of training steps
    ```text t3 WHAT               study_tables.py: published evaluations, simulated; also ficco, dlrm and iso WHAT
    ```text targets OF            which kernels compile for which GPUs (kernel_targets), and why others do not
    ```py signatures GROUP        signatures.py: signatures of public names

Pages are committed with their blocks filled in. tests/project/test_docs.py fails where a block is not what its words make now.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import weft
from weft.cli.output import gantt
from weft.core import machine
from weft.core.fused_collective import spelled_out
from weft.core.problem import COLLECTIVE_OPS, COLUMN_OPS, LOOKUP_OPS, OPS, ColumnProblem, Op, Problem
from weft.core.schedule import Collective, Copy, Gemm, Push, Reduce, Region, Schedule, Signal, Store, Wait
from weft.perf.ranking import heuristic
from weft.planner.models import load_model, operator_calls
from weft.schedules import FAMILIES, names

sys.path.append(str(Path(__file__).parent))
text_tables, measured_tables, model_tables, host_tables, study_tables, kernel_targets, signatures = map(
    importlib.import_module,
    ("text_tables", "measured_tables", "model_tables", "host_tables", "study_tables", "kernel_targets", "signatures"),
)
_table = text_tables.table
ROOT = Path(__file__).parents[1]
EXAMPLE = {"m": 12, "n": 12, "k": 12, "world_size": 3}
EXAMPLE_ELEMENTS = 48
EXAMPLE_CHUNKS = 2
ON_NODES = {"m": 16, "world_size": 4, "nodes": (2, 2)}
EVEN = {"m": 8192, "n": 8192, "k": 8192, "world_size": 8}
WIDTH = 118
CHART_WIDTH = 96


def timeline(op: str, family: str) -> str:
    """One family on the small example, as rank 0 sees it."""
    problem = _example(op, **ON_NODES) if family == "node_slices" else _example(op)
    schedule = weft.schedule.build(problem, family, EXAMPLE_CHUNKS)
    return weft.schedule.timeline(schedule, width=WIDTH)


def _example(op: str, **changes: Any) -> weft.Problem:
    sizes = EXAMPLE | changes
    if op in LOOKUP_OPS:
        lookup = weft.LookupProblem.of(batch=sizes["m"], dims=((4,),) * sizes["world_size"])
        return replace(lookup, nodes=sizes.get("nodes", ()))
    if op in COLLECTIVE_OPS:
        return weft.CollectiveProblem(op=op, m=EXAMPLE_ELEMENTS, world_size=sizes["world_size"])  # type: ignore[arg-type]
    kind = ColumnProblem if op in COLUMN_OPS else weft.Problem
    return kind(op=op, **sizes)  # type: ignore[arg-type]


FAMILY_OPS: dict[str, tuple[str, str]] = {
    "all_gather_matmul": ("all_gather", "_matmul"),
    "matmul_reduce_scatter": ("matmul_", "reduce_scatter"),
    "matmul_all_reduce": ("matmul_", "all_reduce"),
    "matmul_all_to_all": ("matmul_", "all_to_all"),
    "all_to_all_matmul": ("all_to_all", "_matmul"),
    "matmul_all_to_all_columns": ("the same,", "split_dim=-1"),
    "all_to_all_columns_matmul": ("the same,", "gather_dim=-1"),
    "embedding_bag_all_to_all": ("embedding_bag", "_all_to_all"),
}
"""Operators, and how they stand above a column, in two lines."""


def families(_: str) -> str:
    """A table: the families of schedules, and the operators that have them."""
    rows = [
        (name, *("x" if op in family.builders else "-" for op in FAMILY_OPS))
        for name, family in FAMILIES.items()
        if not set(family.builders) <= set(COLLECTIVE_OPS)
    ]
    return _table([*(("", *head) for head in zip(*FAMILY_OPS.values(), strict=True)), *rows])


def counts(op: Op) -> str:
    """A table: the fixed costs of every family that it has and traffic on rank 0 of 8, even shards, default chunks."""
    heads = ("", "GEMMs", "smallest", "gates", "reduce,", "copies", "copies", "waits,", "sent to", "pulled", "copied")
    below = ("", "", "GEMM rows", "", "collective", "by link", "local", "signals", "peers", "", "locally")
    rows = [_row(weft.schedule.build(weft.Problem(op=op, **EVEN), name)) for name in names(op)]  # type: ignore[arg-type]
    return _table([heads, below, *rows])


def _row(schedule: Schedule) -> tuple[str, ...]:
    steps = [step for lane in spelled_out(schedule).schedule.ranks[0] for step in lane.steps]
    gemms = [step for step in steps if isinstance(step, Gemm)]
    kinds = Counter(type(step) for step in steps)
    copies: list[Copy | Store] = [step for step in steps if isinstance(step, Copy)]
    copies += [part for step in steps if isinstance(step, Push) for part in step.parts]
    away = [c for c in copies if c.src.rank != c.dst.rank]
    pulled = [c.src for c in away if c.src.rank]
    stored = [part.out for g in gemms for part in g.parts if part.out.rank]
    loaded = [src for r in steps if isinstance(r, Reduce) for part in r.parts for src in part.srcs if src.rank]
    return (
        schedule.name,
        str(len(gemms)),
        str(min(sum(part.a.shape[0] for part in g.parts) for g in gemms)),
        str(sum(len(p.waits) for s in steps if isinstance(s, (Gemm, Reduce)) for p in s.parts) or "-"),
        str(kinds[Reduce] + kinds[Collective] or "-"),
        str(len(away) or "-"),
        str(len(copies) - len(away) or "-"),
        str(kinds[Wait] + kinds[Signal] or "-"),
        "NCCL's" if kinds[Collective] else _shards(schedule, [*(c.dst for c in away if c.dst.rank), *stored]),
        _shards(schedule, [*pulled, *loaded]),
        _shards(schedule, [c.dst for c in copies if c.src.rank == c.dst.rank]),
    )


def _shards(schedule: Schedule, regions: Sequence[Region]) -> str:
    """The elements of regions, in shards."""
    size = sum(region.size for region in regions)
    return f"{size * schedule.problem.itemsize / schedule.problem.shard_bytes:g}" if size else "-"


def chart(model: str) -> str:
    """The predicted timeline of the operator call with the most work, on 8 x H200 and 8192 tokens."""
    h200 = machine.load("h200x8")
    found = operator_calls(load_model(model))
    problems = {call.name: call.problem(8192, h200.world_size, "bfloat16") for call in found}
    call = max(problems, key=lambda name: problems[name].flops)
    plan = weft.plan(problems[call], h200)
    drawn = "\n".join(line.rstrip() for line in gantt(plan.spans, rank=0, width=CHART_WIDTH).plain.splitlines())
    return f"{call} as predicted on {plan.machine}, rank 0: {plan.chosen.spec}\n{drawn}"


ROWS = (256, 1024, 4096, 16384, 65536)


def chosen(name: str) -> str:
    """What the ranking puts first on a machine: for the MLP of Llama 3 70B, experts of DeepSeek-V3 (all to all), and a few rows
    of matmul_all_reduce."""
    on = machine.load(name)
    rows = [(f"ranked first on {on.name}, {on.world_size} ranks, by rows", *map(str, ROWS))]
    sizes = {"all_gather_matmul": (28672, 8192), "matmul_all_to_all": (7168, 2048), "all_to_all_matmul": (4096, 7168)}
    for op in OPS:
        n, k = sizes.get(op, (8192, 28672))
        fewer = 256 if op == "matmul_all_reduce" else 1
        problems = [Problem(op=op, m=m // fewer, n=n, k=k, world_size=on.world_size) for m in ROWS]
        what = f"  {op} N={n} K={k}" + f", rows / {fewer}" * (fewer > 1)
        rows.append((what, *(heuristic(problem, on) for problem in problems)))
    return _table(rows)


ACCURACY_HEADS = (
    ("", "", "", "plan", "", "", "loss of", "", "one", ""),
    ("operator, half `test`", "GPUs", "of", "exact", "in 5%", "loss", "ranking", "sequential", "schedule", "auto"),
)


def accuracy(*names: str) -> str:
    """How good choices are on both halves of the measured problems, and like for like with FiCCO's paper. Losses are means."""
    scores = text_tables.benchmark("scores")
    paths = [text_tables.RESULTS / f"{name}.jsonl" for name in names]
    return compact(scores, scores.measured(paths, machine.load("h200x8")), paths)


def compact(scores: Any, found: Sequence[Any], paths: Sequence[Path]) -> str:
    """A row for each operator and number of GPUs, of the half `test`; then sums, and below them how far predictions are off.

    Exact, within 5% and loss are of `weft.plan`; behind them is the mean loss of each other way to choose.
    """
    parts = {part: [one for one in found if one.line.half == part] for part in ("test", "fit")}
    paper = scores.like_ficco(found)
    _, *rows = scores.table(found, "test")
    *_, fit = scores.table(found, "fit")
    sums = [("all of `test`", *rows.pop()[1:]), ("all of `fit`", *fit[1:]), _like_paper(scores, paper)]
    ranking, *_ = scores.scores(paper, paper)
    said = [*(f"`{part}`: {scores.errors(some)}" for part, some in parts.items()), f"among FiCCO's four: {ranking}"]
    lines = [row for path in paths for row in text_tables.lines(path.stem)]
    where = dict.fromkeys(f"{row.machine}, {text_tables.date_of(row.commit)}" for row in lines)
    return "\n".join([_table([*ACCURACY_HEADS, *rows, *sums]), "", *said, *where])


def _like_paper(scores: Any, paper: Sequence[Any]) -> tuple[str, ...]:
    """Of FiCCO's four schedules and sequential, where all were measured on 4 GPUs."""
    of = {score.method: score for score in scores.scores(paper, paper)}
    plan = of["plan"]
    losses = (f"{of[method].loss:.1%}" for method in ("ranking", "sequential", "one schedule", "auto"))
    return ("among FiCCO's four", "4", str(len(paper)), f"{plan.exact:.0%}", f"{plan.near:.0%}", f"{plan.loss:.1%}", *losses)


@functools.cache
def _compared() -> tuple[Any, tuple[Any, ...]]:
    """The benchmark, and what it finds."""
    simulated = text_tables.benchmark("simulated")
    return simulated, simulated.compared(machine.load(simulated.MACHINE))


def errors(by: str) -> str:
    """How far predictions are from measurements, on every line that there is."""
    benchmark, found = _compared()
    days = sorted({text_tables.date_of(row.commit) for bench in benchmark.FILES for row in text_tables.lines(bench)})
    return f"{_table(benchmark.rows(found, by))}\n\nmeasured on {', '.join(days)}"


def compiled_for(_: str) -> str:
    """Which kernels compile for which GPUs; below, why the others do not."""
    reasons = [f"({at}) {reason}" for at, reason in enumerate(kernel_targets.reasons(), start=1)]
    return "\n".join([_table(kernel_targets.rows()), *([""] if reasons else []), *reasons])


MAKERS: dict[str, Callable[..., str]] = {
    "timeline": timeline,
    "families": families,
    "counts": counts,
    "chart": chart,
    "ranked": chosen,
    "accuracy": accuracy,
    "targets": compiled_for,
    "simulated": errors,
    **measured_tables.MAKERS,
    **model_tables.MAKERS,
    **host_tables.MAKERS,
    **study_tables.MAKERS,
    **signatures.MAKERS,
}
BLOCK = re.compile(rf"^```(text|py) ({'|'.join(MAKERS)}) ([^\n]*)\n.*?^```$", re.MULTILINE | re.DOTALL)


def made(words: str) -> str:
    """Return what a block with these words (a kind and its arguments) shows. Raises ValueError for an unknown kind."""
    kind, *arguments = words.split()
    if kind not in MAKERS:
        raise ValueError(f"there is no generated block {kind!r}; use one of {', '.join(MAKERS)}")
    return MAKERS[kind](*arguments)


def filled(text: str) -> str:
    """Return a document in which every generated block has the lines that its words make now."""
    return BLOCK.sub(lambda match: f"```{match[1]} {match[2]} {match[3]}\n{made(f'{match[2]} {match[3]}')}\n```", text)


def documents() -> list[Path]:
    return [ROOT / "README.md", ROOT / "studies" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> None:
    if sys.argv[1:2] == ["--print"]:
        print(made(" ".join(sys.argv[2:])))
        return
    names = list(study_tables.STUDIES)
    for name in names if sys.argv[1:] == ["studies"] else [name for name in names if name in sys.argv[1:]]:
        study_tables.keep(name)
    if text_tables.whole_history():
        text_tables.keep_days()
    for path in documents():
        text = path.read_text(encoding="utf-8")
        after = filled(text)
        if after != text:
            path.write_text(after, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: rewritten", file=sys.stderr)


if __name__ == "__main__":
    main()
