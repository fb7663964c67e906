"""Step 2: data. A rank puts a vector at the next rank and signals; that one waits, and reads it.

    python examples/triton/2_put_with_signal.py
    torchrun --nproc-per-node 4 examples/triton/2_put_with_signal.py

    rank r                                          rank r + 1
    wait   free: what it brought last is read
    put    x           ~~~~~~~~~ inbox ~~~~~~~~~~>
    signal             ~~~~~~~~~ arrived ~~~~~~~~>  wait   arrived
                                                    get    inbox
    (next call)        <~~~~~~~~ free ~~~~~~~~~~~~  signal

Without `free`, a rank that is a call ahead overwrites what its peer still reads:

    put call 1, signal, put call 2  ~>  wait call 1, get: half of it is call 2's

`arrived` is written by the rank before and waited for by the owner; `free` by the rank after. In call e the reader asks for
arrived >= e, the writer for free >= e - 1: in the first call the inbox is free.
"""

from __future__ import annotations

from start import start  # isort: skip - decides whether Triton interprets, before Triton is imported

import torch
import triton
import triton.language as tl

from weft.triton import Peers, call_number, end_call, get, peer_pointer, put_signal, signal, wait

N = 1000
BLOCK = triton.next_power_of_2(N)


@triton.jit
def shift_kernel(
    x_ptr,
    out_ptr,
    inbox_ptr,
    inbox_peers_ptr,
    flags_ptr,
    flags_peers_ptr,
    calls_ptr,
    previous_rank,
    next_rank,
    n,
    tries,
    status_ptr,
    BLOCK: tl.constexpr,
):
    """flags: [arrived, free] of this rank. n: a multiple of 4, which is 16 bytes of float32."""
    call = call_number(calls_ptr)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    wait(flags_ptr + 1, call - 1, tries, status_ptr)
    arrived_ptr = peer_pointer(flags_ptr, flags_peers_ptr, next_rank)
    put_signal(peer_pointer(inbox_ptr, inbox_peers_ptr, next_rank), at, x, at < n, arrived_ptr, ALIGN=4)
    wait(flags_ptr, call, tries, status_ptr)
    tl.store(out_ptr + at, get(inbox_ptr, at, at < n, ALIGN=4), mask=at < n)
    signal(peer_pointer(flags_ptr, flags_peers_ptr, previous_rank) + 1)
    end_call(calls_ptr)


def main() -> None:
    with Peers() as peers:
        inbox = peers.tensor(N, torch.float32, name="inbox")
        flags, calls = peers.tensor(2, torch.int32, name="arrived, free"), peers.calls()
        out = torch.empty(N, device=peers.device)
        previous_rank, next_rank = (peers.rank - 1) % peers.world_size, (peers.rank + 1) % peers.world_size
        for call in range(6):
            x = torch.arange(N, dtype=torch.float32, device=peers.device) + 10000 * call + 1000 * peers.rank
            shift_kernel[(1,)](
                x,
                out,
                inbox.local,
                inbox.peers,
                flags.local,
                flags.peers,
                calls,
                previous_rank,
                next_rank,
                N,
                peers.tries,
                peers.status,
                BLOCK=BLOCK,
            )
            peers.check()
            assert torch.equal(out, x + 1000 * (previous_rank - peers.rank)), f"call {call}"
        if peers.rank == 0:
            print(f"6 calls on {peers.world_size} {peers.device.type} ranks: every vector came from the rank before")


if __name__ == "__main__":
    start(main)
