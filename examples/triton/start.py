"""How the examples of this folder start: what torchrun started is a rank, else two ranks are started here.

A rank runs on a GPU where there is one for every rank, else on a CPU, under Triton's interpreter. That is decided before the
example imports Triton, which reads TRITON_INTERPRET when it is imported: so this module is imported first.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

RANKS = int(os.environ.get("LOCAL_WORLD_SIZE", "2"))
ON_GPUS = torch.cuda.device_count() >= RANKS
if not ON_GPUS:
    os.environ["TRITON_INTERPRET"] = "1"


def start(main: Callable[[], None]) -> None:
    """Run `main` on every rank, inside a process group."""
    if "LOCAL_RANK" not in os.environ:
        from weft.runtime.ranks import Ranks

        with Ranks(RANKS, device="cuda" if ON_GPUS else "cpu") as ranks:
            ranks.run(main)
        return
    if ON_GPUS:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
