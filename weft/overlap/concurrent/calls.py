"""The caches of `concurrent` and of the hooks in a process group: choices, and the programs of schedules."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from weft.checker import check
from weft.comm.rank_group import RankGroup
from weft.core.concurrent import ConcurrentProblem
from weft.core.schedule import Schedule
from weft.overlap.concurrent.choice import Chooser, ConcurrentChoice
from weft.overlap.concurrent.collectives import ConcurrentCollective, rehearsed
from weft.overlap.concurrent.executor import Executor, HostExecutor
from weft.overlap.concurrent.kernels import ShapedKernels
from weft.overlap.concurrent.program import Program, program_of
from weft.runtime.choose import fans_out
from weft.runtime.collective_calls import affordable, staging_from_environment
from weft.runtime.groups import GroupState
from weft.schedules.concurrent import build, parse

K = TypeVar("K")
T = TypeVar("T")
MOST = 256
"""A group caches this many keys, named methods, schedules given as values and sets of kernels, each least recently used out."""


class Calls:
    """All keys of one group, and the executors that they run on. `close` is collective if schedules have made groups.
    exchange: compares a text and exchanges a number among the ranks, while this rank runs no other call of the group."""

    def __init__(self, rank_group: RankGroup, exchange: Callable[[str, int], tuple[int, ...]]) -> None:
        self.rank_group, self.exchange = rank_group, exchange
        self._lock = threading.RLock()
        self._choices: OrderedDict[tuple[object, ...], ConcurrentChoice] = OrderedDict()
        """Ranks use keys in the same order, so all of them forget the same ones."""
        self._kernels: OrderedDict[tuple[object, ...], ShapedKernels] = OrderedDict()
        self._executors: dict[torch.device, Executor] = {}
        self._programs: OrderedDict[tuple[object, ...], Program] = OrderedDict()
        self._given: OrderedDict[tuple[str, int], Program] = OrderedDict()
        self._hooks: OrderedDict[str, ConcurrentChoice] = OrderedDict()

    def cached(self, key: str, collectives: Sequence[ConcurrentCollective]) -> ConcurrentChoice | None:
        """Return the choice of a key; None before its first use."""
        same = _key(key, collectives)
        with self._lock:
            return _use(self._choices, same) if same in self._choices else None

    def planned(
        self, key: str, collectives: Sequence[ConcurrentCollective], compute_us: float | None, *, fixed: bool
    ) -> ConcurrentChoice:
        """Return the planner's choice for a key at its first use, after a handshake. Raises RankMismatch if ranks use the key
        differently, or choose differently."""
        choice = self._chooser(key, collectives, compute_us=compute_us, fixed=fixed).planned()
        self.exchange(_text(key, collectives, f"method: {choice.method}"), 0)
        return self._settle(choice, collectives)

    def measured(
        self,
        key: str,
        collectives: Sequence[ConcurrentCollective],
        kernels: ShapedKernels,
        compute: Callable[..., object],
        *,
        fixed: bool,
    ) -> ConcurrentChoice:
        """The fastest of a few for a key at its first use: compute may run many times. Whatever ends it on this rank ends it on
        all."""
        self.exchange(_text(key, collectives), 0)
        executor = self.executor(collectives[0].device)
        with self.rank_group.fail_group_on_error(), rehearsed(collectives) as again:
            compute(*kernels.of(0))  # how many blocks of a kernel fit is known once it has run
            chooser = self._chooser(key, collectives, residents=kernels.residents(), fixed=fixed)

            def run(program: Program) -> None:
                with executor.running(program, again):
                    compute(*kernels.of(program.computation.resident))

            programs = partial(self.program, collectives=again)
            choice = chooser.measured(executor, self.exchange, programs, run, lambda: compute(*kernels.of(0)), again)
        return self._settle(choice, collectives)

    def _settle(self, choice: ConcurrentChoice, collectives: Sequence[ConcurrentCollective]) -> ConcurrentChoice:
        with self._lock:
            same = _key(choice.key, collectives)
            self._choices[same] = choice
            return _use(self._choices, same)

    def _chooser(
        self,
        key: str,
        collectives: Sequence[ConcurrentCollective],
        *,
        compute_us: float | None = None,
        residents: tuple[int, ...] = (),
        fixed: bool,
    ) -> Chooser:
        """fixed: nothing of the computation can be changed any more: it is a graph."""
        device = collectives[0].device
        found = self.executor(device).abilities(collectives)
        able = replace(found, left=False) if fixed else replace(found, residents=residents)
        return Chooser(
            key=key, problem=replace(self.problem(collectives), compute_us=compute_us), device=device, abilities=able
        )

    def problem(self, collectives: Sequence[ConcurrentCollective], staging_bytes: int | None = None) -> ConcurrentProblem:
        """What these are to a schedule, among the ranks of the first one."""
        size = collectives[0].ranks.size()
        nodes = self.nodes(size)
        found = tuple(collective.problem(size, nodes, staging_bytes) for collective in collectives)
        return ConcurrentProblem(collectives=found, world_size=size, nodes=nodes)

    def nodes(self, size: int) -> tuple[int, ...]:
        """The ranks of each node, as a problem of `size` ranks has them."""
        return self.rank_group.nodes if sum(self.rank_group.nodes) == size else ()

    def schedule(self, spec: str, collectives: Sequence[ConcurrentCollective]) -> Schedule:
        """Return the schedule of that name for these collectives. Ranks agree on its staging memory if it needs any. Raises
        ValueError for an unknown name, and if it cannot run them."""
        device, staging_bytes = collectives[0].device, None
        if parse(spec).transport == "copy_engine":
            mine = affordable(staging_from_environment(device), device)
            staging_bytes = min(self.exchange(_text(f"method {spec}", collectives), mine))
        problem = self.problem(collectives, staging_bytes)
        return build(problem, spec, fan_out=fans_out(device, problem.world_size))

    def program(self, spec: str, collectives: Sequence[ConcurrentCollective]) -> Program:
        """What this rank runs of that schedule, which the first use proves. The last MOST are remembered."""
        same = (spec, *(collective.signature for collective in collectives))
        with self._lock:
            if same not in self._programs:
                self._programs[same] = self._check_schedule(self.schedule(spec, collectives), collectives)
            return _use(self._programs, same)

    def given(self, schedule: Schedule, collectives: Sequence[ConcurrentCollective]) -> Program:
        """What this rank runs of a schedule that was given as a value. The first use of a value proves it; the last MOST are
        remembered. Raises ValueError for a schedule that is wrong."""
        same = schedule.digest, collectives[0].ranks.rank()
        with self._lock:
            if same not in self._given:
                self._given[same] = self._check_schedule(schedule, collectives)
            return _use(self._given, same)

    def _check_schedule(self, schedule: Schedule, collectives: Sequence[ConcurrentCollective]) -> Program:
        check(schedule)
        return program_of(schedule, collectives[0].ranks.rank())

    def kernels(self, named: Sequence[object], caps: Sequence[int] | None) -> ShapedKernels:
        """Of these kernels, what is launched for them. The same at each use."""
        same = (*(id(kernel) for kernel in named), tuple(caps) if caps is not None else None)
        if same not in self._kernels:
            self._kernels[same] = ShapedKernels(named, caps)
        return _use(self._kernels, same, forget=ShapedKernels.close)

    def executor(self, device: torch.device) -> Executor:
        """What runs schedules on a device."""
        if device not in self._executors:
            self._executors[device] = _executor(device)
        return self._executors[device]

    def choices(self) -> list[ConcurrentChoice]:
        """What keys have chosen so far, and what hooks run."""
        return [*self._choices.values(), *self._hooks.values()]

    def add_hook(self, choice: ConcurrentChoice) -> None:
        """List a hook's choice; of hooks with the same key the last. The ranks compare their choices in a handshake. Raises
        RankMismatch if they differ."""
        self.exchange(f"hook: {choice.key}\nmethod: {choice.method}", 0)
        self._hooks[choice.key] = choice
        _use(self._hooks, choice.key)

    def close(self) -> None:
        for kernels in self._kernels.values():
            kernels.close()
        for executor in self._executors.values():
            executor.close(broken=self.rank_group.broken is not None)
        for table in (self._choices, self._kernels, self._executors, self._programs, self._given, self._hooks):
            table.clear()


def _use(table: OrderedDict[K, T], key: K, *, forget: Callable[[T], object] = lambda one: None) -> T:
    """An entry that is used now. The one that was used longest ago is forgotten where there are more than MOST."""
    table.move_to_end(key)
    if len(table) > MOST:
        forget(table.popitem(last=False)[1])
    return table[key]


def _key(key: str, collectives: Sequence[ConcurrentCollective]) -> tuple[object, ...]:
    return key, *(collective.signature for collective in collectives)


def _text(key: str, collectives: Sequence[ConcurrentCollective], *more: str) -> str:
    """Return what ranks have to agree on at a key's first use."""
    parts = (f"collective {i}: {collective.describe()}" for i, collective in enumerate(collectives))
    return "\n".join([f"concurrent: {key}", *parts, *more])


def _executor(device: torch.device) -> Executor:
    if device.type == "cpu":
        return HostExecutor(device)
    # Imported where it is needed: the controls call the CUDA driver.
    from weft.overlap.concurrent.cuda import CudaExecutor

    return CudaExecutor(device)


def calls_of(state: GroupState) -> Calls:
    """A group's keys."""
    return state.attached(Calls, lambda: Calls(state.rank_group, state.exchange_numbers))
