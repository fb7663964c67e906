"""Lookups, simulated: bound by the memory that rows are gathered from, part after part, which copies beside them share.

A part that is stored at a peer takes as long as its bytes take on the way, if that is more: few stores of a kernel are under
way, and blocks wait for room. Else they are hidden but for the machine's `stores.stall` of their time. Before it counts a part,
a block waits until its stores are acknowledged.
"""

from __future__ import annotations

from weft.schedule import Bags, Lookup
from weft.sim.cost import gathered_bytes
from weft.sim.world import Filled, Process, World, ns
from weft.work import region_bytes


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
            world.post(rank, part.count)
    world.kernels[rank] += world.now - start
    ended.succeed()


def _part(world: World, rank: int, part: Bags) -> Process:
    size = region_bytes(world.schedule, part.out)
    read = gathered_bytes(world.schedule.problem, part.bags.size)
    if part.out.rank == rank:
        yield from world.local(rank, read + size)
        return
    sms = world.free_sms[rank]
    stored = world.env.process(world.move(rank, size, world.sm_path(rank, sms, rank, part.out.rank)))
    yield from world.local(rank, read)
    yield world.env.timeout(ns(world.machine.stores.stall * size / (world.machine.stores.rate(sms) * 1e3)))
    yield stored
    yield world.env.timeout(2 * world.network.latency_ns(rank, part.out.rank))
