"""Tables of operators, collectives and steps for generate.py. BENCH is a file of benchmarks/results without `.jsonl`, such as
h200x2/tp. MODE says how calls were made: graph or eager.

gains FOLDER         what `auto` gains over the fastest alternative, by operator and size
cases BENCH          every case: `auto` and the fastest alternative, in graphs and eager
paper BENCH MODE     the fused kernels' published comparison
concurrent BENCH MODE    GEMMs and a collective at the same time
conccl BENCH MODE    the 30 pairs of ConCCL's evaluation
dma BENCH MODE       collectives alone
resident BENCH MODE  what residency and priority gain
training BENCH MODE  steps of a GPT
iso_measured BENCH MODE    decoder layers with half batches, and with weft's own overlap
fp8 BENCH            the tensor-parallel cases in FP8, by operator and rows
fp8_rows BENCH       few rows in FP8 over bfloat16
fp8_kernels GEMM ROW GROUPED   FP8 kernels alone
gemms BENCH MODE     FiCCO's sixteen GEMMs, those that fit
products BENCH MODE  a matmul by the algorithm that is fastest, and by torch's
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from text_tables import RESULTS, benchmark, date_of, lines, source, table, versions

from benchmarks.rows import AUTO, Row, alternative, best, best_us, default, gain, ideal, name_of
from weft.core.machine import load
from weft.overlap.concurrent.choice import share_of_ideal


def _cases(bench: str, mode: str) -> list[Row]:
    return [row for row in lines(bench) if row.mode == mode]


def _measured(heads: Sequence[str], cases: Sequence[Row], made: Callable[[Row], tuple[str, ...]], mode: str) -> str:
    """A table of a row a case."""
    return table([heads, *map(made, cases)]) + source(cases, mode)


def _us(us: float | None, digits: int = 1) -> str:
    """With this many decimals; none where there are three digits before."""
    return "-" if us is None else f"{us:.0f}" if us >= 100 else f"{us:.{digits}f}"


def _least(row: Row, *kinds: str) -> tuple[str, ...]:
    """Each kind's least time."""
    return tuple(_us(best_us(row, kind), 0) for kind in kinds)


ALONE = ("computation/", "communication/", "sequential/")


OTHERS = {"8 x NVIDIA H200": RESULTS / "h200x8", "4 x NVIDIA H100": RESULTS / "h100x4"}
"""By machine, the folder of its results."""


def gains(folder: str) -> str:
    """Ratios of times, by operator and size; those of other machines, which are of older versions; and what was measured."""
    made = benchmark("gains")
    days: dict[str, dict[str, set[str]]] = {}
    for where, machine in {RESULTS / folder: "", **{path: machine for machine, path in OTHERS.items()}}.items():
        for name in sorted({group.file for group in made.GROUPS}):
            bench = str((where / name).relative_to(RESULTS))
            for row in lines(bench) if (where / f"{name}.jsonl").exists() else ():
                if row.machine.startswith(machine):
                    days.setdefault(versions(row), {}).setdefault(row.machine, set()).add(date_of(row.commit))
    measured = [f"{with_}: {', '.join(map(_measured_on, of, of.values()))}" for with_, of in days.items()]
    return "\n".join([table(made.table(RESULTS / folder, OTHERS)), "", *measured])


def _measured_on(machine: str, days: set[str]) -> str:
    """Return the machine, and the first and the last day."""
    return f"{machine} ({' to '.join(dict.fromkeys((min(days), max(days))))})"


def cases(bench: str) -> str:
    """Every case by operator, in us. In graphs, or else eager: the gain, `auto`, the fastest alternative and its name, what is
    reached of the ideal, and what `auto` chose. If both modes were measured, also the gain of eager calls."""
    rows = [row for row in lines(bench) if default(row)]
    modes = [mode for mode in ("graph", "eager") if any(row.mode == mode for row in rows)]
    found: dict[str, dict[str, dict[str, Row]]] = {}
    for row in rows:
        found.setdefault(row.op, {}).setdefault(row.case, {})[row.mode] = row
    eager = ("eager gain",) if modes[1:] else ()
    body = [("case", "gain", "auto", "other", "which", "of ideal", "chosen", *eager)]
    for op, each in found.items():
        body.append((op, *[""] * (len(body[0]) - 1)))
        for case, some in each.items():
            body.append((f"  {case}", *_case(some.get(modes[0])), *(_eager_gain(some.get("eager")) if eager else ())))
    return table(body) + source(rows, " and ".join(modes))


