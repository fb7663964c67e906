"""This module runs a collective's sum as a kernel: a Reduce on communication blocks of contiguous pieces, one the caller's."""

from __future__ import annotations

from weft.core.problem import CollectiveProblem
from weft.core.schedule import Reduce, Region, Schedule
from weft.kernels.runs import RunTable, load, make_launcher, run_table, sum_runs
from weft.runtime.bindings import Bindings, Where
from weft.runtime.launches import MovableTables, Site, StepKernel


def sum_of(site: Site, where: Where, step: Reduce) -> FusedSum | None:
    """Return the kernel of a collective's sum, or None if it runs step by step."""
    return FusedSum(site, where, step) if adds_pieces(step, site.schedule) else None


def adds_pieces(step: Reduce, schedule: Schedule) -> bool:
    """Return whether the kernel can run a sum. Other sums run step by step.

    The kernel runs one sum of contiguous pieces of one length, one of them the caller's, that neither waits nor counts.
    """
    if len(step.parts) != 1:
        return False
    part, buffers = step.parts[0], schedule.buffer
    others = [buffers[src.buffer] for src in part.srcs if src.buffer != "a"]
    # The table has the addresses of all pieces except the caller's, which may change in each call.
    fixed = len(part.srcs) == len(others) + 1 and all(buffer.kind in ("symmetric", "local") for buffer in others)
    narrow = schedule.problem.dtype == "float32" or not any(buffer.float32 for buffer in (*others, buffers[part.out.buffer]))
    columns = {width for region in (*part.srcs, part.out) for width in buffers[region.buffer].cols}
    plain = not part.gates and part.count is None and all(src.shape == part.out.shape for src in part.srcs)
    return fixed and narrow and columns == {1} and plain


class FusedSum(StepKernel):
    """A FusedSum is the kernel of one Reduce of one part. Peers' pieces are fixed; the caller's tensors may change from call to
    call."""

    def __init__(self, site: Site, where: Where, step: Reduce) -> None:
        super().__init__(site, where)
        problem = site.schedule.problem
        assert isinstance(problem, CollectiveProblem), problem
        self.step, (self._part,) = step, step.parts
        self._sms, self._launcher = problem.sms, make_launcher()
        self._own = next(number for number, src in enumerate(self._part.srcs) if src.buffer == "a")
        self.tables = MovableTables([src for src in self._part.srcs if src.buffer != "a"], self._make_tables)

    def runs(self, bindings: Bindings) -> bool:
        """Return True, and prepare the tables and kernels, which may wait for all streams.

        It is called before any part of a call is enqueued.
        """
        self.tables.of(bindings)
        return True

    def launch(self, bindings: Bindings, *, silent: bool, tries: int, sms: int, stream: int | None = None) -> None:
        if silent:  # a rehearsal must not write, because the result may share memory with a source
            return
        own, out = (_address(bindings, region) for region in (self._part.srcs[self._own], self._part.out))
        elements = self._part.out.shape[0]
        plan = self.tables.of(bindings)
        sum_runs(plan, own=own, out=out, elements=elements, sms=self._sms, launched_by=self._launcher, stream=stream)

    def _make_tables(self, bindings: Bindings) -> RunTable:
        """Return the table, and load its kernel."""
        srcs = [0 if number == self._own else _address(bindings, src) for number, src in enumerate(self._part.srcs)]
        by, site = self.step.divide_by, self.site
        plan = run_table(srcs, own=self._own, dtype=site.dtype, divide_by=by, device=site.device)
        load(plan, launched_by=self._launcher, address=_address(bindings, self._part.out))
        return plan


def _address(bindings: Bindings, region: Region) -> int:
    """Return the address of a region's first element. Its buffer has one column."""
    ((whole, _),) = bindings.tensors[region.buffer, region.rank]
    return whole.data_ptr() + region.rows[0] * whole.element_size()
