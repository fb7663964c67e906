"""Calls in flight on a GPU: each has a number, its ticket, a pair of CUDA events, and the results that it has returned.

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
"""Pairs of events. The events of a ticket are used again by the ticket that is so much higher, and at most one call less is in
flight. A stream takes about 1000 launches. The next launch then waits within the driver, where no error can reach the caller,
and launches on other streams, those of the watchdog included, may wait behind it. One call takes about ten launches."""


class Result:
    """Memory that a call has returned. It is not kept alive: the allocator may give it to others as soon as the caller drops
    it, and then it must not be written."""

    __slots__ = ("_address", "_nbytes", "_storage")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._address, self._nbytes, self._storage = tensor.data_ptr(), tensor.nbytes, WeakStorage(tensor)

    def invalidate(self, fill: Callable[[int, int], None]) -> Any:
        """Call fill(address, nbytes) if somebody still holds the memory. Returns what keeps it alive meanwhile, or None."""
        alive = self._storage.alive()
        if alive is not None and self._nbytes:
            fill(self._address, self._nbytes)
        return alive


def results_in(outputs: Mapping[str, Sequence[torch.Tensor]]) -> list[Result]:
    """The floating-point results of a program: contiguous, by name."""
    return [Result(one) for some in outputs.values() for one in some if one.is_floating_point()]


def results_of(found: Any) -> Iterator[Result]:
    """Yield the floating-point results among tensors in nested lists and tuples. Sparse and non-contiguous ones are skipped."""
    if isinstance(found, torch.Tensor):
        if found.is_floating_point() and found.layout == torch.strided and found.is_contiguous():
            yield Result(found)
    elif isinstance(found, list | tuple):
        for one in found:
            yield from results_of(one)


@dataclass(kw_only=True)
class PendingCall:
    """A call that has not ended. what: names it. results: the tensors that it returns. describe: says in words what it waits
    for. rehearses: it waits for no flag, but it may wait for compilers. deadline: in seconds of time.monotonic, set once the
    GPU has begun it."""

    ticket: int
    what: str
    results: tuple[Result, ...] = ()
    describe: Callable[[], str]
    rehearses: bool
    deadline: float = math.inf


class Tickets:
    """The calls of one process group on one GPU, numbered from 1. newest: the last number that was taken. last_enqueued: the
    last number whose call has been enqueued whole. pending: the calls that are not known to have ended, oldest first."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._begun, self._done = ([driver.event() for _ in range(EVENT_PAIRS)] for _ in range(2))
        self.newest = self.last_enqueued = self._seen_done = 0
        self.pending: deque[PendingCall] = deque()

    def take(self) -> int:
        """The number of a new call. Its events may be used once `is_free`."""
        self.newest += 1
        return self.newest

    def is_free(self, ticket: int) -> bool:
        """Whether a call with this ticket may begin: the one EVENT_PAIRS - 1 before it has ended. Usually the watchdog has seen
        that already, and the driver need not be asked."""
        must_have_ended = ticket - EVENT_PAIRS + 1
        return must_have_ended <= self._seen_done or self.done(must_have_ended)

    def begin(self, stream: int, call: PendingCall) -> None:
        """The GPU begins the call when `stream` reaches this point."""
        self._driver.record(self._begun[call.ticket % EVENT_PAIRS], stream)
        self.pending.append(call)

    def end(self, stream: int, ticket: int) -> None:
        """The GPU has ended the call when `stream` reaches this point."""
        self._driver.record(self._done[ticket % EVENT_PAIRS], stream)
        self.last_enqueued = ticket

    def running(self, ticket: int) -> bool:
        """Whether the GPU has begun a call and has not ended it."""
        return self._driver.reached(self._begun[ticket % EVENT_PAIRS]) and not self.done(ticket)

    def done(self, ticket: int) -> bool:
        """Whether the GPU has ended a call. A call that is still being enqueued has not ended."""
        if ticket <= self.last_enqueued - EVENT_PAIRS:
            return True
        return ticket <= 0 or (ticket <= self.last_enqueued and self._driver.reached(self._done[ticket % EVENT_PAIRS]))

    def after(self, stream: int, ticket: int) -> None:
        """`stream` goes on once a call has ended. Nothing is enqueued if the call's events have another user by now."""
        if ticket > self.last_enqueued - EVENT_PAIRS:
            self._driver.wait(stream, self._done[ticket % EVENT_PAIRS])

    def drop_done(self) -> bool:
        """Remove the calls that have ended from `pending`. Returns whether there was one."""
        before = self._seen_done
        while self.pending and self.done(self.pending[0].ticket):
            self._seen_done = self.pending.popleft().ticket
        return self._seen_done > before

    def unfinished(self) -> list[PendingCall]:
        """The calls that have not ended; if the device is lost, those that are not known to have ended."""
        calls = tuple(self.pending)
        try:
            return [call for call in calls if not self.done(call.ticket)]
        except RuntimeError:
            return list(calls)

    def close(self) -> None:
        """Destroy the events."""
        for event in (*self._begun, *self._done):
            self._driver.forget(event)