def _case(row: Row | None) -> tuple[str, ...]:
    if row is None:
        return ("-",) * 6
    halves = best_us(row, "communication/"), best_us(row, "computation/")
    share = f"{ideal(row) / (default(row) or math.nan):.2f}" if all(halves) else "-"
    times = (_us(default(row)), _us(alternative(row)[1]))
    return (f"{gain(row):.2f}x", *times, benchmark("gains").alternative_name(row), share, row.chosen or "-")


def _eager_gain(row: Row | None) -> tuple[str, ...]:
    return (f"{gain(row):.2f}x" if row else "-",)


def paper(bench: str, mode: str) -> str:
    """By how many percent `auto` is shorter than what it replaces, beside what the paper reports."""
    cases = _cases(bench, mode)
    rows: list[tuple[str, ...]] = [("operator", "against", "cases", "mean", "max", "min", "paper's mean", "max")]
    for op, against, less, mean, largest in benchmark("paper").reductions(cases):
        found = (statistics.fmean(less), max(less), min(less))
        rows.append((op, against, str(len(less)), *(f"{x:.0f} %" for x in found), f"{mean} %", f"{largest} %"))
    return table(rows) + source(cases, mode)


def concurrent(bench: str, mode: str) -> str:
    """GEMMs and a collective at the same time. Times in us; two streams: without any control."""
    heads = ("case", "GEMMs", "NCCL", "sequential", "two streams", "auto", "of ideal", "best method", "its share")
    return _measured(heads, _cases(bench, mode), _concurrent, mode)


def _concurrent(row: Row) -> tuple[str, ...]:
    name, us = best(row, "sequential/", "peer/", "weft/") or ("", math.nan)
    shares = f"{ideal(row) / row.us[AUTO]:.2f}", METHODS.get(name, name_of(name)), f"{ideal(row) / us:.2f}"
    return (row.case, *_least(row, *ALONE, "peer/two_streams"), _us(row.us[AUTO], 0), *shares)


METHODS = {"sequential/default": "sequential", "peer/two_streams": "nccl"}
"""weft.concurrent's names of what a user has without it."""


def conccl(bench: str, mode: str) -> str:
    """Pairs of GEMM, collective and size, with the share of the ideal speed-up that is reached. Times in us."""
    cases = _cases(bench, mode)
    heads = ("case", "GEMMs", "NCCL", "sequential", "two streams", "auto", "method", "share", "two streams'")
    found = [tuple(_share(row, name) for name in (AUTO, "peer/two_streams")) for row in cases]
    rows = [heads, *(_conccl(row, *some) for row, some in zip(cases, found, strict=True))]
    means = (f"{statistics.fmean(column):.2f}" for column in zip(*found, strict=True))
    return table([*rows, ("mean", *[""] * (len(heads) - 3), *means)]) + source(cases, mode)


def _share(row: Row, name: str) -> float:
    return share_of_ideal(row.us[name], sequential_us=row.us["sequential/default"], ideal_us=ideal(row))


def _conccl(row: Row, share: float, plain: float) -> tuple[str, ...]:
    times = _least(row, *ALONE, "peer/two_streams")
    return (row.case, *times, _us(row.us[AUTO], 0), row.chosen or "-", f"{share:.2f}", f"{plain:.2f}")


def dma(bench: str, mode: str) -> str:
    """Collectives alone, as benchmarks/collective.py measured them. Times in us."""
    heads = ("collective, bytes", "NCCL", "registered", "copy engine", "pieces", "over NCCL")
    return _measured(heads, _cases(bench, mode), _dma, mode)


def _dma(row: Row) -> tuple[str, ...]:
    straight = tuple(name for name in row.us if name.endswith("straight"))
    name, us = best(row, "weft/", but=straight) or ("", math.nan)
    nccl = ("communication/default", "communication/symmetric")
    gain = (best_us(row, *nccl) or math.nan) / us
    times = (*_least(row, *nccl), _us(us, 0))
    return (f"{row.op} {row.case}", *times, name_of(name).removeprefix("copy_engine"), f"{gain:.2f}x")


