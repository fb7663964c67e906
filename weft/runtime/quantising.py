"""This module runs a Push that quantises as one kernel (weft.kernels.quantise), which adds to each part's flag tile by tile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.core.schedule import Push
from weft.kernels.quantise import QuantiseTables, make_launcher, quantise, quantise_tables
from weft.runtime.bindings import Bindings, Where
from weft.runtime.step_kernels import StepKernel

if TYPE_CHECKING:
    from weft.runtime.bound import BoundProgram


class QuantisingPush(StepKernel):
    """A QuantisingPush is the kernel of one Push of one rank."""

    def __init__(self, step: Push, where: Where, program: BoundProgram) -> None:
        super().__init__(where)
        self._step, self._program, self.launched_by = step, program, make_launcher()
        self._alone = where.lane == "compute"
        """True if no other kernel runs concurrently, so that this one can use all SMs."""
        self._targets = list(dict.fromkeys((part.dst.buffer, part.dst.rank) for part in step.parts))
        self._tables: tuple[tuple[int, ...], QuantiseTables] | None = None

    def lay_out(self, bindings: Bindings) -> None:
        self._make_tables(bindings)

    def launch(self, bindings: Bindings, *, silent: bool, tries: int, sms: int, stream: int | None = None) -> None:
        ((source, _),) = bindings.tensors[self._step.source]
        plan = self._make_tables(bindings)
        if self._alone:
            sms = self._program.blocks
        quantise(plan, source, sms=sms, silent=silent, launched_by=self.launched_by, stream=stream)

    def _make_tables(self, bindings: Bindings) -> QuantiseTables:
        """Return the tables. On a CPU, symmetric memory may grow and move, and then they are made again."""
        moved = tuple(bindings.tensors[key][0][0].data_ptr() for key in self._targets)
        if self._tables is None or self._tables[0] != moved:
            assert bindings.scaling is not None, f"{self.where}: the problem has no scaling"
            self._tables = (
                moved,
                quantise_tables(
                    self._step.parts,
                    scaling=bindings.scaling,
                    device=self._program.device,
                    elements=bindings.view,
                    scales=lambda region: bindings.scale_views(region)[0],
                    count_address=self._program.count_address,
                ),
            )
        return self._tables[1]
