"""`Ranks` starts rank processes on this host, runs functions in them, and ends them.

`weft run` and the tests use it. Under torchrun the user's processes are the ranks. Every rank runs a top-level function with
its arguments inside one process group (gloo on CPUs, NCCL on GPUs).

Ranks are forked from a server that has imported torch and the operators. The first ranks of a process take seconds, later ones
a tenth of a second.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.core.errors import WeftError

SHARED = "cuda:shared"
"""The device name with which several ranks may share a GPU."""
PRELOADED = ("torch", "weft.ops", "weft.planner")
"""The modules that the server imports. None of them reads the environment when it is imported."""
_START_S = 120.0
_GRACE_S = 15.0


class RankFailed(WeftError):
    """A RankFailed error says that a rank raised an error, died or did not answer in time.

    failures: (rank, text) in the order in which they were seen.
    results: the results of the other ranks, by rank.
    lost: whether a rank has not answered, so that the ranks cannot run another function.
    """

    def __init__(self, failures: list[tuple[int, str]], results: list[Any], *, lost: bool = False) -> None:
        self.failures, self.results, self.lost = failures, results, lost
        super().__init__("\n".join(_by_text(failures)))


def _by_text(failures: list[tuple[int, str]]) -> Iterator[str]:
    """Yield a line for each text, in the order seen, with the ranks that have it."""
    for message in dict.fromkeys(text for _, text in failures):
        ranks = [str(rank) for rank, text in sorted(failures) if text == message]
        yield f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {message}"


def _serve(rank: int, world_size: int, store_path: str, device: str, pipe: Connection, environment: dict[str, str]) -> None:
    """Run a rank process (`_work`). If the process that started it is gone, it ends without a message, which nobody would
    read."""
    try:
        _work(rank, world_size, store_path, device, pipe, environment)
    except Exception:
        if _is_abandoned(pipe):
            os._exit(1)  # at once: the other ranks may be gone already, and a process group waits for them
        raise


def _is_abandoned(pipe: Connection) -> bool:
    """Return whether the pipe's other end is closed."""
    try:
        while pipe.poll():
            pipe.recv_bytes()
    except (OSError, EOFError):
        return True
    return False


def _work(rank: int, world_size: int, store_path: str, device: str, pipe: Connection, environment: dict[str, str]) -> None:
    """Join the process group, then run functions from the pipe until it sends None.

    environment: all variables, because the fork server has those of its start.
    """
    if pipe.poll():
        return  # the process that started this rank was interrupted, so the other ranks will not join
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    options: dict[str, Any] = {}
    if device != "cpu":
        gpu = rank
        if device == SHARED:
            gpu = rank % torch.cuda.device_count()
            os.environ["NCCL_HOSTID"] = f"rank {rank}"  # NCCL refuses two ranks of one GPU, but not of two hosts
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        torch.cuda.set_device(gpu)
        options["device_id"] = torch.device("cuda", gpu)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    store = dist.FileStore(store_path, world_size)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=_START_S), **options
    )
    pipe.send(("ready", None))
    while (task := pipe.recv()) is not None:
        function, args = task
        try:
            answer = ("done", function(*args))
        except BaseException as error:
            answer = ("failed", (f"{type(error).__name__}: {error}", traceback.format_exc()))
        pipe.send(answer)
    if groups := sys.modules.get("weft.runtime.groups"):
        # Such a process runs no exit handlers, and the watchdogs of the other ranks would report this rank as dead.
        with suppress(WeftError):
            groups.GROUPS.close_all()
    dist.destroy_process_group()


def _start_server() -> None:
    """Start the fork server with SIGINT blocked, so that Ctrl-C interrupts only the process that uses the ranks, which ends
    them.

    Otherwise Ctrl-C would also interrupt the server's imports, with a traceback.
    """
    resource_tracker.ensure_running()  # first by itself: it unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _delay_signals() -> Iterator[None]:
    """Return a context that delays the handlers of SIGINT and SIGTERM until its end.

    If the parent were interrupted between forking a process and sending it its task, the process would print a traceback.
    """
    late: list[int] = []
    with ExitStack() as at_last:
        try:
            with ExitStack() as handlers:
                if threading.current_thread() is threading.main_thread():
                    for number in (signal.SIGINT, signal.SIGTERM):
                        if callable(before := signal.getsignal(number)):
                            handlers.callback(signal.signal, number, before)
                            signal.signal(number, lambda number, _: late.append(number))
                yield
        finally:
            for delayed in dict.fromkeys(late):
                at_last.callback(signal.raise_signal, delayed)


