"""weft.parallelize with logits that stay sharded by the vocabulary, on CPU ranks: losses and gradients as in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import RankFixture
from model_work import assert_close, mesh, sharded, text, tiny, trained, whole, written
from test_parallelize import places
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

import weft

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]


def _as_alone(others: dict[str, Any]) -> str:
    alone = tiny("llama", **others)
    model = sharded(alone, few_tokens=4, sharded_logits=True)
    with loss_parallel():
        logits = model(input_ids=text(2, 9)).logits
        assert isinstance(logits, DTensor)
        assert logits.placements == (Shard(2),)
        assert logits.to_local().shape[2] < 37, "no rank has all logits"
        assert_close(whole(logits), alone(input_ids=text(2, 9)).logits)
        got = [whole(one) if isinstance(one, torch.Tensor) else one for one in trained(model, (8, 11, 2))]
    assert_close(got, trained(alone, (8, 11, 2)))
    with torch.no_grad():
        logits = model(input_ids=text(2, 9)).logits
        assert type(logits) is torch.Tensor
        assert_close(logits, alone(input_ids=text(2, 9)).logits)
    assert torch.equal(written(model, text(3, 2), 5), written(alone, text(3, 2), 5))
    return str(weft.overlap_report(copy.deepcopy(model)))


@pytest.mark.parametrize("others", [{}, {"tie_word_embeddings": True}], ids=["head", "tied"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_training_and_generation_are_as_in_one_process(ranks: RankFixture, world_size: int, others: dict[str, Any]) -> None:
    heads = {} if world_size == 2 else {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    report = ranks(world_size).run(_as_alone, {**others, **heads})[0]
    said = "not overlapped; its logits are gathered where no gradients are recorded, because sharded_logits=True"
    assert places(report)["lm_head"] == said


def _refused() -> list[str]:
    messages = []
    headless, bound = tiny("llama").model, tiny("llama")
    bound.lm_head.forward = bound.lm_head.forward
    for model in (headless, bound):
        before = [type(module) for module in model.modules()]
        try:
            weft.parallelize(model, mesh(), sharded_logits=True)
        except ValueError as error:
            messages.append(str(error))
        assert [type(module) for module in model.modules()] == before
    return messages


def test_a_model_without_a_sharded_head_is_refused(ranks: RankFixture) -> None:
    for headless, bound in ranks(2).run(_refused):
        assert headless == "sharded_logits is True, but model has no head; leave sharded_logits out"
        assert bound.startswith("sharded_logits is True, but its head runs whole on every rank: its forward was put")
