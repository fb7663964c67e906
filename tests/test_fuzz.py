"""Every operator by every family, over extents, layouts, dtypes and numbers of ranks that nobody chose: against float64.

WEFT_FUZZ_EXAMPLES: how many; 10,000 take some minutes. Ranks are started once for each world size.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import calls
from calls import DTYPES, EVERY, LAYOUTS, Case, even

from weft.schedules import FAMILIES, spec

EXAMPLES = int(os.environ.get("WEFT_FUZZ_EXAMPLES", "500"))


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, Case]:
    """(world size, case)."""
    world_size = draw(st.integers(1, 4))
    op, name = draw(st.sampled_from(EVERY))
    case = Case(
        op=op,
        schedule=spec(name, draw(st.sampled_from((1, 2, 3, 8)))) if FAMILIES[name].chunked and draw(st.booleans()) else name,
        m=draw(st.integers(0, 40)),
        n=draw(st.integers(0, 24)),
        k=draw(st.integers(1, 40)),
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        a=draw(st.sampled_from(LAYOUTS)),
        b=draw(st.sampled_from(LAYOUTS)),
        entries=draw(st.integers(1, 3)),
        dim=draw(st.integers(0, 1)),
    )
    return world_size, even(case, world_size)


def _called(case: Case, seed: int) -> None:
    call, expected = calls.work(case, seed, torch.device("cpu"))
    calls.check(case, call(), expected, dist.get_world_size())


@pytest.mark.ranks
@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES <= 500, suppress_health_check=list(HealthCheck), database=None
)
@given(given=cases(), seed=st.integers(0, 1000))
def test_any_call_is_right(ranks: RankFixture, given: tuple[int, Case], seed: int) -> None:
    world_size, case = given
    ranks(world_size).run(_called, case, seed)
