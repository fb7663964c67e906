"""The base profile has the numbers that no probe measures. For GPUs it is the nearest shipped profile, and for a CPU a model
of the host executor."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

from weft.core.machine import AlphaBeta, CopyEngines, Gpu, Links, Machine, Stores, Tile, load, numbers
from weft.core.problem import ITEMSIZE
from weft.runtime.nearest import nearest_profile

REPORTED = "the device's own report"
"""The source of numbers that the device reports, which need no probe."""
_TILE = 64


def base(device: str, ranks: int) -> Machine:
    """Return a complete profile, in which measured numbers replace others. device: "cpu" or "cuda"."""
    return _host(ranks) if device == "cpu" else _gpu()


def _gpu() -> Machine:
    nearest = nearest_profile(torch.device("cuda", 0))
    found = torch.cuda.get_device_properties(0)
    gpu = dataclasses.replace(nearest.gpu, sms=found.multi_processor_count, l2_bytes=found.L2_cache_size)
    reported = dict.fromkeys(("gpu.sms", "gpu.l2_bytes"), REPORTED)
    return dataclasses.replace(nearest, gpu=gpu, sources={**nearest.sources, **reported})


def _host(ranks: int) -> Machine:
    """Model a rank's share of the cores as SMs with small square tiles. All copies share the host's memory.

    Every 1 is a placeholder for a number that is measured, or that does not matter for the host executor."""
    threads = max(2, (os.cpu_count() or 1) // ranks)
    gpu = Gpu(
        sms=threads,
        tflops=dict.fromkeys(ITEMSIZE, 1e-3),
        tiles=(Tile(rows=_TILE, cols=_TILE, efficiency=1.0),),
        tile_us=1.0,
        flag_efficiency=1.0,
        hbm_gbps=1.0,
        l2_bytes=1,
        half_tile=1.0,
        cut_k=8192,
        gather_share=1.0,
        burst_bytes=64,
    )
    values: dict[str, Any] = {
        "name": "host executor",
        "description": "modelled",
        "world_size": ranks,
        "gpu": gpu,
        "copies": CopyEngines(copy_us=1.0, gbps=1.0, several_gbps=1.0, engines=1),
        "stores": Stores(gbps=((1, 1.0), (threads, 1.0)), sms=1, sms_alone=1, stall=1.0),
        "kernels": load("h200x8").kernels,
        "links": Links(topology="pcie", gbps=1.0, latency_us=1.0, host_gbps=1.0),
        "launch_us": 1.0,
        "flag_us": 1.0,
        "collectives": {op: AlphaBeta(fixed_us=1.0, step_us=1.0, gbps=1.0) for op in ("all_gather", "reduce_scatter")},
    }
    paths = dict.fromkeys(path for key, value in values.items() for path, _ in numbers(value, key))
    return Machine(**values, sources=dict.fromkeys(paths, "assumed, a placeholder of the model"))
