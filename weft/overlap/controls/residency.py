"""Computes how many blocks of a kernel fit on a multiprocessor, what limits them, and how much shared memory caps them.

The result depends only on the values of a device: of a table, or of the current one (`this_device`). The rules are those of
NVIDIA's occupancy calculator (cuda_occupancy.h of the CUDA toolkit), for compute capability 8.0 and later:

    registers       are allocated to warps in units of 256; all registers of a warp are in one of four equal parts of the file
    shared memory   is allocated to blocks in units of 128 bytes, plus 1 KiB per block for the system
    threads         are allocated as whole warps

On AMD a multiprocessor is a compute unit, a block a work-group, a warp a wavefront, and shared memory LDS. The same arithmetic
holds with other numbers (AMD Instinct MI200 ISA, section 3; LLVM, AMDGPU usage), which were not compared with a device.

Capping residency by shared memory is the first control of resource-aware overlap (arXiv 2606.09200). Blocks of a communication
kernel can start in the resources that the compute kernel leaves free.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from weft.compat.streams import checked, driver_api

KIB = 1024


@dataclass(frozen=True, kw_only=True)
class Multiprocessor:
    """The resources of a multiprocessor, and the units in which they are allocated.

    capability: as torch names it, "9.0" or "gfx90a".
    shared_block_bytes: the most that a block may ask for, by opting in.
    shared_reserved_bytes: what the system takes for each block, in addition to the block's own.
    register_unit: registers of a warp are rounded up to it.
    parts: the number of equal parts of the register file. One part holds all registers of a warp.
    """

    name: str
    capability: str
    shared_bytes: int
    shared_block_bytes: int
    shared_reserved_bytes: int = KIB
    shared_unit_bytes: int = 128
    threads: int = 2048
    threads_block: int = 1024
    blocks: int = 32
    warp: int = 32
    registers: int = 65536
    registers_block: int = 65536
    registers_thread: int = 255
    register_unit: int = 256
    parts: int = 4


DEVICES = {
    device.name: device
    for device in (
        Multiprocessor(name="A100", capability="8.0", shared_bytes=164 * KIB, shared_block_bytes=163 * KIB),
        Multiprocessor(
            name="A40", capability="8.6", shared_bytes=100 * KIB, shared_block_bytes=99 * KIB, threads=1536, blocks=16
        ),
        Multiprocessor(name="H100", capability="9.0", shared_bytes=228 * KIB, shared_block_bytes=227 * KIB),
        Multiprocessor(name="H200", capability="9.0", shared_bytes=228 * KIB, shared_block_bytes=227 * KIB),
        Multiprocessor(
            name="MI250X",
            capability="gfx90a",
            shared_bytes=64 * KIB,
            shared_block_bytes=64 * KIB,
            shared_reserved_bytes=0,
            shared_unit_bytes=512,
            blocks=16,
            warp=64,
            registers=4 * 512 * 64,
            registers_block=4 * 512 * 64,
            registers_thread=512,
            register_unit=8 * 64,
        ),
    )
}
"""The devices by name. Sources: CUDA C++ programming guide, technical specifications per compute capability; AMD Instinct MI200
ISA."""


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """How many blocks of one kernel fit on a multiprocessor at once.

    by_*: the number of blocks that each resource alone allows.
    free_*: the resources that these blocks leave for another kernel.
    """

    device: str
    blocks: int
    by_shared: int
    by_registers: int
    by_threads: int
    by_blocks: int
    free_shared_bytes: int
    free_registers: int
    free_threads: int

    @property
    def limited_by(self) -> tuple[str, ...]:
        """Return every resource that allows no further block: shared memory, registers, threads or blocks."""
        return tuple(name for name, blocks in self._limits().items() if blocks == self.blocks)

    def _limits(self) -> dict[str, int]:
        return {
            "shared memory": self.by_shared,
            "registers": self.by_registers,
            "threads": self.by_threads,
            "blocks": self.by_blocks,
        }

    def __str__(self) -> str:
        limits = ", ".join(f"{name} {blocks}" for name, blocks in self._limits().items())
        return (
            f"{self.blocks} blocks an SM of {self.device}, limited by {' and '.join(self.limited_by)} ({limits}); free: "
            f"{self.free_shared_bytes} B shared memory, {self.free_registers} registers, {self.free_threads} threads"
        )


def blocks_per_sm(device: Multiprocessor, *, threads: int, registers: int, shared_bytes: int = 0) -> Occupancy:
    """Return how many blocks fit on a multiprocessor, and what limits them.

    threads: threads per block.
    registers: registers per thread.
    shared_bytes: static and dynamic shared memory per block.

    The result's blocks is 0 if not even one block can run. Raises ValueError for a count that no kernel has.
    """
    _at_least(1, threads=threads)
    _at_least(0, registers=registers, shared_bytes=shared_bytes)
    warps = -(-threads // device.warp)
    by_threads = device.threads // (warps * device.warp) if threads <= device.threads_block else 0
    shared, by_shared = _taken_bytes(device, shared_bytes), 0
    if shared_bytes <= device.shared_block_bytes:
        by_shared = device.shared_bytes // shared if shared else device.blocks
    taken, by_registers = _by_registers(device, warps, registers)
    blocks = min(by_shared, by_registers, by_threads, device.blocks)
    return Occupancy(
        device=device.name,
        blocks=blocks,
        by_shared=by_shared,
        by_registers=by_registers,
        by_threads=by_threads,
        by_blocks=device.blocks,
        free_shared_bytes=device.shared_bytes - blocks * shared,
        free_registers=device.registers - blocks * taken,
        free_threads=device.threads - blocks * warps * device.warp,
    )


def _at_least(low: int, **counts: int) -> None:
    for name, count in counts.items():
        if count < low:
            raise ValueError(f"{name} is {count}; a kernel has at least {low}")


def _taken_bytes(device: Multiprocessor, shared_bytes: int) -> int:
    """Return the shared memory that a block takes of the multiprocessor."""
    return _up(shared_bytes + device.shared_reserved_bytes, device.shared_unit_bytes)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _by_registers(device: Multiprocessor, warps: int, registers: int) -> tuple[int, int]:
    """Return the registers that a block takes, and the number of blocks that they allow."""
    a_warp = _up(registers * device.warp, device.register_unit)
    if registers > device.registers_thread or a_warp * _up(warps, device.parts) > device.registers_block:
        return a_warp * warps, 0
    if not a_warp:
        return 0, device.blocks
    return a_warp * warps, device.registers // device.parts // a_warp * device.parts // warps


def padding_bytes(device: Multiprocessor, *, threads: int, registers: int, shared_bytes: int, blocks_per_sm: int) -> int:
    """Return the shared memory to add to each block so that exactly `blocks_per_sm` of them fit. It is 0 if that many fit
    anyway.

    The result is the least such size, to leave the most for other kernels. Raises ValueError, with the numbers, if fewer blocks
    fit already, and if no size gives that number.
    """
    wanted = blocks_per_sm
    if wanted < 1:
        raise ValueError(f"blocks_per_sm is {wanted}; at least one block an SM has to run")
    now = _occupancy(device, threads, registers, shared_bytes)
    if wanted > now.blocks:
        raise ValueError(f"blocks_per_sm is {wanted}, but fewer fit already: {now}; shared memory can only lower that")
    if wanted == now.blocks:
        return 0
    total = _capping_bytes(device, wanted)
    if total is None:
        can = [count for count in range(1, now.blocks + 1) if count == now.blocks or _capping_bytes(device, count) is not None]
        raise ValueError(
            f"blocks_per_sm is {wanted}: no multiple of {device.shared_unit_bytes} B, and of at most "
            f"{device.shared_block_bytes} B a block, fits exactly {wanted} times into the {device.shared_bytes} B of "
            f"{device.name}; possible are {', '.join(map(str, can))}"
        )
    return total - shared_bytes


def _occupancy(device: Multiprocessor, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    return blocks_per_sm(device, threads=threads, registers=registers, shared_bytes=shared_bytes)


def _capping_bytes(device: Multiprocessor, blocks: int) -> int | None:
    """Return the least shared memory of a block with which exactly `blocks` fit, or None if there is none."""
    taken = (device.shared_bytes // (blocks + 1) // device.shared_unit_bytes + 1) * device.shared_unit_bytes
    asked = taken - device.shared_reserved_bytes
    return asked if taken * blocks <= device.shared_bytes and asked <= device.shared_block_bytes else None


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
