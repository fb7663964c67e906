"""The matmul of one step of a schedule that runs a cuBLAS matmul for each step or slice."""

from __future__ import annotations

from weft.perf.lanes import Rank
from weft.perf.terms import GemmCost, staged_us
from weft.schedules.traits import FamilyTraits


def step_matmul(
    rank: Rank, family: FamilyTraits, length: int, index: int, steps: int, *, gathers: bool
) -> tuple[GemmCost, float]:
    """Return the cost of the matmul of step `index` of `steps`, and the time of the copies that stage its data.

    length: the rows of each piece of the step, or the columns of its slice.
    """
    row_bytes = rank.problem.row_bytes
    if family.matmul == "per_slice" and gathers:
        slice_bytes, sums = rank.rows * row_bytes(length), 2 if index else 1
        staging_us = staged_us(rank.machine, rows=2, row_bytes=slice_bytes, outs=1, out_bytes=0.0)
        return rank.library_gemm(rank.rows, inner=length, sums=sums), staging_us
    if family.matmul == "per_slice":
        return rank.library_gemm(rank.rows, columns=length), 0.0
    pieces = rank.node_ranks if family.cuts_own_shard else rank.node_ranks - 1
    out_runs = pieces if steps > 1 else 1 if family.cuts_own_shard else min(2, pieces)
    a_bytes, out_bytes = pieces * length * row_bytes(rank.inner), pieces * length * rank.columns * rank.problem.itemsize
    # Gathered pieces are stored by step, so the pieces of a step are contiguous. With a single step, the rank's own shard is
    # left out, and splits the rows in two on most ranks.
    a_runs = out_runs if not gathers else 1 if family.cuts_own_shard or steps > 1 else min(2, pieces)
    staging_us = staged_us(rank.machine, rows=a_runs, row_bytes=a_bytes, outs=out_runs, out_bytes=out_bytes)
    return rank.library_gemm(pieces * length), staging_us
