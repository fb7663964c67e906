"""The symmetric heap: memory of which every rank of a node has the same number of bytes, and which all of them can address.

    heap = group.heap(device)                one for each group and device; goes with the group
    piece = heap.allocate(nbytes)            collective: zeroed bytes on every rank
    piece.local                              this rank's bytes
    piece.addresses                          where each rank's bytes lie, for this rank's device
    heap.free(piece)                         local

On CPUs the memory is POSIX shared memory, which each rank maps. On GPUs it is torch's symmetric memory, without multicast. All
ranks of a node allocate in the same order.

Making memory of GPUs takes milliseconds, since handles are exchanged and peers' memory is mapped, and autotuning binds and
drops several programs. With `reusable=True` what is freed is kept, by size, for the next allocation of that kind. Ranks free
and allocate in the same order, so that they take the same piece without exchanging a word.

    allocate(nbytes, reusable=True) of a piece that was kept
        all ranks settle      whoever used the piece last is done, everywhere
        zeroed                by its own rank
        all ranks settle      nobody writes before it is zeroed

That a GPU says it can reach a peer proves little in virtual machines. So the first piece is written by every peer and read from
every peer, once; the error names the pair that fails.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from weft.comm.shared_memory import AtomicWords, SharedSegment, unlink
from weft.compat.device import enqueued
from weft.compat.symmetric_memory import HandleExchange, empty, held

if TYPE_CHECKING:
    from weft.comm.rank_group import RankGroup

_LEAST_BYTES = 1024
_STEPS = 8
"""Sizes of pieces that are kept are rounded up to an eighth of the power of two below them: at most 12.5% is lost, and most
pieces fit again."""
_PROOF = 0x5EED0000
_SETTLE_S = 600.0
"""Bound of the wait for all devices, where that of calls is less: a rank may compile what others find compiled."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SymmetricPlace:
    """Where a tensor lies in symmetric memory. piece: the number of its piece, the same on every rank. by_rank: the same bytes
    of every rank."""

    piece: int
    offset: int
    by_rank: tuple[torch.Tensor, ...]

    def __str__(self) -> str:
        return f"piece {self.piece}, byte {self.offset}"


