"""Operators and their families, for tests of all of them, and of the two of tensor and sequence parallelism."""

from __future__ import annotations

from weft.problem import OPS, Op
from weft.schedules import names

PAIRS = [(op, name) for op in OPS for name in names(op)]
TP_OPS: tuple[Op, Op] = ("all_gather_matmul", "matmul_reduce_scatter")
TP_NAMES = tuple(name for name in names(TP_OPS[0]) if name in names(TP_OPS[1]))
