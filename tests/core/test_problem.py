"""A Problem refuses what its operator does not have, and names it."""

from __future__ import annotations

from typing import Any

import pytest

from weft.core.problem import (
    AVERAGES,
    COLLECTIVE_OPS,
    COLUMN_OPS,
    GATHERS,
    OPS,
    CollectiveProblem,
    ColumnProblem,
    LookupProblem,
    Op,
    Problem,
)


def _make(op: Op, **more: Any) -> Problem:
    if op in COLLECTIVE_OPS:
        return CollectiveProblem(op=op, m=8, world_size=2, **more)
    if op in COLUMN_OPS:
        return ColumnProblem(op=op, m=8, n=4, k=4, world_size=2, **more)
    if op == "embedding_bag_all_to_all":
        return LookupProblem(m=8, n=4, k=1, world_size=2, b_sizes=(2, 2), dims=((2,), (2,)), **more)
    return Problem(op=op, m=8, n=4, k=4, world_size=2, **more)


@pytest.mark.parametrize("op", [*OPS, *COLUMN_OPS, *COLLECTIVE_OPS, "embedding_bag_all_to_all"])
def test_what_an_operator_does_not_have_is_refused(op: Op) -> None:
    for name, value, those, message in (
        ("reduce_op", "avg", AVERAGES, "reduce_op is 'avg'"),
        ("return_gathered", True, GATHERS, "return_gathered is True"),
    ):
        assert getattr(_make(op), name) != value
        if op in those:
            assert getattr(_make(op, **{name: value}), name) == value
        else:
            with pytest.raises(ValueError, match=message):
                _make(op, **{name: value})
