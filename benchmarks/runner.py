"""This module runs benchmarks under torchrun, one case after another. A case that fails is left out, and its reason is printed.

`run` measures a Bench, which is a list of cases (Comparison). Each case makes the methods that are timed in turns. A case
whose rows are already in the --json file is left out, so that a run that was cut off can be started again. Benchmarks that are
no Bench call `run_parts`, which has fewer options.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

import weft
from benchmarks import measure, rows
from benchmarks.measure import (
    ALONE,
    AnyProblem,
    Check,
    Failed,
    Job,
    Work,
    append,
    check_of,
    each_mode,
    parser,
    release,
    say,
    start,
    stop,
    together,
    trial,
)
from benchmarks.nccl import Transport, transports
from benchmarks.rows import AUTO, Row, sentence, summary
from weft import schedules
from weft.core.problem import Op

T = TypeVar("T")
NEEDED = ("sequential/default", "communication/default", "computation/cublas")
UNCOMPARED = (*ALONE, "quantised/", "float8/")
"""Methods whose results are not compared, because they give none, or because they round to FP8."""


def make_sequential_check(works: Mapping[str, Work]) -> Check:
    """Return a check that compares with the result of `sequential/default`."""
    expected: Any = together("sequential/default", works["sequential/default"])
    return check_of(expected.float(), uncompared=UNCOMPARED)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A Comparison is one case of a benchmark.

    methods: from NCCL's transports and the specs of schedules, makes what is timed, by the names of rows.py.
    specs: the schedules that are tried by default; "auto" is always tried, and is the last.
    repeat: the number of calls in a sample.
    windows: the bytes of a shard and of the whole, for which NCCL's registered buffers must have room.
    needed: the methods without which the case is left out.
    make_check: makes the check of the results. It calls the method that it compares with.
    """

    bench: str
    op: Op
    name: str
    methods: Callable[[Sequence[Transport], Sequence[str]], Mapping[str, Work]]
    specs: Sequence[str] = ()
    repeat: int
    dtype: str = "bfloat16"
    problem: AnyProblem | None = None
    windows: tuple[int, int] = (0, 0)
    needed: Sequence[str] = NEEDED
    make_check: Callable[[Mapping[str, Work]], Check] = make_sequential_check
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.op} {self.name}"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A Bench answers one question.

    cases: from a world size and a dtype, makes the cases.
    nccl: the transports of NCCL that are tried in addition to the default one.
    dtypes: what --dtype takes; the first one is the default.
    environment: variables that are set before weft starts, unless the user has set them.
    """

    name: str
    question: str
    cases: Callable[[int, str], Sequence[Comparison]]
    rounds: int = 9
    alarm_s: int = 40
    nccl: Sequence[str] = ()
    dtypes: Sequence[str] = ("bfloat16",)
    environment: Mapping[str, str] = field(default_factory=dict)
    summary: Callable[[Sequence[Row]], str] = summary


def run(bench: Bench, argv: Sequence[str] | None = None) -> None:
    """Measure the cases of a benchmark. Print each row, and append it to --json. Runs on every rank of torchrun."""
    given = make_parser(bench).parse_args(argv)
    for name, value in bench.environment.items():
        os.environ.setdefault(name, value)
    cases = select_cases(bench, given)
    measure.ALARM_S = bench.alarm_s
    start()
    is_present = make_presence_check(given)
    left = [case for case in cases if not is_present(case)]
    if present := len(cases) - len(left):
        say(f"{present} of {len(cases)} cases are in {given.json}")
    shard_bytes, whole_bytes = (max((case.windows[at] for case in left), default=0) for at in range(2))
    found, missing = transports(given.nccl if left else "", shard_bytes, whole_bytes)
    jobs = [Job(name=str(case), run=partial(measure_case, case, found, given)) for case in left]
    lines, left_out = run_jobs(jobs, given, missing=missing)
    say(f"{bench.name}:\n{bench.summary(lines)}" if lines else f"{bench.name}: nothing was measured")
    for transport in found:
        transport.close()
    stop(left_out)


def make_parser(bench: Bench) -> argparse.ArgumentParser:
    """Make the parser of a benchmark's options."""
    made = parser(bench.question, rounds=bench.rounds)
    made.prog = f"benchmarks.run {bench.name}"
    made.add_argument("--cases", default="", help="only cases whose operator and name contain one of these, with commas")
    made.add_argument("--ops", default="", help="only these operators, with commas")
    made.add_argument(
        "--specs", type=parse_specs, default=[], help="schedules to try with auto, each where its operator has it"
    )
    made.set_defaults(nccl="", dtype=bench.dtypes[0])
    if bench.nccl:
        made.add_argument("--nccl", default=",".join(bench.nccl), help="NCCL's other transports (%(default)s)")
    if bench.dtypes[1:]:
        made.add_argument("--dtype", choices=bench.dtypes, help="of the operands (%(default)s)")
    return made


def parse_specs(text: str) -> list[str]:
    """Return the schedules of --specs without "auto", which is always tried."""
    found = [spec for spec in text.split(",") if spec not in ("", "auto")]
    try:
        for spec in found:
            schedules.parse(spec)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return found


