"""How much do the fused operators gain? All figures of all-reduce, lookups, all-to-all, and the paper's ranges.

    torchrun --nproc-per-node 4 -m benchmarks.fused --json benchmarks/results/fused.jsonl
    torchrun --nproc-per-node 4 -m benchmarks.fused --only paper --json benchmarks/results/paper.jsonl
    torchrun --nproc-per-node 4 -m benchmarks.fused --only all_reduce --cases batch=64,batch=128 --modes graph --specs two_shot

Each part is a module that says what it asks, its cases and its baselines: all_reduce.py, embedding.py, all_to_all.py,
ulysses.py, paper.py.
Protocol: measure.py's. All parts in both modes take minutes; `--only` and `--cases` choose.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from benchmarks import all_reduce, all_to_all, embedding, measure, paper, ulysses
from benchmarks.collectives import REGISTERED, Way, ways
from benchmarks.measure import Job, parser, start, stop
from benchmarks.parts import run_jobs
from benchmarks.rows import Row, summary
from weft import schedules

ROUNDS, ALARM_S = 9, 40
MakeJobs = Callable[[Sequence[Way], argparse.Namespace], list[Job]]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One question. jobs: its cases. room: NCCL's ways beside the default, and bytes of the buffers that they register."""

    jobs: MakeJobs
    summary: Callable[[Sequence[Row]], str] = summary
    room: tuple[Sequence[str], int] = ((), 0)


def specs_of(arguments: argparse.Namespace, usual: Sequence[str], op: str) -> list[str]:
    """The schedules that are asked for and that an operator has."""
    asked = arguments.specs.split(",") if arguments.specs else [*usual, "auto"]
    return [spec for spec in asked if spec == "auto" or spec.partition(":")[0] in schedules.names(op)]  # type: ignore[arg-type]


def _all_reduces(found: Sequence[Way], arguments: argparse.Namespace) -> list[Job]:
    cases = [(*case, batch) for case in all_reduce.CASES for batch in all_reduce.BATCHES]
    return all_reduce.jobs(cases, specs_of(arguments, all_reduce.SPECS, "matmul_all_reduce"), found, arguments)


def _lookups(_: Sequence[Way], arguments: argparse.Namespace) -> list[Job]:
    return embedding.jobs(embedding.CASES, specs_of(arguments, embedding.SPECS, "embedding_bag_all_to_all"), arguments)


def _all_to_alls(found: Sequence[Way], arguments: argparse.Namespace) -> list[Job]:
    cases = (*all_to_all.EVEN, *all_to_all.RAGGED)
    made = [all_to_all.jobs(op, cases, specs_of(arguments, us, op), found, arguments) for op, us in all_to_all.SPECS.items()]
    return [job for pair in zip(*made, strict=True) for job in pair]


def _ulysses(_: Sequence[Way], arguments: argparse.Namespace) -> list[Job]:
    return [job for op, us in ulysses.SPECS.items() for job in ulysses.jobs(op, specs_of(arguments, us, op), arguments)]


def _of_the_paper(found: Sequence[Way], arguments: argparse.Namespace) -> list[Job]:
    return paper.jobs(found, dist.get_world_size(), arguments)


def _largest(cases: Sequence[all_to_all.Case]) -> int:
    return 2 * max(case.m * max(case.k, case.n) for case in cases)


PARTS = {
    "all_reduce": Part(
        jobs=_all_reduces,
        room=(REGISTERED[:1], 2 * max(all_reduce.BATCHES) * max(columns for _, columns in all_reduce.CASES)),
    ),
    "embedding": Part(jobs=_lookups),
    "all_to_all": Part(
        jobs=_all_to_alls,
        room=(REGISTERED, _largest(all_to_all.EVEN)),
    ),
    "ulysses": Part(jobs=_ulysses),
    "paper": Part(jobs=_of_the_paper, summary=paper.summary),
}


def run(part: Part, arguments: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Measure a part's cases that are asked for: (its rows, cases that were left out)."""
    names, room = part.room
    found, missing = ways(",".join(names), room, room)
    asked = [job for job in part.jobs(found, arguments) if any(word in job.name for word in arguments.cases.split(","))]
    measured = run_jobs(asked, arguments, missing=missing)
    for way in found:
        way.close()
    return measured


def main() -> None:
    options = parser(__doc__, rounds=ROUNDS)
    options.add_argument("--only", default=",".join(PARTS), help="parts, with commas (%(default)s)")
    options.add_argument("--cases", default="", help="only cases whose operator and name contain one of these, with commas")
    options.add_argument("--specs", default="", help="schedules, with commas; auto among them where wanted (each part's own)")
    arguments = options.parse_args()
    unknown = [name for name in arguments.only.split(",") if name not in PARTS]
    if unknown:
        raise ValueError(f"--only has {unknown[0]!r}; use {', '.join(PARTS)}")
    for spec in arguments.specs.split(","):
        if spec not in ("", "auto"):
            schedules.parse(spec)
    measure.ALARM_S = ALARM_S
    start()
    told, left_out = [], list[str]()
    for name in arguments.only.split(","):
        lines, left = run(PARTS[name], arguments)
        left_out += left
        told.append(f"{name}:\n{PARTS[name].summary(lines)}" if lines else f"{name}: no case of that name ran")
    if dist.get_rank() == 0:
        print("\n".join(told))
    stop(left_out)


if __name__ == "__main__":
    main()
