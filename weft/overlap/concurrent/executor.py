"""Runs collectives beside a computation as a schedule says, and tells the time.

What the lanes of a schedule say is read from it once, as a Method (`weft.schedules.concurrent.method_of`). On CUDA the
collectives have a stream of their own, which forks from the caller's at entry and is joined at exit. Nothing waits on the host,
so that a graph can capture it:

    caller's stream            collectives' stream
    fork  ------------------>  collective               late: it is enqueued after the computation, and forks here all the same
    computation                collective
    join  <------------------

    sequential: collectives, then the computation, all on the caller's stream

Another stream that computes for the caller is the caller's to join. Two uses at once, one within the other, have streams of
their own: joining the inner one does not wait for the outer one's collectives. On CPUs gloo's threads run the collectives, and
exit waits for them; the CPU executor has no lane of its own for copies, so copy_engine moves its bytes before the computation,
or after it, and auto does not try it there.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

from weft.compat.autograd import NO_BACKWARD, at_end_of_backward, backward_pass
from weft.overlap.concurrent.collectives import Collective, SendReceive
from weft.runtime.groups import GROUPS
from weft.schedules.concurrent import Abilities, Method


class Executor(ABC):
    """One device of this process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def abilities(self, collectives: Sequence[Collective]) -> Abilities:
        """What methods may say here, for these. The same on every rank. Collective where weft has not used their groups yet."""

    @abstractmethod
    def time_ns(self, call: Callable[[], object], calls: int) -> int:
        """What one of so many calls takes; as weft.runtime.trial.Timer."""

    @property
    @abstractmethod
    def capturing(self) -> bool:
        """Whether what is called now goes into a graph."""

    @abstractmethod
    def prepare(self, method: Method, collectives: Sequence[Collective]) -> None:
        """Make what a method needs. Collective. Raises ValueError where it cannot be."""

    @abstractmethod
    def group(self, group: dist.ProcessGroup, ctas: int) -> dist.ProcessGroup:
        """The same ranks, with a communicator whose kernels have at most so many blocks; the group itself for 0. Collective
        where it is new. Raises ValueError where it cannot be made."""

    @abstractmethod
    def enqueue(self, method: Method, collective: Collective) -> None:
        """Run a collective by itself, as its lanes say but for their stream: on CUDA torch's current one."""

    @abstractmethod
    def future(self, method: Method, collective: Collective, result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """A collective that is under way, beside what the caller enqueues next, and its result once it has ended. On CPUs the
        wait is bounded, and within a backward pass the pass raises PeerLost or WaitTimeout at its end."""

    @contextmanager
    def running(self, method: Method, collectives: Sequence[Collective]) -> Iterator[None]:
        """The collectives run from here, beside what is in the context, to its end; also where that raises: peers take part."""
        if not method.overlaps:
            for collective in collectives:
                self.enqueue(method, collective)
            yield
            return
        with self.limits(method), self._lanes(method, collectives):
            yield

    @abstractmethod
    def limits(self, method: Method) -> AbstractContextManager[object]:
        """A context in which the computation keeps to what the method leaves it."""

    @abstractmethod
    def _lanes(self, method: Method, collectives: Sequence[Collective]) -> AbstractContextManager[object]:
        """A context at whose end the collectives have been joined."""

    @abstractmethod
    def close(self, *, broken: bool) -> None:
        """Give back what methods have taken. Collective, unless `broken`: then peers are lost, and what is under way may never
        end."""


class _Ending:
    """A wait for a collective of gloo's, bounded, on a thread of its own."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait, self._error = wait, list[BaseException]()
        self._ended: torch.futures.Future[None] = torch.futures.Future()

    def future(self, result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """The result, once the collective has ended."""

        def given(_: torch.futures.Future[None]) -> torch.Tensor:
            self._raise()
            return result

        found: torch.futures.Future[torch.Tensor] = self._ended.then(given)
        threading.Thread(target=self._run, name="weft-ending", daemon=True).start()
        return found

    def wait(self) -> None:
        """Return once the collective has ended. Raises PeerLost or WaitTimeout."""
        self._ended.wait()
        self._raise()

    def _run(self) -> None:
        try:
            self._wait()
        except BaseException as error:
            self._error.append(error)
        self._ended.set_result(None)

    def _raise(self) -> None:
        if self._error:
            raise self._error[0]


class HostExecutor(Executor):
    """CPUs."""

    def abilities(self, collectives: Sequence[Collective]) -> Abilities:
        return Abilities()

    def time_ns(self, call: Callable[[], object], calls: int) -> int:
        call()
        begin = time.perf_counter_ns()
        for _ in range(calls):
            call()
        return (time.perf_counter_ns() - begin) // calls

    @property
    def capturing(self) -> bool:
        return False

    def prepare(self, method: Method, collectives: Sequence[Collective]) -> None:
        for name in ("priority", "left", "resident", "ctas"):
            if getattr(method, name) and not (name == "ctas" and method.transport == "copy_engine"):
                raise ValueError(f"way is {method}; {name} needs a GPU")

    def limits(self, method: Method) -> AbstractContextManager[object]:
        return nullcontext()

    @contextmanager
    def _lanes(self, method: Method, collectives: Sequence[Collective]) -> Iterator[None]:
        waits: list[Callable[[], None]] = []
        try:
            if not method.late:
                self._begin(method, collectives, waits)
            yield
        finally:
            if method.late:
                self._begin(method, collectives, waits)
            for wait in waits:
                wait()

    def _begin(self, method: Method, collectives: Sequence[Collective], waits: list[Callable[[], None]]) -> None:
        """Begin them in order. gloo has several threads: what shares memory with an earlier one begins once that has ended."""
        for place, collective in enumerate(collectives):
            if any(collective.meets(earlier) for earlier in collectives[:place]):
                for wait in waits:
                    wait()
                waits.clear()
            if method.transport == "copy_engine":
                self.enqueue(method, collective)
            else:
                waits.append(self._started(collective))

    def _started(self, collective: Collective) -> Callable[[], None]:
        """Begin a collective of gloo's; a function that waits for it, within the bound. Stages of a pipeline do not send and
        receive at the same uses, so they meet at none, and use the connections of the caller's group."""
        state = GROUPS.state(collective.ranks.group_name)
        if isinstance(collective, SendReceive):
            work = collective.enqueue(collective.ranks, async_op=True)
            return lambda: state.await_work(collective.describe(), work)
        return state.begun(collective.describe(), lambda group: collective.enqueue(group, async_op=True))

    def group(self, group: dist.ProcessGroup, ctas: int) -> dist.ProcessGroup:
        if ctas:
            raise ValueError(f"way has ctas={ctas}, which gloo's collectives have not; leave it out on a CPU")
        return group

    def enqueue(self, method: Method, collective: Collective) -> None:
        if method.transport == "copy_engine":
            collective.move(method.ctas, pull=method.pull)
        else:
            self._started(collective)()

    def future(self, method: Method, collective: Collective, result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        if method.transport == "vendor":
            ending = _Ending(self._started(collective))
            if backward_pass() != NO_BACKWARD:
                at_end_of_backward(ending.wait)  # torch would make a RuntimeError of what the future ends by
            return ending.future(result)
        self.enqueue(method, collective)
        made: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        made.set_result(result)
        return made

    def close(self, *, broken: bool) -> None:
        pass
