"""The caches of a process group for `concurrent` and the hooks: the choices of keys, and the programs of schedules."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from weft.checker import check
from weft.comm.rank_group import RankGroup
from weft.core.concurrent import ConcurrentProblem
from weft.core.errors import WeftError, warn_once
from weft.core.schedule import Schedule
from weft.overlap.concurrent.choice import ConcurrentChoice, planned, worth_measuring
from weft.overlap.concurrent.collectives import ConcurrentCollective, rehearsed
from weft.overlap.concurrent.executor import Executor, Program, program_of
from weft.runtime.autotune import AutotuningRun, time_on_host, timer_for
from weft.runtime.bound import BoundProgram
from weft.runtime.choose import fans_out
from weft.runtime.collective_calls import affordable, staging_from_environment
from weft.runtime.groups import GROUPS, GroupState
from weft.schedules.concurrent import SEQUENTIAL, Abilities, build, parse

K = TypeVar("K")
V = TypeVar("V")
MAX_ENTRIES = 256
"""The largest number of entries in each cache of a group. The least recently used entry is removed first."""


class ShapedKernels:
    """The named kernels, and their capped versions.

    named: kernels that weft.overlap.controls.shape accepts.
    caps: the numbers of blocks per SM to try. None tries one block less than fits, and half as many as fit.
    """

    def __init__(self, named: Sequence[Any] = (), caps: Sequence[int] | None = None) -> None:
        for cap in caps or ():
            if not isinstance(cap, int) or cap < 1:
                raise ValueError(f"residents has {cap!r}; at least one block an SM has to run")
        if caps and not named:
            raise ValueError("residents is given without kernels; name the kernels that it is for")
        self._named, self._caps = tuple(named), caps
        self._shaped: dict[int, tuple[Any, ...]] = {}

    def residents(self) -> tuple[int, ...]:
        """Return the caps to try, most blocks first, after a first launch of the kernels.

        The result is empty, and a warning is logged, if the residency of a kernel is unknown and no caps were given.
        """
        if not self._named:
            return ()
        try:
            fits = self._fits()
        except ValueError as error:
            if self._caps is None:
                warn_once(f"kernels are not capped: {error}; or pass residents")
            return tuple(self._caps or ())
        caps = self._caps if self._caps is not None else (fits - 1, fits // 2)
        return tuple(sorted({cap for cap in caps if 0 < cap < fits}, reverse=True))

    def _fits(self) -> int:
        """Return the smallest number of blocks per SM over all kernels. Raises ValueError if a kernel's number is unknown."""
        from weft.overlap.controls import occupancy

        return min(occupancy(kernel).blocks for kernel in self._named)

    def of(self, resident: int) -> tuple[Any, ...]:
        """Return the kernels to launch: the original ones for 0, else kernels capped at `resident` blocks per SM."""
        if not resident:
            return self._named
        if resident not in self._shaped:
            from weft.overlap.controls import shape

            self._shaped[resident] = tuple(shape(kernel, blocks_per_sm=resident) for kernel in self._named)
        return self._shaped[resident]

    def close(self) -> None:
        """Undo the settings of all caps."""
        shaped, self._shaped = self._shaped, {}
        for kernels in shaped.values():
            for kernel in kernels:
                kernel.close()


