"""The figures of benchmarks/serving.py, from its rows: some lines for each part.

    python -m benchmarks.serving_table benchmarks/results/h200x2/serving.jsonl

Ratios of each part, as geometric means over its cases, and the worst case:

    over the fastest program without weft   its time over that of one of weft's methods
    over weft/unfused                       the time of weft.matmul_all_reduce and a compiled norm over that of the fused call
    over matmul_all_reduce alone            the time of the fused call over that of weft.matmul_all_reduce
    errors                                  the error against float64 of the fused call over that of sequential/default: of the
                                            norm, and of the sum

Rows of one case that were measured in several runs are taken as one: the newest with times counts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import rows
from benchmarks.rows import AUTO, CASE, Row, alternative, best, geomean

BENCH = "serving"
REFERENCE = "sequential/default"
UNFUSED, SCATTERED, SHARDED = "weft/unfused", "weft/scattered", "weft/residual_sharded"
ALONE = "part/matmul_all_reduce"
PARTS = {
    "few": "few rows",
    "step": "a decoding step",
    "prefill": "prefill",
    "product": "few rows of a finished product",
}
"""By the name of --only, what a line says."""
Key = tuple[str, str, int]


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Ratios of some cases: the geometric mean, the worst one, and the case that has it. NaN of no cases."""

    mean: float
    worst: float
    case: str
    cases: int

    def __str__(self) -> str:
        return f"{self.mean:.3f}x, at worst {self.worst:.3f}x ({self.case}), {self.cases} cases"


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A part in one mode on some ranks. gains: of each of weft's methods over the fastest program without weft. over_alone,
    errors: the larger is worse; errors are of what a call returns, "norm" and "sum". left_out: of how many cases a method is
    missing for a reason, or the whole case is."""

    part: str
    mode: str
    world_size: int
    cases: int
    gains: Mapping[str, Ratio]
    over_unfused: Ratio
    over_alone: Ratio
    errors: Mapping[str, Ratio]
    left_out: Mapping[str, int]


def newest(found: Iterable[Row]) -> list[Row]:
    """One row of each case and mode: the newest, but for those without times, which count only where there is no other."""
    cases: dict[tuple[str, str, str, int], Row] = {}
    for row in found:
        key = row.op, row.case, row.mode, row.world_size
        if row.bench == BENCH and (row.us or not cases.get(key, row).us):
            cases[key] = row
    return list(cases.values())


def ratio(found: Mapping[str, float], *, larger_is_worse: bool = False) -> Ratio:
    """Sum up ratios by case, without NaN."""
    known = {case: value for case, value in found.items() if not math.isnan(value)}
    if not known:
        return Ratio(mean=math.nan, worst=math.nan, case="", cases=0)
    worst = (max if larger_is_worse else min)(known, key=known.__getitem__)
    return Ratio(mean=geomean(known.values()), worst=known[worst], case=worst, cases=len(known))


def gain(row: Row, method: str = AUTO) -> float:
    """How many times as fast as the fastest program without weft one of weft's methods is. NaN where one was not measured."""
    return alternative(row)[1] / row.us.get(method, math.nan) if best(row, "sequential/", "peer/") else math.nan


def quotient(row: Row, above: str, below: str) -> float:
    """The time of one method over that of another. NaN where one was not measured."""
    return row.us.get(above, math.nan) / row.us.get(below, math.nan)


def error_ratio(row: Row, what: str) -> float:
    """The error of the fused call over that of the unfused program: of the "norm" or of the "sum". NaN where one is unknown."""
    ours, theirs = (row.extra.get("error", {}).get(name, {}).get(what, math.nan) for name in (AUTO, REFERENCE))
    return ours / theirs if theirs else math.nan


def figures(found: Iterable[Row]) -> list[Figures]:
    """Those of all parts, modes and numbers of ranks, in the order of PARTS."""
    groups: dict[Key, list[Row]] = {}
    for row in newest(found):
        groups.setdefault((row.extra["part"], row.mode, row.world_size), []).append(row)
    return [_figures(key, groups[key]) for key in sorted(groups, key=lambda key: (*map([*PARTS].index, key[:1]), *key[1:]))]


def _figures(key: Key, group: list[Row]) -> Figures:
    part, mode, world_size = key
    methods = dict.fromkeys(name for row in group for name in row.us if name.startswith("weft/"))
    left_out: dict[str, int] = {}
    for row in group:
        for name, why in row.missing.items():
            text = f"{'whole cases' if name == CASE else name}: {why}"
            left_out[text] = left_out.get(text, 0) + 1
    return Figures(
        part=part,
        mode=mode,
        world_size=world_size,
        cases=len(group),
        gains={name: ratio({row.case: gain(row, name) for row in group}) for name in methods},
        over_unfused=ratio({row.case: quotient(row, UNFUSED, AUTO) for row in group}),
        over_alone=ratio({row.case: quotient(row, AUTO, ALONE) for row in group}, larger_is_worse=True),
        errors={
            what: ratio({row.case: error_ratio(row, what) for row in group}, larger_is_worse=True) for what in ("norm", "sum")
        },
        left_out=left_out,
    )


def summary(found: Iterable[Row]) -> str:
    """The figures as text, or a line that says that there is nothing."""
    return "\n".join(line for one in figures(found) for line in _lines(one)) or "serving: nothing was measured"


def _lines(one: Figures) -> list[str]:
    lines = [f"{PARTS[one.part]}, {one.world_size} ranks, {one.mode}, {one.cases} cases"]
    lines += [f"    {name} over the fastest program without weft: {gains}" for name, gains in one.gains.items() if gains.cases]
    if one.over_unfused.cases:
        lines.append(f"    {AUTO} over {UNFUSED}: {one.over_unfused}")
    if one.over_alone.cases:
        lines.append(f"    time of {AUTO} over that of matmul_all_reduce alone: {one.over_alone}")
    for what, errors in one.errors.items():
        if errors.cases:
            lines.append(f"    error of the {what} of {AUTO} over that of {REFERENCE}: {errors}")
    return lines + [f"    left out of {count} cases: {why}" for why, count in one.left_out.items()]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("files", type=Path, nargs="+", help="JSON lines of benchmarks.serving")
    print(summary(row for path in options.parse_args().files for row in rows.read(path)))


if __name__ == "__main__":
    main()
