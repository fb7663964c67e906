"""The watchdog is a thread that bounds every call of one process group on one GPU, and acts when a call or a peer fails.

The thread looks at the events of calls (weft.runtime.order). The bound of a call counts from when the GPU begins it, not from
when it was enqueued behind other work. The thread looks in the relaxed capture mode, in which it does not disturb a graph
capture of another thread.

    caller:   begun 7 ... done 7      begun 8 ...
    watchdog: done 7 in time? -> next;   a peer is dead, or the bound is over -> log which wait is stuck, release the blocked
              streams once all ranks know, write NaN into what the unfinished calls return

The watchdog raises no error in other threads. The next call of the group raises the error, or `weft.synchronize` does.

After a release the streams of a rank send invalid data. So a rank releases its streams only when no peer can mistake that data
for a result: when the peers' watchdogs know of the failure (RankGroup.await_notified), or after a
second. A rank that was stopped or slow for longer finds the failure at the end of the next call that it enqueues
(`raise_if_failed`).

What happens on a GPU after a failure: results become NaN, waits are released, and collectives that never end are aborted.

A released stream goes on without what it waited for, so what it computes and sends is invalid. Invalid is every call that has
not ended when the failure is seen, whether the device has come to it or not. Its results become NaN twice over. Before the
release, the memory in which peers' data arrive is set to NaN, so that whatever the released streams compute from it is NaN too,
in the order of the streams. Once the call has ended, its results themselves are set to NaN, on a stream that waits for the end
of the call: the call has returned before the failure, so it cannot raise it, and a program may read its results before the next
call or `weft.synchronize` does.

    caller's stream          call 7: waits for a peer ... released ... done 7
    invalidating stream                                                      wait done 7, write NaN into what call 7 returned

Replays of a CUDA graph of the caller's are no calls of weft: they record no events, and nobody enqueues them under a lock. So
the watchdog reads from the GPU which captured program is in the middle of a call (`CapturedPrograms`). After a failure each
replay would wait again, so the watchdog releases again and again until it is closed. What a captured call has returned becomes
NaN once its replay has ended, if somebody still holds the tensor. In a graph's memory pool other tensors may have the same
memory, and it is unknown which, so what nobody holds is left alone.

A lane writes the step that it has reached before it waits, and 0 after its last wait. This shows in which step a replay is, but
not in which replay: a graph that is replayed without a pause may be in the same step whenever the watchdog looks. So a lane
whose flag operations are a kernel also writes 0 into a second word after its last wait. The watchdog writes 1 there.

    lane       step 2, wait ... | 0, 0    step 2, wait ...............................
    watchdog        look, write 1     look, write 1      look            look
    it reads        2                 2, 0: another call  2, 1: since     2, 1: the same call since then

A kernel that counts its calls needs no such word: it writes the number of a call at its begin, and again at its end.

Lanes whose flag operations are memory operations of a stream write no such words, because a call would take longer for it. A
replay that waits only in such a lane, in a message between nodes, or in a collective of NCCL, has no bound. So it is for
collectives without a product, but for those that are one kernel. Kernels for `splits` bound their waits themselves.

A collective of NCCL waits for its peers by itself, and no flag of weft's ends it: its communicator has to be aborted, which
belongs to the caller. It is aborted where a program has such a collective and the calls in flight have not ended a while after
all else was released, or a captured call may be replayed. The process group serves nobody any more then.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from weft.comm.rank_group import RankGroup
from weft.compat.c10d import backend_of
from weft.compat.streams import Driver
from weft.core.errors import LOGGER, WaitTimeout, WeftError, warn_once
from weft.runtime.network import Abort, CudaWire
from weft.runtime.order import FIRST_S, Order, PendingCall, memory_of_results

T = TypeVar("T")
_TICK_S = 0.02
"""The watchdog looks every 20 ms while calls are in flight."""
_ASK_S = 2.0
"""The watchdog asks for 2 s what a call waits for. The driver may not answer."""
_HASTE_S = 5.0
"""For 5 s after the last call has ended, waits are released every POLL_S, because each release lets a lane reach its next wait.
Later, for graphs that are replayed, they are released once per tick."""
_NOTIFIED_S = 1.0
"""A peer has 1 s to notify its calls of a failure. Its watchdog looks at least every half second."""
_RELEASED_S = 1.0
"""A call that has not ended 1 s after all its flags were raised waits for a collective."""
_STUCK_S = 10.0
"""A call that has not ended 10 s after its waits were released will not end, because the driver does not run the release."""
_LOOKS_S = 0.5
"""The watchdog looks at captured programs this often. A look copies two or three pieces of memory for each of them."""
_LAST_WORK_S = 0.2
"""The work of a call after its last wait has ended within 0.2 s. It is less than the time between looks."""
_IDLE_TICKS = 25
"""Without calls in flight the watchdog looks at the peers every 25th tick. Graphs may be replaying."""

_ON_FAILURE = ("raise", "abort")
_STUCK = (
    f"calls have not ended {_STUCK_S:g} s after their waits were released; if a thread of this process is in a CUDA call, it "
    "may be loading a kernel, for which CUDA waits for all streams: end the process (WEFT_ON_FAILURE=abort does so at once)"
)


def on_failure_from_environment() -> str:
    """Return WEFT_ON_FAILURE, or "raise" if it is unset. Raises ValueError if it is neither raise nor abort."""
    name = os.environ.get("WEFT_ON_FAILURE", "raise")
    if name not in _ON_FAILURE:
        raise ValueError(f"WEFT_ON_FAILURE is {name!r}; use {' or '.join(_ON_FAILURE)}")
    return name


def end_process() -> None:
    """End this process by SIGABRT, as torch's NCCL watchdog does, so that its launcher notices."""
    for handler in (*LOGGER.handlers, *logging.getLogger().handlers):
        handler.flush()
    os.abort()


