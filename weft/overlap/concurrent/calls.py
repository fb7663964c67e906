"""The caches of a process group for `concurrent` and the hooks: the choices of keys, and the programs of schedules."""

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
V = TypeVar("V")
MAX_ENTRIES = 256
"""The largest number of entries in each cache of a group. The least recently used entry is removed first."""


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

        The ranks compare the key, the collectives and the choice. Raises RankMismatch if they differ.
        """
        choice = self._make_chooser(key, collectives, compute_us=compute_us, fixed=fixed).planned()
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

        An error on one rank ends the measurement on all ranks.
        """
        self.exchange(_describe_use(key, collectives), 0)
        executor = self.get_executor(collectives[0].device)
        with self.rank_group.fail_group_on_error(), rehearsed(collectives) as repeatable:
            compute(*kernels.of(0))  # the number of blocks of a kernel that fit is known after its first launch
            chooser = self._make_chooser(key, collectives, residents=kernels.residents(), fixed=fixed)

            def run_program(program: Program) -> None:
                with executor.running(program, repeatable):
                    compute(*kernels.of(program.computation.resident))

            programs = partial(self.find_program, collectives=repeatable)
            choice = chooser.measured(
                executor, self.exchange, programs, run_program, lambda: compute(*kernels.of(0)), repeatable
            )
        return self._add_choice(choice, collectives)

    def _add_choice(self, choice: ConcurrentChoice, collectives: Sequence[ConcurrentCollective]) -> ConcurrentChoice:
        with self._lock:
            cache_key = _make_cache_key(choice.key, collectives)
            self._choices[cache_key] = choice
            return _use(self._choices, cache_key)

    def _make_chooser(
        self,
        key: str,
        collectives: Sequence[ConcurrentCollective],
        *,
        compute_us: float | None = None,
        residents: tuple[int, ...] = (),
        fixed: bool,
    ) -> Chooser:
        """Return a Chooser for a key. `fixed` says that the kernels of the computation cannot be changed, because it is a CUDA
        graph."""
        device = collectives[0].device
        abilities = self.get_executor(device).abilities(collectives)
        abilities = replace(abilities, left=False) if fixed else replace(abilities, residents=residents)
        return Chooser(
            key=key, problem=replace(self.make_problem(collectives), compute_us=compute_us), device=device, abilities=abilities
        )

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
        return HostExecutor(device)
    # Imported only here, because this module needs a CUDA driver.
    from weft.overlap.concurrent.cuda import CudaExecutor

    return CudaExecutor(device)


def get_caches(state: GroupState) -> GroupCaches:
    """Return the caches of a group, which the first use creates."""
    return state.attached(GroupCaches, lambda: GroupCaches(state.rank_group, state.exchange_numbers))
