"""Tables of whole models for generate.py: what benchmarks/models.py, moe.py and dlrm_step.py have measured, and their traces.

models PART     benchmarks/results/models.jsonl: training, prefill or decode, by method
layers BENCH    moe.jsonl or dlrm_step.jsonl there
traces PART     docs/traces/PART_*.json.gz: times by kind, and a chart of the streams
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from text_tables import ROOT, benchmark, lines, source, table

NAMES = {
    "torch": "torch",
    "torch_compiled": "compiled",
    "async_tp": "async TP",
    "weft": "weft",
    "weft_compiled": "weft, compiled",
    "weft_pass": "weft's pass",
}
WIDTH = 88


def _us(us: float | None) -> str:
    return "-" if us is None else f"{us:,.0f}"


def models(part: str) -> str:
    """Times in us by method; over torch: the faster of torch's two over the fastest of weft's."""
    rows = [row for row in lines("models") if row["op"] == part]
    used = [name for name in NAMES if any(name in row["candidates"] for row in rows)]
    heads = ("case", "mode", "computation", "NCCL", *(NAMES[name] for name in used), "over torch")
    return table([heads, *(_model(row, used) for row in rows)]) + source(rows)


def _model(row: dict[str, Any], used: Sequence[str]) -> tuple[str, ...]:
    times = (_us(row["candidates"].get(name)) for name in used)
    over = f"{row['sequential_us'] / row['overlapped_us']:.2f}x" if row["overlapped_us"] else "-"
    return (row["case"], row["mode"], _us(row["computation_us"]), _us(row["communication_us"]), *times, over)


def layers(bench: str) -> str:
    """Times in us; over: each other program's over weft's."""
    rows = [row for row in lines(bench) if "peers" in row]
    others = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    heads = ("case", "mode", "computation", "NCCL", *others, "weft", *(f"over {name}" for name in others))
    return table([heads, *(_layer(row, others) for row in rows)]) + source(rows)


def _layer(row: dict[str, Any], others: Sequence[str]) -> tuple[str, ...]:
    times = [row["peers"].get(name) for name in others]
    alone = _us(row.get("computation_us")), _us(row.get("communication_us"))
    over = (f"{us / row['overlapped_us']:.2f}x" if us else "-" for us in times)
    return (row["case"], row["mode"], *alone, *map(_us, times), _us(row["overlapped_us"]), *over)


def traces(part: str) -> str:
    """torch's, then weft's, on one scale."""
    tracing = benchmark("traces")
    found = {
        name: tracing.parts(tracing.read(ROOT / "docs" / "traces" / f"{part}_{name}.json.gz")) for name in ("torch", "weft")
    }
    longest = max(each[-1].end_us for each in found.values())
    told = ([*tracing.told(name, each), *tracing.chart(each, width=WIDTH, length_us=longest)] for name, each in found.items())
    return "\n\n".join("\n".join(each) for each in told)


MAKERS: dict[str, Callable[[str], str]] = {"models": models, "layers": layers, "traces": traces}
