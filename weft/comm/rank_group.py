"""A RankGroup coordinates the ranks of one process group: it compares their calls, detects failures and bounds every wait.

Each rank publishes what it calls, and whether it has failed, in its control segment (weft.comm.control).

Each text that the ranks have agreed on is identified by a number, which is a digest of the text.

    first call           agree_on_call: publish what is about to run, and wait until all ranks have published the same
    later call, GPUs     begin_agreed_call: log its number without waiting for the other ranks
    later call, CPUs     begin_agreed_call; await_same_call: wait until all ranks have logged a number. If the numbers
                         differ, all ranks call agree_on_call
    captured call        count_captured_call: count it, and log nothing

`check_peers` compares the numbers that ranks have logged, call by call.

In `agree_on_call` each rank does this, for call c and the n-th agreement (one execution of `_offer`):

    slot[n % 2] = text; ENTERED = c; wait until ENTERED >= c on every peer; compare their slots

Two slots are enough: a rank can begin agreement n + 1 while another still compares in agreement n, but not n + 2, because n + 2
starts only after every rank has entered n + 1.

A rank that raises an error before it enters a call, for example because of a wrong argument, publishes that
(`publish_error_instead`). A peer that waits for it in that call gives up after 3 s, unless the peer has raised at least as
many errors of its own since its last call: then both ranks failed in the same way.

A wait ends when its condition holds, when a peer is dead, has failed or has left, or at the bound. It never hangs.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property, partial
from typing import Any, Literal, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet

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
    Relay,
)
from weft.comm.membership import join
from weft.comm.shared_memory import PREFIX, SharedSegment, died, remove_stale_segments, unlink
from weft.comm.texts import Remembered, clipped, difference, kind_and_words, reason
from weft.compat.c10d import living_groups, refusal_of_store, store_of
from weft.core.errors import PeerLost, RankMismatch, WaitTimeout, WeftError

T = TypeVar("T")
_REMEDIES = (
    "this process group has failed ({}); call weft.close(group) on every rank, then go on",
    "this group was closed, and with it everything that was made for it, such as a hook; make that again on every rank",
)
"""The errors of a call after a failure, and after the group was closed."""
_FAILED_IN_USE = "this process group has failed ({}); on every rank close its Peers and call weft.close(group), then go on"
_REFUSAL_PREFIX = "refused: "
"""A rank that raises an error enters this text instead of the call that the ranks had agreed on."""
_REFUSAL_CHARS = TEXT_BYTES // 4
"""The most characters of that text. A character has at most 4 bytes."""
_ERROR_BYTES = 800
"""The most bytes of an error that a rank raises instead of a call. The errors of other ranks repeat it."""
_PEER_CHECK_S = 0.02
"""A rank that waits checks every 20 ms whether its peers live."""
_GRACE_S = 0.5
"""The extra time after a bound, in which a peer that itself waits for a third rank can report that rank."""
_RETRY_GRACE_S = 3.0
"""A rank that has raised an error instead of a call has 3 s to make the call after all, because the program may catch the error
and call again."""
_ASKS_FOR_STORE_S = 1.0
"""How often a rank without a connection to the group's store checks whether there is a store."""
_LOST_AFTER_S = 30.0
"""A rank of another node that publishes nothing for 30 s is lost. A process publishes four times a second."""


_GROUPS: dict[dist.ProcessGroup, RankGroup] = {}
"""The RankGroup of each process group that is in use."""
_GROUPS_LOCK = threading.Lock()
"""Protects _GROUPS and the user counts of its groups."""
_CONSTRUCTION_LOCKS: WeakKeyDictionary[dist.ProcessGroup, threading.Lock] = WeakKeyDictionary()
"""The lock of each process group that is held while its RankGroup is constructed. There is one for each group, because ranks
may use two groups in different orders."""


_LIVING: WeakSet[RankGroup] = WeakSet()
"""All RankGroups of this process."""
_PARENT_GROUPS: WeakSet[dist.ProcessGroup] = WeakSet()
"""In a fork, the process groups of its parent. The connections that they use are the parent's."""
_PARENT_RELAYS: list[Relay] = []
"""In a fork, the relays of its parent. If they were freed, their connections would be closed."""


