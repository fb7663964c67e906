"""A process that used the operators ends cleanly: no thread of weft's or of the process group's is left to abort it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import weft
from weft.execute.groups import GROUPS
from weft.execute.ranks import Ranks

ENDS = """
import atexit, os, pathlib, sys, tempfile

@atexit.register  # runs last: after what weft registers when it is loaded
def look():
    names = [(task / "comm").read_text().strip() for task in pathlib.Path("/proc/self/task").iterdir()]
    left = [name for name in names if "gloo" in name or name.startswith("weft")]
    os.write(1, f"left: {left}\\n".encode())

import torch, torch.distributed as dist, weft
dist.init_process_group("gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
weft.all_gather_matmul(torch.ones(4, 4), torch.ones(4, 4), schedule="flag_gated")
weft.matmul_reduce_scatter(torch.ones(4, 4), torch.ones(4, 4), schedule="track_and_trigger")
assert "torch._dynamo" not in sys.modules, "a call loaded the compiler, which keeps the process group alive"
if CLOSE:
    weft.close()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("close", [True, False])
def test_nothing_runs_on_at_exit(close: bool) -> None:
    source = ENDS.replace("CLOSE", str(close))
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "left: []\n"


class _Leaves:
    """Attached to a group: says when it is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def close(self) -> None:
        self._path.touch()


def _leave_open(folder: Path) -> None:
    weft.all_gather_matmul(torch.ones(4, 4), torch.ones(4, 4), schedule="shard_p2p")
    world = dist.group.WORLD
    assert world is not None
    GROUPS.state(world.group_name).attached(_Leaves, lambda: _Leaves(folder / str(world.rank())))


@pytest.mark.ranks
def test_rank_processes_close_what_their_work_left_open(tmp_path: Path) -> None:
    """Else a rank that has ended has died, to the others' watches, and they say so."""
    with Ranks(2) as pool:
        pool.run(_leave_open, tmp_path)
        assert not list(tmp_path.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


INTERRUPTED = """
from multiprocessing import popen_forkserver
from weft.execute.ranks import Ranks

def interrupted(fd):
    raise KeyboardInterrupt  # as Ctrl-C does here, while the server still imports torch

if __name__ == "__main__":
    popen_forkserver.forkserver.read_signed = interrupted
    try:
        Ranks(2)
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.ranks
def test_ctrl_c_while_the_server_starts_leaves_no_rank_that_waits() -> None:
    """It would wait for the others for five minutes, and then end with a traceback in a terminal that is used for something
    else. What runs on holds the pipes, so that this test would wait for it."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")
