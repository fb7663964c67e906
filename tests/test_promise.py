"""benchmarks/promise.py: which problems come first, what counts as put back, what its table says."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from weft.core.machine import load
from weft.core.problem import Problem

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
H200 = load("h200x8")


@pytest.fixture(scope="module")
def promise() -> Iterator[ModuleType]:
    sys.path.insert(0, BENCHMARKS)
    import promise

    yield promise
    sys.path.remove(BENCHMARKS)


def line(case: str, *, world_size: int = 2, simulated: bool = False, **us: float) -> Any:
    from scores import Line

    problem = Problem(op="all_gather_matmul", m=8192, n=8192, k=8192, world_size=world_size)
    return Line(case=case, problem=problem, us=us, machine="2 x H200", simulated=simulated)


def test_problems_whose_pick_lost_come_first(promise: ModuleType) -> None:
    lines = [
        line("wins", sequential=100.0, shard_p2p=80.0),
        line("loses", sequential=100.0, shard_p2p=120.0),
        line("of others", world_size=4, sequential=100.0, shard_p2p=150.0),
        line("simulated", simulated=True, sequential=100.0, shard_p2p=150.0),
        line("failed"),
    ]
    assert [one.case for one in promise.hardest(lines, 2, H200)] == ["loses", "wins"]


@pytest.mark.parametrize(("says", "back"), [(0, False), (1, True)])
def test_put_back_is_what_was_said(promise: ModuleType, says: int, back: bool) -> None:
    calls = []

    def call() -> None:
        calls.append(1)
        if len(calls) <= says:
            warnings.warn(f"shard_p2p was chosen by 'planned', but is no faster here; {promise.PUT_BACK}", stacklevel=1)

    assert promise.kept(call) is back
    assert len(calls) > promise.PREDICTED_AFTER


def test_what_is_said_twice_is_an_error(promise: ModuleType) -> None:
    def call() -> None:
        warnings.warn(promise.PUT_BACK, stacklevel=1)

    with pytest.raises(RuntimeError, match="said 5 times"):
        promise.kept(call)


def row(mode: str, back: bool, **us: float) -> Mapping[str, Any]:
    runs = {"heuristic": "sequential" if back else "shard_p2p", "planned": "direct_store:1"}
    put_back = {"heuristic": back, "planned": False}
    return {"mode": mode, "op": "all_gather_matmul", "case": "one", "us": us, "put_back": put_back, "runs": runs}


def test_table(promise: ModuleType) -> None:
    """What runs sequential itself is not slower than that: its time tells luck."""
    rows = [
        row("graph", True, sequential=100.0, heuristic=104.0, planned=80.0),
        row("graph", False, sequential=100.0, heuristic=90.0, planned=107.0),
        row("eager", False, sequential=100.0, heuristic=90.0, planned=95.0),
    ]
    assert promise.table(rows).splitlines() == [
        "graph heuristic 1 of 2 run others, slower by more than 1%: 0, at most 0.90x sequential's time; put back in 1, "
        "the same program twice: 1.04 to 1.04x",
        "graph planned   2 of 2 run others, slower by more than 1%: 1, at most 1.07x sequential's time; put back in 0, "
        "the same program twice: 1.00 to 1.00x",
        "eager heuristic 1 of 1 run others, slower by more than 1%: 0, at most 0.90x sequential's time; put back in 0, "
        "the same program twice: 1.00 to 1.00x",
        "eager planned   1 of 1 run others, slower by more than 1%: 0, at most 0.95x sequential's time; put back in 0, "
        "the same program twice: 1.00 to 1.00x",
    ]
    assert promise.words(rows[0]) == "graph all_gather_matmul one: sequential 100 us; heuristic 1.04 (put back), planned 0.80"
