"""Computes static sizes of a problem, which are compared with losses. FiCCO (arXiv 2512.10236) chooses by the first three.

    op_to_byte       2 rows cols inner / traffic, in operations per byte
    traffic_mib      (rows inner + inner cols) elements of operands, and rows cols of the result, in MiB
    m_over_k         M / K of the whole problem
    balance          the matmul's time at the machine's peak / the time of what a rank sends at its links' rate
    shard_rows       M / world_size: the rows that chunks cut

rows x cols x inner is the matmul of the rank with the most work.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from weft.core.machine import Machine
from weft.core.problem import REDUCTIONS, Problem
from weft.planner.signature import Signature

Feature = Literal["op_to_byte", "traffic_mib", "m_over_k", "balance", "shard_rows"]


class Sizes(NamedTuple):
    """The static sizes of a problem on the rank with the most work."""

    problem: Problem
    machine: Machine
    rows: int
    cols: int
    inner: int

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.cols * self.inner

    @property
    def traffic_bytes(self) -> int:
        operands, result = self.rows * self.inner + self.inner * self.cols, self.rows * self.cols
        return operands * self.problem.operand_itemsize + result * self.problem.itemsize

    @property
    def sent_us(self) -> float:
        """The time to send a rank's data at its links' rate. An all-reduce scatters and gathers; a mesh uses all links."""
        trips = 2 if self.problem.op == "matmul_all_reduce" else 1
        links = self.problem.world_size - 1 if self.machine.links.topology == "mesh" else 1
        return trips * (self.problem.world_size - 1) * self.problem.shard_bytes / (self.machine.links.gbps * 1e3 * links)


def sizes(problem: Problem, machine: Machine) -> Sizes:
    """Return the sizes from which the features are computed."""
    most = max(problem.b_sizes, default=0)
    columns, inner = problem.columns(0), problem.inner(0)
    if problem.op in REDUCTIONS:
        inner = max(inner, most)
    else:
        columns = max(columns, most)
    return Sizes(problem, machine, problem.product_rows(0), columns, inner)


FEATURES: dict[Feature, Callable[[Sizes], float]] = {
    "op_to_byte": lambda s: s.flops / s.traffic_bytes,
    "traffic_mib": lambda s: s.traffic_bytes / (1 << 20),
    "m_over_k": lambda s: s.problem.m / s.problem.k,
    "balance": lambda s: s.flops / (s.machine.tflops(s.problem.rate_name) * 1e6) / s.sent_us,
    "shard_rows": lambda s: s.problem.m / s.problem.world_size,
}
"""The features that the module describes, for problems on two or more ranks with a result that is not empty."""


def correlations(
    signatures: Sequence[Signature], machine: Machine, of: Callable[[Signature], float] = lambda found: found.loss
) -> dict[Feature, float]:
    """Return Spearman's rank correlation of a loss with each static size; 0 for fewer than three different values.

    of: returns the loss of a signature. The default is the whole loss."""
    losses = [of(found) for found in signatures]
    known = [sizes(found.problem, machine) for found in signatures]
    return {name: spearman([FEATURES[name](one) for one in known], losses) for name in FEATURES}


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """
    >>> round(spearman([1, 2, 3, 10], [5, 6, 7, 8]), 6), spearman([1, 2, 3], [2, 2, 2])
    (1.0, 0.0)
    """
    if min(len(set(left)), len(set(right))) < 3:
        return 0.0
    return statistics.correlation(_ranked(left), _ranked(right))


def _ranked(values: Sequence[float]) -> list[float]:
    """Return ascending ranks. Equal values share the mean of their ranks."""
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]
