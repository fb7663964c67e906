"""Capabilities: what a GPU offers to kernels, as numbers that tile shapes and launches are chosen by.

A launch asks the device (weft.compat.device), a prediction takes the machine's, and a test gives its own. The names of GPUs
decide nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """One GPU. sms: streaming multiprocessors, or compute units. shared_bytes: the most shared memory that one block may ask
    for. tma: tensor descriptors are loaded and stored asynchronously, by hardware. exact_fp8: matrix units sum products of FP8
    operands in float32; those of Hopper keep some 14 bits. warp: threads in a warp."""

    sms: int
    shared_bytes: int
    matrix_16bit: bool = True
    tma: bool
    exact_fp8: bool = False
    warp: int = 32


H200 = Capabilities(sms=132, shared_bytes=227 << 10, tma=True)
"""The capabilities that predictions assume. A machine's profile has the number of SMs, but not the size of shared memory."""
