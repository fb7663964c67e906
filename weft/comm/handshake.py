"""The handshake gives every rank of a process group the same list of the values of all ranks, or an error to all ranks.

It uses the store of the process group and never one of its collectives. So a rank whose peers do not arrive stops waiting at
the bound, names the missing ranks, and leaves the group unchanged: the ranks may try again, and no rank has begun a collective
that the others would mistake for another one.

Each attempt has a number, the generation, and keys of its own in the store:

    rank r sets its value, once                7/r = its value
    waits for the keys of all others           7/0 ... 7/n-1
    has seen them all: compare and set         7/end = complete
    gives up at its bound: compare and set     7/end = void

The rank that sets 7/end first decides for all ranks. If the generation is complete, every rank gets the list, even one whose
bound is over at that moment. If it is void, the rank that gave up raises an error, and those that still wait set their keys in
generation 8. A rank that arrives later uses the first generation that has not ended. Within a generation no key is written
twice, so a value of an earlier attempt is never mistaken for a new one. (`left/r` and `raised/r` belong to no generation. They
are overwritten, and only serve error messages and giving up early.) If a rank finds its own key already set, by an attempt that
hung in the store or by an earlier process, it makes that generation void and uses the next one.

Bad interleavings: (1) Rank 1 gives up while rank 2 sees all keys. The first of both to set the end decides. (2) A rank dies, or
is interrupted, after it has set its key. The others get a list with it, and find out in their next wait for that rank.

A separate thread talks to the store, because torch does not bound a request to a store whose process is stopped.
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

from weft.compat.c10d import refusal_of_store, store_of
from weft.core.errors import PeerLost, WaitTimeout

_LOG = logging.getLogger("weft")
WARNS_AFTER_S = 30.0
"""After 30 s, or half of the bound if that is less, a warning names the missing ranks. Some ranks may take longer to load a
model."""
_ANSWER_S = 2.0
"""How long after its bound a rank waits for the store to answer."""
_LOOKS_AT_OTHERS_S = 0.25
"""How often a waiting rank checks which ranks have arrived, and whether a rank has died."""
_ASKS_FOR_STORE_S = 1.0
"""If a rank has no connection to the store after 1 s, it checks whether there is a store. It waits twice as long before each
further check, because torch's server can take 5 s to accept a connection, and each check makes one."""
_MOST_ASKED_HZ = 3000
"""How often all ranks together ask the store, once they have waited for a while."""
_RETRY_GRACE_S = 3.0
"""How long a rank that has raised an error in the place of the first call may take to come after all."""
_COMPLETE, _VOID = "complete", "void"


@dataclass
class _Link:
    """A _Link is this rank's link to the store of a group.

    store: the connection. It is reused, because torch's server can take 5 s to accept one if host names are not resolved.
    generation: all generations before this one have ended.
    errors: the number of errors that this rank has raised instead of making the first call.
    """

    store: Any = None
    generation: int = 0
    errors: int = 0


_LINKS: WeakKeyDictionary[dist.ProcessGroup, _Link] = WeakKeyDictionary()


def _connect(group: dist.ProcessGroup) -> _Link:
    """Return the group's link to its store, and connect it if it is not connected."""
    link = _LINKS.setdefault(group, _Link())
    link.store = link.store or store_of(group, "weft/handshake")
    return link


def publish_error_instead(group: dist.ProcessGroup, text: str) -> None:
    """Publish that this rank raises an error instead of making the group's first call.

    Ranks that wait for it, and have raised fewer errors themselves, give up soon unless this rank arrives after all. It returns
    when the text is written, or after 2 s if the store does not answer.
    """
    link = _LINKS.setdefault(group, _Link())
    link.errors += 1
    raised = json.dumps([link.errors, text])

    def publish() -> None:
        with suppress(Exception):  # torch's errors of stores are of several kinds, and the rank raises its own error
            _connect(group).store.set(f"raised/{group.rank()}", raised)

    thread = threading.Thread(target=publish, name=f"weft-raises-{group.rank()}", daemon=True)
    thread.start()
    thread.join(_ANSWER_S)


def handshake(group: dist.ProcessGroup, mine: Any, *, timeout_s: float, lost: Callable[[], str] = lambda: "") -> list[Any]:
    """Return what each rank passes as `mine`, by rank. Collective.

    mine: a value of lists, numbers and strings.
    lost: returns a sentence that names a rank that is known to be dead, or "" if there is none.

    Raises WaitTimeout with the ranks that have not arrived within timeout_s. Raises PeerLost if a rank, or the group's store,
    is lost.
    """
    attempt = _Attempt(group, mine)
    thread = threading.Thread(target=attempt.run, name=f"weft-handshake-{group.rank()}", daemon=True)
    thread.start()
    try:
        dead = _wait(attempt, timeout_s, lost)
    finally:
        if not attempt.concluded.is_set():
            attempt.given_up.set()
            if attempt.connected:
                attempt.concluded.wait(2 * _ANSWER_S)
    if attempt.values is not None:
        return attempt.values
    if attempt.lost is not None:
        seen = f"; before that, {attempt.missing}" if attempt.missing else ""
        raise PeerLost(f"the store of the group is lost, and with it the process that hosts it{seen} ({attempt.lost})")
    if dead:
        raise PeerLost(dead)
    who = attempt.missing or "the group's store has not answered; the process that hosts it may be stopped"
    raise WaitTimeout(f"within {timeout_s:g} s (WEFT_TIMEOUT_S), {who}; did a rank raise an error, die, or omit a call?")


