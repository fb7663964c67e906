"""The ranks of a process group come together for the first time, and tell each other something.

Until they have, nobody watches them, and the way to tell all something is a collective of the process group's: if a rank does
not come, because it raised before, say, the others wait in it for the process group's timeout, half an hour; NCCL then ends
the process. So each rank first says in the group's store that it is there:

    weft/here/7/count      how many ranks are at the group's meeting 7, which is the next one after 6 that took place
    weft/here/7/RANK       whether this one has come, or come and given up

Who has not come is named, in a warning after a while, and in the error at the end. Where NCCL alone is there, ranks wait in the
store until all have come, and one that gives up is not counted any more: the group can meet later. gloo sees at once that
a process is gone, so ranks wait in its collective.

Once all have come, the meeting has taken place, whatever comes of it: all ranks count it.

Bad interleavings: a rank gives up at the moment at which the last one comes, or the store has keys of an earlier group of this
name that met as often (a launcher's store outlives processes). Then some ranks go on to the collective, and wait in it as they
would have without all this.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore

from weft.core.errors import PeerLost, WaitTimeout, WeftError

T = TypeVar("T")
SAYS_S = 30.0
"""After so long a warning says who is waited for: to load a model may take some ranks longer than others."""
_MOST_ASKED_HZ = 3000
"""How often all ranks together ask the store, once they have waited for a while."""
_HERE, _LEFT = "here", "left"
_MET: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""How often each group has met. Not by name: torch gives names again, to groups of other ranks."""


def told_by_all(group: dist.ProcessGroup, mine: T) -> list[T]:
    """What each rank gave as mine, by rank. Collective.

    Raises WaitTimeout, with the ranks that have not come, at the process group's timeout; PeerLost if one is gone, or the
    group's store is.
    """
    told: list[Any] = [None] * group.size()
    try:
        with _Meeting(group).begun() as meeting:
            if all(device.type != "cpu" for device in group._device_types):
                meeting.await_all()
            dist.all_gather_object(told, mine, group=group)
    except WeftError:
        raise
    except RuntimeError as error:
        raise PeerLost(f"the ranks of the group could not meet for its first call: {error}") from error
    return told


class _Meeting:
    """A group's next meeting, as this rank sees it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._number = group, _MET.get(group, 0)
        store: Any = group.get_group_store()
        self._store = PrefixStore(f"weft/here/{self._number}", store.clone())
        self._came = 0

    @contextmanager
    def begun(self) -> Iterator[_Meeting]:
        """This rank is there, and says who is not, should it take long."""
        self._store.set(str(self._group.rank()), _HERE)
        self._came = self._store.add("count", 1)
        say = threading.Timer(SAYS_S, self._say)
        say.daemon = True
        say.start()
        try:
            yield self
        except BaseException as error:
            who = self._absent()
            if not who:
                _MET[self._group] = self._number + 1
            else:
                with suppress(RuntimeError):
                    self._store.set(str(self._group.rank()), _LEFT)
                    self._store.add("count", -1)
            if who and isinstance(error, RuntimeError) and not isinstance(error, WeftError):
                raise PeerLost(f"{who}: {error}") from error
            raise
        finally:
            say.cancel()
        _MET[self._group] = self._number + 1

    def await_all(self) -> None:
        """Wait until all have come. Raises WaitTimeout."""
        size, bound, pause = self._group.size(), bound_s(self._group), 1e-3
        deadline = time.monotonic() + bound
        while self._came < size:
            if time.monotonic() > deadline:
                who = self._absent() or "not all ranks have come to the group's first call"
                raise WaitTimeout(f"within {bound:g} s, the process group's timeout, {who}; did it raise, or leave a call out?")
            time.sleep(pause)
            pause = min(1.5 * pause, max(0.02, size / _MOST_ASKED_HZ))
            self._came = self._store.add("count", 0)

    def _absent(self) -> str:
        """Who has not come, or has given up; nothing if all are there, or nobody can tell."""
        try:
            said = [self._said(str(rank)) for rank in range(self._group.size())]
        except RuntimeError:
            return ""
        for word, what in (("", " not come to the group's first call"), (_LEFT, " given up the group's first call")):
            ranks = [str(rank) for rank, one in enumerate(said) if one == word]
            if ranks:
                return f"rank {ranks[0]} has{what}" if len(ranks) == 1 else f"ranks {', '.join(ranks)} have{what}"
        return ""

    def _said(self, rank: str) -> str:
        return self._store.get(rank).decode() if self._store.check([rank]) else ""

    def _say(self) -> None:
        if who := self._absent():
            warnings.warn(f"for {SAYS_S:g} s {who}; did it raise? rank {self._group.rank()} waits", stacklevel=1)


def bound_s(group: dist.ProcessGroup) -> float:
    """The process group's own timeout, the longest of its backends; torch's default, where they do not tell."""
    backends = [group._get_backend(device) for device in group._device_types]
    try:
        timeouts = [backend.options._timeout for backend in backends]
    except (AttributeError, RuntimeError):  # of a backend from elsewhere
        timeouts = [default_pg_timeout]
    return max(timeout.total_seconds() for timeout in timeouts)
