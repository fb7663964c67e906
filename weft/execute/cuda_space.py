"""What the schedules of one team share on a GPU: symmetric memory, streams, and the watch that bounds every call.

The watch is a thread that reads plain memory: first and last, a call writes its ticket into pinned host words from the
caller's stream. The bound counts from the first of them, not from when the call was enqueued behind other work. The thread
calls CUDA only once something is wrong, so that it never disturbs a graph capture.

    caller: begun 7 ... done 7      begun 8 ...
    watch:  done 7 in time? -> next;   a peer dead, or the bound over -> say which wait is stuck, raise in the caller's
            thread, release the blocked streams
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from weft.errors import WaitTimeout, WeftError
from weft.execute.driver import Driver, Word
from weft.team import Team

if TYPE_CHECKING:
    from weft.kernels.launch import Launcher

_TICK_S = 0.02
_TICKETS = 1024
"""Words for calls under way at once; a ticket's word is used again that many calls later."""
_LOOKS_PER_S = 20_000_000
"""More than a block can look at a flag in a second: a kernel gives up after the watch does."""
_IDLE_TICKS = 25
"""A team without calls under way looks after its peers this much more rarely (graphs may be replaying)."""


@dataclass(kw_only=True)
class Pending:
    """A call under way. thread: who made it. stuck: what it waits for, in words. deadline: set once it has begun."""

    ticket: int
    thread: int
    stuck: Callable[[], str]
    deadline: float = math.inf


class CudaSpace:
    """Symmetric memory, scratch, streams and the watch of one team on one GPU."""

    def __init__(self, team: Team, device: torch.device) -> None:
        self.team, self.device = team, device
        self.driver = Driver()
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._host_words = torch.zeros(2, _TICKETS, dtype=torch.int32).pin_memory()
        self._begun, self._done = self._host_words.numpy()
        self._host_address = self._host_words.data_ptr()
        self.tries = min(int(team.timeout_s * _LOOKS_PER_S), 2**31 - 1)
        self._words_launcher: Launcher | None = None
        self._tickets = 0
        self._pending: deque[Pending] = deque()
        self._releases: dict[int, Callable[[], None]] = {}
        self._stop = threading.Event()
        self._watch = threading.Thread(target=self._watch_calls, name=f"weft-watch-{team.rank}", daemon=True)
        self._watch.start()

    def runs_kernels(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.bfloat16, torch.float16)

    def runs_lookups(self, dtype: torch.dtype) -> bool:
        return True

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, Any]:
        """Zeroed symmetric memory and its handle. Collective."""
        area = symmetric_memory.empty(max(1024, nbytes), dtype=torch.uint8, device=self.device)
        handle = symmetric_memory.rendezvous(area, self.team.group)
        area.zero_()
        self.settle()
        return area, handle

    def settle(self) -> None:
        """Wait until every rank's GPU has ended all its work. Collective."""
        torch.cuda.synchronize(self.device)
        dist.barrier(self.team.group)

    def stream(self, name: str) -> torch.cuda.Stream:
        """A lane's stream. Its priority differs from the caller's, so that the two share no hardware queue."""
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        return self._streams[name]

    def current_stream(self) -> int:
        """The caller's stream."""
        return int(torch._C._cuda_getCurrentRawStream(self._index))

    def named(self, stream: int) -> torch.cuda.Stream:
        """torch's name for a stream. ExternalStream would take 0, the default stream, for "any new one"."""
        if stream == self.current_stream():
            return torch.cuda.current_stream(self.device)
        return torch.cuda.ExternalStream(stream, device=self.device)  # type: ignore[no-untyped-call, no-any-return, unused-ignore]

    def keep_releasable(self, key: int, release: Callable[[], None]) -> None:
        """Call `release` if the team fails, also when no call is under way: a graph may be replaying."""
        self._releases[key] = release

    def forget(self, key: int) -> None:
        self._releases.pop(key, None)

    def words(self, words: Sequence[Word], *, by_kernel: bool) -> Callable[[int], None]:
        """A function that enqueues memory operations on a stream."""
        if not by_kernel:
            return self.driver.words(words)
        from weft.execute.tape import phases
        from weft.kernels.words import do_words, launcher, words_table

        if self._words_launcher is None:
            self._words_launcher = launcher()
        table = words_table(phases(words), self.device)
        # Loaded now: loading waits for all streams, and later one may wait for a flag.
        do_words(table, tries=0, launched_by=self._words_launcher)
        tries, launched_by = self.tries, self._words_launcher
        return lambda stream: do_words(table, tries=tries, launched_by=launched_by, stream=stream)

    def begin(self, stream: int, stuck: Callable[[], str]) -> int:
        """A new call's ticket. It is under watch from when `stream` comes here, also while it is still being enqueued.

        Waits, bounded, where so many calls are under way that its words still belong to one of them.
        """
        self._tickets += 1
        ticket = self._tickets
        if not self.done(ticket - _TICKETS + 1):
            self.team.until(lambda: self.done(ticket - _TICKETS + 1), stuck)
        self.driver.write(stream, self._stamp(0, ticket), ticket)
        self._pending.append(Pending(ticket=ticket, thread=threading.get_ident(), stuck=stuck))
        return ticket

    def end(self, stream: int, ticket: int) -> None:
        """The call is done when `stream` comes here."""
        self.driver.write(stream, self._stamp(1, ticket), ticket)

    def _stamp(self, row: int, ticket: int) -> int:
        return int(self._host_address + 4 * (row * _TICKETS + ticket % _TICKETS))

    def _under_way(self, ticket: int) -> bool:
        return int(self._begun[ticket % _TICKETS]) >= ticket and not self.done(ticket)

    def done(self, ticket: int) -> bool:
        return ticket <= 0 or int(self._done[ticket % _TICKETS]) >= ticket

    def _watch_calls(self) -> None:
        idle = 0
        while not self._stop.wait(_TICK_S):
            while self._pending and self.done(self._pending[0].ticket):
                self._pending.popleft()
            idle = 0 if self._pending else idle + 1
            if idle % _IDLE_TICKS == 0 and not self._look():
                return

    def _look(self) -> bool:
        """False once the team has failed: then everything has been released and said."""
        first = next((call for call in tuple(self._pending) if self._under_way(call.ticket)), None)
        try:
            self.team.check_peers(lambda: first is not None and self.done(first.ticket), may_leave=first is None)
            if first is not None:
                first.deadline = min(first.deadline, time.monotonic() + self.team.timeout_s)
                if time.monotonic() > first.deadline and not self.done(first.ticket):
                    raise self.team.fail(WaitTimeout(f"{first.stuck()} after {self.team.timeout_s:g} s"))
        except WeftError as error:
            self._fail(error, first)
            return False
        return True

    def _fail(self, error: WeftError, first: Pending | None) -> None:
        """Raise in the thread that made the call, then let the streams drain: it wakes into the error, not into the result."""
        if not isinstance(error, WaitTimeout) and first is not None:
            error = type(error)(f"{error}; meanwhile {first.stuck()}")
        print(f"weft: {error}", file=sys.stderr, flush=True)
        if first is not None:
            raised = type(type(error).__name__, (type(error),), {"__str__": lambda _: str(error), "__module__": "weft.errors"})
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(first.thread), ctypes.py_object(raised))
        for release in list(self._releases.values()):
            release()

    def close(self) -> None:
        self._stop.set()
        if self._watch is not threading.current_thread():
            self._watch.join()
        self._streams, self._releases = {}, {}
