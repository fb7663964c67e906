"""Operators and their families, for tests of all of them, and of the two of tensor and sequence parallelism."""

from __future__ import annotations

from weft.core.problem import OPS, Op
from weft.schedules import names


def of_one_node(op: Op) -> list[str]:
    """The families of an operator without node_slices, which has another one's steps there."""
    return [name for name in names(op) if name != "node_slices"]


PAIRS = [(op, name) for op in OPS for name in of_one_node(op)]
TP_OPS: tuple[Op, Op] = ("all_gather_matmul", "matmul_reduce_scatter")
TP_NAMES = tuple(of_one_node("all_gather_matmul"))
"""Those of all_gather_matmul. matmul_reduce_scatter has one more, one_shot (tests/kernels/test_scatter_kernel.py)."""
