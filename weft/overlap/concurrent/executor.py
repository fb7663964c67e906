"""Executors run collectives concurrently with a computation, in the order of a schedule, and measure times.

An executor runs a Program: this rank's lanes of a checked schedule (`weft.overlap.concurrent.program`). On CUDA the collectives
run on a separate stream, which forks from the caller's stream at entry and is joined at exit. The host does not wait, so a CUDA
graph can capture all of this:

    caller's stream            collectives' stream
    fork  ------------------>  collective               with `late`, enqueued after the computation, but forked here, too
    computation                collective
    join  <------------------

    sequential: collectives, then the computation, all on the caller's stream

If the computation uses other streams, the caller joins them. A use within another use has a separate stream, so joining the
inner one does not wait for the collectives of the outer one.

On CPUs gloo's threads run the collectives, and exit waits for them. The steps of a collective with a schedule of its own run
to their end before or after the computation, so such methods are no candidates on CPUs.
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
    """An Executor runs programs on one device of this process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def abilities(self, collectives: Sequence[ConcurrentCollective]) -> Abilities:
        """Return the options that schedules of these collectives may use on this device. They are the same on every rank.

        Collective if weft has not used the collectives' groups before.
        """

    @abstractmethod
    def time_ns(self, call: Callable[[], object], calls: int) -> int:
        """Return the mean time of one of several calls in a row, as a `weft.runtime.autotune.Timer` does."""

    @property
    @abstractmethod
    def capturing(self) -> bool:
        """Whether a CUDA graph captures the current stream."""

    @abstractmethod
    def prepare(self, program: Program, collectives: Sequence[ConcurrentCollective]) -> None:
        """Create the communicators that a program needs. Collective. Raises ValueError if the device cannot run the program."""

    @abstractmethod
    def limit_group_ctas(self, group: dist.ProcessGroup, ctas: int) -> dist.ProcessGroup:
        """Return a group of the same ranks whose NCCL kernels have at most `ctas` blocks, or the group itself for 0.

        Collective if the group has not been created before. Raises ValueError if it cannot be created.
        """

    def enqueue(self, part: CollectivePart, collective: ConcurrentCollective) -> None:
        """Run one collective. On CUDA it is enqueued on torch's current stream."""
        if part.steps is None:
            self._run_library_collective(part, collective)
        else:
            collective.move(part.steps)

    @abstractmethod
    def _run_library_collective(self, part: CollectivePart, collective: ConcurrentCollective) -> None:
        """Run one collective of NCCL or gloo."""

    @abstractmethod
    def future(
        self, program: Program, collective: ConcurrentCollective, result: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """Start a collective concurrently with what the caller enqueues next, and return a future of its result.

        On CPUs the wait has a timeout. If a backward pass starts the collective, it raises PeerLost or WaitTimeout at its end.
        """

    @contextmanager
    def running(self, program: Program, collectives: Sequence[ConcurrentCollective]) -> Iterator[None]:
        """Run the collectives concurrently with the body of the context. They run even if it raises, as peers take part."""
        with self.limit_computation(program), ExitStack() as stack:
            for part in program.before:
                self.enqueue(part, collectives[part.number])
            if program.side_stream is not None:
                stack.enter_context(self._run_side_stream(program.side_stream, collectives))
            try:
                yield
            finally:
                for part in program.after:
                    self.enqueue(part, collectives[part.number])

    @abstractmethod
    def limit_computation(self, program: Program) -> AbstractContextManager[object]:
        """Return a context in which the computation uses only the SMs that the program gives to it."""

    @abstractmethod
    def _run_side_stream(
        self, side_stream: SideStream, collectives: Sequence[ConcurrentCollective]
    ) -> AbstractContextManager[object]:
        """Return a context that runs the collectives concurrently with its body, and joins them at its end."""

    @abstractmethod
    def close(self, *, broken: bool) -> None:
        """Destroy the communicators that were created for programs.

        Collective, unless `broken`.

        broken: peers are lost. The communicators are aborted, because running collectives may never end.
        """


class _BackgroundWait:
    """A _BackgroundWait waits for a gloo collective on a separate thread, by a function that has a timeout."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait, self._error = wait, list[BaseException]()
        self._ended: torch.futures.Future[None] = torch.futures.Future()

    def start(self, result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Start the thread, and return a future that holds `result` when the collective has ended."""

        def get_result(_: torch.futures.Future[None]) -> torch.Tensor:
            self._raise()
            return result

        future: torch.futures.Future[torch.Tensor] = self._ended.then(get_result)
        threading.Thread(target=self._run, name="weft-background-wait", daemon=True).start()
        return future

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
    """A HostExecutor runs programs on CPUs."""

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
        gpu_options = {
            "priority": program.priority,
            "left": program.computation.left,
            "resident": program.computation.resident,
            "ctas": any(part.ctas for part in program.parts),
        }
        for name, value in gpu_options.items():
            if value:
                raise ValueError(f"method is {program.name}; {name} needs a GPU")

    def limit_computation(self, program: Program) -> AbstractContextManager[object]:
        return nullcontext()

    @contextmanager
    def _run_side_stream(self, side_stream: SideStream, collectives: Sequence[ConcurrentCollective]) -> Iterator[None]:
        waits: list[Callable[[], None]] = []
        try:
            if not side_stream.late:
                self._start_collectives(side_stream.parts, collectives, waits)
            yield
        finally:
            if side_stream.late:
                self._start_collectives(side_stream.parts, collectives, waits)
            for wait in waits:
                wait()

    def _start_collectives(
        self, parts: Sequence[CollectivePart], collectives: Sequence[ConcurrentCollective], waits: list[Callable[[], None]]
    ) -> None:
        """Start the collectives in order, and add a function to `waits` for each that waits for it.

        gloo has several threads, so a collective that shares memory with an earlier one starts when that one has ended.
        """
        for place, part in enumerate(parts):
            collective = collectives[part.number]
            if any(collective.shares_memory_with(collectives[earlier.number]) for earlier in parts[:place]):
                for wait in waits:
                    wait()
                waits.clear()
            if part.steps is None:
                waits.append(self._start_collective(collective))
            else:
                self.enqueue(part, collective)

    def _start_collective(self, collective: ConcurrentCollective) -> Callable[[], None]:
        """Start a gloo collective, and return a function that waits for it, with a timeout.

        A SendReceive uses the connections of the caller's group without a handshake, because the stages of a pipeline send and
        receive at different uses.
        """
        state = GROUPS.state(collective.ranks.group_name)
        if isinstance(collective, SendReceive):
            work = collective.enqueue(collective.ranks, async_op=True)
            return lambda: state.await_work(collective.describe(), work)
        return state.begun(collective.describe(), lambda group: collective.enqueue(group, async_op=True))

    def limit_group_ctas(self, group: dist.ProcessGroup, ctas: int) -> dist.ProcessGroup:
        if ctas:
            raise ValueError(f"method has ctas={ctas}, which gloo does not have; leave it out on a CPU")
        return group

    def _run_library_collective(self, part: CollectivePart, collective: ConcurrentCollective) -> None:
        self._start_collective(collective)()

    def future(
        self, program: Program, collective: ConcurrentCollective, result: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        (part,) = program.parts
        if program.side_stream is not None and part.steps is None:
            return self.make_future(self._start_collective(collective), result)
        self.enqueue(part, collective)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(result)
        return future

    def make_future(self, wait: Callable[[], None], result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Return a future that holds `result` when `wait` has returned. `wait` waits for a collective, with a timeout."""
        background = _BackgroundWait(wait)
        if backward_pass() != NO_BACKWARD:
            # Waiting there raises the error itself. If the future raised it, torch would replace it by a RuntimeError.
            at_end_of_backward(background.wait)
        return background.start(result)

    def close(self, *, broken: bool) -> None:
        pass
