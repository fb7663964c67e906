"""The figures of benchmarks/training.py, from its rows: a line for each case, then means over models.

    python -m benchmarks.training_table benchmarks/results/h200x2/training.jsonl

gain: the time of the fastest program without weft over that of the fastest of weft's. hidden: the share of the exposed
communication that weft's fastest program hides, (hand-written - weft) / (hand-written - computation alone), all of its mode.
memory: what torch's allocator hands out in a step of weft's fastest program, over that of the hand-written one of its mode.
predicted: predicted over measured time of the step of weft's fastest program, then of torch's styles and of the computation
alone, both of its mode.

Rows of one case that were measured in several runs, such as one a mode, are taken as one. The newest counts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import rows
from benchmarks.rows import Row, alternative, best, geomean, name_of

BENCH = "training"
WORST = "worst case"


@dataclass(frozen=True, kw_only=True)
class Mode:
    """What is compared within a mode, by the names of a row."""

    hand: str
    computation: str
    sequential: str
    wefts: tuple[str, ...]


MODES = {
    "eager": Mode(hand="peer/hand", computation="computation/hand", sequential="sequential/torch", wefts=("weft/eager",)),
    "compiled": Mode(
        hand="peer/hand_compiled",
        computation="computation/hand_compiled",
        sequential="peer/torch_compile",
        wefts=("weft/compiled", "weft/pass"),
    ),
}


def mode_of(method: str) -> Mode:
    """The mode of one of weft's methods."""
    return next(mode for mode in MODES.values() if method in mode.wefts)


def merged(found: Iterable[Row]) -> list[Row]:
    """The rows of each case as one."""
    cases: dict[tuple[str, int], Row] = {}
    for row in found:
        if row.bench != BENCH:
            continue
        key = row.case, row.world_size
        old = cases.get(key, row)
        extra = {**old.extra, **row.extra}
        extra |= {name: {**old.extra.get(name, {}), **row.extra.get(name, {})} for name in ("step_bytes", "hidden")}
        extra["prediction"] = {**(old.extra.get("prediction") or {}), **(row.extra.get("prediction") or {})} or None
        cases[key] = replace(row, us={**old.us, **row.us}, missing={**old.missing, **row.missing}, extra=extra)
    return list(cases.values())


def exposed_and_hidden(row: Row, method: str) -> tuple[float, float] | None:
    """(us that the hand-written program exposes, us of them that one of weft's methods hides); None where one is missing."""
    mode = mode_of(method)
    if any(name not in row.us for name in (mode.hand, mode.computation, method)):
        return None
    hand = row.us[mode.hand]
    return hand - row.us[mode.computation], hand - row.us[method]


def hidden(row: Row, method: str) -> float:
    """The share of the exposed communication that one of weft's methods hides. NaN where nothing is exposed, or unknown."""
    return share([exposed_and_hidden(row, method)])


def share(found: Iterable[tuple[float, float] | None]) -> float:
    """What is hidden over what is exposed, of sums over cases.

    >>> share([(200.0, 150.0), (100.0, 60.0), None])
    0.7
    """
    pairs = [pair for pair in found if pair]
    exposed = sum(pair[0] for pair in pairs)
    return sum(pair[1] for pair in pairs) / exposed if exposed > 0 else math.nan


def memory(row: Row, method: str) -> float:
    """A method's bytes of a step over those of the hand-written one. NaN where one was not measured."""
    nbytes, hand = row.extra.get("step_bytes", {}), mode_of(method).hand if method.startswith("weft/") else MODES["eager"].hand
    ours, theirs = nbytes.get(method), nbytes.get(hand)
    return ours / theirs if ours and theirs else math.nan


def predicted(row: Row, method: str) -> tuple[float, float, float]:
    """Predicted over measured time: of one of weft's methods, and of the sequential program and the computation alone of its
    mode. NaN where weft has no prediction, or nothing was measured."""
    mode, name = mode_of(method), next(name for name, mode in MODES.items() if method in mode.wefts)
    found = (row.extra.get("prediction") or {}).get(name, {})
    measured = {"weft_us": method, "sequential_us": mode.sequential, "computation_us": mode.computation}
    weft, sequential, computation = (found.get(us, math.nan) / row.us.get(one, math.nan) for us, one in measured.items())
    return weft, sequential, computation


@dataclass(frozen=True, kw_only=True)
class Result:
    """A case: weft's fastest method against what a user has without weft."""

    row: Row
    weft: str
    other: str

    @property
    def gain(self) -> float:
        return self.row.us[self.other] / self.row.us[self.weft]

    def cells(self) -> tuple[str, ...]:
        us = self.row.us
        times = f"{us[self.weft]:,.0f}", name_of(self.weft), f"{us[self.other]:,.0f}", name_of(self.other)
        shares = hidden(self.row, self.weft), memory(self.row, self.weft)
        return self.row.case, *times, f"{self.gain:.3f}x", *map(_text, (*shares, *predicted(self.row, self.weft)))


def _text(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def results(found: Iterable[Row]) -> list[Result]:
    """Of each case in which both were measured."""
    made = []
    for row in merged(found):
        weft, others = best(row, "weft/", but=()), best(row, "sequential/", "peer/")
        if weft and others:
            made.append(Result(row=row, weft=weft[0], other=alternative(row)[0]))
    return made


HEADS = ("case", "weft us", "weft's", "other us", "fastest other", "gain", "hidden", "memory", "predicted", "torch's", "alone")


def summary(found: Iterable[Row]) -> str:
    """The table and the means, or a line that says that there is nothing."""
    made = results(found)
    if not made:
        return "training: no case has times of weft and of a program without weft"
    return "\n".join([*_aligned([HEADS, *(one.cells() for one in made)]), "", *means(made)])


def means(made: Sequence[Result]) -> list[str]:
    """A line for each number of tokens, without and with checkpointing, over its models."""
    lines = []
    for tokens, checkpointing in dict.fromkeys(map(_group, made)):
        some = [one for one in made if _group(one) == (tokens, checkpointing)]
        worst = min(some, key=lambda one: one.gain)
        shares = share(exposed_and_hidden(one.row, one.weft) for one in some)
        ratios = [ratio for one in some if not math.isnan(ratio := memory(one.row, one.weft))]
        lines.append(
            f"{tokens} tokens{', checkpointing' if checkpointing else ''}, {len(some)} models: "
            f"{geomean(one.gain for one in some):.3f}x as fast as the fastest other (geometric mean), "
            f"{WORST} {worst.gain:.3f}x ({worst.row.extra['model']}); hidden {_text(shares)} of the exposed communication; "
            f"memory over hand-written {_text(geomean(ratios))}, at most {_text(max(ratios, default=math.nan))}"
        )
    return lines


def _group(one: Result) -> tuple[int, bool]:
    return one.row.extra["tokens"], one.row.extra["checkpointing"]


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("files", type=Path, nargs="+", help="JSON lines of benchmarks.training")
    print(summary(row for path in options.parse_args().files for row in rows.read(path)))


if __name__ == "__main__":
    main()
