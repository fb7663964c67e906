"""CudaWire exchanges messages between GPUs of different nodes, with NCCL's sends and receives on a communicator of weft's own.

A separate communicator has these properties:

- Its kernels take at most `sms_for(rank_group)` SMs. Kernels of the same schedule leave these free, so that a slice is sent
  while the rest is computed.
- Its kernels are launched without clusters. The free SMs are spread over the GPU, so a cluster of several blocks would find
  room only after the other kernel has ended.
- Its stream and the caller's use different hardware queues.
- weft can abort it, and so end a message that never comes, without aborting the caller's process group.

It is created with a store of its own and outside of torch's list of groups. torch names a group that only some ranks create by
its ranks and by the number of groups of a rank, so ranks could disagree on its name, or on that of the caller's next group.
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
"""The SMs for messages. Between nodes of one host, 32 blocks of NCCL move 64 MiB both ways at 260 GB/s (2 x H200), and 16 at
155. We assume, without a measurement, that 16 blocks keep an adapter of 50 GB/s busy."""

Messages = Sequence[tuple[torch.Tensor, int]]
"""Contiguous tensors, each with the rank that sends or receives it."""


def sms_for(rank_group: RankGroup) -> int:
    """Return the number of SMs for messages between the nodes of a group."""
    return _SMS_OF_LINKS if rank_group.one_host else _SMS_OF_ADAPTERS


class CudaWire:
    """A CudaWire exchanges messages between the ranks of a group. To construct it is a collective operation."""

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
        """Enqueue sends and receives on torch's current stream, as one NCCL group."""
        exchange_messages(self._backend, sends, receives)

    def abort(self) -> None:
        """End all waits for messages. It is called at the end of a group, because no messages can be exchanged after it."""
        self._abort = self._abort or Abort(self._backend.abort, "wire")

    def close(self) -> None:
        if self._abort is None or self._abort.ended():
            with suppress(RuntimeError):  # it was aborted
                self._backend.shutdown()
        self._backend = None
