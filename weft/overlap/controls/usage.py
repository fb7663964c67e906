"""The resources that a block of a kernel uses, and a wrapper for a kernel whose residency is capped."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from weft.overlap.controls.residency import Multiprocessor, Occupancy, blocks_per_sm, padding_bytes


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The resources of a kernel.

    threads: threads per block.
    registers: registers per thread.
    shared_bytes: static and dynamic shared memory per block.
    """

    threads: int
    registers: int
    shared_bytes: int

    def on(self, device: Multiprocessor) -> Occupancy:
        return blocks_per_sm(device, threads=self.threads, registers=self.registers, shared_bytes=self.shared_bytes)


@dataclass(frozen=True, kw_only=True)
class Cap:
    """A limit on the number of blocks per SM.

    strict: raise an error for a kernel of which fewer blocks fit anyway. Otherwise such a kernel is not changed.
    """

    blocks_per_sm: int
    strict: bool = True

    def __post_init__(self) -> None:
        if self.blocks_per_sm < 1:
            raise ValueError(f"blocks_per_sm is {self.blocks_per_sm}; at least one block an SM has to run")

    def padding(self, device: Multiprocessor, usage: Usage) -> int:
        """Return the bytes of shared memory to add to each block. Raises ValueError if no padding gives the cap."""
        if not self.strict and usage.on(device).blocks <= self.blocks_per_sm:
            return 0
        return padding_bytes(
            device,
            threads=usage.threads,
            registers=usage.registers,
            shared_bytes=usage.shared_bytes,
            blocks_per_sm=self.blocks_per_sm,
        )


class Shaped:
    """A kernel that is launched with a cap. The original kernel is launched without it.

    It is also a context. Closing it undoes its settings, and later launches raise ValueError.
    """

    def __init__(self, cap: Cap) -> None:
        self.cap = cap
        self._closed = False

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"this kernel's cap of {self.cap.blocks_per_sm} blocks an SM is closed; shape the kernel again")

    def __enter__(self) -> Shaped:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
