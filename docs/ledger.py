"""Prints the ledger: where each published figure is from, and how much of the code behind it has changed since.

    python docs/ledger.py        all entries, or what is wrong with them; `make ledger` runs it
    python docs/ledger.py --short    what is wrong alone

Published figures are of two kinds. Generated tables (docs/generate.py) are made from result files, and
tests/project/test_docs.py makes them again; the ledger says of which commits and machines the lines of these files are. Figures
in running text stand in docs/ledger.toml, an entry for each passage: a [[measured]] entry names the result lines that the
figure is computed from, or the generated table that it repeats, and the ledger computes it again; a [[stated]] entry says what
else the number is, such as a setting or a paper's figure.

It covers README.md and docs/, but not the notes of single days in docs/lab, and not the text of simulated studies (SIMULATED).
CHANGELOG.md and docstrings are not covered, nor is code within a text.

It is an error if
    a number with a unit of time, rate, share or ratio is in no entry, nor "twice as fast" and the like;
    an entry has other keys than it may have, its words are not in its document or are there twice, or its figures are not what
    the lines give;
    a line's commit is not in the history;
    the code behind a line has changed in more commits since than the document allows (OLDEST), where the line is of a machine
    that we can use (MEASURABLE);
    a line is of another machine, and the document does not say on which day it was measured.
"""

from __future__ import annotations

import functools
import operator
import re
import statistics
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import measured_tables
import text_tables
from text_tables import RESULTS, ROOT, benchmark, date_of, lines

from benchmarks.rows import Row, gain

