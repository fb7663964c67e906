"""Copies and collectives, simulated.

A lane of a copy engine runs its copies one after the other. Lanes of one rank share its engines: a copy waits until one is
free, then shares ports and links with all other transfers. Where a copy of rows that do not lie together is a kernel, it waits
for the SMs of the lookup or cuBLAS GEMM that runs on its rank; one to a peer runs beside a lookup (weft.perf.lookups).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import simpy

from weft.core.problem import LookupProblem
from weft.core.schedule import Collective, Copy, LaneKind, Push, Region, Schedule
from weft.core.work import collective_shard_bytes, region_bytes
from weft.perf import staging
from weft.perf.lookups import copied_beside
from weft.perf.network import Resource
from weft.perf.terms import collective_us
from weft.perf.world import Process, Rendezvous, World, ns


def copy(world: World, rank: int, kind: LaneKind, step: Copy, *, pushed: bool = False) -> Process:
    """One copy, by what its lane runs on: a copy engine, a kernel on all free SMs, or communication blocks. pushed: by the
    kernel that pushes, on as many SMs as it takes."""
    machine = world.machine
    fixed = {"copy": machine.copies.copy_us, "compute": machine.launch_us, "blocks": 0.0}[kind]
    if machine.copies.strided == "kernel" and kind == "copy" and step.src.rank == step.dst.rank:
        fixed = machine.launch_us  # within a GPU the driver copies by a kernel
    size = region_bytes(world.schedule, step.src)
    if kind == "copy":
        with world.engines[rank].request() as engine:
            yield engine
            yield from _move(world, rank, kind, step, fixed, size, pushed)
    else:
        start = world.now
        yield from _move(world, rank, kind, step, fixed, size, pushed or kind == "blocks")
        if kind == "compute":
            world.kernels[rank] += world.now - start


def push(world: World, rank: int, kind: LaneKind, step: Push) -> Process:
    """One kernel: a launch, then each part by stores, one behind the other; its flag costs no more than a link's latency."""
    inner = world.within_a_kernel()
    for number, part in enumerate(step.parts):
        yield from copy(inner if number else world, rank, kind, Copy(part.src, part.dst), pushed=True)
        yield world.env.timeout(ns(inner.machine.flag_us))
        world.post(rank, part.count)


def _move(world: World, rank: int, kind: LaneKind, step: Copy, fixed: float, size: int, pushed: bool) -> Process:
    machine = world.machine
    beside = False
    if machine.copies.strided == "kernel" and rank in world.filled and strided(world.schedule, step):
        beside = isinstance(world.schedule.problem, LookupProblem) and step.src.rank != step.dst.rank
        if not beside:
            yield world.filled[rank].room(world.env)
    yield world.env.timeout(ns(fixed))
    if step.src.rank == step.dst.rank:
        yield from world.local(rank, 2 * size)
    else:
        if kind == "copy":
            path = world.network.copy_path(rank, step.src.rank, step.dst.rank, *_turned(world, rank))
        else:
            sms = world.push_sms[rank] if pushed else world.free_sms[rank]
            path = world.sm_path(rank, sms, step.src.rank, step.dst.rank)
        yield from copied_beside(world, rank, size, path) if beside else world.move(rank, size, path)


def _turned(world: World, rank: int) -> tuple[Resource, ...]:
    """What bounds copies of a rank that go to its peers in turns."""
    copies, rounds = world.machine.copies, world.rounds[rank]
    return (world.network.limit(("turned", rank), copies.turned_gbps(rounds)),) if copies.turning and rounds > 1 else ()


def strided(schedule: Schedule, step: Copy) -> bool:
    """Whether its rows do not lie one after the other, on either side."""

    def apart(region: Region) -> bool:
        rows, cols = region.shape
        return rows > 1 and cols < schedule.buffer[region.buffer].cols[region.rank]

    return apart(step.src) or apart(step.dst)


def meet(world: World, rank: int, shard_bytes: int) -> Generator[simpy.Event, Any, Rendezvous]:
    """Wait until every rank has come to its n-th collective; what they have in common."""
    number = world.met[rank] = world.met.get(rank, 0) + 1
    meeting = world.meetings.setdefault(number, Rendezvous(world.env.event()))
    meeting.here += 1
    meeting.shard_bytes = max(meeting.shard_bytes, shard_bytes)
    if meeting.here == len(world.ranks):
        meeting.begun.succeed()
    yield meeting.begun
    return meeting


def collective(world: World, rank: int, step: Collective) -> Process:
    """Wait for all ranks, then NCCL's time. The n-th collective of a rank meets the n-th of every other.

    Beside other lanes it begins fork_us late: matmul_all_reduce by copy engine, then all-gathered, took 9 to 13 us longer than
    its reduce-scatter and the all-gather on 2 GPUs (planner_fit.jsonl on 4: 12 to 22).
    """
    if len(world.schedule.ranks[rank]) > 1 and world.machine.fork_us:
        yield world.env.timeout(ns(world.machine.fork_us))
    meeting = yield from meet(world, rank, collective_shard_bytes(world.schedule, step))
    world.transfers[rank].start(world.now)
    problem = world.schedule.problem
    busy_us = collective_us(world.machine, step.op, meeting.shard_bytes, problem.world_size, problem.nodes)
    yield world.env.timeout(ns(busy_us))
    world.transfers[rank].stop(world.now)
    yield from staging.padded(world, step)
