"""Collectives as sends. `size` is of a chunk, in bytes: what a rank brings to an all-gather or owns after a reduce-scatter, and
what it has for each other rank of an all-to-all. With N ranks, and links of rate b and latency L:

| collective | sends of a rank | time, alone on its fabric |
| --- | --- | --- |
| ring all-gather, reduce-scatter | N - 1, each to the next rank | (N - 1) (size / b + L) on a ring |
| direct all-gather, all-to-all | N - 1 at once | size / b + L on a mesh; (N - 1) size / b + L on a switch |
| torus all-gather | a ring in each dimension, of what the ones before have gathered | the sum of (d - 1) (gathered / b + L) |
| doubling all-gather | log2 N, each twice the one before, to ranks 1, 2, 4, .. away | (N - 1) size / b + log2 N L on a switch |
| hosts all-gather | rings between hosts, then direct within each | both in turn |

Sources: Thakur et al. 2005 (ring, doubling); Chan et al. 2007 (one dimension after the other).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.studies.fabric.sends import Send

Part = tuple[int, ...]
"""Numbers of chunks that travel together."""
Waits = tuple[int, ...]
"""Positions of sends that something waits for."""


def ring_all_gather(order: Sequence[int], size: int) -> tuple[Send, ...]:
    """Each rank of `order` passes on, to the one after it, first its own chunk and then what it got. A chunk has its rank's
    number."""
    made = _Sends()
    held: dict[int, list[Part]] = {rank: [(rank,)] for rank in order}
    _ring(made, order, held, size, dict.fromkeys(order, ()))
    return made.sends


def ring_reduce_scatter(order: Sequence[int], size: int) -> tuple[Send, ...]:
    """Each rank of `order` passes on the sum of what it got and its own, for the chunk that the one after it adds to.

    In the end a rank owns the chunk of its own number.
    """
    ranks = _checked(order)
    made = _Sends()
    last: dict[int, Waits] = dict.fromkeys(ranks, ())
    for step in range(len(ranks) - 1):
        arrived: dict[int, Waits] = {}
        for place, rank in enumerate(ranks):
            after = ranks[(place + 1) % len(ranks)]
            chunk = ranks[(place - step - 1) % len(ranks)]
            arrived[after] = (made.add(rank, after, size, (chunk,), last[rank]),)
        last = arrived
    return made.sends


def direct_all_gather(world_size: int, size: int) -> tuple[Send, ...]:
    """Each rank sends its chunk to all others at once."""
    made = _Sends()
    for src in _checked(range(world_size)):
        for away in range(1, world_size):
            made.add(src, (src + away) % world_size, size, (src,), ())
    return made.sends


def all_to_all(world_size: int, size: int) -> tuple[Send, ...]:
    """Each rank sends each other one its chunk, all at once. The chunk from s to d has number s * world_size + d."""
    made = _Sends()
    for src in _checked(range(world_size)):
        for away in range(1, world_size):
            dst = (src + away) % world_size
            made.add(src, dst, size, (src * world_size + dst,), ())
    return made.sends


def torus_all_gather(dims: Sequence[int], size: int) -> tuple[Send, ...]:
    """Along one dimension after the other, in rings whose chunks are all that the dimensions before have gathered."""
    world_size = math.prod(dims)
    made = _Sends()
    own: dict[int, Part] = {rank: (rank,) for rank in _checked(range(world_size))}
    ready: dict[int, Waits] = dict.fromkeys(range(world_size), ())
    stride = 1
    for length in dims:
        arrived: dict[int, Waits] = {}
        gathered: dict[int, Part] = {}
        for first in (rank for rank in range(world_size) if rank // stride % length == 0):
            order = [first + step * stride for step in range(length)]
            held = {rank: [own[rank]] for rank in order}
            arrived |= _ring(made, order, held, size, ready)
            gathered |= {rank: tuple(sorted(chunk for part in held[rank] for chunk in part)) for rank in order}
        own, ready = gathered, {rank: ready[rank] + arrived[rank] for rank in range(world_size)}
        stride *= length
    return made.sends


def doubling_all_gather(world_size: int, size: int) -> tuple[Send, ...]:
    """Pairs exchange all that they have, at distances 1, 2, 4, .. Raises ValueError unless world_size is a power of two."""
    if world_size < 2 or world_size & (world_size - 1):
        raise ValueError(f"world_size is {world_size}; doubling needs a power of two, at least 2")
    made = _Sends()
    held: dict[int, Part] = {rank: (rank,) for rank in range(world_size)}
    ready: dict[int, Waits] = dict.fromkeys(range(world_size), ())
    away = 1
    while away < world_size:
        sent = {rank: made.add(rank, rank ^ away, size, held[rank], ready[rank]) for rank in range(world_size)}
        held = {rank: held[rank] + held[rank ^ away] for rank in range(world_size)}
        ready = {rank: (*ready[rank], sent[rank ^ away]) for rank in range(world_size)}
        away *= 2
    return made.sends


def hosts_all_gather(hosts: int, each: int, size: int) -> tuple[Send, ...]:
    """Rings between the equal ranks of all hosts of `each` ranks; then each rank sends its host's others all that it has."""
    made = _Sends()
    held: dict[int, list[Part]] = {rank: [(rank,)] for rank in _checked(range(hosts * each))}
    ready: dict[int, Waits] = dict.fromkeys(held, ())
    if hosts > 1:
        for place in range(each):
            ready |= _ring(made, range(place, hosts * each, each), held, size, ready)
    for src, parts in held.items():
        chunks = tuple(chunk for part in parts for chunk in part)
        for away in range(1, each):
            made.add(src, src - src % each + (src + away) % each, size, chunks, ready[src])
    return made.sends


class _Sends:
    """Sends, by the positions that `after` names them with."""

    def __init__(self) -> None:
        self._made: list[Send] = []

    @property
    def sends(self) -> tuple[Send, ...]:
        return tuple(self._made)

    def add(self, src: int, dst: int, size: int, chunks: Part, after: Waits) -> int:
        """Add one of `chunks`, of `size` bytes each; returns its position."""
        self._made.append(Send(src=src, dst=dst, size=size * len(chunks), chunks=chunks, after=after))
        return len(self._made) - 1


def _ring(
    made: _Sends,
    order: Sequence[int],
    held: dict[int, list[Part]],
    size: int,
    ready: dict[int, Waits],
) -> dict[int, Waits]:
    """A ring all-gather over `order`.

    held: by rank what it has, its own part first; what it gets is added. ready: by rank what it waits for before its first
    send. Returns by rank the sends that it has got.
    """
    ranks = _checked(order)
    got: dict[int, Waits] = dict.fromkeys(ranks, ())
    for _ in range(len(ranks) - 1):
        sent = {}
        for rank, after in zip(ranks, (*ranks[1:], ranks[0]), strict=True):
            waits = got[rank][-1:] or ready[rank]
            sent[after] = (held[rank][-1], made.add(rank, after, size, held[rank][-1], waits))
        for rank, (part, number) in sent.items():
            held[rank].append(part)
            got[rank] += (number,)
    return got


def _checked(order: Sequence[int]) -> Sequence[int]:
    different = len(set(order))
    if len(order) < 2 or different < len(order):
        raise ValueError(
            f"order has {len(order)} ranks, {different} of them different; a collective needs at least 2, each once"
        )
    return order
