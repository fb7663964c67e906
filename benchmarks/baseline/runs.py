"""Starts the parts of benchmarks.baseline, each in processes of its own, and collects their rows. It does not import torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.baseline.figures import key, merged, name_of, sentence
from benchmarks.rows import CASE, Row, read, text_of

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Part:
    """work: the name in parts.WORK of what each of `ranks` processes calls. limit_s: until they are ended."""

    work: str
    ranks: int = 1
    device: str = "cuda"
    limit_s: float = 90
    environment: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


_SHARED = "two ranks share one GPU"
PARTS = {
    "host": Part(work="host", ranks=2, limit_s=130, note=_SHARED),
    "first": Part(work="first", ranks=2, limit_s=110, environment={"TRITON_CACHE_DIR": "fresh"}, note=_SHARED),
    "memory": Part(work="memory", ranks=2, note=_SHARED),
    "replay": Part(work="replay", ranks=2, note=f"{_SHARED} in turns: slow, only to compare two trees"),
    "replay1": Part(work="replay1", note="world of one rank: no traffic"),
    "gemm": Part(work="gemm"),
    "products": Part(work="products"),
    "lookup": Part(work="lookup"),
    "ragged": Part(work="ragged", note="world of one rank: rows do not travel"),
    "cpu_host": Part(work="host", ranks=2, device="cpu"),
    "cpu_first": Part(work="first", ranks=2, device="cpu"),
}


def ran(name: str, tree: Path, limit_s: float) -> tuple[list[Row], str]:
    """One run of a part by a tree's own copy of this package: (its rows, how it failed, or an empty text)."""
    part = PARTS[name]
    with tempfile.TemporaryDirectory() as folder, socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", 0))
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port.getsockname()[1]),
            "WORLD_SIZE": str(part.ranks),
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_NVLS_ENABLE": "0",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
            "OMP_NUM_THREADS": "1",
            "WEFT_TIMEOUT_S": "30",
            "WEFT_CACHE_DIR": "",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        environment = os.environ | shared | dict(part.environment)
        if environment.get("TRITON_CACHE_DIR") == "fresh":
            environment["TRITON_CACHE_DIR"] = f"{folder}/triton"
        port.close()
        raw = Path(folder) / "rows"
        words = [sys.executable, "-m", "benchmarks.baseline.parts", name, str(raw)]
        own = [environment | {"RANK": str(at), "LOCAL_RANK": str(at)} for at in range(part.ranks)]
        failed = ended([subprocess.Popen(words, cwd=tree, env=each, start_new_session=True) for each in own], limit_s)
        return read(raw) if raw.exists() else [], failed


def ended(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> str:
    """Waits for all; what is left at the limit is killed. How it failed, or an empty text."""
    deadline = time.monotonic() + limit_s
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.poll() not in (None, 0) for process in processes):
                deadline = min(deadline, time.monotonic() + 10)
            time.sleep(0.05)
        late = any(process.poll() is None for process in processes)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    codes = [process.returncode for process in processes]
    return f"status {codes}{f', ended after {limit_s:.0f} s at most' if late else ''}" if any(codes) else ""


def turns(names: Sequence[str], commits: Sequence[str], runs: int) -> Iterator[tuple[int, str, str]]:
    """(run, part, commit): trees take turns part by part, in the other order every other run."""
    for run in range(runs):
        for name in names:
            for commit in commits[:: -1 if run % 2 else 1]:
                yield run, name, commit


def campaign(names: Sequence[str], trees: Mapping[str, Path], runs: int, budget_s: float, path: Path | None) -> list[str]:
    """All parts of all trees, `runs` times, as far as the budget goes; what failed. The file is written anew after each."""
    begun, failed = time.monotonic(), []
    earlier = {key(row): row for row in (read(path) if path and path.exists() else ())}
    lines = dict[tuple[str, ...], Row]()
    for run, name, commit in turns(names, list(trees), runs):
        left_s = budget_s - (time.monotonic() - begun)
        if left_s < 20:
            failed.append(f"{name} run {run}: not begun, {left_s:.0f} s are left")
            continue
        started, title = time.monotonic(), f"{name} run {run} of {commit}"
        rows, how = ran(name, trees[commit], min(PARTS[name].limit_s, left_s))
        failed += [f"{title}: {how}"] if how else []
        failed += [f"{title}: {name_of(row)}: {row.missing[CASE]}" for row in rows if row.missing]
        took_s = time.monotonic() - started
        print(f"[{time.monotonic() - begun:4.0f} s] {title}: {len(rows)} rows in {took_s:.0f} s {how}", flush=True)
        for row in (replace(row, commit=commit) for row in rows if not row.missing):
            before = lines.get(key(row)) or earlier.get(key(row))
            lines[key(row)] = merged([*([before] if before else []), row])
        if path:
            path.write_text("".join(text_of(line) + "\n" for line in (earlier | lines).values()), encoding="utf-8")
    for line in lines.values():
        print(sentence(line))
    return failed
