"""What kernels share: waiting for flags, and tables of addresses and numbers on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl


def table(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Values, or rows of values, on the device; one zero where there are none, so that there is always an address."""
    return torch.tensor(values if len(values) else [0], dtype=dtype, device=device)


@triton.jit
def wait_gates(gates_ptr, needs_ptr, first, last, epoch, tries, status_ptr):
    """Look at each gate of [first, last) until it holds epoch * growth + value, or `tries` times."""
    for gate in range(first, last):
        flag_ptr = tl.load(gates_ptr + gate).to(tl.pointer_type(tl.int32))
        need = epoch * tl.load(needs_ptr + 2 * gate) + tl.load(needs_ptr + 2 * gate + 1)
        seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        looks = 0
        while (seen < need) & (looks < tries):
            seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
            looks += 1
        if seen < need:
            tl.store(status_ptr, gate + 1)
            tl.store(status_ptr + 1, seen)
