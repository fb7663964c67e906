"""A System of T3 whose numbers are small enough to follow by hand."""

from __future__ import annotations

from weft_studies.profile import changed
from weft_studies.t3.system import LayerGemm, T3System, load

TINY = {
    "units": 2,
    "clock_ghz": 1.0,
    "flops_per_clock": 1,
    "unit_gbps": 16.0,
    "pipeline": 4,
    "tile.rows": 4,
    "tile.cols": 4,
    "tile.k": 4,
    "tile.group_rows": 2,
    "tile.wavefronts": 1,
    "llc.bytes": 1024,
    "llc.latency_ns": 20,
    "hbm.gbps": 64.0,
    "hbm.latency_ns": 20,
    "hbm.channels": 1,
    "hbm.queue_entries": 1,
    "hbm.update_cost": 1.0,
    "link.gbps": 1.0,
    "link.latency_ns": 10,
    "dma_tiles": 1,
}
"""A slice takes 128 ns, its fill 20; a tile has 32 bytes, which two units hand over at 32 a ns and a link takes 32 ns for."""


def tiny(**changes: float) -> T3System:
    """The small system; names of changes have __ for a dot."""
    return with_numbers(load(), TINY | {name.replace("__", "."): value for name, value in changes.items()})


def with_numbers(system: T3System, values: dict[str, float]) -> T3System:
    for path, value in values.items():
        system = changed(system, path, value)
    return system


def product(m: int, n: int, k: int) -> LayerGemm:
    return LayerGemm(name=f"{m} x {n} x {k}", m=m, n=n, k=k)
