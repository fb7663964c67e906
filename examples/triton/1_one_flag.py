"""Step 1: one flag. Every rank tells the next one that it was here, and waits for the one before it, in one kernel.

    python examples/triton/1_one_flag.py
    torchrun --nproc-per-node 4 examples/triton/1_one_flag.py

    rank r                                   rank r + 1
    signal  ~~~~~~~~~ flag grows by 1 ~~~~>  wait until the flag holds at least the number of this call

A signal adds and is never taken back, so the flag says how often the rank before was here: a rank that is late finds it
higher than it asks for, and goes on. The kernel counts its own calls, so no argument changes from call to call.
"""

from __future__ import annotations

from start import start  # isort: skip - decides whether Triton interprets, before Triton is imported

import torch
import triton
import triton.language as tl

from weft.triton import Peers, call_number, end_call, peer_pointer, signal, wait


@triton.jit
def pass_on_kernel(flag_ptr, flag_peers_ptr, calls_ptr, next_rank, seen_ptr, tries, status_ptr):
    call = call_number(calls_ptr)
    signal(peer_pointer(flag_ptr, flag_peers_ptr, next_rank))
    tl.store(seen_ptr, wait(flag_ptr, call, tries, status_ptr).to(tl.int32))
    end_call(calls_ptr)


def main() -> None:
    with Peers() as peers:
        flag, calls = peers.tensor(1, torch.int32, name="flag"), peers.calls()
        seen = torch.zeros(1, dtype=torch.int32, device=peers.device)
        next_rank = (peers.rank + 1) % peers.world_size
        for _ in range(6):
            pass_on_kernel[(1,)](flag.local, flag.peers, calls, next_rank, seen, peers.tries, peers.status)
            peers.check()  # raises if the wait ended at its bound
            assert seen.item() == 1
        peers.settle()
        assert flag.local.item() == 6
        if peers.rank == 0:
            print(f"6 calls on {peers.world_size} {peers.device.type} ranks: each flag was raised 6 times")


if __name__ == "__main__":
    start(main)
