"""Where the messages of a schedule lie while they travel by put-with-signal: one slot each, at the same bytes of both ends.

A put writes into its target's memory at the place that it reads from at its source (torch's put has one address for both).
So a slot belongs to two ranks: its sender stages the message there, and there it lands. Slots that have a rank in common
share no byte; others may. All ranks lay out the whole schedule, alike, so nothing is exchanged for it.

    memory of a rank    | turn words, 8 bytes a message | slots ...
    turn word           of this end of a message: 1 if it may go on, 0 if it is the other end's turn (weft.runtime.puts)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from weft.core.problem import Span1D
from weft.core.schedule import Region, Schedule, SendReceive

_ALIGN = 256
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class Slot:
    """One message's place. span: its bytes. word: the number of its turn word."""

    src_rank: int
    dst_rank: int
    span: Span1D
    word: int


Place = tuple[int, str, int]
"""Rank, lane and position of a step."""
Key = tuple[int, int, int]
"""Sender, receiver, and how many messages of that sender to that receiver come before it in the call."""


class Slots:
    """The slots of a schedule. itemsize: bytes of an element of what is not kept in float32.

    at: of each SendReceive, those of its sends and those of its receives, in order. words: how many there are. nbytes: what
    every rank needs.
    """

    def __init__(self, schedule: Schedule, *, itemsize: int) -> None:
        steps = [(rank, lane, at, step) for rank, lane, at, step in schedule if isinstance(step, SendReceive)]
        sizes: dict[Key, int] = {}
        sent, received = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        keys: dict[Place, tuple[list[Key], list[Key]]] = {}
        for rank, lane, at, step in steps:
            sends = [_next(sent, rank, send.to) for send in step.sends]
            keys[rank, lane.name, at] = sends, [_next(received, got.source, rank) for got in step.receives]
            sizes |= {key: _nbytes(schedule, send.src, itemsize) for key, send in zip(sends, step.sends, strict=True)}
        self.words = len(sizes)
        spans, self.nbytes = _placed(sizes, _aligned(_WORD_BYTES * self.words))
        slots = {key: Slot(key[0], key[1], spans[key], word) for word, key in enumerate(sizes)}
        self.at = {place: tuple(tuple(slots[key] for key in ends) for ends in both) for place, both in keys.items()}

    def of_sender(self, rank: int) -> list[Slot]:
        """Every slot that this rank sends from."""
        return [slot for place, (sends, _) in self.at.items() if place[0] == rank for slot in sends]


def _next(counter: Counter[tuple[int, int]], src_rank: int, dst_rank: int) -> Key:
    counter[src_rank, dst_rank] += 1
    return src_rank, dst_rank, counter[src_rank, dst_rank] - 1


def _nbytes(schedule: Schedule, region: Region, itemsize: int) -> int:
    return region.size * (4 if schedule.buffer[region.buffer].float32 else itemsize)


def _placed(sizes: dict[Key, int], first: int) -> tuple[dict[Key, Span1D], int]:
    """Bytes for each message, from `first` on, that are free at both of its ends, and where the last of them end."""
    spans: dict[Key, Span1D] = {}
    taken: dict[int, list[Span1D]] = {}
    for key, nbytes in sizes.items():
        ends = [taken.setdefault(rank, []) for rank in key[:2]]
        low = _first_fit(sorted(span for end in ends for span in end), _aligned(nbytes), first)
        spans[key] = low, low + nbytes
        for end in ends:
            end.append((low, low + _aligned(nbytes)))
    return spans, max((high for spans_of in taken.values() for _, high in spans_of), default=first)


def _first_fit(taken: Iterable[Span1D], nbytes: int, first: int) -> int:
    """The lowest place of `nbytes` free bytes, from `first` on. taken: in ascending order."""
    for low, high in taken:
        if low - first >= nbytes:
            break
        first = max(first, high)
    return first


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
