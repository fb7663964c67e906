"""The symmetric heap allocates the same number of bytes on every rank of a node, and every rank can address all of them.

    heap = heap_of(group, device)            one for each group and device; closed with the group
    piece = heap.allocate(nbytes)            collective: zeroed bytes on every rank
    piece.local                              this rank's bytes
    piece.addresses                          the address of each rank's bytes, for this rank's device
    heap.free(piece)                         local

On CPUs the memory is POSIX shared memory, which each rank maps. On GPUs it is torch's symmetric memory, without multicast. All
ranks of a node allocate in the same order.

Allocating GPU memory takes milliseconds, because handles are exchanged and peers' memory is mapped, and autotuning binds and
drops several programs. With `reusable=True` a freed piece is cached by size for the next reusable allocation. Ranks free and
allocate in the same order, so they take the same piece without communication.

    allocate(nbytes, reusable=True) of a cached piece
        all ranks settle      the last use of the piece has ended on every rank
        zeroed                by its own rank
        all ranks settle      no rank writes before it is zeroed

In virtual machines a GPU may report peer access that does not work. So every peer writes into the first piece and reads from it
once. The error names the pair that fails. Before ranks share GPU memory, they compare how their processes were started, as far
as it decides whether their GPUs can work together, so that all of them raise the same error if they cannot.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from weft.comm.rank_group import RankGroup
from weft.comm.shared_memory import AtomicWords, SharedSegment, unlink
from weft.compat.c10d import HandleExchange, empty, held
from weft.compat.device import enqueued, gpu_number
from weft.core.hardware import DEFAULT_QUEUES, hardware_queues

OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""An environment variable of torch. Unless it is 1, torch's symmetric memory identifies a GPU by its index in a process."""
BLOCKING = "CUDA_LAUNCH_BLOCKING"
_SET_HERE: set[str] = set()
"""The environment variables that weft has set, as opposed to the user."""
_BLOCKS = (
    "CUDA_LAUNCH_BLOCKING is set on a rank, so its host would wait for a kernel that waits for a later one; unset "
    "CUDA_LAUNCH_BLOCKING"
)
_NO_POOLS = (
    "a rank uses torch's allocator cudaMallocAsync, which lacks the memory pools that overlapping needs; leave "
    "backend:cudaMallocAsync out of PYTORCH_ALLOC_CONF"
)
_FEW_QUEUES = (
    f"CUDA_DEVICE_MAX_CONNECTIONS is below {DEFAULT_QUEUES} on a rank, so the release after the loss of a peer could queue "
    "behind the wait; leave CUDA_DEVICE_MAX_CONNECTIONS out"
)
_LEAST_BYTES = 1024
_STEPS = 8
"""Sizes of reusable pieces are rounded up to a multiple of an eighth of the power of two below them. At most 12.5% is lost, and
most pieces fit a later allocation."""
_PROOF = 0x5EED0000
_SETTLE_S = 600.0
"""The least bound of the wait for all devices, in s. One rank may compile a kernel that the others find compiled."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SymmetricPlace:
    """A SymmetricPlace says where a tensor is stored in symmetric memory.

    piece: the number of its piece, the same on every rank.
    offset: the byte within the piece.
    by_rank: the same bytes of every rank.
    """

    piece: int
    offset: int
    by_rank: tuple[torch.Tensor, ...]

    def __str__(self) -> str:
        return f"piece {self.piece}, byte {self.offset}"


class Allocation(ABC):
    """An Allocation is a piece of symmetric memory: as many bytes on every rank of a node.

    ranks: the ranks of the node.
    rank: this rank.
    number: the number of the piece, the same on every rank.
    nbytes: its size, which is at least what was asked for.
    """

    def __init__(self, number: int, nbytes: int, ranks: range, rank: int) -> None:
        self.number, self.nbytes, self.ranks, self.rank = number, nbytes, ranks, rank

    @property
    @abstractmethod
    def local(self) -> torch.Tensor:
        """Return this rank's bytes."""

    @property
    @abstractmethod
    def addresses(self) -> list[int]:
        """Return the address of each rank's bytes for this rank's device, by rank within the node."""

    @abstractmethod
    def view(self, rank: int, offset: int, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the bytes of a rank from `offset` on as a matrix."""

    def close(self) -> None:
        """Release the memory. It is freed once no tensor refers to it."""
        self.__dict__.pop("_by_rank", None)

    @cached_property
    def _by_rank(self) -> tuple[torch.Tensor, ...]:
        others = ((rank, self.view(rank, 0, 1, self.nbytes, torch.uint8)[0]) for rank in self.ranks)
        return tuple(self.local if rank == self.rank else theirs for rank, theirs in others)

    def find(self, tensor: torch.Tensor) -> SymmetricPlace | None:
        """Return where a contiguous tensor of this rank is stored in the piece. Return None if it is stored elsewhere."""
        offset, nbytes = tensor.data_ptr() - self.local.data_ptr(), tensor.numel() * tensor.element_size()
        if not nbytes or not 0 <= offset <= self.nbytes - nbytes:
            return None
        return SymmetricPlace(
            piece=self.number, offset=offset, by_rank=tuple(part[offset : offset + nbytes] for part in self._by_rank)
        )


class HostAllocation(Allocation):
    """A HostAllocation is a piece in shared memory. segments: the shared memory of each of `ranks`."""

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
        return self._segments[rank].view_matrix(offset, rows, cols, dtype)

    def words(self, rank: int, count: int | None = None) -> AtomicWords:
        """Return the first `count` words of a rank, which are read and written atomically. By default return all."""
        return self._segments[rank].view_words(0, count)

    def close(self) -> None:
        super().close()
        for segment in self._segments.values():
            segment.close()


class DeviceAllocation(Allocation):
    """A DeviceAllocation is a piece of torch's symmetric memory.

    handle: torch's handle, of `ranks`.
    reusable: whether it is cached when it is freed.
    """

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
    """A SymmetricHeap allocates the memory that the ranks of a node share on one kind of device.

    An error in an allocation ends the group's calls on all ranks, because a peer may have succeeded, and then waits.
    """

    def __init__(self, group: RankGroup) -> None:
        self.group, self._made = group, 0
        self._live: dict[int, Allocation] = {}

    @abstractmethod
    def allocate(self, nbytes: int, *, reusable: bool = False) -> Allocation:
        """Allocate zeroed bytes on every rank. Collective.

        reusable: if allocating is slow on this device, `free` caches the piece for the next reusable allocation.
        """

    def free(self, piece: Allocation) -> None:
        """Free a piece that no rank uses any more. Memory that is not cached is freed once no tensor refers to it."""
        if self._live.pop(piece.number, None) is not None:
            piece.close()

    def free_cached(self) -> None:
        """Free the cached pieces; here there are none. All ranks call it between the same two allocations."""
        return

    def close(self) -> None:
        """Free everything."""
        self.free_cached()
        while self._live:
            self._live.popitem()[1].close()

    def _next_number(self) -> int:
        self._made += 1
        return self._made


class HostHeap(SymmetricHeap):
    """A HostHeap allocates shared memory for ranks on CPUs. Allocating is quick, so nothing is cached."""

    def allocate(self, nbytes: int, *, reusable: bool = False) -> HostAllocation:
        """Allocate as SymmetricHeap.allocate does. Raises ValueError if shared memory is too small."""
        group = self.group
        group.check_usable()
        with group.fail_group_on_error():
            mine = SharedSegment.create("data", nbytes)
            try:
                names = group.exchange_names(mine.name)
                segments = [mine if peer == group.rank else self._open(peer, name) for peer, name in names.items()]
                group.await_mapped()
            finally:
                unlink(mine.name)
            piece = HostAllocation(self._next_number(), group.ranks_on_node, group.rank, segments)
        self._live[piece.number] = piece
        return piece

    def _open(self, peer: int, name: str) -> SharedSegment:
        try:
            return SharedSegment.open(name)
        except (
            FileNotFoundError
        ):  # the peer has removed its segment, for example because it has lost another rank, which it reports next
            self.group.wait_until(
                lambda: False, lambda: f"rank {peer} has removed a segment of shared memory, and has not reported an error"
            )
            raise


class DeviceHeap(SymmetricHeap):
    """A DeviceHeap allocates torch's symmetric memory for ranks on GPUs. device: this rank's GPU."""

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        super().__init__(group)
        self.device = device
        self._cached: dict[int, list[DeviceAllocation]] = {}
        self._peer_access_checked = False

    @cached_property
    def _rendezvous(self) -> HandleExchange:
        return rendezvous_of(self.group)

    def allocate(self, nbytes: int, *, reusable: bool = False) -> DeviceAllocation:
        """Allocate as SymmetricHeap.allocate does.

        Raises torch.OutOfMemoryError, ValueError if the memory of a peer cannot be reached, and what HandleExchange.exchange
        raises.
        """
        with self.group.fail_group_on_error():
            size = reusable_size(nbytes) if reusable else max(_LEAST_BYTES, nbytes)
            cached = self._cached.get(size) if reusable else None
            piece = self._clear(cached.pop()) if cached else self._allocate_new(size, reusable=reusable)
        self._live[piece.number] = piece
        return piece

    def free(self, piece: Allocation) -> None:
        if self._live.pop(piece.number, None) is not None and isinstance(piece, DeviceAllocation) and piece.reusable:
            self._cached.setdefault(piece.nbytes, []).append(piece)

    @property
    def cached_bytes(self) -> int:
        """Return the total size of all cached pieces in bytes. It is the same on every rank."""
        return sum(size * len(pieces) for size, pieces in self._cached.items())

    def free_cached(self) -> None:
        self._cached.clear()

    def settle(self) -> None:
        """Wait until the current stream of every rank has completed its work. Collective.

        Other streams are not waited for, because they may wait for a peer. The wait is bounded and detects lost peers, which a
        collective of the process group would not do.
        """
        bound_s = max(self.group.timeout_s, _SETTLE_S)
        self.group.wait_until(
            enqueued(self.device),
            lambda: (
                f"rank {self.group.rank}: the work on torch's current stream before this call has not ended; if it waits for a "
                "receive or a collective that a peer begins after this call, make the first call of each size before that"
            ),
            bound_s,
        )
        self.group.agree_on_call("call: settle", within_s=bound_s)

    def _allocate_new(self, nbytes: int, *, reusable: bool) -> DeviceAllocation:
        """Allocate memory and map that of the peers.

        All ranks settle after the allocation, because torch's rendezvous does not detect lost peers.
        """
        area = empty(nbytes, self.device)
        self.settle()
        handle = self._rendezvous.exchange(area)
        area.zero_()
        group, memory = self.group, held(area, handle)
        piece = DeviceAllocation(self._next_number(), group.ranks_on_node, group.rank, memory, handle, reusable=reusable)
        self.settle()
        if not self._peer_access_checked:
            self._check_peer_access(memory, handle)
            self._peer_access_checked = True
            piece = self._clear(piece)
        return piece

    def _clear(self, piece: DeviceAllocation) -> DeviceAllocation:
        """Zero a piece after its last use has ended on every rank, and return it."""
        self.settle()
        piece.local.zero_()
        self.settle()
        return piece

    def _check_peer_access(self, memory: torch.Tensor, handle: Any) -> None:
        """Write a word into the memory of every peer, and read one from it. Raises ValueError if a value is wrong."""
        names = self.group.ranks_on_node
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
                    f"read {read[peer]:#x}, expected {_PROOF + peer:#x}); weft needs peer access; run `weft doctor`"
                )


def reusable_size(nbytes: int) -> int:
    """Return the size of a reusable piece for `nbytes`."""
    nbytes = max(_LEAST_BYTES, nbytes)
    step = max(_LEAST_BYTES, 1 << (nbytes.bit_length() - 1)) // _STEPS
    return -(-nbytes // step) * step


def rendezvous_of(group: RankGroup) -> HandleExchange:
    """Return the exchange of memory handles between the ranks of this node."""
    store = group.open_store(f"symmetric memory {group.ranks_on_node.start}")
    return HandleExchange(store, rank=group.ranks_on_node.index(group.rank), size=len(group.ranks_on_node))


def heap_of(group: RankGroup, device: torch.device) -> SymmetricHeap:
    """Return the heap that the ranks of a node share on a device. It is closed with the group.

    Collective at its first use on a GPU. Raises ValueError if the ranks' GPUs cannot share memory.
    """
    heap = group.heaps.get(device)
    if not isinstance(heap, SymmetricHeap):
        if device.type == "cuda":
            group.cannot_overlap = agree_on_launch(group, device)
        heap = group.heaps[device] = HostHeap(group) if device.type == "cpu" else DeviceHeap(group, device)
    return heap


def agree_on_launch(group: RankGroup, device: torch.device) -> str:
    """Return the reason why overlapping schedules cannot run on these GPUs, or an empty string. Collective.

    Where each rank sees its own GPU alone, every rank calls it cuda:0, and torch's symmetric memory would take them for one
    GPU. So this sets OVERLAPPING for the process. Raises ValueError on all ranks if two ranks of a node do share a GPU, unless
    the user has set OVERLAPPING on all ranks.
    """
    on_node = group.ranks_on_node
    numbers = group.agree_on_call("call: GPUs", gpu_number(device))
    blocks = os.environ.get(BLOCKING, "") not in ("", "0")
    pools = torch.cuda.get_allocator_backend() == "native"
    overlaps = os.environ.get(OVERLAPPING) == "1" and OVERLAPPING not in _SET_HERE
    few = hardware_queues() < DEFAULT_QUEUES
    # The bits say that launches block, that pools are off, that the user lets ranks share GPUs, and that queues are few. The
    # device's index follows.
    mine = blocks + 2 * (not pools) + 4 * overlaps + 8 * few + 16 * (device.index or 0)
    facts = group.agree_on_call("call: how ranks were started", mine)
    if not all(fact & 4 for fact in facts):
        refuse_shared_gpus(on_node, [numbers[rank] for rank in on_node])
    if len({facts[rank] >> 4 for rank in on_node}) < len(on_node) and not overlaps:  # what the user has set stays the user's
        _SET_HERE.add(OVERLAPPING)
        os.environ[OVERLAPPING] = "1"
    reasons = {1: _BLOCKS, 2: _NO_POOLS, 8: _FEW_QUEUES}
    return next((reason for bit, reason in reasons.items() if any(fact & bit for fact in facts)), "")


def refuse_shared_gpus(ranks: Sequence[int], numbers: Sequence[int]) -> None:
    """Raise ValueError if two ranks of a node use the same GPU. numbers: the identity of each rank's GPU."""
    for at, number in enumerate(numbers):
        if (first := numbers.index(number)) < at:
            raise ValueError(
                f"ranks {ranks[first]} and {ranks[at]} use the same GPU; give each rank a GPU of its own: call "
                "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), start at most as many ranks as there are GPUs, and let "
                "CUDA_VISIBLE_DEVICES, where it is set, name another GPU for each rank"
            )
