"""A FusedRun simulates T3's track and trigger: a GEMM whose output is sent as its Mapping says while the GEMM runs.

    units      | wave 0 | store ~> | wave 1 | store -> | wave 2 | store -> | ....
    link 0                | send ..... |  | send .... |          ^ tracker: local and incoming update are both in
    arrivals                 | .......... | update -> tracker ---|

Stores to a chunk under remote_map go to the peer. Any other chunk is written to local memory, and the tracker sends the tiles
that are ready, `dma_tiles` per command, in the order in which they became ready. A link sends one command at a time. Stores are
posted: the units hand over a wave's tiles and continue, as soon as all tiles of the wave before are in memory or sent.

The simulated GPU is one of N equal ones that do the same at the same time, so the data that it sends also arrives at itself,
one latency later. Without rotation the GPUs differ, so all N are simulated and data arrives at the actual receiver.

The mechanisms that a T3System can switch off act here as follows. Without `llc_bypass` a wave's local stores stay in the cache
until those of the next wave push them out. Without `tracker` a chunk is sent once all of its tiles are complete, and a flag
says that the last tile of a peer has arrived. The GEMM remains one kernel. A real GEMM would have to be split into one kernel
per chunk, whose last waves leave units idle, so the simulated gain of the tracker is a lower bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import simpy

from weft_studies.t3 import gemm
from weft_studies.t3.gemm import Process
from weft_studies.t3.grid import Chunks, Grid
from weft_studies.t3.mapping import Mapping
from weft_studies.t3.memory import GpuMemory
from weft_studies.t3.tracker import Tracker


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles are the tiles low .. high - 1 of the chunk at a position."""

    position: int
    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.position}[{self.low}:{self.high}]"


@dataclass(frozen=True, slots=True)
class Event:
    """Event records that tiles were stored, ready, sent or arrived. `link` is the link of tiles that were sent or arrived."""

    ns: int
    what: str
    tiles: Tiles
    link: int | None = None

    def __str__(self) -> str:
        return f"{self.ns} {self.what} {self.tiles}" + ("" if self.link is None else f" link {self.link}")


Queue = deque[tuple[Tiles, simpy.Event]]
"""The tiles that a link will send, each with the event that says when they have been sent."""


@dataclass
class FusedRun:
    """FusedRun simulates one GPU.

    gemm_ns: when the units finished the GEMM.
    events: all events in order of time.
    receivers: for each link, the run of the receiver. If empty, all that is sent arrives at this GPU."""

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
        """The time at which the GEMM and all transfers that it triggered were done."""
        return max(self.gemm_ns, self.events[-1].ns)

    def run(self) -> Process:
        """Simulate the GEMM. The transfers that it triggers may continue after it."""
        yield from gemm.tracked(self.memory, self.grid, self._store, self._local_bytes)
        if self._in_cache:
            yield from self._write(self._in_cache, self.system.hbm.gbps)
        self.gemm_ns = int(self.env.now)

    def _note(self, what: str, tiles: Tiles, link: int | None = None) -> None:
        self.events.append(Event(int(self.env.now), what, tiles, link))

    def _store(self, wave: range) -> Process:
        """Hand a wave's tiles over to local memory or to links. The first wave's traffic sets the arbiter's threshold."""
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
        """Return the tiles that a wave stores into local memory."""
        pieces = [Tiles(*piece) for piece in self.chunks.pieces(wave)]
        return [tiles for tiles in pieces if not self.mapping.routes[tiles.position].remote]

    def _local_bytes(self, wave: range) -> int:
        return sum(self.chunks.size(tiles.low, tiles.high) for tiles in self._local(wave))

    def _write(self, local: list[Tiles], rate: float) -> Process:
        """Simulate posted stores into local memory."""
        size = sum(self.chunks.size(tiles.low, tiles.high) for tiles in local)
        update = frozenset(["gemm_write"] if self.mapping.reduces else [])
        yield self.memory.flow("compute", size, lambda: rate, {"gemm_write": size}, update=update, posted=True)
        for tiles in local:
            self._note("stored", tiles)
        yield self.env.all_of([self.env.process(self._updated(tiles)) for tiles in local])

    def _updated(self, tiles: Tiles) -> Process:
        """Count an update of these tiles in local memory, and handle the tiles that are ready."""
        counted = self.tracker.update(tiles.position, tiles.low, tiles.high)
        self._ready(tiles.position, counted.ready)
        if counted.reads or counted.writes:
            yield from self._count_in_memory(counted.reads, counted.writes)
            self._ready(tiles.position, counted.ready_in_memory)

    def _count_in_memory(self, reads: int, writes: int) -> Process:
        """Simulate the memory traffic of counts for which the tracker has no room. It belongs to the compute stream.

        Each channel reads one count at a time, and the update waits for its count."""
        system, memory = self.system, self.memory
        size, at_a_time = system.tracker.spill_bytes, min(reads, system.hbm.channels)
        read = memory.flow("compute", reads, lambda: at_a_time / memory.latency_ns(), {"tracker": reads * size})
        rate = system.hbm.gbps / size
        write = memory.flow("compute", writes, lambda: rate, {"tracker": writes * size}, posted=True)
        yield read & write

    def _ready(self, position: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Send complete tiles, several per command. Without a tracker, the whole chunk is sent once all of it is complete."""
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
        """Queue tiles on every link of their route. Returns the events that say when they have been sent."""
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
        """Send the queued tiles of a link one after the other. Stores go before commands, which wait in the copy engine."""
        stores, commands = self._queues[link]
        while stores or commands:
            tiles, sent = (stores or commands).popleft()
            yield self._transfer(tiles, link)
            sent.succeed()
            self._note("sent", tiles, link)
            self.env.process(self._arrive(tiles, link))
        del self._queues[link]

    def _transfer(self, tiles: Tiles, link: int) -> simpy.Event:
        """Start a transfer over one link. A command also reads local memory.

        The data is written to the receiver's memory, which is this GPU's memory if this GPU represents all."""
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
