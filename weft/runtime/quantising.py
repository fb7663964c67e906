"""This module runs a Push that quantises as one kernel (weft.kernels.quantise), which adds to each part's flag tile by tile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.core.schedule import Push
from weft.kernels.quantise import QuantiseTables, make_launcher, quantise, quantise_tables
from weft.runtime.bindings import Bindings, Where
from weft.runtime.step_kernels import MovableTables, StepKernel

if TYPE_CHECKING:
    from weft.runtime.bound import BoundProgram


class QuantisingPush(StepKernel):
    """A QuantisingPush is the kernel of one Push of one rank."""

    def __init__(self, program: BoundProgram, where: Where, step: Push) -> None:
        super().__init__(program, where)
        self._step, self.launched_by = step, make_launcher()
        self._alone = where.lane == "compute"
        """True if no other kernel runs concurrently, so that this one can use all SMs."""
        self.tables = MovableTables([part.dst for part in step.parts], self._make_tables)

    def launch(self, bindings: Bindings, *, silent: bool, tries: int, sms: int, stream: int | None = None) -> None:
        ((source, _),) = bindings.tensors[self._step.source]
        sms = self.program.blocks if self._alone else sms
        quantise(self.tables.of(bindings), source, sms=sms, silent=silent, launched_by=self.launched_by, stream=stream)

    def _make_tables(self, bindings: Bindings) -> QuantiseTables:
        assert bindings.scaling is not None, f"{self.where}: the problem has no scaling"
        return quantise_tables(
            self._step.parts,
            scaling=bindings.scaling,
            device=self.program.device,
            elements=bindings.view,
            scales=lambda region: bindings.scale_views(region)[0],
            count_address=self.program.count_address,
        )
