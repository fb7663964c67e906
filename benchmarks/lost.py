"""Where `auto` was slower than the fastest program without weft, and why.

Reads the rows (rows.py) of result files and measures nothing. Of each such case:

    no schedule       no schedule of weft was faster than the other program
    no candidate      one was, but it is not among the candidates that `auto` measures with the present ranking
    by chance         the schedule that `auto` took was as fast when it was measured by its name, in the same run: the two
                      measurements of one program differ by more than what was lost
    wrong choice      it was not, and a faster candidate was measured and not taken

    python -m benchmarks.lost h200x8/tp h100x4/tp
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rows import AUTO, Row, alternative, best, gain, name_of, read
from weft.core import codec, machine
from weft.core.problem import Problem
from weft.perf.ranking import best as ranked
from weft.runtime.choose import MEASURED, profile_named_in
from weft.schedules import synonym

RESULTS = Path(__file__).parent / "results"
LOST = 0.995
"""A gain below this is a loss: medians of repeated runs differ by half a percent at the least."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A case in which `auto` lost. fastest: weft's fastest schedule that was measured by name. again_us: the time of the chosen
    schedule when it was measured by name; None if it was not."""

    row: Row
    fastest: str
    fastest_us: float
    again_us: float | None
    candidates: tuple[str, ...]

    @property
    def why(self) -> str:
        _, other_us = alternative(self.row)
        if self.fastest_us >= other_us:
            return "no schedule"
        if self.fastest not in self.candidates:
            return "no candidate"
        return "by chance" if self.again_us is not None and self.again_us <= other_us else "wrong choice"

    def __str__(self) -> str:
        row = self.row
        other, other_us = alternative(row)
        again = "-" if self.again_us is None else f"{self.again_us:.0f}"
        return (
            f"{row.op} {row.case} {row.mode}: {gain(row):.2f}x of {name_of(other)} {other_us:.0f} us; took {row.chosen} "
            f"{row.us[AUTO]:.0f} us, by name {again}; fastest {self.fastest} {self.fastest_us:.0f} us: {self.why}"
        )


def losses(path: Path) -> Iterator[Loss]:
    """Yield the cases of a file in which `auto` lost."""
    for row in read(path):
        if AUTO not in row.us or not row.problem or gain(row) >= LOST:
            continue
        problem = codec.load(Problem, dict(row.problem))
        profile = profile_named_in(row.machine, row.world_size)
        fastest = best(row, "weft/")
        if profile is None or fastest is None:
            continue
        named = {name_of(name): us for name, us in row.us.items() if name.startswith("weft/") and name != AUTO}
        candidates = ("sequential", *ranked(problem, machine.load(profile), MEASURED))
        yield Loss(
            row=row,
            fastest=name_of(fastest[0]),
            fastest_us=fastest[1],
            again_us=named.get(row.chosen or ""),
            candidates=tuple(synonym(problem, spec, named) or spec for spec in candidates),
        )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("bench", nargs="+", help="result files without .jsonl, such as h200x8/tp")
    options.add_argument("--mode", default="graph", choices=("graph", "eager"), help="of calls (%(default)s)")
    given = options.parse_args()
    for bench in given.bench:
        found = [loss for loss in losses(RESULTS / f"{bench}.jsonl") if loss.row.mode == given.mode]
        print(f"{bench}: lost {len(found)}")
        for loss in found:
            print(f"  {loss}")


if __name__ == "__main__":
    main()
