"""Describes the multiprocessors of the current device."""

from __future__ import annotations

from functools import cache

import torch

from weft.compat.streams import checked, driver_api
from weft.overlap.controls.residency import DEVICES, Multiprocessor


def this_device(index: int | None = None) -> Multiprocessor:
    """Describe a GPU's multiprocessors. index: default, torch's current one. Raises ValueError for an unsupported
    architecture."""
    if not torch.cuda.is_available():
        raise ValueError(f"no GPU here; name a device of weft.overlap.controls.DEVICES: {', '.join(DEVICES)}")
    return _device(torch.cuda.current_device() if index is None else index)


@cache
def _device(index: int) -> Multiprocessor:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return _by_architecture(str(properties.gcnArchName).split(":")[0])
    if properties.major < 8:
        raise ValueError(
            f"{properties.name} has compute capability {properties.major}.{properties.minor}; "
            "how its multiprocessors are shared out is known for 8.0 and later"
        )
    return _query(index, str(properties.name), f"{properties.major}.{properties.minor}")


def _by_architecture(name: str) -> Multiprocessor:
    """Return the table's entry for an AMD architecture, since HIP does not report all of its values."""
    found = next((device for device in DEVICES.values() if device.capability == name), None)
    if found is None:
        known = ", ".join(device.capability for device in DEVICES.values() if device.capability.startswith("gfx"))
        raise ValueError(f"no figures of {name}; there are those of {known}")
    return found


def _query(index: int, name: str, capability: str) -> Multiprocessor:
    """Describe a device by the driver's values. Allocation units, which it does not report, are those of capability 8.0 and
    later."""
    api = driver_api()
    attributes, handle = api.CUdevice_attribute, checked(api.cuDeviceGet(index))

    def ask(attribute: str) -> int:
        return int(checked(api.cuDeviceGetAttribute(getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{attribute}"), handle)))

    return Multiprocessor(
        name=name,
        capability=capability,
        shared_bytes=ask("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        shared_block_bytes=ask("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        shared_reserved_bytes=ask("RESERVED_SHARED_MEMORY_PER_BLOCK"),
        threads=ask("MAX_THREADS_PER_MULTIPROCESSOR"),
        threads_block=ask("MAX_THREADS_PER_BLOCK"),
        blocks=ask("MAX_BLOCKS_PER_MULTIPROCESSOR"),
        warp=ask("WARP_SIZE"),
        registers=ask("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        registers_block=ask("MAX_REGISTERS_PER_BLOCK"),
    )
