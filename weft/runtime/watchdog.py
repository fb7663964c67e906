"""The watchdog: a thread that bounds every call of one process group on one GPU, and acts when a call or a peer fails.

The thread looks at the events of calls (weft.runtime.tickets). The bound of a call counts from when the GPU begins it, not from
when it was enqueued behind other work. The thread looks in the relaxed capture mode, in which it does not disturb a graph
capture of another thread.

    caller:   begun 7 ... done 7      begun 8 ...
    watchdog: done 7 in time? -> next;   a peer is dead, or the bound is over -> log which wait is stuck, release the blocked
              streams once all ranks know, write NaN into what the unfinished calls return

The watchdog raises nothing in the threads of others. The next call of the group raises the error, or `weft.synchronize` does.

A rank releases its own streams only when no peer can take for a result what those streams send then (weft.runtime.release):
when the peers' watchdogs know of the failure (RankGroup.await_notified), or after a second. A rank that was stopped, or slow,
for longer finds at the end of the call that it enqueues then that a peer has failed (`raise_if_failed`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import torch

from weft.comm.rank_group import RankGroup
from weft.compat.streams import Driver
from weft.core.errors import WaitTimeout, WeftError
from weft.core.logs import LOGGER
from weft.runtime.network import CudaWire
from weft.runtime.release import POLL_S, Releaser
from weft.runtime.tickets import PendingCall, Result, Tickets, results_of

T = TypeVar("T")
FIRST_S = 600.0
"""Bound of what ranks do before a first call, where it is more than a call's: one rank may compile what others find
compiled."""
_TICK_S = 0.02
"""How often the watchdog looks while calls are in flight."""
_ASK_S = 2.0
"""How long the watchdog asks what a call waits for: the driver may not answer."""
_HASTE_S = 5.0
"""How long waits are released every POLL_S after the last call has ended: a lane goes on to its next wait each time. Later, as
for graphs that are replayed, they are released once a tick."""
_NOTIFIED_S = 1.0
"""How long a peer may take to notify its calls of a failure: its watchdog looks every half second, at least."""
_RELEASED_S = 1.0
"""A call that has not ended so long after all its flags were raised waits for a collective."""
_STUCK_S = 10.0
"""A call that has not ended so long after its waits were released does not end: the driver does not run the release."""
_IDLE_TICKS = 25
"""A process group without calls in flight looks at its peers this much more rarely (graphs may be replaying)."""

_ON_FAILURE = ("raise", "abort")
_STUCK = (
    f"calls have not ended {_STUCK_S:g} s after their waits were released; if a thread of this process is in a CUDA call, it "
    "may be loading a kernel, for which CUDA waits for all streams: end the process (WEFT_ON_FAILURE=abort does so at once)"
)


def on_failure_from_environment() -> str:
    """WEFT_ON_FAILURE, or raise. Raises ValueError if it is neither raise nor abort."""
    name = os.environ.get("WEFT_ON_FAILURE", "raise")
    if name not in _ON_FAILURE:
        raise ValueError(f"WEFT_ON_FAILURE is {name!r}; use {' or '.join(_ON_FAILURE)}")
    return name


def end_process() -> None:
    """End this process by SIGABRT, as torch's watchdog of NCCL does, so that what has launched it notices."""
    for handler in (*LOGGER.handlers, *logging.getLogger().handlers):
        handler.flush()
    os.abort()


