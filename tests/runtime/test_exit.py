"""A process that used the operators ends cleanly: no thread of weft's or of the process group's is left to abort it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import weft
from weft.comm.shared_memory import remove_stale_segments
from weft.runtime.groups import GROUPS
from weft.runtime.ranks import Ranks, _delay_signals

ENDS = """
import atexit, os, pathlib, sys, tempfile, time
from contextlib import suppress

def left():
    names = []
    for task in pathlib.Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            names.append((task / "comm").read_text().strip())
    return [name for name in names if "gloo" in name or name.startswith("weft")]

@atexit.register  # runs last: after what weft registers when it is loaded
def look():
    until = time.monotonic() + 5
    while left() and time.monotonic() < until:
        time.sleep(0.01)  # one that was joined may be listed a moment longer
    os.write(1, f"left: {left()}\\n".encode())

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
from weft.runtime.ranks import Ranks

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
@pytest.mark.slow
def test_ctrl_c_while_the_server_starts_leaves_no_rank_that_waits() -> None:
    """It would wait for the others for five minutes, and then end with a traceback in a terminal that is used for something
    else. What runs on holds the pipes, so that this test would wait for it."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


CUT_SHORT = """
import os, signal
from multiprocessing import forkserver, popen_forkserver
from weft.runtime.ranks import Ranks

connect = forkserver.connect_to_new_process

def interrupted(fds):
    pipes = connect(fds)
    os.kill(os.getpid(), signal.NUMBER)  # the new process has yet to be told what it is for
    return pipes

def end(number, frame):
    raise KeyboardInterrupt

if __name__ == "__main__":
    popen_forkserver.forkserver.connect_to_new_process = interrupted
    signal.signal(signal.NUMBER, end)  # SIGINT is ignored in what a script runs in the background
    try:
        Ranks(2)
    except KeyboardInterrupt:
        print("interrupted", signal.getsignal(signal.NUMBER) is end)
"""


@pytest.mark.ranks
@pytest.mark.parametrize("number", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_a_rank_that_is_being_started_ends_in_silence(number: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CUT_SHORT.replace("NUMBER", number)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted True\n", "")


def _cut_short(signals: list[int]) -> None:
    with _delay_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert not signals
        raise OSError("no descriptor is left")


def test_a_signal_that_came_meanwhile_is_told_whatever_is_raised() -> None:
    signals: list[int] = []
    before = [signal.signal(number, lambda number, _: signals.append(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        with pytest.raises(OSError, match="no descriptor is left"):
            _cut_short(signals)
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    assert sorted(signals) == [signal.SIGINT, signal.SIGTERM]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """For temporary files: the name of a socket in one of pytest's folders would be too long."""
    with tempfile.TemporaryDirectory(prefix="w") as folder:
        yield Path(folder)


COMMANDS = [
    pytest.param(("run", "llama3-8b", "--ranks", "2", "--tokens", "32"), id="run"),
    pytest.param(("calibrate", "--ranks", "2"), id="calibrate", marks=pytest.mark.slow),
]


@pytest.mark.ranks
@pytest.mark.parametrize("words", COMMANDS)
@pytest.mark.parametrize("later_s", [0.0, pytest.param(1.5, marks=pytest.mark.slow)])
def test_sigterm_ends_a_command_and_its_ranks(
    words: tuple[str, ...], later_s: float, tmp_path: Path, short_folder: Path
) -> None:
    """Of the process alone, as `kill` does it: ranks wrote tracebacks, and their folder stayed. What runs on holds the pipes.
    later_s: after ranks were asked for."""
    folder = short_folder
    environment = {**os.environ, "TMPDIR": str(folder), "WEFT_CACHE_DIR": ""}
    command = [sys.executable, "-m", "weft", *words]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
    ) as run:
        while not list(folder.glob("weft-ranks-*")):
            assert run.poll() is None, f"it ended before it asked for ranks: {run.communicate()[1]}"
            time.sleep(0.02)
        time.sleep(later_s)
        run.send_signal(signal.SIGTERM)
        _, stderr = run.communicate(timeout=300)
    remove_stale_segments()  # ranks that end while they make a group leave what the next group takes away: this stands for one
    assert (run.returncode, stderr, list(folder.glob("weft-*"))) == (143, "weft: error: terminated\n", [])


KILLED = """
import os, signal, time
from weft.runtime.ranks import Ranks

if __name__ == "__main__":
    ranks = Ranks(2)
    if BUSY:
        ranks.start(time.sleep, 1)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.ranks
@pytest.mark.parametrize("busy", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_ranks_end_in_silence_once_their_caller_is_gone(busy: bool, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    source = KILLED.replace("BUSY", str(busy))
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
