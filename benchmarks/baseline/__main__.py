"""Did a change make anything slower or larger? One row for each figure: host time, first calls, kernels, graphs, memory.

The package uses weft's public operators, and for kernels alone the functions of benchmarks.kernels, lookups.py and moe.py.
So it runs unchanged before and after the internals of weft change.

    python -m benchmarks.baseline --commit abc --json before.jsonl                      every GPU part, on one GPU
    python -m benchmarks.baseline --part cpu_host,cpu_first --commit abc --json before.jsonl
    python -m benchmarks.baseline --tree ../old --commit abc --tree . --commit def --json both.jsonl
    python -m benchmarks.baseline --compare both.jsonl abc def

    host        host time of an eager warm call, until Python goes on; two ranks share one GPU
    first       host time of a first call by a named schedule: build, check, bind and enqueue, without autotuning
    memory      bytes that a bound program holds; two ranks share one GPU
    replay      time of a graph's replay; two ranks share one GPU
    replay1     time of a graph's replay with one rank, which has the GPU for itself
    gemm, products, lookup, ragged      kernels alone on one GPU
    cpu_host, cpu_first                 as host and first, on two CPU ranks

Protocol: each part runs in processes of its own, under a limit, --runs times. Within a part, methods take turns round by round,
in an order that changes each round. A sample of a rank is the time of one call, or of one replay. A run's figure is the median
of the slowest rank. A row's value is the median over runs; `extra` has each run's figure, and the 10th and 90th percentile of
each run's samples. A part that fails, or is late, is named at the end, and the status is then 1; its other runs count.

Several trees take turns, part by part, each by its own copy of this package. A difference of a few percent counts only if both
trees ran on the same machine in the same command. Host times need many runs as well: a virtual machine's cores may be half as
fast for seconds, so that runs of one tree differed by 57% (16 cores and one H200). `--compare` therefore has two ratios: of
runs that followed each other (their median), and of the floors, the least 10th percentile of all runs. It calls a figure worse
where both are. Of 87 figures of kernels and graphs 60 lay within 3% over three runs, 85 within 9%; the two others are kernels
of 8 us. All figures of memory were the same.

Traps: two ranks on one GPU take turns in slices of a millisecond or more. Host times do not wait for the GPU, but times on the
GPU (`replay`) are mostly waiting for the other rank's slices: use them to compare two trees, not to say how fast weft is. NCCL
takes the two for two hosts and uses sockets. Rows of `torch` are controls: weft does not run in them, so if they differ, the
machine does. Host times are those of calls in bursts of BURST; the first LEADS of each are not counted, and Python's garbage
collector is off. A call with the tensors of an earlier one may be replayed; `new tensors` are calls whose input lies elsewhere
each time. Figures of CPU ranks need idle cores: on 2 busy ones, six runs of a tree beside six of itself had ratios of 0.72 to
1.37, and 9 of 50 figures were called worse.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.baseline.figures import compared
from benchmarks.baseline.runs import PARTS, ROOT, campaign


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--part", default="", help=f"of {', '.join(PARTS)}, with commas; default: those of GPUs")
    options.add_argument("--json", type=Path, help="runs are added to the rows that are there")
    options.add_argument("--tree", type=Path, action="append", help="a checkout; several take turns (this one)")
    options.add_argument("--commit", action="append", help="what each tree is, for the rows")
    options.add_argument("--runs", type=int, default=2, help="of each part (%(default)s)")
    options.add_argument("--budget-s", type=float, default=float("inf"), help="no part is begun later than that")
    options.add_argument(
        "--compare", nargs=3, metavar=("FILE", "BASE", "NEW"), help="two commits of a file; nothing is measured"
    )
    given = options.parse_args()
    if given.compare:
        sys.exit(0 if compared(Path(given.compare[0]), *given.compare[1:]) else 1)
    trees = [path.resolve() for path in given.tree or [ROOT]]
    commits = given.commit or ["" if at == 0 else str(at) for at in range(len(trees))]
    if len(commits) != len(trees) or len(set(commits)) != len(commits):
        options.error(f"--commit is {commits}; give each of {len(trees)} trees one of its own")
    names = given.part.split(",") if given.part else [name for name, part in PARTS.items() if part.device == "cuda"]
    if unknown := [name for name in names if name not in PARTS]:
        options.error(f"--part has {unknown[0]!r}; use {', '.join(PARTS)}")
    if failed := campaign(names, dict(zip(commits, trees, strict=True)), given.runs, given.budget_s, given.json):
        sys.exit("not right:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
