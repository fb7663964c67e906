"""Runs all other benchmarks and the tests for GPUs, within a budget of time.

Each part runs in separate processes, and has a time limit. A part that hangs is stopped at its limit, and what it has written
is kept. A printed line says how each part ended; logs and JSON lines go to a folder.

    python -m benchmarks.everything --out out/h200x4                            every part, as many GPUs as there are
    python -m benchmarks.everything --out out/h200x4 --only tp,planner --budget-s 600
    python -m benchmarks.everything --list

Protocol: parts run one after the other, and nothing else should run on the machine. Runs of one part may share the GPUs. A part
whose limit exceeds the rest of the budget is skipped. A limit is 1.5 times what the part took on 4 x H200. The exit status is 0
if every part that was started ended with 0.
Traps: the JSON lines do not record uncommitted changes, so pass --commit. The first run on a machine compiles kernels.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
CAMPAIGNS = ROOT / "tests" / "campaigns"
FAULTS_LIMIT_S = 600
"""The limit of the part with a hundred faults."""
_STOP_GRACE_S = 5.0
"""The time between two signals, the last of which is SIGKILL, to a process that is to end."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process. words: the arguments of `python`. visible: the GPUs that it sees. By default, all."""

    words: tuple[str, ...]
    visible: str | None = None


@dataclass(frozen=True, kw_only=True)
class Part:
    """A Part is a set of runs that start at the same time. limit_s: the limit of all of them together."""

    runs: tuple[Run, ...]
    limit_s: float
    environment: dict[str, str] = field(default_factory=dict)


def make_distributed_run(gpus: int, name: str, *options: str) -> Run:
    """Make the run of a benchmark on all GPUs."""
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus))
    return Run(words=(*start, "-m", f"benchmarks.{name}", *options))


def make_test_part(limit_s: float, *names: str) -> Part:
    """Make the part that runs these tests of tests/gpu."""
    files = [str(ROOT / "tests" / "gpu" / f"test_{name}_cuda.py") for name in names]
    return Part(
        runs=(Run(words=("-m", "pytest", "-q", "--tb=short", "--durations=5", "-p", "no:cacheprovider", *files)),),
        limit_s=limit_s,
    )


def make_faults_run(seed: int) -> Run:
    """Make the run of 25 faults of two ranks or more."""
    return Run(words=(str(CAMPAIGNS / "faults.py"), "--device", "cuda", "--trials", "25", "--seed", str(seed)))


def make_fuzz_runs(gpus: int, minutes: float, seed: int) -> tuple[Run, ...]:
    """Make 18 concurrent runs of random calls: six with all GPUs (at most 4), twelve with two each."""
    visible = list_visible_gpus(gpus)
    pairs = [f"{visible[at]},{visible[at + 1]}" for at in range(0, len(visible) - 1, 2)] or [None]
    sizes = [(min(4, gpus), None)] * 6 + [(2, pairs[number % len(pairs)]) for number in range(12)]
    return tuple(
        Run(
            words=(str(CAMPAIGNS / "fuzz.py"), "--minutes", str(minutes), "--seed", str(seed + number), "--ranks", str(ranks)),
            visible=visible,
        )
        for number, (ranks, visible) in enumerate(sizes)
    )


