"""Run the tests on GPUs file by file, two files at a time on each pair of the machine's GPUs.

    python tests/gpu/on_pairs.py                    all files; the slowest first
    python tests/gpu/on_pairs.py --seconds 500 tests/gpu/test_ops_cuda.py tests/gpu/test_nn_cuda.py

Each file runs in a separate pytest process with a time limit. A line says how each file ended; a failed one prints its output.
Tests that compare the free memory of a GPU fail if another file uses that GPU; `--at-once 1` runs one file at a time on each
pair.
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
"""The time limit of one file."""
SLOWEST = (
    "fp8",
    "failures",
    "queues",
    "all_to_all",
    "launch",
    "every_operator",
    "nn",
    "mixed",
    "lifetimes",
    "all_reduce",
    "ops",
)
"""Files that take a minute or more, by a part of their name."""


def get_position(file: str) -> int:
    """Return the position of a file in SLOWEST, or its length for other files."""
    return next((at for at, name in enumerate(SLOWEST) if f"test_{name}" in file), len(SLOWEST))


def run_file(file: str, gpus: str, bound_s: float) -> tuple[bool, str]:
    """Run a file. Return whether its tests passed, and a line that says so, followed by their output if they failed."""
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
        passed, output = done.returncode == 0, done.stdout
    except subprocess.TimeoutExpired as late:
        found = late.stdout or b""
        output = found.decode(errors="replace") if isinstance(found, bytes) else found
        passed, output = False, f"{output}\nstopped after {bound_s:.0f} s"
    last = (output.strip().splitlines() or [""])[-1]
    line = f"{'passed' if passed else 'FAILED'} {time.monotonic() - began:4.0f} s  {file}: {last}"
    return passed, line if passed else f"{line}\n{output}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="default: all of tests/gpu")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no file starts later than this (%(default)s)")
    parser.add_argument("--at-once", type=int, default=2, help="files at a time on each pair (%(default)s)")
    arguments = parser.parse_args()
    pairs = [f"{2 * pair},{2 * pair + 1}" for pair in range(torch.cuda.device_count() // 2)]
    if not pairs:
        parser.error(f"needs two or more GPUs, this machine has {torch.cuda.device_count()}")
    files = arguments.files or sorted(map(str, Path(__file__).parent.glob("test_*.py")))
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for file in sorted(files, key=get_position):
        waiting.put(file)
    deadline, results = time.monotonic() + arguments.seconds, list[bool]()

    def work(gpus: str) -> None:
        while time.monotonic() < deadline:
            try:
                file = waiting.get_nowait()
            except queue.Empty:
                return
            passed, line = run_file(file, gpus, min(BOUND_S, max(1.0, deadline - time.monotonic())))
            results.append(passed)
            print(line, flush=True)

    threads = [threading.Thread(target=work, args=(gpus,)) for gpus in pairs for _ in range(arguments.at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = len(files) - len(results)
    print(f"{sum(results)} of {len(files)} files passed{f', {left} did not start' if left else ''}")
    return 0 if len(results) == len(files) and all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
