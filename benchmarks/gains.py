"""What does a user gain by weft's default, over the fastest program that they have without weft, and from what?

Reads the rows (rows.py) of a folder of benchmarks/results and measures nothing. A case's gain is the time of the fastest
alternative over the time of `schedule="auto"`, both from one interleaved run. The alternatives are all the programs without
weft that the benchmark timed: the sequential program with NCCL at its best, the same by torch.compile, and PyTorch's async TP.

A part of the gain may be faster kernels. So weft's own programs that do not overlap (its collectives, lookups and choice of
cuBLAS algorithm, one step after the other) are timed in the same run. `overlap alone` is the fastest of these over `auto`.
Means over cases are geometric.

    python -m benchmarks.gains benchmarks/results/h200x2
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rows import (
    Row,
    alternative,
    default,
    geomean,
    read,
    unoverlapped,
)

NAMES = {
    "async_tp": "async TP",
    "torch_compile": "torch.compile",
    "two_streams": "two streams",
    "hand": "by hand",
    "compiled": "weft_compiled",
    "pass": "weft_pass",
}
"""How the tables call methods."""


UNOVERLAPPED = "weft's, then NCCL"
"""How the table calls weft's own computation followed by a collective."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cases that one line of the table sums up. file: of the folder. holds: whether a row belongs to it. unoverlapped: whether
    weft's own program without overlap is what the line compares with."""

    name: str
    file: str
    holds: Callable[[Row], bool] = lambda row: True
    unoverlapped: bool = False

    def other(self, row: Row) -> tuple[str, float]:
        """Return the name and the time of what the line compares with."""
        if not self.unoverlapped:
            return alternative_name(row), alternative(row)[1]
        return UNOVERLAPPED, unoverlapped(row) or math.nan

    def gain(self, row: Row) -> float:
        return self.other(row)[1] / (default(row) or math.nan)


def _rows(low: int, high: int, mark: str) -> Callable[[Row], bool]:
    return lambda row: low <= int(row.case.rpartition(mark)[2]) <= high


def _of(op: str, holds: Callable[[Row], bool] = lambda row: True) -> Callable[[Row], bool]:
    return lambda row: row.op == op and holds(row)


def _same_tensors(row: Row) -> bool:
    """Whether a warm call has the tensors of an earlier one."""
    return row.state == "same tensors"


def _training(models: tuple[str, ...], tokens: int) -> Callable[[Row], bool]:
    """Eager steps of models."""
    return lambda row: row.case.startswith(models) and f" {tokens} tokens" in row.case and row.extra.get("modes") == ["eager"]


_ANY = 1 << 40
GROUPS: tuple[Group, ...] = (
    *(
        Group(name=f"{op}, {size}", file="tp", holds=_of(op, _rows(*between, "M=")))
        for op in ("all_gather_matmul", "matmul_reduce_scatter")
        for size, between in {"M >= 8192": (8192, _ANY), "M <= 2048": (0, 2048)}.items()
    ),
    Group(name="matmul_all_reduce, 1 to 128 rows", file="all_reduce", holds=lambda row: row.mode == "graph"),
    Group(name="the same, called eagerly", file="host", holds=_of("matmul_all_reduce", _same_tensors)),
    *(
        Group(name=name, file="serving", holds=_of(name.partition(",")[0], _rows(*between, "M=")))
        for name, between in {
            "matmul_all_reduce_norm, 1 to 128 rows": (0, 128),
            "matmul_all_reduce_norm, M >= 2048": (2048, _ANY),
            "all_reduce_norm, 1 to 128 rows": (0, 128),
        }.items()
    ),
    Group(name="matmul with all_to_all, even", file="all_to_all", holds=lambda row: "experts" not in row.case),
    Group(name="matmul with all_to_all, splits", file="all_to_all", holds=lambda row: "experts" in row.case),
    Group(name="embedding_bag_all_to_all", file="embedding"),
    Group(name="the same, against weft's own lookup", file="embedding", unoverlapped=True),
    *(
        Group(name=f"Mixtral MoE layer, {what}", file="moe", holds=lambda row, part=part: row.case.endswith(part))
        for part, what in {"forward": "forward", "step": "with backward"}.items()
    ),
    Group(name="Llama 3 70B, 2 layers, decode", file="models", holds=_of("decode")),
    Group(name="Llama 3 70B, 2 layers, prefill", file="models", holds=_of("prefill")),
    *(
        Group(name=f"{name}, step, {tokens} tokens", file="training", holds=_training(models, tokens))
        for name, models, tokens in (
            ("Llama 3 8B", ("llama3-8b",), 8192),
            ("Llama 3 70B", ("llama3-70b",), 8192),
            ("Qwen 3 32B", ("qwen3-32b",), 8192),
            ("Mixtral 8x7B", ("mixtral-8x7b",), 8192),
            ("the three dense models", ("llama3-8b", "llama3-70b", "qwen3-32b"), 2048),
            ("Mixtral 8x7B", ("mixtral-8x7b",), 2048),
        )
    ),
    Group(name="matmuls and a collective at once", file="concurrent"),
)


