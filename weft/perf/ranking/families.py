"""FAMILIES describes each family of schedules to the ranking: how it cuts the matmul, and how it moves the data."""

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
    """FamilyTraits holds the properties of a family of schedules that its time depends on.

    matmul: "whole" is one cuBLAS matmul. "per_piece", "per_step" and "per_slice" are a cuBLAS matmul for each piece, for all
        pieces of a step, or for each slice of K or N. "tiles" is one kernel of weft whose tiles wait, count or store.
        "exchanging" is one kernel that also communicates. "none" is no matmul.
    gather: what brings the data before the matmul.
    scatter: what sends the data after the matmul.
    cuts_own_shard: the rank's own shard is cut like those of its peers. In flag_gated_2d, K is cut.
    hops: how many times data cross the links in an "exchanging" kernel.
    one_lane: a single lane makes all copies.
    """

    matmul: Literal["whole", "per_piece", "per_step", "per_slice", "tiles", "exchanging", "none"]
    gather: Transport = "none"
    scatter: Transport = "none"
    cuts_own_shard: bool = False
    hops: int = 0
    one_lane: bool = False


FAMILIES: dict[str, FamilyTraits] = {
    "sequential": FamilyTraits("whole", "nccl", "nccl"),
    "sequential_stores": FamilyTraits("whole", "store_kernel", "store_kernel"),
    "shard_p2p": FamilyTraits("per_piece", "push_copies", "push_copies", one_lane=True),
    "uniform_fused_1d": FamilyTraits("per_step", "push_copies", "push_copies", cuts_own_shard=True),
    "hetero_fused_1d": FamilyTraits("per_step", "push_copies", "push_copies"),
    "hetero_unfused_1d": FamilyTraits("per_piece", "push_copies", "push_copies"),
    "uniform_fused_2d": FamilyTraits("per_slice", "push_copies", "push_copies", cuts_own_shard=True),
    "flag_gated": FamilyTraits("tiles", "push_copies", "load_kernel"),
    "track_and_trigger": FamilyTraits("tiles", "ring_copies", "push_copies"),
    "direct_store": FamilyTraits("tiles", "store_blocks", "tile_stores"),
    "flag_gated_2d": FamilyTraits("tiles", "store_blocks", cuts_own_shard=True),
    "one_shot": FamilyTraits("exchanging", hops=1),
    "two_shot": FamilyTraits("exchanging", hops=2),
    "node_slices": FamilyTraits("tiles", "push_copies", "tile_stores"),
    "copy_engine": FamilyTraits("none", "push_copies", "push_copies"),
    "copy_engine_pull": FamilyTraits("none", "pull_copies", "pull_copies"),
}
SAME_ON_ONE_NODE = {"matmul_all_to_all": "track_and_trigger", "matmul_all_reduce": "two_shot"}
"""The family that node_slices equals on a single node, by operator. For other operators its own traits hold."""
