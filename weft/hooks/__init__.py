"""Where PyTorch's own data parallelism takes its collectives from weft.

ddp.py    gradients of DistributedDataParallel       fsdp.py   parameters and gradients of FSDP2's fully_shard
"""

from __future__ import annotations

from weft.hooks.ddp import ddp
from weft.hooks.fsdp import fsdp

__all__ = ["ddp", "fsdp"]
