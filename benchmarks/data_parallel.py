"""What does a data-parallel training step of a 1.5 B-parameter GPT gain, under DistributedDataParallel and fully_shard?

The model is examples/train_gpt.py's, of GPT-2 XL's size (48 layers, width 1600, 25 heads), in bfloat16, with activations of a
batch of 4 x 1024 tokens a GPU; a step is forward, backward and SGD. Methods: PyTorch as it is (`stock`), and weft's hooks in each
way that they would try, and `auto`, which tries them in its first steps.

Protocol: each method has a model of its own, made anew, WARM_UP steps (`auto`: as many as its trial takes, and some), and then
STEPS steps, each between two GPU events on the slowest rank; medians. Methods come one after the other, stock first and last: the
two show how far the machine drifted meanwhile. computation is a step of one rank alone.

    torchrun --nproc-per-node 4 benchmarks/data_parallel.py --json benchmarks/results/data_parallel.jsonl
    torchrun --nproc-per-node 4 benchmarks/data_parallel.py --kinds fsdp --layers 24
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import measure
import torch
import torch.distributed as dist
from measure import Failed, alarm, append, parser, release, row, say, start, stop, together
from torch import nn

import weft
from weft.beside.steps import WARM_UP as BEFORE_TRIAL
from weft.beside.trials import ROUNDS as TURNS
from weft.hooks import ddp as ddp_ways
from weft.hooks import fsdp as fsdp_ways

sys.path.append(str(Path(__file__).parents[1] / "examples"))