class GroupCaches:
    """The choices and programs of one process group, and the executors that run them."""

    def __init__(self, rank_group: RankGroup, exchange: Callable[[str, int], tuple[int, ...]]) -> None:
        self.rank_group = rank_group
        self.exchange = exchange
        """Compares a text and exchanges a number among all ranks. Raises RankMismatch unless all pass the same text, and
        returns the number of each rank. This rank must run no other call of the group at the same time."""
        self._lock = threading.RLock()
        self._choices: OrderedDict[tuple[object, ...], ConcurrentChoice] = OrderedDict()
        """The choices, by key and collectives. All ranks use keys in the same order, so they remove the same entries."""
        self._kernels: OrderedDict[tuple[object, ...], ShapedKernels] = OrderedDict()
        self._executors: dict[torch.device, Executor] = {}
        self._programs: OrderedDict[tuple[object, ...], Program] = OrderedDict()
        """The programs of schedules that are given by name, by name and collectives."""
        self._programs_of_values: OrderedDict[tuple[str, int], Program] = OrderedDict()
        """The programs of schedules that are given as values, by digest and rank."""
        self._hooks: OrderedDict[str, ConcurrentChoice] = OrderedDict()
        """The choices of hooks, by key."""

    def find_choice(self, key: str, collectives: Sequence[ConcurrentCollective]) -> ConcurrentChoice | None:
        """Return the choice of a key, or None before its first use."""
        cache_key = _make_cache_key(key, collectives)
        with self._lock:
            return _use(self._choices, cache_key) if cache_key in self._choices else None

    def choose_by_plan(
        self, key: str, collectives: Sequence[ConcurrentCollective], compute_us: float | None, *, fixed: bool
    ) -> ConcurrentChoice:
        """Return the planner's choice for a key at its first use, and add it to the cache.

        fixed: the kernels of the computation cannot be changed, because it is a CUDA graph. The ranks compare the key, the
        collectives and the choice. Raises RankMismatch if they differ.
        """
        problem = replace(self.make_problem(collectives), compute_us=compute_us)
        choice = planned(key, problem, collectives[0].device, self._abilities(collectives, (), fixed=fixed))
        self.exchange(_describe_use(key, collectives, f"method: {choice.method}"), 0)
        return self._add_choice(choice, collectives)

    def choose_by_measurement(
        self,
        key: str,
        collectives: Sequence[ConcurrentCollective],
        kernels: ShapedKernels,
        compute: Callable[..., object],
        *,
        fixed: bool,
    ) -> ConcurrentChoice:
        """Measure a few schedules at the first use of a key, and return the fastest. `compute` may run many times.

        The computation and the collectives are timed alone, the planner selects candidates, and an autotuning run measures
        these. All programs that are bound for it are released with their memory, also the winner's: the measured calls average,
        but the user's call may sum. An error on one rank ends the measurement on all ranks.
        """
        self.exchange(_describe_use(key, collectives), 0)
        device = collectives[0].device
        executor = self.get_executor(device)

        def exchange(text: str, mine: int) -> tuple[int, ...]:
            return self.exchange(f"concurrent {key}: {text}", mine)

        with self.rank_group.fail_group_on_error(), rehearsed(collectives) as repeatable:

            def run_once(program: Program, *, computes: bool = True) -> None:
                with executor.running(program, repeatable):
                    if computes:
                        compute(*kernels.of(program.computation.resident))

            def bind(spec: str) -> Program:
                """Return a program after one call of its collectives without the computation."""
                refusal = ""
                try:
                    program = self.find_program(spec, repeatable)
                    executor.prepare(program, repeatable)
                except WeftError:  # may also be a ValueError, but then the group has failed
                    raise
                except ValueError as error:
                    refusal = str(error)
                if not all(exchange(f"{spec} is ready", int(not refusal))):  # the collectives need all ranks
                    raise ValueError(refusal or "another rank cannot run it")
                run_once(program, computes=False)
                return program

            run: AutotuningRun[Program] = AutotuningRun(
                bind=bind,
                drop=lambda program: None,
                call=run_once,
                timer=timer_for(device) or time_on_host,
                exchange=exchange,
                base_again=True,
            )
            sequential = self.find_program(str(SEQUENTIAL), repeatable)
            compute_us = run.measure("the computation alone", lambda: compute(*kernels.of(0))).us
            # How many blocks of the kernels fit is known after their first launch.
            abilities = self._abilities(collectives, kernels.residents(), fixed=fixed)
            communication_us = run.measure("the collectives alone", partial(run_once, sequential, computes=False)).us
            problem = replace(self.make_problem(collectives), compute_us=compute_us, communication_us=communication_us)
            choice = ConcurrentChoice(key=key, method=sequential.name, problem=problem)
            specs = worth_measuring(key, problem, device, abilities)
            if len(specs) > 1:
                bound = _bound_programs(collectives)
                program, measurements = run.fastest(specs)
                for state, programs in _bound_programs(collectives).items():
                    state.forget(programs.difference(bound.get(state, ())))
                choice = replace(choice, method=program.name, measurements=measurements)
        return self._add_choice(choice, collectives)

    def _add_choice(self, choice: ConcurrentChoice, collectives: Sequence[ConcurrentCollective]) -> ConcurrentChoice:
        with self._lock:
            cache_key = _make_cache_key(choice.key, collectives)
            self._choices[cache_key] = choice
            return _use(self._choices, cache_key)

    def _abilities(self, collectives: Sequence[ConcurrentCollective], residents: tuple[int, ...], *, fixed: bool) -> Abilities:
        """Return what schedules of these collectives may do here. A computation that is `fixed` is left as it is."""
        found = self.get_executor(collectives[0].device).abilities(collectives)
        return replace(found, left=False) if fixed else replace(found, residents=residents)

    def make_problem(self, collectives: Sequence[ConcurrentCollective], staging_bytes: int | None = None) -> ConcurrentProblem:
        """Return the problem that a schedule of these collectives solves, among the ranks of the first of them."""
        size = collectives[0].ranks.size()
        nodes = self.list_nodes(size)
        problems = tuple(collective.problem(size, nodes, staging_bytes) for collective in collectives)
        return ConcurrentProblem(collectives=problems, world_size=size, nodes=nodes)

    def list_nodes(self, size: int) -> tuple[int, ...]:
        """Return the number of ranks on each node, or () if the group's size is not `size`."""
        return self.rank_group.nodes if sum(self.rank_group.nodes) == size else ()

    def build_schedule(self, spec: str, collectives: Sequence[ConcurrentCollective]) -> Schedule:
        """Return the schedule `spec` for these collectives. Ranks agree on the size of its staging memory if it needs any.

        Raises ValueError for an unknown name, and for a schedule that cannot run these collectives.
        """
        device, staging_bytes = collectives[0].device, None
        if parse(spec).transport == "copy_engine":
            own_bytes = affordable(staging_from_environment(device), device)
            staging_bytes = min(self.exchange(_describe_use(f"method {spec}", collectives), own_bytes))
        problem = self.make_problem(collectives, staging_bytes)
        return build(problem, spec, fan_out=fans_out(device, problem.world_size))

    def find_program(self, spec: str, collectives: Sequence[ConcurrentCollective]) -> Program:
        """Return the program that this rank runs for the schedule `spec`. At its first use the schedule is built and proved."""
        cache_key = (spec, *(collective.signature for collective in collectives))
        with self._lock:
            if cache_key not in self._programs:
                self._programs[cache_key] = self._make_program(self.build_schedule(spec, collectives), collectives)
            return _use(self._programs, cache_key)

    def find_program_of_value(self, schedule: Schedule, collectives: Sequence[ConcurrentCollective]) -> Program:
        """Return the program that this rank runs for a schedule that was given as a value. Its first use proves the schedule.

        Raises ValueError if the schedule is wrong.
        """
        cache_key = schedule.digest, collectives[0].ranks.rank()
        with self._lock:
            if cache_key not in self._programs_of_values:
                self._programs_of_values[cache_key] = self._make_program(schedule, collectives)
            return _use(self._programs_of_values, cache_key)

    def _make_program(self, schedule: Schedule, collectives: Sequence[ConcurrentCollective]) -> Program:
        """Prove a schedule, and return the program of this rank."""
        check(schedule)
        return program_of(schedule, collectives[0].ranks.rank())

    def shape_kernels(self, kernels: Sequence[object], caps: Sequence[int] | None) -> ShapedKernels:
        """Return the kernels that are launched instead of these. Later uses return the object of the first use."""
        cache_key = (*(id(kernel) for kernel in kernels), tuple(caps) if caps is not None else None)
        if cache_key not in self._kernels:
            self._kernels[cache_key] = ShapedKernels(kernels, caps)
        return _use(self._kernels, cache_key, close=ShapedKernels.close)

    def get_executor(self, device: torch.device) -> Executor:
        """Return the executor of a device, which the first use creates."""
        if device not in self._executors:
            self._executors[device] = _make_executor(device)
        return self._executors[device]

    def list_choices(self) -> list[ConcurrentChoice]:
        """Return the choices of all keys and hooks so far."""
        return [*self._choices.values(), *self._hooks.values()]

    def add_hook(self, choice: ConcurrentChoice) -> None:
        """Add the choice of a hook, which replaces that of an earlier hook with the same key.

        The ranks compare their choices. Raises RankMismatch if they differ.
        """
        self.exchange(f"hook: {choice.key}\nmethod: {choice.method}", 0)
        self._hooks[choice.key] = choice
        _use(self._hooks, choice.key)

    def close(self) -> None:
        """Free all entries. All ranks must call it if schedules have made process groups."""
        for kernels in self._kernels.values():
            kernels.close()
        for executor in self._executors.values():
            executor.close(broken=self.rank_group.broken is not None)
        for cache in (self._choices, self._kernels, self._executors, self._programs, self._programs_of_values, self._hooks):
            cache.clear()