class Allocation(ABC):
    """Bytes on every rank of a node. ranks: of the node. rank: this one. number: the same on every rank. nbytes: at least as
    many as were asked for."""

    def __init__(self, number: int, nbytes: int, ranks: range, rank: int) -> None:
        self.number, self.nbytes, self.ranks, self.rank = number, nbytes, ranks, rank

    @property
    @abstractmethod
    def local(self) -> torch.Tensor:
        """This rank's bytes."""

    @property
    @abstractmethod
    def addresses(self) -> list[int]:
        """By rank within the node, where its bytes begin for this rank's device."""

    @abstractmethod
    def view(self, rank: int, offset: int, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """The bytes of a rank from `offset` on as a matrix."""

    def close(self) -> None:
        """Let go of the memory. It goes once no tensor on it is left."""
        self.__dict__.pop("_by_rank", None)

    @cached_property
    def _by_rank(self) -> tuple[torch.Tensor, ...]:
        """Every rank's bytes."""
        others = ((rank, self.view(rank, 0, 1, self.nbytes, torch.uint8)[0]) for rank in self.ranks)
        return tuple(self.local if rank == self.rank else theirs for rank, theirs in others)

    def find(self, tensor: torch.Tensor) -> SymmetricPlace | None:
        """Where a contiguous tensor of this rank lies in the piece; None if it does not."""
        offset, nbytes = tensor.data_ptr() - self.local.data_ptr(), tensor.numel() * tensor.element_size()
        if not nbytes or not 0 <= offset <= self.nbytes - nbytes:
            return None
        return SymmetricPlace(
            piece=self.number, offset=offset, by_rank=tuple(part[offset : offset + nbytes] for part in self._by_rank)
        )


class HostAllocation(Allocation):
    """In shared memory. segments: those of `ranks`."""

    def __init__(self, number: int, ranks: range, rank: int, segments: Sequence[SharedSegment]) -> None:
        super().__init__(number, segments[ranks.index(rank)].nbytes, ranks, rank)
        self._segments = dict(zip(ranks, segments, strict=True))

    @property
    def local(self) -> torch.Tensor:
        return self.view(self.rank, 0, 1, self.nbytes, torch.uint8)[0]

    @property
    def addresses(self) -> list[int]:
        return [segment.address for segment in self._segments.values()]

    def view(self, rank: int, offset: int, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        return self._segments[rank].matrix(offset, rows, cols, dtype)

    def words(self, rank: int, count: int | None = None) -> AtomicWords:
        """A rank's bytes, or the first of them, as words that are read and written atomically. count: default, all."""
        return self._segments[rank].words(0, count)

    def close(self) -> None:
        super().close()
        for segment in self._segments.values():
            segment.close()


class DeviceAllocation(Allocation):
    """In torch's symmetric memory. handle: torch's, of `ranks`. reusable: whether it is kept once it is freed."""

    def __init__(self, number: int, ranks: range, rank: int, memory: torch.Tensor, handle: Any, *, reusable: bool) -> None:
        super().__init__(number, memory.numel(), ranks, rank)
        self._memory, self._handle, self.reusable = memory, handle, reusable

    @property
    def local(self) -> torch.Tensor:
        return self._memory

    @property
    def addresses(self) -> list[int]:
        return [int(pointer) for pointer in self._handle.buffer_ptrs]

    def view(self, rank: int, offset: int, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        if rows * cols == 0:
            return torch.empty(rows, cols, dtype=dtype, device=self._memory.device)
        place = rank - self.ranks.start
        found: torch.Tensor = self._handle.get_buffer(place, (rows, cols), dtype, offset // dtype.itemsize)
        return found


class SymmetricHeap(ABC):
    """The memory that the ranks of a node share on one kind of device. What fails in an allocation ends the group's calls on
    all ranks: a peer may have found memory, and waits."""

    def __init__(self, group: RankGroup) -> None:
        self.group, self._made = group, 0
        self._live: dict[int, Allocation] = {}

    @abstractmethod
    def allocate(self, nbytes: int, *, reusable: bool = False) -> Allocation:
        """Zeroed bytes on every rank. Collective. reusable: where making memory is slow, `free` keeps it for the next
        allocation that is reusable."""

    def free(self, piece: Allocation) -> None:
        """Give a piece back that nothing on any rank uses any more. Memory that is not kept goes once no tensor on it is
        left."""
        if self._live.pop(piece.number, None) is not None:
            piece.close()

    def free_kept(self) -> None:
        """Free what is kept to be allocated again; here, nothing. In the same order among allocations on every rank."""
        return

    def close(self) -> None:
        """Free everything."""
        self.free_kept()
        while self._live:
            self._live.popitem()[1].close()

    def _number(self) -> int:
        self._made += 1
        return self._made


class HostHeap(SymmetricHeap):
    """Of ranks on CPUs, in shared memory. Pieces are made quickly, and none is kept."""

    def allocate(self, nbytes: int, *, reusable: bool = False) -> HostAllocation:
        """As SymmetricHeap.allocate. Raises ValueError where shared memory is too small for it."""
        group = self.group
        group.check_usable()
        with group.failing():
            mine = SharedSegment.create("data", nbytes)
            try:
                names = group.exchange_names(mine.name)
                segments = [mine if peer == group.rank else self._opened(peer, name) for peer, name in names.items()]
                group.await_mapped()
            finally:
                unlink(mine.name)
            piece = HostAllocation(self._number(), group.near, group.rank, segments)
        self._live[piece.number] = piece
        return piece

    def _opened(self, peer: int, name: str) -> SharedSegment:
        try:
            return SharedSegment.open(name)
        except FileNotFoundError:  # the peer has lost another rank, say, and has taken its own back: it reports that next
            self.group.until(lambda: False, lambda: f"rank {peer} has taken back a segment, and has not said why")
            raise


class DeviceHeap(SymmetricHeap):
    """Of ranks on GPUs, in torch's symmetric memory. device: this rank's."""

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        super().__init__(group)
        self.device = device
        self._kept: dict[int, list[DeviceAllocation]] = {}
        self._proved = False

    @cached_property
    def _rendezvous(self) -> HandleExchange:
        return rendezvous_of(self.group)

    def allocate(self, nbytes: int, *, reusable: bool = False) -> DeviceAllocation:
        """As SymmetricHeap.allocate. Raises torch.OutOfMemoryError, ValueError where a peer cannot be reached, and as
        HandleExchange.exchange."""
        with self.group.failing():
            size = rounded(nbytes) if reusable else max(_LEAST_BYTES, nbytes)
            kept = self._kept.get(size) if reusable else None
            piece = self._cleared(kept.pop()) if kept else self._new(size, reusable=reusable)
        self._live[piece.number] = piece
        return piece

    def free(self, piece: Allocation) -> None:
        if self._live.pop(piece.number, None) is not None and isinstance(piece, DeviceAllocation) and piece.reusable:
            self._kept.setdefault(piece.nbytes, []).append(piece)

    @property
    def kept_bytes(self) -> int:
        """What is kept to be allocated again. The same on every rank."""
        return sum(size * len(pieces) for size, pieces in self._kept.items())

    def free_kept(self) -> None:
        self._kept.clear()

    def settle(self) -> None:
        """Wait until every rank has come here, and its GPU has ended what its current stream has: not what other streams have,
        which may wait for a peer. Collective. Bounded, and peers are watched: no collective of the process group would be."""
        bound_s = max(self.group.timeout_s, _SETTLE_S)
        self.group.until(
            enqueued(self.device),
            lambda: (
                f"rank {self.group.rank}: what torch's current stream had before this call has not ended; if it waits for a "
                "receive or a collective that a peer begins after this call, make the first call of each size before that"
            ),
            bound_s,
        )
        self.group.enter("call: settle", within_s=bound_s)

    def _new(self, nbytes: int, *, reusable: bool) -> DeviceAllocation:
        """All ranks settle once each has its memory, since the rendezvous watches nobody."""
        area = empty(nbytes, self.device)
        self.settle()
        handle = self._rendezvous.exchange(area)
        area.zero_()
        group, memory = self.group, held(area, handle)
        piece = DeviceAllocation(self._number(), group.near, group.rank, memory, handle, reusable=reusable)
        self.settle()
        if not self._proved:
            self._prove(memory, handle)
            self._proved = True
            piece = self._cleared(piece)
        return piece

    def _cleared(self, piece: DeviceAllocation) -> DeviceAllocation:
        """The piece, zeroed, once whoever used it last is done on every rank."""
        self.settle()
        piece.local.zero_()
        self.settle()
        return piece

    def _prove(self, memory: torch.Tensor, handle: Any) -> None:
        """Every rank writes a word at every peer, and reads one back."""
        names = self.group.near
        rank, size = names.index(self.group.rank), len(names)
        words = [handle.get_buffer(peer, (2 * size,), torch.int32, 0) for peer in range(size)]
        words[rank][size + rank] = _PROOF + rank
        for peer in range(size):
            words[peer][rank] = _PROOF + rank
        self.settle()
        written, read = words[rank].tolist(), [int(words[peer][size + peer]) for peer in range(size)]
        for peer in range(size):
            if written[peer] != _PROOF + peer or read[peer] != _PROOF + peer:
                pair = f"{names[rank]} and {names[peer]}"
                raise ValueError(
                    f"group: the GPUs of ranks {pair} do not reach each other's memory (written {written[peer]:#x}, "
                    f"read {read[peer]:#x}, expected {_PROOF + peer:#x}); weft needs peer access: try `weft doctor`"
                )


def rounded(nbytes: int) -> int:
    """The size of a piece that is kept, from which `nbytes` are taken."""
    nbytes = max(_LEAST_BYTES, nbytes)
    step = max(_LEAST_BYTES, 1 << (nbytes.bit_length() - 1)) // _STEPS
    return -(-nbytes // step) * step


def rendezvous_of(group: RankGroup) -> HandleExchange:
    """Torch's rendezvous of the ranks of this one's node."""
    store = group.store(f"symmetric memory {group.near.start}")
    return HandleExchange(store, rank=group.near.index(group.rank), size=len(group.near))


def heap_of(group: RankGroup, device: torch.device) -> SymmetricHeap:
    """The heap of a group's ranks on a kind of device."""
    return HostHeap(group) if device.type == "cpu" else DeviceHeap(group, device)
