"""A problem on this rank's GPU: its tensors, its call by any schedule, and its two halves alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import weft
from benchmarks.measure import Check, Work
from weft.core.problem import LookupProblem, Problem

TABLE_ROWS = 100_000
_CALLS = {"matmul_all_to_all": weft.matmul_all_to_all, "all_to_all_matmul": weft.all_to_all_matmul}
_SAMPLED = 256
_TOLERANCE = 0.03


class Site:
    """Normal data; a weight of matmul_all_reduce lies as linear layers keep it."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.rank = problem, dist.get_rank()
        self.options: dict[str, Any] = {"device": "cuda", "dtype": getattr(torch, problem.dtype)}
        if isinstance(problem, LookupProblem):
            self._draw_bags(problem)
            return
        inner, columns = problem.inner(self.rank), problem.columns(self.rank)
        self.a = torch.randn(problem.a_rows(self.rank), inner, **self.options)
        turned = problem.op == "matmul_all_reduce"
        b = torch.randn(*((columns, inner) if turned else (inner, columns)), **self.options) * problem.k**-0.5
        self.b = b.t() if turned else b

    def _draw_bags(self, problem: LookupProblem) -> None:
        dims = problem.dims[self.rank]
        self.tables = [torch.randn(TABLE_ROWS, dim, **self.options) for dim in dims]
        bags = len(dims) * problem.m
        self.indices = torch.randint(0, TABLE_ROWS, (bags * problem.k,), device="cuda")
        self.offsets = torch.arange(0, bags * problem.k + 1, problem.k, device="cuda")

    def call(self, spec: str) -> Work:
        """One call by this schedule."""
        problem = self.problem
        if isinstance(problem, LookupProblem):
            options = {"dims": problem.dims, "batch": problem.m, "pooling": problem.k, "dtype": self.options["dtype"]}
            return partial(
                weft.embedding_bag_all_to_all, self.indices, self.offsets, self.tables, schedule=spec, checked=False, **options
            )  # type: ignore[arg-type]
        if problem.op == "all_gather_matmul":
            return partial(weft.all_gather_matmul, self.a, self.b, rows=problem.m, schedule=spec)
        if problem.op == "matmul_reduce_scatter":
            return partial(weft.matmul_reduce_scatter, self.a, self.b, schedule=spec)
        if problem.op == "matmul_all_reduce":
            return partial(weft.matmul_all_reduce, self.a, self.b, schedule=spec)
        return partial(_CALLS[problem.op], self.a, self.b, schedule=spec)

    def halves(self) -> dict[str, Work]:
        """The whole matmul by cuBLAS (of a lookup there is none), and the whole collective by NCCL, in shards of the longest
        one's rows."""
        works: dict[str, Work] = {"communication/default": self._collective()}
        if not isinstance(self.problem, LookupProblem):
            rows = self.problem.product_rows(self.rank)
            a = self.a if len(self.a) == rows else torch.randn(rows, self.a.shape[1], **self.options)
            works["computation/cublas"] = partial(torch.mm, a, self.b, out=torch.empty(rows, self.b.shape[1], **self.options))
        return works

    def _collective(self) -> Work:
        problem = self.problem
        columns = max(map(problem.columns, range(problem.world_size))) if isinstance(problem, LookupProblem) else problem.n
        if problem.op in ("all_gather_matmul", "all_to_all_matmul"):
            columns = problem.k
        low, high = problem.shards[0]
        shard = torch.zeros(high - low, columns, **self.options)
        whole = torch.zeros((high - low) * problem.world_size, columns, **self.options)
        if problem.op == "all_gather_matmul":
            return partial(dist.all_gather_into_tensor, whole, shard)
        if problem.op == "matmul_reduce_scatter":
            return partial(dist.reduce_scatter_tensor, shard, whole)
        if problem.op == "matmul_all_reduce":
            return partial(dist.all_reduce, torch.zeros(problem.m, problem.n, **self.options))
        return partial(dist.all_to_all_single, whole, torch.zeros_like(whole))


def checked_against(expected: torch.Tensor) -> Check:
    """A check of a few hundred rows: differences of at most 3% of their largest element. A wrong result is left out like a
    method that fails, with its reason, so that the other problems are still measured."""
    rows = _sample(expected)
    largest = float(rows.abs().max()) or 1.0

    def check(name: str, result: object) -> None:
        if name.startswith(("computation/", "communication/")):
            return
        worst = float((_sample(result) - rows).abs().max()) / largest  # type: ignore[arg-type]
        if not worst <= _TOLERANCE:
            raise ArithmeticError(f"WRONG RESULT: {name} is off by {worst:.3g} of the largest element; {_TOLERANCE} is allowed")

    return check


def _sample(result: torch.Tensor) -> torch.Tensor:
    return result[:: max(1, len(result) // _SAMPLED)].float()
