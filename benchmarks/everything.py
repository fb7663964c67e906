"""What does all of it measure on this machine, in the time that there is?

Runs the other benchmarks and the tests for GPUs, each part in processes of its own that may take so long and no longer: a part
that hangs costs its limit, and what it has written stays. A line tells how each ended; logs and JSON lines go to a folder.

    python -m benchmarks.everything --out out/h200x4                            every part, as many GPUs as there are
    python -m benchmarks.everything --out out/h200x4 --only tp,planner --budget-s 600
    python -m benchmarks.everything --list

Protocol: parts run one after the other, alone on the machine; only the runs of one part that are meant to share the GPUs do.
None is begun that its limit would carry past the budget. Limits are what the parts took on 4 x H200, and half as much again.
The status is 0 where every part that was begun ended with it.
Traps: lines are those of the tree as it is, so give --commit; the first run of a machine compiles.
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
LONGEST_S = 600
"""Of a hundred faults."""
_ENDS_S = 5.0
"""What a part has from being asked to end until it is killed."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process. words: after `python`. visible: the GPUs that it sees; default all."""

    words: tuple[str, ...]
    visible: str | None = None


@dataclass(frozen=True, kw_only=True)
class Part:
    """runs: begun together. limit_s: for all of them."""

    runs: tuple[Run, ...]
    limit_s: float
    environment: dict[str, str] = field(default_factory=dict)


def spread(gpus: int, name: str, *options: str) -> Run:
    """A benchmark on all GPUs."""
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus))
    return Run(words=(*start, "-m", f"benchmarks.{name}", *options))


def checked(limit_s: float, *names: str) -> Part:
    """Tests of tests/gpu."""
    files = [str(ROOT / "tests" / "gpu" / f"test_{name}_cuda.py") for name in names]
    return Part(
        runs=(Run(words=("-m", "pytest", "-q", "--tb=short", "--durations=5", "-p", "no:cacheprovider", *files)),),
        limit_s=limit_s,
    )


def faults(seed: int) -> Run:
    """25 faults of two ranks or more."""
    return Run(words=(str(CAMPAIGNS / "faults.py"), "--device", "cuda", "--trials", "25", "--seed", str(seed)))


def campaigns(gpus: int, minutes: float, seed: int) -> tuple[Run, ...]:
    """18 runs of random calls at the same time: six of all GPUs (at most 4), twelve of two each."""
    visible = visible_gpus(gpus)
    pairs = [f"{visible[at]},{visible[at + 1]}" for at in range(0, len(visible) - 1, 2)] or [None]
    sizes = [(min(4, gpus), None)] * 6 + [(2, pairs[number % len(pairs)]) for number in range(12)]
    return tuple(
        Run(
            words=(str(CAMPAIGNS / "fuzz.py"), "--minutes", str(minutes), "--seed", str(seed + number), "--ranks", str(ranks)),
            visible=visible,
        )
        for number, (ranks, visible) in enumerate(sizes)
    )


def visible_gpus(gpus: int) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the GPUs that this program may use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",")[:gpus] if named else [str(number) for number in range(gpus)]


