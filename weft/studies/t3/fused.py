"""Fused: a GEMM whose output goes where a Mapping says while it is computed: T3's track and trigger.

    units      | wave 0 | store ~> | wave 1 | store -> | wave 2 | store -> | ....
    link 0                | send ..... |  | send .... |          ^ tracker: local and incoming update are both in
    arrivals                 | .......... | update -> tracker ---|

A chunk under remote_map leaves with its stores; any other is written to memory here, and the tracker sends on what is ready,
`dma_tiles` tiles a command, in the order in which they became ready. A link sends one command at a time. Stores are posted:
units hand a wave's tiles over and go on, once those of the wave before are in memory or have left; that much the path holds.

The simulated GPU is one of N equal ones that do the same at the same time: what it sends arrives here, a latency later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import simpy

from weft.studies.t3 import gemm
from weft.studies.t3.gemm import Process
from weft.studies.t3.grid import Chunks, Grid
from weft.studies.t3.mapping import Mapping
from weft.studies.t3.memory import GpuMemory
from weft.studies.t3.tracker import Tracker


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles low .. high - 1 of the chunk at a position."""

    position: int
    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.position}[{self.low}:{self.high}]"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to tiles: stored, ready, sent or arrived. link: of what was sent or arrived."""

    ns: int
    what: str
    tiles: Tiles
    link: int | None = None

    def __str__(self) -> str:
        return f"{self.ns} {self.what} {self.tiles}" + ("" if self.link is None else f" link {self.link}")


@dataclass
class FusedRun:
    """One run. gemm_ns: when the GEMM's units were done. events: in order; the last one's time is the end."""

    memory: GpuMemory
    grid: Grid
    mapping: Mapping
    gemm_ns: int = 0
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.env = self.memory.env
        self.system = self.memory.system
        self.chunks = Chunks(self.grid.tiles, self.grid.gemm.out_bytes, len(self.mapping.routes))
        self.tracker = Tracker(self.system, self.mapping)
        self._queues: dict[int, deque[tuple[Tiles, simpy.Event]]] = {}
        self._under_way: list[simpy.Event] = []

    def run(self) -> Process:
        """The GEMM; what it triggers goes on after it, until nothing is left to do."""
        yield from gemm.bypassing(self.memory, self.grid, self._store)
        self.gemm_ns = int(self.env.now)

    def _note(self, what: str, tiles: Tiles, link: int | None = None) -> None:
        self.events.append(Event(int(self.env.now), what, tiles, link))

    def _store(self, wave: range) -> Process:
        """Hand a wave's tiles over: to memory here, or to links. The first wave's traffic sets the arbiter's threshold."""
        yield self.env.all_of(self._under_way)
        pieces = [Tiles(*piece) for piece in self.chunks.pieces(wave)]
        remote = [tiles for tiles in pieces if self.mapping.routes[tiles.position].remote]
        local = [tiles for tiles in pieces if tiles not in remote]
        self._under_way = [event for tiles in remote for event in self._send(tiles)]
        size = sum(self.chunks.size(tiles.low, tiles.high) for tiles in pieces)
        rate = gemm.store_gbps(self.system, len(wave))
        yield self.memory.flow("compute", size, lambda: rate, {})
        if not wave.start:
            self.memory.observe(self.memory.traffic["gemm_read"] + size, int(self.env.now))
        if local:
            self._under_way.append(self.env.process(self._write(local, rate)))

    def _write(self, local: list[Tiles], rate: float) -> Process:
        """Posted stores into memory here."""
        size = sum(self.chunks.size(tiles.low, tiles.high) for tiles in local)
        update = frozenset(["gemm_write"] if self.mapping.reduces else [])
        yield self.memory.flow("compute", size, lambda: rate, {"gemm_write": size}, update=update, posted=True)
        for tiles in local:
            self._note("stored", tiles)
            self._updated(tiles)

    def _updated(self, tiles: Tiles) -> None:
        """Memory here has taken an update of these tiles; what is ready is sent on, or stays."""
        step = self.system.dma_tiles
        for low, high in self.tracker.update(tiles.position, tiles.low, tiles.high):
            self._note("ready", Tiles(tiles.position, low, high))
            for at in range(low, high, step):
                self._send(Tiles(tiles.position, at, min(at + step, high)))

    def _send(self, tiles: Tiles) -> list[simpy.Event]:
        """Have tiles sent over every link of their route; the events say when they have left."""
        return [self._enqueue(tiles, link) for link in self.mapping.routes[tiles.position].links]

    def _enqueue(self, tiles: Tiles, link: int) -> simpy.Event:
        sent = self.env.event()
        if link in self._queues:
            self._queues[link].append((tiles, sent))
        else:
            self._queues[link] = deque([(tiles, sent)])
            self.env.process(self._drain(link))
        return sent

    def _drain(self, link: int) -> Process:
        """Send what is queued for a link, one after the other, until nothing is."""
        queue = self._queues[link]
        while queue:
            tiles, sent = queue.popleft()
            yield self._transfer(tiles)
            sent.succeed()
            self._note("sent", tiles, link)
            self.env.process(self._arrive(tiles, link))
        del self._queues[link]

    def _transfer(self, tiles: Tiles) -> simpy.Event:
        """Over one link. A command reads memory here; what a peer sends meanwhile is written here."""
        size = self.chunks.size(tiles.low, tiles.high)
        read, write = (f"{self.mapping.traffic}_{way}" for way in ("read", "write"))
        traffic = {write: size} if self.mapping.routes[tiles.position].remote else {read: size, write: size}
        update = frozenset([write] if self.mapping.reduces else [])
        pace = self.system.link.gbps
        return self.memory.flow("communication", size, lambda: pace, traffic, update=update)

    def _arrive(self, tiles: Tiles, link: int) -> Process:
        yield self.env.timeout(self.system.link.latency_ns)
        lands = self.mapping.routes[tiles.position].lands
        self._note("arrived", tiles, link)
        if lands is not None:
            self._updated(Tiles(lands, tiles.low, tiles.high))
