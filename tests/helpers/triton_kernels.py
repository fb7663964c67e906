"""Protocols on the device functions of weft.triton, for tests on any device: new data and one launch a call, results exact.

Exchange   every rank's row to every rank; a place is free once its reader has said so
Sums       every rank adds to every rank's sums; two slots that take turns
Slices     blocks share a slice, the last one signals for all; a second kernel waits
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

from weft.triton import (
    Peers,
    call_number,
    end_call,
    get,
    last_of,
    peer_pointer,
    put,
    put_signal,
    reduce_add,
    remote_first,
    signal,
    wait,
)

BLOCK, PARTS = 64, 3


class Calls(Protocol):
    """fill: this call's inputs. launch: its kernels, with arguments that never change. check: what they made."""

    def fill(self, call: int) -> None: ...
    def launch(self) -> None: ...
    def check(self, call: int) -> None: ...


def data(peers: Peers, call: int, src_rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What a rank sends in a call: small integers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(1000 * call + src_rank)
    return torch.randint(-8, 9, shape, generator=generator).to(peers.device, dtype)


@triton.jit
def exchange_kernel(
    x_ptr,
    y_ptr,
    y_peers_ptr,
    arrived_ptr,
    arrived_peers_ptr,
    free_ptr,
    free_peers_ptr,
    out_ptr,
    calls_ptr,
    rank,
    world_size,
    n,
    tries,
    status_ptr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    call = call_number(calls_ptr)
    tiles = tl.cdiv(n, BLOCK)
    for turn in range(tl.program_id(0), world_size * tiles, tl.num_programs(0)):
        dst_rank, tile = remote_first(turn, tiles, rank, world_size)
        at = tile * BLOCK + tl.arange(0, BLOCK)
        value = get(x_ptr + dst_rank * n, at, at < n, 0, ALIGN)
        wait(free_ptr + dst_rank * tiles + tile, call - 1, tries, status_ptr)
        there = peer_pointer(arrived_ptr, arrived_peers_ptr, dst_rank) + rank * tiles + tile
        put_signal(peer_pointer(y_ptr, y_peers_ptr, dst_rank) + rank * n, at, value, at < n, there, 1, ALIGN)
    for turn in range(tl.program_id(0), world_size * tiles, tl.num_programs(0)):
        src_rank, tile = turn // tiles, turn % tiles
        at = tile * BLOCK + tl.arange(0, BLOCK)
        wait(arrived_ptr + turn, call, tries, status_ptr)
        put(out_ptr + src_rank * n, at, get(y_ptr + src_rank * n, at, at < n, 0, ALIGN), at < n, ALIGN)
        signal(peer_pointer(free_ptr, free_peers_ptr, src_rank) + rank * tiles + tile)
    end_call(calls_ptr)


class Exchange:
    def __init__(self, peers: Peers, n: int, dtype: torch.dtype = torch.float16) -> None:
        self.peers, self.shape, self.dtype = peers, (peers.world_size, n), dtype
        self.x, self.out = torch.zeros(2, *self.shape, device=peers.device, dtype=dtype)
        self.y = peers.tensor(self.shape, dtype, name="y")
        words = peers.world_size * -(-n // BLOCK)
        self.arrived = peers.tensor(words, torch.int32, name="arrived")
        self.free = peers.tensor(words, torch.int32, name="free")
        self.calls = peers.calls()

    def fill(self, call: int) -> None:
        self.x.copy_(data(self.peers, call, self.peers.rank, self.shape, self.dtype))

    def launch(self) -> None:
        peers, n = self.peers, self.shape[1]
        exchange_kernel[(min(peers.resident_blocks, 7),)](
            self.x,
            self.y.local,
            self.y.peers,
            self.arrived.local,
            self.arrived.peers,
            self.free.local,
            self.free.peers,
            self.out,
            self.calls,
            peers.rank,
            peers.world_size,
            n,
            peers.tries,
            peers.status,
            BLOCK=BLOCK,
            ALIGN=next(align for align in (8, 4, 2, 1) if n % align == 0),
        )

    def check(self, call: int) -> None:
        for src_rank in range(self.peers.world_size):
            expected = data(self.peers, call, src_rank, self.shape, self.dtype)[self.peers.rank]
            assert torch.equal(self.out[src_rank], expected), (call, src_rank)


@triton.jit
def copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    put(y_ptr, at, get(x_ptr, at, at < n, ALIGN=16), at < n, ALIGN=16)


@triton.jit
def numbers_kernel(y_ptr, y_peers_ptr, sum_ptr, sum_peers_ptr, rank, world_size):
    peer = (rank + 1) % world_size
    put(peer_pointer(y_ptr, y_peers_ptr, peer), 0, 7)
    put(peer_pointer(y_ptr, y_peers_ptr, peer), 1, rank)
    reduce_add(peer_pointer(sum_ptr, sum_peers_ptr, peer), 0, 3)


@triton.jit
def sums_kernel(
    x_ptr,
    sum_ptr,
    sum_peers_ptr,
    added_ptr,
    added_peers_ptr,
    out_ptr,
    calls_ptr,
    rank,
    world_size,
    n,
    tries,
    status_ptr,
    BLOCK: tl.constexpr,
):
    """A slot has words of its own: in one for both, a rank that is a call ahead would stand for one that is late."""
    call = call_number(calls_ptr)
    slot = (call % 2) * n
    tiles = tl.cdiv(n, BLOCK)
    words = (call % 2) * tiles
    times = (call + 1) // 2
    for turn in range(tl.program_id(0), world_size * tiles, tl.num_programs(0)):
        dst_rank, tile = remote_first(turn, tiles, rank, world_size)
        at = tile * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x_ptr + dst_rank * n + at, mask=at < n)
        reduce_add(peer_pointer(sum_ptr, sum_peers_ptr, dst_rank) + slot, at, value, at < n)
        signal(peer_pointer(added_ptr, added_peers_ptr, dst_rank) + words + tile)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        wait(added_ptr + words + tile, times * world_size, tries, status_ptr)
        total = get(sum_ptr + slot, at, at < n)
        tl.store(out_ptr + at, total, mask=at < n)
        put(sum_ptr + slot, at, tl.zeros_like(total), at < n)
    end_call(calls_ptr)


class Sums:
    def __init__(self, peers: Peers, n: int, dtype: torch.dtype = torch.float32) -> None:
        self.peers, self.shape, self.dtype = peers, (peers.world_size, n), dtype
        self.x, self.out = torch.zeros(self.shape, device=peers.device, dtype=dtype), torch.zeros(n, device=peers.device)
        self.sums = peers.tensor((2, n), torch.float32, name="sums")
        self.added = peers.tensor(2 * -(-n // BLOCK), torch.int32, name="added")
        self.calls = peers.calls()

    def fill(self, call: int) -> None:
        self.x.copy_(data(self.peers, call, self.peers.rank, self.shape, self.dtype))

    def launch(self) -> None:
        peers = self.peers
        sums_kernel[(min(peers.resident_blocks, 7),)](
            self.x,
            self.sums.local,
            self.sums.peers,
            self.added.local,
            self.added.peers,
            self.out,
            self.calls,
            peers.rank,
            peers.world_size,
            self.shape[1],
            peers.tries,
            peers.status,
            BLOCK=BLOCK,
        )

    def check(self, call: int) -> None:
        ranks = range(self.peers.world_size)
        expected = sum(data(self.peers, call, src_rank, self.shape, torch.float32)[self.peers.rank] for src_rank in ranks)
        assert torch.equal(self.out, expected), call


@triton.jit
def turns_kernel(calls_ptr, out_ptr):
    call = call_number(calls_ptr)
    tl.store(out_ptr, call)
    tl.store(out_ptr + 1, call % 2)
    end_call(calls_ptr)


@triton.jit
def send_slices_kernel(
    x_ptr, y_ptr, y_peers_ptr, made_ptr, made_peers_ptr, counts_ptr, calls_ptr, rank, slices, BLOCK: tl.constexpr
):
    """Grid: (parts of a slice, slices of a rank, ranks). It waits for nothing, so it may have any number of blocks."""
    world_size = tl.num_programs(2)
    call = call_number(calls_ptr)
    parts = tl.num_programs(0)
    dst_rank, piece = remote_first(tl.program_id(2) * slices + tl.program_id(1), slices, rank, world_size)
    at = (piece * parts + tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    row = slices * parts * BLOCK
    value = tl.load(x_ptr + dst_rank * row + at)
    put(peer_pointer(y_ptr, y_peers_ptr, dst_rank) + ((call % 2) * world_size + rank) * row, at, value)
    if last_of(counts_ptr + dst_rank * slices + piece, parts):
        signal(peer_pointer(made_ptr, made_peers_ptr, dst_rank) + rank * slices + piece)
    end_call(calls_ptr)


@triton.jit
def take_slices_kernel(y_ptr, made_ptr, out_ptr, calls_ptr, world_size, slices, tries, status_ptr, SLICE: tl.constexpr):
    call = call_number(calls_ptr)
    row = slices * SLICE
    for turn in range(tl.program_id(0), world_size * slices, tl.num_programs(0)):
        wait(made_ptr + turn, call, tries, status_ptr)
        for start in range(0, SLICE, 64):
            at = turn * SLICE + start + tl.arange(0, 64)
            tl.store(out_ptr + at, get(y_ptr + (call % 2) * world_size * row, at))
    end_call(calls_ptr)


class Slices:
    """Each rank sends to every rank and waits for every rank, so that two slots are enough."""

    def __init__(self, peers: Peers, slices: int, dtype: torch.dtype = torch.float16) -> None:
        self.peers, self.slices, self.dtype = peers, slices, dtype
        self.shape = (peers.world_size, slices * PARTS * BLOCK)
        self.x, self.out = torch.zeros(2, *self.shape, device=peers.device, dtype=dtype)
        self.y = peers.tensor((2, *self.shape), dtype, name="y")
        self.made = peers.tensor(peers.world_size * slices, torch.int32, name="made")
        self.counts = torch.zeros(peers.world_size * slices, dtype=torch.int32, device=peers.device)
        self.sent, self.taken = peers.calls(), peers.calls()

    def fill(self, call: int) -> None:
        self.x.copy_(data(self.peers, call, self.peers.rank, self.shape, self.dtype))

    def launch(self) -> None:
        peers, slices = self.peers, self.slices
        y, made = self.y, self.made
        send_slices_kernel[(PARTS, slices, peers.world_size)](
            self.x, y.local, y.peers, made.local, made.peers, self.counts, self.sent, peers.rank, slices, BLOCK=BLOCK
        )
        take_slices_kernel[(min(peers.resident_blocks, 5),)](
            y.local, made.local, self.out, self.taken, peers.world_size, slices, peers.tries, peers.status, SLICE=PARTS * BLOCK
        )

    def check(self, call: int) -> None:
        for src_rank in range(self.peers.world_size):
            expected = data(self.peers, call, src_rank, self.shape, self.dtype)[self.peers.rank]
            assert torch.equal(self.out[src_rank], expected), (call, src_rank)
        assert not self.counts.any()


PROTOCOLS: dict[str, type[Exchange] | type[Sums] | type[Slices]] = {"exchange": Exchange, "sums": Sums, "slices": Slices}


@triton.jit
def hammer_kernel(sum_ptr, sum_peers_ptr, flag_ptr, flag_peers_ptr, world_size, times, tries, status_ptr, N: tl.constexpr):
    """All ranks add to and signal the same words of every rank, again and again: none may be lost."""
    at = tl.arange(0, N)
    for _ in range(times):
        for peer in range(world_size):
            reduce_add(peer_pointer(sum_ptr, sum_peers_ptr, peer), at, at + 1)
            signal(peer_pointer(flag_ptr, flag_peers_ptr, peer), 2)
    wait(flag_ptr, 2 * times * world_size, tries, status_ptr)


@triton.jit
def wrapping_kernel(flag_ptr, out_ptr, at_least, beyond, tries, status_ptr):
    """A signal, a wait that it opens, one that it does not."""
    signal(flag_ptr)
    tl.store(out_ptr, wait(flag_ptr, at_least, tries, status_ptr).to(tl.int32))
    tl.store(out_ptr + 1, wait(flag_ptr, beyond, 0, status_ptr).to(tl.int32))
