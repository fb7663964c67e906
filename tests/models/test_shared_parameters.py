"""Parameters that modules of a model share, and modules that are wrapped, under weft.parallelize: as in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import RankFixture
from model_work import Adapter, assert_close, mesh, sharded, text, tiny, trained, written
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import weft
from weft.models.blocks import whole_by_sharing
from weft.models.linear import ColumnLinear, Distributor

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def _chain() -> nn.ModuleDict:
    """Three blocks of two linears; the second shares a weight with the first, and one with the third."""
    blocks = nn.ModuleDict({name: nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for name in "abc"})
    blocks["b"][0].weight = blocks["a"][0].weight
    blocks["b"][1].weight = blocks["c"][1].weight
    return blocks


def _columns(blocks: nn.ModuleDict, names: str) -> dict[Any, Any]:
    return {(linear, "weight"): (blocks[name], Shard(0)) for name in names for linear in blocks[name]}


def test_what_is_wanted_alike_is_shared() -> None:
    blocks = _chain()
    assert whole_by_sharing(blocks, _columns(blocks, "abc")) == {}
    assert whole_by_sharing(blocks, {}) == {}


def test_what_shares_with_a_whole_place_runs_whole_and_so_on() -> None:
    blocks = _chain()
    found = whole_by_sharing(blocks, _columns(blocks, "bc"))
    assert found == {
        blocks["b"]: "it shares 0.weight with a module that has it laid otherwise",
        blocks["c"]: "it shares 1.weight with a module that has it laid otherwise",
    }


def test_a_block_that_wants_a_parameter_in_two_ways_runs_whole() -> None:
    blocks = _chain()
    blocks["c"][1].weight = blocks["c"][0].weight
    rows = {(blocks["c"][1], "weight"): (blocks["c"], Shard(1))}
    assert set(whole_by_sharing(blocks, _columns(blocks, "ac") | rows)) == {blocks["a"], blocks["c"]}


class Head(nn.Linear):
    """What a library makes of a linear."""


class Wrapped(nn.Module):
    """A module inside of another, as PEFT's modules_to_save are."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inside(*args, **kwargs)


def _tied_to(model: Any) -> None:
    model.lm_head.__class__ = Head


def _tied_in_an_adapter(model: Any) -> None:
    model.lm_head = Adapter(model.lm_head)


def _by_layers(model: Any) -> None:
    """The second one runs whole, and then the first one, too; another block is one in both."""
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    second.mlp.gate_proj = Adapter(second.mlp.gate_proj)


def _one_block(model: Any) -> None:
    first, second = model.model.layers
    second.mlp = first.mlp


def _one_linear(model: Any) -> None:
    first, second = model.model.layers
    second.mlp.up_proj = first.mlp.up_proj


def _one_linear_in_an_adapter(model: Any) -> None:
    first, second = model.model.layers
    second.mlp.up_proj = Adapter(first.mlp.up_proj)


