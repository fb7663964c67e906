"""Users' own schedules, by torch and by interpreted kernels: right, or refused, whatever the kernels can do."""

from __future__ import annotations

import pytest
from named_buffers import LOOKUPS, SCALED, check_lookups, check_scales, check_scales_of_scratch
from own_schedules import SCHEDULES, check_local_strided, several_b_counted, tables_made
from rank_pools import interpreted_ranks, shared_ranks

from weft.runtime.ranks import Ranks

pytestmark = pytest.mark.ranks

interpreted = interpreted_ranks(2)
plain = shared_ranks(2, {"WEFT_TIMEOUT_S": "30"})


@pytest.mark.parametrize("name", SCHEDULES)
def test_steps_that_no_kernel_runs_are_right(plain: Ranks, interpreted: Ranks, name: str) -> None:
    for pool in (plain, interpreted):
        pool.run(check_local_strided, name, timeout_s=60)


def test_one_set_of_tables_serves_all_results(interpreted: Ranks) -> None:
    """A graph may hold the tables that it was captured with."""
    assert interpreted.run(tables_made) == [(1, 1)] * 2


def test_tiles_of_several_b_count_as_far_as_waiters_expect(interpreted: Ranks) -> None:
    for found in interpreted.run(several_b_counted):
        assert found
        for holds, expected in found:
            assert holds == expected


@pytest.mark.parametrize("case", SCALED, ids=lambda case: f"{case[1]}-{case[3]}")
def test_scratch_may_be_called_like_scales(plain: Ranks, interpreted: Ranks, case: tuple[str, str, str, str]) -> None:
    for pool in (plain, interpreted):
        pool.run(check_scales, *case, timeout_s=60)


def test_the_scales_of_scratch_are_its_own(plain: Ranks) -> None:
    plain.run(check_scales_of_scratch, timeout_s=60)


@pytest.mark.parametrize("name", LOOKUPS)
def test_scratch_may_be_called_like_the_tensors_of_a_lookup(plain: Ranks, interpreted: Ranks, name: str) -> None:
    for pool in (plain, interpreted):
        pool.run(check_lookups, name, timeout_s=60)
