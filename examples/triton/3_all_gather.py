"""Step 3: an all-gather. Many blocks put the tiles of a shard at every rank, and each tile has a flag of its own.

    python examples/triton/3_all_gather.py
    torchrun --nproc-per-node 4 examples/triton/3_all_gather.py

    block b of rank r                               any rank
    for each tile of mine, peers first, own last:
      put, signal        ~~~~~~~~~~~~~~~~~~~~~~~~>  arrived[rank r, tile] grows by 1
    for each tile of any rank:
      wait arrived[src_rank, tile], get, use it

No rank is waited for before all has been sent, so the ranks cannot wait for each other in a circle; and the grid is no larger
than what runs at once, so that no block waits for one that has not begun.

The landing places take turns: call e writes those of e % 2. Every rank waits in each call for all ranks. So when a rank writes
in call e, it has seen the signals of call e - 1 of every peer, each of which came after that peer's call e - 2: what
that call brought has been read, and no flag has to say so.
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
def all_gather_kernel(
    x_ptr,
    out_ptr,
    landing_ptr,
    landing_peers_ptr,
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
    """x: [n], out: [world_size, n], landing: [2, world_size, n], arrived: [world_size, tiles]."""
    call = call_number(calls_ptr)
    turn = (call % 2) * world_size * n
    tiles = tl.cdiv(n, BLOCK)
    for step in range(tl.program_id(0), world_size * tiles, tl.num_programs(0)):
        dst_rank, tile = remote_first(step, tiles, rank, world_size)
        at = tile * BLOCK + tl.arange(0, BLOCK)
        there_ptr = peer_pointer(landing_ptr, landing_peers_ptr, dst_rank) + turn + rank * n
        flag_ptr = peer_pointer(arrived_ptr, arrived_peers_ptr, dst_rank) + rank * tiles + tile
        put_signal(there_ptr, at, get(x_ptr, at, at < n, ALIGN=ALIGN), at < n, flag_ptr, ALIGN=ALIGN)
    for step in range(tl.program_id(0), world_size * tiles, tl.num_programs(0)):
        src_rank, tile = step // tiles, step % tiles
        at = tile * BLOCK + tl.arange(0, BLOCK)
        wait(arrived_ptr + step, call, tries, status_ptr)
        tl.store(out_ptr + src_rank * n + at, get(landing_ptr + turn + src_rank * n, at, at < n, ALIGN=ALIGN), mask=at < n)
    end_call(calls_ptr)


def main() -> None:
    with Peers() as peers:
        size = peers.world_size
        landing = peers.tensor((2, size, N), torch.float16, name="landing")
        arrived = peers.tensor((size, triton.cdiv(N, BLOCK)), torch.int32, name="arrived")
        calls, out = peers.calls(), torch.empty(size, N, dtype=torch.float16, device=peers.device)
        for call in range(6):
            whole = torch.randn(size, N, generator=torch.Generator().manual_seed(call)).to(peers.device, torch.float16)
            all_gather_kernel[(min(peers.resident_blocks, 8),)](
                whole[peers.rank],
                out,
                landing.local,
                landing.peers,
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
            assert torch.equal(out, whole), f"call {call}"
        if peers.rank == 0:
            print(f"6 calls on {size} {peers.device.type} ranks: all shards are everywhere")


if __name__ == "__main__":
    start(main)
