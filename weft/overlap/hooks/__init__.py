"""Hooks for PyTorch's data parallelism: weft averages DDP's gradients, and sets when FSDP2 gathers parameters.

data_parallel.py    averages the gradients of DistributedDataParallel
fully_sharded.py    sets when FSDP2's fully_shard gathers parameters, and groups modules for it
"""

from __future__ import annotations

from weft.overlap.hooks.data_parallel import ddp, replicate
from weft.overlap.hooks.fully_sharded import fsdp, units

__all__ = ["ddp", "fsdp", "replicate", "units"]
