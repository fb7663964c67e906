"""What the schedules of one team share on a GPU: symmetric memory, streams, and the watch that bounds every call.

The watch is a thread that looks at events: first and last, a call records one on the caller's stream. The bound counts from
the first of them, not from when the call was enqueued behind other work. Recording costs the GPU nothing, where writing a
word into host memory took 3.2 us of every call. The thread looks in the relaxed capture mode, in which it does not disturb a
graph capture of another thread.

    caller: begun 7 ... done 7      begun 8 ...
    watch:  done 7 in time? -> next;   a peer dead, or the bound over -> log which wait is stuck, release the blocked streams
            once all ranks know, write NaN into what the unfinished calls return

The watch raises nothing in threads of others. The next call of the group raises the error, or `weft.synchronize`.

A released stream goes on without what it waited for, so what it computes and sends is invalid. Thus a rank releases its own
only when no peer can take that for results any more: when the peers' watches know of the failure (Team.told), or after a
second. A rank that was stopped, or slow, for longer finds at the end of the call that it enqueues then that a peer has failed
(`raise_if_failed`).

Invalid is every call that has not ended when the failure is seen, whether the device has come to it or not. Its results become
NaN twice over. Before the release the memory in which peers' data arrive is set to NaN, so that whatever the released streams
compute from it is NaN, too, in the order of the streams. Once the call has ended, its results themselves are set to NaN
(weft.runtime.invalid), on a stream that waits for the call's end.

A CUDA graph of the caller's that replays calls is none that the space could see: of its replays only the memory in which peers'
data arrive is NaN. After a failure each replay would wait again: so the watch goes on releasing until the space is closed.

A collective of NCCL's waits for its peers by itself, and no word that the space could raise ends it: its communicator has to be
aborted, which is the caller's. That is done where a schedule here has such a collective and, a while after all else was
released, the calls under way have not ended, or a captured one may be replayed. The group then serves nobody any more.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from weft.comm.pool import Pool
from weft.comm.team import Team
from weft.compat.comm_streams import comm_stream, current_lane_priority, give_back, priority_number
from weft.compat.device import capabilities
from weft.compat.streams import Driver, Word
from weft.core.errors import WaitTimeout, WeftError
from weft.core.logs import LOGGER
from weft.perf.shapes import shapes_for
from weft.runtime.invalid import INVALID_BYTE, Result, end_process, on_failure_from_environment, results_of
from weft.runtime.network import CudaWire
from weft.runtime.replay import give_captures, private_pool, take_captures
from weft.runtime.turn import Turn
from weft.runtime.vendor import Abort, backend_of

if TYPE_CHECKING:
    from weft.kernels.launch import Launcher

T = TypeVar("T")
_LARGE = 2 << 20
"""From 1 MiB on the allocator rounds up to that at most."""
_TICK_S = 0.02
_TICKETS = 64
"""So many calls may be under way at once; a ticket's events are used again that many calls later. A stream takes some 1000
launches. Then the launch waits within the driver, where nobody can be told of anything, and launches on other streams may wait
behind it: those of the watch, too. A call and what comes between two of them are some ten launches."""
_ASKS_S = 2.0
"""How long the watch asks what a call waits for, for the same reason."""
_ASIDE_PRIORITY, _INVALID_PRIORITY = -3, -4
"""Of the signals' stream, and of the one that invalidates results: lanes have -1, calls beside the caller's -2
(weft.runtime.groups), the rescue the highest."""
_QUEUES = 8
"""Hardware queues that CUDA has for streams, unless told otherwise."""
_LOOKS_PER_S = 20_000_000
"""More than a block can look at a flag in a second: a kernel gives up after the watch does."""
_LONGEST_S = 1000.0
"""In which no block looks at a flag 2^31 times, as often as it can count: it looks some 1.5 million times a second."""
_FIRST_S = 600.0
"""Bound of what ranks do before a first call, where it is more than a call's: one may compile what others find compiled."""
_DRAIN_S, _HASTE_S = 1e-3, 5.0
"""How often waits are released after a failure while calls end, and for how long when none does: a lane goes on to its next
wait each time. Else, as for graphs that are replayed, once a tick."""
_TOLD_S = 1.0
"""So long a peer may take to tell its calls of a failure: its watch looks every half second, at least."""
_RELEASED_S = 1.0
"""A call that has not ended so long after all its flags were raised waits for a collective."""
_INVALID_S, _DRAINED_S = 0.05, 5.0
"""How long the release waits until NaN is where peers' data arrive, and `close` until it is in all results."""
_IDLE_TICKS = 25
"""A team without calls under way looks after its peers this much more rarely (graphs may be replaying)."""


