"""Tensors of the caller's that peers can reach: symmetric memory handed out, and found again by address."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.comm.memory import Segment, gpu_symmetric
from weft.runtime.cuda_space import CudaSpace
from weft.runtime.host import HostSpace

_ALIGN = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class Reach:
    """A tensor's bytes within a piece of symmetric memory. piece: its number, alike on every rank. by_rank: the same bytes of
    every rank."""

    piece: int
    offset: int
    by_rank: tuple[torch.Tensor, ...]

    def __str__(self) -> str:
        return f"piece {self.piece}, byte {self.offset}"


class Reachable:
    """The pieces of one group on one device's ranks."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._pieces: list[tuple[torch.Tensor, ...]] = []
        self._segments: list[Segment] = []

    def take(self, space: HostSpace | CudaSpace, nbytes: int) -> torch.Tensor:
        """This rank's bytes of a new piece, zeroed. Collective."""
        nbytes = max(_ALIGN, nbytes)
        if isinstance(space, HostSpace):
            segments = space.team.allocate(nbytes)
            self._segments += segments
            piece = tuple(segment.matrix(0, 1, nbytes, torch.uint8)[0] for segment in segments)
        else:
            space.watchdog.raise_if_failed()
            with space.team.failing():  # this GPU may be full, and the others wait for this rank
                memory, handle = gpu_symmetric(nbytes, space.team.near_meetings, space.device, meet=space.settle)
            space.settle()
            others = [handle.get_buffer(rank, (nbytes,), torch.uint8, 0) for rank in range(space.team.world_size)]
            piece = tuple(memory[:nbytes] if rank == self._rank else other for rank, other in enumerate(others))
        self._pieces.append(piece)
        return piece[self._rank]

    def find(self, tensor: torch.Tensor) -> Reach | None:
        """Where a contiguous tensor lies; None if in no piece."""
        for number, piece in enumerate(self._pieces):
            offset = tensor.data_ptr() - piece[self._rank].data_ptr()
            nbytes = tensor.numel() * tensor.element_size()
            if nbytes and 0 <= offset <= piece[self._rank].numel() - nbytes:
                return Reach(piece=number, offset=offset, by_rank=tuple(part[offset : offset + nbytes] for part in piece))
        return None

    def close(self) -> None:
        """Let go of all pieces. Their memory goes once no tensor of the caller's is left."""
        self._pieces.clear()
        for segment in self._segments:
            segment.close()
        self._segments.clear()