def _leave_groups_to_parent() -> None:
    """Make every group unusable in a fork, which shares its parent's memory and connections, and has none of its threads."""
    _PARENT_GROUPS.update(living_groups())
    for rank_group in list(_LIVING):
        rank_group._leave_to_parent()


os.register_at_fork(after_in_child=_leave_groups_to_parent)


@atexit.register
def _close_all() -> None:
    """Close all groups at exit, because the threads of a process group must not run when the interpreter ends."""
    for rank_group in list(_GROUPS.values()):
        if not rank_group.forked:
            rank_group.close()


class Closeable(Protocol):
    """What a group closes when it is closed: the heaps of weft.comm.symmetric_heap."""

    def close(self) -> None: ...


class FailGroupOnError(AbstractContextManager[None]):
    """A FailGroupOnError is the context of RankGroup.fail_group_on_error. Each call enters one; a generator takes longer."""

    __slots__ = ("_rank_group",)

    def __init__(self, rank_group: RankGroup) -> None:
        self._rank_group = rank_group

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._rank_group.mark_raised()
            self._rank_group.fail(error)


class OneThread(AbstractContextManager[None]):
    """OneThread is the context of a call. Only one thread of a rank may be in a call. A second one fails the group.

    If a second one waited its turn, two ranks could run their threads in different orders and mix up their data.
    """

    __slots__ = ("_rank_group",)

    def __init__(self, rank_group: RankGroup) -> None:
        self._rank_group = rank_group

    def __enter__(self) -> None:
        if not self._rank_group.lock.acquire(blocking=False):
            raise self._rank_group.refuse_thread()

    def __exit__(self, *_: object) -> None:
        self._rank_group.lock.release()


