"""Rows of benchmarks.baseline: how the runs of one figure become one row, and how two commits compare."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.rows import Row, read

CALL = "weft/call"
RUNS = ("runs", "p10", "p90", "algorithm")
"""Fields of `extra` with a value for each run."""
TOLERANCE = 0.03


def name_of(row: Row) -> str:
    return f"{row.extra['part']}: {row.op}, {row.case}"


def key(row: Row) -> tuple[str, ...]:
    """What rows of one figure have in common."""
    return name_of(row), row.commit, row.machine


def value_of(row: Row) -> float:
    """In us, or in bytes."""
    times = {**row.us, **row.host_us}
    return times[CALL] if times else float(row.extra["bytes"])


def merged(found: Sequence[Row]) -> Row:
    """One row of a figure's rows, in the order of their runs: its value is the median over all runs."""
    last = found[-1]
    runs = {what: [value for row in found for value in row.extra.get(what, [])] for what in RUNS if what in last.extra}
    middle = round(statistics.median(runs["runs"]), 2)
    nbytes = {"bytes": middle} if "bytes" in last.extra else {}
    us, host_us = (dict.fromkeys(times, middle) for times in (last.us, last.host_us))
    return replace(last, us=us, host_us=host_us, extra={**last.extra, **runs, **nbytes})


def sentence(row: Row) -> str:
    parts = [f"{what} " + " ".join(f"{value:.5g}" for value in row.extra[what]) for what in RUNS[:3] if what in row.extra]
    unit = "us" if row.us or row.host_us else "bytes"
    return f"{name_of(row)} | {value_of(row):.6g} {unit} | {', '.join(parts)}"


def compared(path: Path, base: str, new: str) -> bool:
    """Prints each figure of two commits: both values, their ratio run by run (median), the ratio of the floors, and how far the
    runs of the base differ. Whether no figure is worse by more than the tolerance in both ratios."""
    by_name: dict[str, dict[str, Row]] = {}
    for row in read(path):
        by_name.setdefault(name_of(row), {})[row.commit] = row
    worse = 0
    for name, rows in by_name.items():
        if base not in rows or new not in rows:
            print(f"{name:100} only of {', '.join(rows)}")
            continue
        before, after = rows[base], rows[new]
        ratio, low = ratios(before, after)
        control, is_worse = before.extra["control"], min(ratio, low) > 1 + TOLERANCE
        worse += is_worse and not control
        flag, runs = "control" if control else "WORSE" if is_worse else "", before.extra["runs"]
        values = f"{value_of(before):12.6g} {value_of(after):12.6g} {ratio:6.3f} {low:6.3f}"
        print(f"{name:100} {values}  runs {min(runs):.6g} to {max(runs):.6g} {flag}")
    print(f"{worse} of {len(by_name)} are worse by more than {100 * TOLERANCE:.0f}%")
    return not worse


def ratios(before: Row, after: Row) -> tuple[float, float]:
    """(the median of runs that followed each other, of the floors)."""
    runs, others = before.extra["runs"], after.extra["runs"]
    pairs = zip(runs, others, strict=True) if len(runs) == len(others) else [(value_of(before), value_of(after))]
    return statistics.median(_ratio(*pair) for pair in pairs), _ratio(floor(before), floor(after))


def floor(row: Row) -> float:
    """What a figure is where nothing interferes: of its runs the least, and of samples the least 10th percentile."""
    return float(min(row.extra.get("p10", row.extra["runs"])))


def _ratio(before: float, after: float) -> float:
    return after / before if before else 1.0 if not after else float("inf")
