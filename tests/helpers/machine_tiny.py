"""A made-up machine whose times can be worked out by hand: a 4 x 4 tile of k=8 takes 1.5 us, 64 bytes move in 1 us."""

from __future__ import annotations

import dataclasses
from typing import Any

from weft.core.hardware import AlphaBeta, CopyEngines, Gpu, Links, Stores, Tile, Topology, numbers
from weft.core.machine import Machine, load


def tiny(*, world_size: int = 2, topology: Topology = "switch", link_gbps: float = 0.064, **changes: Any) -> Machine:
    """Two SMs at 256 flop/us each, launch 3 us, flag 0.5, copy 2, latency 0.25. changes: of CopyEngines."""
    copies = CopyEngines(copy_us=2.0, gbps=1000.0, several_gbps=1000.0, engines=1)
    machine = {
        "name": "tiny",
        "description": "made up",
        "world_size": world_size,
        "gpu": Gpu(
            sms=2,
            tflops={"bfloat16": 512e-6},
            tiles=(Tile(rows=4, cols=4, efficiency=1.0),),
            tile_us=0.5,
            flag_efficiency=1.0,
            hbm_gbps=1e6,
            l2_bytes=1,
            half_tile=0.8,
            cut_k=8192,
            gather_share=1.04,
            burst_bytes=64,
        ),
        "copies": dataclasses.replace(copies, **changes),
        "stores": Stores(gbps=((1, 0.064), (2, 0.064)), sms=1, sms_alone=1, stall=0.5),
        "kernels": load("h200x8").kernels,
        "links": Links(topology=topology, gbps=link_gbps, latency_us=0.25, host_gbps=0.064 if topology == "pcie" else None),
        "launch_us": 3.0,
        "flag_us": 0.5,
        "collectives": {op: AlphaBeta(fixed_us=5.0, step_us=1.0, gbps=0.064) for op in ("all_gather", "reduce_scatter")},
    }
    sources = {path: "made up" for key, value in machine.items() for path, _ in numbers(value, key)}
    return Machine(**machine, sources=sources)  # type: ignore[arg-type]
