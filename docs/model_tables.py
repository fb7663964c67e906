"""Tables of whole models for generate.py: what benchmarks/models.py, moe.py and dlrm_step.py have measured, and their traces.

models PART     benchmarks/results/models.jsonl: training, prefill or decode, by method
layers BENCH    moe.jsonl or dlrm_step.jsonl there
traces PART     docs/traces/PART_*.json.gz: times by kind, and a chart of the streams
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NAMES = {
    "torch": "torch",
    "torch_compiled": "compiled",
    "async_tp": "async TP",
    "weft": "weft",
    "weft_compiled": "weft, compiled",
    "weft_pass": "weft's pass",
}
WIDTH = 88


def lines(bench: str) -> list[dict[str, Any]]:
    text = (ROOT / "benchmarks" / "results" / f"{bench}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns set to the right, but the first."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    each = [[row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))] for row in rows]
    return "\n".join("  ".join(line).rstrip() for line in each)


def _below(row: dict[str, Any]) -> str:
    versions = " ".join(f"{name} {row['versions'][name]}" for name in ("torch", "cuda", "nccl"))
    return f"\n\n{row['machine']}, {versions}, {row['dtype']}, commit {row['commit']}"


def _us(us: float | None) -> str:
    return "-" if us is None else f"{us:,.0f}"


def models(part: str) -> str:
    """Times in us by method; over torch: the faster of torch's two over the fastest of weft's."""
    rows = [row for row in lines("models") if row["op"] == part]
    used = [name for name in NAMES if any(name in row["candidates"] for row in rows)]
    heads = ("case", "mode", "computation", "NCCL", *(NAMES[name] for name in used), "over torch")
    return table([heads, *(_model(row, used) for row in rows)]) + _below(rows[0])


def _model(row: dict[str, Any], used: Sequence[str]) -> tuple[str, ...]:
    times = (_us(row["candidates"].get(name)) for name in used)
    over = f"{row['sequential_us'] / row['overlapped_us']:.2f}x" if row["overlapped_us"] else "-"
    return (row["case"], row["mode"], _us(row["computation_us"]), _us(row["communication_us"]), *times, over)


def layers(bench: str) -> str:
    """Times in us; over: each other program's over weft's."""
    rows = [row for row in lines(bench) if "peers" in row]
    others = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    heads = ("case", "mode", "computation", "NCCL", *others, "weft", *(f"over {name}" for name in others))
    return table([heads, *(_layer(row, others) for row in rows)]) + _below(rows[0])


def _layer(row: dict[str, Any], others: Sequence[str]) -> tuple[str, ...]:
    times = [row["peers"].get(name) for name in others]
    alone = _us(row.get("computation_us")), _us(row.get("communication_us"))
    over = (f"{us / row['overlapped_us']:.2f}x" if us else "-" for us in times)
    return (row["case"], row["mode"], *alone, *map(_us, times), _us(row["overlapped_us"]), *over)


def traces(part: str) -> str:
    """torch's, then weft's, on one scale."""
    sys.path.append(str(ROOT / "benchmarks"))
    tracing = importlib.import_module("traces")
    found = {
        name: tracing.parts(tracing.read(ROOT / "docs" / "traces" / f"{part}_{name}.json.gz")) for name in ("torch", "weft")
    }
    longest = max(each[-1].end_us for each in found.values())
    told = ([*tracing.told(name, each), *tracing.chart(each, width=WIDTH, length_us=longest)] for name, each in found.items())
    return "\n\n".join("\n".join(each) for each in told)


MAKERS: dict[str, Callable[[str], str]] = {"models": models, "layers": layers, "traces": traces}
