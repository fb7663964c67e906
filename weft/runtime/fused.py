"""GEMMs with gates, counts, adds or stores to peers, sums, and norms of rows, as kernels of devices whose flags have addresses.

Every rank must treat the same steps as kernels, because a kernel raises its flag once per tile, and the waiter must know the
number. A rank runs a step part by part, and raises the same flags as far, if the kernel cannot run it: if it cannot load the
operands (odd strides), if it cannot process the parts in order, if parts are only some columns of a matrix, or if slices of K
end within a step of the kernel's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat

import torch

from weft.core.errors import WaitTimeout
from weft.core.problem import ADDENDS, CollectiveProblem, Recipe, Scaling
from weft.core.schedule import Flag, Gemm, Norm, Part, Reduce, Region, Schedule, signalled_flags, waits
from weft.kernels.gemm import Tables, blocks_for, fits, gemm, in_order, loads, pitch, tables, whole_slices
from weft.kernels.norm import norm
from weft.kernels.sums import SumTable, addends_of, load_runs, region_table, run_table, sum_regions, sum_runs
from weft.perf.shapes import TileShape, tiles_of
from weft.runtime.bindings import Bindings, Where
from weft.runtime.launches import KernelTables, Site, StepKernel, addresses_of


def is_fused(step: Gemm) -> bool:
    """Return whether a GEMM runs as a kernel. It does if its tiles wait, count, add, or are stored at a peer.

    A part without tiles would never raise its flag. A GEMM with such a part, for example if b has no columns, runs part by
    part, and raises each flag once.
    """
    return all(part.out.size for part in step.parts) and any(
        part.waits or part.count or part.adds or part.out.rank != step.b.rank for part in step.parts
    )


def kernel_of(site: Site, where: Where, step: Gemm) -> FusedGemm | None:
    """Return the kernel of a GEMM, or None if it runs part by part."""
    return FusedGemm(site, where, step) if is_fused(step) else None


def kernel_of_sum(site: Site, where: Where, step: Reduce) -> FusedSum | None:
    """Return the kernel of a sum, or None if it runs part by part. A sum with counts runs part by part."""
    if isinstance(site.schedule.problem, CollectiveProblem):
        return FusedSum(site, where, step) if adds_pieces(step, site.schedule) else None
    # A sum's table contains the addresses of its sources. Those of the caller's tensors change from call to call, and a graph
    # may still use the table of an earlier call. Only the addresses of addends are arguments.
    given = site.buffers_of("input") - set(addends_of(step))
    moves = any(src.buffer in given for part in step.parts for src in part.srcs)
    return FusedSum(site, where, step) if step.parts and not signalled_flags(step) and not moves else None


def signal_values(site: Site, rank: int, step: Gemm) -> dict[Flag, int]:
    """Return the final values of the flags that a GEMM counts. Each tile adds one."""
    if not is_fused(step):
        return {}
    blocks = blocks_for(step, site.device, site.machine, site.schedule.problem.scaling)
    return {part.count: tiles_of(part, blocks) for part in step.parts if part.count is not None}


_LAYOUTS = 256
"""A step remembers for this many layouts of its tensors whether the kernel can run them."""


def _irregular(step: Gemm, blocks: TileShape, results: int) -> str:
    """Return why no call of a GEMM can run as one kernel, or "" if it can. results: the number of the caller's buffers it
    writes."""
    if not whole_slices(step, blocks):
        return "its slices of K end within a step of the kernel's loop"
    if step.accumulate:
        return "it adds to its result"
    if results > 1:
        return f"it writes {results} results"
    if any(pitch(part) is None for part in step.parts if part.adds):
        return "the rows of what it adds are not evenly spaced"
    return "" if in_order(step) else "its parts cannot be processed in order"


class FusedGemm(StepKernel):
    """A FusedGemm is the kernel of a GEMM with gates, counts, adds, or parts that are stored at peers.

    The launch's `out` is the caller's result, whose address may change from call to call, or else the last part's buffer. Parts
    of other buffers, and at peers, are stored by address.

    waits_in_kernel: true, because its tiles wait for the chunks of this call themselves.
    status: the number of the wait that the last launch gave up, and the value that it has seen.
    """

    waits_in_kernel = True

    def __init__(self, site: Site, where: Where, step: Gemm) -> None:
        super().__init__(site, where)
        self.status = torch.zeros(2, dtype=torch.int32, device=site.device)
        self.step, self._scaling = step, site.schedule.problem.scaling
        self._blocks = blocks_for(step, site.device, site.machine, self._scaling)
        self._buffers = list(dict.fromkeys((part.a.buffer, part.a.rank) for part in step.parts))
        stored = list(dict.fromkeys((part.out.buffer, part.out.rank) for part in step.parts[::-1]))
        given = [key for key in stored if key[0] in site.buffers_of("output") and key[1] == where.rank]
        self._out = (given or stored)[0]
        self._elsewhere = [part.out for part in step.parts if (part.out.buffer, part.out.rank) != self._out]
        self._adds = list(dict.fromkeys((add.buffer, add.rank) for part in step.parts for add in part.adds))
        self._irregular = _irregular(step, self._blocks, len(given))
        self._counts = any(part.count for part in step.parts)
        self.tables = KernelTables(site, addresses_of(self._elsewhere), self._make_tables)
        self._unfit: dict[tuple[int, ...], str] = {}
        """Why the kernel cannot run tensors of given alignments and strides, or "" if it can."""

    def reason_against(self, bindings: Bindings) -> str:
        if self._irregular:
            return self._irregular
        sources, bs = self._sources(bindings), list(bindings.second_factors(self.step.b))
        adds = [self._whole(bindings, key) for key in self._adds]
        keys = dict.fromkeys([self._out, *((out.buffer, out.rank) for out in self._elsewhere)])
        outs = [matrix for key in keys for matrix, _ in bindings.tensors[key]]
        key = tuple(n for t in (*sources, *bs, *adds, *outs) for n in (t.data_ptr() & 15, *t.stride()))
        if key not in self._unfit:
            if len(self._unfit) == _LAYOUTS:
                self._unfit.clear()
            self._unfit[key] = self._find_mismatch(bindings, sources, bs, adds, outs)
        return self._unfit[key]

    def _find_mismatch(
        self,
        bindings: Bindings,
        sources: list[torch.Tensor],
        bs: list[torch.Tensor],
        adds: list[torch.Tensor],
        outs: list[torch.Tensor],
    ) -> str:
        """Return why the kernel cannot run these tensors, or "" if it can."""
        several = bindings.stacked.get((self.step.b.buffer, self.step.b.rank))
        pairs = zip(sources, bs, strict=False) if several else ((a, b) for a in sources for b in bs)
        if not all(fits(a, b) for a, b in pairs):
            return "it cannot load an operand whose rows are not contiguous, 16-byte aligned and a multiple of 16 bytes apart"
        if several and not len(sources) == len(bs) <= 2:
            return f"it adds up {len(bs)} products of {len(sources)} factors, and the kernel two"
        if len(sources) > 2:
            return f"its rows come from {len(sources)} buffers, and it takes two"
        if not self._spans_columns(bindings):
            return "its parts are only some columns of a matrix"
        if several:
            bs = bs[:1]  # one launch has them all
        if len(bs) > 1 and self._counts:
            # Each b would have a launch of its own, whose number of tiles depends on its columns.
            return f"it counts tiles for one b, and there are {len(bs)}"
        if adds and not (len(adds) == len(bs) == 1 and loads(adds[0]) and adds[0].dtype == outs[0].dtype):
            return "it cannot load what it adds"
        # Results that are stored by address need one dtype and one row stride.
        same = len({(out.dtype, out.stride()) for out in outs}) == 1
        fit = not self._elsewhere or (len(bs) == 1 and same)
        return "" if fit else "its results differ in dtype or row stride, or there are several b"

    def _spans_columns(self, bindings: Bindings) -> bool:
        """Return whether parts read all columns of a and of what they add, and write all columns of `out`.

        The kernel always begins at the first column.
        """
        regions = [region for part in self.step.parts for region in (part.a, part.out, *part.adds)]
        elsewhere = {(out.buffer, out.rank) for out in self._elsewhere}
        keys = dict.fromkeys((region.buffer, region.rank) for region in regions)
        widths = {key: bindings.tensors[key][-1][1][1] for key in keys if key not in elsewhere}
        return all(region.cols == (0, widths[key]) for region in regions if (key := (region.buffer, region.rank)) in widths)

    def raise_if_late(self, describe: Callable[[Flag], str]) -> None:
        gate, seen = self.status.tolist()
        if gate:
            self.status.zero_()
            wait = waits(self.step)[gate - 1]
            raise WaitTimeout(f"{self.where}: {wait.flag}: expected more than the {seen} seen; {describe(wait.flag)}")

    def launch(self, bindings: Bindings, *, silent: bool, tries: int, sms: int, stream: int | None = None) -> None:
        plan = self.tables.of(bindings)
        sources, bs = tuple(self._sources(bindings)), bindings.second_factors(self.step.b)
        added = None
        if bindings.stacked and len(bs) > 1:  # the products are added up in one launch
            added, sources, bs = (sources[1], bs[1]), sources[:1], bs[:1]
        adds = self._whole(bindings, self._adds[0]) if self._adds else None
        outs = [out for out, _ in bindings.tensors[self._out] if out.shape[1]]
        scaled = repeat(None) if self._scaling is None else self._scales(bindings, self._scaling)
        for b, out, scales in zip(bs, outs, scaled, strict=False):
            gemm(
                sources,
                b,
                out,
                plan,
                self.status,
                silent=silent,
                tries=tries,
                sms=sms,
                adds=adds,
                added=added,
                scales=scales,
                use_fast_accum=self._scaling is not None and self._scaling.use_fast_accum,
                launched_by=self.launched_by,
                stream=stream,
            )

    def _scales(self, bindings: Bindings, scaling: Scaling) -> Iterator[tuple[tuple[torch.Tensor, ...], torch.Tensor, Recipe]]:
        """Return the scales of all sources of a, those of b, and their recipe, for each piece of b."""
        of_a = tuple(bindings.scales[key][0] for key in self._buffers)
        return ((of_a, of_b, scaling.recipe) for of_b in bindings.scale_views(self.step.b))

    def _sources(self, bindings: Bindings) -> list[torch.Tensor]:
        """Return the tensors that the kernel loads a from: of each buffer, or of each product that is added up."""
        if not bindings.stacked:
            return [self._whole(bindings, key) for key in self._buffers]
        return [matrix for key in self._buffers for matrix, _ in bindings.tensors[key] if matrix.shape[1]]

    def _whole(self, bindings: Bindings, key: tuple[str, int]) -> torch.Tensor:
        ((matrix, _),) = bindings.tensors[key]
        return matrix

    def _make_tables(self, bindings: Bindings) -> Tables:
        def stored_at(part: Part, row: int) -> torch.Tensor | None:
            return None if (part.out.buffer, part.out.rank) == self._out else bindings.view(part.out)[row:]

        return tables(
            self.step,
            device=self.site.device,
            source=lambda part: self._buffers.index((part.a.buffer, part.a.rank)),
            gate_address=lambda flag: self.site.gate_address(flag, self.where),
            count_address=self.site.count_address,
            stored_at=stored_at if self._elsewhere else None,
            need=self.site.gate_need,
            blocks=self._blocks,
        )


def adds_pieces(step: Reduce, schedule: Schedule) -> bool:
    """Return whether the kernel can run a collective's sum. Other sums run step by step.

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


