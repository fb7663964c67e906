"""What GPUs of different nodes exchange, by NVSHMEM's put-with-signal instead of the vendor's sends and receives.

Memory of its own for each program (weft.runtime.nvshmem), laid out by weft.runtime.slots, used in turns (weft.runtime.puts).
Where a peer's memory is mapped, a put is a copy engine's and a turn a stream memory operation, so a slice leaves whatever fills
the SMs. NVSHMEM waits for a message by a kernel of one block, and puts through an adapter by another; a copy within a GPU may
be a kernel. For these, kernels of the same schedule leave as many SMs free as for the vendor's messages: a guess, not measured.

Losing a rank: nothing of NVSHMEM ends a wait. The call's watch does, as for flags: it raises the turn words of this rank, again
and again, until the streams have drained; what then arrives is thrown away with the team.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from weft.compat.streams import Word
from weft.core.schedule import Schedule
from weft.runtime.bindings import Bindings, Where
from weft.runtime.cuda_space import CudaSpace
from weft.runtime.nvshmem import Heap
from weft.runtime.puts import Puts
from weft.runtime.slots import Slot, Slots


class Mail:
    """The messages of one program on this rank, and its turn words. Collective."""

    def __init__(self, space: CudaSpace, heap: Heap, schedule: Schedule, dtype: torch.dtype) -> None:
        slots = Slots(schedule, itemsize=dtype.itemsize)
        self._space, self._heap = space, heap
        self._memory = heap.take(slots.nbytes, space.team, space.settle)
        self._addresses = [self._memory.data_ptr() + 8 * word for word in range(slots.words)]
        # A word has 8 bytes, of which these write and look at 4: the others stay 0.
        words, own = space.driver.words, self._addresses
        self._claim = [words([Word("wait", address, 1), Word("lower", address, 0)]) for address in own]
        self._lower = [words([Word("lower", address, 0)]) for address in own]
        self._raise_all = words([Word("signal", address, 1) for address in own])
        self.mapped: Collection[int] = heap.mapped(self._memory)
        self._puts = Puts(slots, space.team.rank, self._memory, self)

    def exchange(self, where: Where, bindings: Bindings) -> None:
        """Enqueue a step's messages on torch's current stream."""
        self._puts.exchange(where, bindings)

    def claim(self, word: int) -> None:
        self._claim[word](self._space.current_stream())

    def lower(self, word: int) -> None:
        self._lower[word](self._space.current_stream())

    def hand(self, word: int, peer: int) -> None:
        self._heap.signal(self._addresses[word], 1, peer, self._space.current_stream())

    def put(self, source: torch.Tensor, slot: Slot) -> None:
        assert source.is_contiguous()
        dst, word = self._memory.data_ptr() + slot.span[0], self._addresses[slot.word]
        stream = self._space.current_stream()
        self._heap.put(dst, source.data_ptr(), source.nbytes, word, slot.dst_rank, stream)

    def release(self, stream: int) -> None:
        """Let what waits for a turn go on."""
        self._raise_all(stream)

    def close(self) -> None:
        self._heap.give(self._memory)
