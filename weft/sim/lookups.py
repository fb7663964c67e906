"""Lookups, simulated: bound by the memory that rows are gathered from, part after part.

Stores to a peer leave while later bags are gathered; a part's count is raised once its last store has landed.
"""

from __future__ import annotations

import simpy

from weft.schedule import Bags, Lookup
from weft.sim.cost import gather_us
from weft.sim.world import Process, World, ns
from weft.work import region_bytes


def lookup(world: World, rank: int, step: Lookup) -> Process:
    """Launch, then the parts in order; ends when all stores have landed. Without elements nothing is launched."""
    if not any(part.out.size for part in step.parts):
        return
    start = world.now
    yield world.env.timeout(ns(world.machine.launch_us))
    stores: list[simpy.Event] = []
    for part in step.parts:
        local = region_bytes(world.schedule, part.out) if part.out.rank == rank else 0
        busy = world.env.timeout(ns(gather_us(world.machine, world.schedule.problem, part.bags.size, local)))
        if part.out.rank != rank:
            stores.append(world.env.process(_store(world, rank, part, busy)))
        yield busy
        if part.out.rank == rank and part.count is not None:
            world.post(rank, part.count)
    world.kernels[rank] += world.now - start
    if stores:
        yield world.env.all_of(stores)


def _store(world: World, rank: int, part: Bags, busy: simpy.Event) -> Process:
    """The part's bags on their way, from its first on."""
    path = world.sm_path(rank, world.free_sms[rank], rank, part.out.rank)
    yield from world.move(rank, region_bytes(world.schedule, part.out), path)
    yield busy
    if part.count is not None:
        world.post(rank, part.count)
