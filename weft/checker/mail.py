"""Messages between ranks during the walk: which have begun at both ends, and the data that they carry.

The n-th message that a rank sends to another is the n-th that the other receives from it, calls of both counted through. A step
with messages ends once the other end of each has begun: NCCL may keep a sender waiting until then. It need not, so a sender
has nothing of its receiver's behind it; a receiver has all that its sender had when it began, and the reading of what was sent.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from weft.checker.content import Cells
from weft.checker.effects import At, Effects
from weft.checker.program import Action

Pair = tuple[int, int]
"""Sender, receiver."""


class Leg(NamedTuple):
    """One end of message `number` of a pair of ranks."""

    pair: Pair
    number: int
    sent: bool
    action: Action
    at: At


class Posted(NamedTuple):
    """What a sender has handed over: cells, and all that it had behind it, the reading of them included."""

    action: Action
    cells: Cells
    behind: int


class Mail:
    """All messages of all pairs of ranks."""

    def __init__(self) -> None:
        self.posted: defaultdict[Pair, list[Posted]] = defaultdict(list)
        self.awaited: defaultdict[Pair, int] = defaultdict(int)

    def begin(self, effects: Effects, at: At, action: Action, *, sent: bool, peer: int, ancestors: int) -> Leg:
        """One end begins: what is sent is read."""
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
        """It is through: what is received is written. What its lane then has behind it."""
        post = self.posted[leg.pair][leg.number]
        if leg.sent:
            return post.behind
        return effects.deliver(leg.action, leg.at, ancestors | post.behind, post.action, post.cells)
