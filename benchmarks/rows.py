"""One row for each case that was measured: what ran, where, and how long each method took. benchmarks/results has a row a line.

A method's name is KIND/NAME:

    sequential/TRANSPORT     the computation, then NCCL's collective: default (plain buffers), symmetric, copy_engine (see
                             nccl.py). Of lookups, layers and models: sequential/PROGRAM, which of torch's programs
    communication/TRANSPORT  NCCL's collective alone
    computation/NAME         the computation alone: by cublas, by a kernel, or by a program of torch's
    peer/NAME                what else a user has without weft: async_tp, torch_compile, torch one_shot, two_streams, stock
    weft/SPEC                weft by that schedule; `weft/auto` by the one that it chose itself (`chosen`)
    float8/SPEC              in a row of bfloat16: weft with operands in FP8
    quantised/NAME           in a row of FP8: with the conversion of `a` from bfloat16 in the time
    part/NAME                one of weft's calls that does a part of what the row's methods do

Every figure that follows from times is a function of a row, so that a row holds nothing twice.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
KINDS = ("sequential", "communication", "computation", "peer", "weft", "float8", "quantised", "part")
AUTO = "weft/auto"
DEFAULTS = (AUTO, "weft/splits", "weft/compiled", "weft/eager")
"""What a user gets who chooses nothing: the first of these that a row has. With row counts on the device there is one schedule;
of whole models it is weft's styles, compiled if they were."""
UNOVERLAPPED = ("weft/sequential", "weft/sequential_stores")
"""weft's programs that do one thing after the other."""
CASE = "case"
"""The key of `missing` where nothing could be measured."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case in one mode. problem: as weft.core.codec writes one; nothing for layers and models. us: each method's time for
    one call on the GPU, the median of the slowest rank. host_us: how long the call keeps the host busy. chosen: what
    `weft/auto` stands for. missing: why methods were left out, by method, or by `case` where all were. state: what was set up
    before. extra: what else a reader needs."""

    bench: str
    op: str
    case: str
    dtype: str
    world_size: int
    mode: str
    machine: str
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str = ""
    samples: int = 1
    problem: Mapping[str, Any] = field(default_factory=dict)
    us: Mapping[str, float] = field(default_factory=dict)
    host_us: Mapping[str, float] = field(default_factory=dict)
    chosen: str | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
    state: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (*self.us, *self.host_us):
            if name.partition("/")[0] not in KINDS:
                raise ValueError(f"method {name!r} begins with none of {', '.join(KINDS)}")


NEEDED = {one.name for one in dataclasses.fields(Row) if one.default is one.default_factory is dataclasses.MISSING}


def read(path: Path) -> list[Row]:
    """All rows of a file. Raises ValueError that names the file and the line that cannot be read."""
    return read_as(path, lambda row: row)


def read_as(path: Path, make: Callable[[Row], T]) -> list[T]:
    """What `make` makes of each row. A ValueError of it names the file and the line, too."""
    found = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found.append(make(of_text(text)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return found


def of_text(text: str) -> Row:
    """Raises TypeError for fields that a row does not have, or lacks, and ValueError for what is no row at all."""
    return Row(**json.loads(text))


def text_of(row: Row) -> str:
    """As it is written: what is empty is left out."""
    given = {name: getattr(row, name) for name in Row.__dataclass_fields__}
    return json.dumps({name: value for name, value in given.items() if name in NEEDED or value not in ("", {}, None)})


def append(path: Path | None, row: Row) -> None:
    if path:
        with path.open("a", encoding="utf-8") as file:
            file.write(text_of(row) + "\n")


def best(row: Row, *prefixes: str, but: Sequence[str] = (AUTO,)) -> tuple[str, float] | None:
    """The fastest method whose name begins with one of these, but for some: (its name, its time)."""
    some = [(us, name) for name, us in row.us.items() if name.startswith(prefixes) and name not in but]
    us, name = min(some, key=lambda one: one[0], default=(0.0, ""))
    return (name, us) if name else None


def best_us(row: Row, *prefixes: str, but: Sequence[str] = (AUTO,)) -> float | None:
    found = best(row, *prefixes, but=but)
    return found[1] if found else None


def fastest(row: Row) -> float | None:
    """The time of weft's fastest schedule."""
    return best_us(row, "weft/")


def ideal(row: Row) -> float:
    """The longer of the computation alone and the communication alone, each at its fastest. NaN where neither was measured."""
    return max((us for kind in ("communication/", "computation/") if (us := best_us(row, kind))), default=math.nan)


def default(row: Row) -> float | None:
    """The time of what a user gets who chooses nothing; None where it was not measured."""
    return next((row.us[name] for name in DEFAULTS if name in row.us), None)


def alternative(row: Row) -> tuple[str, float]:
    """The fastest program that a user has without weft. Raises ValueError where none was measured."""
    found = best(row, "sequential/", "peer/")
    if found is None:
        raise ValueError(f"{row.op} {row.case} has no program without weft")
    return found


def gain(row: Row) -> float:
    """How many times as fast as the fastest alternative weft's default is; NaN where that was not measured."""
    return alternative(row)[1] / (default(row) or math.nan)


def unoverlapped(row: Row) -> float | None:
    """The time of weft's fastest program that overlaps nothing."""
    return min((row.us[name] for name in UNOVERLAPPED if name in row.us), default=None)


def name_of(method: str) -> str:
    """Without the kind."""
    return method.partition("/")[2]


def geomean(values: Iterable[float]) -> float:
    """NaN for nothing."""
    found = list(values)
    return math.exp(statistics.fmean(map(math.log, found))) if found else math.nan


def sentence(row: Row) -> str:
    """A row on one line, as it is measured."""
    if not row.us:
        return f"{row.op} {row.case}: {row.missing.get(CASE, 'no times')}"
    times = " ".join(f"{name}={us:.0f}" if us >= 100 else f"{name}={us:.1f}" for name, us in row.us.items())
    found = [f"{row.op} {row.case} {row.mode}: {times}"]
    if row.chosen:
        found.append(f"auto is {row.chosen}")
    weft, other = default(row) or fastest(row), best(row, "sequential/", "peer/")
    if weft and other:
        found.append(f"{other[1] / weft:.2f}x as fast as {other[0]}")
    if weft and not math.isnan(ideal(row)):
        found.append(f"{ideal(row) / weft:.2f} of the ideal")
    if row.host_us:
        found.append("host " + " ".join(f"{name}={us:.0f}" for name, us in row.host_us.items()))
    return " | ".join(found)


def summary(found: Sequence[Row]) -> str:
    """By operator and mode, a line each: means over cases are geometric, and the worst case is named."""
    lines = []
    for op, mode in dict.fromkeys((row.op, row.mode) for row in found):
        some = [row for row in found if (row.op, row.mode) == (op, mode) and best(row, "sequential/", "peer/")]
        for what, weft in (("auto", default), ("best schedule", fastest)):
            pairs = [(row, us) for row in some if (us := weft(row))]
            if pairs:
                gains = {row.case: alternative(row)[1] / us for row, us in pairs}
                worst, shares = min(gains, key=gains.__getitem__), [ideal(row) / us for row, us in pairs]
                lines.append(
                    f"{op} {mode}, {what}: {geomean(gains.values()):.3f}x as fast as the fastest alternative "
                    f"({len(pairs)} of {len(some)} cases), at worst {gains[worst]:.3f}x ({worst}); "
                    f"{geomean(shares):.3f} of the ideal"
                )
    return "\n".join(lines)
