"""Waits for other ranks that have no bound of weft's own, and what a wait is for, in words.

gloo's collectives and messages on CPUs have no bound, or another one. Such a wait runs on a thread of its own, while the caller
looks after its peers: a rank that is lost ends the caller's wait at once, and at the bound it is a WaitTimeout. What still
waits on that thread then ends with its connection, or at gloo's bound. A wait in NCCL ends only when its communicator is
aborted, on a thread of its own (`Abort`).

What a call on a GPU waits for is read from how far each lane has come, and from the flags of the steps there (`waiting`,
`unsent`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from weft.comm.rank_group import RankGroup
from weft.core.errors import PeerLost, WeftError
from weft.core.logs import LOGGER
from weft.core.schedule import Collective, Lane, SendReceive, Wait, places_of, waits
from weft.runtime.bindings import Where

if TYPE_CHECKING:
    from weft.runtime.bound import BoundProgram

T = TypeVar("T")
_NAMED_S = 2.0
"""How long after a connection has broken its reason may take to come: which rank is lost."""
_GRACE_S = 0.5
"""So much later than the bound this rank gives up: the rank that it waits for may say first what it waits for itself."""


def bounded(rank_group: RankGroup, explain: Callable[[], str], work: Callable[[], T]) -> T:
    """What `work` returns, which may block. Raises PeerLost with the rank that was lost, or WaitTimeout with `explain()`."""
    done, found, raised = threading.Event(), list[T](), list[Exception]()

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            raised.append(error)
        done.set()

    threading.Thread(target=run, name=f"weft-waits-{rank_group.rank}", daemon=True).start()
    rank_group.wait_until(done.is_set, lambda: explain() + suspended(rank_group), grace_s=_GRACE_S)
    with named(rank_group, explain):
        if raised:
            raise raised[0]
    return found[0]


@contextmanager
def named(rank_group: RankGroup, explain: Callable[[], str]) -> Iterator[None]:
    """What a library raises when a connection has broken becomes a PeerLost that names the rank which was lost, if a reason
    comes soon."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, WeftError):
            raise
        deadline = time.monotonic() + _NAMED_S
        while time.monotonic() < deadline:
            rank_group.check_peers()
            time.sleep(0.02)
        raise rank_group.fail(PeerLost(f"{explain()}{suspended(rank_group)}: {error}")) from error


def suspended(rank_group: RankGroup) -> str:
    """Which ranks of this host are stopped, as by SIGSTOP or a debugger, in words; nothing if none is."""
    stopped = []
    for peer in rank_group.ranks_on_node:
        with suppress(OSError):
            if Path(f"/proc/{rank_group.pids[peer]}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t"):
                stopped.append(f"rank {peer} (process {rank_group.pids[peer]}) is suspended")
    return "".join(f"; {one}" for one in stopped)


class Abort:
    """The abort of one communicator, on a thread of its own. Its kernels end at once, but NCCL does not return while a CUDA
    graph holds collectives of that communicator."""

    _WAITS_S = 5.0

    def __init__(self, abort: Callable[[], object], name: str) -> None:
        self._abort, self._ended = abort, False
        self._thread = threading.Thread(target=self._run, name=f"weft-abort-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._abort()
            self._ended = True
        except Exception as error:  # of torch's and NCCL's
            LOGGER.error("the process group cannot be aborted (%s): end this process", str(error).splitlines()[0])

    def ended(self) -> bool:
        """Whether NCCL has returned, after waiting a while for it."""
        self._thread.join(self._WAITS_S)
        return self._ended


def waiting(program: BoundProgram, seen: Sequence[int], reached: Mapping[str, int]) -> list[str]:
    """A line for each lane that waits for a flag. seen: the words of this rank. reached: by lane, the position of its step."""
    lines = []
    for lane in program.schedule.ranks[program.rank]:
        for where, wait in may_wait_for(program.rank, lane, reached[lane.name]):
            value, need = seen[program.flags.slot[wait.flag, lane.name, where.position]], program.signal_value(wait.flag)
            if value < need:
                lines.append(f"{where}: {wait.flag}: expected {need}, seen {value}; {program.raiser(wait.flag)}")
                break
    return lines


def unsent(program: BoundProgram, reached: Mapping[str, int]) -> Iterator[str]:
    """A line for each collective of the program, and for messages that a lane came to last. No flag says whether these have
    ended."""
    rank, schedule = program.rank, program.schedule
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
    """The waits of a lane that has reached `position`: those of that step, and of the steps that it waits for together with
    it."""
    for at in range(position, len(lane.steps) if position >= 0 else position):
        step = lane.steps[at]
        yield from ((Where(rank, lane.name, at, step), wait) for wait in waits(step))
        if not isinstance(step, Wait):
            return
