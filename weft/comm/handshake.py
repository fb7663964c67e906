"""The handshake: every rank of a process group says something, and all ranks get the same list, or all get an error.

It goes through the store of the process group and never through one of its collectives. So a rank that waits in vain ends its
wait at the bound, says who is missing, and leaves the group as it was: the ranks may try again, and no rank has begun a
collective that the others would take for another one.

Each try has a number, the generation, and keys of its own in the store:

    rank r sets what it says, once             7/r = what it says
    waits for the keys of all others           7/0 ... 7/n-1
    has seen them all: compare and set         7/end = complete
    gives up at its bound: compare and set     7/end = void

Whoever sets 7/end first decides for all ranks. If the generation is complete, every rank gets the list, even one whose bound is
over at that moment. If it is void, the rank that gave up raises an error, and those that still wait set their keys in
generation 8. A rank that comes later finds the first generation that has not ended. Within a generation no key is written
twice, so nothing of an earlier try is taken for something new. (`left/r` and `raised/r` belong to no generation. They are
overwritten, and serve errors, and giving up early, alone.) A rank that finds a key of its own there, which a try that was stuck
in the store or a process before it has left, makes that generation void and goes on.

Bad interleavings: (1) Rank 1 gives up while rank 2 sees all keys. The first of both to set the end decides. (2) A rank dies, or
is interrupted, after it has set its key. The others get a list with it, and find out in their next wait for that rank.

The store is asked on a thread of its own: torch bounds no question to a store whose process is stopped.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from weft.compat.c10d import store_of
from weft.core.errors import PeerLost, WaitTimeout

_LOG = logging.getLogger("weft")
WARNS_AFTER_S = 30.0
"""After so long, or half of the bound, a warning says who is waited for: some ranks may take longer to load a model."""
_ANSWER_S = 2.0
"""How long after its bound a rank waits for the store to answer."""
_LOOKS_AT_OTHERS_S = 0.25
"""How often a rank that waits looks at who else has come, and whether a rank has died."""
_MOST_ASKED_HZ = 3000
"""How often all ranks together ask the store, once they have waited for a while."""
_CAUGHT_S = 3.0
"""How long a rank that has raised an error in the place of the first call may take to come after all."""
_COMPLETE, _VOID = "complete", "void"


@dataclass
class _Link:
    """What this rank has of a group's store. store: its connection. A new one for each handshake would be a burden: torch's
    server can take 5 s to accept one where names of hosts are not resolved. generation: all before it have ended. errors: how
    many this rank has raised in the place of the first call."""

    store: Any = None
    generation: int = 0
    errors: int = 0


_LINKS: WeakKeyDictionary[dist.ProcessGroup, _Link] = WeakKeyDictionary()


def _linked(group: dist.ProcessGroup) -> _Link:
    """The group's, with a connection."""
    link = _LINKS.setdefault(group, _Link())
    link.store = link.store or store_of(group, "weft/handshake")
    return link


def raise_instead(group: dist.ProcessGroup, words: str) -> None:
    """This rank raises an error in the place of the group's first call. Ranks that wait for it there, and have not raised as
    many errors themselves, give up soon, unless it comes after all. Returns when that is written, or the store does not answer
    soon."""
    link = _LINKS.setdefault(group, _Link())
    link.errors += 1
    raised = json.dumps([link.errors, words])

    def publish() -> None:
        with suppress(Exception):  # torch's errors of stores are of several kinds, and the rank raises its own error
            _linked(group).store.set(f"raised/{group.rank()}", raised)

    thread = threading.Thread(target=publish, name=f"weft-raises-{group.rank()}", daemon=True)
    thread.start()
    thread.join(_ANSWER_S)


def handshake(group: dist.ProcessGroup, mine: Any, *, timeout_s: float, lost: Callable[[], str] = lambda: "") -> list[Any]:
    """What each rank gave as `mine`, by rank. mine: of lists, numbers and strings. Collective.

    lost: which rank is known to be dead, in words; nothing if none is. Raises WaitTimeout with the ranks that have not come
    within timeout_s; PeerLost if a rank, or the group's store, is lost.
    """
    attempt = _Attempt(group, mine)
    thread = threading.Thread(target=attempt.run, name=f"weft-handshake-{group.rank()}", daemon=True)
    thread.start()
    try:
        dead = _wait(attempt, timeout_s, lost)
    finally:
        if not attempt.concluded.is_set():
            attempt.given_up.set()
            attempt.concluded.wait(2 * _ANSWER_S)
    if attempt.said is not None:
        return attempt.said
    if attempt.lost is not None:
        seen = f"; before that, {attempt.missing}" if attempt.missing else ""
        raise PeerLost(f"the store of the group is lost, and with it the process that keeps it{seen} ({attempt.lost})")
    if dead:
        raise PeerLost(dead)
    who = attempt.missing or "the group's store has not answered; the process that keeps it may be stopped"
    raise WaitTimeout(f"within {timeout_s:g} s (WEFT_TIMEOUT_S), {who}; did a rank raise before, die, or leave a call out?")


