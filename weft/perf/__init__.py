"""Simulator: interprets a Schedule on a Machine, event by event, and predicts its Spans.

    engine.py  world.py  room.py                 lanes of all ranks, event by event; clock, flags, links and spans; free SMs
    kernels.py  lookups.py  staging.py           GEMMs and sums, lookups, what vendors' libraries need done around them
    transfers.py  messages.py                    copies and collectives; sends and receives between nodes
    network.py  fluid.py  contention.py          links as fluids that transfers share; kernels and copies that slow each other
    cost.py  alone.py  warm.py  rescaled.py      what a kernel or a step takes alone; with warm caches; on other links
    graph.py                                     a schedule as nodes, for simulators of whole systems
    profile.py  published.py                     numbers with sources that can be changed; published ones beside ours

Rooms of their own: t3, ficco and dlrm, published evaluations; fabric, more GPUs than one host has.
"""

from weft.perf.cost import collective_us, gemm_us
from weft.perf.engine import Outcome, run, simulate

__all__ = ["Outcome", "collective_us", "gemm_us", "run", "simulate"]
