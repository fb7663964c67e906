"""Run the tests on GPUs file by file, two files at a time on each pair of the machine's GPUs.

    python tests/gpu/on_pairs.py                    all files; the slowest first
    python tests/gpu/on_pairs.py --seconds 500 tests/gpu/test_ops_cuda.py tests/gpu/test_nn_cuda.py

Each file runs in a pytest of its own under a bound. A line says how each ended; what failed prints its output. Tests that
compare the free memory of a GPU fail where others use that GPU; `--at-once 1` runs one file at a time on each pair.
"""

from __future__ import annotations

import argparse
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

BOUND_S = 400.0
"""Of one file."""
SLOWEST = ("fp8", "failures", "all_to_all", "launch", "every_operator", "nn", "mixed", "lifetimes", "all_reduce", "ops")
"""Files that take a minute or more, by a part of their name."""


def rank_of(file: str) -> int:
    return next((at for at, name in enumerate(SLOWEST) if f"test_{name}" in file), len(SLOWEST))


def run(file: str, gpus: str, bound_s: float) -> tuple[bool, str]:
    """Whether a file's tests are right, and a line that says how they ended, with their output if they are not."""
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "--tb=short", "-p", "no:cacheprovider", file]
    try:
        done = subprocess.run(
            command,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": gpus},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=bound_s,
            check=False,
        )
        right, output = done.returncode == 0, done.stdout
    except subprocess.TimeoutExpired as late:
        found = late.stdout or b""
        output = found.decode(errors="replace") if isinstance(found, bytes) else found
        right, output = False, f"{output}\nnot ended after {bound_s:.0f} s"
    last = (output.strip().splitlines() or [""])[-1]
    line = f"{'right' if right else 'WRONG'} {time.monotonic() - began:4.0f} s  {file}: {last}"
    return right, line if right else f"{line}\n{output}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="default: all of tests/gpu")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no file begins later than this (%(default)s)")
    parser.add_argument("--at-once", type=int, default=2, help="files at a time on each pair (%(default)s)")
    arguments = parser.parse_args()
    pairs = [f"{2 * pair},{2 * pair + 1}" for pair in range(torch.cuda.device_count() // 2)]
    if not pairs:
        parser.error(f"needs two or more GPUs, this machine has {torch.cuda.device_count()}")
    files = arguments.files or sorted(map(str, Path(__file__).parent.glob("test_*.py")))
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for file in sorted(files, key=rank_of):
        waiting.put(file)
    ends, ended = time.monotonic() + arguments.seconds, list[bool]()

    def work(gpus: str) -> None:
        while time.monotonic() < ends:
            try:
                file = waiting.get_nowait()
            except queue.Empty:
                return
            right, words = run(file, gpus, min(BOUND_S, max(1.0, ends - time.monotonic())))
            ended.append(right)
            print(words, flush=True)

    threads = [threading.Thread(target=work, args=(gpus,)) for gpus in pairs for _ in range(arguments.at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = len(files) - len(ended)
    print(f"{sum(ended)} of {len(files)} files are right{f', {left} did not begin' if left else ''}")
    return 0 if len(ended) == len(files) and all(ended) else 1


if __name__ == "__main__":
    sys.exit(main())
