"""Lookup steps run as kernels.

The schedule's input `bags` is the result of a lookup. The caller passes other tensors instead, which are no buffers of the
schedule and have these names: `tables` (one or several), `indices`, `offsets` and, if there are any, `weights`.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from weft.core.problem import LookupProblem
from weft.core.schedule import Flag, Lookup, Region
from weft.kernels.lookup import LookupTables, OutputPlace, lookup, lookup_tables, tiles_of_bags, variant
from weft.runtime.bindings import Bindings, Where
from weft.runtime.launches import KernelTables, Site, StepKernel, addresses_of


def signal_values(site: Site, rank: int, step: Lookup) -> dict[Flag, int]:
    """Return the final values of the flags of a lookup. Each tile adds one."""
    problem = site.schedule.problem
    assert isinstance(problem, LookupProblem), f"{problem} has no tables"
    columns = problem.table_columns(rank)
    return {part.count: tiles_of_bags(part, columns) for part in step.parts if part.count is not None}


class FusedLookup(StepKernel):
    """A FusedLookup is the kernel of a lookup. Its tables and the buffers that it writes may move between calls."""

    tabled = ("tables",)

    def __init__(self, site: Site, where: Where, step: Lookup) -> None:
        super().__init__(site, where)
        problem = site.schedule.problem
        assert isinstance(problem, LookupProblem), f"{problem} has no tables"
        self.step, self._problem = step, problem
        self._columns = problem.table_columns(where.rank)
        self._targets = list(dict.fromkeys((part.out.buffer, part.out.rank) for part in step.parts))
        self._fixed = addresses_of(part.out for part in step.parts if part.out.buffer != "out")
        self.tables = KernelTables(site, self._addresses, self._make_tables)
        self._loaded: set[tuple[object, ...]] = set()

    def runs(self, bindings: Bindings) -> bool:
        """Return True, and prepare what may wait for all streams: tables of addresses, and the kernel for new types of indices.

        It is called before any part of a call is enqueued.
        """
        if self._columns:
            plan, loose = self.tables.of(bindings), bindings.loose
            weights = loose["weights"][0] if "weights" in loose else None
            mean = self._problem.mode == "mean"
            key = variant(plan, loose["indices"][0], loose["offsets"][0], weights, self._out(bindings), mean=mean)
            if key not in self._loaded:
                # Earlier calls may wait for a peer, and the watchdog cannot release them while the driver loads a kernel.
                captured = self.site.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
                with nullcontext() if captured else self.site.loading():
                    self._launch(plan, bindings, load_only=True)
                self._loaded.add(key)
        return True

    def lay_out(self, bindings: Bindings) -> None:
        if self._columns:
            self.tables.of(bindings)

    def launch(self, bindings: Bindings, *, silent: bool, tries: int, sms: int, stream: int | None = None) -> None:
        if self._columns:
            self._launch(self.tables.of(bindings), bindings, silent=silent, sms=sms, stream=stream)

    def _launch(
        self,
        plan: LookupTables,
        bindings: Bindings,
        *,
        silent: bool = True,
        load_only: bool = False,
        sms: int = 1,
        stream: int | None = None,
    ) -> None:
        lookup(
            plan,
            bindings.loose["indices"][0],
            bindings.loose["offsets"][0],
            bindings.loose["weights"][0] if "weights" in bindings.loose else None,
            mean=self._problem.mode == "mean",
            dtype=bindings.loose["tables"][0].dtype,
            out=self._out(bindings),
            silent=silent,
            load_only=load_only,
            sms=sms,
            launched_by=self.launched_by,
            stream=stream,
        )

    def _out(self, bindings: Bindings) -> torch.Tensor | None:
        """Return the caller's result, whose address changes from call to call. Return None for a rank without one."""
        return next((bindings.tensors[key][0][0] for key in self._targets if key[0] == "out"), None)

    def _addresses(self, bindings: Bindings) -> tuple[int, ...]:
        tables = bindings.loose["tables"]
        return tuple([n for t in tables for n in (t.data_ptr(), t.shape[0], t.stride(0))]) + self._fixed(bindings)

    def _make_tables(self, bindings: Bindings) -> LookupTables:
        def target(region: Region) -> OutputPlace:
            view, (whole, _) = bindings.view(region), bindings.tensors[region.buffer, region.rank][0]
            relative = region.buffer == "out"
            return OutputPlace(view.data_ptr() - relative * whole.data_ptr(), whole.stride(0) * whole.element_size(), relative)

        return lookup_tables(
            self.step,
            bindings.loose["tables"],
            columns=self._columns,
            batch=self._problem.m,
            device=self.site.device,
            target=target,
            count_address=self.site.count_address,
        )
