"""Fused: a GEMM whose output goes where a Mapping says while it is computed: T3's track and trigger.

    units      | wave 0 | store ~> | wave 1 | store -> | wave 2 | store -> | ....
    link 0                | send ..... |  | send .... |          ^ tracker: local and incoming update are both in
    arrivals                 | .......... | update -> tracker ---|

A chunk under remote_map leaves with its stores; any other is written to memory here, and the tracker sends on what is ready,
`dma_tiles` tiles a command, in the order in which they became ready. A link sends one command at a time. Stores are posted:
units hand a wave's tiles over and go on, once those of the wave before are in memory or have left; that much the path holds.

The simulated GPU is one of N equal ones that do the same at the same time: what it sends arrives here, a latency later.
Without rotation the GPUs differ, so that all N are simulated, and what one sends arrives at another.

The mechanisms that a T3System can switch off act here as follows. Without `llc_bypass` a wave's local stores stay in the cache
until those of the next wave push them out. Without `tracker` a chunk is sent once all of its tiles are complete, and a flag
says that the last tile of a peer has arrived. The GEMM remains one kernel: a real one would have to be split into a kernel for
each chunk, whose last waves leave units idle, so what the tracker gains here is a lower bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
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


Queue = deque[tuple[Tiles, simpy.Event]]
"""Tiles that a link will send, and the events of their leaving."""


@dataclass
class FusedRun:
    """One run. gemm_ns: when the GEMM's units were done. events: in order; the last one's time is the end. receivers: the run
    that each link leads to; without any, what is sent arrives here."""

    memory: GpuMemory
    grid: Grid
    mapping: Mapping
    gemm_ns: int = 0
    events: list[Event] = field(default_factory=list)
    receivers: Sequence[FusedRun] = ()

    def __post_init__(self) -> None:
        self.env = self.memory.env
        self.system = self.memory.system
        self.chunks = Chunks(self.grid.tiles, self.grid.gemm.out_bytes, len(self.mapping.routes))
        self.tracker = Tracker(self.system, self.mapping)
        self._queues: dict[int, tuple[Queue, Queue]] = {}
        self._under_way: list[simpy.Event] = []
        self._in_cache: list[Tiles] = []
        self._complete = [0] * len(self.mapping.routes)

    @property
    def end_ns(self) -> int:
        """When the GEMM and all that it triggered were done."""
        return max(self.gemm_ns, self.events[-1].ns)

    def run(self) -> Process:
        """The GEMM; what it triggers goes on after it, until nothing is left to do."""
        yield from gemm.tracked(self.memory, self.grid, self._store, self._local_bytes)
        if self._in_cache:
            yield from self._write(self._in_cache, self.system.hbm.gbps)
        self.gemm_ns = int(self.env.now)

    def _note(self, what: str, tiles: Tiles, link: int | None = None) -> None:
        self.events.append(Event(int(self.env.now), what, tiles, link))

    def _store(self, wave: range) -> Process:
        """Hand a wave's tiles over: to memory here, or to links. The first wave's traffic sets the arbiter's threshold."""
        yield self.env.all_of(self._under_way)
        pieces = [Tiles(*piece) for piece in self.chunks.pieces(wave)]
        remote = [tiles for tiles in pieces if self.mapping.routes[tiles.position].remote]
        local = self._local(wave)
        self._under_way = [event for tiles in remote for event in self._send(tiles)]
        size = sum(self.chunks.size(tiles.low, tiles.high) for tiles in pieces)
        rate = gemm.store_gbps(self.system, len(wave))
        yield self.memory.flow("compute", size, lambda: rate, {})
        if not wave.start:
            self.memory.observe(self.memory.traffic["gemm_read"] + size, int(self.env.now))
        if not self.system.mechanisms.llc_bypass:
            self._in_cache, local = local, self._in_cache
        if local:
            self._under_way.append(self.env.process(self._write(local, rate)))

    def _local(self, wave: range) -> list[Tiles]:
        """What a wave stores into memory here."""
        pieces = [Tiles(*piece) for piece in self.chunks.pieces(wave)]
        return [tiles for tiles in pieces if not self.mapping.routes[tiles.position].remote]

    def _local_bytes(self, wave: range) -> int:
        return sum(self.chunks.size(tiles.low, tiles.high) for tiles in self._local(wave))

    def _write(self, local: list[Tiles], rate: float) -> Process:
        """Posted stores into memory here."""
        size = sum(self.chunks.size(tiles.low, tiles.high) for tiles in local)
        update = frozenset(["gemm_write"] if self.mapping.reduces else [])
        yield self.memory.flow("compute", size, lambda: rate, {"gemm_write": size}, update=update, posted=True)
        for tiles in local:
            self._note("stored", tiles)
        yield self.env.all_of([self.env.process(self._updated(tiles)) for tiles in local])

    def _updated(self, tiles: Tiles) -> Process:
        """Memory here has taken an update of these tiles; what is ready is sent on, or stays."""
        counted = self.tracker.update(tiles.position, tiles.low, tiles.high)
        self._ready(tiles.position, counted.ready)
        if counted.reads or counted.writes:
            yield from self._count_in_memory(counted.reads, counted.writes)
            self._ready(tiles.position, counted.ready_in_memory)

    def _count_in_memory(self, reads: int, writes: int) -> Process:
        """Counts that the tracker has no room for: the memory controller reads and writes them like data, in the stream of
        compute. Each channel reads one count at a time; the update that it belongs to waits for it."""
        system, memory = self.system, self.memory
        size, at_a_time = system.tracker.spill_bytes, min(reads, system.hbm.channels)
        read = memory.flow("compute", reads, lambda: at_a_time / memory.latency_ns(), {"tracker": reads * size})
        rate = system.hbm.gbps / size
        write = memory.flow("compute", writes, lambda: rate, {"tracker": writes * size}, posted=True)
        yield read & write

    def _ready(self, position: int, ranges: Iterable[tuple[int, int]]) -> None:
        """These tiles are complete. A command moves some of them; without a tracker the whole chunk is sent at once."""
        each, step = self.chunks.each, self.system.dma_tiles
        for low, high in ranges:
            if not self.system.mechanisms.tracker:
                self._complete[position] += high - low
                if self._complete[position] < each:
                    continue
                low, high = 0, each
            self._note("ready", Tiles(position, low, high))
            for at in range(low, high, step):
                self._send(Tiles(position, at, min(at + step, high)))

    def _send(self, tiles: Tiles) -> list[simpy.Event]:
        """Have tiles sent over every link of their route; the events say when they have left."""
        return [self._enqueue(tiles, link) for link in self.mapping.routes[tiles.position].links]

    def _enqueue(self, tiles: Tiles, link: int) -> simpy.Event:
        sent = self.env.event()
        idle = link not in self._queues
        stores, commands = self._queues.setdefault(link, (deque(), deque()))
        (stores if self.mapping.routes[tiles.position].remote else commands).append((tiles, sent))
        if idle:
            self.env.process(self._drain(link))
        return sent

    def _drain(self, link: int) -> Process:
        """Send what is queued for a link, one after the other, until nothing is. Stores go before commands, which wait in the
        copy engine."""
        stores, commands = self._queues[link]
        while stores or commands:
            tiles, sent = (stores or commands).popleft()
            yield self._transfer(tiles, link)
            sent.succeed()
            self._note("sent", tiles, link)
            self.env.process(self._arrive(tiles, link))
        del self._queues[link]

    def _transfer(self, tiles: Tiles, link: int) -> simpy.Event:
        """Over one link. A command reads memory here; what a peer sends meanwhile is written here. Where GPUs differ, what this
        one sends is written there."""
        size = self.chunks.size(tiles.low, tiles.high)
        read, write = (f"{self.mapping.traffic}_{direction}" for direction in ("read", "write"))
        reads = {} if self.mapping.routes[tiles.position].remote else {read: size}
        writes = {write: size}
        update = frozenset([write] if self.mapping.reduces else [])
        pace = self.system.link.gbps
        if not self.receivers:
            return self.memory.flow("communication", size, lambda: pace, reads | writes, update=update)
        there = self.receivers[link].memory
        sent = self.memory.flow("communication", size, lambda: pace, reads)
        return sent & there.flow("communication", size, lambda: pace, writes, update=update)

    def _arrive(self, tiles: Tiles, link: int) -> Process:
        yield self.env.timeout(self.system.link.latency_ns)
        lands = self.mapping.routes[tiles.position].lands
        self._note("arrived", tiles, link)
        if lands is not None:
            receiver = self.receivers[link] if self.receivers else self
            yield from receiver._updated(Tiles(lands, tiles.low, tiles.high))
