"""Sends: messages over a Fabric, each of which waits for others to have arrived. A collective is a tuple of them.

Messages that cross a link at the same time share it, max-min fair (weft.perf.fluid). A message streams over all links of its
path at once; it has arrived when its last byte is through and the delays of the path have passed. Time is whole nanoseconds.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from weft.perf.fluid import Fluid, Resource
from weft.studies.fabric.topology import Fabric


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """`size` bytes from rank to rank. chunks: which they are, for those who check what arrives. after: the positions of
    earlier sends that must have arrived before."""

    src: int
    dst: int
    size: int
    chunks: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


@dataclass
class _Links(Fluid):
    """A fabric's links as a fluid."""

    fabric: Fabric

    def capacity(self, resource: Resource, flows: int) -> float:
        """See Fluid."""
        return self.fabric.rate(resource)


def deliver(fabric: Fabric, sends: Sequence[Send]) -> tuple[int, ...]:
    """When each send has arrived, in ns from the start of all.

    Raises ValueError for ranks that the fabric has not, a size below zero, or a send that waits for itself or a later one.
    """
    env = simpy.Environment()
    links = _Links(env, fabric)
    paths = [fabric.path(send.src, send.dst) for send in sends]
    for number, send in enumerate(sends):
        if send.size < 0:
            raise ValueError(f"size of send {number} is {send.size}; it must be zero or more")
        if any(not 0 <= earlier < number for earlier in send.after):
            raise ValueError(f"after of send {number} is {send.after}; it may name sends 0 to {number - 1}")
    arrivals = [0] * len(sends)
    done: list[simpy.Event] = []

    def carry(number: int) -> Generator[simpy.Event, Any, None]:
        yield env.all_of([done[earlier] for earlier in sends[number].after])
        yield links.transfer(sends[number].size, paths[number])
        yield env.timeout(sum(map(fabric.delay_ns, paths[number])))
        arrivals[number] = int(env.now)

    for number in range(len(sends)):
        done.append(env.process(carry(number)))
    env.run()
    return tuple(arrivals)
