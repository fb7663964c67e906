"""The simulation of sends and receives. A message starts once both ends have begun, and shares their adapters with others.

rank r, network                    rank p, network
send 2 KiB to p ..............     (another step)
                 ..............    receive from r: both have begun
                 | transfer   |    | transfer   |        at max-min fair rates of both adapters
"""

from __future__ import annotations

import simpy

from weft.core.schedule import SendReceive
from weft.core.work import region_bytes
from weft.perf.world import Message, Process, World, ns


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
