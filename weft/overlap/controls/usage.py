"""What a block of a kernel asks of its multiprocessor, and what wraps a kernel whose residency is capped."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from weft.overlap.controls.residency import Multiprocessor, Occupancy, blocks_per_sm, padding_bytes


@dataclass(frozen=True, kw_only=True)
class Usage:
    """threads: of a block. registers: of a thread. shared_bytes: of a block, static and dynamic."""

    threads: int
    registers: int
    shared_bytes: int

    def on(self, device: Multiprocessor) -> Occupancy:
        return blocks_per_sm(device, threads=self.threads, registers=self.registers, shared_bytes=self.shared_bytes)


@dataclass(frozen=True, kw_only=True)
class Cap:
    """At most so many blocks an SM. strict: a kernel of which fewer fit anyway is refused; else it is left as it is."""

    blocks_per_sm: int
    strict: bool = True

    def __post_init__(self) -> None:
        if self.blocks_per_sm < 1:
            raise ValueError(f"blocks_per_sm is {self.blocks_per_sm}; at least one block an SM has to run")

    def padding(self, device: Multiprocessor, usage: Usage) -> int:
        """Bytes of shared memory to add to each block. Raises ValueError where that cannot do it."""
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
    """A kernel that is launched with a cap. The kernel that it was made of launches as ever.

    Usable as a context; closing it undoes what it has set, and what it is asked to launch after that raises ValueError.
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
