"""weft.parallelize on tiny models whose linears transformers keeps in FP8, on CPU ranks, against the same model dequantised."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from float8 import E4M3, dequantised, quantise
from model_work import mesh, text, tiny, whole
from torch import nn
from torch.distributed.tensor import DTensor

import weft
from weft.core.problem import Recipe

pytest.importorskip("transformers", minversion="5", reason="transformers 5 is not installed: pip install transformers")
pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]

RECIPES: list[Recipe] = ["blockwise", "rowwise"]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "vocab_size": 37}


class Dequantised(nn.Module):
    """What a linear of FP8 stands for, in float32. parts: of K, in which its input is quantised, each by itself."""

    def __init__(self, linear: Any, recipe: Recipe, parts: int) -> None:
        super().__init__()
        scales = linear.weight_scale_inv if recipe == "blockwise" else linear.weight_scale.t()
        self.weight = dequantised(linear.weight.t(), scales.t(), recipe, "b").float()
        self.recipe, self.parts, self.bias = recipe, parts, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [quantise(part, self.recipe, "a") for part in x.flatten(0, -2).chunk(self.parts, -1)]
        rows = torch.cat([dequantised(*part, self.recipe, "a") for part in parts], -1).float()
        out = (rows @ self.weight).view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


def _blocks(model: Any) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """The linears of all layers: their parents, and their names in them."""
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            yield from ((parent, name, child) for name, child in list(parent.named_children()) if name.endswith("_proj"))


def _of_fp8(model: Any, recipe: Recipe) -> Any:
    """The model, with linears as transformers has them of FP8 checkpoints."""
    from transformers.integrations.compressed_tensors import CompressedTensorsFP8Linear
    from transformers.integrations.finegrained_fp8 import FP8Linear

    for parent, name, linear in _blocks(model):
        elements, scales = quantise(linear.weight.detach().t(), recipe, "b")
        sizes, has_bias = (linear.in_features, linear.out_features), linear.bias is not None
        if recipe == "blockwise":
            new: Any = FP8Linear(*sizes, block_size=(128, 128), has_bias=has_bias)
            new.weight_scale_inv = nn.Parameter(scales.t().contiguous())
        else:
            new = CompressedTensorsFP8Linear(*sizes, has_bias=has_bias)
            new.weight_scale = nn.Parameter(scales.contiguous())
        new.weight, new.bias = nn.Parameter(elements.t().contiguous()), linear.bias
        setattr(parent, name, new)
    return model


def _dequantised(model: Any, recipe: Recipe) -> Any:
    model = copy.deepcopy(model)
    for parent, name, linear in _blocks(model):
        # By row, ranks have scales of their own for their parts of a row.
        parts = dist.get_world_size() if name in ("o_proj", "down_proj") else 1
        setattr(parent, name, Dequantised(linear, recipe, parts))
    return model


def _logits(model: Any) -> list[torch.Tensor]:
    """Of prompts of many tokens and of few, and of three tokens that follow, one at a time."""
    found = []
    for batch, length in ((2, 11), (1, 3)):
        out = model(text(batch, length), use_cache=True)
        found.append(out.logits)
        for step in range(3):
            out = model(text(batch, 1, seed=step), past_key_values=out.past_key_values, use_cache=True)
            found.append(out.logits)
    return found


@torch.no_grad()
def _as_dequantised(kind: str, recipe: Recipe, src_data_rank: int | None) -> str:
    whole_model = _of_fp8(tiny(kind, **SIZES), recipe)
    model = weft.parallelize(copy.deepcopy(whole_model), mesh(), few_tokens=8, src_data_rank=src_data_rank)
    for got, expected in zip(_logits(model), _logits(_dequantised(whole_model, recipe)), strict=True):
        # A last bit of an input's largest magnitude changes its scale, and FP8 keeps 4 bits of what is scaled.
        assert (got - expected).abs().max() <= 0.02 * expected.abs().max()
    size = dist.get_world_size()
    for (_, _, linear), (_, _, before) in zip(_blocks(model), _blocks(whole_model), strict=True):
        sharded_linear: Any = linear
        assert isinstance(sharded_linear.weight, DTensor)
        assert sharded_linear.weight.dtype == E4M3
        assert sharded_linear.weight.to_local().numel() * size == before.weight.numel()  # type: ignore[union-attr, operator]
        name = "weight_scale_inv" if recipe == "blockwise" else "weight_scale"
        assert torch.equal(whole(getattr(sharded_linear, name)), getattr(before, name))
    return str(weft.overlap_report(model))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("kind", "src_data_rank"), [("llama", 0), ("qwen2", None)])
def test_logits_are_those_of_the_dequantised_model(
    ranks: RankFixture, kind: str, recipe: Recipe, src_data_rank: int | None
) -> None:
    for report in ranks(2).run(_as_dequantised, kind, recipe, src_data_rank):
        assert "all_gather_matmul M=22" in report
        assert "matmul_reduce_scatter M=22" in report
        assert "matmul_all_reduce M=1 " in report


@torch.no_grad()
def _compiled() -> None:
    model = weft.parallelize(_of_fp8(tiny("llama", **SIZES), "blockwise"), mesh(), few_tokens=8)
    step = torch.compile(model.model.layers[0].mlp, backend="aot_eager", fullgraph=True)
    x = torch.randn(1, 3, 256)
    assert torch.equal(step(x), model.model.layers[0].mlp(x))


def test_a_block_compiles(ranks: RankFixture) -> None:
    ranks(2).run(_compiled)


def _refused() -> list[str]:
    found = []
    narrow = {**SIZES, "head_dim": 64}
    cases: list[tuple[Recipe, Any]] = [("blockwise", narrow), ("rowwise", {**SIZES, "intermediate_size": 520})]
    for recipe, others in cases:
        model = _of_fp8(tiny("llama", **others), recipe)
        with pytest.raises(ValueError, match=r"^model\.layers\.0") as error:
            weft.parallelize(model, mesh())
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        found.append(str(error.value))
    model = weft.parallelize(_of_fp8(tiny("llama", **SIZES), "blockwise"), mesh())
    with pytest.raises(ValueError, match="an input that requires gradients") as gradients:
        model(text(2, 5))
    return [*found, str(gradients.value)]


def test_sizes_that_ranks_cannot_share_are_named(ranks: RankFixture) -> None:
    columns, inner, _ = ranks(2).run(_refused)[0]
    assert re.match(r"model\.layers\.0\.self_attn\.k_proj is a FP8Linear of 256 inputs and 128 outputs, whose outputs", columns)
    assert "cut into [64, 64] on 2 ranks" in columns
    assert "must be a multiple of 128" in columns
    assert "mlp.gate_proj is a CompressedTensorsFP8Linear of 256 inputs and 520 outputs" in inner


def _whole_where_weft_does_not_multiply() -> list[str]:
    found = []
    for name, value in (("activation_scheme", "static"), ("block_size", (64, 64))):
        model = _of_fp8(tiny("llama", **SIZES), "blockwise")
        setattr(model.model.layers[0].mlp.up_proj, name, value)
        found.append(str(weft.overlap_report(weft.parallelize(model, mesh()))))
    model = _of_fp8(tiny("llama", **SIZES), "blockwise")
    model.model.layers[0].mlp.up_proj = nn.Linear(256, 512, bias=False)
    return [*found, str(weft.overlap_report(weft.parallelize(model, mesh())))]


def test_other_linears_of_fp8_run_whole(ranks: RankFixture) -> None:
    scheme, size, some = ranks(2).run(_whole_where_weft_does_not_multiply)[0]
    assert "up_proj: its activation_scheme is 'static'" in scheme
    assert "up_proj: its block_size is (64, 64)" in size
    assert "of gate_proj, up_proj some are of FP8, and some are not" in some
