"""The handshake: every rank of a process group says something, and all ranks get the same list, or all get an error.

It goes through the store of the process group and never through one of its collectives. So a rank that waits in vain ends its
wait at the bound, says who is missing, and leaves the group as it was: the ranks may try again, and no rank has begun a
collective that the others would take for another one.

    rank r                                   store                       rank 0
    join/r = nonce, what it says   ------->  join/1 ... join/n-1  -----> waits until all have joined
                                                                         claims each nonce (an atomic add)
    waits for its own nonce in it  <-------  list                <-----  publishes the list: nonces, what all say
    gives up: claims its own nonce ------->  token/NONCE

A nonce is drawn for each attempt, and whoever claims it first decides: rank 0, which then publishes a list with it, or its own
rank, which then gives up for good. So what an earlier attempt or an earlier group of the same name left in the store is never
taken for something new: its nonces are claimed, or are in nobody's hand any more.

Bad interleavings: (1) Rank 1 gives up while rank 0 claims the nonces of ranks 1 and 2. Rank 0 loses that of rank 1, and has
that of rank 2. It publishes a list that is void, and rank 2 joins again with a new nonce. (2) Rank 0 dies between its claims
and its list. The others then wait for it until _ANSWER_S after their bound, and name rank 0. (3) A rank dies, or is
interrupted, after it was claimed. The others get the list and find that out in their next wait for that rank.

The store is asked on a thread of its own: torch bounds no question to a store whose process is stopped.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from weft.compat.c10d import store_of
from weft.core.errors import PeerLost, WaitTimeout

_LOG = logging.getLogger("weft")
WARNS_AFTER_S = 30.0
"""After so long, or half of the bound, a warning says who is waited for: some ranks may take longer to load a model."""
_ANSWER_S = 2.0
"""How long after its bound a rank waits for the list that rank 0 is about to publish, and for the store to answer at all."""
_LOOKS_AT_OTHERS_S = 0.25
"""How often a rank that waits looks at who else has come, and whether a rank has died."""
_MOST_ASKED_HZ = 3000
"""How often all ranks together ask the store, once they have waited for a while."""
_STORES: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()
"""Each group's connection to its store. A new one for each attempt would be a burden: torch's server can take 5 s to accept one
where names of hosts are not resolved."""


_CAUGHT_S = 3.0
"""How long a rank that has raised an error in the place of the first call may take to come after all."""
_ERRORS: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""By group, how many errors this rank has raised in the place of the first call."""


def raise_instead(group: dist.ProcessGroup, words: str, *, purpose: str) -> None:
    """This rank raises an error in the place of the group's first call. Ranks that wait for it there, and have not raised as
    many errors themselves, give up soon, unless it comes after all. Returns when that is written, or the store does not answer
    soon."""
    _ERRORS[group] = count = _ERRORS.get(group, 0) + 1

    def publish() -> None:
        with suppress(Exception):  # torch's errors of stores are of several kinds, and the rank raises its own error
            PrefixStore(purpose, _store(group)).set(f"raised/{group.rank()}", json.dumps([count, words]))

    thread = threading.Thread(target=publish, name=f"weft-raises-{group.rank()}", daemon=True)
    thread.start()
    thread.join(_ANSWER_S)


def _store(group: dist.ProcessGroup) -> Any:
    """This rank's connection to a group's store."""
    if group not in _STORES:
        _STORES[group] = store_of(group, "weft/handshake")
    return _STORES[group]


