"""Symmetric memory of one team on one GPU: asked of torch once, given to one program after the other.

Making symmetric memory (a rendezvous: handles are exchanged and peers' memory is mapped) takes milliseconds, and a trial of
schedules binds and drops several programs. What a program gives back is kept, by size, for the next. Programs come and go in
the same order on all ranks, so ranks take the same piece without a word. `close` frees all of it.

    take(nbytes)   ranks meet: whoever used the piece last is done everywhere; zeroed; ranks meet again
    give(piece)    local

That a GPU says it can reach a peer proves little in virtual machines. The first piece is written by every peer and read from
every peer, once: PeerAccess names the pair that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.comm.memory import gpu_symmetric
from weft.comm.rendezvous import Meetings

_LEAST_BYTES = 1024
_STEPS = 8
"""Sizes are rounded up to an eighth of the power of two below them: at most 12.5% is lost, and most pieces fit again."""
_PROOF = 0x5EED0000


@dataclass(frozen=True, eq=False)
class Piece:
    """memory: this rank's bytes. handle: torch's symmetric memory handle of it, with those of the node's other ranks."""

    memory: torch.Tensor
    handle: Any

    @property
    def addresses(self) -> list[int]:
        """By rank within the node, where its memory begins for this GPU."""
        return [int(pointer) for pointer in self.handle.buffer_ptrs]


def rounded(nbytes: int) -> int:
    """The size of the piece that `nbytes` are taken from."""
    nbytes = max(_LEAST_BYTES, nbytes)
    step = max(_LEAST_BYTES, 1 << (nbytes.bit_length() - 1)) // _STEPS
    return -(-nbytes // step) * step


class Pool:
    """meetings: of one node's ranks. settle: waits until every rank's GPU has ended all its work. names: the ranks' numbers."""

    def __init__(self, meetings: Meetings, device: torch.device, settle: Callable[[], None], names: Sequence[int]) -> None:
        self._meetings, self._device, self._settle, self._names = meetings, device, settle, names
        self._free: dict[int, list[Piece]] = {}
        self._proved = False

    def take(self, nbytes: int) -> Piece:
        """Zeroed symmetric memory of at least `nbytes`. Collective. Raises ValueError where a peer cannot be reached."""
        size = rounded(nbytes)
        kept = self._free.get(size)
        piece = kept.pop() if kept else self._made(size)
        self._settle()
        if not self._proved:
            self._prove(piece)
            self._proved = True
        piece.memory.zero_()
        self._settle()
        return piece

    def give(self, piece: Piece) -> None:
        """Give a piece back that this rank's GPU no longer uses."""
        self._free.setdefault(piece.memory.numel(), []).append(piece)

    def close(self) -> None:
        """Free what has been given back."""
        self._free.clear()

    def _made(self, nbytes: int) -> Piece:
        return Piece(*gpu_symmetric(nbytes, self._meetings, self._device, meet=self._settle))

    def _prove(self, piece: Piece) -> None:
        """Every rank writes a word at every peer, and reads one back."""
        rank, size = self._meetings.rank, self._meetings.size
        words = [piece.handle.get_buffer(peer, (2 * size,), torch.int32, 0) for peer in range(size)]
        words[rank][size + rank] = _PROOF + rank
        for peer in range(size):
            words[peer][rank] = _PROOF + rank
        self._settle()
        written, read = words[rank].tolist(), [int(words[peer][size + peer]) for peer in range(size)]
        for peer in range(size):
            if written[peer] != _PROOF + peer or read[peer] != _PROOF + peer:
                pair = f"{self._names[rank]} and {self._names[peer]}"
                raise ValueError(
                    f"group: the GPUs of ranks {pair} do not reach each other's memory (written {written[peer]:#x}, "
                    f"read {read[peer]:#x}, expected {_PROOF + peer:#x}); weft needs peer access: try `weft doctor`"
                )
        self._settle()
