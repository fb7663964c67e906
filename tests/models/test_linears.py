"""What weft takes for a linear, and how it changes a module's input, in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from weft.models.linear import InputHook, why_not_linear


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_that_are_made_at_each_call_are_left_alone() -> None:
    assert why_not_linear(nn.Linear(2, 2)) == ""
    normed = nn.utils.weight_norm(nn.Linear(2, 2))
    pruned = prune.random_unstructured(nn.Linear(2, 2), "weight", 0.5)  # type: ignore[no-untyped-call]
    assert why_not_linear(normed) == "its weight is made of bias, weight_g, weight_v at each call (weight_norm, pruning)"
    assert why_not_linear(pruned).startswith("its weight is made of bias, weight_orig at each call")


def test_weights_that_are_no_floats_are_left_alone() -> None:
    quantised = nn.Linear(2, 2, bias=False)
    quantised.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    assert why_not_linear(quantised).startswith("its weight is a Parameter of torch.int8; weft multiplies float32")


def test_the_input_is_found_by_name_or_comes_first() -> None:
    doubled = InputHook("x", lambda x: 2 * x)
    one, module = torch.ones(1), nn.Identity()
    assert doubled(module, (one, 3), {}) == ((2 * one, 3), {})
    assert doubled(module, (3,), {"x": one}) == ((3,), {"x": 2 * one})
    with pytest.raises(ValueError, match="Identity is called with y, z; weft changes its first positional argument, or 'x'"):
        doubled(module, (), {"y": one, "z": one})
