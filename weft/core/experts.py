"""How a router's indices that name no expert travel to where they are refused: as a number of rows that is less than none.

Only devices know a router's indices, and no host waits for them. But the numbers of rows by expert go to all ranks, and every
rank refuses one below zero. So an index that cannot be takes the place of a number of rows, far below zero.
"""

from __future__ import annotations

NONE = -1
"""The index of no expert: the token has nothing of this one of its k."""
REFUSED = -(1 << 62)
"""What a refused index is added to."""
FARTHEST = 1 << 60
"""Indices are cut off here, in both directions, so that a sum tells what it was made of."""


def refused_index(count: int) -> int | None:
    """The index that a number of rows stands for; None for a number of rows.

    >>> refused_index(REFUSED + 7), refused_index(REFUSED - 5), refused_index(-1), refused_index(8)
    (7, -5, None, None)
    """
    return count - REFUSED if count <= REFUSED + FARTHEST else None
