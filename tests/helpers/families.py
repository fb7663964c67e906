"""Operators and their families, one small problem of each, for tests of all of them; and the two of tensor parallelism."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import weft
from weft.core.concurrent import ConcurrentProblem
from weft.core.problem import COLLECTIVE_OPS, OPS, CollectiveProblem, ColumnProblem, LookupProblem, Op, Problem, RaggedProblem
from weft.core.schedule import Schedule
from weft.schedules import FAMILIES, concurrent, names, parse, ragged

DIMS = ((8, 4), (12,), ())
"""Columns of the tables of each rank, in turn."""


def of_one_node(op: Op) -> list[str]:
    """The families of an operator without node_slices, which has another one's steps there."""
    return [name for name in names(op) if name != "node_slices"]


PAIRS = [(op, name) for op in OPS for name in of_one_node(op)]
TP_OPS: tuple[Op, Op] = ("all_gather_matmul", "matmul_reduce_scatter")
TP_NAMES = tuple(of_one_node("all_gather_matmul"))
"""Those of all_gather_matmul. matmul_reduce_scatter has one more, one_shot (tests/kernels/test_scatter_kernel.py)."""

WORLD = 3


def alone(op: Op) -> CollectiveProblem:
    """A collective, through room that it fills several times."""
    return CollectiveProblem(op=op, m=3003, world_size=WORLD, dtype="float32", staging_bytes=1 << 16)


PROBLEMS: dict[Op, Problem] = {
    "all_gather_matmul": Problem(op="all_gather_matmul", m=11, n=7, k=10, world_size=WORLD, return_gathered=True),
    "matmul_reduce_scatter": Problem(op="matmul_reduce_scatter", m=11, n=7, k=10, world_size=WORLD, reduce_op="avg"),
    "matmul_all_to_all": Problem(op="matmul_all_to_all", m=11, n=7, k=10, world_size=WORLD),
    "all_to_all_matmul": Problem(op="all_to_all_matmul", m=11, n=7, k=10, world_size=WORLD, return_gathered=True),
    "matmul_all_reduce": Problem(op="matmul_all_reduce", m=5, n=7, k=10, world_size=WORLD, addends=("bias", "residual")),
    "embedding_bag_all_to_all": LookupProblem.of(batch=11, dims=DIMS, pooling=3),
    "matmul_all_to_all_columns": ColumnProblem(op="matmul_all_to_all_columns", m=7, n=6, k=5, world_size=WORLD),
    "all_to_all_columns_matmul": ColumnProblem(op="all_to_all_columns_matmul", m=12, n=7, k=9, world_size=WORLD),
    "all_gather": alone("all_gather"),
    "reduce_scatter": alone("reduce_scatter"),
    "all_reduce": alone("all_reduce"),
    "all_to_all": alone("all_to_all"),
    "concurrent": ConcurrentProblem(collectives=tuple(alone(op) for op in COLLECTIVE_OPS), world_size=WORLD, compute_us=100.0),
    "ragged_all_to_all_matmul": RaggedProblem(
        op="ragged_all_to_all_matmul", m=40, n=6, k=9, world_size=WORLD, capacity=20, experts=2, return_received=True
    ),
    "ragged_matmul_all_to_all": RaggedProblem(
        op="ragged_matmul_all_to_all", m=40, n=6, k=9, world_size=WORLD, capacity=40, experts=2
    ),
}
"""One small problem of each operator, whose parts are uneven where they may be."""
ROWS = CollectiveProblem(op="all_reduce", m=5, n=7, world_size=WORLD, dtype="float32", addends=("bias", "residual"))
"""In place of the elements of an all_reduce, where one kernel sums rows."""
NODES = (2, 2)
PULLED = ConcurrentProblem(collectives=(alone("all_gather"),), world_size=WORLD, compute_us=100.0)
"""In place of all collectives, where peers pull: the others are not pulled."""


def specs(op: Op) -> list[str]:
    """Every family of an operator; those that are chunked in one piece and in two."""
    if op == "concurrent":
        return list(dict.fromkeys(concurrent.candidates(PROBLEMS[op]) + concurrent.candidates(PULLED)))
    if op.startswith("ragged"):
        return list(ragged.FAMILIES)
    return [spec for name in names(op) for spec in ([f"{name}:1", f"{name}:2"] if FAMILIES[name].chunked else [name])]


def sums_rows(op: Op, spec: str) -> bool:
    """Whether an all_reduce by this family is tried with rows, to which something is added."""
    return op == "all_reduce" and spec in ("one_shot", "two_shot")


def _across(op: Op) -> list[str]:
    """Those that serve ranks on several nodes."""
    built = [spec for spec in specs(op) if op in FAMILIES.get(spec.partition(":")[0], FAMILIES["sequential"]).builders]
    return [spec for spec in built if FAMILIES[spec.partition(":")[0]].across]


CASES: list[tuple[Op, str, tuple[int, ...]]] = [(op, spec, ()) for op in PROBLEMS for spec in specs(op)]
CASES += [(op, spec, NODES) for op in PROBLEMS for spec in _across(op)]
"""(operator, spec, ranks on each node)."""


@cache
def made(op: Op, spec: str, nodes: tuple[int, ...] = (), *, norm: bool = False) -> Schedule:
    """The schedule of a case. norm: the result is normalised, too."""
    problem = PULLED if op == "concurrent" and "pull" in spec else ROWS if sums_rows(op, spec) else PROBLEMS[op]
    if norm:
        problem = replace(problem, norm_eps=1e-5)
    if nodes:
        problem = _on_nodes(problem, nodes)
    if op == "concurrent" or op.startswith("ragged"):
        return weft.schedule.build(problem, spec)
    return weft.schedule.build(problem, *parse(spec))


def _on_nodes(problem: Problem, nodes: tuple[int, ...]) -> Problem:
    size = sum(nodes)
    if isinstance(problem, LookupProblem):
        return replace(LookupProblem.of(batch=11, dims=tuple(DIMS[rank % 3] for rank in range(size)), pooling=3), nodes=nodes)
    even = {"m": 24, "n": 8, "k": 8} if isinstance(problem, ColumnProblem) else {}
    if isinstance(problem, CollectiveProblem):
        even = {"m": 4004}
    return replace(problem, world_size=size, nodes=nodes, **even)
