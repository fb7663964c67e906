"""Step 4: a sum over ranks. Each rank puts its partial sums at their owners; the owner adds them, in the order of ranks.

    python examples/triton/4_reduce_by_the_owner.py
    torchrun --nproc-per-node 4 examples/triton/4_reduce_by_the_owner.py

    rank r                                          owner of a tile
    put partial   ~~~~~~ partials[r, tile] ~~~~~~>
    signal        ~~~~~~ arrived[tile] ~~~~~~~~~~>  wait   arrived[tile]: world_size signals each time
                                                    sum    partials[0], partials[1], ... in float32
                                                    store, rounded once

`reduce_add` would need no room for partials, and no second pass: but it adds in the order in which ranks arrive, so that the
last bits differ from call to call. Here they never do. The places of the partials take turns, as in step 3, and so do flags: a
flag counts the signals of all ranks, and says how many there were, not by whom. In one word for both turns, a rank that is a
call ahead would stand for one that is late.
"""

from __future__ import annotations

from start import start  # isort: skip - decides whether Triton interprets, before Triton is imported

import torch
import triton
import triton.language as tl

from weft.triton import Peers, call_number, end_call, get, peer_pointer, put_signal, remote_first, wait

N = 3000
BLOCK = 1024


@triton.jit
def reduce_scatter_kernel(
    x_ptr,
    out_ptr,
    partials_ptr,
    partials_peers_ptr,
    arrived_ptr,
    arrived_peers_ptr,
    calls_ptr,
    rank,
    world_size,
    n,
    tries,
    status_ptr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """x: [world_size, n], out: [n], partials: [2, world_size, n], arrived: [2, tiles]."""
    call = call_number(calls_ptr)
    turn = (call % 2) * world_size * n
    tiles = tl.cdiv(n, BLOCK)
    flags = (call % 2) * tiles
    for step in range(tl.program_id(0), world_size * tiles, tl.num_programs(0)):
        dst_rank, tile = remote_first(step, tiles, rank, world_size)
        at = tile * BLOCK + tl.arange(0, BLOCK)
        x = get(x_ptr + dst_rank * n, at, at < n, ALIGN=ALIGN)
        there_ptr = peer_pointer(partials_ptr, partials_peers_ptr, dst_rank) + turn + rank * n
        flag_ptr = peer_pointer(arrived_ptr, arrived_peers_ptr, dst_rank) + flags + tile
        put_signal(there_ptr, at, x, at < n, flag_ptr, ALIGN=ALIGN)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        wait(arrived_ptr + flags + tile, (call + 1) // 2 * world_size, tries, status_ptr)
        total = tl.zeros((BLOCK,), tl.float32)
        for src_rank in range(world_size):
            total += get(partials_ptr + turn + src_rank * n, at, at < n, ALIGN=ALIGN).to(tl.float32)
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < n)
    end_call(calls_ptr)


def main() -> None:
    with Peers() as peers:
        size = peers.world_size
        partials = peers.tensor((2, size, N), torch.float16, name="partials")
        arrived, calls = peers.tensor((2, triton.cdiv(N, BLOCK)), torch.int32, name="arrived"), peers.calls()
        out = torch.empty(N, dtype=torch.float16, device=peers.device)
        for call in range(6):
            whole = torch.randn(size, size, N, generator=torch.Generator().manual_seed(call)).to(peers.device, torch.float16)
            reduce_scatter_kernel[(min(peers.resident_blocks, 8),)](
                whole[peers.rank],
                out,
                partials.local,
                partials.peers,
                arrived.local,
                arrived.peers,
                calls,
                peers.rank,
                size,
                N,
                peers.tries,
                peers.status,
                BLOCK=BLOCK,
                ALIGN=8,
            )
            peers.check()
            in_order = torch.zeros(N, device=peers.device)
            for src_rank in range(size):
                in_order += whole[src_rank, peers.rank].float()
            assert torch.equal(out, in_order.half()), f"call {call}"
        if peers.rank == 0:
            print(f"6 calls on {size} {peers.device.type} ranks: every sum is exact, in the order of ranks")


if __name__ == "__main__":
    start(main)
