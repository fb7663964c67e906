"""A Gemm step with gates, counts or stores to peers as one kernel, on any device whose flags have addresses.

Which steps run so is the same on every rank, since a flag that a kernel counts grows by tiles, and its waiter must know.
A rank whose operands the kernel cannot load (odd strides) multiplies part by part and advances the same flags as far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from weft.errors import WaitTimeout
from weft.execute.interpret import Bindings, Where
from weft.kernels.gemm import Tables, blocks_for, fits, gemm, tables, tiles_of
from weft.schedule import Flag, Gemm, Part, Schedule, Wait


def is_fused(step: Gemm) -> bool:
    """Whether a step asks for more than a matmul: tiles that wait, count, or are stored at a peer."""
    rank = step.b.rank
    return any(part.gates or part.count or part.out.rank != rank for part in step.parts)


def growth(schedule: Schedule, device: torch.device) -> dict[Flag, int]:
    """By flag that a kernel counts: how far one advance of the schedule moves its word."""
    return {
        part.count: tiles_of(part, blocks_for(step, device))
        for _, _, _, step in schedule
        if isinstance(step, Gemm) and is_fused(step)
        for part in step.parts
        if part.count is not None
    }


class FlagWords(Protocol):
    """Where a device keeps flags, for kernels."""

    def gate_address(self, flag: Flag, where: Where) -> int:
        """The word that a step of this rank looks at."""
        ...

    def gate_need(self, wait: Wait) -> tuple[int, int]:
        """(growth per call, value in the first call) that opens a gate."""
        ...

    def count_address(self, flag: Flag) -> int:
        """The word that a kernel of this rank adds to."""
        ...


class FusedGemm:
    """One step of one rank, ready to launch call after call."""

    def __init__(self, step: Gemm, where: Where, device: torch.device, flags: FlagWords) -> None:
        self.step, self._where, self._device, self._flags = step, where, device, flags
        self._buffers = list(dict.fromkeys((part.a.buffer, part.a.rank) for part in step.parts))
        self._outs = list(dict.fromkeys((part.out.buffer, part.out.rank) for part in step.parts))
        self._remote = any(part.out.rank != step.b.rank for part in step.parts)
        self._tables: tuple[tuple[int, ...], Tables] | None = None
        self.status = torch.zeros(2, dtype=torch.int32, device=device)

    def runs(self, bindings: Bindings) -> bool:
        """Whether the kernel can load this call's operands."""
        sources = [self._whole(bindings, key) for key in self._buffers]
        return len(sources) <= 2 and all(fits(a, b) for a in sources for b, _ in bindings.pieces(self.step.b))

    def launch(self, bindings: Bindings, epoch: int, *, silent: bool, tries: int, sms: int) -> None:
        """Run it. silent: neither wait nor count, for a rehearsal."""
        plan = self._plan(bindings)
        sources = tuple(self._whole(bindings, key) for key in self._buffers)
        for (b, _), (out, _) in zip(bindings.pieces(self.step.b), bindings.tensors[self._outs[-1]], strict=True):
            gemm(
                sources,
                b,
                out,
                plan,
                self.status,
                epoch=epoch,
                silent=silent,
                tries=tries,
                sms=sms,
            )

    def raise_if_late(self, where: str, describe: Callable[[Flag], str]) -> None:
        """Raise WaitTimeout if a gate of the last launch did not open in time."""
        gate, seen = self.status.tolist()
        if gate:
            self.status.zero_()
            wait = [g for part in self.step.parts for g in part.gates][gate - 1]
            raise WaitTimeout(f"{where}: {wait.flag}: expected more than the {seen} seen; {describe(wait.flag)}")

    def _whole(self, bindings: Bindings, key: tuple[str, int]) -> torch.Tensor:
        ((matrix, _),) = bindings.tensors[key]
        return matrix

    def _plan(self, bindings: Bindings) -> Tables:
        """The tables, made anew when memory that they point into has moved (a larger schedule made it grow)."""
        moved = tuple(bindings.view(part.out).data_ptr() for part in self.step.parts) if self._remote else ()
        if self._tables is None or self._tables[0] != moved:
            self._tables = moved, self._lay_out(bindings)
        return self._tables[1]

    def _lay_out(self, bindings: Bindings) -> Tables:
        def out_address(part: Part, row: int) -> int:
            view = bindings.view(part.out)
            return view.data_ptr() + row * view.stride(0) * view.element_size()

        return tables(
            self.step,
            device=self._device,
            source=lambda part: self._buffers.index((part.a.buffer, part.a.rank)),
            gate_address=lambda flag: self._flags.gate_address(flag, self._where),
            count_address=self._flags.count_address,
            out_address=out_address if self._remote else None,
            need=self._flags.gate_need,
        )
