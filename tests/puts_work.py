"""NVSHMEM for CPUs, in tests: torch's two operations on memory of this host, as they are documented, and checked while used.

`symmetric` gives every rank a piece of memory; a put finds the piece that its data lies in, and writes to the same place of its
peer's. Ranks are threads of one process, or processes: then pieces are files that all of them map.

    put_with_signal     the peer's data, then the peer's word; a word that is up already was raised twice: an error
    wait_for_signal     until the word is the value, no more and no less
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from weft.runtime.slots import Slot

_BOUND_S = 60.0


class Shmem:
    """Pieces of symmetric memory by rank. late: called before every put and wait, to be slow now and then."""

    def __init__(self, late: Callable[[str, int], None] = lambda what, rank: None) -> None:
        self._pieces: list[Sequence[torch.Tensor]] = []
        self._late = late
        self.puts = 0

    def symmetric(self, nbytes: int, world_size: int, folder: Path | None = None) -> Sequence[torch.Tensor]:
        """Zeroed bytes of every rank. folder: of this piece alone, where ranks are processes."""
        size = max(1, nbytes)
        if folder is None:
            piece = [torch.zeros(size, dtype=torch.uint8) for _ in range(world_size)]
        else:
            piece = [_mapped(folder / str(rank), size) for rank in range(world_size)]
        self._pieces.append(piece)
        return piece

    def _find(self, tensor: torch.Tensor) -> tuple[Sequence[torch.Tensor], int, int]:
        """(its piece, its rank, its first byte there)."""
        for piece in self._pieces:
            for rank, memory in enumerate(piece):
                offset = tensor.data_ptr() - memory.data_ptr()
                if 0 <= offset < memory.numel():
                    return piece, rank, offset
        raise AssertionError("the tensor is not symmetric")

    def put(self, place: torch.Tensor, word: torch.Tensor, signal: int, peer: int, data: torch.Tensor | None = None) -> None:
        """data: what is put at the peer's `place`; default: what lies at this rank's."""
        piece, rank, offset = self._find(place)
        self._late("put", rank)
        piece[peer][offset : offset + place.numel()].copy_(place if data is None else data)
        self.signal(word, signal, peer)
        self.puts += 1

    def signal(self, word: torch.Tensor, signal: int, peer: int) -> None:
        piece, rank, at = self._find(word)
        there = piece[peer][at : at + 8].view(torch.int64)
        assert there.item() == 0, f"rank {rank} raises a word of rank {peer} that is up"
        there.fill_(signal)

    def wait(self, word: torch.Tensor, signal: int, peer: int) -> None:
        self._late("wait", self._find(word)[1])
        deadline = time.monotonic() + _BOUND_S
        while word.item() != signal:
            assert time.monotonic() < deadline, f"waited for {signal} of rank {peer}, seen {word.item()}"
            time.sleep(1e-5)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """While torch's operations are these."""
        library = torch.library.Library("symm_mem", "IMPL", "CPU")
        library.impl("nvshmem_put_with_signal", lambda *given: self.put(*given))
        library.impl("nvshmem_wait_for_signal", self.wait)
        try:
            yield
        finally:
            library._destroy()


def _mapped(path: Path, nbytes: int) -> torch.Tensor:
    """A file that others map at the same time. torch.from_file would set its first byte to 0, whatever they have written."""
    with path.open("ab") as file:
        os.ftruncate(file.fileno(), nbytes)
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)


class Words:
    """A rank's turn words: weft.runtime.puts.Turns. mapped: what it puts to these ranks takes no slot of its own."""

    def __init__(self, shmem: Shmem, memory: torch.Tensor, words: int, mapped: Collection[int]) -> None:
        self._shmem, self._memory, self.mapped = shmem, memory, mapped
        self._words = memory[: 8 * words].view(torch.int64)

    def _at(self, word: int) -> torch.Tensor:
        return self._words[word : word + 1]

    def claim(self, word: int) -> None:
        self._shmem.wait(self._at(word), 1, -1)
        self.lower(word)

    def lower(self, word: int) -> None:
        self._at(word).zero_()

    def hand(self, word: int, peer: int) -> None:
        self._shmem.signal(self._at(word), 1, peer)

    def put(self, source: torch.Tensor, slot: Slot) -> None:
        data = source.contiguous().view(-1).view(torch.uint8)
        self._shmem.put(self._memory[slice(*slot.span)], self._at(slot.word), 1, slot.dst_rank, data)
