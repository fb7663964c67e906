"""Team: the ranks of one process group on one host, who they are, that they agree, and that every wait ends.

Each rank owns a control segment that all map:

    word 0 ENTERED   calls that this rank has entered          word 3 STATE  0 running, 1 failed, 2 closed
    word 1 CREATED   segments that it has created               text: two slots for what it calls, by parity of the meeting
    word 2 MAPPED    segment rounds that it has mapped          text: why it failed; text: name of its newest segment
    words 4, 5       a number that it offers, by parity         words: what each of its last calls was, by call

What all ranks have agreed on once has a number. A first call meets: `enter` publishes what is about to run and waits until
all have published the same. A later one only leaves its number (`repeat`), and whoever looks after the team compares the
numbers of all ranks call by call (`check_peers`), so that agreeing costs no rank the time of the others.

    rank 0                          rank 1
    slot[n % 2] = text              slot[n % 2] = text
    ENTERED = c   ~~~~~~~~~~~~~~~>  wait ENTERED of rank 0 >= c, compare its slot
    wait ENTERED of rank 1 >= c     ENTERED = c

Two slots are enough: a rank can begin meeting n + 1 while another still compares meeting n, but not n + 2, for which it needs
that other's part in n + 1.

A wait ends when its word is there, when a peer is seen to be dead, failed or gone, or at the bound; it never hangs.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from weft.errors import PeerLost, RankMismatch, WaitTimeout, WeftError
from weft.memory import Segment, process_start, reap_stale, unlink

DEFAULT_TIMEOUT_S = 60.0
_ENTERED, _CREATED, _MAPPED, _STATE, _OFFERED = range(5)
_FAILED, _CLOSED = 1, 2
_TEXT_BYTES = 4096
_FAILURE_AT, _NAME_AT, _LOG_AT = 3 * _TEXT_BYTES, 4 * _TEXT_BYTES, 5 * _TEXT_BYTES
_LOGGED = 4096
"""Calls whose numbers can be read: more than a rank can be ahead of another, which is as many calls as a GPU has under way."""
_CONTROL_BYTES = _LOG_AT + 8 * _LOGGED
_NUMBERS = 4096
"""A logged call is call * _NUMBERS + number; 0 and 1 say that it met, and in which slot."""
_PEER_CHECK_S = 0.02


def timeout_from_environment() -> float:
    """WEFT_TIMEOUT_S, or 60 s. Raises ValueError if it is not a positive number."""
    text = os.environ.get("WEFT_TIMEOUT_S", str(DEFAULT_TIMEOUT_S))
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ValueError(f"WEFT_TIMEOUT_S is {text!r}; it must be a number of seconds above 0")
    return value


class Team:
    """The ranks of `group`, all on this host. Collective: every rank of the group constructs it.

    timeout_s: bound of every wait. Raises ValueError if the ranks are on several hosts.
    """

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float | None = None) -> None:
        self.timeout_s = timeout_from_environment() if timeout_s is None else timeout_s
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.calls = self._meetings = self._compared = 0
        self._known: dict[int, str] = {}
        self.broken: BaseException | None = None
        self._lock = threading.Lock()
        self._rounds = 0
        reap_stale()
        control = Segment.create("control", _CONTROL_BYTES)
        me = (socket.gethostname(), os.getpid(), process_start(os.getpid()), control.name)
        everyone: list[tuple[str, int, int, str]] = [me] * self.world_size  # type: ignore[list-item]
        try:
            dist.all_gather_object(everyone, me, group=group)
            self._peers_on_this_host(everyone)
            self.pids = [pid for _, pid, _, _ in everyone]
            self._starts = [start for _, _, start, _ in everyone]
            self._control = [control if r == self.rank else Segment.open(name) for r, (_, _, _, name) in enumerate(everyone)]
            self._words = [segment.words(0, 6) for segment in self._control]
            self._logs = [segment.words(_LOG_AT, _LOGGED) for segment in self._control]
            self._publish_mapped()
        finally:
            unlink(control.name)

    @staticmethod
    def _peers_on_this_host(everyone: list[tuple[str, int, int, str]]) -> None:
        hosts = sorted({host for host, *_ in everyone})
        if len(hosts) > 1:
            raise ValueError(
                f"group spans the hosts {', '.join(hosts)}; weft overlaps within one host: pass a group of one host"
            )

    def enter(self, text: str, mine: int = 0) -> tuple[int, ...]:
        """Begin a call that every rank describes alike by `text`; what each rank gave as `mine`, by rank.

        Raises RankMismatch with the lines that differ.
        """
        self._check_usable()
        self._meetings += 1
        parity = self._meetings % 2
        slot = (1 + parity) * _TEXT_BYTES
        self._control[self.rank].write_text(slot, _TEXT_BYTES, text)
        self._words[self.rank].store(_OFFERED + parity, mine)
        self._log_call(parity)
        for peer in self._others():
            self._await_word(peer, _ENTERED, self.calls, "entered")
        for peer in self._others():
            theirs = self._text_of(peer, self.calls)
            if theirs != text[:_TEXT_BYTES]:
                raise self.fail(self._mismatch(self.calls, text, peer, theirs))
        return tuple(words.load(_OFFERED + parity) for words in self._words)

    def remember(self, text: str) -> int:
        """A number for what all ranks have agreed on, to `repeat` it; the same on every rank that remembers the same."""
        number = 2 + len(self._known) % (_NUMBERS - 2)
        self._known[number] = text
        return number

    def repeat(self, number: int) -> None:
        """Begin a call that all ranks have agreed on before. Waits for nobody."""
        self._check_usable()
        self._log_call(number)

    def _log_call(self, number: int) -> None:
        self.calls += 1
        self._logs[self.rank].store(self.calls % _LOGGED, self.calls * _NUMBERS + number)
        self._words[self.rank].store(_ENTERED, self.calls)

    def _number_of(self, rank: int, call: int) -> int | None:
        """What a rank's call was; None if that is no longer there."""
        logged, number = divmod(self._logs[rank].load(call % _LOGGED), _NUMBERS)
        return number if logged == call else None

    def _text_of(self, rank: int, call: int) -> str:
        number = self._number_of(rank, call)
        if number in (0, 1):
            return self._control[rank].read_text((1 + number) * _TEXT_BYTES, _TEXT_BYTES)
        return self._known.get(number or 0, "")

    def _compare(self) -> None:
        """Raise RankMismatch if calls that all ranks have entered differ."""
        entered = min(words.load(_ENTERED) for words in self._words)
        for call in range(max(self._compared + 1, entered - _LOGGED), entered + 1):
            mine = self._number_of(self.rank, call)
            for peer in self._others():
                theirs = self._number_of(peer, call)
                # Of calls that met, each rank has compared the texts itself.
                if None not in (mine, theirs) and mine != theirs:
                    raise self.fail(self._mismatch(call, self._text_of(self.rank, call), peer, self._text_of(peer, call)))
        self._compared = max(self._compared, entered)

    def _mismatch(self, call: int, mine: str, peer: int, theirs: str) -> RankMismatch:
        return RankMismatch(f"ranks disagree in call {call}:\n{_difference(self.rank, mine, peer, theirs)}")

    def allocate(self, nbytes: int) -> list[Segment]:
        """A new segment of `nbytes` on every rank, mapped on all, by rank. Collective."""
        self._check_usable()
        mine = Segment.create("data", nbytes)
        self._rounds += 1
        try:
            self._control[self.rank].write_text(_NAME_AT, _TEXT_BYTES, mine.name)
            self._words[self.rank].store(_CREATED, self._rounds)
            segments = []
            for peer in range(self.world_size):
                self._await_word(peer, _CREATED, self._rounds, "created")
                name = self._control[peer].read_text(_NAME_AT, _TEXT_BYTES)
                segments.append(mine if peer == self.rank else Segment.open(name))
            self._publish_mapped()
        finally:
            unlink(mine.name)
        return segments

    def _publish_mapped(self) -> None:
        self._words[self.rank].store(_MAPPED, self._rounds + 1)
        for peer in self._others():
            self._await_word(peer, _MAPPED, self._rounds + 1, "mapped")

    def until(self, ready: Callable[[], bool], explain: Callable[[], str]) -> None:
        """Return once `ready()`; raise PeerLost, or WaitTimeout with `explain()` at the bound."""
        for _ in range(50):
            if ready():
                return
        deadline = time.monotonic() + self.timeout_s
        next_check, pause = time.monotonic() + _PEER_CHECK_S, 1e-5
        while not ready():
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)
            now = time.monotonic()
            if now >= next_check:
                self.check_peers(ready)
                next_check = now + _PEER_CHECK_S
            if now >= deadline:
                raise self.fail(WaitTimeout(f"{explain()} after {self.timeout_s:g} s"))

    def check_peers(self, ready: Callable[[], bool] = lambda: False, *, may_leave: bool = False) -> None:
        """Raise if this team failed here (on another lane) or on a peer, if a peer is dead (not if `ready()` by now), or if
        the ranks' calls differ.

        may_leave: nothing is awaited of the peers, so one that has closed its team is no error.
        """
        if self.broken:
            raise PeerLost(str(self.broken))
        self._compare()
        fine = (0, _CLOSED) if may_leave else (0,)
        dead = [p for p in self._others() if process_start(self.pids[p]) != self._starts[p]]
        dead = [p for p in dead if not (may_leave and self._words[p].load(_STATE) == _CLOSED)]
        gone = [p for p in self._others() if self._words[p].load(_STATE) not in fine]
        if not (dead or gone) or ready():
            return
        # A dead rank is the reason for what other ranks report: name it first.
        raise self.fail(PeerLost(self._farewell((dead + gone)[0])))

    def _farewell(self, peer: int) -> str:
        state = self._words[peer].load(_STATE)
        if state == _FAILED:
            return f"rank {peer} failed: {self._control[peer].read_text(_FAILURE_AT, _TEXT_BYTES)}"
        return f"rank {peer} {'has left the group' if state == _CLOSED else f'(process {self.pids[peer]}) died'}"

    def fail(self, error: BaseException) -> BaseException:
        """Tell every peer why this rank cannot go on; returns `error`, to be raised. The first reason stands."""
        with self._lock:
            if self.broken is None:
                self.broken = error
                self._control[self.rank].write_text(_FAILURE_AT, _TEXT_BYTES, str(error))
                self._words[self.rank].store(_STATE, _FAILED)
                reap_stale()
        return error

    def close(self) -> None:
        """Leave: peers that wait for this rank are told. Not collective.

        The process group is let go of: kept in a reference cycle, its threads would run on until the interpreter ends.
        """
        if self._words[self.rank].load(_STATE) == 0:
            self._words[self.rank].store(_STATE, _CLOSED)
        self.broken = self.broken or WeftError("the team is closed")
        self.__dict__.pop("group", None)

    def _check_usable(self) -> None:
        if self.broken:
            raise WeftError(f"this group's team is broken ({self.broken}); call weft.close(group) on every rank, then go on")

    def _others(self) -> list[int]:
        return [(self.rank + i) % self.world_size for i in range(1, self.world_size)]

    def _await_word(self, peer: int, word: int, value: int, flag: str) -> None:
        words = self._words[peer]
        self.until(
            lambda: words.load(word) >= value,
            lambda: (
                f"rank {self.rank}, lane host, step 0 (wait {flag}[{peer}]@{peer}): expected {value}, "
                f"seen {words.load(word)}; rank {peer} did not arrive"
            ),
        )


def _difference(rank: int, mine: str, peer: int, theirs: str) -> str:
    """The lines in which two descriptions differ."""
    left, right = dict(_fields(mine)), dict(_fields(theirs))
    keys = [key for key in {**left, **right} if left.get(key) != right.get(key)]
    lines = [
        f"  {key}: rank {rank} has {left.get(key, 'nothing')}, rank {peer} has {right.get(key, 'nothing')}" for key in keys
    ]
    return "\n".join(lines)


def _fields(text: str) -> list[tuple[str, str]]:
    return [(key, value) for key, _, value in (line.partition(": ") for line in text.splitlines())]
