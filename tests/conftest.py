"""What many tests use: rank processes, started once for each world size and thrown away after a failure, so that none infects
the next; and the command line."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import devices
import pytest

from weft.runtime.ranks import Ranks

Weft = Callable[..., tuple[int, str, str]]
SHORT_BOUND_S, REAPED_WITHIN_S = 20.0, 30.0
# No test depends on what an earlier run has left in the user's folder, or leaves anything there.
os.environ["WEFT_CACHE_DIR"] = ""
with suppress(ImportError):  # where there are GPUs it need not be installed
    from hypothesis import HealthCheck, settings

    # An example takes as long as other work on the cores lets it; and what is drawn is the same in every run.
    slow = [HealthCheck.too_slow]
    settings.register_profile("weft", deadline=None, derandomize=True, database=None, suppress_health_check=slow)
    settings.load_profile("weft")


class RankFixture:
    """`ranks(n).run(work, ...)` for any n. A rank's traceback is the test's failure."""

    def __init__(self) -> None:
        self._pools: dict[int, Ranks] = {}

    def __call__(self, world_size: int) -> RankFixture.Handle:
        return RankFixture.Handle(self, world_size)

    class Handle:
        def __init__(self, owner: RankFixture, world_size: int) -> None:
            self.owner, self.world_size = owner, world_size

        def run(self, work: Callable[..., Any], *args: Any, timeout_s: float = 100.0) -> list[Any]:
            pools = self.owner._pools
            self._replace_one_that_ended()
            if self.world_size not in pools:
                pools[self.world_size] = Ranks(self.world_size, environment={"WEFT_TIMEOUT_S": str(SHORT_BOUND_S)})
            try:
                return pools[self.world_size].run(work, *args, timeout_s=timeout_s)
            except BaseException:
                pools.pop(self.world_size).close(grace_s=0)
                raise

        def _replace_one_that_ended(self) -> None:
            """Ranks that died after their last test was over fail none; but it is said."""
            pool = self.owner._pools.get(self.world_size)
            codes = [process.exitcode for process in pool.processes] if pool else []
            if pool and codes != [None] * len(codes):
                warnings.warn(f"of {self.world_size} idle ranks some had ended, with exit codes {codes}", stacklevel=3)
                self.owner._pools.pop(self.world_size).close(grace_s=0)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankFixture]:
    fixture = RankFixture()
    yield fixture
    fixture.close()


@pytest.fixture
def weft(capsys: pytest.CaptureFixture[str]) -> Weft:
    """Runs the command line in this process: (exit status, standard output, standard error)."""
    from weft.cli import main

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.fixture
def on_an_h200() -> Iterator[None]:
    """What torch reports of any GPU is what it reports of an H200."""
    with devices.pretend(devices.H200):
        yield


def shared_memory_names() -> list[str]:
    """Names of weft's segments that lie in POSIX shared memory now."""
    return sorted(p.name for p in Path("/dev/shm").glob("weft-*"))


def of_the_dead() -> list[str]:
    """Those whose creator is gone. Another run of tests may be about to reap its own."""
    return [n for n in shared_memory_names() if n.split("-")[2].isdigit() and not os.path.exists(f"/proc/{n.split('-')[2]}")]


@pytest.fixture(autouse=True)
def _nothing_left_in_shared_memory() -> Iterator[None]:
    yield
    deadline = time.monotonic() + REAPED_WITHIN_S
    # Looked at once each time: a rank of another run may die between two looks.
    while (left := of_the_dead()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == [], "segments of dead processes were left in /dev/shm"
