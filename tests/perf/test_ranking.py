"""The ranking says what the event engine says: of drawn problems, within a few hundredths. And it has a row for every family."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator

import pytest

from weft.core.machine import load
from weft.core.problem import COLLECTIVE_OPS, LOOKUP_OPS, OPS, CollectiveProblem, ColumnProblem, LookupProblem, Problem
from weft.perf.engine import run
from weft.perf.ranking import ROWS, estimates
from weft.schedules import FAMILIES, build, parse, specs

DRAWN = 60
"""Of each machine and number of ranks."""
SIDES = (1024, 1536, 2048, 3584, 4096, 5120, 8192, 14336)


def drawn(random_: random.Random, world_size: int) -> Iterator[Problem]:
    """Problems without end, the operators in turn."""
    while True:
        for op in OPS:
            rows = world_size * round(2 ** random_.uniform(5, 12))
            if op == "matmul_all_reduce":
                rows = round(2 ** random_.uniform(3, 9))
            n, k = random_.choice(SIDES), random_.choice(SIDES)
            yield Problem(op=op, m=rows, n=n, k=k, world_size=world_size)
        for _ in LOOKUP_OPS:
            dims = ((random_.choice((64, 128)),) * random_.randint(2, 8),) * world_size
            yield LookupProblem.of(batch=round(2 ** random_.uniform(9, 15)), dims=dims, pooling=random_.choice((1, 8, 20)))
        for op in ("matmul_all_to_all_columns", "all_to_all_columns_matmul"):
            m = world_size * round(2 ** random_.uniform(6, 11))
            yield ColumnProblem(op=op, m=m, n=random_.choice(SIDES), k=random_.choice(SIDES), world_size=world_size)
        op = random_.choice(COLLECTIVE_OPS)
        yield CollectiveProblem(op=op, m=world_size * round(2 ** random_.uniform(12, 22)), world_size=world_size)


@pytest.fixture(scope="module")
def misses() -> dict[tuple[str, int], list[float]]:
    return {}


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("machine", ["h200x8", "mi300x8", "a100x8"])
def test_ranking_and_engine_agree_on_drawn_problems(machine: str, world_size: int) -> None:
    random_, where, off = random.Random(f"{machine} {world_size}"), load(machine), []
    for problem, _ in zip(drawn(random_, world_size), range(DRAWN), strict=False):
        spec = random_.choice(specs(problem))
        us = run(build(problem, *parse(spec), fan_out=where.fans_out), where).total_us
        off.append((abs(estimates(problem, where, [spec])[spec] / us - 1), f"{spec} {problem}"))
    off.sort()
    assert statistics.median(miss for miss, _ in off) <= 0.03, off[len(off) // 2 :]
    assert off[int(0.95 * len(off))][0] <= 0.15, off[int(0.95 * len(off)) :]


def test_every_family_has_a_row() -> None:
    assert set(ROWS) == set(FAMILIES)
