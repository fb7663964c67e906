"""Executors run collectives concurrently with a computation, in the order of a schedule.

An executor runs a Program, which is one rank's part of a checked schedule: its lanes, in the order in which they are enqueued.

    lane of kind compute     NCCL's collectives before the computation, the computation, NCCL's collectives after it
    lane of kind network     NCCL's collectives on a separate stream
    lane of kind copy        collectives by their parts of the schedule, from a separate stream. The runtime binds and runs a
                             part as it does the schedules of weft.collectives

A lane that is listed after the computation's lane is enqueued after the computation. Collectives run one after the other. The
separate stream forks from the caller's stream at entry and is joined at exit. The host does not wait, so a CUDA graph can
capture all of this:

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from weft.compat.dispatch import NO_BACKWARD, at_end_of_backward, backward_pass
from weft.core.parts import runs_by_library
from weft.core.schedule import Lane, Schedule, UserCall, places_of, steps_of
from weft.overlap.concurrent.collectives import ConcurrentCollective, SendReceive
from weft.runtime.groups import GROUPS
from weft.schedules.concurrent import Abilities


@dataclass(frozen=True)
class CollectivePart:
    """One collective of a program.

    number: its index among the collectives of the call.
    steps: its own schedule, or None if NCCL runs it.
    ctas: the number of NCCL's blocks. With 0 NCCL chooses it.
    """

    number: int
    steps: Schedule | None = None
    ctas: int = 0


@dataclass(frozen=True, kw_only=True)
class Program:
    """One rank's part of a schedule.

    name: the name of the schedule.
    computation: the user's call, with the limits that it keeps.
    before, after: collectives on the caller's stream.
    beside: collectives on a separate stream.
    priority: that stream has the highest priority.
    late: they are enqueued after the computation.
    """

    name: str
    computation: UserCall
    before: tuple[CollectivePart, ...] = ()
    after: tuple[CollectivePart, ...] = ()
    beside: tuple[CollectivePart, ...] = ()
    priority: bool = False
    late: bool = False

    @property
    def parts(self) -> tuple[CollectivePart, ...]:
        return (*self.before, *self.beside, *self.after)


def program_of(schedule: Schedule, rank: int) -> Program:
    """Return the program of a rank. `schedule` is checked, and solves a ConcurrentProblem."""
    lanes = schedule.ranks[rank]
    compute, position, computation = next(place for place in places_of(UserCall, lanes) if place[2].collective is None)
    other = next((lane for lane in lanes if lane.steps and lane is not compute), None)
    return Program(
        name=schedule.name,
        computation=computation,
        before=_parts(schedule, compute, 0, position),
        after=_parts(schedule, compute, position + 1, len(compute.steps)),
        beside=_parts(schedule, other, 0, len(other.steps)) if other else (),
        priority=bool(other and other.priority),
        late=bool(other and lanes.index(other) > lanes.index(compute)),
    )


def _parts(schedule: Schedule, lane: Lane, begin: int, end: int) -> tuple[CollectivePart, ...]:
    numbers = [step.collective for step in steps_of(UserCall, [replace(lane, steps=lane.steps[begin:end])])]
    parts = [(number, schedule.parts[number]) for number in numbers if number is not None]
    return tuple(
        CollectivePart(number, ctas=lane.ctas) if runs_by_library(part) else CollectivePart(number, part)
        for number, part in parts
    )


class Executor:
    """An Executor runs programs on one device of this process, on CPUs by gloo. CudaExecutor replaces what differs on GPUs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def abilities(self, collectives: Sequence[ConcurrentCollective]) -> Abilities:
        """Return the options that schedules of these collectives may use on this device. They are the same on every rank.

        Collective if weft has not used the collectives' groups before.
        """
        return Abilities()

    @property
    def capturing(self) -> bool:
        """Whether a CUDA graph captures the current stream."""
        return False

    def prepare(self, program: Program, collectives: Sequence[ConcurrentCollective]) -> None:
        """Create the communicators that a program needs. Collective. Raises ValueError if the device cannot run the program."""
        gpu_options = {
            "priority": program.priority,
            "left": program.computation.left,
            "resident": program.computation.resident,
            "ctas": any(part.ctas for part in program.parts),
        }
        for name, value in gpu_options.items():
            if value:
                raise ValueError(f"method is {program.name}; {name} needs a GPU")

    @contextmanager
    def running(self, program: Program, collectives: Sequence[ConcurrentCollective]) -> Iterator[None]:
        """Run the collectives concurrently with the body of the context. They run even if it raises, as peers take part."""
        beside = self._beside(program, collectives) if program.beside else nullcontext(lambda: None)
        with self.limit_computation(program), beside as start:
            self._enqueue_all(program.before, collectives)
            if not program.late:
                start()
            try:
                yield
            finally:
                if program.late:
                    start()
                self._enqueue_all(program.after, collectives)

    def limit_computation(self, program: Program) -> AbstractContextManager[object]:
        """Return a context in which the computation uses only the SMs that the program gives to it."""
        return nullcontext()

    @contextmanager
    def _beside(self, program: Program, collectives: Sequence[ConcurrentCollective]) -> Iterator[Callable[[], None]]:
        """Yield a function that starts the collectives beside the computation. They are joined at the end of the context.

        gloo has several threads, so a collective that shares memory with an earlier one starts when that one has ended.
        """
        waits: list[Callable[[], None]] = []

        def start() -> None:
            for place, part in enumerate(program.beside):
                collective = collectives[part.number]
                if any(collective.shares_memory_with(collectives[earlier.number]) for earlier in program.beside[:place]):
                    while waits:
                        waits.pop(0)()
                if part.steps is None:
                    waits.append(self._start_collective(collective))
                else:
                    self.enqueue(part, collective)

        try:
            yield start
        finally:
            for wait in waits:
                wait()

    def _enqueue_all(self, parts: Sequence[CollectivePart], collectives: Sequence[ConcurrentCollective]) -> None:
        for part in parts:
            self.enqueue(part, collectives[part.number])

    def enqueue(self, part: CollectivePart, collective: ConcurrentCollective) -> None:
        """Run one collective. On CUDA it is enqueued on torch's current stream."""
        if part.steps is None:
            self._run_library_collective(part, collective)
        else:
            collective.move(part.steps)

    def _run_library_collective(self, part: CollectivePart, collective: ConcurrentCollective) -> None:
        # Overridden for GPUs, where NCCL runs it.
        self._start_collective(collective)()

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

    def future(
        self, program: Program, collective: ConcurrentCollective, result: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """Start a collective concurrently with what the caller enqueues next, and return a future of its result.

        On CPUs the wait has a timeout. If a backward pass starts the collective, it raises PeerLost or WaitTimeout at its end.
        """
        (part,) = program.parts
        if program.beside and part.steps is None:
            return _future_of(self._start_collective(collective), result)
        self.enqueue(part, collective)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(result)
        return future

    def sum_sparse(self, gradients: torch.Tensor, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
        """Add sparse gradients up by torch.distributed, and return a future as `future` does."""
        what = f"all_reduce of sparse gradients, {list(gradients.shape)}"
        state = GROUPS.state(group.group_name)
        return _future_of(state.begun(what, lambda own: dist.all_reduce(gradients, group=own, async_op=True)), gradients)

    def close(self, *, broken: bool) -> None:
        """Destroy the communicators that were created for programs. Collective, unless `broken`.

        broken: peers are lost. The communicators are aborted, because running collectives may never end.
        """


def _future_of(wait: Callable[[], None], result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a future that holds `result` when `wait` has returned. `wait` waits for a collective, with a timeout.

    A separate thread waits.
    """
    ended: torch.futures.Future[None] = torch.futures.Future()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            wait()
        except BaseException as error:
            errors.append(error)
        ended.set_result(None)

    def get_result(_: torch.futures.Future[None]) -> torch.Tensor:
        if errors:
            raise errors[0]
        return result

    def join() -> None:
        ended.wait()
        get_result(ended)

    future: torch.futures.Future[torch.Tensor] = ended.then(get_result)
    if backward_pass() != NO_BACKWARD:
        # `join` raises the error itself. If the future raised it, torch would replace it by a RuntimeError.
        at_end_of_backward(join)
    threading.Thread(target=run, name="weft-background-wait", daemon=True).start()
    return future
