"""Activation checkpoints around parts of a sharded decoder's layers, which are computed again alone in the backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from model_work import assert_close, sharded, text, tiny, whole
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

import weft

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:None of the inputs have requires_grad:UserWarning"),
]
FEW = 10


def _gradients(model: Any, lengths: tuple[int, ...], looked_at: int) -> dict[str, torch.Tensor]:
    """Of one backward through a forward of two sequences for each length; then one without gradients came, if asked for."""
    loss = sum(model(input_ids=text(2, n), labels=text(2, n), use_cache=False).loss for n in lengths)
    if looked_at:
        with torch.no_grad():
            model(text(2, looked_at), use_cache=False)
    loss.backward()  # type: ignore[union-attr]
    return {name.replace("_checkpoint_wrapped_module.", ""): whole(p.grad) for name, p in model.named_parameters()}


def _checkpointed(kind: str, parts: str, way: CheckpointImpl) -> Any:
    experts = weft.ExpertParallel() if kind == "mixtral" else None
    model = sharded(tiny(kind), few_tokens=FEW, experts=experts)
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=lambda module: checkpoint_wrapper(module, checkpoint_impl=way),
        check_fn=lambda module: type(module).__name__.endswith(parts),
    )
    return model


def _as_alone(kind: str, parts: str, way: str) -> None:
    """Sequences that are cut, evenly or not, beside those that are not."""
    for lengths, looked_at in (((9,), 0), ((9, 2), 0), ((2, 11), 0), ((9,), 2), ((4,), 13), ((4, 14, 6), 0)):
        model = _checkpointed(kind, parts, CheckpointImpl[way])
        assert_close(_gradients(model, lengths, looked_at), _gradients(tiny(kind), lengths, 0))


@pytest.mark.parametrize("way", ["NO_REENTRANT", pytest.param("REENTRANT", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "parts", "world_size"),
    [
        ("llama", "RMSNorm", 3),
        ("llama", "MLP", 3),
        ("llama", "Attention", 2),
        ("llama", "Attention", 3),  # which do not share its heads: it runs whole
        ("qwen3", "RMSNorm", 2),  # those of heads, too
        ("mixtral", "Block", 2),
    ],
)
def test_gradients_are_as_in_one_process(ranks: RankFixture, kind: str, parts: str, world_size: int, way: str) -> None:
    ranks(world_size).run(_as_alone, kind, parts, way)


def _not_known(parts: str) -> list[str]:
    """Twice 5 tokens are all tokens of a call, and a rank's part of another's; then the group goes on."""
    outcomes = []
    for lengths, looked_at in (((5,), 0), ((5, 5 * dist.get_world_size()), 0), ((5,), 5 * dist.get_world_size()), ((9, 2), 0)):
        model = _checkpointed("llama", parts, CheckpointImpl.REENTRANT)
        try:
            assert_close(_gradients(model, lengths, looked_at), _gradients(tiny("llama"), lengths, 0))
            outcomes.append("right")
        except ValueError as error:
            outcomes.append(str(error))
    return outcomes


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (
            "RMSNorm",
            "2 x 5 tokens were all, and others in which they were a rank's part: put the checkpoint around the decoder",
        ),
        ("MLP", "2 x 5 tokens were all, and others in which they were a rank's part: put the checkpoint around the decoder"),
        (
            "RowLinear",
            "a linear is computed again by a checkpoint of its own, after calls of several lengths: put the checkpoint",
        ),
    ],
)
def test_what_cannot_be_known_is_refused_on_all_ranks(ranks: RankFixture, parts: str, says: str) -> None:
    for first, *refused, last in ranks(2).run(_not_known, parts):
        assert first == "right"
        assert all(says in text for text in refused), refused
        assert last == "right" or parts == "RowLinear"
