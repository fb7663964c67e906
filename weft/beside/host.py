"""Ways on CPUs: gloo's threads run the collectives, or the host executor's, and the end of the context waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from weft.beside.collectives import Collective
from weft.beside.device import Device
from weft.beside.moved import moved, moves
from weft.planner.ways import Abilities, Way


class HostDevice(Device):
    """CPUs: gloo's threads, or the host executor's lanes."""

    def abilities(self, collectives: Sequence[Collective]) -> Abilities:
        return Abilities(copy_engine=all(moves(collective) for collective in collectives))

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

    def _limits(self, way: Way) -> AbstractContextManager[object]:
        return nullcontext()

    @contextmanager
    def _beside(self, way: Way, collectives: Sequence[Collective]) -> Iterator[None]:
        works: list[Any] = []
        try:
            if not way.late:
                works += [self._begun(way, collective) for collective in collectives]
            yield
        finally:
            if way.late:
                works += [self._begun(way, collective) for collective in collectives]
            for work in works:
                work.wait()

    def _begun(self, way: Way, collective: Collective) -> Any:
        if way.transport == "copy_engine":
            return moved(collective, way.ctas, async_op=True)
        return collective.enqueue(collective.ranks, async_op=True)

    def close(self) -> None:
        pass
