"""Functions that several kernels share: waiting for flags, and tables of addresses and numbers on the device."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from weft.compat.device import capabilities

PAUSE_S = 200e-6
"""The pause between two looks. It lets a peer make progress, and is short compared with a look of the interpreter."""


def table(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return values, or rows of values, on the device. If there are none, it holds one zero, so that it has an address."""
    return torch.tensor(values if len(values) else [0], dtype=dtype, device=device)


@triton.jit
def behind(seen, need):
    """Return whether a growing int32 flag, which may wrap around, is still below `need`. They must differ by less than 2^31."""
    return (seen.to(tl.int64) - need).to(tl.int32) < 0


@triton.jit
def look(flag_ptr, mask=None):
    """Return the value of a flag, or of each flag where `mask` holds.

    It acquires at system scope: what the flag's writers stored before is visible afterwards.
    """
    return tl.atomic_add(flag_ptr, 0, mask=mask, sem="acquire", scope="sys")


if triton.knobs.runtime.interpret:

    def pause() -> None:
        """Sleep between two looks, because under the interpreter the ranks that must signal need the core."""
        time.sleep(PAUSE_S)

else:

    @triton.jit
    def pause():
        """Do nothing between two looks on a GPU."""


def asynchronous(device: torch.device) -> bool:
    """Return whether tensor descriptors move tiles asynchronously by TMA, outside the order of a thread's own loads and stores.
    GPUs of compute capability 9.0 and later have TMA. The interpreter stores at once."""
    return capabilities(device).tma


@triton.jit
def descriptors_too(word):
    """Let tensor descriptors load what this thread may read by now. word: any int32, which is returned.

    TMA accesses memory through another proxy than a thread does, and only this fence orders it after an acquire.
    """
    return tl.inline_asm_elementwise("fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [word], tl.int32, False, 1)


@triton.jit
def look_until(flag_ptr, need, seen, looks, tries):
    """Look at a flag until it holds the value that it needs, but at most `tries` times. Return what was seen last.

    seen, looks: what was seen before, and the number of looks that count as done.
    """
    while behind(seen, need) & (looks < tries):
        pause()
        seen = look(flag_ptr)
        looks += 1
    return seen


@triton.jit
def wait_gates(gates_ptr, needs_ptr, first, last, tries, status_ptr, ASYNCHRONOUS: tl.constexpr = False):
    """Wait for each gate of [first, last). ASYNCHRONOUS: TMA loads the data that the gates guard."""
    for gate in range(first, last):
        flag_ptr = tl.load(gates_ptr + gate).to(tl.pointer_type(tl.int32))
        need = tl.load(needs_ptr + gate)
        seen = look_until(flag_ptr, need, look(flag_ptr), tl.full((), 0, tl.int32), tries)
        if behind(seen, need):
            # No compare-and-swap as in weft.triton.wait: it would add 1 to 4% of instructions to every GEMM (sm_90), and nobody
            # reads this status on GPUs.
            tl.store(status_ptr, gate + 1)
            tl.store(status_ptr + 1, seen)
    if ASYNCHRONOUS:  # noqa: SIM102 - a constexpr, then a value of the device
        if first < last:
            descriptors_too(last)
