"""Writes the parts of the documents that code can write: `make docs`, or `python docs/generate.py` from the root.

A generated part is a fenced block whose first line says what it is made of; this script replaces the lines below it.

    ```text timeline OP FAMILY    weft.timeline of the family on the example that `weft schedules` shows
    ```text counts OP             what a rank pays in each family: kernels, copies, flags, bytes
    ```text chart MODEL           the chart that `weft plan MODEL` prints
    ```text results MODE          benchmarks/results/tp.jsonl as a table
    ```text fused BENCH MODE      benchmarks/results/BENCH.jsonl as a table
    ```text paper MODE            paper.jsonl there: the fused kernels' published comparison
    ```text beside MODE           concurrent.jsonl there: GEMMs beside a collective
    ```text conccl MODE           conccl.jsonl there: the 30 pairs of its part conccl
    ```text dma MODE              dma.jsonl there: collectives alone
    ```text resident MODE         resource_aware.jsonl there: what residency and priority gain
    ```text training MODE         data_parallel.jsonl there: steps of a GPT
    ```text rules TOPOLOGY        the heuristic's weights, and what it chooses by them
    ```text simulated BY          benchmarks/simulated.py: predictions against measurements, by operator, family or file
    ```text t3 WHAT               figures, sublayers, mappings, sensitivity or system of `weft simulate t3`
    ```text ficco WHAT            figures, choosers, scenarios, switch, topologies, losses, correlations, sensitivity or machine
                                  of `weft simulate ficco`
    ```text dlrm WHAT             figures, iteration, nodes, two_nodes, slices, sensitivity or system of `weft simulate dlrm`
    ```text models PART, layers BENCH, traces PART        model_tables.py: whole models, layers of them, profiles

tests/test_docs.py holds that nothing is out of date. What takes long to make lies in files: T3's sensitivity, and what DLRM's
study has beside its published case, in docs/t3_sensitivity.json and docs/dlrm_study.json, which `python docs/generate.py
sensitivity` writes in half a minute; FiCCO's evaluation in docs/ficco.json, which `python docs/generate.py ficco` writes in two
or three.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import weft
from weft import codec, machine
from weft.cli.gantt import gantt
from weft.machine import Topology
from weft.models import load_model, sites
from weft.problem import COLLECTIVE_OPS, COLUMN_OPS, LOOKUP_OPS, OPS, ColumnProblem, Op, Problem
from weft.rules import TERMS, Weights, estimates, heuristic
from weft.schedule import Collective, Copy, Gemm, Reduce, Region, Schedule, Signal, Wait
from weft.schedules import names
from weft.sim.dlrm import study as dlrm_study
from weft.sim.dlrm import system as dlrm_system
from weft.sim.dlrm import tables as dlrm_tables
from weft.sim.dlrm.paper import figures as dlrm_figures
from weft.sim.dlrm.sensitivity import Sensitivity as AtScaleSensitivity
from weft.sim.dlrm.sensitivity import sensitivity as dlrm_sensitivity
from weft.sim.ficco import sensitivity as ficco_sensitivity
from weft.sim.ficco import study as ficco_study
from weft.sim.ficco import tables as ficco_tables
from weft.sim.published import figures_table, numbers_table
from weft.sim.t3 import tables
from weft.sim.t3.paper import figures
from weft.sim.t3.sensitivity import Sensitivity, sensitivity
from weft.sim.t3.study import Study, run
from weft.sim.t3.system import load

sys.path.append(str(Path(__file__).parent))
model_tables = importlib.import_module("model_tables")
T = TypeVar("T")
ROOT = Path(__file__).parents[1]
DOCUMENTS = (
    *("README.md", "docs/collectives.md", "docs/concurrent.md", "docs/controls.md", "docs/measured.md", "docs/planner.md"),
    *("docs/models.md", "docs/schedules.md", "docs/simulator.md"),
)
SENSITIVITY = ROOT / "docs" / "t3_sensitivity.json"
FICCO = ROOT / "docs" / "ficco.json"
AT_SCALE = ROOT / "docs" / "dlrm_study.json"
EXAMPLE = {"m": 12, "n": 12, "k": 12, "world_size": 3}
EXAMPLE_ELEMENTS = 48
EXAMPLE_CHUNKS = 2
ON_NODES = {"m": 16, "world_size": 4, "nodes": (2, 2)}
EVEN = {"m": 8192, "n": 8192, "k": 8192, "world_size": 8}
WIDTH = 118
CHART_WIDTH = 96
BLOCK = re.compile(
    r"^```text (timeline|counts|chart|results|fused|paper|beside|conccl|dma|resident|training|rules|simulated|t3|ficco|dlrm|"
    r"models|layers|traces)"
    r" ([^\n]*)\n.*?^```$",
    re.MULTILINE | re.DOTALL,
)


def timeline(op: str, family: str) -> str:
    """One family on the small example, as rank 0 sees it."""
    problem = _example(op, **ON_NODES) if family == "node_slices" else _example(op)
    schedule = weft.build(problem, family, EXAMPLE_CHUNKS)
    return weft.timeline(schedule, width=WIDTH)


def _example(op: str, **changes: Any) -> weft.Problem:
    sizes = EXAMPLE | changes
    if op in LOOKUP_OPS:
        lookup = weft.LookupProblem.of(batch=sizes["m"], dims=((4,),) * sizes["world_size"])
        return replace(lookup, nodes=sizes.get("nodes", ()))
    if op in COLLECTIVE_OPS:
        return weft.CollectiveProblem(op=op, m=EXAMPLE_ELEMENTS, world_size=sizes["world_size"])  # type: ignore[arg-type]
    kind = ColumnProblem if op in COLUMN_OPS else weft.Problem
    return kind(op=op, **sizes)  # type: ignore[arg-type]


def counts(op: Op) -> str:
    """A table: the fixed costs of every family that it has and traffic on rank 0 of 8, even shards, default chunks."""
    heads = ("", "GEMMs", "smallest", "gates", "reduce,", "copies", "copies", "waits,", "sent to", "pulled", "copied")
    below = ("", "", "GEMM rows", "", "collective", "by link", "local", "signals", "peers", "", "locally")
    rows = [_row(weft.build(weft.Problem(op=op, **EVEN), name)) for name in names(op)]  # type: ignore[arg-type]
    return _table([heads, below, *rows])


def _row(schedule: Schedule) -> tuple[str, ...]:
    steps = [step for lane in schedule.ranks[0] for step in lane.steps]
    gemms = [step for step in steps if isinstance(step, Gemm)]
    kinds = Counter(type(step) for step in steps)
    copies = [step for step in steps if isinstance(step, Copy)]
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
        "vendor's" if kinds[Collective] else _shards(schedule, [*(c.dst for c in away if c.dst.rank), *stored]),
        _shards(schedule, [*pulled, *loaded]),
        _shards(schedule, [c.dst for c in copies if c.src.rank == c.dst.rank]),
    )


def _shards(schedule: Schedule, regions: Sequence[Region]) -> str:
    """The elements of regions, in shards."""
    size = sum(region.size for region in regions)
    return f"{size * schedule.problem.itemsize / schedule.problem.shard_bytes:g}" if size else "-"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Columns set to the right, but the first."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [[row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))] for row in rows]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def chart(model: str) -> str:
    """The predicted timeline of the site with the most work, on 8 x H200 and 8192 tokens."""
    h200 = machine.load("h200x8")
    found = sites(load_model(model))
    problems = {site.name: site.problem(8192, h200.world_size, "bfloat16") for site in found}
    site = max(problems, key=lambda name: problems[name].flops)
    plan = weft.plan(problems[site], h200)
    drawn = "\n".join(line.rstrip() for line in gantt(plan.spans, rank=0, width=CHART_WIDTH).plain.splitlines())
    return f"{site} as predicted on {plan.machine}, rank 0: {plan.chosen.spec}\n{drawn}"


def results(mode: str) -> str:
    """The tensor-parallel cases as measured. Times in us."""
    rows = [row for row in _lines("tp") if row["mode"] == mode]
    heads = ("operator, case", "NCCL", "cuBLAS", "sequential", "async TP", "weft", "schedule", "of ideal", "speed-up")
    table = [heads, *(_result(row) for row in rows)]
    return f"{_table(table)}\n\n{_machine(rows[0])}, mode {mode}, commit {rows[0]['commit']}"


def _result(row: dict[str, Any]) -> tuple[str, ...]:
    short = {"all_gather_matmul": "AG+MM", "matmul_reduce_scatter": "MM+RS"}[row["op"]]
    names = ("communication_us", "computation_us", "sequential_us")
    figures = (*(row[name] for name in names), row["peers"].get("async_tp"), row["overlapped_us"])
    times = ["-" if us is None else f"{us:.0f}" for us in figures]
    share, over = row["ideal_us"] / row["overlapped_us"], row["sequential_us"] / row["overlapped_us"]
    return (f"{short} {row['case']}", *times, row["schedule"], f"{share:.2f}", f"{over:.2f}x")


def fused(bench: str, mode: str) -> str:
    """The cases of one of the fused operators' benchmarks. Times in us; best: of all that is not weft's."""
    rows = [row for row in _lines(bench) if row["mode"] == mode and row["overlapped_us"]]
    heads = ("operator, case", "computation", "sequential", "best other", "weft", "auto", "schedule", "of ideal", "speed-up")
    table = [heads, *(_fused(row) for row in rows)]
    return f"{_table(table)}\n\n{_machine(rows[0])}, mode {mode}, commit {rows[0]['commit']}"


def _fused(row: dict[str, Any]) -> tuple[str, ...]:
    others = [us for name, us in row["peers"].items() if not name.startswith(("computation", "communication", "lookup"))]
    figures = (row["computation_us"], row["sequential_us"], min(others, default=None), row["overlapped_us"], row["auto_us"])
    times = ["-" if us is None else f"{us:.0f}" if us >= 100 else f"{us:.1f}" for us in figures]
    share, over = row["ideal_us"] / row["overlapped_us"], row["sequential_us"] / row["overlapped_us"]
    return (f"{row['op']} {row['case']}", *times, row["schedule"], f"{share:.2f}", f"{over:.2f}x")


def paper(mode: str) -> str:
    """By how many percent `auto` is shorter than what it replaces, beside what the paper reports."""
    if str(ROOT / "benchmarks") not in sys.path:
        sys.path.append(str(ROOT / "benchmarks"))
    from paper import REPORTED

    lines = [row for row in _lines("paper") if row["mode"] == mode and row["auto_us"]]
    table: list[tuple[str, ...]] = [("operator", "against", "cases", "mean", "max", "min", "paper's mean", "max")]
    for op, against, time, mean, largest in REPORTED:
        less = [100 * (1 - row["auto_us"] / time(row)) for row in lines if row["op"] == op]
        found = (statistics.fmean(less), max(less), min(less))
        table.append((op, against, str(len(less)), *(f"{x:.0f} %" for x in found), f"{mean} %", f"{largest} %"))
    return f"{_table(table)}\n\n{_machine(lines[0])}, mode {mode}, commit {lines[0]['commit']}"


RULES: dict[str, str] = {"switch": "h200x8", "mesh": "mi300x8", "ring": "t3_ring8"}
"""A profile of each kind of topology, to say what the heuristic chooses on it."""
ROWS = (256, 1024, 4096, 16384, 65536)


def decisions(topology: Topology) -> str:
    """The heuristic's weights for a kind of topology, what they were fitted to, and what it chooses for some sizes."""
    found = estimates(topology)
    weights = [_table([(op, *TERMS, "error"), *map(_weighed, rows)]) for op, rows in found.weights.items()]
    return "\n\n".join([_chosen(machine.load(RULES[topology])), *weights, found.source.replace("; ", "\n")])


