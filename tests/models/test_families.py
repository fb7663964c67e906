"""weft.parallelize on tiny models of the families that need more than Llama's plan: as the same model in one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RankFixture
from model_work import SIZES, assert_close, mesh, sharded, text, trained, written
from rank_pools import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor

import weft

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]

EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 12}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"head_dim": 8, "sliding_window": 4, "pad_token_id": 0}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"sliding_window": None, "bos_token_id": None}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"head_dim": 8, **EXPERTS, "mlp_only_layers": [1]}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {"head_dim": 8, "sliding_window": 4, **EXPERTS}),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**LATENT, **EXPERTS, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    ),
}


def tiny(kind: str, **others: Any) -> Any:
    """A model of two layers with random weights, the same on every rank."""
    import transformers

    config, model, extra = FAMILIES[kind]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**{**SIZES, **extra, **others}))
    for parameter in made.parameters():
        nn.init.normal_(parameter, 0.0 if parameter.dim() > 1 else 1.0, 0.3)
    return made


def _as_alone(kind: str, others: dict[str, Any], experts: bool) -> str:
    """Logits, losses, gradients and generation, in calls of many tokens and of few. The report."""
    alone = tiny(kind, **others)
    model = sharded(alone, few_tokens=18, experts=weft.ExpertParallel() if experts else None)
    with torch.no_grad():
        assert_close(model(text(2, 11)).logits, alone(text(2, 11)).logits)
    assert_close(trained(model, (11, 9)), trained(alone, (11, 9)))
    assert torch.equal(written(model, text(2, 11), 3), written(alone, text(2, 11), 3))
    return str(weft.overlap_report(model))


@pytest.mark.parametrize(
    ("kind", "others", "experts", "communicating", "parts"),
    [
        ("gemma3_text", {}, False, "8 of 12", {"q_proj, k_proj, v_proj", "o_proj", "gate_proj, up_proj", "down_proj"}),
        ("phi3", {"num_key_value_heads": 1}, False, "8 of 17", {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
        ("qwen3_moe", {}, True, "6 of 13", {"q_proj, k_proj, v_proj", "o_proj", "gate_proj, up_proj", "down_proj"}),
        ("gpt_oss", {}, False, "4 of 11", {"q_proj, k_proj, v_proj", "o_proj"}),
        ("deepseek_v3", {}, True, "4 of 13", {"o_proj", "gate_proj, up_proj", "down_proj"}),
        ("deepseek_v3", {"q_lora_rank": None}, False, "4 of 12", {"o_proj", "gate_proj, up_proj", "down_proj"}),
    ],
)
def test_a_family_is_as_in_one_process(
    ranks: RankFixture, kind: str, others: dict[str, Any], experts: bool, communicating: str, parts: set[str]
) -> None:
    report, other = ranks(2).run(_as_alone, kind, others, experts)
    assert report == other
    assert f"overlapped {communicating} places" in report
    assert set(re.findall(r"^ +\d+ x \S+: ([a-z_, ]+proj): ", report, re.MULTILINE)) == parts
    assert ("model.layers.*.mlp.experts: all_to_all_matmul, matmul_all_to_all; 4 experts" in report) == experts
    assert ("ExpertParallel refuses them" in report) == (kind == "gpt_oss")


def _saved(kind: str, folder: str) -> None:
    """A checkpoint of all ranks' parts has the weights of the model alone, those of fused linears and sinks, too."""
    sharded(tiny(kind)).save_pretrained(folder)
    torch.distributed.barrier()
    loaded = type(tiny(kind)).from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), tiny(kind).parameters(), strict=True))


@pytest.mark.parametrize("kind", ["phi3", "gpt_oss", "deepseek_v3"])
def test_a_saved_model_is_the_model_alone(ranks: RankFixture, kind: str, tmp_path: Path) -> None:
    ranks(2).run(_saved, kind, str(tmp_path))


@on_ranks(2)
def test_what_a_family_does_not_have_is_refused_by_name() -> None:
    model = tiny("gpt_oss")
    with pytest.raises(ValueError, match=r"experts refuses model.layers.0.mlp: .* biases"):
        weft.parallelize(model, mesh(), experts=weft.ExpertParallel())
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    with pytest.raises(ValueError, match="num_attention_heads is 3"):
        sharded(tiny("gpt_oss", num_attention_heads=3, num_key_value_heads=3))
