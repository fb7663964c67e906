"""Independent computation beside collectives: data parallel, FSDP, pipelines.

    front.py         concurrent, as a call or a context              trials.py   which way is fastest: in one go, or use by use
    steps.py         the way of a training step                      blocks.py   which is fastest of steps, by blocks of them
    collectives.py   the values that say what is to run              sites.py    what is kept for each key
    device.py        how a way runs: host.py, cuda.py                kernels.py  kernels whose residency a way may cap

The ways themselves, and what they are predicted to take, are values of weft.planner.ways.
"""

from __future__ import annotations

from weft.overlap.beside.collectives import AllGather, AllReduce, AllToAll, Collective, ReduceScatter, SendReceive
from weft.overlap.beside.front import Concurrent, concurrent, concurrent_choices
from weft.overlap.beside.trials import Settled
from weft.planner.ways import Way

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Collective",
    "Concurrent",
    "ReduceScatter",
    "SendReceive",
    "Settled",
    "Way",
    "concurrent",
    "concurrent_choices",
]