def _bound_programs(collectives: Sequence[ConcurrentCollective]) -> dict[GroupState, set[BoundProgram]]:
    """Return the programs that are bound in the collectives' process groups."""
    states = (GROUPS.known(collective.ranks.group_name) for collective in collectives)
    return {state: set(state.bound()) for state in states if state}


def _use(cache: OrderedDict[K, V], key: K, *, close: Callable[[V], object] = lambda value: None) -> V:
    """Return an entry and mark it as the last used. Close and remove the least recent one beyond MAX_ENTRIES."""
    cache.move_to_end(key)
    if len(cache) > MAX_ENTRIES:
        close(cache.popitem(last=False)[1])
    return cache[key]


def _make_cache_key(key: str, collectives: Sequence[ConcurrentCollective]) -> tuple[object, ...]:
    return key, *(collective.signature for collective in collectives)


def _describe_use(key: str, collectives: Sequence[ConcurrentCollective], *more: str) -> str:
    """Return the text that all ranks must agree on at the first use of a key."""
    parts = (f"collective {i}: {collective.describe()}" for i, collective in enumerate(collectives))
    return "\n".join([f"concurrent: {key}", *parts, *more])


def _make_executor(device: torch.device) -> Executor:
    if device.type == "cpu":
        return Executor(device)
    # Imported only here, because this module needs a CUDA driver.
    from weft.overlap.concurrent.cuda import CudaExecutor

    return CudaExecutor(device)


def get_caches(state: GroupState) -> GroupCaches:
    """Return the caches of a group, which the first use creates."""
    return state.attached(GroupCaches, lambda: GroupCaches(state.rank_group, state.exchange_numbers))
