"""Ulysses' attention under torchrun: both exchanges, each hidden behind the matmul beside it.

    torchrun --nproc-per-node 4 examples/04_ulysses.py
    torchrun --nproc-per-node 4 examples/04_ulysses.py --into track_and_trigger:2 --out flag_gated:4

Each rank has a part of the sequence; attention needs all of it, for some of the heads (arXiv 2309.14509):

    x [tokens, hidden]      a part of the sequence
      @ weight              columns: heads outermost, each with its query, key and value
    qkv [sequence, heads / ranks, 3, dim]       all_to_all: columns cut, rows of all ranks below each other
    attention
    mixed [sequence, heads / ranks * dim]       all_to_all: rows cut, columns of all ranks side by side
      @ weight
    y [tokens, hidden]      a part of the sequence

It runs on GPUs (NCCL) where there is one for every rank, else on CPUs (gloo).
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from world import join

import weft

HEADS_PER_RANK, DIM = 2, 64


def attention(qkv: torch.Tensor) -> torch.Tensor:
    """qkv [sequence, heads, 3, dim] -> [sequence, heads * dim]."""
    q, k, v = qkv.permute(2, 1, 0, 3)
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(0, 1).flatten(1)


def ulysses(x: torch.Tensor, into: torch.Tensor, out: torch.Tensor, options: argparse.Namespace) -> torch.Tensor:
    """x, the result: [tokens, hidden], this rank's part. into: [hidden, heads * 3 * dim]. out: [heads * dim, hidden]."""
    qkv = weft.matmul_all_to_all(x, into, schedule=options.into, split_dim=-1)
    mixed = attention(qkv.view(qkv.shape[0], -1, 3, DIM))
    return weft.all_to_all_matmul(mixed, out, schedule=options.out, gather_dim=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", default="auto", help="schedule of the way to heads")
    parser.add_argument("--out", default="auto", help="schedule of the way back")
    parser.add_argument("--tokens", type=int, default=64, help="on each rank")
    options = parser.parse_args()
    device = join()
    rank, size = dist.get_rank(), dist.get_world_size()
    hidden = heads_by_dim = size * HEADS_PER_RANK * DIM
    torch.manual_seed(0)  # the same on every rank: each could do all of it alone
    x = torch.randn(size * options.tokens, hidden, device=device)
    into = torch.randn(hidden, 3 * heads_by_dim, device=device) * hidden**-0.5
    out = torch.randn(heads_by_dim, hidden, device=device) * hidden**-0.5
    mine = slice(rank * options.tokens, (rank + 1) * options.tokens)

    y = ulysses(x[mine], into, out, options)
    whole = attention((x @ into).view(x.shape[0], -1, 3, DIM)) @ out

    difference = (y - whole[mine]).abs().max() / whole.abs().max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"Ulysses on {size} {device.type} ranks: {x.shape[0]} tokens, {size * HEADS_PER_RANK} heads, y {list(y.shape)}")
        print(f"largest difference from attention on one rank: {float(difference):.1e} of the largest element")
    weft.close()
    dist.destroy_process_group()
    if not difference <= 0.01:  # also where it is nan; GPUs may multiply in TF32
        raise SystemExit("that is more than rounding explains")


if __name__ == "__main__":
    main()
