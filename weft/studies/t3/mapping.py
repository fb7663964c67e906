"""Mappings: where a GEMM's output goes, chunk by chunk, in the words that T3 gives the output's address space.

A chunk either is at another GPU (`remote_map`: stores go there as they are, nothing is written locally), or is here and,
once its tiles have had all their updates, is sent on by a command that was programmed beforehand (`dma_map`), or stays. Nothing
else distinguishes the collectives; the GEMM's main loop is the same for all.

    ring reduce-scatter      position 0: remote_map           1 .. N-2: 2 updates, dma_map       N-1: 2 updates, stays
    direct reduce-scatter    0 .. N-2: remote_map, its owner  N-1: N updates, stays
    all-to-all               0 .. N-2: 1 update, dma_map      N-1: stays
    all-gather               every chunk: 1 update, dma_map to all others

Source: T3, arXiv 2401.16677, section 4.4. All GPUs do the same at the same time, so what this one sends over a link is also
what arrives here over its counterpart; `lands` says in which of its own chunks (None: in a buffer that is not tracked).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from weft.studies.t3.grid import chunk_at, position_of

Collective = Literal["ring_reduce_scatter", "direct_reduce_scatter", "all_to_all", "all_gather"]


@dataclass(frozen=True, kw_only=True)
class ChunkRoute:
    """What becomes of one chunk. remote: its stores go over `links` and not to memory here. updates: that an element of it
    gets here before it is ready (0 if remote). links: over which it is sent, by their numbers; none: it stays. lands: the
    position of the chunk here that receives what a peer sends from its chunk of this position."""

    remote: bool = False
    updates: int = 0
    links: tuple[int, ...] = ()
    lands: int | None = None


@dataclass(frozen=True, kw_only=True)
class Mapping:
    """A fused collective: a ChunkRoute for every position. reduces: arrivals are updates, else plain writes."""

    name: Collective
    routes: tuple[ChunkRoute, ...]
    reduces: bool

    @property
    def traffic(self) -> str:
        """What the classes of its memory traffic begin with."""
        return "rs" if self.reduces else "moved"

    @property
    def links(self) -> int:
        """How many links a GPU sends over."""
        return len({link for route in self.routes for link in route.links})


def mapping(name: Collective, world_size: int) -> Mapping:
    """The routes of a collective over `world_size` GPUs. Raises ValueError for a name or a number that it cannot have."""
    if world_size < 2:
        raise ValueError(f"world_size is {world_size}; a collective needs at least 2")
    if name not in _ROUTES:
        raise ValueError(f"collective is {name!r}; T3 fuses {', '.join(_ROUTES)}")
    return Mapping(name=name, routes=_ROUTES[name](world_size), reduces=name.endswith("reduce_scatter"))


def unrotated(name: Collective, world_size: int, rank: int) -> Mapping:
    """The routes of one GPU where all GPUs produce chunk c at position c. Links have the numbers of the ranks they lead to.

    Positions differ in what becomes of them from rank to rank, so GPUs are not equal any more. Of a ring, chunk c starts at
    rank c + 1, whose stores leave at once, and every other rank waits for what comes from the rank before it.
    """
    routes = mapping(name, world_size).routes
    return Mapping(
        name=name,
        routes=tuple(_unrotated(name, routes, chunk, rank) for chunk in range(world_size)),
        reduces=name.endswith("reduce_scatter"),
    )


def _unrotated(name: Collective, routes: tuple[ChunkRoute, ...], chunk: int, rank: int) -> ChunkRoute:
    """What a rank does with a chunk is what it did with it at the position that rotation gives it; only links are renamed."""
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
    """Seen from rank 0: what it makes at a position, rank 1 makes at the one where it lands."""
    lands = [position_of(1, chunk_at(0, position, world_size), world_size) for position in range(world_size - 1)]
    first = ChunkRoute(remote=True, links=(0,), lands=lands[0])
    between = [ChunkRoute(updates=2, links=(0,), lands=position) for position in lands[1:]]
    return (first, *between, ChunkRoute(updates=2))


def _direct(world_size: int) -> tuple[ChunkRoute, ...]:
    """Seen from rank 0: a chunk goes to the rank that makes it last, which owns it."""
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
