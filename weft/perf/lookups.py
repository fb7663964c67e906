"""The simulation of embedding lookups. Their parts run one after the other, bound by the memory rate, which copies share.

A part that is stored at a peer takes at least as long as its transfer, because a kernel has room for few stores in flight. If
the gather takes longer, the stores delay it only by the machine's `stores.stall` of their time. A block waits until its stores
are acknowledged before it counts a part.

On some machines a kernel copies rows that are not contiguous. Such a copy to a peer runs concurrently with a lookup, whose
blocks of one warp leave room on the SMs. Both are then slower, unless the machine has `slow_lookups` false.
"""

from __future__ import annotations

from weft.core.schedule import Bags, Lookup
from weft.core.work import region_bytes
from weft.perf.network import Resource
from weft.perf.terms import gathered_bytes
from weft.perf.world import FullKernel, Process, World, ns


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
