"""Step 5: a fused operator. matmul + reduce_scatter in one kernel, whose tiles leave as soon as they are finished.

    python examples/triton/5_fused_operator.py
    torchrun --nproc-per-node 4 examples/triton/5_fused_operator.py

It replaces two calls, the second of which waits for all of the first:

    partial_MN = a_Mk @ b_kN                        each rank has a part of K
    out_mN = reduce_scatter(partial_MN)             summed over ranks, rows split among them

    rank r                                          owner of a tile's rows
    multiply a tile, of peers' rows first
    put, signal   ~~~~~~ partials[r], arrived ~~~>
    multiply the next one, while it travels         ...
    own tiles last
                                                    wait, sum in the order of ranks, store: as in step 4

Only what is sent last is exposed. The multiplication loop is the plain one: the exchange is in its epilogue, five lines of the
device functions, and in a second loop over the own tiles.

Legend: M N K full extents, m k a rank's part.
"""

from __future__ import annotations

from start import start  # isort: skip - decides whether Triton interprets, before Triton is imported

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from weft.triton import Peers, call_number, end_call, get, peer_pointer, put, put_signal, remote_first, wait

BLOCK = 32
M, N, K = 4 * 3 * 32, 72, 4 * 40
"""Rows divide by ranks and blocks; columns and the inner extent by 8, which is 16 bytes of float16."""


@triton.jit
def multiply(a_ptr, b_ptr, row, col, N, k, BLOCK: tl.constexpr):
    """One tile of the partial product in float32. a: [M, k], b: [k, N], both contiguous."""
    rows, cols = row + tl.arange(0, BLOCK)[:, None], col + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start_k in range(0, k, BLOCK):
        inner = start_k + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + rows * k + inner[None, :], mask=inner[None, :] < k, other=0.0)
        b = tl.load(b_ptr + inner[:, None] * N + cols, mask=(inner[:, None] < k) & (cols < N), other=0.0)
        total = tl.dot(a, b, total)
    return total


@triton.jit
def matmul_reduce_scatter_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    partials_ptr,
    partials_peers_ptr,
    arrived_ptr,
    arrived_peers_ptr,
    calls_ptr,
    rank,
    world_size,
    m,
    N,
    k,
    tries,
    status_ptr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """a: [M, k], b: [k, N], out: [m, N], partials: [2, world_size, m, N], arrived: [2, tiles of out]."""
    call = call_number(calls_ptr)
    turn = (call % 2) * world_size * m * N
    col_tiles = tl.cdiv(N, BLOCK)
    tiles = (m // BLOCK) * col_tiles
    flags = (call % 2) * tiles
    for step in range(tl.program_id(0), world_size * tiles, tl.num_programs(0)):
        dst_rank, tile = remote_first(step, tiles, rank, world_size)
        row, col = tile // col_tiles * BLOCK, tile % col_tiles * BLOCK
        partial = multiply(a_ptr, b_ptr, dst_rank * m + row, col, N, k, BLOCK)
        cols = col + tl.arange(0, BLOCK)[None, :]
        at = (row + tl.arange(0, BLOCK)[:, None]) * N + cols
        there_ptr = peer_pointer(partials_ptr, partials_peers_ptr, dst_rank) + turn + rank * m * N
        flag_ptr = peer_pointer(arrived_ptr, arrived_peers_ptr, dst_rank) + flags + tile
        put_signal(there_ptr, at, partial, cols < N, flag_ptr, ALIGN=ALIGN)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, col = tile // col_tiles * BLOCK, tile % col_tiles * BLOCK
        cols = col + tl.arange(0, BLOCK)[None, :]
        at = (row + tl.arange(0, BLOCK)[:, None]) * N + cols
        wait(arrived_ptr + flags + tile, (call + 1) // 2 * world_size, tries, status_ptr)
        total = tl.zeros((BLOCK, BLOCK), tl.float32)
        for src_rank in range(world_size):
            total += get(partials_ptr + turn + src_rank * m * N, at, cols < N, ALIGN=ALIGN).to(tl.float32)
        put(out_ptr, at, total, cols < N, ALIGN=ALIGN)
    end_call(calls_ptr)


class MatmulReduceScatter:
    """out_mN = reduce_scatter(a_Mk @ b_kN), call after call, for one problem. Collective."""

    def __init__(self, peers: Peers, *, m: int, columns: int) -> None:
        if m % BLOCK or columns % 8:
            raise ValueError(f"m is {m} and columns is {columns}; they must be multiples of {BLOCK} and 8")
        self.peers, self.m, self.columns = peers, m, columns
        self.partials = peers.tensor((2, peers.world_size, m, columns), torch.float16, name="partials")
        self.arrived = peers.tensor((2, m // BLOCK, triton.cdiv(columns, BLOCK)), torch.int32, name="arrived")
        self.calls = peers.calls()

    def __call__(self, a_Mk: torch.Tensor, b_kN: torch.Tensor) -> torch.Tensor:
        peers = self.peers
        out_mN = a_Mk.new_empty(self.m, self.columns)
        tiles = peers.world_size * self.arrived.local[0].numel()
        matmul_reduce_scatter_kernel[(min(peers.resident_blocks, tiles),)](
            a_Mk,
            b_kN,
            out_mN,
            self.partials.local,
            self.partials.peers,
            self.arrived.local,
            self.arrived.peers,
            self.calls,
            peers.rank,
            peers.world_size,
            self.m,
            self.columns,
            a_Mk.shape[1],
            peers.tries,
            peers.status,
            BLOCK=BLOCK,
            ALIGN=8,
        )
        return out_mN


def main() -> None:
    with Peers() as peers:
        size, rank = peers.world_size, peers.rank
        operator = MatmulReduceScatter(peers, m=M // size // BLOCK * BLOCK, columns=N)
        rows = size * operator.m
        for call in range(6):
            generator = torch.Generator().manual_seed(100 * call + rank)
            a_Mk = torch.randn(rows, K // size, generator=generator).to(peers.device, torch.float16)
            b_kN = (torch.randn(K // size, N, generator=generator) * K**-0.5).to(peers.device, torch.float16)
            expected = a_Mk.float() @ b_kN.float()
            dist.all_reduce(expected)
            out_mN = operator(a_Mk, b_kN)
            peers.check()
            error = (out_mN.float() - expected.view(size, -1, N)[rank]).abs().max().item()
            bound = (1 + size) * torch.finfo(torch.float16).eps * expected.abs().max().item()
            assert error <= bound, f"call {call}: {error} from the sequential program, rounding explains {bound}"
        if rank == 0:
            print(f"6 calls on {size} {peers.device.type} ranks: matmul + reduce_scatter in one kernel, as two calls would")


if __name__ == "__main__":
    start(main)
