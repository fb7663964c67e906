"""In float32 candidates are what the executor runs as it is priced."""

from __future__ import annotations

import dataclasses

import pytest

from weft.core.problem import Op, Problem
from weft.schedules import build, parse, specs

FUSED = {"flag_gated", "flag_gated_2d", "direct_store", "track_and_trigger", "sequential_stores"}


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "all_to_all_matmul"])
def test_fused_kernels_are_candidates_of_sixteen_bits_alone(op: Op) -> None:
    half = Problem(op=op, m=4096, n=4096, k=4096, world_size=4)
    single = dataclasses.replace(half, dtype="float32")
    names = [{parse(spec)[0] for spec in specs(problem)} for problem in (half, single)]
    assert names[0] & FUSED
    assert not names[1] & FUSED
    assert {"sequential", "shard_p2p"} <= names[1]


def test_a_family_that_is_named_is_built() -> None:
    assert build(Problem(op="all_gather_matmul", m=64, n=64, k=64, world_size=2, dtype="float32"), "flag_gated").ranks