def _wait(attempt: _Attempt, timeout_s: float, lost: Callable[[], str]) -> str:
    """Wait until the attempt has ended, a rank is lost, or the bound is over. Return the text of `lost`. Warns once."""
    began, warns_s, warned, asks_s = time.monotonic(), min(WARNS_AFTER_S, timeout_s / 2), False, _ASKS_FOR_STORE_S
    while (left_s := began + timeout_s - time.monotonic()) > 0:
        if attempt.concluded.wait(min(_LOOKS_AT_OTHERS_S, left_s)):
            return ""
        if dead := lost() or attempt.raised:
            return dead
        if not attempt.connected and time.monotonic() > began + asks_s:
            asks_s *= 2
            if refusal := attempt.refusal():
                attempt.lost = ConnectionError(refusal)
                return ""
        if not warned and time.monotonic() > began + warns_s + 0.1:
            who = attempt.missing or "the group's store has not answered"
            _LOG.warning("for %g s %s; did a rank raise an error? rank %d waits", warns_s, who, attempt.rank)
            warned = True
    return ""


class _Attempt:
    """An _Attempt is one rank's attempt at a handshake.

    given_up: set when the attempt must end.
    concluded: set when the attempt has ended.
    values: the values of all ranks, if the handshake succeeded.
    missing: a sentence that names the ranks that had not arrived at the last check.
    raised: a sentence that names a rank that has raised an error instead of arriving.
    connected: whether this rank has a connection to the store. Until then it has said nothing to other ranks.
    lost: the error of the store, if it failed.
    """

    def __init__(self, group: dist.ProcessGroup, mine: Any) -> None:
        self._group, self._mine = group, json.dumps(mine)
        self.rank, self.size = group.rank(), group.size()
        self.given_up, self.concluded = threading.Event(), threading.Event()
        self.connected = False
        self.values: list[Any] | None = None
        self.lost: BaseException | None = None
        self.missing = self.raised = ""
        self._seen: dict[int, float] = {}
        """When this rank first saw that a rank has raised more errors than itself, by rank."""

    def run(self) -> None:
        """Take part in generations until one is complete, or the attempt is given up."""
        try:
            self._link = _connect(self._group)
            self._store, self.connected = self._link.store, True
            self._store.set(f"left/{self.rank}", "")
            while self.values is None and not self.given_up.is_set():
                if not self._store.check([f"{self._link.generation}/end"]):
                    self._take_part(self._link.generation)
                self._link.generation += 1
            if self.values is not None and self._link.errors:
                self._link.errors = 0
                self._store.set(f"raised/{self.rank}", "")
        except Exception as error:  # torch's errors of stores are of several kinds
            self.lost = error
            _LINKS.setdefault(self._group, _Link()).store = None
        finally:
            self.concluded.set()

    def refusal(self) -> str:
        """Return why there is no store to connect to, or "" if that is not known."""
        return refusal_of_store(self._group)

    def _take_part(self, generation: int) -> None:
        """Take part in a generation until it has ended. Sets `values` if it is complete."""
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
            self.values = [json.loads(text) for text in self._read(keys)]

    def _end(self, generation: int, outcome: str) -> str:
        """End a generation with this outcome if no rank was faster, and return the outcome that holds for all ranks."""
        return self._store.compare_set(f"{generation}/end", "", outcome).decode()  # type: ignore[no-any-return]

    def _look(self, keys: Sequence[str]) -> None:
        """Note which ranks are missing, and which one has raised an error instead some time ago."""
        absent = [rank for rank, text in enumerate(self._read(keys)) if not text]
        left = [rank for rank, text in zip(absent, self._read([f"left/{rank}" for rank in absent]), strict=True) if text]
        late = [rank for rank in absent if rank not in left]
        self.missing = _describe_ranks(late, "not come to the group's first call") or _describe_ranks(
            left, "given up the group's first call"
        )
        texts = self._read([f"raised/{rank}" for rank in absent])
        raised = {rank: json.loads(text) for rank, text in zip(absent, texts, strict=True) if text}
        now = time.monotonic()
        self._seen = {rank: self._seen.get(rank, now) for rank, (count, _) in raised.items() if count > self._link.errors}
        for rank in [rank for rank, since in self._seen.items() if now > since + _RETRY_GRACE_S][:1]:
            self.raised = f"rank {rank} raised an error and did not come to the group's first call: {raised[rank][1]}"

    def _read(self, keys: Sequence[str]) -> list[str]:
        """Return the values of keys. It is "" for a key that is not set, for which torch would wait."""
        if not keys:
            return []
        there = list(keys) if self._store.check(list(keys)) else [key for key in keys if self._store.check([key])]
        values = self._store.multi_get(there) if self._store.has_extended_api() else [self._store.get(key) for key in there]
        known = dict(zip(there, values, strict=True))
        return [known.get(key, b"").decode() for key in keys]


def _describe_ranks(ranks: Sequence[int], what: str) -> str:
    """Return "rank 3 has ..." or "ranks 3, 4 have ...". Return "" if there are no ranks."""
    if not ranks:
        return ""
    return f"rank {ranks[0]} has {what}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have {what}"
