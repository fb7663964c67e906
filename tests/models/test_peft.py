"""weft.parallelize on models with PEFT's adapters, on CPU ranks: as the same model in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft_work
import pytest
from conftest import RankFixture

pytest.importorskip("peft", reason="PEFT is not installed: pip install peft")
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("size", "kind", "lora", "others"),
    [
        (2, "qwen2", {}, {}),
        pytest.param(
            *(3, "llama", {"lora_bias": True}, {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 36}),
            marks=pytest.mark.slow,
        ),
        (2, "qwen3", {"use_rslora": True, "bias": "lora_only", "target_modules": ["k_proj", "o_proj", "down_proj"]}, {}),
        pytest.param(
            2, "mistral", {"target_modules": ["up_proj"], "modules_to_save": ["embed_tokens"]}, {}, marks=pytest.mark.slow
        ),
        (2, "llama", {"target_modules": ["v_proj", "lm_head"], "modules_to_save": ["post_attention_layernorm"]}, {}),
        (
            2,
            "qwen2",
            {"target_modules": ["up_proj", "down_proj"], "layers_to_transform": [1], "rank_pattern": {"down_proj": 5}},
            {"tie_word_embeddings": True},
        ),
    ],
    ids=["all linears", "three ranks", "rank-stabilised", "embedding trained", "head and norm", "one layer"],
)
def test_lora_trains_as_in_one_process(
    ranks: RankFixture, size: int, kind: str, lora: dict[str, Any], others: dict[str, Any]
) -> None:
    for report in ranks(size).run(peft_work.trains, kind, lora, others):
        assert all(f"model.layers.*.{block}" in report for block in ("self_attn: o_proj: matmul", "mlp: down_proj: matmul"))


@pytest.mark.parametrize(
    "lora",
    [
        {"use_dora": True, "target_modules": ["q_proj", "o_proj"]},
        {"use_dora": True, "target_modules": ["embed_tokens", "k_proj"]},
        {"target_modules": ["embed_tokens", "o_proj"]},
        {"target_modules": ["embed_tokens", "lm_head", "gate_proj"]},
    ],
    ids=["dora", "dora of embedding", "embedding", "embedding and head"],
)
def test_adapters_that_read_their_base_layers_weights_train_as_in_one_process(ranks: RankFixture, lora: dict[str, Any]) -> None:
    for report in ranks(2).run(peft_work.trains, "llama", lora, {}):
        assert "down_proj: matmul_reduce_scatter" in report


@pytest.mark.parametrize("lora", [{}, {"use_dora": True, "target_modules": ["v_proj"]}], ids=["lora", "dora"])
def test_adapters_are_switched_merged_and_taken_out(ranks: RankFixture, lora: dict[str, Any]) -> None:
    ranks(2).run(peft_work.switches_and_merges, lora)


@pytest.mark.slow
def test_lora_is_recomputed_and_compiled(ranks: RankFixture) -> None:
    ranks(2).run(peft_work.recomputed_and_compiled)


def test_the_report_has_the_calls_of_linears_that_are_multiplied_alone(ranks: RankFixture) -> None:
    for report in ranks(2).run(peft_work.reports):
        assert "not called yet" not in report
        for parts in ("q_proj, k_proj, v_proj", "gate_proj, up_proj"):
            place = report.partition(f"{parts}: ")[2].splitlines()
            assert "matmul_all_reduce M=18" in place[1]


def test_ranks_draw_the_same_dropout(ranks: RankFixture) -> None:
    ranks(2).run(peft_work.draws_dropout)


def test_adapters_of_other_kinds_are_refused_by_name(ranks: RankFixture) -> None:
    for messages in ranks(2).run(peft_work.refused):
        assert "model.layers.0.self_attn runs whole on every rank: k_proj: peft.tuners.ia3.layer.Linear" in messages[0]
        assert messages[1].startswith("model has model.layers.0.mlp.experts, a ParamWrapper")


def test_adapters_are_saved_by_peft(ranks: RankFixture, tmp_path: Path) -> None:
    ranks(2).run(peft_work.saves, str(tmp_path))


def test_adapters_that_come_after_parallelize_are_refused_by_name(ranks: RankFixture) -> None:
    for messages in ranks(2).run(peft_work.comes_late):
        assert [text.partition(",")[0] for text in messages] == [
            "model.layers.0.mlp.up_proj has the adapter 'default'",
            "model.layers.0.self_attn.o_proj has the adapter 'second'",
        ]
