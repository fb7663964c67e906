"""Prints and writes for the command line: consoles, numbers, progress bars, and paths that are checked before work starts."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

STANDARD_OUTPUT = Path("-")
"""The value of --json that means standard output."""
PIPE_WIDTH = 160
"""The number of columns if the output is not a terminal. It is wide enough for every table to use one line a row."""


def console(*, quiet: bool = False) -> Console:
    """Return a console on standard output, or on nothing if `quiet`. Markup in a text is printed as it is."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False, quiet=quiet)


def table(*columns: str, left: int = 1) -> Table:
    """Return an empty table. Its first `left` columns are words. The others are numbers that stay on one line."""
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for index, name in enumerate(columns):
        made.add_column(name, justify="left" if index < left else "right", no_wrap=index >= left, overflow="fold")
    return made


def print_table(out: Console, made: Table) -> None:
    """Print a table. A table that is wider than the console is printed in parts, so that no number is cut. Each part repeats
    the first columns, which have words."""
    words = sum(column.justify == "left" for column in made.columns)
    for number, part in enumerate(_fitting(out, made, words)):
        if number:
            out.print()
        out.print(part)


def width_of(out: Console, made: Table) -> int:
    """Return the number of columns that a table takes if no line is folded."""
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
    """Return a table with some columns of another table."""
    made = table(*(str(column.header) for column in columns), left=sum(column.justify == "left" for column in columns))
    for cells in zip(*(column.cells for column in columns), strict=True):
        made.add_row(*cells)
    return made


def us(value: float) -> str:
    """Format microseconds with as many digits as are significant.

    >>> us(3.14159), us(31.4159), us(31415.9)
    ('3.14', '31.4', '31,416')
    """
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def share(value: float) -> str:
    return f"{value:.0%}"


def write_text(path: Path, text: str, option: str) -> None:
    """Write a file. Raises ValueError that names the option if that fails, for example because the disk is full."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror or error}; what it holds is not whole") from None


def require_json(path: Path | None) -> None:
    """Raise ValueError unless --json names standard output or a file that can be written."""
    if path is None or path == STANDARD_OUTPUT:
        return
    if str(path).startswith("-"):
        raise ValueError(f"--json is '{path}', which is an option; give --json a file, or - for standard output")
    require_file(path, "--json")


def write_json(path: Path, text: str) -> bool:
    """Write the text to the target of --json. Return whether that is standard output, which then must have no other text."""
    if path == STANDARD_OUTPUT:
        print(text, end="")
        return True
    write_text(path, text, "--json")
    return False


def as_json(data: object) -> str:
    """Format plain data as indented JSON."""
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def require_file(path: Path | None, option: str) -> None:
    """Open `path` for writing without changing it. Raises ValueError that names the option if that fails."""
    if path is None:
        return
    target = Path(os.path.realpath(path))  # replaces the target of a link, so that the link stays
    try:
        existed = target.exists()
        if existed and not target.is_file() and not target.is_dir():
            return  # for example a pipe: its reader would see the end of the data when this handle closes
        with target.open("ab"):
            pass
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}; name a file in a folder that exists and can be written") from None
    if not existed:
        target.unlink()


def require_distinct(paths: Mapping[str, Path | None]) -> None:
    """Raise ValueError if two of these arguments are the same file, because the later write would replace the earlier one."""
    seen: dict[str, str] = {}
    for name, path in paths.items():
        if path is not None and (other := seen.setdefault(os.path.realpath(path), name)) != name:
            raise ValueError(f"{other} and {name} are both {path}; name two files")


def page_path(folder: Path | None) -> Path | None:
    """Return the file that --report writes in a folder."""
    return folder and folder / "index.html"


def require_folder(path: Path | None, option: str) -> None:
    """Make the folder and test that files can be written in it. Raises ValueError that names the option if that fails."""
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}; name a folder that can be written") from None


Progress = Callable[[str, int, int], None]
"""Called with the next item, the items done and the total."""


@contextmanager
def progress_bar(first: str = "starting") -> Iterator[Progress]:
    """Draw a bar on standard error while the context runs. If standard error is not a terminal, nothing is drawn, so that an
    error is the only line there. first: the text before the first update.

    Only the caller's thread draws the bar, because rank processes may be forked at the same time.
    """
    from rich import progress as bars
    from rich.console import Console

    columns = (bars.TextColumn("{task.description}", markup=False), bars.BarColumn(), bars.TaskProgressColumn())
    console = Console(stderr=True)
    with bars.Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(first, total=None)

        def update(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total)
            bar.refresh()

        yield update
