"""Printing and writing of the command line: consoles, numbers, and paths that are checked before the work starts."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

STANDARD_OUTPUT = Path("-")
"""As a value of --json."""
PIPE_WIDTH = 160
"""Columns when the output is no terminal: wide enough for every table to stay on one line a row."""


def console(*, quiet: bool = False) -> Console:
    """Standard output, or nothing if `quiet`. Text is printed as it is: nothing in a file or a name is taken for markup."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False, quiet=quiet)


def table(*columns: str, left: int = 1) -> Table:
    """An empty table; its first `left` columns are words, the others numbers that stay on one line."""
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for index, name in enumerate(columns):
        made.add_column(name, justify="left" if index < left else "right", no_wrap=index >= left, overflow="fold")
    return made


def print_table(out: Console, made: Table) -> None:
    """Print a table. One that is wider than the console comes in parts, each behind the first columns, those of words, so that
    no number is cut."""
    words = sum(column.justify == "left" for column in made.columns)
    for number, part in enumerate(_fitting(out, made, words)):
        if number:
            out.print()
        out.print(part)


def width_of(out: Console, made: Table) -> int:
    """Columns that a table takes when nothing is folded."""
    return out.measure(made, options=out.options.update(max_width=10_000)).maximum


def _fitting(out: Console, made: Table, keys: int) -> list[Table]:
    behind = made.columns[:keys]
    parts: list[list[Column]] = [[]]
    for column in made.columns[keys:]:
        if parts[-1] and width_of(out, _of([*behind, *parts[-1], column])) > out.width:
            parts.append([])
        parts[-1].append(column)
    return [made] if len(parts) == 1 else [_of([*behind, *part]) for part in parts]


def _of(columns: Sequence[Column]) -> Table:
    """A table of columns of another one."""
    made = table(*(str(column.header) for column in columns), left=sum(column.justify == "left" for column in columns))
    for cells in zip(*(column.cells for column in columns), strict=True):
        made.add_row(*cells)
    return made


def us(value: float) -> str:
    """Microseconds, with as many digits as mean something.

    >>> us(3.14159), us(31.4159), us(31415.9)
    ('3.14', '31.4', '31,416')
    """
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def share(value: float) -> str:
    return f"{value:.0%}"


def write_text(path: Path, text: str, option: str) -> None:
    """Write a file. Raises ValueError that names the option if that fails, on a disk that is full, say."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror or error}; what it holds is not whole") from None


def require_json(path: Path | None) -> None:
    """Raises ValueError unless --json names standard output or a file that can be written."""
    if path is None or path == STANDARD_OUTPUT:
        return
    if str(path).startswith("-"):
        raise ValueError(f"--json is '{path}', which is an option; give --json a file, or - for standard output")
    require_file(path, "--json")


def write_json(path: Path, text: str) -> bool:
    """Write the text where --json says. Returns whether that is standard output, on which nothing else may be printed then."""
    if path == STANDARD_OUTPUT:
        print(text, end="")
        return True
    write_text(path, text, "--json")
    return False


def as_json(data: object) -> str:
    """Plain data as indented JSON."""
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def require_file(path: Path | None, option: str) -> None:
    """Open `path` for writing and leave it as it was. Raises ValueError that names the option if that fails."""
    if path is None:
        return
    target = Path(os.path.realpath(path))  # a link stays one
    try:
        existed = target.exists()
        if existed and not target.is_file() and not target.is_dir():
            return  # a pipe, say: its reader would take the end of this for the end of all
        with target.open("ab"):
            pass
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}; name a file in a folder that exists and can be written") from None
    if not existed:
        target.unlink()


def require_distinct(paths: Mapping[str, Path | None]) -> None:
    """Raises ValueError if two arguments, by name, are one file: what is written last would be all that is left of both."""
    seen: dict[str, str] = {}
    for name, path in paths.items():
        if path is not None and (other := seen.setdefault(os.path.realpath(path), name)) != name:
            raise ValueError(f"{other} and {name} are both {path}; name two files")


def page_path(folder: Path | None) -> Path | None:
    """The file that --report writes in a folder."""
    return folder and folder / "index.html"


def require_folder(path: Path | None, option: str) -> None:
    """Make the folder and write in it. Raises ValueError that names the option if that fails."""
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}; name a folder that can be written") from None
