"""Track the calls in flight on a GPU.

Each call has a number, which is its ticket, a pair of CUDA events, and the results that it has returned.

    caller's stream: begun 7 ... done 7      begun 8 ... done 8

The events say whether the GPU has begun and ended the call. Recording an event costs the GPU nothing. Writing a word into host
memory instead took 3.2 us of every call.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.compat.storages import WeakStorage
from weft.compat.streams import Driver

EVENT_PAIRS = 64
"""The number of pairs of events. Ticket n + EVENT_PAIRS uses the events of ticket n again, so at most EVENT_PAIRS - 1 calls are
in flight. The limit exists because a stream takes about 1000 launches, and one call makes about ten. A further launch waits in
the driver, where no error can reach the caller. Launches on other streams, also those of the watchdog, may wait behind it."""


class Result:
    """Memory that a call has returned, held by a weak reference.

    When the caller drops the tensor, the allocator may give the memory to others, and then it must not be written.
    """

    __slots__ = ("_address", "_nbytes", "_storage")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._address, self._nbytes, self._storage = tensor.data_ptr(), tensor.nbytes, WeakStorage(tensor)

    def invalidate(self, fill: Callable[[int, int], None]) -> Any:
        """Call fill(address, nbytes) if somebody still holds the memory.

        Returns a reference that keeps the memory alive until it has been filled, or None if nobody holds it.
        """
        alive = self._storage.alive()
        if alive is not None and self._nbytes:
            fill(self._address, self._nbytes)
        return alive


def list_results(outputs: Mapping[str, Sequence[torch.Tensor]]) -> list[Result]:
    """Return the floating-point results among the outputs of a program, which are contiguous."""
    return [Result(tensor) for tensors in outputs.values() for tensor in tensors if tensor.is_floating_point()]


def find_results(returned: Any) -> Iterator[Result]:
    """Yield the floating-point results among tensors in nested lists and tuples. Sparse and non-contiguous ones are skipped."""
    if isinstance(returned, torch.Tensor):
        if returned.is_floating_point() and returned.layout == torch.strided and returned.is_contiguous():
            yield Result(returned)
    elif isinstance(returned, list | tuple):
        for item in returned:
            yield from find_results(item)


@dataclass(kw_only=True)
class PendingCall:
    """A call that has not ended."""

    ticket: int
    what: str
    """The name of the call in messages."""
    results: tuple[Result, ...] = ()
    describe: Callable[[], str]
    """Returns a text that says what the call waits for."""
    rehearses: bool
    """True if the call waits for no flag, but may wait for compilers."""
    deadline: float = math.inf
    """The latest end of the call by time.monotonic, in seconds. It is set once the GPU has begun the call."""


class Tickets:
    """The calls of one process group on one GPU, numbered from 1."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._begun, self._done = ([driver.event() for _ in range(EVENT_PAIRS)] for _ in range(2))
        """The events at the begin and at the end of each call, by ticket modulo EVENT_PAIRS."""
        self.newest = 0
        """The ticket that was taken last."""
        self.last_enqueued = 0
        """The ticket of the last call that has been enqueued completely."""
        self._last_seen_ended = 0
        """The ticket of the last call that `drop_ended` has removed."""
        self.pending: deque[PendingCall] = deque()
        """The calls that are not known to have ended, oldest first."""

    def take(self) -> int:
        """Return the ticket of a new call. Its events may be used once `is_free` returns True."""
        self.newest += 1
        return self.newest

    def is_free(self, ticket: int) -> bool:
        """Return whether a call with this ticket may begin, because the call EVENT_PAIRS - 1 before it has ended.

        Usually the watchdog has already seen that end, which saves a call of the driver.
        """
        must_have_ended = ticket - EVENT_PAIRS + 1
        return must_have_ended <= self._last_seen_ended or self.has_ended(must_have_ended)

    def record_begin(self, stream: int, call: PendingCall) -> None:
        """Add a call to `pending`. The GPU begins it when `stream` reaches this point."""
        self._driver.record(self._begun[call.ticket % EVENT_PAIRS], stream)
        self.pending.append(call)

    def record_end(self, stream: int, ticket: int) -> None:
        """Record that a call has been enqueued completely. The GPU has ended it when `stream` reaches this point."""
        self._driver.record(self._done[ticket % EVENT_PAIRS], stream)
        self.last_enqueued = ticket

    def is_running(self, ticket: int) -> bool:
        """Return whether the GPU has begun a call and has not ended it."""
        return self._driver.reached(self._begun[ticket % EVENT_PAIRS]) and not self.has_ended(ticket)

    def has_ended(self, ticket: int) -> bool:
        """Return whether the GPU has ended a call. A call that is still being enqueued has not ended."""
        if ticket <= self.last_enqueued - EVENT_PAIRS:
            return True
        return ticket <= 0 or (ticket <= self.last_enqueued and self._driver.reached(self._done[ticket % EVENT_PAIRS]))

    def make_stream_wait(self, stream: int, ticket: int) -> None:
        """Make `stream` wait until a call has ended.

        If a later call already uses the call's events, the call has ended, and nothing is enqueued.
        """
        if ticket > self.last_enqueued - EVENT_PAIRS:
            self._driver.wait(stream, self._done[ticket % EVENT_PAIRS])

    def drop_ended(self) -> bool:
        """Remove the calls that have ended from `pending`. Return whether there was one."""
        before = self._last_seen_ended
        while self.pending and self.has_ended(self.pending[0].ticket):
            self._last_seen_ended = self.pending.popleft().ticket
        return self._last_seen_ended > before

    def list_unfinished(self) -> list[PendingCall]:
        """Return the calls that have not ended. If the device is lost, return all that are not known to have ended."""
        calls = tuple(self.pending)
        try:
            return [call for call in calls if not self.has_ended(call.ticket)]
        except RuntimeError:
            return list(calls)

    def close(self) -> None:
        """Destroy the events."""
        for event in (*self._begun, *self._done):
            self._driver.forget(event)