ENTRIES = Path(__file__).with_name("ledger.toml")
OLDEST = {"README.md": 80, "docs/fp8.md": 80, "docs/peers.md": 80}
"""By document: commits that may have changed the code behind a line since it was measured."""
OLDEST_ELSEWHERE = 340
MEASURABLE = re.compile(r"([1248] x )?NVIDIA (H100|H200)\b|2 cores")
"""Machines that we can use at present, as result lines name them."""
SIMULATED = re.compile(r"^## (T3|FiCCO|DLRM|ISO)\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
"""Chapters of docs/studies.md: the figures of their text are a paper's, or are in the tables there, which
tests/project/test_docs.py makes again."""

CHOOSING = ("weft/perf", "weft/planner")
"""What says which schedules `auto` tries."""
OPERATORS = ("weft/kernels", "weft/ops", "weft/runtime", "weft/schedules", "weft/comm", *CHOOSING)
CONCURRENT = ("weft/overlap", "weft/runtime", "weft/comm")
MODELS = (*OPERATORS, "weft/models")
CODE: dict[str, Sequence[str]] = {
    "concurrent": CONCURRENT,
    "conccl": CONCURRENT,
    "data_parallel": CONCURRENT,
    "resource_aware": CONCURRENT,
    "dlrm_step": MODELS,
    "models": MODELS,
    "moe": MODELS,
    "gemm": ("weft/kernels",),
    "gemm_fp8": ("weft/kernels",),
    "one_row_fp8": ("weft/kernels",),
    "products": ("weft/runtime/products.py",),
}
"""By benchmark, the code that its figures depend on; OPERATORS for all others."""
GAINS = ("tp", "all_reduce", "all_to_all", "embedding", "moe", "models", "concurrent")
BLOCK = re.compile(r"^```text (\w+) ([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = r"\d[\d,]*(?:\.\d+)?"
_UNITS = (
    *(
        "us",
        "µs",
        "ms",
        "ns",
        "s",
        "sec",
        "min",
        "h",
        "microseconds?",
        "milliseconds?",
        "seconds?",
        "minutes?",
        "hours?",
        "days?",
    ),
    *("[GT]B/s", "Gbit/s", "TFLOP/s", "TFLOPS", "tokens/s", "rows/s", "x", "×", "-fold", "%", "percent", "(?:-| )?times"),
)
_WORDS = "twice|half|(?:two|three|four|five|six|seven|eight|nine|ten|twenty|a hundred) times"
FIGURE = re.compile(
    rf"(?<![\w./,])(?:[-–]?{NUMBER}(?:(?:\sto\s|\sand\s|\sor\s|,\s|-|–){NUMBER})*\s?(?:{'|'.join(_UNITS)})"
    r"(?!\w|\s\d|(?<=x)\s(?:NVIDIA|H100|H200|A100|B200|MI\d)\d?)"
    rf"|(?:{_WORDS}) as (?:fast|slow|long)\b|factor of {NUMBER}|speed-up of {NUMBER})"
)
"""A number with a unit of time, rate, share or ratio, or such words. `8192 x 4096` and `2 x H200` are none."""
REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "geomean": statistics.geometric_mean,
    "mean": statistics.fmean,
    "least": min,
    "most": max,
    "only": lambda values: values[0] if len(values) == 1 else _not_one(values),
}
RANGE = ("least", "most")


class LedgerError(ValueError):
    """An error about one figure. It is yielded as well as raised."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Result lines of one file, commit and machine that a document's figure is made of. touched: commits that have changed the
    code behind them since. date: of the commit."""

    document: str
    figure: str
    bench: str
    commit: str
    date: str
    machine: str
    baseline: str
    touched: int

    def __str__(self) -> str:
        where = f"{self.bench}.jsonl, {self.commit} of {self.date}, {self.machine}"
        against = f", against {self.baseline}" if self.baseline else ""
        return f"{self.document}: {self.figure}: {where}{against}; code changed in {self.touched} commits since"


def files_of(kind: str, words: Sequence[str]) -> list[str]:
    """The result files that a generated table is made of, without `.jsonl`; none for a table of other things."""
    if kind == "gains":
        names = [*words, *(folder.name for folder in measured_tables.OTHERS.values())]
        return [f"{name}/{bench}" for name in names for bench in GAINS if is_file(f"{name}/{bench}")]
    if kind == "simulated":
        return sorted(benchmark("simulated").FILES)
    return [word for word in words if is_file(word)]


def is_file(bench: str) -> bool:
    return (RESULTS / f"{bench}.jsonl").is_file()


def _not_one(values: Sequence[float]) -> float:
    raise LedgerError(f"{len(values)} lines match; name one, or a reduction")


@functools.cache
def touched(commit: str, bench: str) -> int:
    """In how many commits the code behind a line has changed since; 0 where there is no history to ask."""
    if not text_tables.whole_history():
        return 0
    code = CODE.get(bench.rpartition("/")[2], OPERATORS)
    return int(text_tables.git("rev-list", "--count", f"{commit}..HEAD", "--", *code))


def sources(document: str, figure: str, bench: str, rows: Sequence[Row], baseline: str = "") -> Iterator[Source]:
    for commit, machine in dict.fromkeys((row.commit, row.machine) for row in rows):
        yield Source(
            document=document,
            figure=figure,
            bench=bench,
            commit=commit,
            date=date_of(commit),
            machine=machine,
            baseline=baseline,
            touched=touched(commit, bench),
        )


def fault_of(source: Source, text: str) -> LedgerError | None:
    """What is wrong with a line that is too old, or of a machine that we cannot use and of no day that the text names."""
    if not MEASURABLE.match(source.machine):
        undated = f"{source}; nobody can measure there now, so the text has to say {source.date}"
        return LedgerError(undated) if source.date not in text else None
    oldest = OLDEST.get(source.document, OLDEST_ELSEWHERE)
    return LedgerError(f"{source}; {source.document} allows {oldest}") if source.touched > oldest else None


def of_tables(document: str, text: str) -> Iterator[Source | LedgerError]:
    """The lines behind a document's generated tables."""
    for match in BLOCK.finditer(text):
        kind, words, _ = match.groups()
        for bench in files_of(kind, words.split()):
            yield from checked(partial(_of_bench, document, f"`{kind} {words}`", bench), match[0])


def _of_bench(document: str, figure: str, bench: str) -> Iterator[Source]:
    return sources(document, figure, bench, lines(bench))


def checked(find: Callable[[], Iterator[Source]], text: str) -> Iterator[Source | LedgerError]:
    """What `find` gives, or what is wrong with it. text: where the figure stands."""
    try:
        found = list(find())
    except ValueError as error:
        yield LedgerError(str(error))
        return
    for source in found:
        fault = fault_of(source, text)
        yield source if fault is None else fault


@functools.cache
def entries() -> Mapping[str, list[dict[str, Any]]]:
    return tomllib.loads(ENTRIES.read_text(encoding="utf-8"))


KEYS = {
    "measured": ({"document", "text", "bench", "where", "value", "baseline"}, {"over", "scale", "reduce"}),
    "stated": ({"document", "text", "because"}, set()),
}
"""By kind of entry, the keys that it must have, and may have."""


def malformed() -> Iterator[LedgerError]:
    """Entries that are of no kind, or have other keys than those of their kind."""
    for kind, some in entries().items():
        needed, more = KEYS.get(kind, (set(), set()))
        for entry in some:
            if kind not in KEYS or not needed <= entry.keys() <= needed | more or "" in entry.values():
                yield LedgerError(f"an entry [[{kind}]] is not as {ENTRIES.name} says: {entry}")


def prose(text: str) -> str:
    """A document without its fenced blocks and code, on as many lines, and with single spaces."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return " ".join(re.sub(r"`[^`\n]*`", "`code`", text).split())


def of_prose(document: str, text: str) -> Iterator[Source | LedgerError]:
    """The lines behind a document's running text. Numbers that are in no entry are errors."""
    left = prose(SIMULATED.sub("", text))
    for kind, some in entries().items():
        for entry in some:
            if entry["document"] != document:
                continue
            words = " ".join(entry["text"].split())
            if left.count(words) != 1:
                yield LedgerError(f"{document}: an entry's words are there {left.count(words)} times: {words!r}")
                continue
            left = left.replace(words, "")
            if kind == "measured":
                yield from checked(partial(measured, entry), text)
    for match in FIGURE.finditer(left):
        near = left[max(0, match.start() - 60) : match.end() + 40]
        yield LedgerError(f"{document}: {match[0]!r} is in no entry of docs/ledger.toml: ... {near} ...")


def measured(entry: Mapping[str, Any]) -> Iterator[Source]:
    """The lines of an entry. Raises LedgerError where they give another figure than its words have."""
    document, words = entry["document"], entry["text"]
    found = [row for row in lines(entry["bench"]) if all(_holds(row, path, wanted) for path, wanted in entry["where"].items())]
    if not found:
        raise LedgerError(f"{document}: no line of {entry['bench']}.jsonl is as {words!r} says")
    values = [_value(row, entry["value"]) / (_value(row, entry["over"]) if "over" in entry else 1) for row in found]
    reductions = RANGE if entry.get("reduce") == "range" else (entry.get("reduce", "only"),)
    given = [REDUCTIONS[reduction](values) * entry.get("scale", 1) for reduction in reductions]
    figures = re.findall(rf"(?<![\w.]){NUMBER}", words)
    if len(figures) != len(given) or not all(map(_rounds_to, given, figures)):
        raise LedgerError(f"{document}: the lines of {words!r} give {' and '.join(f'{value:g}' for value in given)}")
    yield from sources(document, words, entry["bench"], found, entry["baseline"])


def _holds(row: Row, path: str, wanted: object) -> bool:
    value = _value(row, path, number=False)
    return re.fullmatch(wanted, value) is not None if isinstance(wanted, str) and isinstance(value, str) else value == wanted


def _value(row: Row, path: str, *, number: bool = True) -> Any:
    """A field of a line, by its path with dots. A path that ends with `.*` is the sum of all below it; `gain` is how many times
    as fast as the fastest alternative weft's default is."""
    if path == "gain":
        return gain(row)
    keys = path.removesuffix(".*").split(".")
    try:
        value = functools.reduce(operator.getitem, keys, vars(row))
    except (KeyError, TypeError):
        raise LedgerError(f"a line of {row.bench} has no {path}") from None
    if path.endswith(".*"):
        value = sum(value.values())
    if number and not isinstance(value, (int, float)):
        raise LedgerError(f"{path} of a line of {row.bench} is {value!r}, no number")
    return value


def _rounds_to(value: float, figure: str) -> bool:
    """Whether a number is what the text says, in as many decimals as that has."""
    decimals = len(figure.partition(".")[2])
    return abs(value - float(figure.replace(",", ""))) <= 0.5 * 10**-decimals * (1 + 1e-9)


@functools.cache
def documents() -> dict[str, str]:
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def ledger() -> Iterator[Source | LedgerError]:
    """Every published figure's lines, or what is wrong."""
    if wrong := list(malformed()):
        yield from wrong
        return
    for name, text in documents().items():
        yield from of_tables(name, text)
        yield from of_prose(name, text)
    for entry in (entry for some in entries().values() for entry in some):
        if entry["document"] not in documents():
            yield LedgerError(f"there is no document {entry['document']}, which an entry is about")


def main() -> None:
    found = list(ledger())
    wrong = [one for one in found if isinstance(one, LedgerError)]
    if "--short" not in sys.argv[1:]:
        for one in sorted({str(one) for one in found if isinstance(one, Source)}):
            print(one)
    for error in wrong:
        print(f"wrong: {error}", file=sys.stderr)
    if not text_tables.whole_history():
        print("The history is not here: commits and ages are not checked. Fetch all of it.", file=sys.stderr)
    print(f"{len(found) - len(wrong)} sources, {len(wrong)} wrong")
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
