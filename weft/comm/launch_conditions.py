"""Describes how the processes of a group were started, as far as it decides whether weft's GPUs can work together.

Ranks compare it before they share memory, so that all of them raise the same error if it cannot work.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from weft.compat.device import gpu_number

if TYPE_CHECKING:
    from weft.comm.rank_group import RankGroup

OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""An environment variable of torch. Unless it is 1, torch's symmetric memory identifies a GPU by its index in a process."""
BLOCKING = "CUDA_LAUNCH_BLOCKING"
_SET_HERE: set[str] = set()
"""The environment variables that weft has set, as opposed to the user."""
_BLOCKS = (
    "CUDA_LAUNCH_BLOCKING is set on a rank, so its host would wait for a kernel that waits for a later one; unset "
    "CUDA_LAUNCH_BLOCKING"
)
_NO_POOLS = (
    "a rank uses torch's allocator cudaMallocAsync, which lacks the memory pools that overlapping needs; leave "
    "backend:cudaMallocAsync out of PYTORCH_ALLOC_CONF"
)


def agree_on_launch(group: RankGroup, device: torch.device) -> str:
    """Return the reason why overlapping schedules cannot run on these GPUs, or an empty string. Collective.

    Where each rank sees its own GPU alone, every rank calls it cuda:0, and torch's symmetric memory would take them for one
    GPU. So this sets OVERLAPPING for the process. Raises ValueError on all ranks if two ranks of a node do share a GPU, unless
    the user has set OVERLAPPING on all ranks.
    """
    on_node = group.ranks_on_node
    numbers = group.agree_on_call("call: GPUs", gpu_number(device))
    blocks = os.environ.get(BLOCKING, "") not in ("", "0")
    pools = torch.cuda.get_allocator_backend() == "native"
    overlaps = os.environ.get(OVERLAPPING) == "1" and OVERLAPPING not in _SET_HERE
    # The bits say that launches block, that pools are off, and that the user lets ranks share GPUs. The device's index follows.
    mine = blocks + 2 * (not pools) + 4 * overlaps + 8 * (device.index or 0)
    facts = group.agree_on_call("call: how ranks were started", mine)
    if not all(fact & 4 for fact in facts):
        refuse_shared_gpus(on_node, [numbers[rank] for rank in on_node])
    if len({facts[rank] >> 3 for rank in on_node}) < len(on_node) and not overlaps:  # what the user has set stays the user's
        _SET_HERE.add(OVERLAPPING)
        os.environ[OVERLAPPING] = "1"
    if any(fact & 1 for fact in facts):
        return _BLOCKS
    return _NO_POOLS if any(fact & 2 for fact in facts) else ""


def refuse_shared_gpus(ranks: Sequence[int], numbers: Sequence[int]) -> None:
    """Raise ValueError if two ranks of a node use the same GPU. numbers: the identity of each rank's GPU."""
    for at, number in enumerate(numbers):
        if (first := numbers.index(number)) < at:
            raise ValueError(
                f"ranks {ranks[first]} and {ranks[at]} use the same GPU; give each rank a GPU of its own: call "
                "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), start at most as many ranks as there are GPUs, and let "
                "CUDA_VISIBLE_DEVICES, where it is set, name another GPU for each rank"
            )
