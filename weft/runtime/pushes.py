"""This module runs a Push as one kernel, which adds to the flag of each part tile by tile.

The kernel stores (weft.kernels.push), or quantises while it stores (weft.kernels.quantise).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from weft.core.schedule import Flag, Push, Region, quantises
from weft.kernels.push import PushTables, push, push_tables, tiles_of_copy
from weft.kernels.quantise import QuantiseTables, quantise, quantise_tables, tiles_of_rows
from weft.runtime.bindings import Bindings, Where
from weft.runtime.launches import KernelTables, Site, StepKernel, addresses_of


def kernel_of(site: Site, where: Where, step: Push) -> StepKernel:
    """Return the kernel of a push."""
    return QuantisingPush(site, where, step) if quantises(step, site.schedule) else FusedPush(site, where, step)


def signal_values(site: Site, rank: int, step: Push) -> dict[Flag, int]:
    """Return the final values of the flags of a push. Each tile adds one."""
    if quantises(step, site.schedule):
        return {part.count: tiles_of_rows(part.dst) for part in step.parts}
    itemsize = site.dtype_of(step.source[0]).itemsize
    return {part.count: tiles_of_copy(part.dst, itemsize=itemsize, device=site.device) for part in step.parts}


class FusedPush(StepKernel):
    """A FusedPush is the kernel of one Push of one rank.

    A separate launch pushes the scales of FP8 elements first, so the flags of the elements show that both have arrived.
    """

    def __init__(self, site: Site, where: Where, step: Push) -> None:
        super().__init__(site, where)
        self._step, self._source = step, step.source
        self._targets = addresses_of(part.dst for part in step.parts)
        self.tables = KernelTables(site, self._layout, self._lay_out)

    def launch(self, bindings: Bindings, *, silent: bool, tries: int, sms: int, stream: int | None = None) -> None:
        for base, plan in zip(self._bases(bindings), self.tables.of(bindings), strict=True):
            push(plan, sms=sms, silent=silent, src_base=base, launched_by=self.launched_by, stream=stream)

    def _sources(self, bindings: Bindings) -> list[torch.Tensor]:
        ((source, _),) = bindings.tensors[self._source]
        return [*bindings.scales.get(self._source, ()), source]

    def _bases(self, bindings: Bindings) -> list[int]:
        """Return what is added to the sources of each launch's tables."""
        return [one.data_ptr() & ~15 for one in self._sources(bindings)]

    def _layout(self, bindings: Bindings) -> Hashable:
        """Return what the tables depend on. Of a single row no stride counts."""
        sources = self._sources(bindings)
        pitches = [stride if rows > 1 else 0 for rows, stride in zip(sources[-1].shape, sources[-1].stride(), strict=True)]
        return (*[one.data_ptr() & 15 for one in sources], *pitches, *self._targets(bindings))

    def _lay_out(self, bindings: Bindings) -> list[PushTables]:
        """Return the tables of each launch: one for the scales, if there are any, and one for the elements, which counts."""
        bases = self._bases(bindings)
        copies: list[tuple[Region, Region, Flag | None]] = [(part.src, part.dst, part.count) for part in self._step.parts]
        elements = self._tables_of(bindings.view, copies, bases[-1])
        if len(bases) == 1:
            return [elements]
        of_scales = [(bindings.scale_region(src), bindings.scale_region(dst), None) for src, dst, _ in copies]
        return [self._tables_of(bindings.scales_at, of_scales, bases[0]), elements]

    def _tables_of(
        self, view: Callable[[Region], torch.Tensor], copies: Sequence[tuple[Region, Region, Flag | None]], base: int
    ) -> PushTables:
        def address(region: Region) -> int:
            found = view(region).data_ptr()
            return found - base if (region.buffer, region.rank) == self._source else found

        return push_tables(
            copies,
            device=self.site.device,
            itemsize=view(copies[0][0]).element_size(),
            address=address,
            stride=lambda region: view(region).stride(0) * view(region).element_size(),
            count_address=self.site.count_address,
        )


class QuantisingPush(StepKernel):
    """A QuantisingPush is the kernel of one Push of one rank that quantises."""

    def __init__(self, site: Site, where: Where, step: Push) -> None:
        super().__init__(site, where)
        self._step = step
        self._alone = where.lane == "compute"
        """True if no other kernel runs concurrently, so that this one can use all SMs."""
        self.tables = KernelTables(site, addresses_of(part.dst for part in step.parts), self._make_tables)

    def launch(self, bindings: Bindings, *, silent: bool, tries: int, sms: int, stream: int | None = None) -> None:
        ((source, _),) = bindings.tensors[self._step.source]
        sms = self.site.blocks if self._alone else sms
        quantise(self.tables.of(bindings), source, sms=sms, silent=silent, launched_by=self.launched_by, stream=stream)

    def _make_tables(self, bindings: Bindings) -> QuantiseTables:
        assert bindings.scaling is not None, f"{self.where}: the problem has no scaling"
        return quantise_tables(
            self._step.parts,
            scaling=bindings.scaling,
            device=self.site.device,
            elements=bindings.view,
            scales=lambda region: bindings.scale_views(region)[0],
            count_address=self.site.count_address,
        )