class CapturedProgram(Protocol):
    """A CapturedProgram is a program with calls in a graph of the caller's (weft.runtime.cuda.CudaProgram)."""

    replayed: PendingCall
    ask: Callable[[int], None]

    def look(self) -> tuple[tuple[int, ...], bool]: ...


class Stay(NamedTuple):
    """A Stay is how long a program has been in one call without progress.

    at: where it is, as `CapturedProgram.look` returns it.
    since, until: the first and the last look at which it is known to be in the same call, by time.monotonic. None before that.
    """

    at: tuple[int, ...]
    since: float | None = None
    until: float = 0.0


class CapturedPrograms:
    """CapturedPrograms finds out which captured programs of one process group are in the middle of a call.

    A look waits for copies, and the driver may not answer. So it runs on a thread of its own, one look at a time.

    asking: the stream of the copies.
    """

    def __init__(self, driver: Driver, asking: torch.cuda.Stream, rank: int) -> None:
        self._driver, self._asking, self._rank = driver, asking, rank
        self._programs: dict[int, CapturedProgram] = {}
        self._stays: dict[int, Stay] = {}
        self._looking = threading.Thread()
        """The thread of the last look, or one that was never started."""
        self._looked = -_LOOKS_S
        self._lock = threading.Lock()
        """A look holds it, so that no program frees memory that is read."""

    def add(self, program: CapturedProgram) -> None:
        if id(program) not in self._programs:
            self._stays.pop(id(program), None)  # of a program that had the same number, and is gone
        self._programs[id(program)] = program

    def remove(self, program: CapturedProgram) -> bool:
        """Look at a program no more. Return whether no look reads its memory, for which this waits a few seconds."""
        if self._programs.pop(id(program), None) is None:
            return True
        if not self._lock.acquire(timeout=_ASK_S):
            return False
        self._stays.pop(id(program), None)
        self._lock.release()
        return True

    def all(self) -> list[CapturedProgram]:
        return list(self._programs.values())

    def look(self) -> None:
        """Begin a look, unless one is under way, or the last one began a short time ago."""
        if not self.is_looking() and time.monotonic() >= self._looked + _LOOKS_S:
            self._begin()

    def find_late(self, bound_s: float) -> CapturedProgram | None:
        """Return a program that has been in one call without progress for longer than `bound_s`, or None."""
        for key, program in tuple(self._programs.items()):
            stay = self._stays.get(key)
            if stay is not None and stay.since is not None and stay.until - stay.since > bound_s:
                return program
        return None

    def find_under_way(self) -> list[CapturedProgram]:
        """Look, and return the programs that are in the middle of a call. Return all if the driver does not answer."""
        if self.is_looking():
            self._looking.join(_ASK_S)  # it may have looked too early
        if not self.is_looking():
            self._begin()
        if self.is_looking():
            self._looking.join(_ASK_S)
        return self.all() if self.is_looking() else self.list_seen()

    def list_seen(self) -> list[CapturedProgram]:
        """Return the programs that were in the middle of a call at the last look."""
        return [program for key, program in tuple(self._programs.items()) if key in self._stays]

    def is_looking(self) -> bool:
        return self._looking.is_alive()

    def _begin(self) -> None:
        self._looked = time.monotonic()
        self._looking = threading.Thread(target=self._look, name=f"weft-looks-{self._rank}", daemon=True)
        if self._programs:
            self._looking.start()

    def _look(self) -> None:
        try:
            self._driver.relax_captures()
            with self._lock, torch.cuda.stream(self._asking):
                for key, program in tuple(self._programs.items()):
                    if self._programs.get(key) is program:
                        self._look_unless_removed(key, program)
        except Exception as error:  # a device that is lost ends the watchdog by its events
            warn_once(f"replays of CUDA graphs are not bounded any more: {error!r}")
            self._programs.clear()

    def _look_unless_removed(self, key: int, program: CapturedProgram) -> None:
        try:
            self._look_at(key, program)
        except Exception:
            if self._programs.get(key) is program:
                raise  # a program that was removed meanwhile may have dropped what a look reads

    def _look_at(self, key: int, program: CapturedProgram) -> None:
        at, other_call = program.look()
        stay = self._stays.get(key)
        if not any(at):
            self._stays.pop(key, None)
        elif stay is None or other_call or stay.at != at:
            program.ask(self._asking.cuda_stream)
            self._stays[key] = Stay(at)
        else:
            now = time.monotonic()
            self._stays[key] = Stay(at, now if stay.since is None else stay.since, now)


