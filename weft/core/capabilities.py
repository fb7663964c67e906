"""Capabilities: the numbers of a GPU from which tile shapes and launches are chosen.

A launch asks the device (weft.compat.device), a prediction reads the machine's profile, and a test passes its own. No choice
depends on a GPU's name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The capabilities of one GPU.

    sms: the number of streaming multiprocessors, or compute units.
    shared_bytes: the most shared memory that one block may ask for.
    matrix_16bit: the GPU has matrix units for 16-bit operands.
    tma: the hardware loads and stores tensor descriptors asynchronously.
    exact_fp8: the matrix units sum products of FP8 operands in float32. Those of Hopper keep about 14 bits.
    warp: the number of threads in a warp.
    """

    sms: int
    shared_bytes: int
    matrix_16bit: bool = True
    tma: bool
    exact_fp8: bool = False
    warp: int = 32
