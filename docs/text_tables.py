"""What the tables of generate.py are made of: cases and code of benchmarks/, columns of text, what was measured where."""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DAYS = ROOT / "docs" / "commit_days.json"
FIRST_COMMIT = "d98421c"
sys.path.append(str(ROOT))  # of scripts in docs, which are in no package

from benchmarks.rows import Row, read  # noqa: E402


def lines(bench: str) -> list[Row]:
    """All cases of benchmarks/results/BENCH.jsonl. Raises FileNotFoundError for a file that is not there."""
    return read(RESULTS / f"{bench}.jsonl")


def benchmark(name: str) -> ModuleType:
    """benchmarks.NAME, imported when it is needed: most of them need torch."""
    return importlib.import_module(f"benchmarks.{name}")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns set to the right, but the first."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    each = [[row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))] for row in rows]
    return "\n".join("  ".join(line).rstrip() for line in each)


def source(rows: Sequence[Row], mode: str = "") -> str:
    """What stands below a table of measured cases. Raises ValueError for cases of several machines, or versions."""
    where = dict.fromkeys(f"{row.machine}, {versions(row)}" for row in rows)
    if len(where) != 1:
        raise ValueError(f"cases of one table are of {' and of '.join(where)}; measure them on one, or draw a table of each")
    how = f", mode {mode}" if mode else ""
    return f"\n\n{next(iter(where))}, {_by(rows, 'dtype')}{how}, {commits(rows)}"


def versions(row: Row) -> str:
    return " ".join(f"{name} {row.versions[name]}" for name in ("torch", "cuda", "nccl"))


def commits(rows: Sequence[Row]) -> str:
    """Of which commits cases are, and of which days these are."""
    days = sorted({date_of(row.commit) for row in rows})
    return f"commit{'s' * (len({row.commit for row in rows}) > 1)} {_by(rows, 'commit')}, {' and '.join(days)}"


@functools.cache
def date_of(commit: str) -> str:
    """The day of a commit that HEAD follows from; without the history, of a commit in DAYS. Raises ValueError for others."""
    days: dict[str, str] = json.loads(DAYS.read_text(encoding="utf-8"))
    if not whole_history():
        if commit not in days:
            raise ValueError(
                f"the day of commit {commit!r} is not in {DAYS.name}, and the history is not here; fetch all of it"
            )
        return days[commit]
    try:
        git("merge-base", "--is-ancestor", commit, "HEAD")
    except ValueError:
        raise ValueError(f"commit {commit!r} is not in the history; measure again") from None
    return git("log", "-1", "--format=%as", commit)


@functools.cache
def whole_history() -> bool:
    """Whether this checkout has all commits: no copy without them, and no shallow clone."""
    try:
        git("merge-base", "--is-ancestor", FIRST_COMMIT, "HEAD")
    except (OSError, ValueError):
        return False
    return git("rev-parse", "--is-shallow-repository") == "false"


def keep_days() -> None:
    """Write the day of each commit that results are of, for checkouts that have no history."""
    commits = {row.commit for path in sorted(RESULTS.rglob("*.jsonl")) for row in read(path)}
    days = {commit: date_of(commit) for commit in sorted(commits)}
    DAYS.write_text(json.dumps(days, indent=1) + "\n", encoding="utf-8")


def git(*words: str) -> str:
    """What git prints. Raises ValueError where it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(done.stderr.strip() or f"git {words[0]} failed")
    return done.stdout.strip()


def _by(rows: Sequence[Row], field: str) -> str:
    """What cases have there: by operator where each operator's have the same, else with the number of cases."""
    ops: dict[str, set[str]] = {}
    for row in rows:
        ops.setdefault(getattr(row, field), set()).add(row.op)
    if len(ops) == 1:
        return next(iter(ops))
    apart = sum(map(len, ops.values())) == len(set().union(*ops.values()))
    count = Counter(getattr(row, field) for row in rows)
    of = {value: _named(some) if apart else f"{count[value]} cases" for value, some in ops.items()}
    return ", ".join(f"{value} ({what})" for value, what in of.items())


def _named(ops: set[str]) -> str:
    return ", ".join(sorted(ops)) if len(ops) < 3 else f"{len(ops)} operators"
