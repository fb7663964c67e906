"""The machine profile by which the kernels of a group choose, which every rank must have.

A kernel's tile shape says how often it counts, and a rank that waits for another one's tiles knows that number from its own
profile. With two profiles it could wait for ever. So ranks compare their profiles before the first kernel of a group.
"""

from __future__ import annotations

import torch

from weft.comm.rank_group import RankGroup
from weft.core.errors import RankMismatch
from weft.core.machine import Machine
from weft.runtime.choose import readable_profile

_BITS = 48
"""Of a profile's digest: what fits the number that ranks exchange."""


def agreed_profile(group: RankGroup, device: torch.device) -> Machine:
    """The profile that all ranks of a group have for their devices. Collective. Where WEFT_MACHINE cannot be read, the nearest
    shipped one, with a warning. Raises RankMismatch on every rank if two ranks have different profiles."""
    mine = readable_profile(device, group.world_size)
    digests = group.agree_on_call("call: machine profile", int(mine.digest, 16) >> (64 - _BITS))
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise RankMismatch(
                f"ranks 0 and {rank} have different machine profiles (rank {group.rank}: {mine.name}); kernels choose their "
                "tiles by it: set WEFT_MACHINE to one profile on all ranks, or to none"
            )
    return mine
