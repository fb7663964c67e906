"""This module bounds waits of libraries for other ranks, and describes what a call waits for.

gloo's collectives and messages on CPUs have no bound, or a different one. `bounded` runs such a wait on a separate thread while
the caller watches its peers. A lost rank ends the caller's wait at once, and at weft's bound it raises WaitTimeout. The thread
itself ends when its connection closes, or at gloo's bound. `await_collective` needs no thread, because a wait for a collective
can be given up and begun again. A wait in NCCL ends only when its communicator is aborted, which also needs a separate thread
(`Abort`).

On a GPU, the progress of each lane and the flags of its current steps show what a call waits for (`describe_waits`,
`describe_unfinished`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from weft.comm.rank_group import RankGroup
from weft.compat.c10d import has_ended
from weft.core.errors import PeerLost, WeftError
from weft.core.logs import LOGGER
from weft.core.schedule import Collective, Lane, SendReceive, Wait, places_of, waits
from weft.runtime.bindings import Where
from weft.runtime.launches import Site

T = TypeVar("T")
_REPORT_S = 2.0
"""After a connection breaks, the time to wait for the report that says which rank is lost."""
_LOOK_S = 5e-3
"""How long a wait for a collective lasts before the peers are looked at."""
_GRACE_S = 0.5
"""The time after the bound at which this rank gives up, so that the rank that it waits for can report first."""


def bounded(rank_group: RankGroup, explain: Callable[[], str], work: Callable[[], T]) -> T:
    """Run `work`, which may block, and return its result.

    Raises PeerLost with the rank that was lost, or WaitTimeout with `explain()`.
    """
    with name_lost_rank(rank_group, explain):
        return rank_group.run_bounded(work, lambda: explain() + describe_suspended(rank_group), grace_s=_GRACE_S)


def await_collective(rank_group: RankGroup, explain: Callable[[], str], work: dist.Work) -> None:
    """Wait for a collective on CPUs. Raises as `bounded` does, and has no thread."""
    with name_lost_rank(rank_group, explain):
        rank_group.wait_until(
            lambda: has_ended(work, _LOOK_S), lambda: explain() + describe_suspended(rank_group), grace_s=_GRACE_S
        )


@contextmanager
def name_lost_rank(rank_group: RankGroup, explain: Callable[[], str]) -> Iterator[None]:
    """Turn a library's error about a broken connection into a PeerLost. It names the lost rank if that is reported soon."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, WeftError):
            raise
        deadline = time.monotonic() + _REPORT_S
        while time.monotonic() < deadline:
            rank_group.check_peers()
            time.sleep(0.02)
        raise rank_group.fail(PeerLost(f"{explain()}{describe_suspended(rank_group)}: {error}")) from error


def describe_suspended(rank_group: RankGroup) -> str:
    """Return a text that names the ranks of this node that SIGSTOP or a debugger has stopped, or "" if there are none."""
    stopped = []
    for peer in rank_group.ranks_on_node:
        with suppress(OSError):
            if Path(f"/proc/{rank_group.pids[peer]}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t"):
                stopped.append(f"rank {peer} (process {rank_group.pids[peer]}) is suspended")
    return "".join(f"; {one}" for one in stopped)


class Abort:
    """An Abort aborts one communicator on a separate thread.

    The communicator's kernels end at once, but NCCL returns only when no CUDA graph holds collectives of the communicator.
    """

    _WAITS_S = 5.0

    def __init__(self, abort: Callable[[], object], name: str) -> None:
        self._abort, self._ended = abort, False
        self._thread = threading.Thread(target=self._run, name=f"weft-abort-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._abort()
            self._ended = True
        except Exception as error:  # torch and NCCL raise several types
            LOGGER.error("the process group cannot be aborted (%s): end this process", str(error).splitlines()[0])

    def ended(self) -> bool:
        """Wait a few seconds for NCCL. Return whether it has returned."""
        self._thread.join(self._WAITS_S)
        return self._ended


def describe_waits(site: Site, seen: Sequence[int], reached: Mapping[str, int]) -> list[str]:
    """Return a line for each lane that waits for a flag.

    seen: the words of this rank.
    reached: the position that each lane has reached.
    """
    lines = []
    for lane in site.schedule.ranks[site.rank]:
        for where, wait in may_wait_for(site.rank, lane, reached[lane.name]):
            value, need = seen[site.flags.slot[wait.flag, lane.name, where.position]], site.signal_value(wait.flag)
            if value < need:
                lines.append(f"{where}: {wait.flag}: expected {need}, seen {value}; {site.raiser(wait.flag)}")
                break
    return lines


def describe_unfinished(site: Site, reached: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for each collective of the schedule, and for each lane whose last reached step is messages.

    No flag shows whether these have ended.
    """
    rank, schedule = site.rank, site.schedule
    others = ", ".join(f"rank {peer}" for peer in range(schedule.problem.world_size) if peer != rank)
    for lane, position, step in places_of(Collective, schedule.ranks[rank]):
        where = Where(rank, lane.name, position, step)
        yield f"{where}: no flag is missing; perhaps not all ranks have begun it ({others})"
    for lane in schedule.ranks[rank]:
        position = reached[lane.name]
        last = lane.steps[position] if position >= 0 else None
        if isinstance(last, SendReceive):
            where = Where(rank, lane.name, position, last)
            yield f"{where}: no flag is missing; perhaps not all of ranks {sorted(last.peers)} have begun their ends"


def may_wait_for(rank: int, lane: Lane, position: int) -> Iterator[tuple[Where, Wait]]:
    """Yield the waits of a lane that has reached `position`. The waits of consecutive Wait steps are one wait."""
    for at in range(position, len(lane.steps) if position >= 0 else position):
        step = lane.steps[at]
        yield from ((Where(rank, lane.name, at, step), wait) for wait in waits(step))
        if not isinstance(step, Wait):
            return