class Watchdog:
    """The watchdog of one process group on one GPU. index: the GPU's. watching: whether it has seen no failure, or has yet to
    finish what it does at one."""

    def __init__(
        self, rank_group: RankGroup, index: int, *, driver: Driver, tickets: Tickets, releaser: Releaser, wire: CudaWire | None
    ) -> None:
        self.rank_group, self.tickets, self.releaser = rank_group, tickets, releaser
        self._index, self._driver, self._wire = index, driver, wire
        self._looked = time.monotonic()
        self._captures = False
        self._on_failure = on_failure_from_environment()
        self._stop = threading.Event()
        self.watching = True
        self._thread = threading.Thread(target=self._run, name=f"weft-watch-{rank_group.rank}", daemon=True)
        self._thread.start()

    def begin(
        self, stream: int, what: str, describe: Callable[[], str], *, rehearses: bool, results: Iterable[Result] = ()
    ) -> int:
        """The ticket of a new call, for which `await_room` has found room. The call is watched from when `stream` reaches this
        point, also while it is still being enqueued; the bound of one that rehearses is that of first calls. what: names it.
        results: the tensors that it returns."""
        call = PendingCall(
            ticket=self.tickets.take(), what=what, results=tuple(results), describe=describe, rehearses=rehearses
        )
        self.tickets.begin(stream, call)
        return call.ticket

    def await_room(self, describe: Callable[[], str]) -> None:
        """Wait, bounded, where so many calls are in flight that the events of the next ticket still belong to one of them."""
        ticket = self.tickets.newest + 1
        if not self.tickets.is_free(ticket):
            # The watchdog bounds each call. All of them, with what else the stream has, may take longer.
            self.rank_group.until(lambda: self.tickets.is_free(ticket), describe, max(self.rank_group.timeout_s, FIRST_S))

    def captured(self) -> None:
        """A graph captures a call, and may replay it later. Raises as raise_if_failed."""
        self._captures = True
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise if this rank or a peer has failed by now, which the watchdog may not have seen yet."""
        if self.rank_group.broken is not None or self.rank_group.peer_failed():
            self.rank_group.check_peers()

    def synchronize(self) -> None:
        """Wait until all calls so far have ended on this rank's device. Bounded: the watchdog bounds each, and all of them
        together have the bound of first calls. Raises what has failed."""
        last = self.tickets.newest
        pending = f"rank {self.rank_group.rank}: calls are under way"
        self.rank_group.until(lambda: self.tickets.done(last), lambda: pending, max(self.rank_group.timeout_s, FIRST_S))
        self.raise_if_failed()

    def watch(self, what: str, stream: int, work: Callable[[], T]) -> T:
        """Run work that enqueues collectives of NCCL on `stream`, torch's current one, watched as a first call is: it may
        compile."""
        self.releaser.has_collectives = True
        self.rank_group.check_usable()
        if torch.cuda.is_current_stream_capturing():
            self.captured()
            return work()
        rank = self.rank_group.rank

        def describe() -> str:
            return f"rank {rank}: {what}: perhaps not all ranks have begun it"

        self.await_room(describe)
        ticket = self.begin(stream, what, describe, rehearses=True)
        call = self.tickets.pending[-1]
        try:
            found = work()
            call.results = tuple(results_of(found))
        finally:
            self.tickets.end(stream, ticket)
        self.raise_if_failed()
        return found

    def close(self) -> None:
        """End the thread, and what it has begun after a failure. Destroys the events of calls."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self.releaser.close()
        self.tickets.close()

    def _run(self) -> None:
        torch.cuda.set_device(self._index)
        self._driver.relax_captures()
        idle = 0
        while not self._stop.wait(_TICK_S):
            if len(self.tickets.pending) == 0:
                idle += 1
            if (self.tickets.pending or idle % _IDLE_TICKS == 0) and not self._look():
                break
        self.watching = False
        self._drain()

    def _drain(self) -> None:
        """After a failure: release what waits, again and again, until `close`."""
        released = ended = time.monotonic()
        stuck = False
        while not self._stop.wait(POLL_S if self.tickets.pending and time.monotonic() < ended + _HASTE_S else _TICK_S):
            with suppress(RuntimeError):  # a device that is lost has nothing that waits
                self.releaser.release_all()
                if self.tickets.drop_done():
                    ended = time.monotonic()
                if time.monotonic() > max(released, ended) + _RELEASED_S and (self._captures or self.tickets.pending):
                    self.releaser.abort_collectives()
            if self.tickets.pending and not stuck and time.monotonic() > max(released, ended) + _STUCK_S:
                stuck = True
                LOGGER.error(_STUCK)

    def _look(self) -> bool:
        """Look at calls and peers once. Returns False once the group has failed, and that has been logged."""
        first, doubtful = None, self._doubtful()
        try:
            if not doubtful:
                self.tickets.drop_done()
            first = next((call for call in tuple(self.tickets.pending) if self.tickets.running(call.ticket)), None)
            ended = partial(self._ended_rightly, first, doubtful)
            self.rank_group.check_peers(ended, may_leave=first is None)
            if first is not None:
                self._hold_to_bound(first)
        except Exception as error:
            # Whatever ends the watchdog ends the group: nothing else would release what waits.
            self._fail(self._reason(error), first, doubtful)
            return False
        return True

    def _reason(self, error: Exception) -> WeftError:
        """Why the watchdog has ended. A device that is lost may be lost together with a peer, whose memory it had mapped."""
        if self.rank_group.broken is None:
            try:
                self.rank_group.check_peers()
            except WeftError as lost:
                return lost
        return error if isinstance(error, WeftError) else WeftError(f"the watch failed: {error!r}")

    def _ended_rightly(self, first: PendingCall | None, doubtful: Sequence[PendingCall]) -> bool:
        """Whether a lost peer does not matter: it has done all that the running call needs of it."""
        return first is not None and not doubtful and self.tickets.done(first.ticket)

    def _doubtful(self) -> tuple[PendingCall, ...]:
        """Calls that may have ended by what a failed peer sent. A peer waits only _NOTIFIED_S for this rank's watchdog; this
        returns calls if the watchdog has been held up for longer than that."""
        looked, self._looked = self._looked, time.monotonic()
        return tuple(self.tickets.pending) if self._looked - looked > _NOTIFIED_S and self.rank_group.peer_failed() else ()

    def _hold_to_bound(self, call: PendingCall) -> None:
        bound_s = max(self.rank_group.timeout_s, FIRST_S) if call.rehearses else self.rank_group.timeout_s
        call.deadline = min(call.deadline, time.monotonic() + bound_s)
        if time.monotonic() > call.deadline and not self.tickets.done(call.ticket):
            raise self.rank_group.fail(WaitTimeout(f"{self._described(call)} after {bound_s:g} s"))

    def _fail(self, error: WeftError, first: PendingCall | None, doubtful: Sequence[PendingCall] = ()) -> None:
        """Log the error, keep it for the next call, and make what unfinished calls return invalid once it is written."""
        self.rank_group.fail(error)
        if not isinstance(error, WaitTimeout) and first is not None:
            error = type(error)(f"{error}; meanwhile {self._described(first)}")
        invalid = [*doubtful, *self.tickets.unfinished()]
        self.rank_group.fail_later(error, unraised=bool(invalid))
        LOGGER.error(str(error))
        self.rank_group.await_notified(_NOTIFIED_S)
        if self._on_failure == "abort":
            end_process()
        with suppress(RuntimeError):  # a device that is lost has no results
            self.releaser.invalidate(invalid)
        if self._wire:
            self._wire.abort()

    def _described(self, call: PendingCall) -> str:
        """What a call waits for, in words. Its program may be closed by now, and its device lost: then the words say that."""
        said: list[str] = []

        def ask() -> None:
            try:
                self._driver.relax_captures()
                said.append(call.describe())
            except Exception as error:
                said.append(f"what a call waits for cannot be told: {error!r}")

        asking = threading.Thread(target=ask, name=f"weft-asks-{self.rank_group.rank}", daemon=True)
        asking.start()
        asking.join(_ASK_S)
        return said[0] if said else "what a call waits for cannot be told: the driver does not answer"
