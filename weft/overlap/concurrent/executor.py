"""Runs collectives concurrently with a computation as a schedule says, and measures times.

What runs is a Program, this rank's lanes of a checked schedule (`weft.overlap.concurrent.program`). On CUDA the collectives
have a stream of their own, which forks from the caller's at entry and is joined at exit. Nothing waits on the host, so that a
graph can capture it:

    caller's stream            collectives' stream
    fork  ------------------>  collective               late: it is enqueued after the computation, and forks here all the same
    computation                collective
    join  <------------------

    sequential: collectives, then the computation, all on the caller's stream

Another stream that computes for the caller is the caller's to join. Two uses at once, one within the other, have streams of
their own: joining the inner one does not wait for the outer one's collectives. On CPUs gloo's threads run the collectives, and
exit waits for them; steps of copy engines run to their end before the computation, or after it, so they are no candidates.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
import torch.distributed as dist

from weft.compat.dispatch import NO_BACKWARD, at_end_of_backward, backward_pass
from weft.overlap.concurrent.collectives import ConcurrentCollective, SendReceive
from weft.overlap.concurrent.program import CollectivePart, Program, SideStream
from weft.runtime.groups import GROUPS
from weft.schedules.concurrent import Abilities


class Executor(ABC):
    """One device of this process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def abilities(self, collectives: Sequence[ConcurrentCollective]) -> Abilities:
        """What schedules may say here, for these. The same on every rank. Collective where weft has not used their
        groups yet."""

    @abstractmethod
    def time_ns(self, call: Callable[[], object], calls: int) -> int:
        """What one of so many calls takes; as weft.runtime.autotune.Timer."""

    @property
    @abstractmethod
    def capturing(self) -> bool:
        """Whether what is called now goes into a graph."""

    @abstractmethod
    def prepare(self, program: Program, collectives: Sequence[ConcurrentCollective]) -> None:
        """Make what a program needs. Collective. Raises ValueError where it cannot be."""

    @abstractmethod
    def group(self, group: dist.ProcessGroup, ctas: int) -> dist.ProcessGroup:
        """The same ranks, with a communicator whose kernels have at most so many blocks; the group itself for 0. Collective
        where it is new. Raises ValueError where it cannot be made."""

    def enqueue(self, part: CollectivePart, collective: ConcurrentCollective) -> None:
        """Run one collective: on CUDA on torch's current stream."""
        if part.steps is None:
            self._run_library_collective(part, collective)
        else:
            collective.move(part.steps)

    @abstractmethod
    def _run_library_collective(self, part: CollectivePart, collective: ConcurrentCollective) -> None:
        """NCCL's, or gloo's, collective."""

    @abstractmethod
    def future(
        self, program: Program, collective: ConcurrentCollective, result: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """Start a collective, concurrent with what the caller enqueues next, and return its future result. On CPUs the wait
        is bounded, and within a backward pass the pass raises PeerLost or WaitTimeout at its end."""

    @contextmanager
    def running(self, program: Program, collectives: Sequence[ConcurrentCollective]) -> Iterator[None]:
        """Run the collectives concurrently with the body of the context. They run even if it raises: peers take part."""
        with self.limits(program), ExitStack() as stack:
            for part in program.before:
                self.enqueue(part, collectives[part.number])
            if program.side_stream is not None:
                stack.enter_context(self._lane(program.side_stream, collectives))
            try:
                yield
            finally:
                for part in program.after:
                    self.enqueue(part, collectives[part.number])

    @abstractmethod
    def limits(self, program: Program) -> AbstractContextManager[object]:
        """A context in which the computation keeps to what the program leaves it."""

    @abstractmethod
    def _lane(self, side_stream: SideStream, collectives: Sequence[ConcurrentCollective]) -> AbstractContextManager[object]:
        """A context at whose end the collectives have been joined."""

    @abstractmethod
    def close(self, *, broken: bool) -> None:
        """Give back what programs have taken. Collective, unless `broken`: then peers are lost, and what is under way may never
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

    def abilities(self, collectives: Sequence[ConcurrentCollective]) -> Abilities:
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

    def prepare(self, program: Program, collectives: Sequence[ConcurrentCollective]) -> None:
        asked = {
            "priority": program.priority,
            "left": program.computation.left,
            "resident": program.computation.resident,
            "ctas": any(part.ctas for part in program.parts),
        }
        for name, value in asked.items():
            if value:
                raise ValueError(f"method is {program.name}; {name} needs a GPU")

    def limits(self, program: Program) -> AbstractContextManager[object]:
        return nullcontext()

    @contextmanager
    def _lane(self, side_stream: SideStream, collectives: Sequence[ConcurrentCollective]) -> Iterator[None]:
        waits: list[Callable[[], None]] = []
        try:
            if not side_stream.late:
                self._begin(side_stream.parts, collectives, waits)
            yield
        finally:
            if side_stream.late:
                self._begin(side_stream.parts, collectives, waits)
            for wait in waits:
                wait()

    def _begin(
        self, parts: Sequence[CollectivePart], collectives: Sequence[ConcurrentCollective], waits: list[Callable[[], None]]
    ) -> None:
        """Begin them in order. gloo has several threads: what shares memory with an earlier one begins once that has ended."""
        for place, part in enumerate(parts):
            collective = collectives[part.number]
            if any(collective.shares_memory_with(collectives[earlier.number]) for earlier in parts[:place]):
                for wait in waits:
                    wait()
                waits.clear()
            if part.steps is None:
                waits.append(self._start(collective))
            else:
                self.enqueue(part, collective)

    def _start(self, collective: ConcurrentCollective) -> Callable[[], None]:
        """Begin a collective of gloo's; a function that waits for it, within the bound. Stages of a pipeline do not send and
        receive at the same uses, so there is no handshake, and they use the connections of the caller's group."""
        state = GROUPS.state(collective.ranks.group_name)
        if isinstance(collective, SendReceive):
            work = collective.enqueue(collective.ranks, async_op=True)
            return lambda: state.await_work(collective.describe(), work)
        return state.begun(collective.describe(), lambda group: collective.enqueue(group, async_op=True))

    def group(self, group: dist.ProcessGroup, ctas: int) -> dist.ProcessGroup:
        if ctas:
            raise ValueError(f"method has ctas={ctas}, which gloo does not have; leave it out on a CPU")
        return group

    def _run_library_collective(self, part: CollectivePart, collective: ConcurrentCollective) -> None:
        self._start(collective)()

    def future(
        self, program: Program, collective: ConcurrentCollective, result: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        (part,) = program.parts
        if program.side_stream is not None and part.steps is None:
            return self.ending(self._start(collective), result)
        self.enqueue(part, collective)
        made: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        made.set_result(result)
        return made

    def ending(self, wait: Callable[[], None], result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """The result of what is under way, once a wait for it, which is bounded, has ended."""
        ending = _Ending(wait)
        if backward_pass() != NO_BACKWARD:
            at_end_of_backward(ending.wait)  # torch would make a RuntimeError of what the future ends by
        return ending.future(result)

    def close(self, *, broken: bool) -> None:
        pass
