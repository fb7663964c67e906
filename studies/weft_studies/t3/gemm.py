"""This module simulates a GEMM as waves of tiles on the units of one GPU, with their memory traffic.

    a wave    | fill | slice | slice | .... | slice | store |      the next wave starts when this one ends

fill: the units fetch the first slice from memory.
slice: a slice is multiplied while the next one is fetched, so each step takes the longer of the two times. With S slices in
shared memory this is max(multiply, latency / (S - 1)). A unit has at most `unit_gbps` * memory latency bytes in flight, which
limits the latency that deep or wide slices hide. The memory's rate can also be the limit: a wave's slices cause the reads that
miss the cache, and the writes of the output lines that they evict.
store: a unit hands over `unit_gbps` * memory latency bytes of output per cache latency. Outputs in the cache are evicted during
the next wave, or when the kernel ends.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import simpy

from weft_studies.t3.grid import Grid
from weft_studies.t3.llc import input_reads
from weft_studies.t3.memory import GpuMemory
from weft_studies.t3.system import T3System

Process = Generator[simpy.Event, Any, None]


def main_loop(memory: GpuMemory, grid: Grid, traffic: dict[str, int]) -> Process:
    """Simulate the fill and all slices of one wave. The slices move `traffic` bytes by class."""
    system = memory.system
    yield memory.env.timeout(round(memory.latency_ns()))

    multiply, under_way = system.slice_ns, slices_under_way(system)

    def pace() -> float:
        return 1 / max(multiply, memory.latency_ns() / under_way)

    yield memory.flow("compute", grid.slices, pace, traffic)


def slices_under_way(system: T3System) -> float:
    """Return the number of slices that a unit fetches at a time.

    The limits are the room in shared memory, of which the multiplied slice takes one place, and the bytes that a unit can have
    in flight."""
    return min(system.tile.stages - 1, system.unit_gbps * system.hbm.latency_ns / system.slice_bytes)


def store_gbps(system: T3System, units: int) -> float:
    """Return the rate at which this number of units hand their outputs over."""
    return units * system.unit_gbps * system.hbm.latency_ns / system.llc.latency_ns


def cached(memory: GpuMemory, grid: Grid, units: int) -> Process:
    """Simulate a GEMM that runs alone on this number of units. Its outputs go through the cache."""
    evicted = 0
    for wave, read in zip(grid.waves(units), input_reads(grid, units, bypass=False), strict=True):
        yield from main_loop(memory, grid, {"gemm_read": read, "gemm_write": evicted})
        evicted = grid.share(wave)
        rate = store_gbps(memory.system, len(wave))
        yield memory.flow("compute", evicted, lambda rate=rate: rate, {})  # type: ignore[misc]
    yield memory.flow("compute", evicted, lambda: memory.system.hbm.gbps, {"gemm_write": evicted})


def tracked(memory: GpuMemory, grid: Grid, store: Callable[[range], Process], enters: Callable[[range], int]) -> Process:
    """Simulate a GEMM on all units whose outputs go through `store`. They bypass the cache if the system's `llc_bypass` is on.

    store: stores a wave's tiles, and ends when the units are free again.
    enters: returns the bytes of a wave's outputs that enter the cache without `llc_bypass`."""
    units = memory.system.units
    reads = input_reads(grid, units, bypass=memory.system.mechanisms.llc_bypass, enters=enters)
    for wave, read in zip(grid.waves(units), reads, strict=True):
        yield from main_loop(memory, grid, {"gemm_read": read})
        yield from store(wave)
