"""Collectives that run concurrently with independent computation: data parallel, FSDP, pipelines.

    api.py           concurrent, as a call or a context        choice.py     which schedule the planner chooses
    collectives.py   the collectives as values                 calls.py      the caches of a group, and what is measured
    executor.py      runs a schedule on CPUs                   cuda.py       runs a schedule on GPUs

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
