"""What do benchmarks/tp.py's JSON lines say, by operator, mode and size?

Shares and ratios are geometric means over cases, so that none counts for more; the worst case stands beside them. `best` is
the fastest of the schedules that are named, `auto` what weft chose by itself. A method that is missing in a case is left out
of its mean, and the count says so.

    python benchmarks/summary.py benchmarks/results/tp.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from measure import geomean

Row = dict[str, Any]
WAYS = {"best": "overlapped_us", "auto": "auto_us"}
SIZES: dict[str, Callable[[int], bool]] = {
    "M >= 8192": lambda m: m >= 8192,
    "M = 2048": lambda m: m == 2048,
    "M = 512": lambda m: m == 512,
}


def rows_of(row: Row) -> int:
    """M, which ends a case's name."""
    return int(row["case"].rpartition("M=")[2])


def sentence(row: Row) -> str:
    """One case on one line, as it is measured."""
    nccl = " ".join(
        f"{way} {_us(us.get('communication_us'))}+mm={_us(us.get('sequential_us'))}" for way, us in row["nccl"].items()
    )
    candidates = " ".join(f"{spec}={us:.0f}" for spec, us in row["candidates"].items())
    host = " ".join(f"{method}={us:.0f}" for method, us in row.get("host_us", {}).items())
    return (
        f"{row['op']:21} {row['case']:18} {row['mode']:5} comp {row['computation_us']:.0f} seq {row['sequential_us']:.0f} "
        f"async {_us(row['peers'].get('async_tp'))} auto {_us(row['auto_us'])} ({row['chosen']}) "
        f"best {_us(row['overlapped_us'])} ({row['schedule']}, {_share(row)} of ideal) | {candidates} | NCCL {nccl}"
        + (f" | host {host}" if host else "")
    )


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _share(row: Row) -> str:
    return f"{row['ideal_us'] / row['overlapped_us']:.2f}" if row["overlapped_us"] else "-"


def summary(rows: Sequence[Row]) -> str:
    """All figures, a line each."""
    lines = []
    for op in dict.fromkeys(row["op"] for row in rows):
        for mode in ("graph", "eager"):
            some = [row for row in rows if (row["op"], row["mode"]) == (op, mode)]
            lines += [f"{op} {mode} {text}" for text in _sizes(some) + _worst(some)]
        lines += [f"{op} {text}" for text in _eager([row for row in rows if row["op"] == op])]
    return "\n".join(lines)


def _sizes(rows: Sequence[Row]) -> list[str]:
    """By size: share of the ideal, ratios to sequential and to async TP."""
    lines = []
    for size, holds in SIZES.items():
        some = [row for row in rows if holds(rows_of(row))]
        for way, key in WAYS.items():
            done = [row for row in some if row.get(key)]
            if done:
                peers = [row["peers"]["async_tp"] / row[key] for row in done if "async_tp" in row["peers"]]
                lines.append(
                    f"{size} {way}: {geomean([row['ideal_us'] / row[key] for row in done]):.3f} of the ideal, "
                    f"{geomean([row['sequential_us'] / row[key] for row in done]):.2f}x sequential, "
                    f"{geomean(peers):.2f}x async TP ({len(done)} of {len(some)} cases, {len(peers)} with async TP)"
                )
    return lines


def _worst(rows: Sequence[Row]) -> list[str]:
    """The case in which sequential is nearest, or ahead."""
    lines = []
    for way, key in WAYS.items():
        done = [row for row in rows if row.get(key)]
        if done:
            row = min(done, key=lambda row: row["sequential_us"] / row[key])
            what = row["schedule"] if way == "best" else row["chosen"]
            lines.append(f"worst {way}: {row['sequential_us'] / row[key]:.2f}x sequential, at {row['case']} ({what})")
    return lines


def _eager(rows: Sequence[Row]) -> list[str]:
    """Eager over graph for M >= 2048, and the host's time."""
    graph = {row["case"]: row for row in rows if row["mode"] == "graph"}
    eager = [row for row in rows if row["mode"] == "eager"]
    lines = []
    for way, key in WAYS.items():
        ratios = {
            row["case"]: row[key] / graph[row["case"]][key]
            for row in eager
            if rows_of(row) >= 2048 and row["case"] in graph and row.get(key) and graph[row["case"]].get(key)
        }
        if ratios:
            worst = max(ratios, key=ratios.__getitem__)
            mean = geomean(ratios.values())
            lines.append(f"eager over graph, M >= 2048, {way}: {mean:.3f}, at worst {ratios[worst]:.2f} at {worst}")
    for method in ("auto", "overlapped", "async_tp", "sequential"):
        hosts = [row["host_us"][method] for row in eager if method in row.get("host_us", {})]
        if hosts:
            lines.append(
                f"host time of an eager call, {method}: median {statistics.median(hosts):.0f} us, max {max(hosts):.0f}"
            )
    return lines


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("results", type=Path, help="JSON lines of benchmarks/tp.py")
    rows = [json.loads(line) for line in options.parse_args().results.read_text(encoding="utf-8").splitlines()]
    print(summary(rows))


if __name__ == "__main__":
    main()
