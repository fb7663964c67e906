"""What weft keeps for `concurrent` among ranks that agree: for each key its schedule, or the measurement that finds it."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch

from weft.checker import check
from weft.comm.rank_group import RankGroup
from weft.core.concurrent import ConcurrentProblem
from weft.core.schedule import Schedule
from weft.overlap.concurrent.collectives import Collective
from weft.overlap.concurrent.executor import Executor, HostExecutor
from weft.overlap.concurrent.kernels import Kernels
from weft.overlap.concurrent.tuning import ConcurrentChoice, ConcurrentTuner, Sample, Turns, UseTurn
from weft.runtime.choose import fans_out
from weft.runtime.groups import GroupState
from weft.schedules.concurrent import SEQUENTIAL, Method, build, method_of, parse

K = TypeVar("K")
T = TypeVar("T")
MOST = 256
"""Keys, named ways, schedules given as values and sets of kernels that a group remembers, of each those that were used last."""


class Use:
    """One use of a key: what its schedule says, and the marks that tell how long that took."""

    def __init__(self, method: Method, executor: Executor | None) -> None:
        self.method = method
        self._executor = executor
        self._marks: list[object] = []
        self.mark()

    def mark(self) -> None:
        """Now; three times a use: at its begin, once its collectives are enqueued, at its end."""
        if self._executor is not None:
            self._marks.append(self._executor.mark())

    @property
    def sample(self) -> Sample:
        """Of a use that has ended; where its collectives could not be enqueued, they took all of it."""
        begin, *others = self._marks
        return Sample(begin, others[0], others[-1])


class KeyedCall:
    """Uses of one key, with the same collectives. method: what the schedule says that ranks have agreed on so far, sequential
    until they have chosen. of: what the schedule of a name says."""

    def __init__(self, tuner: ConcurrentTuner, of: Callable[[str], Method]) -> None:
        self.tuner, self._of = tuner, of
        self.choice: ConcurrentChoice | None = None
        self.method = SEQUENTIAL
        self._turns: Turns | None = None
        self._open = False
        self._last: Sample | None = None

    def choose(self, run: Callable[[Method], object], compute: Callable[[], object], collectives: Sequence[Collective]) -> None:
        """Choose now. Whatever ends it on this rank ends it on all."""
        with self.tuner.rank_group.failing():
            self._settle(self.tuner.in_one_go(run, compute, collectives))

    @contextmanager
    def use(self, collectives: Sequence[Collective]) -> Iterator[Use]:
        """The next use. One within another of the same key, and one that is captured, run what has been agreed on so far."""
        if self.choice or self._open or self._captured():
            yield Use(self.method, None)
            return
        method = self._advance(collectives)
        self._open = True
        use = Use(method, None if self.choice else self.tuner.executor)
        try:
            yield use
        finally:
            use.mark()
            self._open = False
            if not self.choice:
                self._last = use.sample

    def _captured(self) -> bool:
        if not self.tuner.executor.capturing:
            return False
        warnings.warn(
            f"concurrent {self.tuner.key} is captured before its trial has ended: the graph runs it as {self.method}; "
            "use it outside a graph first, or say which way",
            stacklevel=6,
        )
        return True

    def _advance(self, collectives: Sequence[Collective]) -> Method:
        """What the next use runs; the choice, where the measurement ends. Ranks meet at a few of these."""
        self.tuner.rank_group.check_usable()
        with self.tuner.rank_group.failing():
            try:
                if self._turns is None:
                    self._turns = self.tuner.in_use()
                    return self._of(next(self._turns))
                assert self._last is not None
                return self._of(self._turns.send(UseTurn(self._last, collectives)))
            except StopIteration as end:
                self._settle(end.value)
                return self.method

    def _settle(self, choice: ConcurrentChoice) -> None:
        self.choice, self.method, self._turns, self._last = choice, self._of(choice.way), None, None


class Calls:
    """All keys of one group, and the executors that they run on. `close` is collective where schedules have made groups. meet:
    ranks agree on a text, and exchange a number, while no other call of the group is under way on this rank."""

    def __init__(self, rank_group: RankGroup, meet: Callable[[str, int], tuple[int, ...]]) -> None:
        self.rank_group, self.meet = rank_group, meet
        self._lock = threading.RLock()
        self._calls: OrderedDict[tuple[object, ...], KeyedCall] = OrderedDict()
        """Ranks use keys in the same order, so all of them forget the same ones."""
        self._kernels: OrderedDict[tuple[object, ...], Kernels] = OrderedDict()
        self._executors: dict[torch.device, Executor] = {}
        self._methods: OrderedDict[tuple[object, ...], Method] = OrderedDict()
        self._given: OrderedDict[str, Method] = OrderedDict()
        self._hooks: list[Callable[[], ConcurrentChoice]] = []

    def call(self, key: str, collectives: Sequence[Collective], kernels: Kernels, *, fixed: bool) -> KeyedCall:
        """What a key stands for; ranks meet at its first use. Raises RankMismatch where they mean different things by it."""
        same = (key, *(collective.signature for collective in collectives))
        with self._lock:
            if same not in self._calls:
                parts = (f"collective {i}: {collective.describe()}" for i, collective in enumerate(collectives))
                self.meet("\n".join([f"concurrent: {key}", *parts]), 0)
                device, problem = collectives[0].device, self.problem(collectives)
                tuner = self.tuner(key, device, residents=kernels.residents, fixed=fixed)
                self._calls[same] = KeyedCall(tuner, cache(lambda spec: _method(problem, spec, device)))
            return _used(self._calls, same)

    def tuner(
        self, key: str, device: torch.device, *, residents: Callable[[], tuple[int, ...]] = tuple, fixed: bool = False
    ) -> ConcurrentTuner:
        """What measures the schedules of a key."""
        return ConcurrentTuner(
            key=key,
            rank_group=self.rank_group,
            meet=self.meet,
            executor=self.executor(device),
            problem=self.problem,
            residents=residents,
            fixed=fixed,
        )

    def problem(self, collectives: Sequence[Collective]) -> ConcurrentProblem:
        """What these are to a schedule, among the ranks of the first one."""
        size = collectives[0].ranks.size()
        nodes = self.rank_group.nodes if sum(self.rank_group.nodes) == size else ()
        found = tuple(collective.problem(size, nodes) for collective in collectives)
        return ConcurrentProblem(collectives=found, world_size=size, nodes=nodes)

    def schedule(self, spec: str, collectives: Sequence[Collective]) -> Schedule:
        """The schedule of that name for these. Raises ValueError for a name that is none, and where it cannot run them."""
        return _built(self.problem(collectives), spec, collectives[0].device)

    def method(self, spec: str, collectives: Sequence[Collective]) -> Method:
        """What that schedule says. Remembered; schedules by copy engines have thousands of steps, and are not."""
        same = (spec, *(collective.signature for collective in collectives))
        if same not in self._methods:
            self._methods[same] = _method(self.problem(collectives), spec, collectives[0].device)
        return _used(self._methods, same)

    def proved(self, schedule: Schedule) -> Method:
        """What a schedule says that was given as a value. The first use of a value proves it; the last MOST are remembered.
        Raises ValueError for a schedule that is wrong, and for one of which something would not run."""
        with self._lock:
            if schedule.digest not in self._given:
                check(schedule)
                self._given[schedule.digest] = method_of(schedule)
            return _used(self._given, schedule.digest)

    def kernels(self, named: Sequence[object], caps: Sequence[int] | None) -> Kernels:
        """Of these kernels, what is launched for them. The same at each use."""
        same = (*(id(kernel) for kernel in named), tuple(caps) if caps is not None else None)
        if same not in self._kernels:
            self._kernels[same] = Kernels(named, caps)
        return _used(self._kernels, same, forget=Kernels.close)

    def executor(self, device: torch.device) -> Executor:
        """What runs schedules on a device."""
        if device not in self._executors:
            self._executors[device] = _executor(device)
        return self._executors[device]

    def choices(self) -> list[ConcurrentChoice]:
        """What keys have chosen so far, and what hooks run."""
        return [call.choice for call in self._calls.values() if call.choice] + [choice() for choice in self._hooks]

    def add_hook(self, choice: Callable[[], ConcurrentChoice]) -> None:
        """List what a hook runs among the choices."""
        self._hooks.append(choice)

    def close(self) -> None:
        for kernels in self._kernels.values():
            kernels.close()
        for executor in self._executors.values():
            executor.close(broken=self.rank_group.broken is not None)
        for table in (self._calls, self._kernels, self._executors, self._methods, self._given, self._hooks):
            table.clear()


def _used(table: OrderedDict[K, T], key: K, *, forget: Callable[[T], object] = lambda one: None) -> T:
    """An entry that is used now. The one that was used longest ago is forgotten where there are more than MOST."""
    table.move_to_end(key)
    if len(table) > MOST:
        forget(table.popitem(last=False)[1])
    return table[key]


def _built(problem: ConcurrentProblem, spec: str, device: torch.device) -> Schedule:
    return build(problem, spec, fan_out=fans_out(device, problem.world_size))


def _method(problem: ConcurrentProblem, spec: str, device: torch.device) -> Method:
    """What a name says. Raises ValueError where it has no schedule for the problem."""
    _built(problem, spec, device)
    return parse(spec)


def _executor(device: torch.device) -> Executor:
    if device.type == "cpu":
        return HostExecutor(device)
    # Imported where it is needed: the controls call the CUDA driver.
    from weft.overlap.concurrent.cuda import CudaExecutor

    return CudaExecutor(device)


def calls_of(state: GroupState) -> Calls:
    """A group's keys."""
    return state.attached(Calls, lambda: Calls(state.rank_group, state.numbers))
