"""What GPUs of different nodes exchange: the vendor's sends and receives, on a communicator of their own.

It is not the caller's: its kernels take at most SMS SMs, which kernels of the same schedule leave free, so that a slice leaves
while the rest is computed; its stream shares no hardware queue with the caller's; and it can be aborted without taking the
caller's group along, which is how a message that never comes ends.

A GPU's symmetric memory reaches the ranks of its node. It is torch's, over a group of these ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

from weft.team import Team

SMS = 16
"""What stores to peers get beside a kernel, too (weft.kernels.shapes). That so many of the vendor's blocks keep an adapter of
50 GB/s busy is assumed, not measured."""

Messages = Sequence[tuple[torch.Tensor, int]]
"""Contiguous tensors, each with the rank at its other end."""


def near_group(team: Team) -> dist.ProcessGroup:
    """A group of the ranks of this one's node; the team's own where there is one node. Collective."""
    if not team.nodes:
        return team.group
    ranks = dist.get_process_group_ranks(team.group)
    group: dist.ProcessGroup = dist.new_group(
        [ranks[near] for near in team.near], backend="gloo", use_local_synchronization=True
    )
    return group


class CudaWire:
    """Messages between the ranks of a team. Collective.

    Raises ValueError for a group that is a part of a world whose communicator is bound to devices: torch would split that one,
    for which it needs all ranks of the world.
    """

    def __init__(self, team: Team, device: torch.device) -> None:
        self._ranks = dist.get_process_group_ranks(team.group)
        part = len(self._ranks) < dist.get_world_size()
        if part and getattr(dist.group.WORLD, "bound_device_id", None) is not None:
            raise ValueError(
                f"group has {len(self._ranks)} of {dist.get_world_size()} ranks, on several nodes; use the default group "
                "there, or init_process_group without device_id"
            )
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config.max_ctas = SMS
        self._group = dist.new_group(self._ranks, backend="nccl", pg_options=options, use_local_synchronization=part)
        # The communicator is made by all ranks at once, whoever exchanges what with whom later.
        dist.all_reduce(torch.zeros(1, device=device), group=self._group)
        torch.cuda.synchronize(device)

    def exchange(self, sends: Messages, receives: Messages) -> None:
        """Enqueue one group of sends and receives on torch's current stream."""
        ops = [dist.P2POp(dist.isend, sent, self._ranks[to], self._group) for sent, to in sends]
        ops += [dist.P2POp(dist.irecv, got, self._ranks[source], self._group) for got, source in receives]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def abort(self) -> None:
        """End what waits for messages that will not come. For the end of a team: nothing can be exchanged after it."""
        self._group._get_backend(torch.device("cuda")).abort()

    def close(self) -> None:
        with suppress(ValueError, RuntimeError):  # gone with all groups of the process, or aborted
            dist.destroy_process_group(self._group)