@dataclass(kw_only=True)
class Pending:
    """A call under way. results: what it returns. stuck: what it waits for, in words. rehearses: it waits for no flag, but
    perhaps for compilers. deadline: set once it has begun."""

    ticket: int
    results: tuple[Result, ...] = ()
    stuck: Callable[[], str]
    rehearses: bool
    deadline: float = math.inf


class CudaSpace:
    """Symmetric memory, scratch, streams and the watch of one team on one GPU. turn: that GPU's, of all teams; default: its
    own. Raises
    ValueError for a bound of calls above _LONGEST_S."""

    def __init__(self, team: Team, device: torch.device, turn: Turn | None = None) -> None:
        self.turn = turn or Turn()
        if team.timeout_s > _LONGEST_S:
            raise ValueError(
                f"WEFT_TIMEOUT_S is {team.timeout_s:g}; on GPUs it can be {_LONGEST_S:g} at most: kernels would give up before"
            )
        self.team, self.device = team, device
        _warn_of_few_queues()
        self.driver = Driver()
        self.pool = Pool(team.near_meetings, device, self.settle, team.near)
        self.wire = CudaWire(team, device) if team.nodes else None
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self.capabilities = capabilities(device)
        self.sms = self.capabilities.sms
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._aside: torch.cuda.Stream | None = None
        self._ready: dict[int, int] = {}
        """By stream, the bytes that its largest call has found in the pool of temporaries."""
        self._priority = current_lane_priority()
        # Of another priority than the lanes', so that no hardware queue is shared with a lane, or a graph's branch, that waits.
        self.rescue = comm_stream(priority="high", device=device)
        self.asking = comm_stream(priority="high", device=device)
        """For reading what a call waits for. That is a copy, which may not end while another thread loads a kernel; the release
        must not wait behind it."""
        self._invalidating = comm_stream(priority=max(_INVALID_PRIORITY, priority_number("high")), device=device)
        self._begun, self._done = ([self.driver.event() for _ in range(_TICKETS)] for _ in range(2))
        self._ended = 0
        self.tries = min(int(team.timeout_s * _LOOKS_PER_S), 2**31 - 1)
        self._words_launcher: Launcher | None = None
        self._tickets = self._seen_done = 0
        self.captures = take_captures(device)
        self._replayed: tuple[int | None, int] = (None, 0)
        """Stream and ticket of the last replay that multiplies by cuBLAS: all use one workspace, that of `captures`."""
        self._looked = time.monotonic()
        self._pending: deque[Pending] = deque()
        self._captures = False
        self._on_failure = on_failure_from_environment()
        self._invalid: list[Any] = []
        """What keeps the memory of invalid results alive while it is written."""
        self.has_collectives = False
        """Whether a schedule here has the vendor's collectives."""
        self._abort: Abort | None = None
        self._releases: dict[int, tuple[Callable[[], None], Callable[[int], None] | None]] = {}
        self._releasing = threading.Lock()
        self._stop = threading.Event()
        self.watching = True
        """Whether the watch has seen no failure, or has yet to end what it does then."""
        self._watch = threading.Thread(target=self._watch_calls, name=f"weft-watch-{team.rank}", daemon=True)
        self._watch.start()

    def runs_kernels(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.bfloat16, torch.float16) and bool(shapes_for(self.capabilities))

    def fuses(self, dtype: torch.dtype) -> bool:
        return self.capabilities.matrix_16bit

    @property
    def blocks(self) -> int:
        return self.sms

    def runs_lookups(self, dtype: torch.dtype) -> bool:
        return True

    def settle(self) -> None:
        """Wait until every rank's GPU has ended all its work. Collective. Bounded, and peers are watched: no collective of the
        process group would be."""
        torch.cuda.synchronize(self.device)
        self.team.enter("call: settle", within_s=max(self.team.timeout_s, _FIRST_S))

    def stream(self, name: str) -> torch.cuda.Stream:
        """A lane's stream. Its priority differs from the caller's, so that the two share no hardware queue (lane_priority)."""
        if name not in self._streams:
            self._streams[name] = comm_stream(priority=self._priority, device=self.device)
        return self._streams[name]

    @property
    def aside(self) -> torch.cuda.Stream:
        """Where the compute lane's signals go: of a priority that no other stream of weft's has, since a lane may wait for them
        that shared its hardware queue."""
        if self._aside is None:
            self._aside = comm_stream(priority=max(_ASIDE_PRIORITY, priority_number("high")), device=self.device)
        return self._aside

    def temporaries(self, nbytes: int) -> AbstractContextManager[None]:
        """What torch allocates meanwhile, on this thread, comes from a pool of this space's, where as many bytes lie ready for
        the current stream. Else, on a GPU that is full, the allocator would give back what it keeps for later; the driver waits
        for all streams then, and lanes of a call that is half enqueued wait for the other half: for good."""
        if not nbytes or self._private is None:
            return nullcontext()
        stream = self.current_stream()
        if self._ready.get(stream, 0) < nbytes:
            with torch.cuda.use_mem_pool(self._private, self.device):
                # Large pieces are split, small ones come from another list of the allocator's.
                for size in (nbytes + _LARGE, 1):
                    torch.empty(size, dtype=torch.uint8, device=self.device)
            self._ready[stream] = nbytes
        return torch.cuda.use_mem_pool(self._private, self.device)

    @cached_property
    def _private(self) -> torch.cuda.MemPool | None:
        return private_pool()

    def allocated(self) -> int:
        """What torch's allocator has given so far, in bytes: what came back, too."""
        return int(torch.cuda.memory_stats(self.device)["allocated_bytes.all.allocated"])

    def current_stream(self) -> int:
        """The caller's stream."""
        return int(torch._C._cuda_getCurrentRawStream(self._index))

    def named(self, stream: int) -> torch.cuda.Stream:
        """torch's name for a stream. ExternalStream would take 0, the default stream, for "any new one"."""
        if stream == self.current_stream():
            return torch.cuda.current_stream(self.device)
        return torch.cuda.ExternalStream(stream, device=self.device)  # type: ignore[no-untyped-call, no-any-return, unused-ignore]

    def keep_releasable(self, key: int, release: Callable[[], None], invalidate: Callable[[int], None] | None = None) -> None:
        """If the team fails, call `invalidate` with a stream once and then `release` again and again, also when no call is
        under way: a graph may be replaying."""
        with self._releasing:
            self._releases[key] = release, invalidate

    def forget(self, key: int) -> None:
        with self._releasing:
            self._releases.pop(key, None)

    def words(self, words: Sequence[Word], *, by_kernel: bool) -> Callable[[int], None]:
        """A function that enqueues memory operations on a stream."""
        if not by_kernel:
            return self.driver.words(words)
        from weft.kernels.words import do_words, launcher, words_table
        from weft.runtime.tape import phases

        if self._words_launcher is None:
            self._words_launcher = launcher()
        table = words_table(phases(words), self.device)
        # Loaded now: loading waits for all streams, and later one may wait for a flag.
        do_words(table, tries=0, launched_by=self._words_launcher)
        tries, launched_by = self.tries, self._words_launcher
        return lambda stream: do_words(table, tries=tries, launched_by=launched_by, stream=stream)

    def begin(self, stream: int, stuck: Callable[[], str], *, rehearses: bool, results: Iterable[Result] = ()) -> int:
        """A new call's ticket. It is under watch from when `stream` comes here, also while it is still being enqueued; for one
        that rehearses the bound is that of first calls. results: what it returns.

        Waits, bounded, where so many calls are under way that its events still belong to one of them.
        """
        self._tickets += 1
        ticket = self._tickets
        if not self._reusable(ticket):
            # The watch bounds each call. Together, with what else the stream has, they may take longer.
            self.team.until(lambda: self.done(ticket - _TICKETS + 1), stuck, max(self.team.timeout_s, _FIRST_S))
        self.driver.record(self._begun[ticket % _TICKETS], stream)
        self._pending.append(Pending(ticket=ticket, results=tuple(results), stuck=stuck, rehearses=rehearses))
        return ticket

    def _reusable(self, ticket: int) -> bool:
        """Whether a ticket's events are free. Mostly the watch has seen that, and the driver need not be asked."""
        last_user = ticket - _TICKETS + 1
        return last_user <= self._seen_done or self.done(last_user)

    def captured(self) -> None:
        """A graph captures a call, and may replay it later. Raises as raise_if_failed."""
        self._captures = True
        self.raise_if_failed()

    def end(self, stream: int, ticket: int) -> None:
        """The call is done when `stream` comes here."""
        self.driver.record(self._done[ticket % _TICKETS], stream)
        self._ended = ticket

    def raise_if_failed(self) -> None:
        """Raise if this rank or a peer has failed by now: for what the watch cannot have seen when it did."""
        if self.team.broken is not None or self.team.peer_failed():
            self.team.check_peers()

    def synchronize(self) -> None:
        """Wait until all calls so far have ended on this rank's device. Bounded: the watch bounds each, and all of them
        together have the bound of first calls. Raises what has failed."""
        last = self._tickets
        stuck = f"rank {self.team.rank}: calls are under way"
        self.team.until(lambda: self.done(last), lambda: stuck, max(self.team.timeout_s, _FIRST_S))
        self.raise_if_failed()

    def watched(self, what: str, work: Callable[[], T]) -> T:
        """Run what enqueues the vendor's collectives on torch's current stream, watched as a first call is: it may compile."""
        self.has_collectives = True
        self.team.check_usable()
        if torch.cuda.is_current_stream_capturing():
            self.captured()
            return work()
        stream, rank = self.current_stream(), self.team.rank
        ticket = self.begin(stream, lambda: f"rank {rank}: {what}: perhaps not all ranks have begun it", rehearses=True)
        call = self._pending[-1]
        try:
            done = work()
            call.results = tuple(results_of(done))
        finally:
            self.end(stream, ticket)
        self.raise_if_failed()
        return done

    def after(self, stream: int, ticket: int) -> None:
        """`stream` goes on once a call is done."""
        if ticket > self._ended - _TICKETS:
            self.driver.wait(stream, self._done[ticket % _TICKETS])

    def after_replays(self, stream: int) -> None:
        """`stream` goes on once no replay of this space uses cuBLAS's workspace on another one. Other groups have their own,
        since they could not be waited for: ranks may call two groups in orders of their own."""
        last, ticket = self._replayed
        if last not in (None, stream):
            self.after(stream, ticket)

    def replayed(self, stream: int) -> None:
        """The last call has replayed a graph that uses cuBLAS's workspace."""
        self._replayed = stream, self._tickets

    def _under_way(self, ticket: int) -> bool:
        return self.driver.reached(self._begun[ticket % _TICKETS]) and not self.done(ticket)

    def done(self, ticket: int) -> bool:
        """Whether a call is done; one that is still being enqueued is not."""
        if ticket <= self._ended - _TICKETS:
            return True
        return ticket <= 0 or (ticket <= self._ended and self.driver.reached(self._done[ticket % _TICKETS]))

    def _watch_calls(self) -> None:
        torch.cuda.set_device(self._index)
        self.driver.relax_captures()
        idle = 0
        while not self._stop.wait(_TICK_S):
            if len(self._pending) == 0:
                idle += 1
            if (self._pending or idle % _IDLE_TICKS == 0) and not self._look():
                break
        self.watching = False
        released = ended = time.monotonic()
        while not self._stop.wait(_DRAIN_S if self._pending and time.monotonic() < ended + _HASTE_S else _TICK_S):
            with suppress(RuntimeError):  # a device that is lost has nothing that waits
                self._release_all()
                if self._pass_done():
                    ended = time.monotonic()
                if time.monotonic() > max(released, ended) + _RELEASED_S:
                    self._abort_collectives()

    def _abort_collectives(self) -> None:
        """End the vendor's collectives whose peers do not come."""
        if self.has_collectives and (self._captures or self._pending):
            self.has_collectives = False
            LOGGER.error("aborts the process group, in whose collective a call waits: destroy it")
            self._abort = Abort(backend_of(self.team.group, self.device).abort, str(self.team.rank))

    def _pass_done(self) -> bool:
        """Look at no call again that has ended; whether there was one."""
        before = self._seen_done
        while self._pending and self.done(self._pending[0].ticket):
            self._seen_done = self._pending.popleft().ticket
        return self._seen_done > before

    def _look(self) -> bool:
        """False once the team has failed, and that has been logged."""
        first, doubtful = None, self._doubtful()
        try:
            if not doubtful:
                self._pass_done()
            first = next((call for call in tuple(self._pending) if self._under_way(call.ticket)), None)
            ended = partial(self._ended_rightly, first, doubtful)
            self.team.check_peers(ended, may_leave=first is None)
            if first is not None:
                self._hold_to_bound(first)
        except Exception as error:
            # Whatever ends the watch ends the team: nobody else would let go of what waits.
            self._fail(self._reason(error), first, doubtful)
            return False
        return True

    def _reason(self, error: Exception) -> WeftError:
        """For what the watch has ended: a device that is lost may be so with a peer, whose memory it had mapped."""
        if self.team.broken is None:
            try:
                self.team.check_peers()
            except WeftError as lost:
                return lost
        return error if isinstance(error, WeftError) else WeftError(f"the watch failed: {error!r}")

    def _ended_rightly(self, first: Pending | None, doubtful: Sequence[Pending]) -> bool:
        """Whether a lost peer is no matter: what it had to do for the call under way is done."""
        return first is not None and not doubtful and self.done(first.ticket)

    def _doubtful(self) -> tuple[Pending, ...]:
        """Calls that may have ended by what a peer sent which had failed: it waits for this rank only so long, and this rank's
        watch has been held up for longer."""
        looked, self._looked = self._looked, time.monotonic()
        return tuple(self._pending) if self._looked - looked > _TOLD_S and self.team.peer_failed() else ()

    def _hold_to_bound(self, call: Pending) -> None:
        bound_s = max(self.team.timeout_s, _FIRST_S) if call.rehearses else self.team.timeout_s
        call.deadline = min(call.deadline, time.monotonic() + bound_s)
        if time.monotonic() > call.deadline and not self.done(call.ticket):
            raise self.team.fail(WaitTimeout(f"{self._stuck(call)} after {bound_s:g} s"))

    def _fail(self, error: WeftError, first: Pending | None, doubtful: Sequence[Pending] = ()) -> None:
        """Log the error, keep it for the next call, and make what unfinished calls return invalid once it is written."""
        self.team.fail(error)
        if not isinstance(error, WaitTimeout) and first is not None:
            error = type(error)(f"{error}; meanwhile {self._stuck(first)}")
        invalid = [*doubtful, *self._under_way_or_queued()]
        self.team.fail_later(error, unraised=bool(invalid))
        LOGGER.error(str(error))
        self.team.told(_TOLD_S)
        if self._on_failure == "abort":
            end_process()
        with suppress(RuntimeError):  # a device that is lost has no results
            self._invalidate(invalid)
        if self.wire:
            self.wire.abort()

    def _invalidate(self, calls: Sequence[Pending]) -> None:
        """Before anything is released: NaN where peers' data arrive, and, behind the end of each call, in its results.

        A memset is a kernel, for which there is no room while one that spins holds the SMs. So it is on no stream that releases
        anything, and is waited for only so long.
        """
        stream = self._invalidating.cuda_stream
        with self._releasing:
            for _, invalidate in self._releases.values():
                if invalidate is not None:
                    invalidate(stream)
        self._await_invalid(_INVALID_S)
        for call in calls:
            # A call that is still being enqueued raises in the thread that enqueues it, and returns nothing.
            if call.results and call.ticket <= self._ended:
                self.driver.wait(stream, self._done[call.ticket % _TICKETS])
                self._invalid += [result.invalidate(self._make_nan) for result in call.results]

    def _await_invalid(self, within_s: float) -> None:
        """Wait until what has been made invalid so far is NaN, for so long at most."""
        deadline = time.monotonic() + within_s
        while not self._invalidating.query() and time.monotonic() < deadline:
            time.sleep(_DRAIN_S)

    def _make_nan(self, address: int, nbytes: int) -> None:
        self.driver.fill(address, INVALID_BYTE, nbytes, self._invalidating.cuda_stream)

    def _stuck(self, call: Pending) -> str:
        """What a call waits for, in words, as far as that can be told: its program may be closed by now, its device lost."""
        said: list[str] = []

        def ask() -> None:
            try:
                self.driver.relax_captures()
                said.append(call.stuck())
            except Exception as error:
                said.append(f"what a call waits for cannot be told: {error!r}")

        asking = threading.Thread(target=ask, name=f"weft-asks-{self.team.rank}", daemon=True)
        asking.start()
        asking.join(_ASKS_S)
        return said[0] if said else "what a call waits for cannot be told: the driver does not answer"

    def _under_way_or_queued(self) -> list[Pending]:
        """The calls that have not ended; if the device is lost, those that are not known to have."""
        calls = tuple(self._pending)
        try:
            return [call for call in calls if not self.done(call.ticket)]
        except RuntimeError:
            return list(calls)

    def _release_all(self) -> None:
        """Let all that waits go on, unless what was enqueued for that last time is still under way."""
        with self._releasing:
            if self.rescue.query():
                for release, _ in self._releases.values():
                    release()

    def close(self) -> None:
        self._stop.set()
        if self._watch is not threading.current_thread():
            self._watch.join()
        if self._abort:
            self._abort.ended()
        for event in (*self._begun, *self._done):
            self.driver.forget(event)
        lanes = (*self._streams.values(), *([self._aside] if self._aside else ()))
        for stream in (self.rescue, self.asking, self._invalidating, *lanes):
            give_back(stream)
        with suppress(RuntimeError):  # a device that is lost writes nothing
            self._await_invalid(_DRAINED_S)
        self._invalid.clear()
        give_captures(self.captures)
        self._streams, self._releases = {}, {}
        # Freed here: where its last user went, as in a garbage collection while a stream is captured, CUDA may refuse to.
        self.__dict__.pop("_private", None)
        self.pool.close()
        if self.wire:
            self.wire.close()
        self.wire = None


def _warn_of_few_queues() -> None:
    """Lanes wait for each other. Where all streams share a queue of the GPU, one that waits may hold up what it waits for."""
    given = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if given.isdecimal() and int(given) < _QUEUES:
        LOGGER.warning(
            "CUDA_DEVICE_MAX_CONNECTIONS is %s: streams that wait for each other may share a hardware queue, and calls may end "
            "in WaitTimeout; leave it out (%d is CUDA's default), or use schedule='sequential'",
            given,
            _QUEUES,
        )
