"""`concurrent` runs collectives concurrently with an independent computation, as a call or as a context."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist

from weft.core.concurrent import ConcurrentProblem, OpaqueCollective
from weft.core.errors import require
from weft.core.problem import CollectiveProblem
from weft.core.schedule import Schedule
from weft.ops.common import publish_error_instead, resolve_group
from weft.overlap.concurrent.calls import GroupCaches, ShapedKernels, get_caches
from weft.overlap.concurrent.choice import ConcurrentChoice
from weft.overlap.concurrent.collectives import ConcurrentCollective, SendReceive
from weft.overlap.concurrent.executor import Program
from weft.runtime.choose import automatic
from weft.runtime.groups import GROUPS
from weft.schedules.concurrent import SHARDED

T = TypeVar("T")
AUTO = "auto"


@overload
def concurrent(
    compute: Callable[..., T],
    collectives: ConcurrentCollective | Sequence[ConcurrentCollective],
    *,
    key: str | None = None,
    repeatable: bool = False,
    compute_us: float | None = None,
    method: str | Schedule = AUTO,
    kernels: Sequence[Any] = (),
    residents: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> T: ...


@overload
def concurrent(
    *,
    collectives: ConcurrentCollective | Sequence[ConcurrentCollective],
    key: str,
    compute_us: float | None = None,
    method: str | Schedule = AUTO,
    kernels: Sequence[Any] = (),
    residents: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Concurrent: ...


def concurrent(
    compute: Callable[..., Any] | None = None,
    collectives: ConcurrentCollective | Sequence[ConcurrentCollective] = (),
    *,
    key: str | None = None,
    repeatable: bool = False,
    compute_us: float | None = None,
    method: str | Schedule = AUTO,
    kernels: Sequence[Any] = (),
    residents: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Run collectives concurrently with a computation that is independent of them, as the planner or a measurement chooses.

        # before                              # after
        dist.all_reduce(grad)                 out = weft.concurrent(lambda: x @ w, [weft.AllReduce(grad)])
        out = x @ w
                                              with weft.concurrent(collectives=[weft.AllReduce(grad)], key="mlp"):
                                                  out = x @ w

    Args:
        compute: a callable, whose result is returned, or a torch.cuda.CUDAGraph, which is replayed. Without it the result is a
            context for the computation. The collectives start when it is entered, after the work enqueued before.
        collectives: one of weft.AllReduce, AllGather, ReduceScatter, AllToAll and SendReceive, or several, which run in order.
        key: names this use. Uses with the same key and collectives share one choice, so computations of different sizes need
            different keys. It is the same on every rank. Default: where compute is defined.
        repeatable: says that running compute many times has the same effect as running it once. The first use then measures
            the planner's best schedules and sequential, and later uses run the fastest. Otherwise the planner chooses.
        compute_us: how long the computation takes alone, for the planner. Default: as long as the collectives. The
            same on every rank.
        method: auto, or the name of a schedule: sequential, nccl or copy_engine, with +late,
            +priority, +pull, +ctas=N, +left=N, +resident=N (weft.schedules.concurrent); or a Schedule that
            weft.schedule.build has made of such a name for these collectives.
        kernels: kernels of the computation whose residency may be capped. compute gets them, or capped ones, as arguments. A
            context has them as `kernels`.
        residents: the numbers of blocks per SM to try if repeatable. Default: one less than fit, and half as many as fit.
        group: the ranks that agree on the method. Default: the collectives' group, or the default group if they have several.

    At the end the caller's stream waits for the collectives; on CUDA the host does not wait. Results equal those of the
    sequential program, up to the rounding of cuBLAS GEMMs on fewer SMs. NCCL (gloo on CPUs) runs the collectives, or
    weft.collectives with copy_engine.

    Raises ValueError that names the argument, and RankMismatch if ranks use one key for different collectives or methods.
    """
    try:
        context, run = _chosen(compute, collectives, key, repeatable, compute_us, method, kernels, residents, group)
    except Exception as error:
        for ranks in _groups(collectives, group):
            publish_error_instead(ranks, error)
        raise
    return context if run is None else context.run(run)


