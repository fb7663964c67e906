"""What many tests use: rank processes, and the command line."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import devices
import pytest
from rank_pools import POOLS, Pool

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


def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: three for two cores, since ranks wait more than they compute. Each may have 16 ranks, so eight at most."""
    return min(-(-3 * len(os.sched_getaffinity(0)) // 2), 8)


class RankFixture:
    """`ranks(n).run(work, ...)` for any n. A rank's traceback is the test's failure."""

    def __call__(self, world_size: int) -> Pool:
        return POOLS.get(world_size, {"WEFT_TIMEOUT_S": str(SHORT_BOUND_S)})


@pytest.fixture(scope="session", autouse=True)
def _pools_end_with_the_session() -> Iterator[None]:
    yield
    POOLS.close()


@pytest.fixture(scope="session")
def ranks() -> RankFixture:
    return RankFixture()


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
