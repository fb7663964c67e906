"""weft.parallelize on models whose modules read each other's parameters, or whose blocks were changed: as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import RankFixture
from model_work import assert_close, sharded, text, tiny, trained
from rank_pools import on_ranks
from torch import nn

import weft

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore::FutureWarning")]


class Scaled(nn.Module):
    """Multiplies by the weight of a linear itself, with a factor of a dictionary of parameters."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.scales = nn.ParameterDict({"rows": nn.Parameter(torch.linspace(0.5, 1.5, inner.out_features))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.inner.weight) * self.scales["rows"]


def _scaled(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj = Scaled(model.model.layers[0].self_attn.k_proj)
    model.model.layers[1].mlp.gate_proj = Scaled(model.model.layers[1].mlp.gate_proj)


def _head_by_hand(model: Any) -> None:
    """Logits are products with the embedding's weight, read where it is used."""

    class Model(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Any, labels: Any = None, **others: Any) -> Any:
            hidden = self.model(input_ids, **others).last_hidden_state
            logits = nn.functional.linear(hidden, self.model.embed_tokens.weight) + hidden @ self.lm_head.weight.t()
            return type("Out", (), {"loss": self.loss_function(logits, labels, self.config.vocab_size)})

    model.__class__ = Model


def _norm_by_hand(model: Any) -> None:
    """The layers multiply by their norm's weight themselves, and by a factor of their own."""
    for layer in model.model.layers:

        class Norm(nn.Module):
            def __init__(self, norm: Any) -> None:
                super().__init__()
                self.weight, self.eps = norm.weight, norm.variance_epsilon

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

        class Layer(type(layer)):  # type: ignore[misc]
            def forward(self, hidden_states: torch.Tensor, position_embeddings: Any = None, **others: Any) -> torch.Tensor:
                normed = self.input_layernorm(hidden_states) * self.input_layernorm.weight * self.factor
                found, _ = self.self_attn(hidden_states=normed, position_embeddings=position_embeddings, **others)
                hidden_states = hidden_states + found
                return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

        layer.input_layernorm = Norm(layer.input_layernorm)
        layer.factor = nn.Parameter(torch.tensor(0.7))
        layer.__class__ = Layer


def _mlp_of_its_own(model: Any) -> None:
    """One MLP reads its input itself, another has a parameter of its own."""

    class Mlp(type(model.model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * x.square().mean(-1, keepdim=True)) + nn.functional.linear(
                x, self.up_proj.weight.mean(0)[None]
            )

    model.model.layers[0].mlp.__class__ = Mlp
    attention = model.model.layers[1].self_attn
    attention.temperature = nn.Parameter(torch.tensor(1.3))
    attention.q_proj.register_forward_hook(_Times(attention))


class _Times:
    def __init__(self, attention: Any) -> None:
        self.attention = attention

    def __call__(self, module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * self.attention.temperature


CHANGES = {"scaled": _scaled, "head": _head_by_hand, "norm": _norm_by_hand, "mlp": _mlp_of_its_own}


def _as_alone(change: str, kind: str, others: dict[str, Any]) -> str:
    alone = tiny(kind, **others)
    CHANGES[change](alone)
    model = sharded(alone, few_tokens=0)
    assert_close(trained(model, (8, 11)), trained(alone, (8, 11)))
    return str(weft.overlap_report(model))


@pytest.mark.parametrize("change", CHANGES)
def test_modules_may_read_each_others_parameters(ranks: RankFixture, change: str) -> None:
    for report in ranks(2).run(_as_alone, change, "llama", {}):
        assert "down_proj: matmul_reduce_scatter" in report


def test_a_head_that_is_the_embedding_may_be_read(ranks: RankFixture) -> None:
    ranks(3).run(
        _as_alone,
        "head",
        "qwen2",
        {"tie_word_embeddings": True, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 36},
    )


def _quantised_late() -> list[str]:
    messages = []
    for change in _LATE:
        model = sharded(tiny("llama"), few_tokens=0)
        change(model)
        try:
            model(text(2, 9))
        except ValueError as error:
            messages.append(str(error))
    return messages


def _replace_weight(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.up_proj.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)


def _replace_linear(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.o_proj = nn.Linear(32, 32, bias=False)


_LATE: tuple[Callable[[Any], None], ...] = (_replace_weight, _replace_linear)


def test_what_takes_a_sharded_linears_place_is_refused_by_name(ranks: RankFixture) -> None:
    for messages in ranks(2).run(_quantised_late):
        assert [text.partition(" is a ")[0] for text in messages] == [
            "model.layers.1.mlp.up_proj.weight",
            "model.layers.1.self_attn.o_proj",
        ]


@on_ranks(2)
def test_a_quantised_block_runs_whole() -> None:
    """torch's own int8 linears in one block, the rest sharded."""
    alone = tiny("llama", hidden_size=64, intermediate_size=64).eval()
    engine = torch.backends.quantized.supported_engines
    torch.backends.quantized.engine = next(one for one in ("fbgemm", "qnnpack", "onednn") if one in engine)
    for layer in alone.model.layers:
        layer.mlp = torch.ao.quantization.quantize_dynamic(layer.mlp, {nn.Linear}, dtype=torch.qint8)
    model = sharded(alone, few_tokens=0)
    with torch.no_grad():
        torch.testing.assert_close(model(text(2, 9)).logits, alone(text(2, 9)).logits, rtol=1e-2, atol=1e-2)
