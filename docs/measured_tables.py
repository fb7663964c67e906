"""Tables of operators, collectives and steps for generate.py, from benchmarks/results. MODE: in which cases ran.

gains FOLDER       what `auto` gains over the fastest alternative, by operator and size
shapes FOLDER MODE each case of that
results MODE       tp.jsonl: the tensor-parallel cases
fused BENCH MODE   BENCH.jsonl: a fused operator's cases
paper MODE         paper.jsonl: the fused kernels' published comparison
beside MODE        concurrent.jsonl: GEMMs beside a collective
conccl MODE        conccl.jsonl: the 30 pairs of ConCCL's evaluation
dma MODE           dma.jsonl: collectives alone
resident BENCH MODE    resource_aware.jsonl or that of 2 GPUs: what residency and priority gain
training MODE      data_parallel.jsonl: steps of a GPT
nodes MODE         nodes.jsonl: the operators between nodes
fp8 BENCH          tp_fp8.jsonl: the tensor-parallel cases in FP8, by operator and rows
fp8_rows BENCH     few_rows_fp8.jsonl: few rows in FP8 over bfloat16
fp8_kernels GEMM ROW   gemm_fp8.jsonl and one_row_fp8.jsonl: kernels alone
gemms BENCH MODE   ficco_gemms.jsonl or that of 2 GPUs: FiCCO's sixteen GEMMs, those that fit
products MODE      products.jsonl: a matmul by the algorithm that is fastest, and by torch's
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from text_tables import RESULTS, benchmark, commits, date_of, lines, source, table, versions

from weft.core.machine import load


def _cases(bench: str, mode: str) -> list[dict[str, Any]]:
    return [row for row in lines(bench) if row["mode"] == mode]


def _measured(
    heads: Sequence[str], cases: Sequence[dict[str, Any]], made: Callable[[dict[str, Any]], tuple[str, ...]], mode: str
) -> str:
    """A table of a row a case."""
    return table([heads, *map(made, cases)]) + source(cases, mode)


OTHERS = {"2 x NVIDIA H100": RESULTS / "h100x2", "4 x NVIDIA H200": RESULTS}
"""By machine, the folder of its results."""


def gains(folder: str) -> str:
    """Ratios of times, by operator and size; those of other machines, which are of older versions; and what was measured."""
    made = benchmark("gains")
    days: dict[str, set[str]] = {}
    for where, machine in {RESULTS / folder: "", **{path: machine for machine, path in OTHERS.items()}}.items():
        for name in sorted({group.file for group in made.GROUPS}):
            bench = str((where / name).relative_to(RESULTS))
            for row in lines(bench) if (where / f"{name}.jsonl").exists() else ():
                if row["machine"].startswith(machine):
                    days.setdefault(f"{row['machine']}, {versions(row)}", set()).add(date_of(row["commit"]))
    measured = [f"{where}, {' and '.join(sorted(some))}" for where, some in days.items()]
    return "\n".join([table(made.table(RESULTS / folder, OTHERS)), "", *measured])


def shapes(folder: str, mode: str) -> str:
    """Every case that the table of gains sums up."""
    some = [row for path in sorted((RESULTS / folder).glob("*.jsonl")) for row in lines(f"{folder}/{path.stem}")]
    where = dict.fromkeys(f"{row['machine']}, {versions(row)}, mode {mode}, {commits([row])}" for row in some)
    return "\n".join([table(benchmark("gains").shapes(RESULTS / folder, mode)), "", *where])


def results(mode: str) -> str:
    """The tensor-parallel cases as measured. Times in us."""
    heads = ("operator, case", "NCCL", "cuBLAS", "sequential", "async TP", "weft", "schedule", "of ideal", "speed-up")
    return _measured(heads, _cases("tp", mode), _result, mode)


def _result(row: dict[str, Any]) -> tuple[str, ...]:
    short = {"all_gather_matmul": "AG+MM", "matmul_reduce_scatter": "MM+RS"}[row["op"]]
    names = ("communication_us", "computation_us", "sequential_us")
    figures = (*(row[name] for name in names), row["peers"].get("async_tp"), row["overlapped_us"])
    times = ["-" if us is None else f"{us:.0f}" for us in figures]
    share, over = row["ideal_us"] / row["overlapped_us"], row["sequential_us"] / row["overlapped_us"]
    return (f"{short} {row['case']}", *times, row["schedule"], f"{share:.2f}", f"{over:.2f}x")


def fused(bench: str, mode: str) -> str:
    """The cases of one of the fused operators' benchmarks. Times in us; best: of all that is not weft's."""
    cases = [row for row in _cases(bench, mode) if row["overlapped_us"]]
    heads = ("operator, case", "computation", "sequential", "best other", "weft", "auto", "schedule", "of ideal", "speed-up")
    return _measured(heads, cases, _fused, mode)


def _fused(row: dict[str, Any]) -> tuple[str, ...]:
    others = [us for name, us in row["peers"].items() if not name.startswith(("computation", "communication", "lookup"))]
    figures = (row["computation_us"], row["sequential_us"], min(others, default=None), row["overlapped_us"], row["auto_us"])
    times = ["-" if us is None else f"{us:.0f}" if us >= 100 else f"{us:.1f}" for us in figures]
    share, over = row["ideal_us"] / row["overlapped_us"], row["sequential_us"] / row["overlapped_us"]
    return (f"{row['op']} {row['case']}", *times, row["schedule"], f"{share:.2f}", f"{over:.2f}x")


def paper(mode: str) -> str:
    """By how many percent `auto` is shorter than what it replaces, beside what the paper reports."""
    cases = [row for row in _cases("paper", mode) if row["auto_us"]]
    rows: list[tuple[str, ...]] = [("operator", "against", "cases", "mean", "max", "min", "paper's mean", "max")]
    for op, against, time, mean, largest in benchmark("paper").REPORTED:
        less = [100 * (1 - row["auto_us"] / time(row)) for row in cases if row["op"] == op]
        found = (statistics.fmean(less), max(less), min(less))
        rows.append((op, against, str(len(less)), *(f"{x:.0f} %" for x in found), f"{mean} %", f"{largest} %"))
    return table(rows) + source(cases, mode)


def beside(mode: str) -> str:
    """GEMMs beside a collective, as benchmarks/beside.py measured them. Times in us; two streams: without any control."""
    heads = ("case", "GEMMs", "NCCL", "sequential", "two streams", "auto", "of ideal", "best way", "its share")
    return _measured(heads, _cases("concurrent", mode), _beside, mode)


def _beside(row: dict[str, Any]) -> tuple[str, ...]:
    figures = (row["computation_us"], row["communication_us"], row["sequential_us"], row["peers"]["two_streams"])
    best = min(row["candidates"], key=lambda way: row["candidates"][way])
    share = row["ideal_us"] / row["overlapped_us"], row["ideal_us"] / row["candidates"][best]
    times = [f"{us:.0f}" for us in (*figures, row["overlapped_us"])]
    return (row["case"], *times, f"{share[0]:.2f}", best, f"{share[1]:.2f}")


def conccl(mode: str) -> str:
    """Pairs of GEMM, collective and size, with the share of the ideal speed-up that is reached. Times in us."""
    cases = _cases("conccl", mode)
    heads = ("case", "GEMMs", "NCCL", "sequential", "two streams", "auto", "way", "share", "two streams'")
    shares = ("auto", "vendor")
    means = (f"{statistics.fmean(row['share'][way] for row in cases):.2f}" for way in shares)
    rows = [heads, *map(_conccl, cases), ("mean", *[""] * (len(heads) - 1 - len(shares)), *means)]
    return table(rows) + source(cases, mode)


def _conccl(row: dict[str, Any]) -> tuple[str, ...]:
    names = ("computation_us", "communication_us", "sequential_us")
    times = [f"{us:.0f}" for us in (*(row[name] for name in names), row["peers"]["two_streams"], row["overlapped_us"])]
    return (row["case"], *times, row["schedule"], f"{row['share']['auto']:.2f}", f"{row['share']['vendor']:.2f}")


def dma(mode: str) -> str:
    """Collectives alone, as benchmarks/dma.py measured them. Times in us."""
    heads = ("collective, bytes", "NCCL", "registered", "copy engine", "pieces", "over NCCL")
    return _measured(heads, _cases("dma", mode), _dma, mode)


def _dma(row: dict[str, Any]) -> tuple[str, ...]:
    ours = {name: us for name, us in row["us"].items() if not name.startswith("NCCL") and "straight" not in name}
    best = min(ours, key=lambda name: ours[name])
    nccl = [row["us"].get(f"NCCL {way}") for way in ("default", "symmetric")]
    times = ["-" if us is None else f"{us:.0f}" for us in (*nccl, ours[best])]
    gain = min(us for us in nccl if us is not None) / ours[best]
    return (f"{row['op']} {row['case']}", *times, best.removeprefix("copy_engine"), f"{gain:.2f}x")


def resident(bench: str, mode: str) -> str:
    """Plain overlap and the best points of benchmarks/resource_aware.py, the paper's and by copy engines. Times in ms."""
    cases = [row for row in _cases(bench, mode) if not row.get("grid")]
    heads = ("workload, tile", "GEMM", "collective", "sequential", "plain", "best", "blocks/SM", "priority", "TimeRatio")
    moved = ("copy engines", "blocks/SM", "normalised") if any("transport" in row for row in cases) else ()
    rows = [(*heads, "normalised", "overlap", "hidden", *moved)]
    for workload in dict.fromkeys((row["op"], tuple(row["tile"])) for row in cases):
        rows.append(_resident([row for row in cases if (row["op"], tuple(row["tile"])) == workload]))
    return table(rows) + source(cases, mode)


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
    heads = ("model", "computation", "silent", "stock", "best way", "its step", "auto took", "auto", "over stock", "bound")
    return _measured(heads, _cases("data_parallel", mode), _training, mode)