def resident(bench: str, mode: str) -> str:
    """Plain overlap and the best points of benchmarks/resource_aware.py, the paper's and by copy engines. Times in ms."""
    cases = [row for row in _cases(bench, mode) if not row.extra.get("grid")]
    heads = ("workload, tile", "GEMM", "collective", "sequential", "plain", "best", "blocks/SM", "priority", "TimeRatio")
    moved = ("copy engines", "blocks/SM", "normalised") if any("transport" in row.extra for row in cases) else ()
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in cases:
        groups.setdefault((row.op, "x".join(map(str, row.extra["tile"]))), []).append(row)
    found = [(" ".join(name), *_resident(some)) for name, some in groups.items()]
    return table([(*heads, "normalised", "overlap", "hidden", *moved), *found]) + source(cases, mode)


def _resident(points: Sequence[Row]) -> tuple[str, ...]:
    papers = [point for point in points if not point.extra.get("ctas")]
    fastest = min(papers, key=_point_us)
    plain = next(point for point in papers if not point.extra["capped"] and not point.extra["priority"])
    times = [fastest.us[name] for name in ("computation/triton", "communication/default", "sequential/default")]
    each = (f"{us / 1e3:.2f}" for us in (*times, _point_us(plain), _point_us(fastest)))
    point, ratio = fastest.extra, _point_us(fastest) / fastest.us["sequential/default"]
    shares = (f"{share:.2f}" for share in (ratio, *(point[name] for name in ("normalised", "overlap_rate", "hidden"))))
    return (*each, str(point["blocks_per_sm"]), "high" if point["priority"] else "-", *shares, *_by_copy_engine(points))


def _point_us(point: Row) -> float:
    return point.us["weft/overlapped"]


def _by_copy_engine(points: Sequence[Row]) -> tuple[str, ...]:
    moved = [point for point in points if point.extra.get("transport", "nccl") != "nccl"]
    if not moved:
        return ()
    fastest = min(moved, key=_point_us)
    more = fastest.extra
    return (f"{_point_us(fastest) / 1e3:.2f}", str(more["blocks_per_sm"]), f"{more['normalised']:.2f}")


def training(bench: str, mode: str) -> str:
    """Training steps as benchmarks/data_parallel.py measured them, in ms. bound: stock over silent."""
    heads = ("model", "computation", "silent", "stock", "best method", "its step", "auto took", "auto", "over stock", "bound")
    return _measured(heads, _cases(bench, mode), _training, mode)


def _training(row: Row) -> tuple[str, ...]:
    stock, silent = row.us["peer/stock"], row.us["computation/silent"]
    name, us = best(row, "weft/") or ("", math.nan)
    times = [f"{us / 1e3:.1f}" for us in (row.us["computation/torch"], silent, stock, us, row.us[AUTO])]
    found = (*times[:3], name_of(name), times[3], row.chosen or "-", times[4])
    return (f"{row.op} {row.case}", *found, f"{row.extra['gain']:.3f}x", f"{stock / silent:.3f}x")


def iso(bench: str, mode: str) -> str:
    """Decoder layers, in us: what splitting the prompt in two halves takes, and what weft's own overlap takes."""
    heads = ("case", "computation", "NCCL", "sequential", "ISO", "auto", "ISO saves", "auto saves")
    return _measured(heads, _cases(bench, mode), _iso, mode)


def _iso(row: Row) -> tuple[str, ...]:
    times = [best_us(row, kind) or math.nan for kind in ("computation/", "communication/", "sequential/", "peer/iso")]
    times.append(row.us[AUTO])
    return (row.case, *map(_us, times), *(f"{1 - us / times[2]:.1%}" for us in times[3:]))


def gemms(bench: str, mode: str) -> str:
    """FiCCO's GEMMs that fit."""
    made = benchmark("ficco_gemms")
    found, known = made.measured(RESULTS / f"{bench}.jsonl")
    return f"{table(made.rows(found, load('h200x8'), known))}\n{made.most(found)}{source(lines(bench), mode)}"


