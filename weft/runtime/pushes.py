"""A Push as one kernel of stores (weft.kernels.push), which adds to the flag of each part tile by tile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft.core.schedule import Flag, Push, Region, quantises
from weft.kernels.push import PushTables, launcher, push, push_tables, tiles_of_copy
from weft.kernels.quantise import tiles_of_rows
from weft.runtime.bindings import Bindings, Where
from weft.runtime.quantising import QuantisingPush
from weft.runtime.step_kernels import StepKernel

if TYPE_CHECKING:
    from weft.runtime.bound import BoundProgram


def kernel_of(program: BoundProgram, where: Where, step: Push) -> StepKernel:
    """The kernel of a push."""
    if quantises(step, program.schedule):
        return QuantisingPush(step, where, program)
    return FusedPush(step, where, program.device, program)


def signal_values(program: BoundProgram, rank: int, step: Push) -> dict[Flag, int]:
    """How far a push raises its flags: by a tile each time."""
    if quantises(step, program.schedule):
        return {part.count: tiles_of_rows(part.dst) for part in step.parts}
    itemsize = program.dtype.itemsize
    return {part.count: tiles_of_copy(part.dst, itemsize=itemsize, device=program.device) for part in step.parts}


class FusedPush(StepKernel):
    """One Push of one rank as a kernel, ready to launch call after call."""

    def __init__(self, step: Push, where: Where, device: torch.device, flags: BoundProgram) -> None:
        super().__init__(where)
        self._step, self._device, self._flags = step, device, flags
        self._source = step.source
        self._launcher = launcher()
        self._tables: dict[tuple[int, ...], PushTables] = {}

    def lay_out(self, bindings: Bindings) -> None:
        self.laid_out(bindings)

    def launch(self, bindings: Bindings, *, silent: bool, tries: int, sms: int, stream: int | None = None) -> None:
        base, plan = self.laid_out(bindings)
        push(plan, sms=sms, silent=silent, src_base=base, launched_by=self._launcher, stream=stream)

    def laid_out(self, bindings: Bindings) -> tuple[int, PushTables]:
        """What source addresses count from, and the tables. Makes them where a call's rows lie otherwise than before."""
        ((source, _),) = bindings.tensors[self._source]
        base = source.data_ptr() & ~15
        # Symmetric memory stays where it is on a GPU; where it moves (grown, on a CPU), the tables are made anew.
        targets = dict.fromkeys((part.dst.buffer, part.dst.rank) for part in self._step.parts)
        pitches = (stride if rows > 1 else 0 for rows, stride in zip(source.shape, source.stride(), strict=True))
        key = (source.data_ptr() & 15, *pitches, *(bindings.tensors[t][0][0].data_ptr() for t in targets))
        if key not in self._tables:
            if source.is_cuda and torch.cuda.is_current_stream_capturing():
                raise ValueError(
                    f"{self.where}: its rows lie otherwise than in the calls before; call the operator once with tensors that "
                    "lie so before capturing a graph"
                )
            # Kept as long as the program: a graph may hold any of them.
            self._tables[key] = self._lay_out(bindings, base)
        return base, self._tables[key]

    def _lay_out(self, bindings: Bindings, base: int) -> PushTables:
        def address(region: Region) -> int:
            found = bindings.view(region).data_ptr()
            return found - base if (region.buffer, region.rank) == self._source else found

        def stride(region: Region) -> int:
            view = bindings.view(region)
            return view.stride(0) * view.element_size()

        ((source, _),) = bindings.tensors[self._source]
        return push_tables(
            [(part.src, part.dst, part.count) for part in self._step.parts],
            device=self._device,
            itemsize=source.element_size(),
            address=address,
            stride=stride,
            count_address=self._flags.count_address,
        )
