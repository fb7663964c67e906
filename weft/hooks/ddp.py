"""Gradients of DistributedDataParallel, averaged bucket by bucket beside the backward pass, in the way found fastest.

    autograd's stream            collectives' stream
    ... gradients of bucket 0
    fork  -------------------->  average bucket 0
    ... gradients of bucket 1
    fork  -------------------->  average bucket 1
    end of backward: join  <---
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from weft.beside.collectives import AllReduce
from weft.beside.steps import StepTrial

WAYS = ("sequential", "vendor", "vendor+priority", "vendor+priority+ctas=16", "copy_engine+priority+ctas=8")
"""What steps take in turn on GPUs. None leaves SMs free: a budget for GEMMs would hold for the step's forward pass, too."""
WAYS_ON_CPU = ("sequential", "vendor", "copy_engine")
