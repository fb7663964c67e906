"""This module reads the properties of a GPU on which weft's choices depend.

torch reports counts, sizes and clocks. It does not report how many operations a matrix unit does per clock, so this module has
a table by architecture.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

from weft.core.capabilities import Capabilities

INTERPRETER = Capabilities(sms=1, shared_bytes=1 << 30, tma=False)
"""The capabilities of a CPU, where Triton's interpreter runs kernels and any tile fits."""
_FLOP_PER_CLOCK = {
    "sm_80": 2048,
    "sm_86": 1024,
    "sm_87": 1024,
    "sm_89": 1024,
    "sm_90": 4096,
    "sm_100": 8192,
    "sm_103": 8192,
    "sm_120": 1024,
    "gfx90a": 1024,
    "gfx942": 2048,
    "gfx950": 4096,
}
"""The dense bfloat16 operations of one SM, or compute unit, per clock, from white papers and data sheets of NVIDIA and AMD."""
_HERE: AbstractContextManager[None] = nullcontext()
_UNKNOWN_FLOP_PER_CLOCK = 1024
"""The value for an architecture that is not listed."""


def idle(device: torch.device, within_s: float) -> bool:
    """Wait until a GPU has ended all work of all streams, for `within_s` at most. Return whether it has.

    torch.cuda.synchronize has no bound, so a separate thread waits in it, and remains there if the work does not end.
    """
    ended = threading.Event()

    def wait() -> None:
        with suppress(RuntimeError):  # a lost device runs nothing
            torch.cuda.synchronize(device)
        ended.set()

    threading.Thread(target=wait, name="weft-waits-for-device", daemon=True).start()
    return ended.wait(max(0.0, within_s))


def enqueued(device: torch.device) -> Callable[[], bool]:
    """Return a function that returns whether the GPU has ended the work that torch's current stream has now."""
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event.query


@functools.cache
def capabilities(device: torch.device) -> Capabilities:
    """Return the capabilities that a device offers to kernels."""
    return INTERPRETER if device.type == "cpu" else of_properties(torch.cuda.get_device_properties(device))


def of_properties(found: Any) -> Capabilities:
    """Return the capabilities of a GPU. found: the result of torch.cuda.get_device_properties."""
    arch = architecture(found)
    nvidia = arch.startswith("sm_")
    return Capabilities(
        sms=found.multi_processor_count,
        shared_bytes=getattr(found, "shared_memory_per_block_optin", 0) or found.shared_memory_per_block,
        matrix_16bit=not nvidia or found.major >= 8,
        tma=nvidia and found.major >= 9,
        exact_fp8=nvidia and found.major >= 10,
        warp=found.warp_size,
    )


def architecture(found: Any) -> str:
    """Return the architecture as compilers name it, such as sm_90 or gfx942. found: as for `of_properties`."""
    if torch.version.hip is not None:
        return str(found.gcnArchName).split(":")[0]
    return f"sm_{found.major}{found.minor}"


def flop_per_clock(arch: str) -> int:
    """Return the bfloat16 operations of one SM per clock."""
    return _FLOP_PER_CLOCK.get(arch, _UNKNOWN_FLOP_PER_CLOCK)


def memory_gbps(found: Any) -> float:
    """Return a GPU's peak memory rate in 1e9 bytes/s, or 0 if torch does not report it. found: as for `of_properties`."""
    khz, bits = (getattr(found, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return 2 * khz * 1e3 * bits / 8 / 1e9


def gpu_number(device: torch.device) -> int:
    """Return a number that identifies a GPU for processes in which it has another index."""
    return int(hashlib.sha256(str(torch.cuda.get_device_properties(device).uuid).encode()).hexdigest()[:12], 16)


current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""Returns the index of the thread's current GPU, if CUDA is initialised. torch's own function also checks that in each call."""


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which this GPU is the thread's current one, as after torch.cuda.set_device."""
    begun: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if device.type != "cuda" or not begun or current_device() == device.index:
        return _HERE
    return torch.cuda.device(device)  # type: ignore[return-value, unused-ignore]