class Watchdog:
    """A Watchdog bounds the calls of one process group on one GPU.

    index: the number of the GPU.
    asking: the stream for copies that read what a call waits for.
    captured_programs: finds the replays that do not go on.
    watching: whether the watchdog has seen no failure yet, or is still acting on one.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        index: int,
        *,
        driver: Driver,
        order: Order,
        releaser: Releaser,
        wire: CudaWire | None,
        asking: torch.cuda.Stream,
    ) -> None:
        self.rank_group, self.releaser, self._order = rank_group, releaser, order
        self.pending = order.add(rank_group)
        """The group's calls that are not known to have ended, the oldest first."""
        self._index, self._driver, self._wire = index, driver, wire
        self._looked = time.monotonic()
        self.captured_programs = CapturedPrograms(driver, asking, rank_group.rank)
        self._captures = self._in_doubt = False
        self._invalid: dict[CapturedProgram, float] = {}
        """The captured programs whose replays a failure has cut short, and when each of them may have been in a call last."""
        self._on_failure = on_failure_from_environment()
        self._stop = threading.Event()
        self.watching = True
        self._thread = threading.Thread(target=self._run, name=f"weft-watch-{rank_group.rank}", daemon=True)
        self._thread.start()

    def captured(self, program: CapturedProgram | None = None) -> None:
        """Note that a graph captures a call, and may replay it later. Raises as raise_if_failed does.

        program: the program, until it is removed from `captured_programs`. None if only NCCL waits in the call, whose replays
            have no bound.
        """
        self._captures = True
        self.raise_if_failed()
        if program is not None:
            self.captured_programs.add(program)

    def raise_if_failed(self) -> None:
        """Raise if this rank or a peer has failed by now, which the watchdog may not have seen yet."""
        if self.rank_group.broken is not None or self.rank_group.has_failed_peer():
            self.rank_group.check_peers()

    def synchronize(self) -> None:
        """Wait until all calls so far have ended on this rank's device. Raises the error of a failure.

        The watchdog bounds each call, and all of them together have the bound of first calls.
        """
        last = tuple(self.pending)
        pending = f"rank {self.rank_group.rank}: calls are under way"
        self.rank_group.wait_until(
            lambda: all(map(self._order.has_ended, last)), lambda: pending, max(self.rank_group.timeout_s, FIRST_S)
        )
        self.raise_if_failed()

    def watch(self, what: str, stream: int, work: Callable[[], T]) -> T:
        """Run work that enqueues NCCL collectives on `stream`, which is torch's current one.

        It is watched with the bound of a first call, because it may compile.
        """
        self.releaser.has_collectives = True
        self.rank_group.check_usable()
        if torch.cuda.is_current_stream_capturing():
            self.captured()
            return work()
        rank = self.rank_group.rank

        def describe() -> str:
            return f"rank {rank}: {what}: perhaps not all ranks have begun it"

        self._order.await_room(self.rank_group, describe)
        with self._order.held(self.rank_group):
            call = self._order.begin(PendingCall.of(what, describe, stream, rehearses=True), self.pending)
        try:
            found = work()
            call.results = tuple(memory_of_results(found))
        finally:
            self._order.end(call)
        self.raise_if_failed()
        return found

    def close(self) -> None:
        """End the thread and the releases that it has begun after a failure. Frees the events of calls for later ones."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self.releaser.close()
        self._order.remove(self.rank_group)

    def _run(self) -> None:
        torch.cuda.set_device(self._index)
        self._driver.relax_captures()
        idle = 0
        while not self._stop.wait(_TICK_S):
            if not self.pending:
                idle += 1
            if (self.pending or idle % _IDLE_TICKS == 0) and not self._look():
                break
        self.watching = False
        self._drain()

    def _drain(self) -> None:
        """Release all waits repeatedly after a failure, until `close`."""
        released = ended = time.monotonic()
        stuck = False
        while not self._stop.wait(POLL_S if self.pending and time.monotonic() < ended + _HASTE_S else _TICK_S):
            with suppress(RuntimeError):  # nothing waits on a device that is lost
                self.releaser.release_all()
                if self._order.drop_ended(self.pending):
                    ended = time.monotonic()
                self._invalidate_replayed()
                if time.monotonic() > max(released, ended) + _RELEASED_S and (self._captures or self.pending):
                    self.releaser.abort_collectives()
            if self.pending and not stuck and time.monotonic() > max(released, ended) + _STUCK_S:
                stuck = True
                LOGGER.error(_STUCK)

    def _look(self) -> bool:
        """Look at calls and peers once. Returns False once the group has failed, and that has been logged."""
        first, doubtful = None, self._find_doubtful_calls()
        try:
            if not doubtful:
                self._order.drop_ended(self.pending)
            first = next((call for call in tuple(self.pending) if self._order.is_running(call)), None)
            ended = partial(self._ended_rightly, first, doubtful)
            self.rank_group.check_peers(ended, may_leave=first is None)
            if first is not None:
                self._hold_to_bound(first)
            self._hold_replays_to_bound()
        except Exception as error:
            # Any error that ends the watchdog ends the group, because nothing else would release the waits.
            self._fail(self._find_cause(error), first, doubtful)
            return False
        return True

    def _find_cause(self, error: Exception) -> WeftError:
        """Return the error to report. A lost device may be the consequence of a lost peer whose memory it had mapped."""
        if self.rank_group.broken is None:
            try:
                self.rank_group.check_peers()
            except WeftError as lost:
                return lost
        return error if isinstance(error, WeftError) else WeftError(f"the watchdog failed: {error!r}")

    def _ended_rightly(self, first: PendingCall | None, doubtful: Sequence[PendingCall]) -> bool:
        """Return whether the running call has ended, so that a peer that is lost now does not affect its result."""
        return first is not None and not doubtful and self._order.has_ended(first)

    def _find_doubtful_calls(self) -> tuple[PendingCall, ...]:
        """Return the calls that may have ended with invalid data of a failed peer.

        A failed peer waits only _NOTIFIED_S for this rank's watchdog, so there are such calls if the watchdog was delayed for
        longer than that.
        """
        looked, self._looked = self._looked, time.monotonic()
        self._in_doubt = self._looked - looked > _NOTIFIED_S and self.rank_group.has_failed_peer()
        return tuple(self.pending) if self._in_doubt else ()

    def _hold_to_bound(self, call: PendingCall) -> None:
        bound_s = max(self.rank_group.timeout_s, FIRST_S) if call.rehearses else self.rank_group.timeout_s
        call.deadline = min(call.deadline, time.monotonic() + bound_s)
        if time.monotonic() > call.deadline and not self._order.has_ended(call):
            raise self.rank_group.fail(WaitTimeout(f"{self._describe(call)} after {bound_s:g} s"))

    def _hold_replays_to_bound(self) -> None:
        """Replays have no begin that weft sees. So their bound counts from the last progress, and is seen at looks."""
        self.captured_programs.look()
        bound_s = self.rank_group.timeout_s
        late = self.captured_programs.find_late(bound_s)
        if late is not None:
            text = self._describe(late.replayed)
            raise self.rank_group.fail(WaitTimeout(f"{text} after {bound_s:g} s, in a replay of a CUDA graph"))

    def _fail(self, error: WeftError, first: PendingCall | None, doubtful: Sequence[PendingCall] = ()) -> None:
        """Log the error, store it for the next call, and invalidate the results of unfinished calls."""
        self.rank_group.fail(error)
        if not isinstance(error, WaitTimeout) and first is not None:
            error = type(error)(f"{error}; meanwhile {self._describe(first)}")
        invalid = [*doubtful, *self._order.list_unfinished(self.rank_group)]
        # Nothing is released yet, so a replay that misses something is still in the middle.
        under_way = self.captured_programs.find_under_way()
        self._invalid = dict.fromkeys(self.captured_programs.all() if self._in_doubt else under_way, math.inf)
        self.rank_group.fail_later(error, unraised=bool(invalid or self._invalid))
        LOGGER.error(str(error))
        self.rank_group.await_notified(_NOTIFIED_S)
        if self._on_failure == "abort":
            end_process()
        with suppress(RuntimeError):  # a device that is lost has no results
            self.releaser.invalidate(invalid)
        if self._wire:
            self._wire.abort()

    def _invalidate_replayed(self) -> None:
        """Write NaN into what replays have returned that were in the middle of a call at a failure, once they have ended.

        A look shows when a lane has passed its last wait. What follows in the lane takes a little longer.
        """
        if not self._invalid:
            return
        self.captured_programs.look()
        now, under_way = time.monotonic(), self.captured_programs.list_seen()
        for program, last in tuple(self._invalid.items()):
            if program in under_way or self.captured_programs.is_looking() or last == math.inf:
                self._invalid[program] = now
            elif now > last + _LAST_WORK_S:
                del self._invalid[program]
                self.releaser.invalidate_results(program.replayed)

    def _describe(self, call: PendingCall) -> str:
        """Return a text that says what a call waits for, or why that cannot be found out."""
        found: list[str] = []

        def ask() -> None:
            try:
                self._driver.relax_captures()
                found.append(call.describe())
            except Exception as error:
                found.append(f"it is unknown what a call waits for: {error!r}")

        asking = threading.Thread(target=ask, name=f"weft-asks-{self.rank_group.rank}", daemon=True)
        asking.start()
        asking.join(_ASK_S)
        if found:
            return found[0]
        # A thread that has filled a stream, or loads a kernel, keeps the driver from answering. What is pending is still known.
        unanswered = f"{call.what} has not ended; the driver does not answer, so it is unknown which of its steps waits"
        return "\n".join(filter(None, (unanswered, self._order.others(self.rank_group, call.what, asks_driver=False))))


INVALID_BYTE = 0xFF
"""What invalid memory is filled with: NaN in float8_e4m3, float16, bfloat16, float32 and float64. Integers have no NaN, so
integer results stay as they are. The driver's memset runs on SMs, so it may wait behind a kernel that spins; but its code is
loaded already, which CUDA would not do while a stream waits."""
POLL_S = 1e-3
"""How often waits are released after a failure, while calls still end."""
_INVALID_S, _DRAINED_S = 0.05, 5.0
"""How long the release waits until the memory in which peers' data arrive is NaN, and how long `close` waits until all results
are."""

Release = Callable[[], None]
Invalidate = Callable[[int], None]


class Releaser:
    """Releases the programs of one process group on one GPU. rescue: the stream on which programs are released. invalidating:
    the stream on which memory is set to NaN. has_collectives: whether a program, or other work that is watched, has collectives
    of NCCL."""

    def __init__(
        self,
        rank_group: RankGroup,
        device: torch.device,
        *,
        driver: Driver,
        order: Order,
        rescue: torch.cuda.Stream,
        invalidating: torch.cuda.Stream,
    ) -> None:
        self._rank_group, self._device, self._driver, self._order = rank_group, device, driver, order
        self._rescue, self._invalidating = rescue, invalidating
        self.has_collectives = False
        self._alive: list[Any] = []
        """Keeps the memory of invalid results alive while it is written."""
        self._abort: Abort | None = None
        self._programs: dict[int, tuple[Release, Invalidate | None]] = {}
        self._lock = threading.Lock()

    def add(self, key: int, release: Release, invalidate: Invalidate | None = None) -> None:
        """After a failure, call `invalidate` with a stream once, and then `release` again and again, also when no call is in
        flight: a graph may be replaying."""
        with self._lock:
            self._programs[key] = release, invalidate

    def remove(self, key: int) -> None:
        with self._lock:
            self._programs.pop(key, None)

    def invalidate(self, calls: Sequence[PendingCall]) -> None:
        """Before anything is released: write NaN where peers' data arrive, and, behind the end of each call, into its results.

        A memset runs on SMs, and there is no room for it while a kernel that spins holds them. So it is on no stream that
        releases anything, and is waited for only so long.
        """
        stream = self._invalidating.cuda_stream
        with self._lock:
            for _, invalidate in self._programs.values():
                if invalidate is not None:
                    invalidate(stream)
        self._await_invalid(_INVALID_S)
        for call in calls:
            self.invalidate_results(call)

    def invalidate_results(self, call: PendingCall) -> None:
        """Write NaN into what a call has returned, behind its end."""
        self._alive += self._order.invalidate(call, self._invalidating.cuda_stream, self._make_nan)

    def release_all(self) -> None:
        """Let everything that waits go on, unless what was enqueued for that last time is still in flight."""
        with self._lock:
            if self._rescue.query():
                for release, _ in self._programs.values():
                    release()

    def abort_collectives(self) -> None:
        """End the collectives of NCCL whose peers do not come."""
        if self.has_collectives:
            self.has_collectives = False
            LOGGER.error("aborts the process group, in whose collective a call waits: destroy it")
            self._abort = Abort(backend_of(self._rank_group.group, self._device).abort, str(self._rank_group.rank))

    def close(self) -> None:
        """Wait, bounded, until a communicator has been aborted and results are NaN."""
        if self._abort:
            self._abort.ended()
        with suppress(RuntimeError):  # a device that is lost writes nothing
            self._await_invalid(_DRAINED_S)
        self._alive.clear()
        self._programs = {}

    def _await_invalid(self, within_s: float) -> None:
        """Wait until what has been made invalid so far is NaN, for so long at most."""
        deadline = time.monotonic() + within_s
        while not self._invalidating.query() and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _make_nan(self, address: int, nbytes: int) -> None:
        self._driver.fill(address, INVALID_BYTE, nbytes, self._invalidating.cuda_stream)
