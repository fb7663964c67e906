"""The simulation of copies and collectives.

A copy lane runs its copies one after the other. The lanes of a rank share its copy engines: a copy waits until an engine is
free, then shares ports and links with all other transfers. On some machines a kernel copies rows that are not contiguous. It
waits for the SMs of the lookup or cuBLAS GEMM that runs on its rank, unless it copies to a peer during a lookup
(weft.perf.lookups).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import simpy

from weft.core.problem import LookupProblem
from weft.core.schedule import Collective, Copy, LaneKind, Push, Region, Schedule
from weft.core.work import collective_shard_bytes, region_bytes
from weft.perf import staging
from weft.perf.lookups import copy_during_lookup
from weft.perf.network import Resource
from weft.perf.terms import collective_us
from weft.perf.world import Process, Rendezvous, World, ns


def copy(world: World, rank: int, kind: LaneKind, step: Copy, *, pushed: bool = False) -> Process:
    """Run one copy by a copy engine, by a kernel on all free SMs, or by communication blocks, depending on the kind of lane.

    pushed: the copy is part of a push kernel, on that kernel's SMs."""
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
            world.kernel_ns[rank] += world.now - start


def push(world: World, rank: int, kind: LaneKind, step: Push) -> Process:
    """Run one push kernel: a launch, then its parts one after the other by stores. A flag costs only the latency of the
    link."""
    inner = world.within_a_kernel()
    for number, part in enumerate(step.parts):
        yield from copy(inner if number else world, rank, kind, Copy(part.src, part.dst), pushed=True)
        yield world.env.timeout(ns(inner.machine.flag_us))
        world.post(rank, part.count)


def _move(world: World, rank: int, kind: LaneKind, step: Copy, fixed: float, size: int, pushed: bool) -> Process:
    machine = world.machine
    during_lookup = False
    if machine.copies.strided == "kernel" and rank in world.full_kernels and strided(world.schedule, step):
        during_lookup = isinstance(world.schedule.problem, LookupProblem) and step.src.rank != step.dst.rank
        if not during_lookup:
            yield world.full_kernels[rank].next_free(world.env)
    yield world.env.timeout(ns(fixed))
    if step.src.rank == step.dst.rank:
        yield from world.access_memory(rank, 2 * size)
    else:
        if kind == "copy":
            path = world.network.copy_path(rank, step.src.rank, step.dst.rank, *_turn_limits(world, rank))
        else:
            sms = world.push_sms[rank] if pushed else world.free_sms[rank]
            path = world.sm_path(rank, sms, step.src.rank, step.dst.rank)
        yield from copy_during_lookup(world, rank, size, path) if during_lookup else world.move(rank, size, path)


def _turn_limits(world: World, rank: int) -> tuple[Resource, ...]:
    """Return the resource that limits copies of a rank to its peers in turns."""
    copies, rounds = world.machine.copies, world.copies_per_peer[rank]
    return (world.network.limit(("turned", rank), copies.turned_gbps(rounds)),) if copies.turning and rounds > 1 else ()


def strided(schedule: Schedule, step: Copy) -> bool:
    """Return whether the rows of a copy have gaps in memory, on either side."""

    def has_gaps(region: Region) -> bool:
        rows, cols = region.shape
        return rows > 1 and cols < schedule.buffer[region.buffer].cols[region.rank]

    return has_gaps(step.src) or has_gaps(step.dst)


def join_collective(world: World, rank: int, shard_bytes: int) -> Generator[simpy.Event, Any, Rendezvous]:
    """Wait until every rank has called its n-th collective, and return their rendezvous."""
    number = world.joined_collectives[rank] = world.joined_collectives.get(rank, 0) + 1
    rendezvous = world.rendezvous.setdefault(number, Rendezvous(world.env.event()))
    rendezvous.joined += 1
    rendezvous.shard_bytes = max(rendezvous.shard_bytes, shard_bytes)
    if rendezvous.joined == len(world.ranks):
        rendezvous.begun.succeed()
    yield rendezvous.begun
    return rendezvous


def collective(world: World, rank: int, step: Collective) -> Process:
    """Wait until all ranks have called their n-th collective, then run it for NCCL's time.

    If the rank has other lanes, the collective begins fork_us late. Measured: matmul_all_reduce by copy engines took 9 to 13 us
    longer on 2 GPUs than its reduce-scatter and its all-gather, and 12 to 22 us on 4 GPUs (planner_fit.jsonl).
    """
    if len(world.schedule.ranks[rank]) > 1 and world.machine.fork_us:
        yield world.env.timeout(ns(world.machine.fork_us))
    rendezvous = yield from join_collective(world, rank, collective_shard_bytes(world.schedule, step))
    world.transfers[rank].start(world.now)
    problem = world.schedule.problem
    busy_us = collective_us(world.machine, step.op, rendezvous.shard_bytes, problem.world_size, problem.nodes)
    yield world.env.timeout(ns(busy_us))
    world.transfers[rank].stop(world.now)
    yield from staging.pad_shards(world, step)
