"""One operator in place of two calls, under torchrun: all_gather_matmul beside the sequential program that it replaces.

    torchrun --nproc-per-node 4 examples/01_one_operator.py
    torchrun --nproc-per-node 4 examples/01_one_operator.py --schedule flag_gated:2

It runs on GPUs (NCCL) where there is one for every rank, else on CPUs (gloo). Each rank has a shard of the rows of a and
of the columns of b, as under tensor and sequence parallelism; both programs give it all rows of its columns of the product.

Legend: M N K full extents, m n a rank's part.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from world import join

import weft


def draw(rows: int, cols: int, *, seed: int, scale: float, device: torch.device) -> torch.Tensor:
    """A random matrix in bfloat16."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return (torch.randn(rows, cols, generator=generator, device=device) * scale).to(torch.bfloat16)


def sequential(a_mK: torch.Tensor, b_Kn: torch.Tensor) -> torch.Tensor:
    """What weft replaces: nothing is multiplied before everything has been gathered."""
    a_MK = a_mK.new_empty(dist.get_world_size() * a_mK.shape[0], a_mK.shape[1])
    dist.all_gather(list(a_MK.chunk(dist.get_world_size())), a_mK)
    return a_MK @ b_Kn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", default="auto", help="auto, or NAME[:CHUNKS] of `weft schedules`")
    parser.add_argument("--rows", type=int, default=128, help="rows of a on each rank")
    options = parser.parse_args()
    device = join()
    rank, k = dist.get_rank(), 1024
    a_mK = draw(options.rows, k, seed=rank, scale=1.0, device=device)
    b_Kn = draw(k, 256, seed=1000 + rank, scale=k**-0.5, device=device)

    expected = sequential(a_mK, b_Kn)
    out_Mn = weft.all_gather_matmul(a_mK, b_Kn, schedule=options.schedule)

    difference = (out_Mn.float() - expected.float()).abs().max() / expected.float().abs().max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    if rank == 0:
        where = f"{dist.get_world_size()} {device.type} ranks, schedule {options.schedule}"
        print(f"all_gather_matmul on {where}: out {list(out_Mn.shape)}")
        print(f"largest difference from all_gather, then matmul: {float(difference):.1e} of the largest element")
    weft.close()
    dist.destroy_process_group()
    if not difference <= 2 * torch.finfo(torch.bfloat16).eps:  # also where it is nan
        raise SystemExit("that is more than rounding explains")


if __name__ == "__main__":
    main()
