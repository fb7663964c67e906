"""Part `layer` of benchmarks.host: a training step of decoder layers of transformers, sharded by weft.parallelize.

The model is LlamaForCausalLM with the layers of Llama 3 8B and a small vocabulary. `computation/unsharded` is the model that
transformers made, whole on each rank, without communication. Both compute the same loss of the same tokens.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import weft
from benchmarks.host.steps import Step, measure_steps, own_part
from benchmarks.host.training import close
from benchmarks.measure import together
from benchmarks.models import world
from benchmarks.rows import Row

Tensor = torch.Tensor
WHOLE, EAGER = "computation/unsharded", "weft/eager"


@dataclass(frozen=True, kw_only=True)
class Case:
    """width: of hidden states. inner: columns of gate and up. tokens: of the batch's only sequence."""

    layers: int
    width: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 1024
    tokens: int = 2048

    def __str__(self) -> str:
        return f"{self.layers} layer{'s' * (self.layers > 1)} of Llama, d={self.width} h={self.inner}, {self.tokens} tokens"


CASES = {
    "cuda": (Case(layers=1), Case(layers=2)),
    "cpu": (Case(layers=1, width=64, inner=96, heads=4, kv_heads=2, vocabulary=64, tokens=16),),
}
"""By device. The difference between one and two layers is a layer without the embedding, the head and the loss. Those of CPUs
only show that the benchmark works."""


class Models:
    """One case's tokens, and its model, whole and sharded."""

    def __init__(self, case: Case, device: str) -> None:
        from transformers import LlamaConfig

        self.case, self.device = case, device
        settings: dict[str, Any] = {"attn_implementation": "sdpa", "use_cache": False}
        self.config = LlamaConfig(
            hidden_size=case.width,
            intermediate_size=case.inner,
            num_attention_heads=case.heads,
            num_key_value_heads=case.kv_heads,
            num_hidden_layers=case.layers,
            vocab_size=case.vocabulary,
            max_position_embeddings=max(case.tokens, 2048),
            **settings,
        )
        self.whole = self._make_whole()
        torch.manual_seed(7)
        self.tokens = torch.randint(0, case.vocabulary, (1, case.tokens), device=device)

    def _make_whole(self) -> Any:
        from transformers import LlamaForCausalLM

        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(self.device):
                return LlamaForCausalLM(self.config).train()
        finally:
            torch.set_default_dtype(before)

    def unsharded(self) -> Step:
        return self._step(self.whole)

    def sharded(self) -> Step:
        model = copy.deepcopy(self.whole)
        return self._step(weft.parallelize(model, world(self.device), src_data_rank=None, few_tokens=0))

    def _step(self, model: Any) -> Step:
        def run() -> Tensor:
            loss: Tensor = model(input_ids=self.tokens, labels=self.tokens).loss
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        norms = model.model.layers[0].input_layernorm, model.model.norm

        def outcome(loss: Tensor) -> dict[str, Tensor]:
            first, last = (own_part(norm.weight.grad) for norm in norms)
            return {"loss": loss, "first norm": first, "last norm": last}

        return Step(run=run, module=model, outcome=outcome)


def measured(case: Case, arguments: argparse.Namespace) -> Iterator[Row]:
    """Measure the steps of one case."""
    models = together(str(case), partial(Models, case, arguments.device))
    makers: dict[str, Callable[[], Step]] = {WHOLE: models.unsharded, EAGER: models.sharded}
    expected = together(WHOLE, lambda: models.unsharded().find_outcome())
    yield measure_steps(makers, expected, arguments, recover=close, op="layer", case=str(case))
