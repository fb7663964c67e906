"""This module runs a Push as one kernel, which adds to the flag of each part tile by tile.

The kernel stores (weft.kernels.push), or quantises while it stores (weft.kernels.quantise).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weft.core.schedule import Flag, Push, Region, quantises
from weft.kernels import quantise as quantise_kernel
from weft.kernels.push import PushTables, make_launcher, push, push_tables, tiles_of_copy
from weft.kernels.quantise import QuantiseTables, quantise, quantise_tables, tiles_of_rows
from weft.runtime.bindings import Bindings, Where
from weft.runtime.launches import MovableTables, Site, StepKernel


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
        self.launched_by = make_launcher()
        self._tables: dict[tuple[int, ...], list[PushTables]] = {}

    def lay_out(self, bindings: Bindings) -> None:
        self.tables_for(bindings)

    def launch(self, bindings: Bindings, *, silent: bool, tries: int, sms: int, stream: int | None = None) -> None:
        for base, plan in self.tables_for(bindings):
            push(plan, sms=sms, silent=silent, src_base=base, launched_by=self.launched_by, stream=stream)

    def tables_for(self, bindings: Bindings) -> list[tuple[int, PushTables]]:
        """Return the base address of the sources and the tables for each launch.

        New tables are made if the alignment or the strides of a call's rows are new.
        """
        ((source, _),) = bindings.tensors[self._source]
        sources = [*bindings.scales.get(self._source, ()), source]
        bases = [one.data_ptr() & ~15 for one in sources]
        # Symmetric memory never moves on a GPU. On a CPU it may grow and move, and then the tables are made again.
        targets = dict.fromkeys((part.dst.buffer, part.dst.rank) for part in self._step.parts)
        pitches = (stride if rows > 1 else 0 for rows, stride in zip(source.shape, source.stride(), strict=True))
        places = (bindings.tensors[target][0][0].data_ptr() for target in targets)
        key = (*(one.data_ptr() & 15 for one in sources), *pitches, *places)
        if key not in self._tables:
            if source.is_cuda and torch.cuda.is_current_stream_capturing():
                raise ValueError(
                    f"{self.where}: its rows have other strides or alignments than in earlier calls; call the operator once "
                    "with such tensors before capturing a graph"
                )
            # They are stored as long as the site, because a graph may use any of them.
            self._tables[key] = self._lay_out(bindings, bases)
        return list(zip(bases, self._tables[key], strict=True))

    def _lay_out(self, bindings: Bindings, bases: list[int]) -> list[PushTables]:
        """Return the tables of each launch: one for the scales, if there are any, and one for the elements, which counts."""
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
        self._step, self.launched_by = step, quantise_kernel.make_launcher()
        self._alone = where.lane == "compute"
        """True if no other kernel runs concurrently, so that this one can use all SMs."""
        self.tables = MovableTables([part.dst for part in step.parts], self._make_tables)

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
