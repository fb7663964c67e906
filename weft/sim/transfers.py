"""Copies and collectives, simulated.

A lane of a copy engine runs its copies one after the other:          copy 0 -> p | copy 0 -> q | copy 1 -> p | ...
On a machine with several engines the chunks of a cut shard go to all peers at once, an engine a peer, as FiCCO's
communication does (arXiv 2512.10236), and those for one peer keep their order:

    engine of p   copy 0, signal | copy 1, signal | ...
    engine of q   copy 0, signal | copy 1, signal | ...

A whole shard (chunks=1) goes from peer to peer all the same, as PyTorch's asynchronous tensor parallelism sends it. On a
mesh that leaves all links but one idle.
"""

from __future__ import annotations

import simpy

from weft.schedule import Collective, Copy, LaneKind, Signal
from weft.sim.cost import collective_us, local_copy_us
from weft.sim.work import collective_shard_bytes, region_bytes
from weft.sim.world import Process, Recorder, Rendezvous, World, ns


def copy(world: World, rank: int, kind: LaneKind, step: Copy) -> Process:
    """One copy, by what its lane runs on: a copy engine, a kernel on all free SMs, or communication blocks."""
    machine = world.machine
    fixed = {"copy": machine.copies.copy_us, "compute": machine.launch_us, "blocks": 0.0}[kind]
    size = region_bytes(world.schedule, step.src)
    if step.src.rank == step.dst.rank:
        fixed += local_copy_us(machine, size)
    start = world.now
    yield world.env.timeout(ns(fixed))
    if step.src.rank != step.dst.rank:
        if kind == "copy":
            path = (("engine", rank), *world.network.path(step.src.rank, step.dst.rank))
        else:
            sms = machine.stores.sms if kind == "blocks" else world.free_sms[rank]
            path = world.sm_path(rank, sms, step.src.rank, step.dst.rank)
        yield from world.move(rank, size, path)
    if kind == "compute":
        world.kernels[rank] += world.now - start


def collective(world: World, rank: int, step: Collective) -> Process:
    """Wait for all ranks, then the vendor's time. The n-th collective of a rank meets the n-th of every other."""
    number = world.met[rank] = world.met.get(rank, 0) + 1
    meeting = world.meetings.setdefault(number, Rendezvous(world.env.event()))
    meeting.here += 1
    meeting.shard_bytes = max(meeting.shard_bytes, collective_shard_bytes(world.schedule, step))
    if meeting.here == len(world.schedule.ranks):
        meeting.begun.succeed()
    yield meeting.begun
    world.transfers[rank].start(world.now)
    yield world.env.timeout(ns(collective_us(world.machine, step.op, meeting.shard_bytes, len(world.schedule.ranks))))
    world.transfers[rank].stop(world.now)


class Spread:
    """A copy lane over several engines: a queue for each peer."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank
        self._engines = simpy.Resource(world.env, capacity=world.machine.copies.engines)
        self._last: dict[int, simpy.Event] = {}

    def copy(self, step: Copy, record: Recorder) -> None:
        """Queue a copy behind the earlier ones for its peer."""
        peer = step.dst.rank if step.dst.rank != self._rank else step.src.rank
        self._last[peer] = self._world.env.process(self._copy(step, self._last.get(peer), record))

    def _copy(self, step: Copy, before: simpy.Event | None, record: Recorder) -> Process:
        if before is not None and not before.processed:
            yield before
        with self._engines.request() as engine:
            yield engine
            start = self._world.now
            yield from copy(self._world, self._rank, "copy", step)
        record(step, start)

    def signal(self, step: Signal, record: Recorder) -> None:
        """Queue a signal behind the copies for its peer."""
        peer = step.flag.rank
        self._last[peer] = self._world.env.process(self._signal(step, self._last.get(peer), record))

    def _signal(self, step: Signal, before: simpy.Event | None, record: Recorder) -> Process:
        if before is not None and not before.processed:
            yield before
        start = self._world.now
        yield self._world.env.timeout(ns(self._world.machine.flag_us))
        self._world.post(self._rank, step.flag)
        record(step, start)

    def drain(self) -> Process:
        """Until all queues are empty."""
        waiting = [event for event in self._last.values() if not event.processed]
        if waiting:
            yield self._world.env.all_of(waiting)
