"""All ranks of a group must have the same machine profile, because kernels choose tile shapes by it.

The tile shape determines how often a kernel counts, and a rank that waits for another rank's tiles computes that number from
its own profile. With two profiles it could wait forever. So ranks compare their profiles before the first kernel of a group.
"""

from __future__ import annotations

import torch

from weft.comm.rank_group import RankGroup
from weft.core.errors import RankMismatch
from weft.core.machine import Machine
from weft.runtime.choose import readable_profile

_BITS = 48
"""The number of bits of a profile's digest that fit the number that ranks exchange."""


def agreed_profile(group: RankGroup, device: torch.device) -> Machine:
    """Return the profile that all ranks of a group have for their devices. Collective.

    If WEFT_MACHINE cannot be read, it is the nearest shipped profile, with a warning.
    Raises RankMismatch on every rank if two ranks have different profiles.
    """
    mine = readable_profile(device, group.world_size)
    digests = group.agree_on_call("call: machine profile", int(mine.digest, 16) >> (64 - _BITS))
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise RankMismatch(
                f"ranks 0 and {rank} have different machine profiles (rank {group.rank}: {mine.name}); kernels choose their "
                "tiles by it: set WEFT_MACHINE to one profile on all ranks, or to none"
            )
    return mine
