"""A Mapping says where each chunk of a GEMM's output goes. The terms are those of T3's address-space configuration.

A chunk under `remote_map` is in another GPU's memory: stores go there directly. Any other chunk is in local memory. Once its
tiles have received all updates, a preprogrammed DMA command (`dma_map`) sends it on, or it stays. The collectives differ only
in their mapping. The GEMM's main loop is the same for all.

    ring reduce-scatter      position 0: remote_map           1 .. N-2: 2 updates, dma_map       N-1: 2 updates, stays
    direct reduce-scatter    0 .. N-2: remote_map, its owner  N-1: N updates, stays
    all-to-all               0 .. N-2: 1 update, dma_map      N-1: stays
    all-gather               every chunk: 1 update, dma_map to all others

Source: T3, arXiv 2401.16677, section 4.4. All GPUs do the same at the same time, so whenever the simulated GPU sends
data over a link, the same amount arrives from a peer. `lands` says in which of its own chunks (None: in an untracked buffer).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from weft_studies.t3.grid import chunk_at, position_of

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

    reduces: whether arriving data is added. Otherwise it is stored."""

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