def _wait(attempt: _Attempt, timeout_s: float, lost: Callable[[], str]) -> str:
    """Wait until the attempt has come to its end, a rank is lost, or the bound is over; what `lost` says. Warns once."""
    began, warns_s, warned = time.monotonic(), min(WARNS_AFTER_S, timeout_s / 2), False
    while (left_s := began + timeout_s - time.monotonic()) > 0:
        if attempt.concluded.wait(min(_LOOKS_AT_OTHERS_S, left_s)):
            return ""
        if dead := lost() or attempt.raised:
            return dead
        if not warned and time.monotonic() > began + warns_s + 0.1:
            who = attempt.missing or "the group's store has not answered"
            _LOG.warning("for %g s %s; did a rank raise? rank %d waits", warns_s, who, attempt.rank)
            warned = True
    return ""


class _Attempt:
    """One rank's attempt. given_up: it is to end. concluded: it has ended. said: what all ranks said, if it took place.
    missing: who had not come when it was looked at last. raised: which rank has raised an error instead, and does not come.
    lost: why the store could not be asked."""

    def __init__(self, group: dist.ProcessGroup, mine: Any) -> None:
        self._group, self._mine = group, json.dumps(mine)
        self.rank, self.size = group.rank(), group.size()
        self.given_up, self.concluded = threading.Event(), threading.Event()
        self.said: list[Any] | None = None
        self.lost: BaseException | None = None
        self.missing = self.raised = ""
        self._seen: dict[int, float] = {}
        """By rank that has raised more errors than this one, since when that is known."""

    def run(self) -> None:
        """The whole attempt."""
        try:
            self._link = _linked(self._group)
            self._store = self._link.store
            self._store.set(f"left/{self.rank}", "")
            while self.said is None and not self.given_up.is_set():
                if not self._store.check([f"{self._link.generation}/end"]):
                    self._take_part(self._link.generation)
                self._link.generation += 1
            if self.said is not None and self._link.errors:
                self._link.errors = 0
                self._store.set(f"raised/{self.rank}", "")
        except Exception as error:  # torch's errors of stores are of several kinds
            self.lost = error
            _LINKS.setdefault(self._group, _Link()).store = None
        finally:
            self.concluded.set()

    def _take_part(self, generation: int) -> None:
        """Take part in a generation until it has ended; `said` is set if it is complete."""
        keys = [f"{generation}/{rank}" for rank in range(self.size)]
        if self._store.compare_set(keys[self.rank], "", self._mine).decode() != self._mine:
            self._end(generation, _VOID)
            return
        looks_at, pause_s, ended = 0.0, 1e-3, ""
        while not ended:
            if self._store.check(keys):
                ended = self._end(generation, _COMPLETE)
            elif self.given_up.is_set():
                self._store.set(f"left/{self.rank}", "left")
                ended = self._end(generation, _VOID)
                self._look(keys)
            elif self._store.check([f"{generation}/end"]):
                ended = self._end(generation, _VOID)
            else:
                if time.monotonic() >= looks_at:
                    self._look(keys)
                    looks_at = time.monotonic() + _LOOKS_AT_OTHERS_S
                self.given_up.wait(pause_s)
                pause_s = min(1.5 * pause_s, max(0.02, self.size / _MOST_ASKED_HZ))
        if ended == _COMPLETE:
            self.said = [json.loads(text) for text in self._read(keys)]

    def _end(self, generation: int, how: str) -> str:
        """How a generation has ended: as this rank says, if no rank was faster."""
        return self._store.compare_set(f"{generation}/end", "", how).decode()  # type: ignore[no-any-return]

    def _look(self, keys: Sequence[str]) -> None:
        """Note who is missing, and who has raised an error instead of coming, a while ago."""
        absent = [rank for rank, text in enumerate(self._read(keys)) if not text]
        left = [rank for rank, text in zip(absent, self._read([f"left/{rank}" for rank in absent]), strict=True) if text]
        late = [rank for rank in absent if rank not in left]
        self.missing = _named(late, "not come to the group's first call") or _named(left, "given up the group's first call")
        texts = self._read([f"raised/{rank}" for rank in absent])
        raised = {rank: json.loads(text) for rank, text in zip(absent, texts, strict=True) if text}
        now = time.monotonic()
        self._seen = {rank: self._seen.get(rank, now) for rank, (count, _) in raised.items() if count > self._link.errors}
        for rank in [rank for rank, since in self._seen.items() if now > since + _CAUGHT_S][:1]:
            self.raised = f"rank {rank} raised an error and did not come to the group's first call: {raised[rank][1]}"

    def _read(self, keys: Sequence[str]) -> list[str]:
        """What some keys hold; nothing for one that is not there, for which torch would wait."""
        if not keys:
            return []
        there = list(keys) if self._store.check(list(keys)) else [key for key in keys if self._store.check([key])]
        values = self._store.multi_get(there) if self._store.has_extended_api() else [self._store.get(key) for key in there]
        known = dict(zip(there, values, strict=True))
        return [known.get(key, b"").decode() for key in keys]


def _named(ranks: Sequence[int], what: str) -> str:
    """That some ranks have done something; nothing for none."""
    if not ranks:
        return ""
    return f"rank {ranks[0]} has {what}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have {what}"
