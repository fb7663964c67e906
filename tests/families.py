"""Operators and their families, for tests of all of them, and of the two of tensor and sequence parallelism."""

from __future__ import annotations

from weft.problem import OPS, Op
from weft.schedules import names

PAIRS = [(op, name) for op in OPS for name in names(op)]
TP_OPS: tuple[Op, Op] = ("all_gather_matmul", "matmul_reduce_scatter")
TP_NAMES = names("all_gather_matmul")
"""Those of either: matmul_reduce_scatter has none that all_gather_matmul lacks."""
