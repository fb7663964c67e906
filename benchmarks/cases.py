"""The 14 tensor-parallel cases that all figures speak of: global sizes; N and K of each rank follow from world_size."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.problem import Op, Problem

_MODELS = (("llama3-8b", 4096, 14336), ("llama3-70b", 8192, 28672), ("llama3-405b", 16384, 53248), ("t-nlg", 4256, 17024))
"""Name, hidden size, width of the MLP."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One site: the MLP's first matmul (all_gather_matmul) or its second (matmul_reduce_scatter)."""

    name: str
    op: Op
    m: int
    n: int
    k: int

    def problem(self, world_size: int) -> Problem:
        return Problem(op=self.op, m=self.m, n=self.n, k=self.k, world_size=world_size)


def _case(model: str, hidden: int, width: int, op: Op, m: int) -> Case:
    n, k = (width, hidden) if op == "all_gather_matmul" else (hidden, width)
    return Case(name=f"{model} M={m}", op=op, m=m, n=n, k=k)


CASES: tuple[Case, ...] = tuple(
    _case(model, hidden, width, op, m)
    for op in ("all_gather_matmul", "matmul_reduce_scatter")
    for model, hidden, width, m in (
        *((*sizes, 8192) for sizes in _MODELS),
        *((*_MODELS[1], m) for m in (2048, 512, 32768)),
    )
)
