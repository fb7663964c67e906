"""What the ranking (weft.perf.ranking) knows of a family of schedules: how it cuts the matmul, and how it moves the data."""

from __future__ import annotations

from typing import Literal, NamedTuple

Transport = Literal[
    "none",
    "nccl",
    "store_kernel",
    "push_copies",
    "ring_copies",
    "pull_copies",
    "store_blocks",
    "tile_stores",
    "load_kernel",
]
"""The method that moves the data.

store_kernel  a kernel that stores to all peers         store_blocks  a few blocks that store while a matmul runs
push_copies   copy engines, from the owner to peers     tile_stores   the tiles of the matmul store their results at peers
ring_copies   copy engines, to the next rank only       load_kernel   a kernel of the receiver loads what it adds up
pull_copies   copy engines of the receiver
"""


class FamilyTraits(NamedTuple):
    """The properties of a family of schedules that its time depends on.

    matmul: "whole" is one cuBLAS matmul. "per_piece", "per_step" and "per_slice" are a cuBLAS matmul for each piece, for all
        pieces of a step, or for each slice of K or N. "tiles" is one kernel of weft whose tiles wait, count or store.
        "exchanging" is one kernel that also communicates. "none" is no matmul.
    gather: what brings the data before the matmul.
    scatter: what sends the data after the matmul.
    cuts_own_shard: the rank's own shard is cut like those of its peers. In flag_gated_2d, K is cut.
    hops: how many times data cross the links in an "exchanging" kernel.
    one_lane: a single lane makes all copies.
    sends_sums: the sums of one chunk are sent to all ranks while the next chunk is multiplied.
    """

    matmul: Literal["whole", "per_piece", "per_step", "per_slice", "tiles", "exchanging", "none"]
    gather: Transport = "none"
    scatter: Transport = "none"
    cuts_own_shard: bool = False
    hops: int = 0
    one_lane: bool = False
    sends_sums: bool = False
