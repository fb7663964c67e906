"""Messages of one schedule by put-with-signal: torch's NVSHMEM operations on a stream, nothing awaited by the host.

A message has a turn word at both ends, and one of the two is 1: that end may go on. It lowers its own word, and raises the
other's with the put itself, behind the data. So the words are credits as well: a slot is written again only after its
receiver has taken out what the last call brought.

    sender                                        receiver
    claim turn: wait for it, lower it             claim turn
    put source in slot, raise receiver's  ~~~~~>    .
      .                                           slot -> destination
    claim turn (of the next call)         <~~~~~  raise sender's

Where a peer's memory is mapped, the device puts straight from the source. Else torch does: from the sender's own slot, to which
the source is copied first, since a network sends from memory that it knows. And its wait, where it knows that what has come
through a network can be read.

Why not words that grow: a CUDA graph replays constants, and the wait is for one value, not for at least that. What must not
happen is that a word is raised twice before it is lowered, or lowered after it was raised for the next turn. It cannot: an end
raises the other's word only in its own turn, and has lowered its own before, on the same stream.

A rank can be a call ahead of its receiver, since slots hold one message: sooner than by the vendor's messages, which wait for
both ends, so what the checker proves of those holds of these. No wait has a bound of its own: it ends when its word is raised,
by the peer, or by the watch of a call that has failed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from weft.core.schedule import SendReceive
from weft.runtime.bindings import Bindings, Where
from weft.runtime.slots import Slot, Slots


class Turns(Protocol):
    """The turn words of one rank, by number, in the order of torch's current stream. mapped: ranks whose memory is."""

    mapped: Collection[int]

    def claim(self, word: int) -> None:
        """Wait until it is 1, and lower it. What a rank has put that is mapped can be read then."""

    def lower(self, word: int) -> None:
        """Set it to 0."""

    def hand(self, word: int, peer: int) -> None:
        """Set a peer's to 1, after all that the stream has done."""

    def put(self, source: torch.Tensor, slot: Slot) -> None:
        """Copy contiguous data to its receiver's slot, and then set the receiver's word to 1. The receiver is mapped."""


class Puts:
    """One rank's end of all messages of a schedule. memory: this rank's `slots.nbytes` of symmetric memory, zeroed."""

    def __init__(self, slots: Slots, rank: int, memory: torch.Tensor, turns: Turns) -> None:
        self._slots, self._memory, self._turns = slots, memory, turns
        words = memory[: 8 * slots.words].view(torch.int64)
        self._words = [words[word : word + 1] for word in range(slots.words)]
        for slot in slots.of_sender(rank):
            self._words[slot.word].fill_(1)

    def exchange(self, where: Where, bindings: Bindings) -> None:
        """Enqueue all messages of a step on torch's current stream."""
        step = where.step
        assert isinstance(step, SendReceive)
        sends, receives = self._slots.at[where.rank, where.lane, where.position]
        for slot, send in zip(sends, step.sends, strict=True):
            self._send(slot, bindings.view(send.src))
        for slot, got in zip(receives, step.receives, strict=True):
            self._receive(slot, bindings.view(got.dst))

    def _send(self, slot: Slot, source: torch.Tensor) -> None:
        self._turns.claim(slot.word)
        if not source.numel():
            self._turns.hand(slot.word, slot.dst_rank)
        elif slot.dst_rank in self._turns.mapped:
            self._turns.put(source, slot)
        else:
            staged = self._memory[slice(*slot.span)]
            staged.view(source.dtype).view(source.shape).copy_(source)
            torch.ops.symm_mem.nvshmem_put_with_signal(staged, self._words[slot.word], 1, slot.dst_rank)

    def _receive(self, slot: Slot, destination: torch.Tensor) -> None:
        if slot.src_rank in self._turns.mapped:
            self._turns.claim(slot.word)
        else:
            torch.ops.symm_mem.nvshmem_wait_for_signal(self._words[slot.word], 1, slot.src_rank)
            self._turns.lower(slot.word)
        if destination.numel():
            landed = self._memory[slice(*slot.span)]
            destination.copy_(landed.view(destination.dtype).view(destination.shape))
        self._turns.hand(slot.word, slot.src_rank)
