"""Ways on CPUs: gloo's threads run the collectives, and the end of the context waits for them.

The host executor has no lane of its own for a call: what copy engines would move there is moved before the computation, or
after it. So copy_engine is not among the ways that are tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

from weft.overlap.beside.collectives import Collective, SendReceive
from weft.overlap.beside.device import Device
from weft.planner.ways import Abilities, Way
from weft.runtime.groups import GROUPS


class HostDevice(Device):
    """CPUs."""

    def abilities(self, collectives: Sequence[Collective]) -> Abilities:
        return Abilities()

    def mark(self) -> int:
        return time.perf_counter_ns()

    def passed(self, mark: int) -> bool:
        return True

    def between_ns(self, begin: int, end: int) -> int:
        return end - begin

    def time_ns(self, call: Callable[[], object], calls: int) -> int:
        call()
        begin = time.perf_counter_ns()
        for _ in range(calls):
            call()
        return (time.perf_counter_ns() - begin) // calls

    @property
    def capturing(self) -> bool:
        return False

    def prepare(self, way: Way, collectives: Sequence[Collective]) -> None:
        for name in ("priority", "left", "resident", "ctas"):
            if getattr(way, name) and not (name == "ctas" and way.transport == "copy_engine"):
                raise ValueError(f"way is {way}; {name} needs a GPU")

    def limits(self, way: Way) -> AbstractContextManager[object]:
        return nullcontext()

    @contextmanager
    def _beside(self, way: Way, collectives: Sequence[Collective]) -> Iterator[None]:
        waits: list[Callable[[], None]] = []
        try:
            if not way.late:
                self._begin(way, collectives, waits)
            yield
        finally:
            if way.late:
                self._begin(way, collectives, waits)
            for wait in waits:
                wait()

    def _begin(self, way: Way, collectives: Sequence[Collective], waits: list[Callable[[], None]]) -> None:
        """Begin them in order. gloo has several threads: what shares memory with an earlier one begins once that has ended."""
        for place, collective in enumerate(collectives):
            if any(collective.meets(earlier) for earlier in collectives[:place]):
                for wait in waits:
                    wait()
                waits.clear()
            if way.transport == "copy_engine":
                self.enqueue(way, collective)
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

    def enqueue(self, way: Way, collective: Collective) -> None:
        if way.transport == "copy_engine":
            collective.move(way.ctas, pull=way.pull)
        else:
            self._started(collective)()

    def future(self, way: Way, collective: Collective, result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        if way.transport == "vendor":
            work = collective.enqueue(collective.ranks, async_op=True)
            assert work is not None, "this rank is in the group"

            def given(done: torch.futures.Future[object]) -> torch.Tensor:
                done.value()  # raises what the collective ended by
                return result

            under_way: torch.futures.Future[torch.Tensor] = work.get_future().then(given)
            return under_way
        self.enqueue(way, collective)
        made: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        made.set_result(result)
        return made

    def close(self, *, broken: bool) -> None:
        pass
