"""Independent computation beside collectives: data parallel, FSDP, pipelines.

    api.py           concurrent, as a call or a context        tuning.py     which schedule is fastest: in one go, or in use
    steps.py         the schedule of a training step           calls.py      what is bound for each key, and its choice
    collectives.py   the values that say what is to run        kernels.py    kernels whose residency may be capped
    executor.py      runs a schedule: on CPUs; cuda.py on GPUs

The schedules are those of weft.schedules.concurrent; they are proved, predicted and ranked as any other.
"""

from __future__ import annotations

from weft.overlap.concurrent.api import Concurrent, concurrent, concurrent_choices
from weft.overlap.concurrent.collectives import AllGather, AllReduce, AllToAll, Collective, ReduceScatter, SendReceive
from weft.overlap.concurrent.tuning import ConcurrentChoice

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Collective",
    "Concurrent",
    "ConcurrentChoice",
    "ReduceScatter",
    "SendReceive",
    "concurrent",
    "concurrent_choices",
]
