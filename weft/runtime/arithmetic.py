"""This module runs the arithmetic of steps by torch operations. Partial sums are float32 and are rounded once, on every device.

Consecutive parts of a GEMM are one matmul if they add nothing and no gate or count is between them (`groups`). A part with
inner gates is multiplied slice by slice (`Sliced`).

This module runs lookup steps by torch, for CPUs without Triton.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

import torch

from weft.core.problem import LookupProblem, Scaling, Span1D
from weft.core.schedule import Gemm, Norm, Part, Region, Sum, runs
from weft.runtime.bindings import Bindings, CallTensors, FactorScales, Issue, NotPreparedError, in_turn
from weft.runtime.launches import IssuedCall, Matmul
from weft.runtime.products import quantise


def groups(parts: Sequence[Part]) -> list[list[Part]]:
    """Return groups of consecutive parts that may be one matmul: no part adds, and none waits or counts within the group."""
    found: list[list[Part]] = []
    for part in parts:
        last = found[-1][-1] if found else part
        alone = part.waits or part.adds or last.adds or last.inner or last.count is not None
        if found and not alone:
            found[-1].append(part)
        else:
            found.append([part])
    return found


def multiply_gated(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, matmul: Matmul, scales: FactorScales | None = None
) -> None:
    """Compute out = silu(left half) * right half of a @ b. The product is float32. scales: the scales of FP8 operands."""
    product = torch.empty(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    matmul(a, b, product, accumulate=False, scales=scales)
    gate, up = product.chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def _add_up(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], out: torch.Tensor, matmul: Matmul, scales: FactorScales | None
) -> None:
    """Write the sum of the products of these factors to out."""
    for number, (a, b) in enumerate(pairs):
        matmul(a, b, out, accumulate=number > 0, scales=scales)


class Product:
    """A Product multiplies the parts of a group as one matmul, or as one for each product that is added up.

    It gathers rows that are not adjacent before the matmul, and scatters their results after it.
    """

    def __init__(self, step: Gemm, parts: Sequence[Part]) -> None:
        self._step, self._part = step, parts[0]
        self._rows, self._outs = runs([part.a for part in parts]), runs([part.out for part in parts])

    def multiply(self, lane: str, call: IssuedCall) -> None:
        bindings, matmul = call.bindings, call.matmuls[lane]
        if self._part.adds:
            _multiply_and_add(bindings, self._step, self._part, matmul)
            return
        products = bindings.products(self._rows, self._step.b)
        scaling = bindings.scalings.get("a")
        scaled = repeat(None) if scaling is None else _scales(bindings, scaling, self._rows, self._step.b)
        for (cols, rows, bs), scales in zip(products, scaled, strict=False):
            outs = self._outs if len(products) == 1 else [_columns(out, cols) for out in self._outs]
            views = [bindings.view(out) for out in outs]
            if len(views) > 1:
                self._scatter([(_joined(runs_of_a), b) for runs_of_a, b in zip(rows, bs, strict=True)], views, matmul, scales)
                continue
            accumulate = self._step.accumulate
            for runs_of_a, b in zip(rows, bs, strict=True):
                a = runs_of_a[0] if len(runs_of_a) == 1 else _joined(runs_of_a)
                matmul(a.t() if self._step.transposed else a, b, views[0], accumulate=accumulate, scales=scales)
                accumulate = True

    def prepare(self, lane: str, call: IssuedCall, tensors: CallTensors) -> Issue:
        """Return a function that does what `multiply` does, for calls of one layout.

        Raises NotPreparedError if rows are gathered or scattered, or something else is added.
        """
        bindings, step = tensors.bindings, self._step
        several = len(self._rows) > 1 or len(self._outs) > 1
        if several or self._part.adds or step.accumulate or "a" in bindings.scalings:
            raise NotPreparedError("it is more than products of matrices")
        (of_out,), products, found = self._outs, call.products[lane], bindings.products(self._rows, step.b)
        outs = [of_out] if len(found) == 1 else [_columns(of_out, cols) for cols, _, _ in found]
        return in_turn(
            [
                products.prepare(a.t() if step.transposed else a, b, bindings.view(out), tensors, accumulate=number > 0)
                for (_, rows, bs), out in zip(found, outs, strict=True)
                for number, ((a,), b) in enumerate(zip(rows, bs, strict=True))
            ]
        )

    def _scatter(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        views: Sequence[torch.Tensor],
        matmul: Matmul,
        scales: FactorScales | None,
    ) -> None:
        heights, (first, b) = [view.shape[0] for view in views], pairs[0]
        if self._step.accumulate:
            for factor, factor_b in pairs:
                for out, part in zip(views, torch.split(factor, heights), strict=True):
                    matmul(part, factor_b, out, accumulate=True)
            return
        product = torch.empty(first.shape[0], b.shape[1], dtype=views[0].dtype, device=first.device)
        _add_up(pairs, product, matmul, scales)
        for out, part in zip(views, torch.split(product, heights), strict=True):
            out.copy_(part)


class Sliced:
    """A Sliced multiplies a part with inner gates by slices of K, in order. It sums in float32 and rounds once, at the end.

    `multiply` multiplies a slice after its gate has opened. Between the first and the last slice this object holds the sum.
    """

    def __init__(self, step: Gemm, part: Part) -> None:
        self._step, self._part = step, part
        self._edges = (0, *(column for column, _ in part.inner), part.a.shape[1])
        self._sums: list[torch.Tensor] = []

    def multiply(self, bindings: Bindings, number: int, matmul: Matmul) -> None:
        """Multiply slice `number`, counted from 0."""
        part, low, high = self._part, *self._edges[number : number + 2]
        a = bindings.view(part.a)[:, low:high]
        pieces = bindings.pieces(self._step.b)
        if number == 0:
            self._sums = [a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32) for b, _ in pieces]
        for (b, _), total in zip(pieces, self._sums, strict=True):
            matmul(a, b[low:high], total, accumulate=number > 0)
        if number == len(part.inner):
            for (_, cols), total in zip(pieces, self._sums, strict=True):
                bindings.view(_columns(part.out, cols)).copy_(total)
            self._sums = []


def _multiply_and_add(bindings: Bindings, step: Gemm, part: Part, matmul: Matmul) -> None:
    """Write the product plus the part's addends, in order, divided, to `out`. Only the result is rounded."""
    scaling = bindings.scalings.get("a")
    scaled = repeat(None) if scaling is None else _scales(bindings, scaling, [part.a], step.b)
    for (cols, rows, bs), scales in zip(bindings.products([part.a], step.b), scaled, strict=False):
        ((a,), *_), b = rows, bs[0]
        total = torch.empty(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
        _add_up([(a, b) for (a,), b in zip(rows, bs, strict=True)], total, matmul, scales)
        for add in part.adds:
            total += bindings.view(_columns(add, cols))
        if step.divide_by != 1:
            total /= step.divide_by
        bindings.view(_columns(part.out, cols)).copy_(total)


def _scales(bindings: Bindings, scaling: Scaling, rows: Sequence[Region], b: Region) -> Iterator[FactorScales]:
    """Yield the scales of the product of these rows of a and each piece of b."""
    found = [scales for run in rows for scales in bindings.scale_views(run)]
    of_a = found[0] if len(found) == 1 or scaling.recipe == "tensorwise" else torch.cat(found)
    return (FactorScales(of_a, of_b, scaling) for of_b in bindings.scale_views(b))


def _joined(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate rows. For FP8 it concatenates bytes, because torch.cat supports FP8 only on some devices."""
    if len(rows) == 1:
        return rows[0]
    if rows[0].element_size() > 1:
        return torch.cat(list(rows))
    return torch.cat([one.view(torch.uint8) for one in rows]).view(rows[0].dtype)


def add_up(bindings: Bindings, part: Sum, divide_by: int) -> None:
    """Sum the part's sources, in order, divide the sum, and write it to `out`."""
    for out, cols in bindings.pieces(part.out):
        total = bindings.view(_columns(part.srcs[0], cols)).to(torch.float32, copy=True)
        for src in part.srcs[1:]:
            total += bindings.view(_columns(src, cols))
        if divide_by != 1:
            total /= divide_by
        out.copy_(total)


def normalise(bindings: Bindings, step: Norm) -> None:
    """Write the norms of rows, times the norm's weight, to the step's result. If that is FP8, quantise them before they are
    rounded."""
    rows, weight, out = bindings.view(step.src).float(), bindings.view(step.weight), bindings.view(step.out)
    found = torch.nn.functional.rms_norm(rows, rows.shape[1:], weight[0].float(), step.eps)
    if scales := bindings.scale_views(step.out):
        quantise(found, out, scales[0], bindings.scalings["norm"])
    else:
        out.copy_(found)


def _columns(region: Region, cols: Span1D) -> Region:
    """Return some columns of a region. cols: counted from the region's first column."""
    low = region.cols[0]
    return Region(region.buffer, region.rank, region.rows, (low + cols[0], low + cols[1]))


def look_up(bindings: Bindings, part_bags: Region, out: Region, problem: LookupProblem) -> None:
    """Store the pooled rows of these bags in out. An index outside its table adds nothing."""
    (low, high), loose = part_bags.rows, bindings.loose
    view = bindings.view(out)
    for at, (left, right) in enumerate(problem.table_columns(part_bags.rank)):
        if part_bags.cols[0] <= left < part_bags.cols[1]:
            bags = slice(at * problem.m + low, at * problem.m + high + 1)
            columns = view[:, left - part_bags.cols[0] : right - part_bags.cols[0]]
            weights = loose["weights"][0] if "weights" in loose else None
            pooled = pool(loose["tables"][at], loose["indices"][0], loose["offsets"][0][bags], weights, problem.mode == "mean")
            columns.copy_(pooled)


def pool(
    table: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, mean: bool
) -> torch.Tensor:
    """Pool the bags indices[offsets[i] : offsets[i + 1]] of one table in float32."""
    ends = offsets.long().clamp(0, indices.numel())
    lengths = ends.diff().clamp(min=0)
    bag = torch.repeat_interleave(lengths)
    places = torch.arange(bag.numel()) + (ends[:-1] - lengths.cumsum(0) + lengths)[bag]
    rows, there = _rows(table, indices[places].long())
    if weights is not None:
        rows *= torch.where(there, weights[places].float(), 0.0)[:, None]
    out = torch.zeros(lengths.numel(), table.shape[1], dtype=torch.float32).index_add_(0, bag, rows)
    return out / lengths.clamp(min=1)[:, None] if mean else out


def _rows(table: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of a table in float32, and whether the table has them. Rows that it does not have are zeros."""
    there = (indices >= 0) & (indices < table.shape[0])
    if not table.shape[0]:
        return torch.zeros(indices.numel(), table.shape[1], dtype=torch.float32), there
    return torch.where(there[:, None], table[indices.clamp(0, table.shape[0] - 1)].float(), 0.0), there
