"""How fast are weft's kernels alone, on one GPU?

    python -m benchmarks.kernels gemm --json benchmarks/results/h200x1/gemm.jsonl    the fused GEMM kernel, against cuBLAS
    python -m benchmarks.kernels fp8 --json benchmarks/results/h200x1/gemm_fp8.jsonl    the same with FP8 operands
    python -m benchmarks.kernels one_row --json benchmarks/results/h200x1/one_row_fp8.jsonl    a decode step's matmul in FP8
    python -m benchmarks.kernels grouped --json benchmarks/results/h200x1/grouped_fp8.jsonl    rows of experts in FP8
    python -m benchmarks.kernels products --json benchmarks/results/h200x1/products.jsonl    cuBLAS by the fastest algorithm
    python -m benchmarks.kernels lookup --cases 32x128                                  constants of the lookup kernel

Protocol: each method's calls are a CUDA graph; the graphs are replayed in turn, round by round; medians of GPU event times, in
us for one call. The first rounds are not counted. Results are checked before anything is timed. Each module of this package
says what its methods are; `python -m benchmarks.kernels PART --help` prints it. `lookup` uses measure.py's protocol instead.
"""

from __future__ import annotations

import argparse

from benchmarks.checked_options import appended, count
from benchmarks.kernels import fp8, gemm, grouped, lookup, one_row, products
from benchmarks.kernels.single_gpu import Part, run

PARTS: dict[str, Part] = {"gemm": gemm.PART, "fp8": fp8.PART, "one_row": one_row.PART, "grouped": grouped.PART}
PARTS["products"] = products.PART


def options() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parts = made.add_subparsers(dest="part", required=True)
    for name, part in PARTS.items():
        one = parts.add_parser(name, description=part.about, formatter_class=raw)
        one.add_argument("--json", type=appended, help="append a row for each case (rows.py)")
        one.add_argument("--commit", default="", help="what the tree is, for the rows")
        part.options(one)
    tuned = parts.add_parser("lookup", description=lookup.__doc__, formatter_class=raw)
    tuned.add_argument("--cases", default="", help="only cases whose name contains one of these, with commas")
    tuned.add_argument("--rounds", type=count, default=lookup.ROUNDS, help="samples of each method (%(default)s)")
    return made


def main() -> None:
    given = options().parse_args()
    if given.part == "lookup":
        lookup.run(given.cases.split(","), given.rounds)
    else:
        run(PARTS[given.part], given)


if __name__ == "__main__":
    main()
