"""How a device runs collectives beside a computation, in a given Way, and how it tells the time.

On CUDA the collectives have a stream of their own, which forks from the caller's at entry and is joined at exit. Nothing waits
on the host, so that a graph can capture it:

    caller's stream            collectives' stream
    fork  ------------------>  collective               late: it is enqueued after the computation, and forks here all the same
    computation                collective
    join  <------------------

    sequential: collectives, then the computation, all on the caller's stream

Another stream that computes for the caller is the caller's to join. Two uses at once, one within the other, have streams of
their own: joining the inner one does not wait for the outer one's collectives. On CPUs the vendor's threads (gloo's) run the
collectives, and exit waits for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from weft.overlap.beside.collectives import Collective
from weft.planner.ways import Abilities, Way


class Device(ABC):
    """What runs ways on one device of this process. Its marks are moments, of the caller's stream where there are streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def abilities(self, collectives: Sequence[Collective]) -> Abilities:
        """What ways may say here, for these. The same on every rank. Collective where weft has not used their groups yet."""

    @abstractmethod
    def mark(self) -> Any:
        """Now."""

    @abstractmethod
    def passed(self, mark: Any) -> bool:
        """Whether the device has come so far."""

    @abstractmethod
    def between_ns(self, begin: Any, end: Any) -> int:
        """From one mark to another, both passed."""

    @abstractmethod
    def time_ns(self, call: Callable[[], object], calls: int) -> int:
        """What one of so many calls takes; as weft.runtime.trial.Timer."""

    @property
    @abstractmethod
    def capturing(self) -> bool:
        """Whether what is called now goes into a graph."""

    @abstractmethod
    def prepare(self, way: Way, collectives: Sequence[Collective]) -> None:
        """Make what a way needs. Collective. Raises ValueError where it cannot be."""

    @abstractmethod
    def group(self, group: dist.ProcessGroup, ctas: int) -> dist.ProcessGroup:
        """The same ranks, with a communicator whose kernels have at most so many blocks; the group itself for 0. Collective
        where it is new. Raises ValueError where it cannot be made."""

    @abstractmethod
    def enqueue(self, way: Way, collective: Collective) -> None:
        """Run a collective by itself, as its way has it but for its stream: on CUDA torch's current one."""

    @abstractmethod
    def future(self, way: Way, collective: Collective, result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """A collective that is under way, beside what the caller enqueues next, and its result once it has ended."""

    @contextmanager
    def running(self, way: Way, collectives: Sequence[Collective]) -> Iterator[None]:
        """The collectives run from here, beside what is in the context, to its end; also where that raises: peers take part."""
        if not way.beside:
            for collective in collectives:
                self.enqueue(way, collective)
            yield
            return
        with self.limits(way), self._beside(way, collectives):
            yield

    @abstractmethod
    def limits(self, way: Way) -> AbstractContextManager[object]:
        """A context in which the computation keeps to what the way leaves it."""

    @abstractmethod
    def _beside(self, way: Way, collectives: Sequence[Collective]) -> AbstractContextManager[object]:
        """A context at whose end the collectives have been joined."""

    @abstractmethod
    def close(self, *, broken: bool) -> None:
        """Give back what ways have taken. Collective, unless `broken`: then peers are lost, and what is under way may never
        end."""
