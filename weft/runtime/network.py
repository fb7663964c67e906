"""What GPUs of different nodes exchange: NCCL's sends and receives, on a communicator of their own.

The communicator is not the caller's: its kernels take at most `sms_for(rank_group)` SMs, which kernels of the same schedule
leave free, so that a slice leaves while the rest is computed. They are not launched in clusters: the SMs that a kernel leaves
free are spread over the GPU, and a cluster of several blocks finds no room among them until that kernel ends. Its stream shares
no hardware queue with the caller's; and it can be aborted without taking the caller's group along, which is how a message that
never comes ends.

It is made with a store of the group's own and is in none of torch's lists: torch names groups that only some ranks make by
their ranks and by how many groups a rank has, so that ranks could differ in a name, of such a group or of the caller's next.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.rank_group import RankGroup
from weft.compat.c10d import exchange_messages, nccl_connections
from weft.runtime.peer_waits import Abort

_SMS_OF_LINKS, _SMS_OF_ADAPTERS = 32, 16
"""Between nodes of one host 32 blocks of NCCL move 64 MiB both ways at 260 GB/s (2 x H200), 16 at 155. That 16 keep an
adapter of 50 GB/s busy is assumed, not measured."""

Messages = Sequence[tuple[torch.Tensor, int]]
"""Contiguous tensors, each with the rank at its other end."""


def sms_for(rank_group: RankGroup) -> int:
    """SMs that messages between this group's nodes get."""
    return _SMS_OF_LINKS if rank_group.one_host else _SMS_OF_ADAPTERS


class CudaWire:
    """Messages between the ranks of a group. Collective."""

    def __init__(self, rank_group: RankGroup, device: torch.device) -> None:
        rank_group.agree_on_call("messages between nodes: nccl")
        self._backend: Any = nccl_connections(
            rank_group.open_store("wire"),
            rank_group.rank,
            dist.get_process_group_ranks(rank_group.group),
            name=f"weft-{rank_group.topic}",
            max_ctas=sms_for(rank_group),
            device=device,
        )
        self._abort: Abort | None = None

    def exchange(self, sends: Messages, receives: Messages) -> None:
        """Enqueue one group of sends and receives on torch's current stream."""
        exchange_messages(self._backend, sends, receives)

    def abort(self) -> None:
        """End what waits for messages that will not come. For the end of a group: nothing can be exchanged after it."""
        self._abort = self._abort or Abort(self._backend.abort, "wire")

    def close(self) -> None:
        if self._abort is None or self._abort.ended():
            with suppress(RuntimeError):  # aborted
                self._backend.shutdown()
        self._backend = None
