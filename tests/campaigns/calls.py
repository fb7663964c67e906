"""Calls of operators that every rank can draw by itself, with their right results, for campaigns of many calls.

A Case is a kind of call: operator, schedule, extents, dtype, and the memory layout of the operands. `work(case, seed, device)`
gives this rank's call and its result. All ranks draw the same data from the same seed. M, N and K are as in `weft.Problem`,
except that M of a collective alone is one rank's part where it gathers or scatters, so that any M fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.nn.functional import embedding_bag

import weft
from weft import collectives
from weft.core.problem import (
    COLLECTIVE_OPS,
    COLUMN_OPS,
    EXCHANGES,
    FLOAT8_UNIT,
    LOOKUP_OPS,
    OPS,
    SCALE_BLOCK,
    Recipe,
    Scaling,
    split,
)
from weft.schedules import names
from weft.tools.run_inputs import ScaledInputs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Layout = Literal["plain", "transposed", "padded", "strided"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
LEFT_OUT = {("all_reduce", "two_shot")}
"""Families of calls of other shapes than those here: it sums rows of columns."""
EVERY = [(op, name) for op in (*OPS, *COLUMN_OPS, *COLLECTIVE_OPS, *LOOKUP_OPS) for name in names(op) if name != "node_slices"]
EVERY = [case for case in EVERY if case not in LEFT_OUT]
"""Operators with their families, on one node."""
Work = tuple[Callable[[], torch.Tensor], torch.Tensor]
"""A call, and what it must return, in float64."""
_BAG = 3
_FP8_UNIT = 2.0**-13
"""To which tensor cores add up products of FP8."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """entries: of a leading dimension beside the rows, for all_gather_matmul and matmul_reduce_scatter; dim: which of the two
    is gathered or scattered, counted as their `gather_dim` and `scatter_dim` are. Such calls have entries * m rows in all.
    recipe: of FP8 operands; every rank then has an a and a b of its own, with a column-major b, and dtype is the result's."""

    op: str
    schedule: str
    m: int = 24
    n: int = 18
    k: int = 12
    dtype: str = "float32"
    a: Layout = "plain"
    b: Layout = "plain"
    entries: int = 1
    dim: int = 0
    recipe: Recipe | None = None

    def __str__(self) -> str:
        shape = f"{self.m}x{self.n}x{self.k}" + (f", {self.entries} entries, dim {self.dim}" if self.entries > 1 else "")
        scaled = f" of FP8 {self.recipe}" if self.recipe else ""
        return f"{self.op} {self.schedule} {shape} {self.dtype}{scaled} a {self.a} b {self.b}"


class Wrong(AssertionError):
    """A call returned something else than it must."""


def work(case: Case, seed: int, on: torch.device, group: dist.ProcessGroup | None = None) -> Work:
    """This rank's call of a case, and its result. group: default: the world."""
    return Drawn(case, seed, on, group).work()


def check(case: Case, out: torch.Tensor, expected: torch.Tensor, ranks: int) -> None:
    """Raises Wrong if a result is further from what it must be than rounding explains."""
    if out.dtype != DTYPES[case.dtype] or out.shape != expected.shape:
        raise Wrong(f"{case}: {out.dtype} {list(out.shape)}, not {case.dtype} {list(expected.shape)}")
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    unit = torch.finfo(DTYPES[case.dtype]).eps / 2
    if case.recipe:
        unit = max(unit, _FP8_UNIT)
    # Partial sums may be larger than what they add up to, and each is rounded.
    allowed = 2 * max(scale, case.k**0.5) * ((1 + 2 * ranks) * unit + 4 * case.k**0.5 * torch.finfo(torch.float32).eps)
    error = float((out.double() - expected).abs().max()) if expected.numel() else 0.0
    if not error <= allowed:
        raise Wrong(f"{case}: off by {error:.3g}, where rounding explains {allowed:.3g}")


