"""Programs of a process group share the mailboxes of their FusedCollectives on a device: one for each capacity of a copy.

    take(72 KiB)    program 1, M = 1  ---+                                              (2 ranks, N = 1024, bfloat16, one hop)
    take(72 KiB)    program 2, M = 8  ---+--->  one mailbox, 3 copies of 72 KiB
    take(288 KiB)   program 3, M = 64 ------->  one mailbox, 3 copies of 288 KiB

An engine that captures 128 numbers of rows has up to 128 programs, which stay as long as its graphs. A mailbox for each of them
would take memory that grows with the number of programs. There is one capacity for each power of two, and it is less than twice
what a call uses of a copy (or 72 KiB). So all mailboxes together take less than 2 times the largest one, which is less than 12
times what the largest call uses of one copy.

weft.kernels.all_reduce says why calls of different layouts may follow each other in a mailbox. It requires that calls which
share one come one after the other on each rank, and in the same order on all ranks. On a GPU every program with such a kernel
uses `Order.sms`, so its calls and those of the others exclude each other, also within a capture. On CPUs each call waits until
all ranks have begun it. The caller orders replays of graphs, in the same way on every rank, as for collectives of NCCL.

All ranks bind and close the same programs in the same order, so they also allocate and free the same mailboxes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft.comm.symmetric_heap import Allocation, DeviceHeap, HostHeap
from weft.core.schedule import MAILBOX_COPIES

if TYPE_CHECKING:
    from weft.kernels.all_reduce import Mailbox


class SharedMailbox:
    """A SharedMailbox is a mailbox, and the number of kernels that use it.

    piece: its symmetric memory.
    memory: what kernels take.
    """

    def __init__(self, piece: Allocation, memory: Mailbox) -> None:
        self.piece, self.memory, self.users = piece, memory, 0

    @property
    def bytes_per_user(self) -> int:
        """The bytes of one kernel, if all that share the mailbox count equal parts of it."""
        return self.piece.nbytes // self.users


class SharedMailboxes:
    """SharedMailboxes has the mailboxes of a process group on a device. sms: the SMs, which bound the number of blocks."""

    def __init__(self, heap: HostHeap | DeviceHeap, device: torch.device, sms: int) -> None:
        self._heap, self._device, self._sms = heap, device, sms
        self._by_capacity: dict[int, SharedMailbox] = {}

    @property
    def nbytes(self) -> int:
        return sum(mailbox.piece.nbytes for mailbox in self._by_capacity.values())

    def __len__(self) -> int:
        return len(self._by_capacity)

    def take(self, copy_bytes: int) -> SharedMailbox:
        """Return the mailbox with this capacity of a copy, for one more kernel. Collective."""
        if copy_bytes not in self._by_capacity:
            from weft.kernels.all_reduce import mailbox, most_blocks

            piece = self._heap.allocate(MAILBOX_COPIES * copy_bytes, reusable=True)
            memory = mailbox(piece.addresses, copy_bytes, most_blocks(self._sms), self._device)
            self._by_capacity[copy_bytes] = SharedMailbox(piece, memory)
        found = self._by_capacity[copy_bytes]
        found.users += 1
        return found

    def give_back(self, mailbox: SharedMailbox) -> None:
        """Give back a mailbox for one kernel, whose calls have ended on all ranks. The last one frees it."""
        mailbox.users -= 1
        if not mailbox.users:
            del self._by_capacity[mailbox.memory.copy_bytes]
            self._heap.free(mailbox.piece)
