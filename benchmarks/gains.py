"""What does a user gain by weft's default, over the fastest program that they have without weft, and from what?

Reads the JSON lines of a folder of benchmarks/results and measures nothing. A case's gain is the time of the fastest
alternative over the time of `schedule="auto"`, both from one interleaved run. The alternatives are all the programs without
weft that the benchmark timed: the sequential program with NCCL at its best, the same by torch.compile, and PyTorch's async TP.

The gain over the sequential program is attributed. Weft's own programs that do not overlap (its collectives, lookups and
choice of cuBLAS algorithm, one step after the other) are timed in the same run. `kernels` is sequential over the fastest of
these, `overlap` is that over `auto`; the two multiply to the gain over sequential. Means over cases are geometric.

    python benchmarks/gains.py benchmarks/results/h200x2
    python benchmarks/gains.py benchmarks/results/h200x2 --shapes eager
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import geomean

Row = Mapping[str, Any]
NAMES = {
    "async_tp": "async TP",
    "torch_compile": "torch.compile",
    "torch_compiled": "torch.compile",
    "two_streams": "two streams",
}
UNOVERLAPPED = ("sequential", "sequential_stores")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case in one mode, in us. weft: the default. unoverlapped: weft's fastest program that does not overlap, if timed.
    alternative: the name of the fastest alternative. chosen: the schedule that "auto" kept."""

    op: str
    name: str
    mode: str
    chosen: str
    weft: float
    sequential: float
    best: float
    alternative: str
    unoverlapped: float | None


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cases that one line of the table sums up. file: of the folder. holds: whether a row belongs to it."""

    name: str
    file: str
    holds: Callable[[Row], bool]
    times: Callable[[Row], Case]


def _case(row: Row, weft_us: float, alternatives: Mapping[str, float], unoverlapped_us: float | None) -> Case:
    best = min(alternatives, key=alternatives.__getitem__)
    return Case(
        op=row["op"],
        name=row["case"],
        mode=row["mode"],
        chosen=row.get("chosen") or row.get("schedule") or "-",
        weft=weft_us,
        sequential=row["sequential_us"],
        best=alternatives[best],
        alternative=best,
        unoverlapped=unoverlapped_us,
    )


def _unoverlapped(row: Row) -> float | None:
    return min((us for name, us in row["candidates"].items() if name in UNOVERLAPPED), default=None)


def _operator(row: Row) -> Case:
    """Of tp.py and all_to_all.py. With splits there is one schedule, which is the default."""
    others = {name: us for name, us in row["peers"].items() if name in ("async_tp", "torch_compile")}
    return _case(row, row["auto_us"] or row["overlapped_us"], {"sequential": row["sequential_us"]} | others, _unoverlapped(row))


def _few_rows(row: Row) -> Case:
    """Of all_reduce.py, whose peers are all torch.mm and an all-reduce."""
    named = {"default": "sequential", "symmetric": "sequential"}
    others: dict[str, float] = {}
    for name, us in row["peers"].items():
        short = named.get(name, name)
        others[short] = min(us, others.get(short, us))
    return _case({**row, "sequential_us": others["sequential"]}, row["auto_us"], others, _unoverlapped(row))


def _lookup(row: Row) -> Case:
    return _case(row, row["auto_us"], {"sequential": row["sequential_us"]}, row["peers"].get("weft_sequential"))


def _experts(row: Row) -> Case:
    """Of moe.py, where `torch, own kernels` is torch's exchange around weft's kernels for rows and activations."""
    others = {name: us for name, us in row["peers"].items() if name in ("torch", "torch known")}
    best = min(others, key=others.__getitem__)
    return _case(row, row["overlapped_us"], {"sequential": others[best]}, row["peers"].get("torch, own kernels"))


def _model(row: Row) -> Case:
    """Of models.py: weft's styles, compiled."""
    others = {name: us for name, us in row["candidates"].items() if not name.startswith("weft")}
    return _case(row, row["candidates"]["weft_compiled"], others, None)


def _concurrent(row: Row) -> Case:
    return _case(row, row["overlapped_us"], {"sequential": row["sequential_us"], **row["peers"]}, None)


def _rows(low: int, high: int, mark: str) -> Callable[[Row], bool]:
    return lambda row: low <= int(row["case"].rpartition(mark)[2]) <= high


def _of(op: str, holds: Callable[[Row], bool] = lambda row: True) -> Callable[[Row], bool]:
    return lambda row: row["op"] == op and holds(row)