def handshake(
    group: dist.ProcessGroup, mine: Any, *, timeout_s: float, purpose: str, lost: Callable[[], str] = lambda: ""
) -> list[Any]:
    """What each rank gave as `mine`, by rank. mine: of lists, numbers and strings. Collective.

    purpose: a rank finds only those that came for the same purpose. lost: which rank is known to be dead, in words; nothing if
    none is. Raises WaitTimeout with the ranks that have not come within timeout_s; PeerLost if a rank, or the group's store, is
    lost.
    """
    attempt = _Attempt(group, mine, purpose)
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

    def __init__(self, group: dist.ProcessGroup, mine: Any, purpose: str) -> None:
        self._group, self._mine, self._purpose = group, mine, purpose
        self.rank, self.size = group.rank(), group.size()
        self.given_up, self.concluded = threading.Event(), threading.Event()
        self.said: list[Any] | None = None
        self.missing = self.raised = ""
        self._seen: dict[int, float] = {}
        """By rank that has raised more errors than this one, since when that is known."""
        self._asks_at = 0.0
        self.lost: BaseException | None = None
        self._joins = [f"join/{rank}" for rank in range(self.size)]
        self._pause_s = 1e-3

    def run(self) -> None:
        """The whole attempt."""
        try:
            self._store = PrefixStore(self._purpose, _store(self._group))
            self.said = self._lead() if self.rank == 0 else self._follow()
            if self.said is not None:
                self._store.set(self._joins[self.rank], "")
                if _ERRORS.pop(self._group, 0):
                    self._store.set(f"raised/{self.rank}", "")
        except Exception as error:  # torch's errors of stores are of several kinds
            self.lost = error
            _STORES.pop(self._group, None)
        finally:
            self.concluded.set()

    def _lead(self) -> list[Any] | None:
        """Rank 0 waits for all others, and publishes the list of all. None if it has given up."""
        self._join(own := secrets.token_hex(8))
        dead = set[str]()
        while not self.given_up.is_set():
            joined = [(own, self._mine), *(join for join in self._look(dead)[1:] if join is not None)]
            # One that rank 0 has claimed before has yet to read its list, which must not be written over.
            if len(joined) == self.size and not any(self._store.add(f"token/{nonce}", 0) for nonce, _ in joined):
                nonces, said = [nonce for nonce, _ in joined], [one for _, one in joined]
                if self._claim(nonces[1:]):
                    self._publish(nonces, said)
                    return said
                # A rank has given up at this moment: those that were claimed have to join again.
                dead.update(nonces[1:])
                self._publish(nonces, None)
            self._rest()
        self._leave(own)
        return None

    def _claim(self, nonces: Sequence[str]) -> bool:
        """Claim the nonces of all others; False if one of them was claimed before."""
        return all(self._store.add(f"token/{nonce}", 1) == 1 for nonce in nonces)

    def _publish(self, nonces: Sequence[str], said: list[Any] | None) -> None:
        self._store.set("list", json.dumps([nonces, said]))

    def _follow(self) -> list[Any] | None:
        """Any other rank joins, and waits for the list. None if it has given up."""
        while not self.given_up.is_set():
            self._join(nonce := secrets.token_hex(8))
            published, said = self._await_list(nonce)
            if published and said is None:
                continue  # void: another rank has given up at this moment
            return said
        return None

    def _await_list(self, nonce: str) -> tuple[bool, list[Any] | None]:
        """Whether a list with this nonce was published, and what it says."""
        looks_at = 0.0
        while not self.given_up.is_set():
            if (found := self._published(nonce)) is not None:
                return True, found[0]
            if time.monotonic() >= looks_at:
                # An attempt that was stuck in the store may have written over this one's.
                joins = self._look(set())
                if joins[self.rank] is None:
                    self._join(nonce)
                looks_at = time.monotonic() + _LOOKS_AT_OTHERS_S
            self._rest()
        if self._leave(nonce):
            self._look(set())
            return False, None
        deadline = time.monotonic() + _ANSWER_S  # rank 0 has counted this one: its list comes now
        while time.monotonic() < deadline:
            if (found := self._published(nonce)) is not None:
                return True, found[0]
            self._rest()
        self.missing = "rank 0 has ended during the group's first call"
        return False, None

    def _published(self, nonce: str) -> tuple[list[Any] | None] | None:
        """What the list of this nonce says; None if there is none."""
        if not self._store.check(["list"]):
            return None
        nonces, said = json.loads(self._store.get("list"))
        return (said,) if nonces[self.rank] == nonce else None

    def _join(self, nonce: str) -> None:
        self._nonce = nonce
        self._store.set(self._joins[self.rank], json.dumps([nonce, self._mine]))

    def _leave(self, nonce: str) -> bool:
        """Give up; False if rank 0 was faster and has counted this rank."""
        if self._store.add(f"token/{nonce}", 1) != 1:
            return False
        self._store.set(f"left/{self.rank}", nonce)
        return True

    def _look(self, dead: set[str]) -> list[tuple[str, Any] | None]:
        """By rank, the nonce of one that has joined and not given up, and what it says. Notes who is missing."""
        joins, lefts = self._read(self._joins), self._read([f"left/{rank}" for rank in range(self.size)])
        found: list[tuple[str, Any] | None] = []
        left = []
        for rank, (join, nonce) in enumerate(zip(joins, lefts, strict=True)):
            made = tuple(json.loads(join)) if join else None
            if made and (made[0] == nonce or made[0] in dead or (rank == self.rank and made[0] != self._nonce)):
                left += [rank] if made[0] == nonce else []
                made = None
            found.append(made)
        absent = [rank for rank, one in enumerate(found) if one is None and rank not in left and rank != self.rank]
        gone = [rank for rank in left if rank != self.rank]
        self.missing = (
            _named(absent, "{} not come to the group's first call") or _named(gone, "{} given up the group's first call") or ""
        )
        self._ask_of_errors(absent)
        if not self.missing and self.rank:
            self.missing = "rank 0 has not answered in the group's first call, to which all ranks had come"
        return found

    def _ask_of_errors(self, absent: Sequence[int]) -> None:
        """Note which of the ranks that have not come has raised an error instead, a while ago."""
        now = time.monotonic()
        if now < self._asks_at:
            return
        self._asks_at = now + _LOOKS_AT_OTHERS_S
        texts = self._read([f"raised/{rank}" for rank in absent]) if absent else []
        raised = {rank: json.loads(text) for rank, text in zip(absent, texts, strict=True) if text}
        mine = _ERRORS.get(self._group, 0)
        self._seen = {rank: self._seen.get(rank, now) for rank, (count, _) in raised.items() if count > mine}
        late = [rank for rank, since in self._seen.items() if now > since + _CAUGHT_S]
        where = "did not come to the group's first call"
        self.raised = f"rank {late[0]} raised an error and {where}: {raised[late[0]][1]}" if late else ""

    def _read(self, keys: Sequence[str]) -> list[str]:
        """What some keys hold; nothing for one that is not there, for which torch would wait."""
        there = list(keys) if self._store.check(list(keys)) else [key for key in keys if self._store.check([key])]
        extended: Any = self._store  # torch does not declare has_extended_api
        values = extended.multi_get(there) if extended.has_extended_api() else [extended.get(key) for key in there]
        known = dict(zip(there, values, strict=True))
        return [known.get(key, b"").decode() for key in keys]

    def _rest(self) -> None:
        """Between two looks at the store."""
        self.given_up.wait(self._pause_s)
        self._pause_s = min(1.5 * self._pause_s, max(0.02, self.size / _MOST_ASKED_HZ))


def _named(ranks: Sequence[int], what: str) -> str:
    """That some ranks have not come, or have given up; nothing for none."""
    if not ranks:
        return ""
    who = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
    return what.format(who)
