"""Hooks for PyTorch's data parallelism: weft averages DDP's gradients, and sets when FSDP2 gathers parameters.

data_parallel.py    averages the gradients of DistributedDataParallel
fully_sharded.py    hooks into FSDP2's fully_shard
gathered.py         sets when parameters are gathered, and how long they stay gathered
units.py            groups modules for fully_shard
methods.py          checks the method of a hook
"""

from __future__ import annotations

from weft.overlap.hooks.data_parallel import ddp, replicate
from weft.overlap.hooks.fully_sharded import fsdp
from weft.overlap.hooks.units import units

__all__ = ["ddp", "fsdp", "replicate", "units"]
