"""T3's track and trigger: a GEMM whose output is sent while it runs, as its Mapping says.

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import simpy

from weft_studies.t3 import kernels
from weft_studies.t3.kernels import Chunks, Grid, Process, chunk_at, position_of
from weft_studies.t3.memory import GpuMemory
from weft_studies.t3.system import T3System

Collective = Literal["ring_reduce_scatter", "direct_reduce_scatter", "all_to_all", "all_gather"]


@dataclass(frozen=True, kw_only=True)
class ChunkRoute:
    """ChunkRoute says where one chunk goes.

    remote: whether its stores go over `links` instead of to local memory.
    updates: the number of updates that each element receives locally before it is ready. 0 if remote.
    links: the numbers of the links over which it is sent. Empty if it stays.
    lands: the position of the local chunk that receives the data of a peer's chunk at this position."""

    remote: bool = False
    updates: int = 0
    links: tuple[int, ...] = ()
    lands: int | None = None


@dataclass(frozen=True, kw_only=True)
class Mapping:
    """Mapping is a fused collective. It has a ChunkRoute for every position.

    The terms are those of T3's address-space configuration. A chunk under `remote_map` is in another GPU's memory: stores go
    there directly. Any other chunk is in local memory. Once its tiles have received all updates, a preprogrammed DMA command
    (`dma_map`) sends it on, or it stays. The collectives differ only in their mapping. The GEMM's main loop is the same for
    all.

        ring reduce-scatter      position 0: remote_map           1 .. N-2: 2 updates, dma_map       N-1: 2 updates, stays
        direct reduce-scatter    0 .. N-2: remote_map, its owner  N-1: N updates, stays
        all-to-all               0 .. N-2: 1 update, dma_map      N-1: stays
        all-gather               every chunk: 1 update, dma_map to all others

    Source: T3, arXiv 2401.16677, section 4.4. All GPUs do the same at the same time, so whenever the simulated GPU sends data
    over a link, the same amount arrives from a peer. `lands` says in which of its own chunks (None: in an untracked buffer).

    reduces: whether arriving data is added. Otherwise it is stored.
    """

    name: Collective
    routes: tuple[ChunkRoute, ...]
    reduces: bool

    @property
    def traffic(self) -> str:
        """The prefix of its classes of memory traffic."""
        return "rs" if self.reduces else "moved"

    @property
    def links(self) -> int:
        """The number of links over which a GPU sends."""
        return len({link for route in self.routes for link in route.links})


def mapping(name: Collective, world_size: int) -> Mapping:
    """Return the mapping of a collective over `world_size` GPUs. Raises ValueError for an unknown name or too few GPUs."""
    if world_size < 2:
        raise ValueError(f"world_size is {world_size}; a collective needs at least 2")
    if name not in _ROUTES:
        raise ValueError(f"collective is {name!r}; T3 fuses {', '.join(_ROUTES)}")
    return Mapping(name=name, routes=_ROUTES[name](world_size), reduces=name.endswith("reduce_scatter"))


def unrotated(name: Collective, world_size: int, rank: int) -> Mapping:
    """Return the mapping of one GPU if all GPUs produce chunk c at position c. A link has the number of the peer's rank.

    The routes of a position then differ between ranks. In a ring, chunk c starts at rank c + 1, whose stores leave at once,
    and every other rank waits for the data of the rank before it.
    """
    routes = mapping(name, world_size).routes
    return Mapping(
        name=name,
        routes=tuple(_unrotated(name, routes, chunk, rank) for chunk in range(world_size)),
        reduces=name.endswith("reduce_scatter"),
    )


def _unrotated(name: Collective, routes: tuple[ChunkRoute, ...], chunk: int, rank: int) -> ChunkRoute:
    """Return the route that the chunk has with rotation, with links renumbered by rank."""
    world_size = len(routes)
    route = routes[position_of(rank, chunk, world_size)]
    if name == "all_gather":
        others = [peer for peer in range(world_size) if peer != rank]
        return replace(route, links=tuple(others))
    peer = (rank + 1) % world_size if name == "ring_reduce_scatter" else chunk
    return replace(
        route,
        links=(peer,) if route.links else (),
        lands=None if route.lands is None else chunk,
    )


def _ring(world_size: int) -> tuple[ChunkRoute, ...]:
    """Return the routes of rank 0. A chunk lands at the position at which rank 1 produces the same chunk."""
    lands = [position_of(1, chunk_at(0, position, world_size), world_size) for position in range(world_size - 1)]
    first = ChunkRoute(remote=True, links=(0,), lands=lands[0])
    between = [ChunkRoute(updates=2, links=(0,), lands=position) for position in lands[1:]]
    return (first, *between, ChunkRoute(updates=2))


def _direct(world_size: int) -> tuple[ChunkRoute, ...]:
    """Return the routes of rank 0. A chunk goes to its owner, which is the rank that produces it last."""
    owners = [chunk_at(0, position, world_size) for position in range(world_size - 1)]
    lands = [position_of(owner, owner, world_size) for owner in owners]
    remote = [ChunkRoute(remote=True, links=(link,), lands=position) for link, position in enumerate(lands)]
    return (*remote, ChunkRoute(updates=world_size))


