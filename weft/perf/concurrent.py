"""The simulation of a user's computation that runs concurrently with collectives.

The computation takes compute_us alone on all SMs, and longer if its GEMMs leave SMs free. Three things slow it:

- While collectives run, the computation runs on the SMs that they do not hold.
- If the computation leaves no SMs free, the blocks of a collective start as its blocks end. The machine's contention has the
  slowdown for a collective that is enqueued after it, before it, or on a stream with priority.
- Copies slow it as they slow matmuls (weft.perf.contention).

An NCCL collective takes its measured time, or else the time from the machine profile. With fewer blocks it takes longer, in
proportion to the slower rate of stores from fewer SMs. `weft.perf.kernels` adds what copy engines bring, on the blocks of the
lane.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from weft.core.concurrent import ConcurrentProblem
from weft.core.schedule import Collective, Lane, Reduce, UserCall, steps_of
from weft.perf import kernels
from weft.perf.terms import alone_us
from weft.perf.transfers import join_collective
from weft.perf.world import Process, World, ns

LATE, FIRST, PRIOR = (
    "computation during late collective",
    "computation during collective",
    "computation during collective with priority",
)
"""Names in the machine's contention. Each is the slowdown of a computation during an NCCL collective that was enqueued after
it, before it, or on a stream with priority. A machine without such a number has no slowdown."""


def computation_us(problem: ConcurrentProblem) -> float:
    """Return the time of the computation alone. Raises ValueError if it is unknown."""
    if problem.compute_us is None:
        raise ValueError(
            f"compute_us is None; a prediction needs the time of the computation that runs concurrently with {problem}"
        )
    return problem.compute_us


def _problem(world: World) -> ConcurrentProblem:
    problem = world.schedule.problem
    assert isinstance(problem, ConcurrentProblem)
    return problem


def _reduce(world: World, rank: int, lane: Lane, step: Reduce) -> Process:
    blocks = lane.ctas or next(one.sms for _, one in _problem(world).known)
    with _hold_sms(world, rank, -(-blocks // world.machine.kernels.sums), 1.0):
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
    world.kernel_ns[rank] += world.now - start


def _communicate(world: World, rank: int, lane: Lane, number: int) -> Process:
    """Run an NCCL collective. It starts once all ranks have called it, and holds its SMs until it ends."""
    machine = world.machine
    us = alone_us(_problem(world), machine)[number]
    usual = min(machine.collective_sms or machine.stores.sms, machine.gpu.sms - 1)
    blocks = lane.ctas or usual
    slower = max(1.0, machine.stores.rate(usual) / machine.stores.rate(blocks))
    yield from join_collective(world, rank, 0)
    # The computation is slower than the SMs that the collectives hold explain: how much depends on which comes first.
    late = world.schedule.ranks[rank][-1] is lane
    slowdown = machine.contention.get(PRIOR if lane.priority else LATE if late else FIRST, 1.0)
    with _hold_sms(world, rank, blocks, slowdown):
        world.transfers[rank].start(world.now)
        yield world.env.timeout(ns(us * slower))
        world.transfers[rank].stop(world.now)


def _hold_sms(world: World, rank: int, sms: int, waiting: float) -> AbstractContextManager[None]:
    """Run the rank's computations on the other SMs while collectives hold `sms` SMs.

    Blocks of collectives use the SMs that the computation leaves free first, without waiting. waiting: the slowdown if it
    leaves none."""
    all_sms, calls = world.machine.gpu.sms, steps_of(UserCall, world.schedule.ranks[rank])
    left = next((one.left for one in calls if one.collective is None), 0)
    mine = max(1, all_sms - left)
    speed = max(1, all_sms - max(left, sms)) / mine
    return world.network.contention.hold(rank, speed if left else speed / waiting)


STEPS: dict[type, Callable[[World, int, Lane, Any], Process]] = {
    UserCall: _call,
    Collective: lambda world, rank, lane, step: _communicate(
        world, rank, lane, world.schedule.buffer[step.src.buffer].collective
    ),
    Reduce: _reduce,
}
"""The functions of the steps that differ if a user's computation runs concurrently, by type of step."""