def _training(row: dict[str, Any]) -> tuple[str, ...]:
    stock, ways = row["peers"]["stock"], row["candidates"]
    best = min(ways, key=lambda way: ways[way])
    times = [f"{row[name] / 1e3:.1f}" for name in ("computation_us", "silent_us", "overlapped_us")]
    found = (f"{stock / 1e3:.1f}", best, f"{ways[best] / 1e3:.1f}", row["schedule"], times[2])
    return (f"{row['op']} {row['case']}", *times[:2], *found, f"{row['gain']:.3f}x", f"{stock / row['silent_us']:.3f}x")


def nodes(mode: str) -> str:
    """The operators on ranks that are taken for nodes. Times in us."""
    heads = ("operator, case", "NCCL", "alone", "sequential", "slices", "auto", "schedule", "auto over sequential")
    return _measured(heads, _cases("nodes", mode), _on_nodes, mode)


def _on_nodes(row: dict[str, Any]) -> tuple[str, ...]:
    names = ("communication_us", "computation_us", "sequential_us", "overlapped_us", "auto_us")
    times = [f"{row[name]:.0f}" for name in names]
    return (f"{row['op']} {row['case']}", *times, row["schedule"], f"{row['sequential_us'] / row['auto_us']:.2f}x")


def gemms(bench: str, mode: str) -> str:
    """FiCCO's GEMMs that fit."""
    made = benchmark("ficco_gemms")
    found, known = made.measured(RESULTS / f"{bench}.jsonl")
    return f"{table(made.rows(found, load('h200x8'), known))}\n{made.most(found)}{source(lines(bench), mode)}"


