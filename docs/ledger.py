"""Checks the ledger: from which results each published figure comes, and how much the code behind it has changed since.

    python docs/ledger.py            print the sources of all figures, and the errors; `make ledger` runs it
    python docs/ledger.py --short    print the errors only

Published figures are of two kinds. Generated tables (docs/generate.py) are made from result files, and
tests/project/test_docs.py makes them again; the ledger prints the commits and machines of the lines of these files. Each figure
in running text has an entry in docs/ledger.toml. A [[measured]] entry names the result lines that the figure is computed from,
and the ledger computes it again. A [[stated]] entry says what else the number is, such as a setting or a figure of a paper.

The ledger covers README.md and docs/. It does not cover docs/lab, the simulated studies (studies/README.md), CHANGELOG.md,
docstrings, and code in a text.

It is an error if
    a number with a unit of time, rate, share or ratio, or a phrase like "twice as fast", has no entry;
    an entry has wrong keys, its text occurs in its document never or twice, or its figures differ from what the lines give;
    the commit of a line is not in the history;
    the line is of a machine that we can use (MEASURABLE), and the code behind it has changed in more commits than the document
    allows (OLDEST);
    the line is of another machine, and the document does not give the day of the measurement.
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
OLDEST = {"README.md": 340, "docs/fp8.md": 340, "docs/peers.md": 340}
"""By document, how many commits may have changed the code behind a line since it was measured."""
OLDEST_ELSEWHERE = 600
MEASURABLE = re.compile(r"([1248] x )?NVIDIA (H100|H200)\b|2 cores")
"""Machines that we can use at present, as result lines name them."""
CHOOSING = ("weft/perf", "weft/planner")
"""The code that decides which schedules `auto` tries."""
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
    "training": MODELS,
    "moe": MODELS,
    "host": MODELS,
    "gemm": ("weft/kernels",),
    "gemm_fp8": ("weft/kernels",),
    "one_row_fp8": ("weft/kernels",),
    "products": ("weft/runtime/products.py",),
}
"""By benchmark, the code that its figures depend on; OPERATORS for all others."""
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
"""A number with a unit of time, rate, share or ratio, or such a phrase. `8192 x 4096` and `2 x H200` do not match."""
REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "geomean": statistics.geometric_mean,
    "mean": statistics.fmean,
    "least": min,
    "most": max,
    "only": lambda values: values[0] if len(values) == 1 else _raise_not_one(values),
}
RANGE = ("least", "most")


class LedgerError(ValueError):
    """A wrong figure or entry. Some functions raise it, others yield it."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The result lines of one file, commit and machine from which a figure of a document is computed.

    date: the day of the commit.
    changes: the number of later commits that have changed the code behind the lines.
    """

    document: str
    figure: str
    bench: str
    commit: str
    date: str
    machine: str
    baseline: str
    changes: int

    def __str__(self) -> str:
        where = f"{self.bench}.jsonl, {self.commit} of {self.date}, {self.machine}"
        against = f", against {self.baseline}" if self.baseline else ""
        return f"{self.document}: {self.figure}: {where}{against}; code changed in {self.changes} commits since"


def list_files(kind: str, words: Sequence[str]) -> list[str]:
    """Return the result files that a generated table is made from, without `.jsonl`. Other tables have none."""
    if kind == "gains":
        names = [*words, *(folder.name for folder in measured_tables.OTHERS.values())]
        files = sorted({group.file for group in benchmark("gains").GROUPS})
        return [f"{name}/{file}" for name in names for file in files if has_file(f"{name}/{file}")]
    if kind == "simulated":
        return sorted(benchmark("simulated").FILES)
    return [word for word in words if has_file(word)]


def has_file(bench: str) -> bool:
    """Return whether a benchmark has a result file."""
    return (RESULTS / f"{bench}.jsonl").is_file()


def _raise_not_one(values: Sequence[float]) -> float:
    raise LedgerError(f"{len(values)} lines match; name one, or a reduction")


@functools.cache
def count_changes(commit: str, bench: str) -> int:
    """Return in how many commits the code behind a line has changed since, or 0 if the history is not here."""
    if not text_tables.whole_history():
        return 0
    code = CODE.get(bench.rpartition("/")[2], OPERATORS)
    return int(text_tables.git("rev-list", "--count", f"{commit}..HEAD", "--", *code))


def make_sources(document: str, figure: str, bench: str, rows: Sequence[Row], baseline: str = "") -> Iterator[Source]:
    for commit, machine in dict.fromkeys((row.commit, row.machine) for row in rows):
        yield Source(
            document=document,
            figure=figure,
            bench=bench,
            commit=commit,
            date=date_of(commit),
            machine=machine,
            baseline=baseline,
            changes=count_changes(commit, bench),
        )


def find_fault(source: Source, text: str) -> LedgerError | None:
    """Return the error of a line that is too old, or of a machine that we cannot use if the text does not name its day."""
    if not MEASURABLE.match(source.machine):
        undated = f"{source}; nobody can measure there now, so the text has to say {source.date}"
        return LedgerError(undated) if source.date not in text else None
    oldest = OLDEST.get(source.document, OLDEST_ELSEWHERE)
    return LedgerError(f"{source}; {source.document} allows {oldest}") if source.changes > oldest else None


def check_tables(document: str, text: str) -> Iterator[Source | LedgerError]:
    """Yield the sources of a document's generated tables, and their errors."""
    for match in BLOCK.finditer(text):
        kind, words, _ = match.groups()
        for bench in list_files(kind, words.split()):
            yield from check_sources(partial(_find_sources_of_bench, document, f"`{kind} {words}`", bench), match[0])