def _chosen(
    compute: Callable[..., Any] | None,
    collectives: ConcurrentCollective | Sequence[ConcurrentCollective],
    key: str | None,
    repeatable: bool,
    compute_us: float | None,
    method: str | Schedule,
    kernels: Sequence[Any],
    residents: Sequence[int] | None,
    group: dist.ProcessGroup | None,
) -> tuple[Concurrent, Callable[..., Any] | None]:
    """Return the context of one use, and the computation if the caller passed one."""
    mine = _check_collectives(collectives)
    run = _callable(compute)
    require("kernels", kernels, Sequence, "pass the computation's kernels in a list")
    if repeatable and run is None:
        raise ValueError("repeatable is for a callable: a context's computation runs once; pass compute")
    require("residents", residents, (Sequence, type(None)), "pass numbers of blocks an SM in a list")
    require("compute_us", compute_us, (int, float, type(None)), "pass how long the computation takes alone, in us")
    caches = _get_caches(mine, group)
    shaped = caches.shape_kernels(kernels, residents)
    mode = automatic() if method == AUTO else ""
    if mode in ("", "sequential"):
        return Concurrent(mine, _program(mode or method, mine, kernels, caches), caches, shaped), run
    require("key", key, (str, type(None)), "pass a string that names this computation")
    named, fixed = _key_of(compute) if key is None else key, run is not compute
    choice = caches.find_choice(named, mine)
    if choice is None and run is not None and repeatable and mode == AUTO and not caches.get_executor(mine[0].device).capturing:
        choice = caches.choose_by_measurement(named, mine, shaped, run, fixed=fixed)
    choice = choice or caches.choose_by_plan(named, mine, compute_us, fixed=fixed)
    return Concurrent(mine, caches.find_program(choice.method, mine), caches, shaped), run


def concurrent_choices(group: dist.ProcessGroup | None = None) -> list[ConcurrentChoice]:
    """Return the choices of `concurrent` and of the hooks in a process group.

    For each key these are the method, the reason, and the measured times in us, if any. The list is the same on every rank. The
    call is not collective.
    """
    name = resolve_group(group)[0]
    state = GROUPS.known(name)
    return get_caches(state).list_choices() if state else []


class Concurrent:
    """A context, made by `concurrent`, that runs collectives concurrently with its body.

    method: the name of the schedule of this use.
    kernels: the kernels to launch instead of those that were named.

    A context that is deleted before it was entered warns, because its collectives did not run.
    """

    _left_out = False

    def __init__(
        self, collectives: Sequence[ConcurrentCollective], program: Program, caches: GroupCaches, kernels: ShapedKernels
    ) -> None:
        self._collectives, self._program = tuple(collectives), program
        self._executor = caches.get_executor(collectives[0].device)
        self._executor.prepare(program, self._collectives)
        self._stack: ExitStack | None = None
        self.kernels: tuple[Any, ...] = kernels.of(program.computation.resident)
        self._left_out = True

    def __del__(self) -> None:
        if self._left_out:
            what = ", ".join(collective.describe() for collective in self._collectives)
            warnings.warn(f"a weft.concurrent was never entered, so that {what} did not run; use `with`", RuntimeWarning)  # noqa: B028 - nobody's line

    @property
    def method(self) -> str:
        return self._program.name

    def __enter__(self) -> Concurrent:
        if self._stack is not None:
            raise ValueError("this context has been entered before; make one for each use")
        self._left_out = False
        with ExitStack() as stack:
            stack.enter_context(self._executor.running(self._program, self._collectives))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._stack is not None
        self._stack.__exit__(kind, error, trace)

    def run(self, compute: Callable[..., T]) -> T:
        """Run compute concurrently with the collectives, and return its result."""
        with self:
            return compute(*self.kernels)