def list_visible_gpus(gpus: int) -> list[str]:
    """Return the names in CUDA_VISIBLE_DEVICES of the GPUs that this program may use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",")[:gpus] if named else [str(number) for number in range(gpus)]


def make_parts(gpus: int, *, minutes: float, seed: int) -> dict[str, Part]:
    """Make all parts, by name, in the order in which they run. minutes, seed: options of the random calls."""

    def one(name: str, limit_s: float, *options: str, **environment: str) -> Part:
        return Part(runs=(make_distributed_run(gpus, name, *options),), limit_s=limit_s, environment=environment)

    def alone(part: str, limit_s: float) -> Part:
        return Part(runs=(Run(words=("-m", "benchmarks.kernels", part), visible=list_visible_gpus(gpus)[0]),), limit_s=limit_s)

    cache = {"WEFT_CACHE_DIR": str(Path("out/plans").resolve())}
    fresh = Path("out", "first_call", str(os.getpid())).resolve()
    caches = {"WEFT_CACHE_DIR": str(fresh / "plans"), "TRITON_CACHE_DIR": str(fresh / "triton")}
    return {
        "lifetimes": make_test_part(80, "lifetimes"),
        "failures": make_test_part(200, "failures", "handshake", "launch"),
        "operators": make_test_part(450, "ops", "every_operator", "weight_gradients", "queues"),
        "exchanges": make_test_part(300, "all_reduce", "all_reduce_norm", "all_to_all", "scatter", "embedding"),
        "trials": make_test_part(150, "autotune", "buckets"),
        "modules": make_test_part(240, "concurrent", "controls", "nn", "styles", "planner", "doctor"),
        "collectives": make_test_part(120, "collectives"),
        "across_nodes": make_test_part(150, "nodes"),
        "kernels": make_test_part(240, "triton", "kernels", "products"),
        "mixed": make_test_part(300, "mixed", "fsdp"),
        "fp8": make_test_part(400, "fp8", "fp8_layers"),
        "products": alone("products", 90),
        "gemm": alone("gemm", 90),
        "gemm_fp8": alone("fp8", 120),
        "one_row_fp8": alone("one_row", 90),
        "grouped_fp8": alone("grouped", 120),
        "tp": one("run", 150, "tp", "--rounds", "7"),
        "tp_fp8": one("run", 240, "tp", "--dtype", "float8_e4m3fn", "--modes", "graph"),
        "all_reduce": one("run", 120, "all_reduce"),
        "all_to_all": one("run", 120, "all_to_all"),
        "embedding": one("run", 110, "embedding"),
        "ulysses": one("run", 90, "ulysses", "--modes", "graph"),
        "paper": one("run", 90, "paper", "--modes", "graph"),
        "first_call": one("calls", 120, "first_call", "--label", "nothing cached", **caches),
        "restarted": one("calls", 60, "first_call", "--label", "restarted", **caches),
        "row_counts": one("calls", 60, "row_counts"),
        "planner": one("planner", 130, "--collect", "--set", "fresh", "--budget-s", "100"),
        "planner_fit": one("planner", 130, "--collect", "--set", "fit", "--budget-s", "100"),
        "ficco_gemms": one("ficco_gemms", 70, "--collect", "--budget-s", "50"),
        "prefill": one("models", 100, "--part", "prefill", "--layers", "2", **cache),
        "decode": one("models", 80, "--part", "decode", "--layers", "2", **cache),
        "serving": one("serving", 330, **cache),
        "training": one("training", 540, "--modes", "eager", **cache),
        **{
            f"training_compiled_{model}_{tokens}": one(
                "training", 540, "--modes", "compiled", "--models", model, "--tokens", tokens, **cache
            )
            for model in ("llama3-8b", "llama3-70b", "qwen3-32b", "mixtral-8x7b")
            for tokens in ("2048", "8192")
        },
        "forward": one("models", 150, "--part", "forward", **cache),
        "moe": one("moe", 50),
        "iso": one("iso", 120),
        "dlrm_step": one("dlrm_step", 90),
        "concurrent": one("concurrent", 160),
        "conccl": one("concurrent", 240, "--part", "conccl"),
        "resource_aware": one("resource_aware", 200),
        "data_parallel": one("data_parallel", 240),
        "dma": one("collective", 90),
        "host": one("host", 200, "--part", "calls"),
        "host_training": one("host", 240, "--part", "training", **cache),
        "host_compiled": one("host", 600, "--part", "compiled", **cache),
        "host_layer": one("host", 150, "--part", "layer", **cache),
        "nodes": one("run", 90, "nodes", WEFT_RANKS_PER_NODE=str(max(1, gpus // 2))),
        "soak": Part(runs=(Run(words=(str(CAMPAIGNS / "soak.py"), "--device", "cuda", "--calls", "1000000")),), limit_s=120),
        "faults": Part(runs=tuple(make_faults_run(seed + at) for at in range(4)), limit_s=FAULTS_LIMIT_S),
        "fuzz": Part(runs=make_fuzz_runs(gpus, minutes, seed), limit_s=60 * minutes + 60, environment={"OMP_NUM_THREADS": "1"}),
    }


def writes_rows(run: Run) -> bool:
    """Return whether a run writes JSON lines."""
    return "pytest" not in run.words


def start_run(run: Run, part: Part, log: Path, lines: Path, commit: str) -> subprocess.Popen[bytes]:
    """Start a run in a new session, so that all processes that it starts can be stopped with it."""
    environment = os.environ | part.environment | ({"CUDA_VISIBLE_DEVICES": run.visible} if run.visible else {})
    options = ("--json", str(lines), "--commit", commit) if writes_rows(run) else ()
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, *run.words, *options],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def wait_for_runs(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> list[int | None]:
    """Wait until all processes have ended. Return their statuses, with None for those that were stopped at the limit."""
    deadline = time.monotonic() + limit_s
    found: list[int | None] = []
    for process in processes:
        try:
            found.append(process.wait(max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            found.append(None)
            stop(process)
    return found


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a process and its children. The first signal is that of Ctrl-C, after which pytest reports its failures so far."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_STOP_GRACE_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def run_part(name: str, part: Part, folder: Path, commit: str) -> tuple[bool, str]:
    """Run a part. Return whether all its runs ended with status 0, and a line that says how they ended.

    If this process is stopped, it stops the part.
    """
    log, lines = folder / f"{name}.log", folder / f"{name}.jsonl"
    start = time.monotonic()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for one in part.runs:
            processes.append(start_run(one, part, log, lines, commit))
        found = wait_for_runs(processes, part.limit_s)
    finally:
        for process in processes:
            if process.poll() is None:
                stop(process)
    how = ", ".join(f"{'stopped at its limit' if status is None else f'status {status}'}" for status in dict.fromkeys(found))
    made = len(lines.read_text(encoding="utf-8").splitlines()) if lines.exists() else 0
    last = next((text for text in reversed(log.read_text(errors="replace").splitlines()) if text.strip()), "")
    ending = f"{name}: {how}, {time.monotonic() - start:.0f} s, {made} lines; {last[:160]}"
    return not any(found) and None not in found, ending


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("out/everything"), help="folder of logs and lines (%(default)s)")
    options.add_argument("--only", default="", help="parts, with commas")
    options.add_argument("--budget-s", type=float, default=float("inf"), help="skip parts that could end later")
    options.add_argument("--gpus", type=int, default=0, help="default: all")
    options.add_argument("--minutes", type=float, default=3.4, help="of each of the 18 runs of random calls (%(default)s)")
    options.add_argument("--seed", type=int, default=1, help="of random calls and faults (%(default)s)")
    options.add_argument("--commit", default="", help="the commit of the tree, for the JSON lines")
    options.add_argument("--list", action="store_true", help="the parts and their limits")
    given = options.parse_args()
    gpus = given.gpus or _gpus()
    known = make_parts(gpus, minutes=given.minutes, seed=given.seed)
    wanted = given.only.split(",") if given.only else list(known)
    if unknown := set(wanted) - set(known):
        options.error(f"--only: no part {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if given.list:
        print("\n".join(f"{name:15} {known[name].limit_s:4.0f} s at most" for name in wanted))
        return
    if gpus < 2:
        options.error(f"this machine has {gpus} GPUs; every part needs two or more")
    given.out.mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    try:
        failed = run_parts({name: known[name] for name in wanted}, given.out, given.budget_s, given.commit)
    finally:
        signal.signal(signal.SIGTERM, before)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def run_parts(parts: dict[str, Part], folder: Path, budget_s: float, commit: str) -> list[str]:
    """Run the parts for which the budget has time, and return the names of those that failed."""
    start, failed = time.monotonic(), []
    for name, part in parts.items():
        left_s = budget_s - (time.monotonic() - start)
        if part.limit_s > left_s:
            print(f"{name}: skipped, {left_s:.0f} s are left", flush=True)
            continue
        good, ending = run_part(name, part, folder, commit)
        failed += [name] * (not good)
        print(f"[{time.monotonic() - start:4.0f} s] {ending}", flush=True)
    return failed


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    main()
