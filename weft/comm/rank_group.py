"""The ranks of one process group: on which nodes they are, that they agree on what they call, and that every wait ends.

Each rank publishes what it calls, and whether it has failed, in its control segment (weft.comm.control).

What ranks agree on has a number, a digest.

    first call           enter: publish what is about to run, and wait until all ranks have published the same
    later call, GPUs     repeat: log its number. It costs no rank the time of the others
    later call, CPUs     repeat; await_same_call: wait until all ranks have logged a number. If the numbers differ, all ranks
    enter captured call        capture: count it, and log nothing

Whoever watches the group compares the numbers that ranks have logged, call by call (`check_peers`). In `enter` each rank does
this, for call c and agreement n:

    slot[n % 2] = text; ENTERED = c; wait until ENTERED >= c on every peer; compare their slots

Two slots are enough: a rank can begin agreement n + 1 while another still compares in agreement n, but not n + 2, for which it
needs that other's part in n + 1.

A rank that raises an error before it enters a call, as for an argument that cannot be, publishes that, too (`raise_instead`).
A peer that waits for it in that call, and has not raised as many errors itself, gives up if the rank does not come soon.

A wait ends when its word is there, when a peer is seen to be dead, failed or gone, or at the bound; it never hangs.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from weft.comm import handshake
from weft.comm.control import (
    AGREED,
    CLOSED,
    ENDED_BADLY,
    FAILED,
    LOGGED,
    NOTIFIED,
    NUMBERS,
    RUNNING,
    TEXT_BYTES,
    ControlSegment,
)
from weft.comm.launch_conditions import agree_on_launch
from weft.comm.membership import join
from weft.comm.processes import died
from weft.comm.relay import Relay
from weft.comm.shared_memory import PREFIX, SharedSegment, reap_stale, unlink
from weft.comm.symmetric_heap import SymmetricHeap, heap_of
from weft.comm.texts import Remembered, clipped, difference, kind_and_words, reason
from weft.compat.c10d import store_of
from weft.core.errors import PeerLost, RankMismatch, WaitTimeout, WeftError

_REMEDIES = (
    "this process group has failed ({}); call weft.close(group) on every rank, then go on",
    "this group was closed, and with it what had been made for it before, as a hook's trial; make that again, on every rank",
)
"""What a call says after a failure, and after the group was closed."""
_IN_USE = "this process group has failed ({}); on every rank close its Peers and call weft.close(group), then go on"
_REFUSES = "refused: "
"""What a rank that raises an error enters in the place of the call that ranks had agreed on."""
_REFUSAL = TEXT_BYTES // 4
"""Characters of that, which have 4 bytes at most."""
_ERROR_BYTES = 800
"""Of an error that a rank raises in the place of a call. Other ranks' errors repeat it."""
_PEER_CHECK_S = 0.02
"""How often a rank that waits looks whether its peers live."""
_SAYS_S = 0.5
"""A peer that does not come may wait for another one, which its own bound, at about the same time, names."""
_CAUGHT_S = 3.0
"""How long a rank that has raised an error in the place of a call may take to make the call after all: the program may catch
the error and call again."""
_SILENT_S = 30.0
"""A rank of another node of which nothing new comes for so long is lost: a process publishes four times a second."""


_SHARED: dict[dist.ProcessGroup, RankGroup] = {}
"""The object of each process group that somebody uses."""
_SHARED_LOCK = threading.Lock()
"""Held while objects are looked up, counted and left."""
_MAKING: WeakKeyDictionary[dist.ProcessGroup, threading.Lock] = WeakKeyDictionary()
"""Held while a group's object is made. One for each group: ranks may come to two groups in different orders."""


@atexit.register
def _close_all() -> None:
    """No process group may be held until the interpreter ends, for its threads would still run."""
    for shared in list(_SHARED.values()):
        if not shared.forked:
            shared.close()