def _weighed(row: Weights) -> tuple[str, ...]:
    return (f"  {row.spec}", *(f"{weight:.2f}" if weight else "-" for weight in row.weights), f"{row.error:.0%}")


def _chosen(on: machine.Machine) -> str:
    """For the MLP of Llama 3 70B, experts of DeepSeek-V3 (all to all), and a few rows of matmul_all_reduce."""
    rows = [(f"chosen on {on.name}, {on.world_size} ranks, by rows", *map(str, ROWS))]
    sizes = {"all_gather_matmul": (28672, 8192), "matmul_all_to_all": (7168, 2048), "all_to_all_matmul": (4096, 7168)}
    for op in OPS:
        n, k = sizes.get(op, (8192, 28672))
        fewer = 256 if op == "matmul_all_reduce" else 1
        problems = [Problem(op=op, m=m // fewer, n=n, k=k, world_size=on.world_size) for m in ROWS]
        name = f"  {op} N={n} K={k}" + f", rows / {fewer}" * (fewer > 1)
        rows.append((name, *(heuristic(problem, on) for problem in problems)))
    return _table(rows)


def beside(mode: str) -> str:
    """GEMMs beside a collective, as benchmarks/beside.py measured them. Times in us; two streams: without any control."""
    rows = [row for row in _lines("concurrent") if row["mode"] == mode]
    heads = ("case", "GEMMs", "NCCL", "sequential", "two streams", "auto", "of ideal", "best way", "its share")
    return f"{_table([heads, *map(_beside, rows)])}\n\n{_machine(rows[0])}, mode {mode}, commit {rows[0]['commit']}"


def _beside(row: dict[str, Any]) -> tuple[str, ...]:
    figures = (row["computation_us"], row["communication_us"], row["sequential_us"], row["peers"]["two_streams"])
    best = min(row["candidates"], key=lambda way: row["candidates"][way])
    share = row["ideal_us"] / row["overlapped_us"], row["ideal_us"] / row["candidates"][best]
    times = [f"{us:.0f}" for us in (*figures, row["overlapped_us"])]
    return (row["case"], *times, f"{share[0]:.2f}", best, f"{share[1]:.2f}")


def conccl(mode: str) -> str:
    """Pairs of GEMM, collective and size, with the share of the ideal speed-up that is reached. Times in us."""
    rows = [row for row in _lines("conccl") if row["mode"] == mode]
    heads = ("case", "GEMMs", "NCCL", "sequential", "two streams", "auto", "way", "share", "two streams'")
    shares = ("auto", "vendor")
    means = (f"{statistics.fmean(row['share'][way] for row in rows):.2f}" for way in shares)
    table = [heads, *map(_conccl, rows), ("mean", *[""] * (len(heads) - 1 - len(shares)), *means)]
    return f"{_table(table)}\n\n{_machine(rows[0])}, mode {mode}, commit {rows[0]['commit']}"


def _conccl(row: dict[str, Any]) -> tuple[str, ...]:
    names = ("computation_us", "communication_us", "sequential_us")
    times = [f"{us:.0f}" for us in (*(row[name] for name in names), row["peers"]["two_streams"], row["overlapped_us"])]
    return (row["case"], *times, row["schedule"], f"{row['share']['auto']:.2f}", f"{row['share']['vendor']:.2f}")


def dma(mode: str) -> str:
    """Collectives alone, as benchmarks/dma.py measured them. Times in us."""
    rows = [row for row in _lines("dma") if row["mode"] == mode]
    heads = ("collective, bytes", "NCCL", "registered", "copy engine", "pieces", "over NCCL")
    return f"{_table([heads, *map(_dma, rows)])}\n\n{_machine(rows[0])}, mode {mode}, commit {rows[0]['commit']}"


def _dma(row: dict[str, Any]) -> tuple[str, ...]:
    ours = {name: us for name, us in row["us"].items() if not name.startswith("NCCL") and "straight" not in name}
    best = min(ours, key=lambda name: ours[name])
    nccl = [row["us"].get(f"NCCL {way}") for way in ("default", "symmetric")]
    times = ["-" if us is None else f"{us:.0f}" for us in (*nccl, ours[best])]
    gain = min(us for us in nccl if us is not None) / ours[best]
    return (f"{row['op']} {row['case']}", *times, best.removeprefix("copy_engine"), f"{gain:.2f}x")


def resident(mode: str) -> str:
    """Plain overlap and the best points of benchmarks/resource_aware.py, the paper's and by copy engines. Times in ms."""
    rows = [row for row in _lines("resource_aware") if row["mode"] == mode and not row.get("grid")]
    heads = ("workload, tile", "GEMM", "collective", "sequential", "plain", "best", "blocks/SM", "priority", "TimeRatio")
    moved = ("copy engines", "blocks/SM", "normalised") if any("transport" in row for row in rows) else ()
    table = [(*heads, "normalised", "overlap", "hidden", *moved)]
    for workload in dict.fromkeys((row["op"], tuple(row["tile"])) for row in rows):
        table.append(_resident([row for row in rows if (row["op"], tuple(row["tile"])) == workload]))
    return f"{_table(table)}\n\n{_machine(rows[0])}, mode {mode}, commit {rows[0]['commit']}"


def _resident(points: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    papers = [point for point in points if not point.get("ctas")]
    best = min(papers, key=lambda point: point["overlapped_us"])
    plain = next(point for point in papers if not point["capped"] and not point["priority"])
    names = ("computation_us", "communication_us", "sequential_us")
    times = [f"{us / 1e3:.2f}" for us in (*(best[name] for name in names), plain["overlapped_us"], best["overlapped_us"])]
    tile, point = "x".join(map(str, best["tile"])), (str(best["blocks_per_sm"]), "high" if best["priority"] else "-")
    shares = (f"{best[name]:.2f}" for name in ("time_ratio", "normalised", "overlap_rate", "hidden"))
    return (f"{best['op']} {tile}", *times, *point, *shares, *_by_copy_engine(points))


def _by_copy_engine(points: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    moved = (point for point in points if point.get("transport", "vendor") != "vendor")
    best = min(moved, key=lambda point: point["overlapped_us"], default=None)
    return (f"{best['overlapped_us'] / 1e3:.2f}", str(best["blocks_per_sm"]), f"{best['normalised']:.2f}") if best else ()


def training(mode: str) -> str:
    """Training steps as benchmarks/data_parallel.py measured them, in ms. bound: stock over silent."""
    rows = [row for row in _lines("data_parallel") if row["mode"] == mode]
    heads = ("model", "computation", "silent", "stock", "best way", "its step", "auto took", "auto", "over stock", "bound")
    return f"{_table([heads, *map(_training, rows)])}\n\n{_machine(rows[0])}, mode {mode}, commit {rows[0]['commit']}"


def _training(row: dict[str, Any]) -> tuple[str, ...]:
    stock, ways = row["peers"]["stock"], row["candidates"]
    best = min(ways, key=lambda way: ways[way])
    times = [f"{row[name] / 1e3:.1f}" for name in ("computation_us", "silent_us", "overlapped_us")]
    found = (f"{stock / 1e3:.1f}", best, f"{ways[best] / 1e3:.1f}", row["schedule"], times[2])
    return (f"{row['op']} {row['case']}", *times[:2], *found, f"{row['gain']:.3f}x", f"{stock / row['silent_us']:.3f}x")


def _lines(bench: str) -> list[dict[str, Any]]:
    text = (ROOT / "benchmarks" / "results" / f"{bench}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _machine(row: dict[str, Any]) -> str:
    versions = " ".join(f"{name} {row['versions'][name]}" for name in ("torch", "cuda", "nccl"))
    return f"{row['machine']}, {versions}, {row['dtype']}"


@functools.cache
def study() -> Study:
    """T3's whole evaluation, once for all of its tables."""
    return run(load())


def t3(what: str) -> str:
    """A table of the simulated T3."""
    makers: dict[str, Callable[[], Sequence[Sequence[str]]]] = {
        "figures": lambda: figures_table(figures(study())),
        "sublayers": lambda: tables.sublayers_table((*study().sublayers, *study().large)),
        "mappings": lambda: tables.mappings_table(study()),
        "sensitivity": lambda: tables.sensitivity_table(_stored()),
        "system": lambda: numbers_table(load()),
    }
    return _table(makers[what]())


def _stored() -> Sequence[Sensitivity]:
    return codec.loads(tuple[Sensitivity, ...], SENSITIVITY.read_text(encoding="utf-8"))  # type: ignore[arg-type]


@functools.cache
def kept() -> tuple[ficco_study.Study, Sequence[ficco_sensitivity.Sensitivity]]:
    """FiCCO's evaluation and what its assumed numbers do, as they were kept."""
    data = json.loads(FICCO.read_text(encoding="utf-8"))
    rows = codec.load(tuple[ficco_sensitivity.Sensitivity, ...], data["sensitivity"])
    return codec.load(ficco_study.Study, data["study"]), rows


def keep_ficco() -> None:
    """Simulate it, and keep it."""
    where = ficco_study.load()
    data = {"study": ficco_study.run(where), "sensitivity": tuple(ficco_sensitivity.sensitivity(where))}
    FICCO.write_text(codec.dumps(data, indent=1) + "\n", encoding="utf-8")


def ficco(what: str) -> str:
    """A table of the simulated FiCCO."""
    found, rows = kept()
    makers: dict[str, Callable[[], Sequence[Sequence[str]]]] = {
        "figures": lambda: ficco_tables.figures_table(found),
        "scenarios": lambda: ficco_tables.scenarios_table(found.mesh),
        "switch": lambda: ficco_tables.scenarios_table(found.switch),
        "choosers": lambda: ficco_tables.choosers_table(found),
        "topologies": lambda: ficco_tables.topologies_table(found),
        "losses": lambda: ficco_tables.losses_table(found),
        "correlations": lambda: ficco_tables.correlations_table(found),
        "sensitivity": lambda: ficco_tables.sensitivity_table(rows),
        "machine": lambda: [row[:2] for row in ficco_tables.machine_table(found)],
    }
    return _table(makers[what]())


def dlrm(what: str) -> str:
    """A table of the simulated DLRM. The published case and two nodes are made anew."""
    system = dlrm_system.load()
    makers: dict[str, Callable[[], Sequence[Sequence[str]]]] = {
        "figures": lambda: figures_table(dlrm_figures(at_scale())),
        "iteration": lambda: dlrm_tables.iteration_table(at_scale().unfused, at_scale().fused),
        "nodes": lambda: dlrm_tables.cases_table(at_scale().cases),
        "two_nodes": lambda: dlrm_tables.operators_table(at_scale().operators),
        "slices": lambda: dlrm_tables.sliced_table(at_scale().sliced),
        "sensitivity": lambda: dlrm_tables.sensitivity_table(_stored_at_scale("sensitivity", AtScaleSensitivity)),
        "system": lambda: numbers_table(system),
    }
    return _table(makers[what]())


@functools.cache
def _compared() -> tuple[Any, tuple[Any, ...]]:
    """The benchmark, which is in no package, and what it finds."""
    sys.path.append(str(ROOT / "benchmarks"))
    import simulated

    return simulated, simulated.compared(machine.load(simulated.MACHINE))


def errors(by: str) -> str:
    """How far predictions are from measurements, on every line that there is."""
    benchmark, found = _compared()
    return _table(benchmark.rows(found, by))


@functools.cache
def at_scale() -> dlrm_study.Study:
    """DLRM's study: node counts and slices as they are kept, the rest made anew."""
    system = dlrm_system.load()
    unfused, fused = dlrm_study.runs(system, *dlrm_study.PUBLISHED)
    return dlrm_study.Study(
        system=system,
        unfused=unfused,
        fused=fused,
        cases=_stored_at_scale("cases", dlrm_study.Case),
        operators=tuple(dlrm_study.two_nodes(system)),
        sliced=_stored_at_scale("sliced", dlrm_study.Sliced),
    )


def _stored_at_scale(name: str, kind: type[T]) -> tuple[T, ...]:
    made: tuple[T, ...] = codec.load(tuple[kind, ...], json.loads(AT_SCALE.read_text(encoding="utf-8"))[name])  # type: ignore[valid-type]
    return made


def store() -> None:
    """Write what takes long to make."""
    SENSITIVITY.write_text(codec.dumps(tuple(sensitivity(load())), indent=1) + "\n", encoding="utf-8")
    system = dlrm_system.load()
    done = dlrm_study.run(system)
    rows = tuple(dlrm_sensitivity(system))
    kept = codec.dumps({"cases": done.cases, "sliced": done.sliced, "sensitivity": rows}, indent=1)
    AT_SCALE.write_text(kept + "\n", encoding="utf-8")


MAKERS: dict[str, Callable[..., str]] = {
    "timeline": timeline,
    "counts": counts,
    "chart": chart,
    "results": results,
    "fused": fused,
    "paper": paper,
    "beside": beside,
    "conccl": conccl,
    "dma": dma,
    "resident": resident,
    "training": training,
    "rules": decisions,
    "simulated": errors,
    "t3": t3,
    "ficco": ficco,
    "dlrm": dlrm,
    **model_tables.MAKERS,
}


def rewritten(text: str) -> str:
    """A document with every generated block made anew."""

    def block(match: re.Match[str]) -> str:
        kind, arguments = match.groups()
        return f"```text {kind} {arguments}\n{MAKERS[kind](*arguments.split())}\n```"

    return BLOCK.sub(block, text)


def main() -> None:
    if sys.argv[1:] == ["sensitivity"]:
        store()
    if sys.argv[1:] == ["ficco"]:
        keep_ficco()
    for name in DOCUMENTS:
        path = ROOT / name
        before = path.read_text(encoding="utf-8")
        after = rewritten(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"{name}: rewritten", file=sys.stderr)


if __name__ == "__main__":
    main()
