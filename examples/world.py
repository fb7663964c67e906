"""How the examples join what torchrun has started."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist


def join() -> torch.device:
    """This rank's device, in a process group of all: its GPU (NCCL) if every rank of this host has one, else the CPU (gloo)."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"torchrun starts its ranks: torchrun --nproc-per-node 2 {' '.join(sys.argv)}")
    local, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() < ranks:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device
