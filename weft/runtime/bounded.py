"""Waits in libraries that have no bound of their own, or another one: gloo's collectives and messages on CPUs.

Such a wait runs on a thread of its own, while the caller looks after its peers: a rank that is lost ends the caller's wait at
once, and at the bound it is a WaitTimeout. What still waits on that thread then ends with its connection, or at gloo's bound.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from weft.comm.rank_group import RankGroup
from weft.core.errors import PeerLost, WeftError

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
    rank_group.until(done.is_set, lambda: explain() + suspended(rank_group), grace_s=_GRACE_S)
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
    for peer in rank_group.near:
        with suppress(OSError):
            if Path(f"/proc/{rank_group.pids[peer]}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t"):
                stopped.append(f"rank {peer} (process {rank_group.pids[peer]}) is suspended")
    return "".join(f"; {one}" for one in stopped)
