"""GEMM: waves of tiles on the units of one GPU, and what they ask of its memory.

    a wave    | fill | slice | slice | .... | slice | store |      the next wave starts where this one ends

fill: the first slice comes from memory. A slice is multiplied while the next one is fetched, so it takes as long as the longer
of the two: with S slices in shared memory, max(multiply, latency / (S - 1)); a unit has at most `unit_gbps` * memory
latency bytes under way, which bounds the latency that deep or wide slices hide. Memory's rate may bind, too: the wave's slices
bring what the cache does not hold, and the lines that outputs push out of it.
store: units have `unit_gbps` * memory latency bytes under way, so they hand outputs over at that much in a cache's latency.
What is written to the cache leaves it with the next wave, or when the kernel ends.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import simpy

from weft.studies.t3.grid import Grid
from weft.studies.t3.llc import input_reads
from weft.studies.t3.memory import GpuMemory
from weft.studies.t3.system import T3System

Process = Generator[simpy.Event, Any, None]


def main_loop(memory: GpuMemory, grid: Grid, traffic: dict[str, int]) -> Process:
    """One wave until its last product: fill, then all slices, which move `traffic` bytes by class."""
    system = memory.system
    yield memory.env.timeout(round(memory.latency_ns()))

    multiply, under_way = system.slice_ns, slices_under_way(system)

    def pace() -> float:
        return 1 / max(multiply, memory.latency_ns() / under_way)

    yield memory.flow("compute", grid.slices, pace, traffic)


def slices_under_way(system: T3System) -> float:
    """How many slices a unit fetches at a time: all that have room in shared memory but the one that is multiplied, and no
    more than the bytes that a unit can have under way."""
    return min(system.tile.stages - 1, system.unit_gbps * system.hbm.latency_ns / system.slice_bytes)


def store_gbps(system: T3System, units: int) -> float:
    """Rate at which so many units hand their outputs over."""
    return units * system.unit_gbps * system.hbm.latency_ns / system.llc.latency_ns


def cached(memory: GpuMemory, grid: Grid, units: int) -> Process:
    """The whole GEMM on so many units, alone: outputs go through the cache."""
    evicted = 0
    for wave, read in zip(grid.waves(units), input_reads(grid, units, bypass=False), strict=True):
        yield from main_loop(memory, grid, {"gemm_read": read, "gemm_write": evicted})
        evicted = grid.share(wave)
        rate = store_gbps(memory.system, len(wave))
        yield memory.flow("compute", evicted, lambda rate=rate: rate, {})  # type: ignore[misc]
    yield memory.flow("compute", evicted, lambda: memory.system.hbm.gbps, {"gemm_write": evicted})


def tracked(memory: GpuMemory, grid: Grid, store: Callable[[range], Process], enters: Callable[[range], int]) -> Process:
    """The GEMM on all units, with outputs that go where `store` says: it takes a wave's tiles and ends when the units are free
    again. The outputs bypass the cache if the system says so. enters: if it does not, the bytes of a wave's outputs that enter
    the cache."""
    units = memory.system.units
    reads = input_reads(grid, units, bypass=memory.system.mechanisms.llc_bypass, enters=enters)
    for wave, read in zip(grid.waves(units), reads, strict=True):
        yield from main_loop(memory, grid, {"gemm_read": read})
        yield from store(wave)