class RankGroup:
    """A RankGroup coordinates the ranks of `group`. Collective: every rank of the group constructs it.

    A process has one RankGroup for each process group. Users get it by `acquire`, and end their use with `release`. Raises
    ValueError if the ranks of a host are not consecutive.

    timeout_s: the bound of every wait.
    nodes: the number of ranks of each node, as in a Problem.
    one_host: whether all ranks are on one host.
    ranks_on_node: the ranks of this rank's node, including itself.
    name: torch's name of the process group.
    topic: a name that no other process group has.
    lock: a thread holds it from the beginning of a call until the call has published everything for other ranks.
    heaps: the memory that ranks share, by device (weft.comm.symmetric_heap.heap_of).
    broken: the error by which the group has failed.
    unraised: the failure, if results that were already returned are invalid and no call has raised the error yet.
    """

    forked = False
    """True in a fork of the rank's process."""
    _closed, _users = False, 0
    _errors = _errors_before = 0
    """The number of errors raised instead of a call: since the last call, and between the last two calls."""
    cannot_overlap = ""
    """The reason why schedules that overlap cannot run on the ranks' GPUs. It is "" if they can."""

    @classmethod
    def acquire(cls, group: dist.ProcessGroup) -> RankGroup:
        """Return the RankGroup of a process group, and count one more user. The first use constructs it, and is collective.

        Raises WeftError if the group has failed and is still in use.
        """
        with _GROUPS_LOCK:
            construction = _CONSTRUCTION_LOCKS.setdefault(group, threading.Lock())
        with construction:
            with _GROUPS_LOCK:
                if (existing := _GROUPS.get(group)) is not None:
                    return existing._add_user()
            new = cls(group)
            with _GROUPS_LOCK:
                _GROUPS[group] = new
                return new._add_user()

    @staticmethod
    def publish_error_before_first_call(group: dist.ProcessGroup, error: Exception) -> None:
        """Publish that this rank raises `error` instead of the group's first call, as `publish_error_instead` does."""
        if group in _PARENT_GROUPS or isinstance(error, WeftError):
            return
        if group.size() > 1 and dist.get_backend(group) != "fake":
            handshake.publish_error_instead(group, kind_and_words(error, _ERROR_BYTES))

    def _add_user(self) -> RankGroup:
        """Count one more user, and return this object."""
        self.check_usable((_FAILED_IN_USE, _REMEDIES[1]))
        self._users += 1
        return self

    def release(self) -> None:
        """Count one user less. The last user closes the group, except in a fork of the rank's process."""
        with _GROUPS_LOCK:
            self._users -= 1
            last = self._users <= 0 and not self.forked
            if last:
                self._unregister()
        if last:
            self.close()

    def _unregister(self) -> None:
        """Remove this object from _GROUPS, so that the next `acquire` constructs a new one."""
        group = self.__dict__.get("group")
        if group is not None and _GROUPS.get(group) is self:
            del _GROUPS[group]

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float | None = None) -> None:
        if dist.get_backend(group) == "fake":
            raise ValueError(
                "group: its backend is 'fake', so there are no peers to exchange data with; use fake tensors for a dry run "
                "(torch._subclasses.fake_tensor.FakeTensorMode), or gloo or NCCL for real tensors"
            )
        if group in _PARENT_GROUPS:
            raise WeftError(
                f"process {os.getpid()} is a fork of the process that made this process group: call weft there, or start "
                "processes by spawn and give them a group of their own"
            )
        self.group, self.name = group, group.group_name
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.calls = self._agreements = self._compared = 0
        self._agreed_texts = Remembered(2, NUMBERS)
        self.broken: BaseException | None = None
        self.unraised: WeftError | None = None
        self._raised = False
        self.lock = threading.RLock()
        self._failure_lock = threading.Lock()
        self._relay: Relay | None = None
        self._rounds = 0
        self.heaps: dict[torch.device, Closeable] = {}
        _LIVING.add(self)
        members = join(group, timeout_s)
        control, self.timeout_s = members.control, members.timeout_s
        try:
            self.nodes, self.one_host, self.ranks_on_node = members.nodes, members.one_host, members.ranks_on_node
            self.pids, self._starts = members.pids, members.starts
            self._control = [self._open_control(rank, name, control) for rank, name in enumerate(members.names)]
            self.topic = members.names[0].removeprefix(PREFIX)
            self.await_mapped()
            self._relay = self._start_relay() if self.nodes else None
        finally:
            unlink(control.name)

    def _open_control(self, rank: int, name: str, own: SharedSegment) -> ControlSegment:
        """Map a rank's control segment. For a rank of another node, return an empty copy that the relay fills."""
        if rank not in self.ranks_on_node:
            return ControlSegment.private()
        try:
            return ControlSegment(own if rank == self.rank else SharedSegment.open(name))
        except FileNotFoundError:
            raise PeerLost(f"rank {rank} failed in the group's first call; see its error") from None

    def open_store(self, name: str) -> Any:
        """Open a store that only this group uses, on a separate connection. Bounded. Raises PeerLost or WaitTimeout."""
        asks_at = time.monotonic() + _ASKS_FOR_STORE_S

        def check() -> None:
            nonlocal asks_at
            now = time.monotonic()
            if now > asks_at:
                asks_at = now + _ASKS_FOR_STORE_S
                if refusal := refusal_of_store(self.group):
                    raise self._lose_store(refusal)

        try:
            return self.run_bounded(
                lambda: store_of(self.group, f"weft/{self.topic}/{name}"),
                lambda: f"rank {self.rank}: the group's store has not answered; the process that hosts it may be stopped",
                check=check,
            )
        except RuntimeError as error:
            raise error if isinstance(error, WeftError) else self._lose_store(error) from None

    def run_bounded(
        self,
        work: Callable[[], T],
        explain: Callable[[], str],
        *,
        grace_s: float = 0.0,
        check: Callable[[], None] = lambda: None,
    ) -> T:
        """Run `work`, which may block, on a thread of its own. Return its result, or raise its error.

        The rest is as for wait_until.
        """
        done, found, raised = threading.Event(), list[T](), list[Exception]()

        def run() -> None:
            try:
                found.append(work())
            except Exception as error:
                raised.append(error)
            done.set()

        threading.Thread(target=run, name=f"weft-waits-{self.rank}", daemon=True).start()
        self.wait_until(done.is_set, explain, grace_s=grace_s, check=check)
        if raised:
            raise raised[0]
        return found[0]

    def _lose_store(self, why: object) -> BaseException:
        """Fail the group because its store is lost. Return the error."""
        return self.fail(PeerLost(f"the store of the group is lost, and with it the process that hosts it ({why})"))

    def _start_relay(self) -> Relay:
        on_node, store = [peer for peer in self._peers if peer in self.ranks_on_node], self.open_store("relay")
        try:
            return Relay(
                store,
                rank=self.rank,
                own=self._control[self.rank],
                copies={peer: self._control[peer] for peer in self._peers if peer not in self.ranks_on_node},
                death_notices={peer: partial(self._make_death_notice, peer) for peer in on_node},
                timeout_s=self.timeout_s,
            )
        except RuntimeError as error:
            raise self._lose_store(error) from None

    def _make_death_notice(self, peer: int) -> ControlSegment | None:
        """Return a copy of a dead peer's control segment that says that the peer has died.

        The relay shows it to other nodes. Return None while the peer lives, or if the peer has published its own reason.
        """
        if not died(self.pids[peer], self._starts[peer]) or self._control[peer].state:
            return None
        notice = ControlSegment.private()
        notice.restore(self._control[peer].snapshot())
        notice.fail(f"process {self.pids[peer]} died")
        return notice

    def agree_on_call(
        self, text: str, value: int = 0, *, within_s: float | None = None, peers_may_repeat: bool = False
    ) -> tuple[int, ...]:
        """Begin a call that every rank describes by the same `text`. Return the `value` of every rank, by rank.

        The log counts it as one call, even if it runs no operator. Raises RankMismatch with the lines that differ.

        within_s: the bound of the wait for the others, if they may take longer than in calls.
        peers_may_repeat: on CPUs, a peer may have agreed on this text before, and wait in `await_same_call`. Then both ranks
            see that their numbers differ, and all ranks agree once more.
        """
        self.check_usable()
        text = clipped(text, TEXT_BYTES)
        with self.fail_group_on_error():
            offered = self._offer(text, value, within_s, awaits_peers=peers_may_repeat)
            if peers_may_repeat and any(self._control[peer].number_of(self.calls) not in AGREED for peer in self._peers):
                offered = self._offer(text, value, within_s)
            for peer, theirs in offered.items():
                if theirs.startswith(_REFUSAL_PREFIX):
                    raise PeerLost(f"rank {peer} failed: {theirs.removeprefix(_REFUSAL_PREFIX)}")
                if theirs != text:
                    raise self._make_mismatch(self.calls, text, peer, theirs)
        return tuple(control.offered(self._agreements % 2) for control in self._control)

    def _offer(self, text: str, value: int, within_s: float | None = None, *, awaits_peers: bool = False) -> dict[int, str]:
        """Publish this rank's call, wait until every rank has entered a call, and return the texts of the other ranks."""
        self._agreements += 1
        parity = self._agreements % 2
        self._control[self.rank].offer(parity, text, value)
        self._log_call(AGREED[parity], awaits_peers=awaits_peers)
        with self.fail_group_on_error():  # for peers this call has begun
            self._publish()
            others = self._peers
            for peer in others:
                self._await_count(peer, "entered", self.calls, within_s)
            return {peer: self._read_text(peer, self.calls) for peer in others}

    def _refuse(self, error: ValueError) -> None:
        """Publish that this rank raises `error` instead of the call that the ranks have agreed on.

        It returns once every rank raises an error. If another rank continues, the group fails, and that rank gets this error's
        text at once.
        """
        with suppress(WeftError):
            others = self._offer((_REFUSAL_PREFIX + reason(error))[:_REFUSAL_CHARS], 0)
            if not all(theirs.startswith(_REFUSAL_PREFIX) for theirs in others.values()):
                self.fail(error)

    def number_agreed_text(self, text: str) -> int:
        """Return the number of a text that all ranks have agreed on, for `repeat`. It is the same on every rank."""
        return self._agreed_texts.number(text)

    def begin_agreed_call(self, number: int, *, awaits_peers: bool = False) -> None:
        """Begin a call that all ranks have agreed on before. It does not wait. awaits_peers: `await_same_call` comes next."""
        if self._closed or self.broken:  # as `check_usable` asks, without its calls
            self.check_usable()
        self._log_call(number, awaits_peers=awaits_peers)

    def log_agreed_call(self, number: int) -> None:
        """Do as begin_agreed_call for a group that is usable, in one frame: every warm call on a GPU does it."""
        control = self._control[self.rank]
        self._errors_before, self._errors = self._errors, 0
        if self._errors_before:
            control.raised = 0
        self.calls = call = self.calls + 1
        store_log, log_order, store_word, word_order = control.fast_log
        store_log(8 * (call % LOGGED), call * NUMBERS + number, log_order)
        store_word(0, call, word_order)  # ENTERED is word 0

    def await_same_call(self, number: int) -> bool:
        """Wait until every rank has begun a call. Return whether all of them have this number.

        If the result is False, it is False on every rank, and every rank then calls `agree_on_call`.
        """
        if self._relay:
            self._publish()
        same = True
        for peer in self._peers:
            if self._control[peer].number_of(self.calls) != number:
                self._await_count(peer, "entered", self.calls)
                same = same and self._control[peer].number_of(self.calls) == number
        if not same:
            self._agreements += 1  # ranks that had not agreed on this text before are in `_offer`
        return same

    def count_captured_call(self) -> None:
        """Count a call that is captured in a CUDA graph. It does not wait.

        The call is not logged, because it runs in replays, any number of times, and this rank does not know when.
        """
        self.check_usable()
        self._control[self.rank].captured += 1

    def _explain_captures(self, peer: int) -> str:
        """Return a sentence for an error message if a peer has captured another number of calls, else "".

        Captured calls are not logged, so such a difference may be why the logs of calls differ.
        """
        mine, theirs = (self._control[rank].captured for rank in (self.rank, peer))
        if mine == theirs:
            return ""
        return (
            f"\nrank {self.rank} has captured {mine} calls in CUDA graphs, rank {peer} {theirs}: "
            "capture a call on every rank, or on none, because replays are not compared with calls"
        )

    def publish_error_instead(self, error: Exception) -> None:
        """Publish that this rank raises `error` instead of its next call. It does not wait, and the group stays usable.

        Peers that have entered that call give up soon, unless they raise as many errors, or this rank makes the call after all.
        """
        if self.broken is None and not self.forked:
            self._errors += 1
            self._control[self.rank].publish_error_instead(self._errors, kind_and_words(error, _ERROR_BYTES))
            self._publish()

    def _make_retry_check(self, peer: int, call: int) -> Callable[[], None]:
        """Return a function that raises PeerLost if a peer has raised an error instead of a call and does not arrive soon."""
        control, since = self._control[peer], 0.0

        def check() -> None:
            nonlocal since
            if control.entered != call - 1 or control.raised <= self._errors_before:
                since = 0.0
            elif not since:
                since = time.monotonic()
            elif time.monotonic() > since + _RETRY_GRACE_S:
                text = f"rank {peer} raised an error and did not come to call {call}: {control.failure}"
                raise self.fail(PeerLost(text))

        return check

    def _log_call(self, number: int, *, awaits_peers: bool = False) -> None:
        """Log a call.

        awaits_peers: ranks compare this call while they wait for each other, so `_compare_calls` skips it.
        """
        self.calls += 1
        if awaits_peers:
            self._compared = self.calls
        self._errors_before, self._errors = self._errors, 0
        self._control[self.rank].log(self.calls, number, after_errors=self._errors_before > 0)

    def _read_text(self, rank: int, call: int) -> str:
        control = self._control[rank]
        number = control.number_of(call)
        if number in AGREED:
            return control.slot(AGREED.index(number))
        return self._agreed_texts.text(number)

    def _compare_calls(self) -> None:
        """Raise RankMismatch if calls that all ranks have entered differ."""
        entered = min(control.entered for control in self._control)
        for call in range(max(self._compared + 1, entered - LOGGED), entered + 1):
            mine = self._control[self.rank].number_of(call)
            for peer in self._peers:
                theirs = self._control[peer].number_of(call)
                # For calls that ranks agreed on when they entered them, each rank has compared the texts itself.
                if None not in (mine, theirs) and mine != theirs:
                    raise self.fail(
                        self._make_mismatch(call, self._read_text(self.rank, call), peer, self._read_text(peer, call))
                    )
        self._compared = max(self._compared, entered)

    def _make_mismatch(self, call: int, mine: str, peer: int, theirs: str) -> RankMismatch:
        lines = difference(self.rank, mine, peer, theirs)
        return RankMismatch(f"ranks disagree in call {call}:\n{lines}{self._explain_captures(peer)}")

    def exchange_names(self, mine: str) -> dict[int, str]:
        """Return the name of the newest segment of each rank of this node. Collective. `await_mapped` comes next."""
        self._rounds += 1
        self._control[self.rank].create(mine, self._rounds)
        for peer in self.ranks_on_node:
            self._await_count(peer, "created", self._rounds)
        return {peer: self._control[peer].newest for peer in self.ranks_on_node}

    def await_mapped(self) -> None:
        """Wait until every rank of this node has mapped the segments that were created last."""
        self._control[self.rank].mapped = self._rounds + 1
        for peer in (peer for peer in self._peers if peer in self.ranks_on_node):
            self._await_count(peer, "mapped", self._rounds + 1)

    def wait_until(
        self,
        ready: Callable[[], bool],
        explain: Callable[[], str],
        within_s: float | None = None,
        *,
        grace_s: float = 0.0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait until `ready()`. Raises PeerLost, or WaitTimeout with `explain()` at the bound.

        within_s: the bound. By default it is timeout_s.
        grace_s: added to the bound, so that a peer can first report the rank that it waits for.
        check: a function that is called every 20 ms and may raise an error.
        """
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
                    check()
                next_check = now + _PEER_CHECK_S
            if now >= deadline and not ready():  # it may have become ready while this process was stopped
                raise self.fail(WaitTimeout(f"{explain()} after {bound_s:g} s"))

    def check_peers(self, ready: Callable[[], bool] = lambda: False, *, may_leave: bool = False) -> None:
        """Raise an error if this group has failed, for example on another lane, or if the ranks' calls differ.

        Unless `ready()`, also raise if a peer is dead, has failed, has left too early, or, on another node, has been silent for
        too long. A peer that has closed the group after all calls that this rank has begun is no error, because it has done its
        part.

        may_leave: this rank does not wait for the peers, so a peer that has closed the group is no error.
        """
        if self.broken:
            raise self._repeat_failure(reason(self.broken))
        self._refresh()
        self._compare_calls()
        dead = [p for p in self._peers if p in self.ranks_on_node and died(self.pids[p], self._starts[p])]
        # The order matters: a rank closes before its process ends. Each state is read once, because a rank may close at any
        # time.
        states = {p: self._control[p].state for p in self._peers}
        left = [p for p in states if states[p] == CLOSED and (may_leave or self._control[p].entered >= self.calls)]
        dead = [p for p in dead if p not in left]
        gone = [p for p in states if states[p] and p not in left]
        silent = [] if gone else [p for p in self._peers if self._measure_silence_s(p) > min(_LOST_AFTER_S, self.timeout_s)]
        if not (dead or gone or silent) or ready():
            return
        # A dead rank is the reason for what other ranks report: name it first.
        raise self.fail(PeerLost(self._describe_loss((dead + gone + silent)[0])))

    def _refresh(self) -> None:
        """Fetch what ranks of other nodes have published."""
        if self._relay:
            try:
                self._relay.refresh()
            except RuntimeError as error:
                raise self._lose_store(error) from None

    def _measure_silence_s(self, peer: int) -> float:
        """Return for how many seconds a rank of another node has published nothing. It is 0 for a rank of this node, and for a
        rank that has left."""
        closed = peer in self.ranks_on_node or self._control[peer].state == CLOSED
        return 0.0 if closed or self._relay is None else self._relay.silent_s(peer)

    def _describe_loss(self, peer: int) -> str:
        """Return a clause that says how a peer was lost: it failed, left, died, or is silent."""
        state = self._control[peer].state
        if state in ENDED_BADLY:
            return f"rank {peer} failed: {self._control[peer].failure}"
        if state != CLOSED and peer not in self.ranks_on_node:
            return f"rank {peer}, on another node, has been silent for {self._measure_silence_s(peer):.0f} s"
        return f"rank {peer} has left the group" if state == CLOSED else f"rank {peer} (process {self.pids[peer]}) died"

    def _leave_to_parent(self) -> None:
        """Make this object unusable in a fork of the rank's process.

        Whatever is called then, and from wherever, writes into copies of the shared memory, and raises an error where it waits.
        """
        self.forked = True
        self.lock, self._failure_lock = threading.RLock(), threading.Lock()  # a thread of the parent may have held them
        self._control = [control.copy() for control in self.__dict__.get("_control", ())]
        if self._relay is not None:
            _PARENT_RELAYS.append(self._relay)
            self._relay = None
        if not self._closed:
            self.broken = WeftError(self._explain_fork())

    def _explain_fork(self) -> str:
        rank_process = self.__dict__.get("pids", {self.rank: os.getppid()})[self.rank]
        return (
            f"process {os.getpid()} is a fork of process {rank_process}, which is rank {self.rank} of this group: "
            "call weft there, or start processes by spawn and give them a group of their own"
        )

    def fail(self, error: BaseException) -> BaseException:
        """Publish why this rank cannot continue, and return `error`. If the rank has failed before, the first reason stays."""
        with self._failure_lock:
            if self.broken is None:
                self.broken = error
                self._control[self.rank].fail(reason(error))
                for peer in self._peers:  # after the state, which a peer reads once it sees its alarm
                    if peer in self.ranks_on_node:
                        self._control[peer].alarm = 1
                self._publish()
                remove_stale_segments()
        return error

    def fail_group_on_error(self) -> FailGroupOnError:
        """Return a context in which any error, also Ctrl-C, fails the group. Peers that wait for it then get an error."""
        return FailGroupOnError(self)

    @contextmanager
    def agree_on_value_errors(self) -> Iterator[None]:
        """Return a context at whose end the ranks compare whether each has raised a ValueError.

        Inside, every rank uses values that all ranks have agreed on, so all of them should raise the same ValueErrors. If every
        rank raises one, the group stays usable. If only some ranks do, or for any other exception, the group has failed as in
        `fail_group_on_error`.
        """
        refused: ValueError | None = None
        with self.fail_group_on_error():
            try:
                yield
            except ValueError as error:
                if self.broken is not None:
                    raise
                refused = error
        if refused is not None:
            self._refuse(refused)
            raise refused

    def mark_raised(self) -> None:
        """Record that a call raises the failure of the group, so that `weft.close` does not raise it again."""
        with self._failure_lock:
            self._raised, self.unraised = True, None

    def fail_later(self, error: WeftError, *, unraised: bool) -> None:
        """Fail the group outside of a call. The next call raises this error.

        unraised: calls that have returned are invalid, so `weft.close` raises the error if no other call has.
        """
        self.fail(error)
        with self._failure_lock:
            self.broken = error
            self.unraised = error if unraised and not self._raised else None

    def _repeat_failure(self, text: str) -> WeftError:
        """Return an error of the type of this group's failure with another text."""
        return (type(self.broken) if isinstance(self.broken, WeftError) else WeftError)(text)

    def has_failed_peer(self) -> bool:
        """Return whether a peer has failed. Data that it sends after that may be invalid."""
        return self._control[self.rank].load_alarm() != 0

    def load_alarm(self) -> Callable[[], int]:
        """Return a function that returns whether a peer has failed, as a number. It takes less time than `has_failed_peer`."""
        return self._control[self.rank].load_alarm

    def await_notified(self, within_s: float) -> None:
        """Wait after a failure until all living ranks know of it, or until within_s is over.

        Only then may a rank release the waits on its device. The released lanes send invalid data, which a rank that does not
        know of the failure would mistake for results.
        """
        own = self._control[self.rank]
        if own.state == FAILED:
            own.state = NOTIFIED
            self._publish()
        deadline = time.monotonic() + within_s
        with suppress(WeftError):  # a rank that no longer publishes does not send data either
            while time.monotonic() < deadline and not all(self._was_notified(peer) for peer in self._peers):
                time.sleep(1e-3)
                self._refresh()

    def _was_notified(self, peer: int) -> bool:
        """Return whether no call of a peer can return an invalid result without an error."""
        dead = peer in self.ranks_on_node and died(self.pids[peer], self._starts[peer])
        return dead or self._control[peer].state in (CLOSED, NOTIFIED)

    def _publish(self) -> None:
        """Send this rank's control segment to other nodes at once."""
        if self._relay:
            with suppress(RuntimeError):  # the store may be what is lost
                self._relay.publish()

    def close(self) -> None:
        """Leave the group. Peers that wait for this rank get PeerLost. Not collective.

        The reference to the process group is dropped, because in a reference cycle its threads would run until the interpreter
        ends. In a fork it does nothing.
        """
        if self.forked:
            return
        own = self._control[self.rank]
        own.state = {RUNNING: CLOSED, FAILED: NOTIFIED}.get(own.state, own.state)
        if self._relay:
            self._relay.close()
        self._closed = self._closed or self.broken is None
        self.broken = self.broken or WeftError("the process group is closed")
        for heap in self.heaps.values():
            heap.close()
        with _GROUPS_LOCK:
            self._unregister()
        self.__dict__.pop("group", None)

    def refuse_thread(self) -> BaseException:
        """Fail the group because this thread calls while another one does. Return the error for this thread."""
        return self.fail(
            ValueError(
                f"group: thread {threading.current_thread().name} calls weft while a call of another thread of rank "
                f"{self.rank} with the same process group has not ended; give each thread a group of its own "
                "(torch.distributed.new_group), or let the threads take turns, in the same order on every rank"
            )
        )

    @cached_property
    def calling(self) -> OneThread:
        """The context of a call. It raises ValueError in a thread while another thread is in it."""
        return OneThread(self)

    def check_usable(self, remedies: tuple[str, str] = _REMEDIES) -> None:
        """Raise an error of the failure's type if this group has failed, was closed, or belongs to another process.

        remedies: the texts for a failed group and for a closed one.
        """
        if self.forked:
            raise WeftError(self._explain_fork())
        if self._closed:
            raise WeftError(remedies[1])
        if self.broken:
            self.mark_raised()
            raise self._repeat_failure(remedies[0].format(reason(self.broken)))

    @cached_property
    def _peers(self) -> list[int]:
        """Return all other ranks, beginning with the next one."""
        return [(self.rank + i) % self.world_size for i in range(1, self.world_size)]

    def _await_count(
        self, peer: int, what: Literal["entered", "created", "mapped"], value: int, within_s: float | None = None
    ) -> None:
        """Wait until a count of a peer, such as the calls that it has entered, reaches a value."""
        control = self._control[peer]
        self.wait_until(
            lambda: getattr(control, what) >= value,
            lambda: (
                f"rank {self.rank}, lane host, step 0 (wait {what}[{peer}]@{peer}): expected {value}, "
                f"seen {getattr(control, what)}; rank {peer} did not arrive{self._explain_captures(peer)}"
            ),
            within_s,
            grace_s=_GRACE_S,
            check=self._make_retry_check(peer, value) if what == "entered" else lambda: None,
        )
