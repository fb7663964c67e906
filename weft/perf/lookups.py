"""Lookups, simulated: bound by the memory that rows are gathered from, part after part, which copies beside them share.

A part that is stored at a peer takes as long as its bytes take on the way, if that is more: few stores of a kernel are under
way, and blocks wait for room. Else they are hidden but for the machine's `stores.stall` of their time. Before it counts a part,
a block waits until its stores are acknowledged.

Copies to peers of rows that do not lie together, which kernels make on some machines, run beside a lookup, whose blocks of one
warp leave room. They are slower then, and so is the lookup, unless the machine says `slow_lookups` false.
"""

from __future__ import annotations

from weft.core.schedule import Bags, Lookup
from weft.core.work import region_bytes
from weft.perf.network import Resource
from weft.perf.terms import gathered_bytes
from weft.perf.world import Filled, Process, World, ns


def lookup(world: World, rank: int, step: Lookup) -> Process:
    """Launch, then the parts in order; ends when all stores have landed. Without elements nothing is launched."""
    if not any(part.out.size for part in step.parts):
        return
    start = world.now
    ended = world.env.event()
    world.filled[rank] = Filled(ended)
    yield world.env.timeout(ns(world.machine.launch_us))
    for part in step.parts:
        yield from _part(world, rank, part)
        if part.count is not None:
            late = world.machine.slow_lookups and world.machine.copies.strided == "kernel" and part.out.rank == rank
            world.post(rank, part.count, after=world.env.timeout(ns(world.machine.kernels.lookup_copy_us)) if late else None)
    world.kernels[rank] += world.now - start
    ended.succeed()


def copied_beside(world: World, rank: int, size: int, path: tuple[Resource, ...]) -> Process:
    """Rows that a kernel copies over a path to a peer."""
    if not world.machine.slow_lookups:
        yield from world.move(rank, size, path)
        return
    kernels = world.machine.kernels
    limit = world.network.limit(("beside lookups", rank), kernels.lookup_copy_gbps)
    world.transfers[rank].start(world.now)
    yield world.network.transfer_alike(
        size, (*((each, 1) for each in (*path, limit)), (("hbm", rank), kernels.lookup_copy_bytes))
    )
    world.transfers[rank].stop(world.now)


def _part(world: World, rank: int, part: Bags) -> Process:
    size = region_bytes(world.schedule, part.out)
    read = gathered_bytes(world.schedule.problem, part.bags.size, world.machine)
    if part.out.rank == rank:
        yield from world.local(rank, read + size)
        return
    sms = world.free_sms[rank]
    stored = world.env.process(world.move(rank, size, world.sm_path(rank, sms, rank, part.out.rank)))
    yield from world.local(rank, read)
    yield world.env.timeout(ns(world.machine.stores.stall * size / (world.machine.stores.rate(sms) * 1e3)))
    yield stored
    yield world.env.timeout(2 * world.network.latency_ns(rank, part.out.rank))
