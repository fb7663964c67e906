"""A user's computation beside collectives, simulated: SMs that the collectives hold, and copies, slow the computation.

    the computation         takes compute_us alone on all SMs; longer, throughout, where its GEMMs leave SMs free
    beside collectives      it runs on what SMs they do not hold, while they run; where it leaves no SMs free, the machine's
                            contention says how much longer it takes besides: their blocks come as its own end, and wait less
                            the earlier they are enqueued, and where their stream has priority
    beside copies           as matmuls do (weft.perf.contention)
    an NCCL collective      takes what was measured, or the machine's figures say; on few blocks as much longer as stores from
                            so few SMs are slower

Sums of what copy engines bring are those of `weft.perf.kernels`, on the blocks of their lane.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from weft.core.concurrent import ConcurrentProblem, number_of
from weft.core.machine import Machine
from weft.core.schedule import Collective, Lane, Reduce, Schedule, UserCall, steps_of
from weft.perf import kernels
from weft.perf.terms import alone_us
from weft.perf.transfers import meet
from weft.perf.world import Process, World, ns

LATE, FIRST, PRIOR = (
    "computation during late collective",
    "computation during collective",
    "computation during collective with priority",
)
"""Names in the machine's contention: by how much longer a computation takes while an NCCL collective runs that was enqueued
after it, before it, or on a stream with priority. On a machine that does not say it takes no longer."""


def computation_us(problem: ConcurrentProblem) -> float:
    """Raises ValueError where it is not known."""
    if problem.compute_us is None:
        raise ValueError(f"compute_us is None; say how long the computation beside {problem} takes to have it predicted")
    return problem.compute_us


def _problem(world: World) -> ConcurrentProblem:
    problem = world.schedule.problem
    assert isinstance(problem, ConcurrentProblem)
    return problem


def _reduce(world: World, rank: int, lane: Lane, step: Reduce) -> Process:
    blocks = lane.ctas or next(one.sms for _, one in _problem(world).known)
    with _holding(world, rank, -(-blocks // world.machine.kernels.sums), 1.0):
        yield from kernels.reduce(world, rank, step, blocks)


def _call(world: World, rank: int, lane: Lane, step: UserCall) -> Process:
    if step.collective is None:
        return _compute(world, rank, step, computation_us(_problem(world)))
    return _communicate(world, rank, lane, step.collective)


def _compute(world: World, rank: int, step: UserCall, us: float) -> Process:
    sms, start = world.machine.gpu.sms, world.now
    longer = sms / max(1, sms - step.left)
    with world.network.contention.computation(rank) as clock:
        yield clock.until(clock.now + ns(us * longer))
    world.kernels[rank] += world.now - start


def _communicate(world: World, rank: int, lane: Lane, number: int) -> Process:
    """All ranks come to it, as to any of NCCL's, and it holds its SMs meanwhile."""
    machine = world.machine
    us = alone_us(_problem(world), machine)[number]
    usual = min(machine.collective_sms or machine.stores.sms, machine.gpu.sms - 1)
    blocks = lane.ctas or usual
    slower = max(1.0, machine.stores.rate(usual) / machine.stores.rate(blocks))
    yield from meet(world, rank, 0)
    with _holding(world, rank, blocks, _waiting(world.schedule, lane, rank, machine)):
        world.transfers[rank].start(world.now)
        yield world.env.timeout(ns(us * slower))
        world.transfers[rank].stop(world.now)


def _waiting(schedule: Schedule, lane: Lane, rank: int, machine: Machine) -> float:
    """How much longer the computation takes beside collectives of this lane than the SMs that they hold explain."""
    late = schedule.ranks[rank][-1] is lane
    return machine.contention.get(PRIOR if lane.priority else LATE if late else FIRST, 1.0)


def _holding(world: World, rank: int, sms: int, waiting: float) -> AbstractContextManager[None]:
    """While collectives hold so many SMs, computations of the rank run on the others. Blocks for which SMs are left free wait
    for none, and take none of the computation's but those beyond."""
    all_sms, left = world.machine.gpu.sms, _left(world.schedule, rank)
    mine = max(1, all_sms - left)
    speed = max(1, all_sms - max(left, sms)) / mine
    return world.network.contention.held(rank, speed if left else speed / waiting)


def _left(schedule: Schedule, rank: int) -> int:
    return next((one.left for one in steps_of(UserCall, schedule.ranks[rank]) if one.collective is None), 0)


STEPS: dict[type, Callable[[World, int, Lane, Any], Process]] = {
    UserCall: _call,
    Collective: lambda world, rank, lane, step: _communicate(world, rank, lane, number_of(step.src.buffer)),
    Reduce: _reduce,
}
"""By type of step, those that differ beside a user's computation."""
