"""FP8 in calls with splits and in training, on GPUs."""

from __future__ import annotations

import pytest
import torch
from on_gpus import NEEDS_TWO, SIZES, alarm, late
from ragged_work import counts_of
from rank_pools import ranks_on_gpus
from test_ragged_fp8 import Case, check_both

import weft
from weft.core.problem import Recipe
from weft.runtime.ranks import Ranks
from weft.schedules import ragged

pytestmark = NEEDS_TWO
pool = ranks_on_gpus(SIZES, 10)


@alarm(90)
def _splits(recipe: Recipe) -> None:
    for seed, pattern in enumerate(("random", "empty_experts", "all_to_one", "nothing")):
        for schedule in ("auto", *ragged.FAMILIES):
            late(seed)
            check_both(Case(counts_of(pattern, 1 + seed % 3, seed), recipe, seed=seed), schedule, torch.bfloat16)
    weft.close()


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_splits_are_right_and_skew_does_not_matter(pool: Ranks, recipe: Recipe) -> None:
    pool.run(_splits, recipe)


@alarm(90)
def _trainings(recipe: str) -> tuple[list[float], list[float]]:
    from test_float8_training import both_trainings

    found = both_trainings(200, recipe)
    weft.close()
    return found


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_training_is_as_with_torchaos_styles(pool: Ranks, recipe: str) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    found, wanted = map(torch.tensor, pool.run(_trainings, recipe)[0])
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0)
