"""What ranks do in tests/contracts/test_promise.py: run schedules that are given as values, check results, and say what ran."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import operators
import pytest
import torch
import torch.distributed as dist
from concurrent_work import Exchange, Products
from operators import EXPERTS, OPERATORS, Operator, check_forward
from promise_trace import USES, Events, traced

import weft
from weft.core.problem import COLLECTIVE_OPS, Op
from weft.core.schedule import Schedule
from weft.runtime.groups import GROUPS

CALLS, ROWS = 2, 24
"""Two calls in a row: the second waits for what the first has left."""
PART = 36
KERNEL_N, KERNEL_K, KERNEL_ROWS = 16, 64, 64
"""What kernels take: rows of multiples of 16 bytes; whole slices of K on two ranks."""


@dataclass(frozen=True)
class Run:
    """What has run on one rank. schedule: what the operator built for the name that was given."""

    events: Events
    schedule: Schedule | None = None


def _operator(op: Op, kernels: bool) -> Operator:
    found = next(one for one in OPERATORS if one.op == op)
    if not kernels:
        return found
    n, k = KERNEL_N, KERNEL_K
    shapes = {
        "all_gather_matmul": lambda rows, size, rank: ((rows // size, k), (k, n)),
        "matmul_reduce_scatter": lambda rows, size, rank: ((rows, k), (k, n)),
        "matmul_all_reduce": lambda rows, size, rank: ((rows, k), (k, n), (n,), (rows, n)),
        "matmul_all_to_all": lambda rows, size, rank: ((rows, k), (k, n)),
        "all_to_all_matmul": lambda rows, size, rank: ((rows, k), (k, n)),
        "matmul_all_to_all_columns": lambda rows, size, rank: ((rows, k), (k, n * size)),
        "all_to_all_columns_matmul": lambda rows, size, rank: ((rows, k), (k * size, n)),
    }
    return replace(found, inner=k, shapes=shapes.get(op, found.shapes))


def _programs() -> list[Schedule]:
    state = GROUPS.state(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    return [program.schedule for program in state.bound()]


@contextmanager
def nodes_of(per_node: int) -> Iterator[None]:
    """Ranks are cut into nodes of so many; 0: they are on one."""
    weft.close()
    if per_node:
        os.environ["WEFT_RANKS_PER_NODE"] = str(per_node)
    try:
        yield
    finally:
        weft.close()
        os.environ.pop("WEFT_RANKS_PER_NODE", None)


def named(op: Op, specs: list[str], per_node: int, dtype: torch.dtype, kernels: bool) -> dict[str, Schedule]:
    """By name, the problem's schedule that a call of the operator runs, as it was bound."""
    found = {}
    with nodes_of(per_node):
        for spec in specs:
            found[spec] = _call(op, spec, dtype, kernels).schedule
            weft.close()
    return {spec: schedule for spec, schedule in found.items() if schedule is not None}


def given(op: Op, schedules: list[tuple[str, Schedule]], per_node: int, dtype: torch.dtype, kernels: bool) -> dict[str, Events]:
    """By what each is called, what has happened in calls with these schedules, whose results were right."""
    found = {}
    with nodes_of(per_node):
        for name, schedule in schedules:
            try:
                found[name] = (_concurrent(schedule) if op == "concurrent" else _call(op, schedule, dtype, kernels)).events
            except BaseException as error:
                error.add_note(f"with {op}: {name}")
                raise
            weft.close()
    return found


def _counts(size: int, rank: int) -> torch.Tensor:
    """Rows that a rank sends to each rank and expert: uneven, and none of them no rows, which nothing would be copied for."""
    return 1 + torch.tensor([[(rank + 2 * dst + expert) % 4 for expert in range(EXPERTS)] for dst in range(size)])


def _call(op: Op, schedule: str | Schedule, dtype: torch.dtype, kernels: bool) -> Run:
    operator = _operator(op, kernels)
    with traced(kernels=kernels) as trace, pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "counts", _counts)
        for turn in range(CALLS):
            tensors = operator.drawn(KERNEL_ROWS if kernels else ROWS, dist.get_world_size(), dtype, turn)
            check_forward(operator, tensors, (str(operator), str(schedule)), schedule=schedule)
    (program,) = _programs()
    return Run(dict(trace.events), program)


def exchanges(schedule: Schedule) -> list[Exchange]:
    """The collectives of a schedule, with memory of their own."""
    ops = [one.op for one in schedule.problem.collectives]  # type: ignore[union-attr]
    assert set(ops) <= set(COLLECTIVE_OPS)
    return [Exchange(op, torch.device("cpu"), part=PART) for op in ops]


def _concurrent(schedule: Schedule) -> Run:
    found, products = exchanges(schedule), Products(torch.device("cpu"), size=8)
    with traced() as trace:

        def computation() -> torch.Tensor:
            trace.note("computation", USES)
            return products()

        for turn in range(CALLS):
            for one in found:
                one.fill(turn)
            products.check(weft.concurrent(computation, [one.collective for one in found], method=schedule))
            for one in found:
                one.check(turn)
    return Run(dict(trace.events))
