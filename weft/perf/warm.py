"""Warm: a machine as calls that repeat on the same memory find it, such as a benchmark's.

Where all that a call touches on a rank fits into the last-level cache, the call after finds it there, and the GPU's memory is
as fast as the cache. In a model other weights come between: the simulator's own answer is that of a cold cache.
"""

from __future__ import annotations

from dataclasses import replace

from weft.core.machine import Machine
from weft.core.problem import CollectiveProblem, LookupProblem, Problem


def warm(machine: Machine, problem: Problem) -> Machine:
    """`machine`, with its cache's rate for its memory's where one rank's operands and result fit, and the rate is known."""
    gpu = machine.gpu
    if gpu.l2_gbps is None or isinstance(problem, (CollectiveProblem, LookupProblem)):
        return machine
    touched = max(_touched_bytes(problem, rank) for rank in range(problem.world_size))
    return replace(machine, gpu=replace(gpu, hbm_gbps=gpu.l2_gbps)) if touched <= gpu.l2_bytes else machine


def _touched_bytes(problem: Problem, rank: int) -> int:
    rows, cols, inner = problem.product_rows(rank), problem.columns(rank), problem.inner(rank)
    return problem.itemsize * (rows * inner + inner * cols + rows * cols)
