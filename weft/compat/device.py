"""What torch says of a GPU, as the numbers that weft chooses by.

torch reports counts, sizes and clocks; how much a matrix unit does in a clock it does not, so that is a table by architecture.
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
"""Of a CPU, where Triton's interpreter runs kernels: any tile fits."""
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
"""Of one SM, or compute unit, in bfloat16, dense: the vendors' white papers and data sheets."""
_HERE: AbstractContextManager[None] = nullcontext()
_UNKNOWN_FLOP_PER_CLOCK = 1024
"""Of an architecture that is not listed."""


def idle(device: torch.device, within_s: float) -> bool:
    """Whether a GPU ends all work of all streams within so long. torch.cuda.synchronize has no bound, so a thread of its own
    waits in it, and stays there if it does not end."""
    ended = threading.Event()

    def wait() -> None:
        with suppress(RuntimeError):  # a device that is lost runs nothing
            torch.cuda.synchronize(device)
        ended.set()

    threading.Thread(target=wait, name="weft-waits-for-device", daemon=True).start()
    return ended.wait(max(0.0, within_s))


def enqueued(device: torch.device) -> Callable[[], bool]:
    """A function that says whether a GPU has ended what torch's current stream has so far."""
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event.query


@functools.cache
def capabilities(device: torch.device) -> Capabilities:
    """What a device offers to kernels."""
    return INTERPRETER if device.type == "cpu" else of_properties(torch.cuda.get_device_properties(device))


def of_properties(found: Any) -> Capabilities:
    """found: as torch.cuda.get_device_properties returns it."""
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
    """As compilers name it: sm_90, gfx942. found: as above."""
    if torch.version.hip is not None:
        return str(found.gcnArchName).split(":")[0]
    return f"sm_{found.major}{found.minor}"


def flop_per_clock(arch: str) -> int:
    """Operations of one SM in bfloat16 and a clock."""
    return _FLOP_PER_CLOCK.get(arch, _UNKNOWN_FLOP_PER_CLOCK)


def memory_gbps(found: Any) -> float:
    """The peak rate of a GPU's memory in 1e9 bytes/s; 0 where torch does not report it. found: as above."""
    khz, bits = (getattr(found, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return 2 * khz * 1e3 * bits / 8 / 1e9


def gpu_number(device: torch.device) -> int:
    """Return a number that identifies a GPU for processes in which it has another index."""
    return int(hashlib.sha256(str(torch.cuda.get_device_properties(device).uuid).encode()).hexdigest()[:12], 16)


current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""Returns the index of the thread's current GPU, once CUDA is initialised. torch's own function asks for that each time."""


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Within, this GPU is the thread's current one, as it is after torch.cuda.set_device."""
    begun: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if device.type != "cuda" or not begun or current_device() == device.index:
        return _HERE
    return torch.cuda.device(device)  # type: ignore[return-value, unused-ignore]
