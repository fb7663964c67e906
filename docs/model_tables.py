"""Tables of whole models for generate.py: what benchmarks/models.py, moe.py and dlrm_step.py have measured, and their traces.

models BENCH PART   of a file such as h200x2/models: forward, prefill or decode, by method
layers BENCH        of h200x2/moe or h200x2/dlrm_step
traces PART     docs/traces/PART_*.json.gz: times by kind, and a chart of the streams
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from text_tables import ROOT, benchmark, lines, source, table

from benchmarks.rows import Row, best, best_us, name_of

NAMES = {
    "sequential/torch": "torch",
    "peer/torch_compile": "compiled",
    "peer/async_tp": "async TP",
    "weft/eager": "weft",
    "weft/compiled": "weft, compiled",
    "weft/pass": "weft's pass",
    "weft/sequential": "torch, own kernels",
}
"""How the tables call methods; those of other programs of torch's have their own names."""
WEFT = ("weft/splits", "weft/auto")
WIDTH = 88


def _us(us: float | None) -> str:
    return "-" if us is None else f"{us:,.0f}"


def _alone(row: Row) -> tuple[str, str]:
    return _us(row.us.get("computation/torch")), _us(row.us.get("communication/default"))


def models(bench: str, part: str) -> str:
    """Times in us by method; over torch: the faster of torch's two over the fastest of weft's."""
    rows = [row for row in lines(bench) if row.op == part]
    used = [name for name in NAMES if any(name in row.us for row in rows)]
    heads = ("case", "mode", "computation", "NCCL", *(NAMES[name] for name in used), "over torch")
    return table([heads, *(_model(row, used) for row in rows)]) + source(rows)


def _model(row: Row, used: Sequence[str]) -> tuple[str, ...]:
    torch_us, weft = best_us(row, "sequential/torch", "peer/torch_compile"), best_us(row, "weft/")
    over = f"{torch_us / weft:.2f}x" if torch_us and weft else "-"
    return (row.case, row.mode, *_alone(row), *(_us(row.us.get(name)) for name in used), over)


def layers(bench: str) -> str:
    """Times in us; over: each other program's over weft's."""
    rows = [row for row in lines(bench) if best(row, *WEFT, but=())]
    kinds = ("sequential/", "weft/sequential")
    others = list(dict.fromkeys(name for row in rows for name in row.us if name.startswith(kinds)))
    titles = [NAMES.get(name, name_of(name)) for name in others]
    heads = ("case", "mode", "computation", "NCCL", *titles, "weft", *(f"over {title}" for title in titles))
    return table([heads, *(_layer(row, others) for row in rows)]) + source(rows)


def _layer(row: Row, others: Sequence[str]) -> tuple[str, ...]:
    times, weft = [row.us.get(name) for name in others], best_us(row, *WEFT, but=())
    over = (f"{us / weft:.2f}x" if us and weft else "-" for us in times)
    return (row.case, row.mode, *_alone(row), *map(_us, times), _us(weft), *over)


def traces(part: str) -> str:
    """torch's, then weft's, on one scale."""
    tracing = benchmark("traces")
    found = {
        name: tracing.parts(tracing.read(ROOT / "docs" / "traces" / f"{part}_{name}.json.gz")) for name in ("torch", "weft")
    }
    longest = max(each[-1].end_us for each in found.values())
    charts = (
        [*tracing.describe(name, each), *tracing.chart(each, width=WIDTH, length_us=longest)] for name, each in found.items()
    )
    return "\n\n".join("\n".join(each) for each in charts)


MAKERS: dict[str, Callable[..., str]] = {"models": models, "layers": layers, "traces": traces}