class FusedNorm(StepKernel):
    """A FusedNorm is the kernel of a Norm."""

    def __init__(self, site: Site, where: Where, step: Norm) -> None:
        super().__init__(site, where)
        self.step = step

    def launch(self, bindings: Bindings, *, silent: bool, tries: int, sms: int, stream: int | None = None) -> None:
        src, weight, out = (bindings.view(region) for region in (self.step.src, self.step.weight, self.step.out))
        scales = next(iter(bindings.scale_views(self.step.out)), None)
        eps, launched_by = self.step.eps, self.launched_by
        norm(src, weight, out, eps=eps, sms=sms, scales=scales, launched_by=launched_by, stream=stream)


class FusedSum(StepKernel):
    """A FusedSum is the kernel of a Reduce, which starts after its gates have been passed.

    A collective's sum (`adds_pieces`) reads one of the caller's tensors, whose address may change from call to call.
    """

    def __init__(self, site: Site, where: Where, step: Reduce) -> None:
        super().__init__(site, where)
        problem = site.schedule.problem
        self.step, self._out = step, step.parts[0].out
        self._addends = () if isinstance(problem, CollectiveProblem) else addends_of(step)
        sources = len(step.parts[0].srcs) - len(self._addends)
        self._srcs = [src for part in step.parts for src in part.srcs[:sources]]
        self._own: int | None = None  # the number of the caller's piece, in a collective's sum
        self._sms = 0
        if isinstance(problem, CollectiveProblem):
            self._own, self._sms = [src.buffer for src in self._srcs].index("a"), problem.sms
        self._fixed = [src for number, src in enumerate(self._srcs) if number != self._own]
        self.tables = KernelTables(site, addresses_of(self._fixed), self._make_tables)

    def runs(self, bindings: Bindings) -> bool:
        """Return whether the kernel can load a call's tensors, and prepare its tables. A collective's kernels are loaded, too,
        which may wait for all streams.

        It is called before any part of a call is enqueued.
        """
        found = super().runs(bindings)
        if found:
            self.tables.of(bindings)
        return found

    def reason_against(self, bindings: Bindings) -> str:
        """Return why the kernel cannot run the tensors of a call, or "" if it can.

        The kernel needs one result, and sources of one dtype and row stride, as many for each part, with the rows of the
        result.
        """
        if self._own is not None:
            return ""
        if any(src.shape != part.out.shape for part in self.step.parts for src in part.srcs if src.buffer != "bias"):
            return "its sources have other rows than its result"
        if any(src.cols != part.out.cols for part in self.step.parts for src in part.srcs if src.buffer in self._addends):
            return "what it adds has other columns than its result"
        if len({(part.out.buffer, part.out.rank) for part in self.step.parts}) > 1:
            return "it has several results"
        first, *more = self._matrices(bindings, self._srcs[0])
        _, *others = self._matrices(bindings, self._out)
        if more or others:
            return "its sources or its results consist of several matrices"
        tensors = [self._matrices(bindings, src)[0] for src in self._srcs]
        if not all(t.dtype == first.dtype and t.stride() == first.stride() for t in tensors):
            return "its sources differ in dtype or row stride"
        return "" if len({len(part.srcs) for part in self.step.parts}) == 1 else "its parts have different numbers of sources"

    def can_be_prepared(self, bindings: Bindings) -> bool:
        return all(bindings.buffers[src.buffer].kind in ("symmetric", "local") for src in self._fixed)

    def launch(self, bindings: Bindings, *, silent: bool, tries: int, sms: int, stream: int | None = None) -> None:
        plan, launched_by = self.tables.of(bindings), self.launched_by
        if self._own is None:
            (out,) = self._matrices(bindings, self._out)
            bias, residual = (
                bindings.tensors[name, self.where.rank][0][0] if name in self._addends else None for name in ADDENDS
            )
            sum_regions(plan, out, sms=sms, bias=bias, residual=residual, launched_by=launched_by, stream=stream)
        elif not silent:  # a rehearsal must not write, because the result may share memory with a source
            own, out_at = (bindings.view(region).data_ptr() for region in (self._srcs[self._own], self._out))
            elements = self._out.shape[0]
            sum_runs(plan, own=own, out=out_at, elements=elements, sms=self._sms, launched_by=launched_by, stream=stream)

    def _matrices(self, bindings: Bindings, region: Region) -> list[torch.Tensor]:
        return [matrix for matrix, _ in bindings.tensors[region.buffer, region.rank]]

    def _make_tables(self, bindings: Bindings) -> SumTable:
        def address(region: Region) -> int:
            return bindings.view(region).data_ptr()

        device = self.site.device
        if self._own is None:
            first = self._matrices(bindings, self._srcs[0])[0]
            return region_table(self.step, address=address, stride=first.stride(0), dtype=first.dtype, device=device)
        srcs = [0 if number == self._own else address(src) for number, src in enumerate(self._srcs)]
        by, dtype = self.step.divide_by, self.site.dtype
        plan = run_table(srcs, own=self._own, dtype=dtype, divide_by=by, device=device)
        load_runs(plan, launched_by=self.launched_by, address=address(self._out))
        return plan
