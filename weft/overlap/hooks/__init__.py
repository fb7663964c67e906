"""PyTorch's own data parallelism: gradients that weft averages, and when parameters are gathered.

data_parallel.py    gradients of DistributedDataParallel
fully_sharded.py    parameters of FSDP2's fully_shard
gathered.py         when these are gathered, and how long they stay
units.py            which modules fully_shard should take together
methods.py          the names that both take
"""

from __future__ import annotations

from weft.overlap.hooks.data_parallel import ddp, replicate
from weft.overlap.hooks.fully_sharded import fsdp
from weft.overlap.hooks.units import units

__all__ = ["ddp", "fsdp", "replicate", "units"]