def products(bench: str, mode: str) -> str:
    """By numbers of rows: how much faster products are by the algorithm that weft found than by torch's."""
    cases = _cases(bench, mode)
    rows: list[tuple[str, ...]] = [("rows", "products", "by another algorithm", "speed-up", "least", "most")]
    for m in sorted({row.extra["rows"] for row in cases}):
        rows.append((str(m), *_products([row for row in cases if row.extra["rows"] == m])))
    return table([*rows, ("all", *_products(cases))]) + source(cases, mode)


def _products(cases: Sequence[Row]) -> tuple[str, ...]:
    gains = [row.us["computation/cublas"] / row.us[AUTO] for row in cases]
    others = sum(row.chosen is not None for row in cases)
    return (str(len(cases)), str(others), *(f"{x:.2f}x" for x in (statistics.geometric_mean(gains), min(gains), max(gains))))


def fp8(bench: str) -> str:
    """Means by operator and rows."""
    rows: list[tuple[str, ...]] = [("operator, rows", "cases", "of ideal", "over sequential", "worst", "over PyTorch")]
    cases = lines(bench)
    groups: dict[str, list[Row]] = {}
    for row in cases:
        size = int(row.case.rpartition("=")[2])
        groups.setdefault(f"{row.op}, M {'>= 8192' if size >= 8192 else f'= {size}'}", []).append(row)
    for name, some in sorted(groups.items(), key=lambda item: (item[1][0].op, -len(item[1]))):
        rows.append((name, *_fp8(some)))
    return table([*rows, ("all", *_fp8(cases))]) + source(cases)


def _fp8(cases: Sequence[Row]) -> tuple[str, ...]:
    over = [(best_us(row, "sequential/") or math.nan) / row.us[AUTO] for row in cases]
    share = statistics.geometric_mean(ideal(row) / row.us[AUTO] for row in cases)
    peer = statistics.geometric_mean(row.us["peer/async_tp"] / row.us[AUTO] for row in cases)
    return (str(len(cases)), f"{share:.3f}", f"{statistics.geometric_mean(over):.2f}x", f"{min(over):.3f}x", f"{peer:.2f}x")


def fp8_rows(bench: str) -> str:
    """`auto` in FP8 over `auto` in bfloat16, by rows."""
    cases = [row for row in lines(bench) if row.mode == "graph" and "float8/auto" in row.us]
    gains: dict[str, list[float]] = {}
    for row in cases:
        gains.setdefault(row.case.rpartition("=")[2], []).append(row.us[AUTO] / row.us["float8/auto"])
    gains["all"] = [gain for some in gains.values() for gain in some]
    found = [
        (rows, str(len(some)), f"{statistics.geometric_mean(some):.2f}x", f"{min(some):.2f}x") for rows, some in gains.items()
    ]
    return table([("rows", "cases", "over bfloat16", "worst"), *found]) + source(cases)


def fp8_kernels(gemm: str, row: str, grouped: str) -> str:
    """Relative speed: the baseline's time over the kernel's, geometric means."""
    rows: list[tuple[str, ...]] = [("cases", "kernel", "cases", "relative speed")]
    kinds = {
        "dense": ("fast", "gated", "exact"),
        "blockwise": ("kernel", "gated"),
        "one row": ("tensorwise", "rowwise", "rowwise product", "blockwise"),
        "experts": ("dispatch", "combine"),
    }
    files = {"one row": row, "experts": grouped}
    for kind, names in kinds.items():
        cases = lines(files[kind]) if kind in files else [one for one in lines(gemm) if one.op == kind]
        for name in names:
            baseline = "computation/torch_fp8" if kind == "experts" else "computation/cublas"
            speeds = [(best_us(one, baseline) or math.nan) / one.us[f"computation/{name}"] for one in cases]
            rows.append((kind, name, str(len(speeds)), f"{statistics.geometric_mean(speeds):.2f}"))
    below = (source(lines(bench)).strip() for bench in (gemm, row, grouped))
    return "\n".join([table(rows), "", *dict.fromkeys(below)])


MAKERS: dict[str, Callable[..., str]] = {
    "fp8": fp8,
    "fp8_rows": fp8_rows,
    "fp8_kernels": fp8_kernels,
    "gains": gains,
    "cases": cases,
    "paper": paper,
    "concurrent": concurrent,
    "conccl": conccl,
    "dma": dma,
    "resident": resident,
    "training": training,
    "iso_measured": iso,
    "gemms": gemms,
    "products": products,
}
