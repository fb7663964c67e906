"""A script's ranks as torchrun starts them, forked from a server that has imported what they need, which is quicker."""

from __future__ import annotations

import multiprocessing as mp
import os
import runpy
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from weft.runtime.ranks import PRELOADED, _start_server


def torchrun(script: Path, *words: str, ranks: int, folder: Path, timeout_s: float) -> str:
    """What all ranks print, each started in `folder`. Raises AssertionError with the errors of those that fail or are late."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    found |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "CUDA_VISIBLE_DEVICES": ""}
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    _start_server()  # as all ranks' server is started, whichever of them come first
    processes = []
    for rank in range(ranks):
        environment = {**os.environ, **found, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(context.Process(target=_rank, args=(script, words, environment, folder), daemon=True))
        processes[-1].start()
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    errors = (folder / "stderr").read_text(encoding="utf-8")
    assert codes == [0] * ranks, f"exit codes {codes} (None: not within {timeout_s:g} s)\n{errors[-4000:]}"
    return (folder / "stdout").read_text(encoding="utf-8")


def _rank(script: Path, words: tuple[str, ...], environment: dict[str, str], folder: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    torch.set_num_threads(1)
    sys.argv = [str(script), *words]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