def products(mode: str) -> str:
    """By numbers of rows: how much faster products are by the algorithm that weft found than by torch's."""
    cases = _cases("products", mode)
    rows: list[tuple[str, ...]] = [("rows", "products", "by another algorithm", "speed-up", "least", "most")]
    for m in sorted({row["rows"] for row in cases}):
        rows.append((str(m), *_products([row for row in cases if row["rows"] == m])))
    return table([*rows, ("all", *_products(cases))]) + source(cases, mode)


def _products(cases: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    gains = [row["vendor_us"] / row["us"] for row in cases]
    others = sum(row["algorithm"] is not None for row in cases)
    return (str(len(cases)), str(others), *(f"{x:.2f}x" for x in (statistics.geometric_mean(gains), min(gains), max(gains))))


def fp8(bench: str) -> str:
    """Means by operator and rows."""
    rows: list[tuple[str, ...]] = [("operator, rows", "cases", "of ideal", "over sequential", "worst", "over PyTorch")]
    cases = lines(bench)
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in cases:
        size = int(row["case"].rpartition("=")[2])
        groups.setdefault(f"{row['op']}, M {'>= 8192' if size >= 8192 else f'= {size}'}", []).append(row)
    for name, some in sorted(groups.items(), key=lambda item: (item[1][0]["op"], -len(item[1]))):
        rows.append((name, *_fp8(some)))
    return table([*rows, ("all", *_fp8(cases))]) + source(cases)


def _fp8(cases: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    over = [row["sequential_us"] / row["auto_us"] for row in cases]
    ideal = statistics.geometric_mean(row["ideal_us"] / row["auto_us"] for row in cases)
    peer = statistics.geometric_mean(row["peers"]["async_tp"] / row["auto_us"] for row in cases)
    return (str(len(cases)), f"{ideal:.3f}", f"{statistics.geometric_mean(over):.2f}x", f"{min(over):.3f}x", f"{peer:.2f}x")


def fp8_rows(bench: str) -> str:
    """`auto` in FP8 over `auto` in bfloat16, by rows."""
    cases = lines(bench)
    gains: dict[str, list[float]] = {}
    for row in cases:
        gains.setdefault(row["case"].rpartition("=")[2], []).append(row["auto_us"] / row["float8"]["auto"])
    gains["all"] = [gain for some in gains.values() for gain in some]
    found = [
        (rows, str(len(some)), f"{statistics.geometric_mean(some):.2f}x", f"{min(some):.2f}x") for rows, some in gains.items()
    ]
    return table([("rows", "cases", "over bfloat16", "worst"), *found]) + source(cases)


def fp8_kernels(gemm: str, row: str) -> str:
    """Relative speed: the baseline's time over the kernel's, geometric means."""
    rows: list[tuple[str, ...]] = [("cases", "kernel", "cases", "relative speed")]
    for kind, names in {"dense": ("fast", "gated", "exact"), "blockwise": ("kernel", "gated")}.items():
        cases = [one["us"] for one in lines(gemm) if one["kind"] == kind]
        for name in names:
            speeds = [min(us for method, us in one.items() if method.startswith("cublas")) / one[name] for one in cases]
            rows.append((kind, name, str(len(speeds)), f"{statistics.geometric_mean(speeds):.2f}"))
    single = [one["us"] for one in lines(row)]
    for name in ("tensorwise", "rowwise", "rowwise product", "blockwise"):
        rows.append(
            ("one row", name, str(len(single)), f"{statistics.geometric_mean(us['mm'] / us[name] for us in single):.2f}")
        )
    return table(rows) + "".join(source([one | {"op": bench} for one in lines(bench)]) for bench in (gemm, row))


MAKERS: dict[str, Callable[..., str]] = {
    "fp8": fp8,
    "fp8_rows": fp8_rows,
    "fp8_kernels": fp8_kernels,
    "gains": gains,
    "shapes": shapes,
    "results": results,
    "fused": fused,
    "paper": paper,
    "beside": beside,
    "conccl": conccl,
    "dma": dma,
    "resident": resident,
    "training": training,
    "nodes": nodes,
    "gemms": gemms,
    "products": products,
}