def _find_sources_of_bench(document: str, figure: str, bench: str) -> Iterator[Source]:
    return make_sources(document, figure, bench, lines(bench))


def check_sources(find: Callable[[], Iterator[Source]], text: str) -> Iterator[Source | LedgerError]:
    """Yield the sources that `find` yields, or their errors. text: the text that contains the figure."""
    try:
        found = list(find())
    except ValueError as error:
        yield LedgerError(str(error))
        return
    for source in found:
        fault = find_fault(source, text)
        yield source if fault is None else fault


@functools.cache
def read_entries() -> Mapping[str, list[dict[str, Any]]]:
    return tomllib.loads(ENTRIES.read_text(encoding="utf-8"))


KEYS = {
    "measured": ({"document", "text", "bench", "where", "value", "baseline"}, {"over", "scale", "reduce"}),
    "stated": ({"document", "text", "because"}, set()),
}
"""By kind of entry, the keys that it must have, and those that it may have."""


def find_malformed_entries() -> Iterator[LedgerError]:
    """Yield an error for each entry of an unknown kind, or with wrong keys."""
    for kind, some in read_entries().items():
        needed, more = KEYS.get(kind, (set(), set()))
        for entry in some:
            if kind not in KEYS or not needed <= entry.keys() <= needed | more or "" in entry.values():
                yield LedgerError(f"an entry [[{kind}]] is not as {ENTRIES.name} says: {entry}")


def extract_prose(text: str) -> str:
    """Return a document on one line, without fenced blocks, and with `code` for inline code."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return " ".join(re.sub(r"`[^`\n]*`", "`code`", text).split())


def check_prose(document: str, text: str) -> Iterator[Source | LedgerError]:
    """Yield the sources of a document's running text, and the errors. A number without an entry is an error."""
    left = extract_prose(text)
    for kind, some in read_entries().items():
        for entry in some:
            if entry["document"] != document:
                continue
            words = " ".join(entry["text"].split())
            if left.count(words) != 1:
                yield LedgerError(f"{document}: an entry's words are there {left.count(words)} times: {words!r}")
                continue
            left = left.replace(words, "")
            if kind == "measured":
                yield from check_sources(partial(check_measured_entry, entry), text)
    for match in FIGURE.finditer(left):
        near = left[max(0, match.start() - 60) : match.end() + 40]
        yield LedgerError(f"{document}: {match[0]!r} is in no entry of docs/ledger.toml: ... {near} ...")


def check_measured_entry(entry: Mapping[str, Any]) -> Iterator[Source]:
    """Yield the sources of a [[measured]] entry. Raises LedgerError if they give other figures than its text."""
    document, words = entry["document"], entry["text"]
    found = [
        row for row in lines(entry["bench"]) if all(_matches(row, path, wanted) for path, wanted in entry["where"].items())
    ]
    if not found:
        raise LedgerError(f"{document}: no line of {entry['bench']}.jsonl is as {words!r} says")
    values = [_get_value(row, entry["value"]) / (_get_value(row, entry["over"]) if "over" in entry else 1) for row in found]
    reductions = RANGE if entry.get("reduce") == "range" else (entry.get("reduce", "only"),)
    given = [REDUCTIONS[reduction](values) * entry.get("scale", 1) for reduction in reductions]
    figures = re.findall(rf"(?<![\w.]){NUMBER}", words)
    if len(figures) != len(given) or not all(map(_rounds_to, given, figures)):
        raise LedgerError(f"{document}: the lines of {words!r} give {' and '.join(f'{value:g}' for value in given)}")
    yield from make_sources(document, words, entry["bench"], found, entry["baseline"])


def _matches(row: Row, path: str, wanted: object) -> bool:
    value = _get_value(row, path, number=False)
    return re.fullmatch(wanted, value) is not None if isinstance(wanted, str) and isinstance(value, str) else value == wanted


def _get_value(row: Row, path: str, *, number: bool = True) -> Any:
    """Return a field of a line by its dotted path. A path that ends with `.*` is the sum of all fields below it.

    The path `gain` is the time of the fastest alternative divided by that of weft's default.
    """
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
    """Return whether a number rounds to a figure in the text, with its number of decimals."""
    decimals = len(figure.partition(".")[2])
    return abs(value - float(figure.replace(",", ""))) <= 0.5 * 10**-decimals * (1 + 1e-9)


@functools.cache
def read_documents() -> dict[str, str]:
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def check_figures() -> Iterator[Source | LedgerError]:
    """Yield the sources of every published figure, and all errors."""
    if wrong := list(find_malformed_entries()):
        yield from wrong
        return
    for name, text in read_documents().items():
        yield from check_tables(name, text)
        yield from check_prose(name, text)
    for entry in (entry for some in read_entries().values() for entry in some):
        if entry["document"] not in read_documents():
            yield LedgerError(f"there is no document {entry['document']}, but an entry names it")


def main() -> None:
    found = list(check_figures())
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
