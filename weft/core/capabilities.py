"""Capabilities: what a GPU offers to kernels, as numbers that tile shapes and launches are chosen by.

A launch asks the device (weft.compat.device), a prediction takes the machine's, and a test gives its own. The names of GPUs
decide nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """One GPU. sms: streaming multiprocessors, or compute units. shared_bytes: the most shared memory that one block may ask
    for. tma: tensor descriptors are loaded and stored asynchronously, by hardware. warp: threads in a warp.

    sm_flop_per_us: what one SM's matrix units sustain in bfloat16. hbm_bytes_per_us, l2_bytes: of the whole GPU's memory, and
    of its last-level cache.
    """

    sms: int
    shared_bytes: int
    matrix_16bit: bool = True
    tma: bool
    warp: int = 32
    sm_flop_per_us: float
    hbm_bytes_per_us: float
    l2_bytes: float


H200 = Capabilities(
    sms=132,
    shared_bytes=227 << 10,
    tma=True,
    sm_flop_per_us=5.3e6,
    hbm_bytes_per_us=3.8e6,
    l2_bytes=4.0e7,
)
"""The GPU that the tile shapes were measured on. Rates are what its kernels reached (docs/log.md), not those of its data sheet;
of its 50 MB of cache, 40 MB keep one operand."""
