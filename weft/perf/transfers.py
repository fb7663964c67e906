"""The simulation of what moves data: copies, collectives, messages between nodes, lookups, and the staging of cuBLAS and NCCL.

A copy lane runs its copies one after the other. The lanes of a rank share its copy engines: a copy waits until an engine is
free, then shares ports and links with all other transfers. On some machines a kernel copies rows that are not contiguous. It
waits for the SMs of the lookup or cuBLAS GEMM that runs on its rank. A copy to a peer is an exception: it can run during a
lookup, whose blocks of one warp leave room on the SMs. Both are then slower, unless the machine has `slow_lookups` false.

A message starts once both ends have begun, and shares their adapters with others:

    rank r, network                    rank p, network
    send 2 KiB to p ..............     (another step)
                     ..............    receive from r: both have begun
                     | transfer   |    | transfer   |        at max-min fair rates of both adapters

The parts of a lookup run one after the other, bound by the memory rate, which copies share. A part that is stored at a peer
takes at least as long as its transfer, because a kernel has room for few stores in flight. If the gather takes longer, the
stores delay it only by the machine's `stores.stall` of their time. A block waits until its stores are acknowledged before it
counts a part.

A cuBLAS matmul reads one contiguous matrix and writes one, and NCCL's collectives need shards of equal length. If a step has
other operands, the executor runs torch kernels before and after it, each with a launch and its traffic
(weft.runtime.arithmetic, weft.runtime.network). weft's own kernels need no such copies.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import simpy

from weft.core.problem import LookupProblem
from weft.core.schedule import Bags, Collective, Copy, Gemm, LaneKind, Lookup, Push, Region, Schedule, SendReceive, runs
from weft.core.work import collective_shard_bytes, region_bytes
from weft.perf.network import Resource
from weft.perf.terms import collective_us, gathered_bytes, padded_us, staged_us
from weft.perf.world import FullKernel, Message, Process, Rendezvous, World, ns


def stage_rows(world: World, step: Gemm) -> Process:
    """Copy the rows of a into one matrix by one kernel, and each run of the product to its place by a kernel of its own."""
    if not world.machine.stages or any(
        part.waits or part.adds or part.count or part.out.rank != part.a.rank for part in step.parts
    ):
        return  # one of weft's kernels
    rows, outs = [part.a for part in step.parts], [part.out for part in step.parts]
    us = staged_us(
        world.machine,
        rows=len(runs(rows)),
        row_bytes=_bytes(world, rows),
        outs=len(runs(outs)),
        out_bytes=_bytes(world, outs),
    )
    yield world.env.timeout(ns(us))


def pad_shards(world: World, step: Collective) -> Process:
    """Copy the shards of a collective so that they have equal lengths."""
    whole = step.dst if step.op == "all_gather" else step.src
    us = padded_us(world.machine, step.op, world.schedule.problem, region_bytes(world.schedule, whole))
    if us:
        yield world.env.timeout(ns(us))


def _bytes(world: World, regions: Sequence[Region]) -> int:
    return sum(region_bytes(world.schedule, region) for region in regions)


def lookup(world: World, rank: int, step: Lookup) -> Process:
    """Launch a lookup and run its parts in order, until all stores have landed. A lookup without elements launches nothing."""
    if not any(part.out.size for part in step.parts):
        return
    start = world.now
    ended = world.env.event()
    world.full_kernels[rank] = FullKernel(ended)
    yield world.env.timeout(ns(world.machine.launch_us))
    for part in step.parts:
        yield from _part(world, rank, part)
        if part.count is not None:
            late = world.machine.slow_lookups and world.machine.copies.strided == "kernel" and part.out.rank == rank
            world.post(rank, part.count, after=world.env.timeout(ns(world.machine.kernels.lookup_copy_us)) if late else None)
    world.kernel_ns[rank] += world.now - start
    ended.succeed()


def copy_during_lookup(world: World, rank: int, size: int, path: tuple[Resource, ...]) -> Process:
    """Copy rows to a peer by a kernel, concurrently with a lookup."""
    if not world.machine.slow_lookups:
        yield from world.move(rank, size, path)
        return
    kernels = world.machine.kernels
    limit = world.network.limit(("copies during lookups", rank), kernels.lookup_copy_gbps)
    world.transfers[rank].start(world.now)
    yield world.network.transfer_load(
        size, (*((each, 1) for each in (*path, limit)), (("hbm", rank), kernels.lookup_copy_bytes))
    )
    world.transfers[rank].stop(world.now)


def _part(world: World, rank: int, part: Bags) -> Process:
    size = region_bytes(world.schedule, part.out)
    read = gathered_bytes(world.schedule.problem, part.bags.size, world.machine)
    if part.out.rank == rank:
        yield from world.access_memory(rank, read + size)
        return
    sms = world.free_sms[rank]
    stored = world.env.process(world.move(rank, size, world.sm_path(rank, sms, rank, part.out.rank)))
    yield from world.access_memory(rank, read)
    yield world.env.timeout(ns(world.machine.stores.stall * size / (world.machine.stores.rate(sms) * 1e3)))
    yield stored
    yield world.env.timeout(2 * world.network.latency_ns(rank, part.out.rank))


def send_receive(world: World, rank: int, step: SendReceive) -> Process:
    """Pay the step's fixed cost, then exchange all of its messages concurrently."""
    network = world.machine.network
    assert network is not None, "the machine of several nodes has a network"
    yield world.env.timeout(ns(network.step_us))
    waiting = []
    for send in step.sends:
        message = _next(world, (rank, send.to), sent=True)
        message.sent.succeed()
        world.env.process(_carry(world, rank, send.to, message, region_bytes(world.schedule, send.src)))
        waiting.append(message.arrived)
    for receive in step.receives:
        message = _next(world, (receive.source, rank), sent=False)
        message.awaited.succeed()
        waiting.append(message.arrived)
    yield world.env.all_of(waiting)


def _next(world: World, pair: tuple[int, int], *, sent: bool) -> Message:
    """Return the next message of a pair at this end."""
    pair = world.representative_pair(*pair)
    number = world.begun_messages[(*pair, sent)]
    world.begun_messages[(*pair, sent)] += 1
    known = world.messages.setdefault(pair, [])
    if number == len(known):
        known.append(Message(*(simpy.Event(world.env) for _ in range(3))))
    return known[number]


def _carry(world: World, src: int, dst: int, message: Message, size: int) -> Process:
    yield world.env.all_of([message.sent, message.awaited])
    network = world.machine.network
    assert network is not None
    path = tuple(world.network.limit((adapter, rank), network.gbps) for adapter, rank in (("nic out", src), ("nic in", dst)))
    yield from world.move(src, size, path)
    yield world.env.timeout(ns(network.latency_us))
    message.arrived.succeed()


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
    yield from pad_shards(world, step)
