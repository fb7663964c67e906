"""The recipes of examples/recipes, each with the real package, on ranks. `make recipes` installs the packages and runs them."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from torchrun import torchrun

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("name", "package"), [("torchtitan_llama.py", "torchtitan"), ("megatron_mlp.py", "megatron")])
def test_a_recipe_matches_the_whole_model(name: str, package: str, tmp_path: Path) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make recipes` installs it")
    text = torchrun(RECIPES / name, ranks=2, folder=tmp_path, timeout_s=300)
    assert "largest difference from the whole" in text
    assert "matmul_reduce_scatter" in text


@pytest.mark.slow
def test_a_layer_spec_of_megatron_gets_overlapped_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("megatron") is None:
        pytest.skip("megatron is not installed; `make recipes` installs it")
    monkeypatch.syspath_prepend(str(RECIPES))
    recipe = __import__("megatron_mlp")
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    submodules = recipe.overlapped(get_gpt_layer_local_spec()).submodules
    attention, mlp = submodules.self_attention.submodules, submodules.mlp.submodules
    assert (attention.linear_qkv, mlp.linear_fc1) == (recipe.OverlappedColumn, recipe.OverlappedColumn)
    assert (attention.linear_proj, mlp.linear_fc2) == (recipe.OverlappedRow, recipe.OverlappedRow)
    sys.modules.pop("megatron_mlp")
