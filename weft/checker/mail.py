"""Messages between ranks during the walk: which ones have begun at both ends, and the data that they carry.

The n-th message that a rank sends to another is the n-th that the other receives from it, counted over all calls. A step with
messages ends once the other end of each message has begun, because NCCL may keep a sender waiting until then. It does not
always do so. So nothing of the receiver is known to happen before a sender's end. All ancestors of the sender's begin, and its
read, happen before a receiver's end.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from weft.checker.content import Cells
from weft.checker.effects import At, Effects
from weft.checker.program import Action

Pair = tuple[int, int]
"""A sender and a receiver."""


class Leg(NamedTuple):
    """One end of message `number` of a pair of ranks."""

    pair: Pair
    number: int
    sent: bool
    action: Action
    at: At


class Posted(NamedTuple):
    """A sent message: its cells, and the ancestors of the send, including the read."""

    action: Action
    cells: Cells
    behind: int


class Mail:
    """All messages of all pairs of ranks."""

    def __init__(self) -> None:
        self.posted: defaultdict[Pair, list[Posted]] = defaultdict(list)
        self.awaited: defaultdict[Pair, int] = defaultdict(int)

    def begin(self, effects: Effects, at: At, action: Action, *, sent: bool, peer: int, ancestors: int) -> Leg:
        """Begin one end of a message. A sender reads its data."""
        pair = (at[0], peer) if sent else (peer, at[0])
        number = len(self.posted[pair]) if sent else self.awaited[pair]
        if sent:
            cells, behind = effects.post(action, at, ancestors)
            self.posted[pair].append(Posted(action, cells, behind))
        else:
            self.awaited[pair] += 1
        return Leg(pair, number, sent, action, at)

    def is_complete(self, leg: Leg) -> bool:
        """Return whether the other end has begun."""
        return (self.awaited[leg.pair] if leg.sent else len(self.posted[leg.pair])) > leg.number

    def end(self, effects: Effects, leg: Leg, ancestors: int) -> int:
        """End one end of a message, and return the new ancestors of its lane. A receiver writes its data."""
        post = self.posted[leg.pair][leg.number]
        if leg.sent:
            return post.behind
        return effects.deliver(leg.action, leg.at, ancestors | post.behind, post.action, post.cells)