def laid(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The same values, lying otherwise: by columns, with room after each row, or every other row and column of a larger one."""
    rows, cols = values.shape[-2:]
    if layout == "transposed":
        return values.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "padded":
        return values.new_zeros(*values.shape[:-1], cols + 3)[..., :cols].copy_(values)
    if layout == "strided":
        return values.new_zeros(*values.shape[:-2], 2 * rows, 2 * cols)[..., ::2, ::2].copy_(values)
    return values


class Drawn:
    """A case's data on this rank. linear: what its call reads, and its result is linear in, once `work` has been called."""

    linear: list[torch.Tensor]

    def __init__(self, case: Case, seed: int, on: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.case, self.on, self.group = case, on, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._generator = torch.Generator().manual_seed(seed)

    def work(self) -> Work:
        op = self.case.op
        if self.case.recipe:
            return self._scaled(self.case.recipe)
        if op in COLLECTIVE_OPS:
            return self._collective()
        if op in LOOKUP_OPS:
            return self._lookup()
        if op in EXCHANGES:
            return self._rows_exchanged()
        if op in COLUMN_OPS:
            return self._columns_exchanged()
        return self._gathered() if op == "all_gather_matmul" else self._reduced()

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(self.on, DTYPES[self.case.dtype])

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Every rank's a and b, where each has its own."""
        return [(self._normal(self.case.m, self.case.k), self._normal(self.case.k, self.case.n)) for _ in range(self.size)]

    def _entries(self, a: torch.Tensor) -> torch.Tensor:
        """[rows, K] as a call with a dimension of entries has it: the rows of entry e are rows e, e + entries, ..."""
        if self.case.entries == 1:
            return laid(a, self.case.a)
        shaped = a.reshape(a.shape[0] // self.case.entries, self.case.entries, a.shape[1])
        return laid(shaped.movedim(0, self.case.dim).contiguous(), self.case.a)

    def _flat(self, out: torch.Tensor) -> torch.Tensor:
        if self.case.entries == 1:
            return out
        moved = out.movedim(self.case.dim, 0)
        return moved.reshape(moved.shape[0] * self.case.entries, out.shape[-1])

    def _gathered(self) -> Work:
        case = self.case
        a, b = self._normal(case.m * case.entries, case.k), self._normal(case.k, case.n)
        low, high = (edge * case.entries for edge in split(case.m, self.size)[self.rank])
        columns = slice(*split(case.n, self.size)[self.rank])
        mine, right = self._entries(a[low:high]), laid(b[:, columns], case.b)
        self.linear = [mine]

        def call() -> torch.Tensor:
            out = weft.all_gather_matmul(
                mine, right, self.group, schedule=case.schedule, rows=case.m, gather_dim=case.dim if case.entries > 1 else 0
            )
            return self._flat(out)

        return call, a.double() @ b[:, columns].double()

    def _reduced(self) -> Work:
        case = self.case
        entries = case.entries if case.op == "matmul_reduce_scatter" else 1
        a, b = self._normal(case.m * entries, case.k), self._normal(case.k, case.n)
        inner, whole = slice(*split(case.k, self.size)[self.rank]), a.double() @ b.double()
        left, right = a[:, inner], laid(b[inner], case.b)
        if case.op == "matmul_all_reduce":
            mine = laid(left, case.a)
            self.linear = [mine]
            return lambda: weft.matmul_all_reduce(mine, right, self.group, schedule=case.schedule), whole
        mine, dim = self._entries(left), case.dim if entries > 1 else 0
        self.linear = [mine]
        low, high = (edge * entries for edge in split(case.m, self.size)[self.rank])

        def call() -> torch.Tensor:
            return self._flat(weft.matmul_reduce_scatter(mine, right, self.group, schedule=case.schedule, scatter_dim=dim))

        return call, whole[low:high]

    def _rows_exchanged(self) -> Work:
        case, pairs = self.case, self._pairs()
        mine, right = laid(pairs[self.rank][0], case.a), laid(pairs[self.rank][1], case.b)
        self.linear = [mine]
        rows = slice(*split(case.m, self.size)[self.rank])
        if case.op == "matmul_all_to_all":
            expected = torch.cat([x[rows].double() @ y.double() for x, y in pairs])
            return lambda: weft.matmul_all_to_all(mine, right, self.group, schedule=case.schedule), expected
        expected = torch.cat([x[rows] for x, _ in pairs]).double() @ pairs[self.rank][1].double()
        return lambda: weft.all_to_all_matmul(mine, right, self.group, schedule=case.schedule), expected

    def _scaled(self, recipe: Recipe) -> Work:
        """FP8 operands, quantised on each rank. The result is linear in the scales of a."""
        case, scaling = self.case, Scaling(recipe=recipe)
        cuts = [slice(*cut) for cut in split(case.m, self.size)]
        heights = [cut.stop - cut.start if case.op == "all_gather_matmul" else case.m for cut in cuts]
        drawn = [
            (
                torch.randn(height, case.k, generator=self._generator),
                torch.randn(case.k, case.n, generator=self._generator),
            )
            for height in heights
        ]
        given = [ScaledInputs.of(a, b, scaling) for a, b in drawn]
        exact = [tuple(one.double() for one in each.dequantised(scaling)) for each in given]
        mine = given[self.rank]
        a, b = laid(mine.a, case.a).to(self.on), mine.b.t().to(self.on).t()
        scale_a, scale_b = mine.scale_a.to(self.on), mine.scale_b.to(self.on)
        self.linear = [scale_a]
        products = [x @ y for x, y in exact]
        expected = {
            "all_gather_matmul": lambda: torch.cat([x for x, _ in exact]) @ exact[self.rank][1],
            "matmul_reduce_scatter": lambda: torch.stack(products).sum(0)[cuts[self.rank]],
            "matmul_all_reduce": lambda: torch.stack(products).sum(0),
            "matmul_all_to_all": lambda: torch.cat([one[cuts[self.rank]] for one in products]),
            "all_to_all_matmul": lambda: torch.cat([x[cuts[self.rank]] for x, _ in exact]) @ exact[self.rank][1],
        }[case.op]()
        options: dict[str, Any] = {"rows": case.m} if case.op == "all_gather_matmul" else {}
        options |= {"schedule": case.schedule, "output_dtype": DTYPES[case.dtype]}
        call = getattr(weft, case.op)
        return lambda: call(a, b, self.group, scale_a=scale_a, scale_b=scale_b, **options), expected.to(self.on)

    def _columns_exchanged(self) -> Work:
        """What is cut is cut evenly: see `even`."""
        case, pairs = self.case, self._pairs()
        a, b = pairs[self.rank]
        right = laid(b, case.b)
        if case.op == "matmul_all_to_all_columns":
            mine, cols = laid(a, case.a), slice(*split(case.n, self.size)[self.rank])
            self.linear = [mine]
            expected = torch.cat([(x.double() @ y.double())[:, cols] for x, y in pairs])
            return lambda: weft.matmul_all_to_all(mine, right, self.group, schedule=case.schedule, split_dim=-1), expected
        rows, inner = slice(*split(case.m, self.size)[self.rank]), [slice(*cut) for cut in split(case.k, self.size)]
        gathered_a = torch.cat([x[rows, inner[source]] for source, (x, _) in enumerate(pairs)], 1)
        mine = laid(a[:, inner[self.rank]], case.a)
        self.linear = [mine]
        options = {"schedule": case.schedule, "gather_dim": -1}
        return lambda: weft.all_to_all_matmul(mine, right, self.group, **options), gathered_a.double() @ b.double()

    def _collective(self) -> Work:
        case = self.case
        given = [self._normal(case.m * self.size) for _ in range(self.size)]
        mine, part = given[self.rank].clone(), slice(*split(case.m * self.size, self.size)[self.rank])
        self.linear = [mine]
        options = {"group": self.group, "schedule": case.schedule}
        if case.op == "all_gather":
            return lambda: collectives.all_gather(mine, **options), torch.cat(given).double()
        total = torch.stack([each.double() for each in given]).sum(0)
        if case.op == "reduce_scatter":
            return lambda: collectives.reduce_scatter(mine, **options), total[part]
        if case.op == "all_reduce":
            return lambda: collectives.all_reduced(mine, **options), total
        return lambda: collectives.all_to_all(mine, **options), torch.cat([x[part] for x in given]).double()

    def _lookup(self) -> Work:
        """Two tables a rank, of 4 and N columns and K rows each; bags of up to three indices."""
        case, widths = self.case, (4, self.case.n)
        pooled, mine = [], None
        for rank in range(self.size):
            tables = [self._normal(case.k, width) for width in widths]
            lengths = torch.randint(0, _BAG + 1, (len(widths) * case.m,), generator=self._generator)
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(self.on)
            indices = torch.randint(0, case.k, (int(offsets[-1]),), generator=self._generator).to(self.on)
            for at, table in enumerate(tables):
                bags = offsets[at * case.m : (at + 1) * case.m + 1]
                own = indices[int(bags[0]) : int(bags[-1])].cpu()
                places = (bags - bags[0]).cpu()
                pooled.append(embedding_bag(own, table.cpu().double(), places, mode="sum", include_last_offset=True))
            if rank == self.rank:
                mine = indices, offsets, tables
        assert mine is not None
        self.linear = mine[2]
        expected = torch.cat(pooled, 1)[slice(*split(case.m, self.size)[self.rank])].to(self.on)
        return lambda: weft.embedding_bag_all_to_all(*mine, self.group, schedule=case.schedule), expected


def even(case: Case, ranks: int) -> Case:
    """The case with extents that its operator takes: those of columns that are exchanged are cut evenly, no table is
    without columns, and FP8 operands have the multiples that they need."""
    if case.op in LOOKUP_OPS:
        return replace(case, n=max(1, case.n))
    if case.recipe:
        unit = SCALE_BLOCK if case.recipe == "blockwise" else FLOAT8_UNIT
        return replace(case, n=-(-max(1, case.n) // FLOAT8_UNIT) * FLOAT8_UNIT, k=-(-case.k // unit) * unit, entries=1)
    cut = {"matmul_all_to_all_columns": "n", "all_to_all_columns_matmul": "mk"}.get(case.op, "")
    return replace(case, **{extent: -(-getattr(case, extent) // ranks) * ranks for extent in cut})