def parts(gpus: int, *, minutes: float, seed: int) -> dict[str, Part]:
    """All of them by name, in the order in which they are begun. minutes, seed: of the random calls."""

    def one(name: str, limit_s: float, *options: str, **environment: str) -> Part:
        return Part(runs=(spread(gpus, name, *options),), limit_s=limit_s, environment=environment)

    def alone(part: str, limit_s: float) -> Part:
        return Part(runs=(Run(words=("-m", "benchmarks.kernels", part), visible=visible_gpus(gpus)[0]),), limit_s=limit_s)

    cache = {"WEFT_CACHE_DIR": str(Path("out/plans").resolve())}
    fresh = Path("out", "first_call", str(os.getpid())).resolve()
    caches = {"WEFT_CACHE_DIR": str(fresh / "plans"), "TRITON_CACHE_DIR": str(fresh / "triton")}
    return {
        "lifetimes": checked(80, "lifetimes"),
        "failures": checked(200, "failures", "handshake", "launch"),
        "operators": checked(300, "ops", "every_operator"),
        "exchanges": checked(240, "all_reduce", "all_to_all", "scatter", "embedding"),
        "trials": checked(150, "autotune", "buckets"),
        "modules": checked(240, "concurrent", "controls", "nn", "styles", "planner", "doctor"),
        "collectives": checked(120, "collectives"),
        "across_nodes": checked(150, "nodes"),
        "kernels": checked(240, "triton", "kernels", "products"),
        "mixed": checked(240, "mixed"),
        "fp8": checked(400, "fp8", "fp8_layers"),
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
        "training": one("models", 220, "--part", "training", **cache),
        "forward": one("models", 150, "--part", "forward", **cache),
        "moe": one("moe", 50),
        "iso": one("iso", 120),
        "dlrm_step": one("dlrm_step", 90),
        "concurrent": one("concurrent", 160),
        "conccl": one("concurrent", 240, "--part", "conccl"),
        "resource_aware": one("resource_aware", 200),
        "data_parallel": one("data_parallel", 240),
        "dma": one("collective", 90),
        "nodes": one("run", 90, "nodes", WEFT_RANKS_PER_NODE=str(max(1, gpus // 2))),
        "soak": Part(runs=(Run(words=(str(CAMPAIGNS / "soak.py"), "--device", "cuda", "--calls", "1000000")),), limit_s=120),
        "faults": Part(runs=tuple(faults(seed + at) for at in range(4)), limit_s=LONGEST_S),
        "fuzz": Part(runs=campaigns(gpus, minutes, seed), limit_s=60 * minutes + 60, environment={"OMP_NUM_THREADS": "1"}),
    }


def measures(run: Run) -> bool:
    """Whether it writes JSON lines."""
    return "pytest" not in run.words


def begun(run: Run, part: Part, log: Path, lines: Path, commit: str) -> subprocess.Popen[bytes]:
    """In a session of its own, so that all that it starts can be ended."""
    environment = os.environ | part.environment | ({"CUDA_VISIBLE_DEVICES": run.visible} if run.visible else {})
    options = ("--json", str(lines), "--commit", commit) if measures(run) else ()
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, *run.words, *options],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def ended(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> list[int | None]:
    """Each one's status; None where it was ended here."""
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
    """As Ctrl-C does at first, at which pytest says what has failed until then."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_ENDS_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def run(name: str, part: Part, folder: Path, commit: str) -> tuple[bool, str]:
    """Runs a part: (whether all of it ended by itself, with status 0; how it ended). What ends the caller ends it, too."""
    log, lines = folder / f"{name}.log", folder / f"{name}.jsonl"
    start = time.monotonic()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for one in part.runs:
            processes.append(begun(one, part, log, lines, commit))
        found = ended(processes, part.limit_s)
    finally:
        for process in processes:
            if process.poll() is None:
                stop(process)
    how = ", ".join(f"{'ended at its limit' if status is None else f'status {status}'}" for status in dict.fromkeys(found))
    made = len(lines.read_text(encoding="utf-8").splitlines()) if lines.exists() else 0
    last = next((text for text in reversed(log.read_text(errors="replace").splitlines()) if text.strip()), "")
    ending = f"{name}: {how}, {time.monotonic() - start:.0f} s, {made} lines; {last[:160]}"
    return not any(found) and None not in found, ending


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("out/everything"), help="folder of logs and lines (%(default)s)")
    options.add_argument("--only", default="", help="parts, with commas")
    options.add_argument("--budget-s", type=float, default=float("inf"), help="no part is begun that could end later")
    options.add_argument("--gpus", type=int, default=0, help="default: all")
    options.add_argument("--minutes", type=float, default=3.4, help="of each of the 18 runs of random calls (%(default)s)")
    options.add_argument("--seed", type=int, default=1, help="of random calls and faults (%(default)s)")
    options.add_argument("--commit", default="", help="what the tree is, for the lines")
    options.add_argument("--list", action="store_true", help="the parts and their limits")
    given = options.parse_args()
    gpus = given.gpus or _gpus()
    known = parts(gpus, minutes=given.minutes, seed=given.seed)
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
        failed = campaign({name: known[name] for name in wanted}, given.out, given.budget_s, given.commit)
    finally:
        signal.signal(signal.SIGTERM, before)
    if failed:
        sys.exit(f"not right: {', '.join(failed)}")


def campaign(parts: dict[str, Part], folder: Path, budget_s: float, commit: str) -> list[str]:
    """Runs the parts that the budget allows; those that failed."""
    start, failed = time.monotonic(), []
    for name, part in parts.items():
        left_s = budget_s - (time.monotonic() - start)
        if part.limit_s > left_s:
            print(f"{name}: not begun, {left_s:.0f} s are left", flush=True)
            continue
        good, ending = run(name, part, folder, commit)
        failed += [name] * (not good)
        print(f"[{time.monotonic() - start:4.0f} s] {ending}", flush=True)
    return failed


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    main()
