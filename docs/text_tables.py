"""What the tables of generate.py are made of: cases and code of benchmarks/, columns of text, what was measured where."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"


def lines(bench: str) -> list[dict[str, Any]]:
    """All cases of benchmarks/results/BENCH.jsonl."""
    text = (RESULTS / f"{bench}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def benchmark(name: str) -> ModuleType:
    """benchmarks/NAME.py, which is in no package."""
    sys.path.append(str(BENCHMARKS))
    return importlib.import_module(name)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns set to the right, but the first."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    each = [[row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))] for row in rows]
    return "\n".join("  ".join(line).rstrip() for line in each)


def source(rows: Sequence[dict[str, Any]], mode: str = "") -> str:
    """What stands below a table of measured cases."""
    row = rows[0]
    versions = " ".join(f"{name} {row['versions'][name]}" for name in ("torch", "cuda", "nccl"))
    how = f", mode {mode}" if mode else ""
    return f"\n\n{row['machine']}, {versions}, {row['dtype']}{how}, {commits(rows)}"


def commits(rows: Sequence[dict[str, Any]]) -> str:
    """Of which commits cases are: by operator where each operator's are of one, else with the number of cases."""
    ops: dict[str, set[str]] = {}
    for row in rows:
        ops.setdefault(row["commit"], set()).add(row["op"])
    if len(ops) == 1:
        return f"commit {rows[0]['commit']}"
    apart = sum(map(len, ops.values())) == len(set().union(*ops.values()))
    count = Counter(row["commit"] for row in rows)
    of = {commit: ", ".join(sorted(some)) if apart else f"{count[commit]} cases" for commit, some in ops.items()}
    return f"commits {', '.join(f'{commit} ({what})' for commit, what in of.items())}"