def _all_to_all(world_size: int) -> tuple[ChunkRoute, ...]:
    return (*(ChunkRoute(updates=1, links=(link,)) for link in range(world_size - 1)), ChunkRoute(updates=1))


def _all_gather(world_size: int) -> tuple[ChunkRoute, ...]:
    return (ChunkRoute(updates=1, links=tuple(range(world_size - 1))),) * world_size


_ROUTES = {
    "ring_reduce_scatter": _ring,
    "direct_reduce_scatter": _direct,
    "all_to_all": _all_to_all,
    "all_gather": _all_gather,
}


class Counted(NamedTuple):
    """The result of one update.

    ready: ranges of tiles that are complete now.
    ready_in_memory: ranges of tiles that are complete after their counts have been read from memory.
    reads, writes: the numbers of counts that are read from memory, and written there.
    """

    ready: list[tuple[int, int]]
    ready_in_memory: list[tuple[int, int]]
    reads: int
    writes: int


@dataclass
class Tracker:
    """The tracker of one GPU. It keeps one count for each (position of the chunk, tile of it), because the wavefronts of a tile
    store together.

    An entry lives from a tile's first update to its last. It counts updated elements: a wavefront's tile of E elements that
    each get u updates is complete at E * u. The hardware has a fixed number of entries.

    If the first update of a tile finds no free entry, the tile is counted in memory (it is spilled). Its count is written
    there, is read at its next update, and is written again unless that was the last one. These accesses go through the memory
    controller and take memory time. An update waits until its count has been read. So its store, or the command that it
    triggers, is late by the memory's latency. Older tiles keep their entries, because tiles are completed in the order in which
    they are first updated.

    The alternative would be to stall the update until an entry is free, but that deadlocks. In a ring, the peer's first chunk
    is updated here before this GPU's second chunk, so all tiles of the peer's chunk need entries first. This GPU's GEMM would
    complete them, but its stores wait behind the stalled ones on the same links. In each of the 16 sub-layers that most figures
    show, a chunk has more wavefront tiles (532 to 1,536) than the tracker has entries.

    Source: T3, arXiv 2401.16677, section 4.2.1: 256 entries, about 19 KB, next to the memory controller, off the critical path.
    The paper says nothing about a full tracker, so the spill is assumed. 19 KB are 76 bytes for an entry, so an entry may hold
    the counts of several wavefronts. If an entry holds four, set the number of entries to 1,024 here.

    live: wavefront tiles that are being counted, including spilled ones.
    most: the largest value of `live` so far.
    spilled: wavefront tiles that were counted in memory so far.
    """

    system: T3System
    mapping: Mapping
    live: int = 0
    most: int = 0
    spilled: int = 0
    _counts: dict[tuple[int, int], int] = field(default_factory=dict)
    _outside: set[tuple[int, int]] = field(default_factory=set)

    @property
    def elements(self) -> int:
        tile = self.system.tile
        return tile.rows * tile.cols // tile.wavefronts

    def threshold(self, position: int) -> int:
        """Return the number of element updates after which a wavefront's tile of this chunk is complete."""
        return self.elements * self.mapping.routes[position].updates

    def update(self, position: int, low: int, high: int) -> Counted:
        """Count one update of each element of the tiles low .. high - 1 of a chunk."""
        threshold, wavefronts, elements = self.threshold(position), self.system.tile.wavefronts, self.elements
        ready: tuple[list[int], list[int]] = ([], [])
        reads = writes = 0
        for tile in range(low, high):
            key = (position, tile)
            first = key not in self._counts
            if first:
                self._allocate(key)
            outside = key in self._outside
            self._counts[key] += elements
            complete = self._counts[key] == threshold
            if outside:
                reads += 0 if first else wavefronts
                writes += 0 if complete else wavefronts
            if complete:
                ready[outside].append(tile)
                self._drop(key)
        return Counted(list(_ranges(ready[0])), list(_ranges(ready[1])), reads, writes)

    def _allocate(self, tile: tuple[int, int]) -> None:
        self._counts[tile] = 0
        wavefronts = self.system.tile.wavefronts
        self.live += wavefronts
        self.most = max(self.most, self.live)
        held = self.live - wavefronts * len(self._outside)
        if self.system.mechanisms.tracker and held > self.system.tracker.entries:
            self._outside.add(tile)
            self.spilled += wavefronts

    def _drop(self, tile: tuple[int, int]) -> None:
        del self._counts[tile]
        self._outside.discard(tile)
        self.live -= self.system.tile.wavefronts


def _ranges(tiles: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges (start, end) that rising numbers form.

    >>> list(_ranges([1, 2, 3, 7]))
    [(1, 4), (7, 8)]
    """
    start = 0
    for i, tile in enumerate(tiles):
        if i + 1 == len(tiles) or tiles[i + 1] != tile + 1:
            yield tiles[start], tile + 1
            start = i + 1


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
        yield from kernels.tracked(self.memory, self.grid, self._store, self._local_bytes)
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
        rate = kernels.store_gbps(self.system, len(wave))
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