def cases(folder: Path, machine: str = "") -> dict[Group, list[Row]]:
    """Each group's cases that the folder has. machine: only those of machines whose name begins so."""
    found: dict[Group, list[Row]] = {}
    for group in GROUPS:
        path = folder / f"{group.file}.jsonl"
        rows = [row for row in (read(path) if path.exists() else ()) if group.holds(row) and row.machine.startswith(machine)]
        if some := [row for row in rows if default(row)]:
            found[group] = some
    return found


def table(folder: Path, others: Mapping[str, Path] | None = None) -> list[tuple[str, ...]]:
    """The table, its two lines of heads first. others: folders by the machine whose cases are taken, such as "4 x NVIDIA H200",
    each two columns: the mean gain in graphs, and called eagerly."""
    above = ("", "", "fastest program", "gain in", "called", "least", "overlap")
    below = ("operator, size", "cases", "without weft", "graphs", "eagerly", "gain", "alone")
    more = {name: cases(other, name) for name, other in (others or {}).items()}
    for name in more:
        above, below = (*above, f"{name.replace('NVIDIA ', '')}:", ""), (*below, "graphs", "eagerly")
    rows = [
        (*_line(group, some), *(mean for found in more.values() for mean in _means(group, found.get(group, ()))))
        for group, some in cases(folder).items()
    ]
    return [above, below, *rows]


def _means(group: Group, some: Sequence[Row]) -> list[str]:
    """The mean gain in graphs, and called eagerly."""
    gains = ([group.gain(row) for row in some if row.mode == mode] for mode in ("graph", "eager"))
    return [f"{geomean(found):.2f}" if found else "-" for found in gains]


def alternative_name(row: Row) -> str:
    """The fastest alternative, by its usual name."""
    kind, _, name = alternative(row)[0].partition("/")
    return "sequential" if kind == "sequential" else NAMES.get(name, name)


def _line(group: Group, some: Sequence[Row]) -> tuple[str, ...]:
    count = max(sum(row.mode == mode for row in some) for mode in ("graph", "eager"))
    (fastest, _), *others = Counter(group.other(row)[0] for row in some).most_common()
    # In graphs, where the host's time is in nothing.
    known = [us / (default(row) or math.nan) for row in some if row.mode == "graph" and (us := unoverlapped(row))]
    alone = f"{geomean(known):.2f}" if known else "-"
    least = f"{min(map(group.gain, some)):.2f}"
    return (group.name, str(count), fastest + (" *" if others else ""), *_means(group, some), least, alone)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path, help="of rows, such as benchmarks/results/h200x2")
    given = options.parse_args()
    for line in table(given.folder):
        print("  ".join([line[0].ljust(38), *(cell.rjust(10) for cell in line[1:])]))


if __name__ == "__main__":
    main()
