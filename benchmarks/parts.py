"""How a benchmark of several cases runs: one after the other, inside torchrun; what fails is left out, with its reason."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from benchmarks import measure
from benchmarks.measure import Failed, Job, append, release, say, start, stop
from benchmarks.rows import Row, sentence, summary

T = TypeVar("T")


def run_parts(
    parts: Sequence[T],
    measured: Callable[[T, argparse.Namespace], Iterable[Row]],
    arguments: argparse.Namespace,
    *,
    alarm_s: int = measure.ALARM_S,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Join the world, measure each part, say each row and append it to --json, and leave the world. after: each part, before
    memory is given back."""
    measure.ALARM_S = alarm_s
    start()
    jobs = [Job(name=str(part), run=partial(measured, part, arguments)) for part in parts]
    found, left_out = run_jobs(jobs, arguments, after=after)
    say(summary(found))
    stop(left_out)


def run_jobs(
    jobs: Iterable[Job],
    arguments: argparse.Namespace,
    *,
    missing: Mapping[str, str] | None = None,
    after: Callable[[], None] = lambda: None,
) -> tuple[list[Row], list[str]]:
    """As run_parts, in a world that has been joined: (all rows, the jobs that were left out, for `stop`). missing: why methods
    are, beside each row's own."""
    found, left_out = [], []
    for job in jobs:
        try:
            for row in job.run():
                row = replace(row, missing={**row.missing, **(missing or {})})
                append(arguments.json, row)
                say(sentence(row))
                found.append(row)
        except Failed as failed:
            say(f"LEFT OUT {job.name}: {failed}", file=sys.stderr)
            left_out.append(job.name)
        after()
        release()
    return found, left_out


def chosen(names: str, known: Sequence[str]) -> list[str]:
    """--only's parts, with commas. Raises ValueError for others than the known ones."""
    found = names.split(",")
    for name in found:
        if name not in known:
            raise ValueError(f"--only has {name!r}; use {', '.join(known)}")
    return found


def profiles(options: argparse.ArgumentParser) -> None:
    options.add_argument("--profile", type=Path, metavar="FOLDER", help="write traces of rank 0 there, and time nothing")


def folder_of(arguments: argparse.Namespace) -> Path | None:
    """--profile's folder on the rank that writes, None on the others."""
    folder: Path | None = arguments.profile
    return folder if dist.get_rank() == 0 else None
