"""Which ranks of a group are a node.

A node is a host, or a container: ranks that share its memory and see each other's processes. WEFT_RANKS_PER_NODE cuts a
host's ranks into nodes of so many, which then treat each other as if they were on different hosts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby


def ranks_per_node() -> int | None:
    """WEFT_RANKS_PER_NODE, if it is set. Raises ValueError if it is not a whole number of at least 1."""
    text = os.environ.get("WEFT_RANKS_PER_NODE")
    if text is not None and not (text.isdecimal() and int(text)):
        raise ValueError(f"WEFT_RANKS_PER_NODE is {text!r}; it must be a whole number of at least 1")
    return int(text) if text else None


def cut(ranks: int) -> tuple[int, ...]:
    """How many ranks each node of this host has, of so many on it; () for one node. Raises ValueError as `ranks_per_node`."""
    size = ranks_per_node() or ranks
    return nodes_of([str(rank // size) for rank in range(ranks)])


def nodes_of(hosts: Sequence[str]) -> tuple[int, ...]:
    """How many ranks each node has, by the hosts of all ranks; () for one node.

    Raises ValueError if the ranks of a host are no neighbours.
    """
    found = [(host, len(list(ranks))) for host, ranks in groupby(hosts)]
    apart = sorted({host for host, _ in found if sum(host == other for other, _ in found) > 1})
    if apart:
        raise ValueError(
            f"group has ranks of {', '.join(apart)} among those of other hosts ({', '.join(hosts)}); order them host by host, "
            "as torchrun does"
        )
    return tuple(count for _, count in found) if len(found) > 1 else ()