class RankGroup:
    """The ranks of `group`. Collective: every rank of the group constructs it.

    A process has one of a process group: whoever uses it gets it by `of`, and ends with `release`.

    timeout_s: bound of every wait. nodes: as a Problem has them. one_host: whether they are all of one host. near: the ranks of
    this one's node, itself among them. name: torch's, of the process group. topic: one that no other process group has. lock:
    held by a thread from where it begins a call until all that the call says to other ranks is said. broken: why the group has
    failed. unraised: the same, as long as calls that have returned are invalid and no later call has raised it. Raises
    ValueError if the ranks of a host are no neighbours.
    """

    _closed, _users = False, 0
    _errors = _errors_before = 0
    """Errors raised in the place of a call: since the last call, and between that and the one before."""
    cannot_overlap = ""
    """Why no schedule that overlaps can run on the ranks' GPUs; empty if they can."""

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> RankGroup:
        """The group's object. Collective at its first use. Raises WeftError if it has failed and has not been released."""
        with _SHARED_LOCK:
            making = _MAKING.setdefault(group, threading.Lock())
        with making:
            with _SHARED_LOCK:
                if (known := _SHARED.get(group)) is not None:
                    return known._used()
            made = cls(group)
            with _SHARED_LOCK:
                _SHARED[group] = made
                return made._used()

    @staticmethod
    def raise_before(group: dist.ProcessGroup, error: Exception) -> None:
        """This rank raises `error` in the place of the group's first call, as in `raise_instead`."""
        if group.size() > 1 and dist.get_backend(group) != "fake" and not isinstance(error, WeftError):
            handshake.raise_instead(group, kind_and_words(error, _ERROR_BYTES))

    def _used(self) -> RankGroup:
        """This object, with one use more."""
        self.check_usable((_IN_USE, _REMEDIES[1]))
        self._users += 1
        return self

    def release(self) -> None:
        """End one use of the group's object; the last one closes it. A fork of the rank's process closes nothing."""
        with _SHARED_LOCK:
            self._users -= 1
            last = self._users <= 0 and not self.forked
            if last:
                self._forget()
        if last:
            self.close()

    def _forget(self) -> None:
        """Whoever uses the process group next makes a new object."""
        group = self.__dict__.get("group")
        if group is not None and _SHARED.get(group) is self:
            del _SHARED[group]

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float | None = None) -> None:
        if dist.get_backend(group) == "fake":
            raise ValueError(
                "group: its backend is 'fake', so there are no peers to exchange data with; a dry run there takes fake tensors "
                "(torch._subclasses.fake_tensor.FakeTensorMode), and real tensors need gloo or NCCL"
            )
        self.group, self.name = group, group.group_name
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.calls = self._agreements = self._compared = 0
        self._known = Remembered(2, NUMBERS)
        self.broken: BaseException | None = None
        self.unraised: WeftError | None = None
        self._raised = False
        self.lock = threading.RLock()
        self._failure_lock = threading.Lock()
        self._relay: Relay | None = None
        self._rounds = 0
        self._heaps: dict[torch.device, SymmetricHeap] = {}
        members = join(group, timeout_s)
        control, self.timeout_s = members.control, members.timeout_s
        try:
            self.nodes, self.one_host, self.near = members.nodes, members.one_host, members.near
            self.pids, self._starts = members.pids, members.starts
            self._control = [self._control_of(rank, name, control) for rank, name in enumerate(members.names)]
            self.topic = members.names[0].removeprefix(PREFIX)
            self.await_mapped()
            self._relay = self._relayed() if self.nodes else None
        finally:
            unlink(control.name)

    def _control_of(self, rank: int, name: str, own: SharedSegment) -> ControlSegment:
        """A rank's control segment, or where it is copied to."""
        if rank not in self.near:
            return ControlSegment.private()
        try:
            return ControlSegment(own if rank == self.rank else SharedSegment.open(name))
        except FileNotFoundError:
            raise PeerLost(f"rank {rank} failed in the group's first call; it says why") from None

    def store(self, name: str) -> Any:
        """A part of the group's store that this group alone has, on a connection of its own."""
        return store_of(self.group, f"weft/{self.topic}/{name}")

    def _relayed(self) -> Relay:
        near = [peer for peer in self._peers if peer in self.near]
        return Relay(
            self.store("relay"),
            rank=self.rank,
            own=self._control[self.rank],
            copies={far: self._control[far] for far in self._peers if far not in self.near},
            neighbours={peer: partial(self._obituary, peer) for peer in near},
            timeout_s=self.timeout_s,
        )

    def _obituary(self, peer: int) -> ControlSegment | None:
        """What a dead rank of this node would say to other nodes; None while it lives, and if it has said why it ends."""
        if not died(self.pids[peer], self._starts[peer]) or self._control[peer].state:
            return None
        last = ControlSegment.private()
        last.restore(self._control[peer].snapshot())
        last.fail(f"process {self.pids[peer]} died")
        return last

    def enter(
        self, text: str, mine: int = 0, *, within_s: float | None = None, peers_may_know: bool = False
    ) -> tuple[int, ...]:
        """Begin a call that every rank describes by the same `text`. Returns what each rank gave as `mine`, by rank.

        Counts as one call in the log, also where it is no call of an operator. within_s: bound of the wait for the others,
        where they may take longer than in calls. peers_may_know: on CPUs a peer may take this for a call that it knows, and be
        in `await_same_call`. Then both see the difference, and every rank enters once more. Raises RankMismatch with the lines
        that differ.
        """
        self.check_usable()
        text = clipped(text, TEXT_BYTES)
        with self.failing():
            offered = self._offered(text, mine, within_s, awaits_peers=peers_may_know)
            if peers_may_know and any(self._control[peer].number_of(self.calls) not in AGREED for peer in self._peers):
                offered = self._offered(text, mine, within_s)
            for peer, theirs in offered.items():
                if theirs.startswith(_REFUSES):
                    raise PeerLost(f"rank {peer} failed: {theirs.removeprefix(_REFUSES)}")
                if theirs != text:
                    raise self._mismatch(self.calls, text, peer, theirs)
        return tuple(control.offered(self._agreements % 2) for control in self._control)

    def _offered(self, text: str, mine: int, within_s: float | None = None, *, awaits_peers: bool = False) -> dict[int, str]:
        """Publish what this rank calls, wait until every rank has entered the call, and return what the others call."""
        self._agreements += 1
        parity = self._agreements % 2
        self._control[self.rank].offer(parity, text, mine)
        self._log_call(AGREED[parity], awaits_peers=awaits_peers)
        with self.failing():  # peers take this call for begun
            self._publish()
            others = self._peers
            for peer in others:
                self._await_count(peer, "entered", self.calls, within_s)
            return {peer: self._text_of(peer, self.calls) for peer in others}

    def _refuse(self, error: ValueError) -> None:
        """Instead of going on with what ranks have agreed to call, this rank raises `error`. Returns once every rank raises an
        error there; if another rank goes on, the group fails, and that rank gets this error's text at once."""
        with suppress(WeftError):
            others = self._offered((_REFUSES + reason(error))[:_REFUSAL], 0)
            if not all(theirs.startswith(_REFUSES) for theirs in others.values()):
                self.fail(error)

    def remember(self, text: str) -> int:
        """A number for what all ranks have agreed on, to `repeat` it; the same on every rank that remembers the same."""
        return self._known.number(text)

    def repeat(self, number: int, *, awaits_peers: bool = False) -> None:
        """Begin a call that all ranks have agreed on before. awaits_peers: `await_same_call` comes next. Waits for nobody."""
        self.check_usable()
        self._log_call(number, awaits_peers=awaits_peers)

    def await_same_call(self, number: int) -> bool:
        """Wait until every rank has begun the call that this one has repeated, of this number. False if it is another one on
        some rank: as on every rank then, an `enter` comes next."""
        if self._relay:
            self._publish()
        same = True
        for peer in self._peers:
            if self._control[peer].number_of(self.calls) != number:
                self._await_count(peer, "entered", self.calls)
                same = same and self._control[peer].number_of(self.calls) == number
        if not same:
            self._agreements += 1  # ranks that did not know the call have entered it
        return same

    def capture(self) -> None:
        """A CUDA graph captures a call that all ranks have agreed on before. It is not logged: what is captured runs in
        replays, any number of times, and this rank does not know when. Waits for nobody."""
        self.check_usable()
        self._control[self.rank].captured += 1

    def _captures(self, peer: int) -> str:
        """What may be the reason if this rank's log of calls differs from a peer's: one has captured what the other has not."""
        mine, theirs = (self._control[rank].captured for rank in (self.rank, peer))
        if mine == theirs:
            return ""
        return (
            f"\nrank {self.rank} has captured {mine} calls in CUDA graphs, rank {peer} {theirs}: "
            "capture a call on every rank, or on none, since replays are not compared with calls"
        )

    def raise_instead(self, error: Exception) -> None:
        """This rank raises `error` in the place of its next call. Peers that have entered that call give up soon, unless they
        raise as many errors there, or this rank makes the call after all. The group stays as it is. Waits for nobody."""
        if self.broken is None and not self.forked:
            self._errors += 1
            self._control[self.rank].raise_instead(self._errors, kind_and_words(error, _ERROR_BYTES))
            self._publish()

    def _gave_up(self, peer: int, call: int) -> Callable[[], None]:
        """A function that raises PeerLost where a peer has raised an error in the place of a call and does not come soon."""
        control, since = self._control[peer], 0.0

        def look() -> None:
            nonlocal since
            if control.entered != call - 1 or control.raised <= self._errors_before:
                since = 0.0
            elif not since:
                since = time.monotonic()
            elif time.monotonic() > since + _CAUGHT_S:
                words = f"rank {peer} raised an error and did not come to call {call}: {control.failure}"
                raise self.fail(PeerLost(words))

        return look

    def _log_call(self, number: int, *, awaits_peers: bool = False) -> None:
        """awaits_peers: ranks compare this call themselves while they wait for each other, so `_compare` leaves it out."""
        self.calls += 1
        if awaits_peers:
            self._compared = self.calls
        self._errors_before, self._errors = self._errors, 0
        self._control[self.rank].log(self.calls, number, after_errors=self._errors_before > 0)

    def _text_of(self, rank: int, call: int) -> str:
        control = self._control[rank]
        number = control.number_of(call)
        if number in AGREED:
            return control.slot(AGREED.index(number))
        return self._known.text(number)

    def _compare(self) -> None:
        """Raise RankMismatch if calls that all ranks have entered differ."""
        entered = min(control.entered for control in self._control)
        for call in range(max(self._compared + 1, entered - LOGGED), entered + 1):
            mine = self._control[self.rank].number_of(call)
            for peer in self._peers:
                theirs = self._control[peer].number_of(call)
                # Of calls on which ranks agreed as they entered them, each has compared the texts itself.
                if None not in (mine, theirs) and mine != theirs:
                    raise self.fail(self._mismatch(call, self._text_of(self.rank, call), peer, self._text_of(peer, call)))
        self._compared = max(self._compared, entered)

    def _mismatch(self, call: int, mine: str, peer: int, theirs: str) -> RankMismatch:
        words = difference(self.rank, mine, peer, theirs)
        return RankMismatch(f"ranks disagree in call {call}:\n{words}{self._captures(peer)}")

    def heap(self, device: torch.device) -> SymmetricHeap:
        """The memory that the ranks of this one's node share on a device. It goes with the group. Collective at its first use
        on a GPU. Raises ValueError where the ranks' GPUs cannot share memory."""
        if device not in self._heaps:
            if device.type == "cuda":
                self.cannot_overlap = agree_on_launch(self, device)
            self._heaps[device] = heap_of(self, device)
        return self._heaps[device]

    def exchange_names(self, mine: str) -> dict[int, str]:
        """By rank of this node, the segment that it has created last. Collective; `await_mapped` comes next."""
        self._rounds += 1
        self._control[self.rank].create(mine, self._rounds)
        for peer in self.near:
            self._await_count(peer, "created", self._rounds)
        return {peer: self._control[peer].newest for peer in self.near}

    def await_mapped(self) -> None:
        """Wait until every rank of this node has mapped the segments that were created last."""
        self._control[self.rank].mapped = self._rounds + 1
        for peer in (peer for peer in self._peers if peer in self.near):
            self._await_count(peer, "mapped", self._rounds + 1)

    def until(
        self,
        ready: Callable[[], bool],
        explain: Callable[[], str],
        within_s: float | None = None,
        *,
        grace_s: float = 0.0,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """Return once `ready()`; raise PeerLost, or WaitTimeout with `explain()` at the bound. within_s: default, timeout_s.
        grace_s: so much later, if a peer might say first what it waits for itself. look: called now and then, may raise."""
        bound_s = self.timeout_s if within_s is None else within_s
        for _ in range(50):
            if ready():
                return
        deadline = time.monotonic() + bound_s + grace_s
        next_check, pause = time.monotonic() + _PEER_CHECK_S, 1e-5
        while not ready():
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)
            self._refresh()
            now = time.monotonic()
            if now >= next_check:
                self.check_peers(ready)
                if not ready():
                    look()
                next_check = now + _PEER_CHECK_S
            if now >= deadline and not ready():  # it may have come while this process was stopped
                raise self.fail(WaitTimeout(f"{explain()} after {bound_s:g} s"))

    def check_peers(self, ready: Callable[[], bool] = lambda: False, *, may_leave: bool = False) -> None:
        """Raise if this group has failed here (on another lane), or if the ranks' calls differ. Unless `ready()` by now, also
        if a peer is dead, has failed, has left too early, or, on another node, has been silent for too long.

        may_leave: nothing is awaited of the peers, so one that has closed its group is no error. Nor is one that closed after
        all calls that this rank has begun: what it had to do in them is done, and another peer may merely be slow.
        """
        if self.broken:
            raise self._again(reason(self.broken))
        self._refresh()
        self._compare()
        dead = [p for p in self._peers if p in self.near and died(self.pids[p], self._starts[p])]
        # In this order: a rank closes, and then its process ends. And once each: it may close at any time.
        states = {p: self._control[p].state for p in self._peers}
        left = [p for p in states if states[p] == CLOSED and (may_leave or self._control[p].entered >= self.calls)]
        dead = [p for p in dead if p not in left]
        gone = [p for p in states if states[p] and p not in left]
        silent = [] if gone else [p for p in self._peers if self._silent_s(p) > min(_SILENT_S, self.timeout_s)]
        if not (dead or gone or silent) or ready():
            return
        # A dead rank is the reason for what other ranks report: name it first.
        raise self.fail(PeerLost(self._ending((dead + gone + silent)[0])))

    def _refresh(self) -> None:
        """Fetch what ranks of other nodes have published."""
        if self._relay:
            try:
                self._relay.refresh()
            except RuntimeError as error:
                raise self.fail(
                    PeerLost(f"the store of the group is lost, and with it the host that keeps it ({error})")
                ) from None

    def _silent_s(self, peer: int) -> float:
        """For how long nothing new has come from a rank of another node that has not left."""
        closed = peer in self.near or self._control[peer].state == CLOSED
        return 0.0 if closed or self._relay is None else self._relay.silent_s(peer)

    def _ending(self, peer: int) -> str:
        state = self._control[peer].state
        if state in ENDED_BADLY:
            return f"rank {peer} failed: {self._control[peer].failure}"
        if state != CLOSED and peer not in self.near:
            return f"rank {peer}, on another node, has not been heard of for {self._silent_s(peer):.0f} s"
        return f"rank {peer} has left the group" if state == CLOSED else f"rank {peer} (process {self.pids[peer]}) died"

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the rank's: what it wrote into shared memory, peers would take for the rank's."""
        return os.getpid() != self.pids[self.rank]

    def fail(self, error: BaseException) -> BaseException:
        """Signal to every peer why this rank cannot go on; returns `error`, to be raised. The first reason stands."""
        with self._failure_lock:
            if self.broken is None:
                self.broken = error
                self._control[self.rank].fail(reason(error))
                self._publish()
                reap_stale()
        return error

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Within, peers may wait for this rank: whatever is raised, be it Ctrl-C, fails the group, so that it ends theirs."""
        try:
            yield
        except BaseException as error:
            self._is_raised()
            self.fail(error)
            raise

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Within, ranks work with what they have agreed on, so every rank should raise the same ValueErrors. If every rank
        raises one, the group can be used on; if only some do, or for any other exception, it has failed, as in `failing`."""
        refused: ValueError | None = None
        with self.failing():
            try:
                yield
            except ValueError as error:
                if self.broken is not None:
                    raise
                refused = error
        if refused is not None:
            self._refuse(refused)
            raise refused

    def _is_raised(self) -> None:
        """A call of this rank's raises why the group has failed: `weft.close` need not."""
        with self._failure_lock:
            self._raised, self.unraised = True, None

    def fail_later(self, error: WeftError, *, unraised: bool) -> None:
        """The group has failed, and no call of this rank's can raise that now: the next one does, with this error's words.
        unraised: calls that have returned were under way, so that `weft.close` raises it, too, if no other call has."""
        self.fail(error)
        with self._failure_lock:
            self.broken = error
            self.unraised = error if unraised and not self._raised else None

    def _again(self, text: str) -> WeftError:
        """The failure of this group, to be raised once more: of its own type, with this text."""
        return (type(self.broken) if isinstance(self.broken, WeftError) else WeftError)(text)

    def peer_failed(self) -> bool:
        """Whether a peer has signalled that it has failed: what it sends from then on may be invalid."""
        return any(self._control[peer].state in ENDED_BADLY for peer in self._peers)

    def await_notified(self, within_s: float) -> None:
        """After a failure that this rank knows of: returns when all ranks that live know of one, too, or after so long.

        Only then may a rank release what waits on its device: what that sends without having what it waited for, another rank
        that knows of no failure would take for results.
        """
        own = self._control[self.rank]
        if own.state == FAILED:
            own.state = NOTIFIED
            self._publish()
        deadline = time.monotonic() + within_s
        with suppress(WeftError):  # who no longer publishes sends nothing, either
            while time.monotonic() < deadline and not all(self._was_notified(peer) for peer in self._peers):
                time.sleep(1e-3)
                self._refresh()

    def _was_notified(self, peer: int) -> bool:
        """Whether no call of a peer's can end as if nothing had happened."""
        dead = peer in self.near and died(self.pids[peer], self._starts[peer])
        return dead or self._control[peer].state in (CLOSED, NOTIFIED)

    def _publish(self) -> None:
        """Let other nodes see at once what this rank's segment says."""
        if self._relay:
            with suppress(RuntimeError):  # the store may be what is lost
                self._relay.publish()

    def close(self) -> None:
        """Leave. Peers that wait for this rank get PeerLost, and learn that no call of it goes on. Not collective.

        The process group is let go of: kept in a reference cycle, its threads would run on until the interpreter ends.
        """
        own = self._control[self.rank]
        own.state = {RUNNING: CLOSED, FAILED: NOTIFIED}.get(own.state, own.state)
        if self._relay:
            self._relay.close()
        self._closed = self._closed or self.broken is None
        self.broken = self.broken or WeftError("the process group is closed")
        for heap in self._heaps.values():
            heap.close()
        with _SHARED_LOCK:
            self._forget()
        self.__dict__.pop("group", None)

    def check_usable(self, remedies: tuple[str, str] = _REMEDIES) -> None:
        """Raise WeftError if this group has failed here, or is another process's: with the reason, and of the failure's type.
        remedies: what helps after a failure, and after the group was closed."""
        if self.forked:
            raise WeftError(
                f"process {os.getpid()} is a fork of process {self.pids[self.rank]}, which is rank {self.rank} of this group: "
                "call weft there, or start processes by spawn and give them a group of their own"
            )
        if self._closed:
            raise WeftError(remedies[1])
        if self.broken:
            self._is_raised()
            raise self._again(remedies[0].format(reason(self.broken)))

    @cached_property
    def _peers(self) -> list[int]:
        """All other ranks, the next one first."""
        return [(self.rank + i) % self.world_size for i in range(1, self.world_size)]

    def _await_count(
        self, peer: int, what: Literal["entered", "created", "mapped"], value: int, within_s: float | None = None
    ) -> None:
        """Wait until a peer has entered so many calls, say."""
        control = self._control[peer]
        self.until(
            lambda: getattr(control, what) >= value,
            lambda: (
                f"rank {self.rank}, lane host, step 0 (wait {what}[{peer}]@{peer}): expected {value}, "
                f"seen {getattr(control, what)}; rank {peer} did not arrive{self._captures(peer)}"
            ),
            within_s,
            grace_s=_SAYS_S,
            look=self._gave_up(peer, value) if what == "entered" else lambda: None,
        )
