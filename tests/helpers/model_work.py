"""What ranks do in test_parallelize.py: tiny models of transformers, sharded, against the same in one process."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import weft

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 37,
    "pad_token_id": None,
    "eos_token_id": None,
}
KINDS = {"llama": "Llama", "mistral": "Mistral", "mixtral": "Mixtral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
SCHEDULE = "shard_p2p"


def tiny(kind: str, **others: Any) -> Any:
    """A model with random weights, those of norms and biases too, the same on every rank."""
    import transformers

    torch.manual_seed(0)
    extra = {"head_dim": 8} if kind == "qwen3" else {"num_local_experts": 4} if kind == "mixtral" else {}
    name = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **extra, **others})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0, 0.3)
    return model


def mesh(ranks: int | None = None) -> Any:
    return dist.init_device_mesh("cpu", (ranks or dist.get_world_size(),))


def sharded(model: Any, **options: Any) -> Any:
    return weft.parallelize(copy.deepcopy(model), mesh(), **{"schedule": SCHEDULE, **options})


def text(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(36, (batch, length), generator=torch.Generator().manual_seed(seed))


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-5)


def trained(model: Any, lengths: tuple[int, ...]) -> list[Any]:
    """Losses, gradients of the first step, and weights after one step of AdamW for each length, with two sequences.
    eps: where gradients vanish, AdamW would take rounding for their sign."""
    step = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, foreach=True)
    found: list[Any] = []
    for length in lengths:
        ids = text(2, length, seed=length)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if not found:
            found.append({name: whole(p.grad) for name, p in model.named_parameters()})
        found.append(loss.detach())
        step.step()
        step.zero_grad()
    return [*found, {name: whole(p).detach() for name, p in model.named_parameters()}]


def written(model: Any, ids: torch.Tensor, tokens: int, **options: Any) -> torch.Tensor:
    """What the model goes on with, greedily."""
    asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "do_sample": False, **options}
    found: torch.Tensor = model.generate(ids, **asked)
    return found


def as_alone(kind: str, others: dict[str, Any]) -> str:
    """Training with lengths that ranks divide and do not, and generation, from a prompt that is sharded and then one token at a
    time. The report."""
    alone = tiny(kind, **others)
    model = sharded(alone, few_tokens=0)
    assert_close(trained(model, (8, 11)), trained(alone, (8, 11)))
    for prompt in (text(1, 9), text(3, 2)):
        assert torch.equal(written(model, prompt, 5), written(alone, prompt, 5))
    return str(weft.overlap_report(model))


class Adapter(nn.Module):
    """A linear inside of something, as LoRA has it."""

    def __init__(self, inside: nn.Linear) -> None:
        super().__init__()
        self.inside, self.down, self.up = inside, nn.Linear(inside.in_features, 2), nn.Linear(2, inside.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x) + self.up(self.down(x))
