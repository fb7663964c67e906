"""Collectives that run concurrently with independent computation: data parallel, FSDP, pipelines.

    api.py           concurrent, as a call or a context        choice.py     which schedule: planned, or measured
    collectives.py   the collectives as values                 calls.py      the caches of a process group
    executor.py      runs a schedule: on CPUs; cuda.py on GPUs kernels.py    kernels whose residency may be capped

The schedules are those of weft.schedules.concurrent; they are proved, predicted and ranked as any other.
"""

from __future__ import annotations

from weft.overlap.concurrent.api import Concurrent, concurrent, concurrent_choices
from weft.overlap.concurrent.choice import ConcurrentChoice
from weft.overlap.concurrent.collectives import AllGather, AllReduce, AllToAll, ConcurrentCollective, ReduceScatter, SendReceive

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Concurrent",
    "ConcurrentChoice",
    "ConcurrentCollective",
    "ReduceScatter",
    "SendReceive",
    "concurrent",
    "concurrent_choices",
]
