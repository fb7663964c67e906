"""Draws the progress bars of commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
