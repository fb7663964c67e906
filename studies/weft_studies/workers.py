"""Runs independent simulations of a study in several processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from weft_studies.profile import Progress

MOST_WORKERS = 8
"""A study of a few seconds gains little from more processes, each of which has to be started."""


def count_workers() -> int:
    """Return the number of processes that a study uses: one for each CPU core that this process may use, up to MOST_WORKERS."""
    return min(MOST_WORKERS, len(os.sched_getaffinity(0)))


def results(tasks: Sequence[tuple[str, Callable[[], Any]]], progress: Progress, workers: int) -> Iterator[Any]:
    """Yield the result of each task in their order, with the progress by their names. Raises what a task raises.

    workers: the number of processes. With 1 the tasks run in this one; otherwise tasks and results must be picklable."""
    if workers == 1:
        for at, (name, task) in enumerate(tasks):
            progress(name, at, len(tasks))
            yield task()
    else:
        # Forked processes have the modules already. Ctrl-C reaches all of them, and only this one reports it.
        context = multiprocessing.get_context("fork")
        pool = ProcessPoolExecutor(workers, context, initializer=_leave_signals)
        try:
            futures = [pool.submit(task) for _, task in tasks]
            for at, ((name, _), future) in enumerate(zip(tasks, futures, strict=True)):
                progress(name, at, len(tasks))
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)
    progress("done", len(tasks), len(tasks))


def _leave_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