class Ranks:
    """Ranks is a context manager of `world_size` rank processes on this host. `close` always ends them.

    Raises RankFailed if a rank has not joined the process group within start_s.

    device: "cpu", "cuda" (rank r uses GPU r) or SHARED (ranks share the GPUs, which is correct but slow).
    environment: the variables that are set in every rank first.
    start_s: the bound of the start.
    """

    def __init__(
        self, world_size: int, *, device: str = "cpu", environment: dict[str, str] | None = None, start_s: float = _START_S
    ) -> None:
        self.world_size, self.device = world_size, device
        self._folder = tempfile.TemporaryDirectory(prefix="weft-ranks-")
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        store = str(Path(self._folder.name) / "store")
        self._pipes: list[Connection] = []
        self.processes: list[mp.process.BaseProcess] = []
        try:
            _start_server()
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                self._pipes.append(ours)
                process = context.Process(
                    target=_serve,
                    args=(rank, world_size, store, device, theirs, {**os.environ, **(environment or {})}),
                    name=f"weft-rank-{rank}",
                    daemon=True,
                )
                with _delay_signals():
                    process.start()
                    self.processes.append(process)
                theirs.close()
            self._collect(set(range(world_size)), start_s, "starting")
        except BaseException:
            self.close(grace_s=0)
            raise

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 600.0) -> list[Any]:
        """Run `function(*args)` on every rank, and return the results by rank.

        Raises RankFailed if a rank raises an error, dies or does not answer in time.
        """
        self.start(function, *args)
        return self._collect(set(range(self.world_size)), timeout_s, function.__name__)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Start a function on every rank as `run` does, without waiting. `finish` returns the results."""
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # `_collect` reports how the rank died
                pipe.send((function, args))

    def finish(self, *, timeout_s: float = 600.0) -> list[Any]:
        return self._collect(set(range(self.world_size)), timeout_s, "work")

    def _collect(self, pending: set[int], timeout_s: float, what: str) -> list[Any]:
        """Return the results of all ranks. Once a rank has failed, the others have a grace period to report their errors."""
        results: list[Any] = [None] * self.world_size
        failures: list[tuple[int, str, str]] = []
        deadline = time.monotonic() + timeout_s
        while pending:
            ready = wait([self._pipes[r] for r in pending], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                failures += [(r, f"no answer within {timeout_s:g} s while {what}", "") for r in sorted(pending)]
                break
            for rank in [r for r in sorted(pending) if self._pipes[r] in ready]:
                failure = self._receive(rank, results)
                pending.discard(rank)
                if failure:
                    failures.append((rank, *failure))
                    timeout_s = min(timeout_s, _GRACE_S)
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if failures:
            self._raise(failures, results)
        return results

    def _receive(self, rank: int, results: list[Any]) -> tuple[str, str] | None:
        try:
            kind, answer = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(timeout=5)
            return f"died with exit code {self.processes[rank].exitcode}", ""
        if kind == "failed":
            message, trace = answer
            return message, trace
        results[rank] = answer
        return None

    @staticmethod
    def _raise(failures: list[tuple[int, str, str]], results: list[Any]) -> None:
        trace = next((trace for _, _, trace in failures if trace), "")
        messages = [(rank, message) for rank, message, _ in failures]
        error = RankFailed(messages, results, lost=not all(trace for _, _, trace in failures))
        if trace:
            error.add_note(f"first traceback, of rank {next(r for r, _, t in failures if t)}:\n{trace}")
        raise error

    def close(self, *, grace_s: float = 10.0) -> None:
        """Ask every rank to end, and kill those that have not ended after the grace period."""
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except (BrokenPipeError, OSError):
                continue
        deadline = time.monotonic() + grace_s
        for process in self.processes:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(grace_s=10.0 if exc[0] is None else 1.0)
