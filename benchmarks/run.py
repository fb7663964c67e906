"""Which of the operators' benchmarks is to run? cases.py has them.

torchrun --nproc-per-node 2 -m benchmarks.run tp --json benchmarks/results/h200x2/tp.jsonl
torchrun --nproc-per-node 2 -m benchmarks.run tp --dtype float8_e4m3fn --json benchmarks/results/h200x2/tp_fp8.jsonl
torchrun --nproc-per-node 4 -m benchmarks.run tp --cases M=512 --ops matmul_reduce_scatter --specs direct_store:1
torchrun --nproc-per-node 4 -m benchmarks.run all_reduce --cases batch=64,batch=128 --modes graph
python -m benchmarks.run --list
python -m benchmarks.run tp --help
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.cases import BENCHES
from benchmarks.runner import run


def main(words: Sequence[str]) -> None:
    if words and words[0] in BENCHES:
        run(BENCHES[words[0]], words[1:])
        return
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("bench", nargs="?", help=f"one of {', '.join(BENCHES)}; its own options follow")
    options.add_argument("--list", action="store_true", help="the benchmarks and their questions")
    given = options.parse_args(words[:1])
    if not given.list:
        options.error(f"there is no benchmark {given.bench!r}; use one of {', '.join(BENCHES)}")
    for name, bench in BENCHES.items():
        print(f"{name:12} {bench.question.partition('?')[0].replace(chr(10), ' ')}?")


if __name__ == "__main__":
    main(sys.argv[1:])