_ANY = 1 << 40
GROUPS: tuple[Group, ...] = (
    *(
        Group(name=f"{op}, {size}", file="tp", holds=_of(op, _rows(*between, "M=")), times=_operator)
        for op in ("all_gather_matmul", "matmul_reduce_scatter")
        for size, between in {"M >= 8192": (8192, _ANY), "M <= 2048": (0, 2048)}.items()
    ),
    Group(name="matmul_all_reduce, 1 to 128 rows", file="all_reduce", holds=lambda row: True, times=_few_rows),
    Group(
        name="matmul with all_to_all, even", file="all_to_all", holds=lambda row: "experts" not in row["case"], times=_operator
    ),
    Group(
        name="matmul with all_to_all, splits", file="all_to_all", holds=lambda row: "experts" in row["case"], times=_operator
    ),
    Group(name="embedding_bag_all_to_all", file="embedding", holds=lambda row: True, times=_lookup),
    *(
        Group(
            name=f"Mixtral layer, {part}", file="moe", holds=lambda row, part=part: row["case"].endswith(part), times=_experts
        )
        for part in ("forward", "step")
    ),
    Group(name="Llama 3 70B layers, decode", file="models", holds=_of("decode"), times=_model),
    Group(name="Llama 3 70B layers, prefill", file="models", holds=_of("prefill"), times=_model),
    Group(name="matmuls and a collective at once", file="concurrent", holds=lambda row: True, times=_concurrent),
)


def cases(folder: Path, machine: str = "") -> dict[str, list[Case]]:
    """Each group's cases that the folder has. machine: only those of machines whose name begins so."""
    found: dict[str, list[Case]] = {}
    for group in GROUPS:
        path = folder / f"{group.file}.jsonl"
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
        some = (row for row in rows if group.holds(row) and row["machine"].startswith(machine))
        times = [group.times(row) for row in some if row.get("auto_us") or row["overlapped_us"]]
        if times:
            found[group.name] = times
    return found


def table(folder: Path, others: Mapping[str, Path] | None = None) -> list[tuple[str, ...]]:
    """The table, its head first. others: folders by the machine whose cases are taken, such as "4 x NVIDIA H200", each
    a column with the mean gain in graphs and called eagerly."""
    heads = ("operator, size", "cases", "fastest other", "graph", "eager", "worst", "kernels", "overlap")
    more = {name: cases(other, name) for name, other in (others or {}).items()}
    rows = [
        (*_line(name, some), *(" ".join(_means(found.get(name, ()))) for found in more.values()))
        for name, some in cases(folder).items()
    ]
    return [(*heads, *(name.replace("NVIDIA ", "") for name in more)), *rows]


def _means(some: Sequence[Case]) -> list[str]:
    """The mean gain in graphs, and called eagerly."""
    gains = ([case.best / case.weft for case in some if case.mode == mode] for mode in ("graph", "eager"))
    return [f"{geomean(found):.2f}" if found else "   -" for found in gains]


def _line(name: str, some: Sequence[Case]) -> tuple[str, ...]:
    count = max(sum(case.mode == mode for case in some) for mode in ("graph", "eager"))
    (alternative, _), *others = Counter(case.alternative for case in some).most_common()
    worst = min(case.best / case.weft for case in some)
    # Attributed in graphs, where the host's time is in nothing.
    graphs = [case for case in some if case.mode == "graph"] or list(some)
    known = [case for case in graphs if case.unoverlapped]
    kernels = geomean([case.sequential / case.unoverlapped for case in known if case.unoverlapped])
    overlap = geomean([case.unoverlapped / case.weft for case in known if case.unoverlapped])
    parts = (f"{kernels:.2f}", f"{overlap:.2f}") if known else ("-", "-")
    fastest = NAMES.get(alternative, alternative) + (" *" if others else "")
    return (name, str(count), fastest, *_means(some), f"{worst:.2f}", *parts)


def shapes(folder: Path, mode: str) -> list[tuple[str, ...]]:
    """Every case of a mode, times in us: what the means are of."""
    heads = ("operator, case", "fastest other", "its time", "auto", "schedule", "gain")
    rows = [
        (f"{case.op} {case.name}", NAMES.get(case.alternative, case.alternative), *_times(case))
        for some in cases(folder).values()
        for case in some
        if case.mode == mode
    ]
    return [heads, *rows]


def _times(case: Case) -> tuple[str, ...]:
    us = [f"{each:.0f}" if each >= 100 else f"{each:.1f}" for each in (case.best, case.weft)]
    return (*us, case.chosen, f"{case.best / case.weft:.2f}x")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path, help="of JSON lines, such as benchmarks/results/h200x2")
    options.add_argument("--shapes", choices=("graph", "eager"), help="every case of a mode in place of the means")
    given = options.parse_args()
    for line in shapes(given.folder, given.shapes) if given.shapes else table(given.folder):
        print("  ".join([line[0].ljust(38), *(cell.rjust(10) for cell in line[1:])]))


if __name__ == "__main__":
    main()