def _check_collectives(collectives: ConcurrentCollective | Sequence[ConcurrentCollective]) -> tuple[ConcurrentCollective, ...]:
    require("collectives", collectives, (ConcurrentCollective, Iterable), "pass weft.AllReduce and the like, one or a list")
    mine = (collectives,) if isinstance(collectives, ConcurrentCollective) else tuple(collectives)
    if not mine:
        raise ValueError("collectives is empty; pass at least one, or call compute by itself")
    for i, collective in enumerate(mine):
        if not isinstance(collective, ConcurrentCollective):
            raise ValueError(f"collectives[{i}] is a {type(collective).__name__}; use weft.AllReduce and the like")
        if collective.device != mine[0].device:
            raise ValueError(f"collectives[{i}] is on {collective.device}, collectives[0] on {mine[0].device}; use one device")
    return mine


def _program(
    method: str | Schedule, collectives: Sequence[ConcurrentCollective], kernels: Sequence[Any], caches: GroupCaches
) -> Program:
    """Return the program of this rank.

    Raises ValueError for a schedule of other collectives or about sharded parameters, and for options that have no effect here.
    """
    require(
        "method",
        method,
        (str, Schedule),
        "use auto, a name such as nccl+priority, or a weft.schedule.Schedule for these collectives",
    )
    if isinstance(method, Schedule):
        mine = caches.make_problem(collectives).collectives
        theirs = method.problem.collectives if isinstance(method.problem, ConcurrentProblem) else ()
        if [*map(_essence, mine)] != [*map(_essence, theirs)]:
            raise ValueError(f"method is a schedule for {method.problem}; these are {', '.join(map(str, mine))}")
        found = caches.find_program_of_value(method, collectives)
    else:
        found = caches.find_program(method, collectives)
    if found.computation.resident and not kernels:
        raise ValueError(f"method is '{found.name}'; resident is for kernels that are named: pass kernels, or leave it out")
    held = found.priority or any(part.ctas for part in found.parts)
    if held and any(isinstance(collective, SendReceive) for collective in collectives):
        raise ValueError(
            f"method is '{found.name}'; sends and receives keep to a stream and blocks of NCCL's: leave out priority and ctas"
        )
    for name in SHARDED:
        if getattr(found.computation, name):
            raise ValueError(f"method is '{found.name}'; {name} is for weft.hooks.fsdp, leave it out")
    return found


def _essence(one: CollectiveProblem | OpaqueCollective) -> tuple[object, ...]:
    """Return what must match for a schedule to fit a collective: the data moved and how it is summed, without the staging
    memory."""
    if isinstance(one, OpaqueCollective):
        return (one.name,)
    return one.op, one.world_size, one.m * one.itemsize, one.reduce_op, one.dtype if one.sums else ""


def _callable(compute: Any) -> Callable[..., Any] | None:
    if compute is None or callable(compute):
        return compute  # type: ignore[no-any-return]
    if not isinstance(compute, torch.cuda.CUDAGraph):
        raise ValueError(f"compute is a {type(compute).__name__}; pass a callable, or a torch.cuda.CUDAGraph")
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("compute is a graph, which a capture cannot replay; pass the callable that it was captured of")
    return compute.replay


def _get_caches(collectives: Sequence[ConcurrentCollective], group: dist.ProcessGroup | None) -> GroupCaches:
    """Return the caches of the ranks that agree: those of the collectives' group if they all have the same one."""
    groups = {collective.ranks for collective in collectives}
    if group is None and len(groups) == 1:
        group = next(iter(groups))
    return get_caches(GROUPS.state(resolve_group(group)[0]))


def _groups(collectives: object, group: object) -> set[dist.ProcessGroup]:
    """Return the groups whose ranks may wait for this one. The arguments have not been checked."""
    listed = collectives if isinstance(collectives, Sequence) else (collectives,)
    named = {one.ranks for one in listed if isinstance(one, ConcurrentCollective)}
    return named | ({group} if isinstance(group, dist.ProcessGroup) else set())


def _key_of(compute: Any) -> str:
    """Return the module, name and line of a computation. Raises ValueError if they are unknown, and for a context."""
    code = getattr(inspect.unwrap(compute), "__code__", None) if callable(compute) else None
    if code is None:
        raise ValueError("key is None; pass a string that names this computation, the same on every rank")
    return f"{compute.__module__}.{compute.__qualname__}:{code.co_firstlineno}"
