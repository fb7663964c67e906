"""The encoding of invalid router indices as negative row counts, which every rank refuses.

Only devices know a router's indices, and no host waits for them. The row counts by expert go to all ranks, and every rank
refuses a negative one. So an invalid index is encoded as a large negative row count.
"""

from __future__ import annotations

NONE = -1
"""The index that selects no expert. A token with fewer than k experts uses it."""
REFUSED = -(1 << 62)
"""The offset that is added to an invalid index."""
FARTHEST = 1 << 60
"""Indices are clamped to this magnitude, so that they can be recovered from the sum with REFUSED."""


def refused_index(count: int) -> int | None:
    """Return the invalid index that a row count encodes, or None for an ordinary row count.

    >>> refused_index(REFUSED + 7), refused_index(REFUSED - 5), refused_index(-1), refused_index(8)
    (7, -5, None, None)
    """
    return count - REFUSED if count <= REFUSED + FARTHEST else None
