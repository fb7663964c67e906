"""Prints and writes for the command line: consoles, progress bars, lanes of spans. Checks paths before work starts."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from weft.core.span import Kind, Span
from weft.planner.words import us
from weft.report.tables import Cell, Judged, ReportTable

STANDARD_OUTPUT = Path("-")
"""The value of --json that means standard output."""
PIPE_WIDTH = 160
"""The number of columns if the output is not a terminal. It is wide enough for every table to use one line a row."""
LONG = 30
"""Longer texts are folded in a table that is too wide, to no less than this."""


def console(*, quiet: bool = False) -> Console:
    """Return a console on standard output, or on nothing if `quiet`. Markup in a text is printed as it is."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False, quiet=quiet)


def print_table(out: Console, table: ReportTable) -> None:
    """Print a table without its title. If it is too wide, headings are broken at spaces, columns move together, and long texts
    are folded. If it is still too wide, it is printed in parts, each with the first column, so that no number is cut."""
    every = range(1, len(table.columns))
    narrow = _widths(out, _drawn(out, table, every)).maximum > out.width
    parts: list[list[int]] = [[]]
    for at in every:
        if parts[-1] and _widths(out, _drawn(out, table, [*parts[-1], at], narrow=narrow)).minimum > out.width:
            parts.append([])
        parts[-1].append(at)
    for number, part in enumerate(parts):
        if number:
            out.print()
        out.print(_drawn(out, table, part, narrow=narrow))


def _widths(out: Console, drawn: RichTable) -> Measurement:
    return out.measure(drawn, options=out.options.update(max_width=10_000))


def _drawn(out: Console, table: ReportTable, columns: Iterable[int], *, narrow: bool = False) -> RichTable:
    """Return the first column and those with the given indices. Only a column with long words can be folded."""
    drawn = RichTable(box=SIMPLE_HEAD, padding=(0, 0 if narrow else 1, 0, 0), show_edge=False)
    shown = [(table.columns[at], [row[at] for row in table.rows]) for at in (0, *columns)]
    for at, (column, cells) in enumerate(shown):
        head = column.head.replace(" ", "\n") if narrow and not column.words else column.head
        width = max(map(len, (*head.split("\n"), *map(column.text, cells))))
        folds = column.words and width > (LONG if at else out.width // 2)
        justify: Literal["left", "right"] = "left" if column.words else "right"
        drawn.add_column(head, justify=justify, no_wrap=not folds, overflow="fold", min_width=LONG if folds else width)
    for row in range(len(table.rows)):
        drawn.add_row(*(Text(column.text(cells[row]), style=_style(cells[row])) for column, cells in shown))
    return drawn


def _style(cell: Cell) -> str:
    return "bold red" if isinstance(cell, Judged) and not cell.right else ""


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


MARKS: dict[Kind, tuple[str, str]] = {
    "wait": (".", "dim"),
    "signal": ("!", "magenta"),
    "collective": ("~", "yellow"),
    "message": ("^", "yellow"),
    "copy": ("=", "cyan"),
    "reduce": ("+", "blue"),
    "gemm": ("#", "green"),
    "call": ("$", "green"),
    "lookup": ("%", "green"),
}
"""The mark and colour of each kind. Kinds that are listed later are drawn over earlier ones."""


def gantt(spans: Iterable[Span], *, rank: int, width: int) -> Text:
    """Draw the lanes of `rank` on `width` columns, with a scale in us below, and a legend of the marks."""
    own = [span for span in spans if span.rank == rank]
    if not own:
        return Text("(no spans)")
    start, end = min(s.start_us for s in own), max(s.end_us for s in own)
    lanes = list(dict.fromkeys(span.lane for span in own))
    label = max(map(len, lanes)) + 2
    columns = max(10, width - label)
    text = Text(no_wrap=True, overflow="crop")
    for lane in lanes:
        text.append(f"{lane:<{label}}")
        text.append_text(_line([s for s in own if s.lane == lane], start, (end - start) or 1.0, columns)).append("\n")
    text.append(" " * label + "0" + f"{us(end - start)} us".rjust(columns - 1) + "\n", style="dim")
    kinds = {piece.kind for span in own for piece in span.pieces()}
    used = [kind for kind in reversed(MARKS) if kind in kinds]
    legend = [*(f"{MARKS[kind][0]} {kind}" for kind in used), "| a step starts"]
    text.append("\n".join(_folded(legend, indent=label, width=label + columns)), style="dim")
    return text


def _folded(entries: Sequence[str], *, indent: int, width: int) -> list[str]:
    """Arrange entries next to each other, on as many lines as they need."""
    lines = [" " * indent + entries[0]]
    for entry in entries[1:]:
        if len(lines[-1]) + 3 + len(entry) <= width:
            lines[-1] += "   " + entry
        else:
            lines.append(" " * indent + entry)
    return lines


def _line(spans: list[Span], start: float, length: float, columns: int) -> Text:
    """Draw one lane. A step is at least one column wide. From three columns on, its first column is a bar."""
    marks: list[tuple[str, str]] = [(" ", "")] * columns
    order, starts = list(MARKS), {step.start_us for step in spans}
    for span in sorted((piece for step in spans for piece in step.pieces()), key=lambda s: (order.index(s.kind), s.start_us)):
        low = min(int((span.start_us - start) / length * columns), columns - 1)
        high = max(low + 1, round((span.end_us - start) / length * columns))
        mark, style = MARKS[span.kind]
        for at in range(low, high):
            marks[at] = ("|" if at == low and high - low >= 3 and span.start_us in starts else mark, style)
    text = Text()
    for mark, style in marks:
        text.append(mark, style=style)
    return text