def _one_linear_twice(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.k_proj = layer.self_attn.q_proj


def _both_ways(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight = layer.self_attn.q_proj.weight


def _wrapped(model: Any) -> None:
    model.model.layers[0].input_layernorm = Wrapped(model.model.layers[0].input_layernorm)
    model.model.embed_tokens = Wrapped(model.model.embed_tokens)


CASES = {
    _tied_to: {"tie_word_embeddings": True, "vocab_size": 36},
    _tied_in_an_adapter: {"tie_word_embeddings": True, "vocab_size": 36},
    _by_layers: {},
    _one_block: {},
    _one_linear: {},
    _one_linear_in_an_adapter: {},
    _one_linear_twice: {"num_key_value_heads": 4},
    _both_ways: {},
    _wrapped: {},
}


def _cases() -> list[dict[str, str]]:
    """Training and generation of each case are as in one process. What the report says of each place."""
    reasons = []
    for change, others in CASES.items():
        alone = tiny("llama", **others)
        change(alone)
        model = sharded(alone, few_tokens=0)
        assert_close(trained(model, (8, 11)), trained(alone, (8, 11)))
        assert torch.equal(written(model, text(2, 9), 4), written(alone, text(2, 9), 4))
        places = weft.overlap_report(model).places
        reasons.append({place.layer.name: str(place.layer).partition(": not overlapped; ")[2] for place in places})
    return reasons


@pytest.mark.ranks
def test_what_is_shared_or_wrapped_is_as_in_one_process(ranks: RankFixture) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    shares = "it shares {} with a module that has it laid otherwise"
    several = "runs whole on every rank: {}: it is one module in several places"
    for to, adapter, layers, block, linear, adapted, twice, ways, wrapped in ranks(2).run(_cases):
        for head in (to, adapter):
            assert head["model.embed_tokens"] == f"whole on every rank: {shares.format('embed_tokens.weight')}"
        assert to["lm_head"].startswith("runs whole on every rank: Head is no torch.nn.Linear")
        assert adapter["lm_head"].startswith("runs whole on every rank: Adapter is no torch.nn.Linear")
        assert layers["model.layers.*.mlp"].startswith("runs whole on every rank: ")
        assert "model.layers.*.mlp: down_proj" not in layers
        assert block["model.layers.*.mlp: down_proj"] == ""
        assert linear["model.layers.*.mlp"] == several.format("up_proj")
        assert not {"model.layers.*.mlp: down_proj"} & {*linear, *adapted}
        assert twice["model.layers.*.self_attn"] == several.format("q_proj")
        assert twice["model.layers.*.mlp: down_proj"] == ""
        assert ways["model.layers.*.self_attn"] == f"runs whole on every rank: {shares.format('q_proj.weight')}"
        norm = "runs whole on every rank: a Wrapped is no block that the model's plan names"
        assert wrapped["model.layers.*.input_layernorm"] == norm
        assert wrapped["model.embed_tokens"] == "whole on every rank: Wrapped is no torch.nn.Embedding"


def _repeated() -> None:
    """Layers that come again, the first one too, also where they are recomputed: as in one process."""
    for order in ((0, 0), (0, 1, 0), (0, 1, 1)):
        alone = tiny("llama", use_cache=False)
        alone.model.layers = nn.ModuleList([alone.model.layers[at] for at in order])
        alone.config.num_hidden_layers = len(order)
        for recomputed in (False, True):
            model = sharded(alone, few_tokens=0)
            if recomputed:
                model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            assert_close(trained(model, (11, 8, 9)), trained(copy.deepcopy(alone), (11, 8, 9)))


@pytest.mark.ranks
def test_layers_may_come_again(ranks: RankFixture) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    ranks(2).run(_repeated)


def _experts() -> list[str]:
    """Wrapped norms are no experts, with a style for experts too; wrapped experts are refused, before anything is changed."""
    alone, reasons = tiny("mixtral"), []
    for layer in alone.model.layers:
        layer.input_layernorm = Wrapped(layer.input_layernorm)
    model = sharded(alone, few_tokens=0, experts=weft.ExpertParallel())
    ids = text(2, 9)
    with torch.no_grad():
        assert_close(model(ids).logits, alone(ids).logits)
    hidden = copy.deepcopy(alone)
    hidden.model.layers[1].mlp = Wrapped(hidden.model.layers[1].mlp)
    try:
        weft.parallelize(hidden, mesh(), experts=weft.ExpertParallel())
    except ValueError as error:
        reasons.append(str(error))
    assert not any(isinstance(module, ColumnLinear) for module in hidden.modules())
    return reasons


@pytest.mark.ranks
def test_wrapped_norms_are_no_experts(ranks: RankFixture) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    for (reasons,) in ranks(2).run(_experts):
        assert reasons.startswith("experts refuses model.layers.1.mlp: Wrapped has parameters ")


def _two_ways() -> str:
    parameter, distribute = nn.Parameter(torch.ones(4, 6)), Distributor(mesh(), 0)
    assert distribute(parameter, Shard(0)) is distribute(parameter, Shard(0))
    try:
        distribute(parameter, Replicate())
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_a_parameter_lies_in_one_way(ranks: RankFixture) -> None:
    for reasons in ranks(2).run(_two_ways):
        assert reasons.startswith(
            "a parameter (4, 6) is shared by modules of which one wants it as Replicate(), another as Shard("
        )