def select_cases(bench: Bench, given: argparse.Namespace) -> list[Comparison]:
    """Return the cases that --cases and --ops select. Raises ValueError if there is none."""
    known = bench.cases(int(os.environ["WORLD_SIZE"]), given.dtype)
    words, ops = given.cases.split(","), given.ops.split(",") if given.ops else [case.op for case in known]
    found = [case for case in known if case.op in ops and any(word in str(case) for word in words)]
    if not found:
        names = ", ".join(map(str, known))
        raise ValueError(f"--cases {given.cases!r} --ops {given.ops!r}: no such case of {bench.name}; there are {names}")
    return found


class NamedCase(Protocol):
    """What the rows of a case have in common."""

    @property
    def bench(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...


def make_presence_check(given: argparse.Namespace) -> Callable[[NamedCase], bool]:
    """Return a function that says whether --json has a case's rows of this commit in all modes of --modes."""
    world_size = int(os.environ["WORLD_SIZE"])
    known = rows.read(given.json) if given.json else []
    there = {(row.bench, row.op, row.case, row.dtype, row.mode) for row in known if is_of_commit(row, world_size, given.commit)}
    modes = given.modes.split(",")
    return lambda case: all((case.bench, case.op, case.name, case.dtype, mode) in there for mode in modes)


def is_of_commit(row: Row, world_size: int, commit: str) -> bool:
    """Return whether a row has times of this commit with this number of ranks."""
    return (row.world_size, row.commit) == (world_size, commit) and bool(row.us)


def select_specs(case: Comparison, asked: Sequence[str]) -> list[str]:
    """Return the schedules to try: those of --specs, or else the case's own, that the operator has; and "auto"."""
    names = set(schedules.names(case.op))
    if case.dtype.startswith("float8"):
        names = {name for name in names if schedules.FAMILIES[name].float8}
    return [*(spec for spec in asked or case.specs if spec.partition(":")[0] in names), "auto"]


def measure_case(case: Comparison, found: Sequence[Transport], given: argparse.Namespace) -> list[Row]:
    """Measure one case in every mode. Raises Failed."""
    torch.manual_seed(dist.get_rank())
    works = case.methods(found, select_specs(case, given.specs))
    times, missing = trial(
        works,
        given.modes.split(","),
        check=case.make_check(works),
        needed=case.needed,
        rounds=given.rounds,
        repeat=case.repeat,
    )
    return each_mode(
        times,
        bench=case.bench,
        op=case.op,
        case=case.name,
        problem=case.problem,
        dtype=case.dtype,
        chosen=find_auto_choice(case) if AUTO in works and AUTO not in missing else None,
        missing=missing,
        extra=case.extra,
        arguments=given,
    )


def find_auto_choice(case: Comparison) -> str | None:
    """Return the schedule that weft/auto ran: the newest choice for operands like those of the case.

    There may also be choices for operands in FP8, or for an `a` that weft quantises.
    """
    float8 = case.dtype.startswith("float8")
    scalings = [(choice.problem.scaling, choice.spec) for choice in weft.choices()[::-1]]
    return next((spec for s, spec in scalings if bool(s) == float8 and not (s and s.quantises)), None)


def run_parts(
    parts: Sequence[T],
    measure_part: Callable[[T, argparse.Namespace], Iterable[Row]],
    arguments: argparse.Namespace,
    *,
    alarm_s: int = measure.ALARM_S,
    after: Callable[[], None] = lambda: None,
    device: str = "cuda",
    summarise: Callable[[Sequence[Row]], str] = summary,
) -> None:
    """Measure each part. Print each row, and append it to --json. Runs on every rank of torchrun.

    after: a function that is called after each part, before its memory is freed. summarise: what is printed of all rows.
    """
    measure.ALARM_S = alarm_s
    start(device)
    jobs = [Job(name=str(part), run=partial(measure_part, part, arguments)) for part in parts]
    found, left_out = run_jobs(jobs, arguments, after=after)
    say(summarise(found))
    stop(left_out)


def run_jobs(
    jobs: Iterable[Job],
    arguments: argparse.Namespace,
    *,
    missing: Mapping[str, str] | None = None,
    after: Callable[[], None] = lambda: None,
) -> tuple[list[Row], list[str]]:
    """Run jobs as run_parts does, after `start`. Return all rows, and the names of the jobs that were left out.

    missing: reasons why methods are missing, which are added to those of each row.
    """
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


def parse_only(names: str, known: Sequence[str]) -> list[str]:
    """Return the names in --only, which are separated by commas. Raises ValueError for an unknown one."""
    found = names.split(",")
    for name in found:
        if name not in known:
            raise ValueError(f"--only has {name!r}; use {', '.join(known)}")
    return found


def add_profile_option(options: argparse.ArgumentParser) -> None:
    options.add_argument("--profile", type=Path, metavar="FOLDER", help="write traces of rank 0 there, and time nothing")


def get_profile_folder(arguments: argparse.Namespace) -> Path | None:
    """Return the folder of --profile on rank 0, which writes the traces, and None on other ranks."""
    folder: Path | None = arguments.profile
    return folder if dist.get_rank() == 0 else None
