"""What ranks do in test_peft.py: tiny models of transformers with PEFT's adapters, sharded, against the same in one process."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from model_work import SCHEDULE, assert_close, mesh, text, tiny, whole
from torch import nn

import weft


def adapted(kind: str = "qwen2", other: dict[str, Any] | None = None, others: dict[str, Any] | None = None, **lora: Any) -> Any:
    """A model with adapters that change its output. other: options of a second adapter, "second"."""
    import peft

    warnings.simplefilter("ignore")
    made = peft.get_peft_model(tiny(kind, **(others or {})), config(**lora))
    if other is not None:
        made.add_adapter("second", config(**{**lora, **other}))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in made.named_parameters():
        if "lora_B" in name or "lora_embedding" in name:
            nn.init.normal_(parameter, std=0.1, generator=generator)
    return made


def config(**lora: Any) -> Any:
    import peft

    return peft.LoraConfig(**{"r": 3, "lora_alpha": 5, "task_type": "CAUSAL_LM", "target_modules": "all-linear", **lora})


def shard(model: Any, **options: Any) -> Any:
    """A copy of it over all ranks."""
    found = copy.deepcopy(model)
    weft.parallelize(found.get_base_model(), mesh(), **{"schedule": SCHEDULE, "few_tokens": 0, **options})
    return found


def gradients(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """The loss, and the gradients of what is trained."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def steps(model: Any, lengths: tuple[int, ...]) -> list[Any]:
    """Gradients and losses of steps of AdamW over what is trained, clipped, and the weights after them."""
    trained = [p for p in model.parameters() if p.requires_grad]
    step = torch.optim.AdamW(trained, lr=0.01, eps=1e-3)
    found = []
    for length in lengths:
        found.append(gradients(model, text(2, length, seed=length)))
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        step.step()
    return [*found, {name: whole(p).detach().clone() for name, p in model.named_parameters()}]


def logits(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, **options).logits
    return found


def trains(kind: str, lora: dict[str, Any], others: dict[str, Any]) -> str:
    """Trained with lengths that ranks divide and do not, then evaluated and generated from. The report."""
    alone = adapted(kind, others=others, **lora)
    model = shard(alone)
    got, want = steps(model, (8, 11)), steps(alone, (8, 11))
    assert len(want[0]) > 1
    assert_close(got, want)
    for few in (0, 128):
        model = shard(alone, few_tokens=few)
        assert_close(gradients(model, text(2, 9)), gradients(alone, text(2, 9)))
        options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones(2, 9, dtype=torch.int64)}
        assert torch.equal(model.generate(input_ids=text(2, 9), **options), alone.generate(input_ids=text(2, 9), **options))
        with model.disable_adapter(), alone.disable_adapter():
            assert_close(logits(model, text(2, 9)), logits(alone, text(2, 9)))
    return str(weft.overlap_report(model.get_base_model()))


def reports() -> str:
    """The overlap report after a step."""
    model = shard(adapted())
    gradients(model, text(2, 9))
    return str(weft.overlap_report(model.get_base_model()))


def switches_and_merges(lora: dict[str, Any]) -> None:
    """Two adapters: each alone, one for each sequence of a batch, merged (with one more call in each state), taken out again,
    and merged for good."""
    alone = adapted(other={"r": 2, "lora_alpha": 7}, **lora)
    model, ids = shard(alone), text(2, 9)
    for name in ("second", "default"):
        for each in (model, alone):
            each.set_adapter(name)
        assert_close(gradients(model, ids), gradients(alone, ids))
    if not lora:
        names = {"adapter_names": ["second", "__base__"]}
        assert_close(logits(model.eval(), ids, **names), logits(alone.eval(), ids, **names))
    for each in (model, alone):
        each.merge_adapter()
    assert_close(logits(model, ids), logits(alone, ids))
    with model.disable_adapter(), alone.disable_adapter():
        assert_close(logits(model, ids), logits(alone, ids))
    for each in (model, alone):
        each.merge_adapter(["second"], safe_merge=True)
    assert_close(logits(model, ids), logits(alone, ids))
    for each in (model, alone):
        each.unmerge_adapter()
    assert_close(logits(model, ids), logits(alone, ids))
    merged = [each.merge_and_unload() for each in (model, alone)]
    for length in (9, 4):
        assert_close(*(logits(each, text(2, length)) for each in merged))


def saves(folder: str) -> None:
    """The adapters of ranks, written by PEFT's own save_pretrained, change a model in one process as they did."""
    import peft

    alone = adapted(modules_to_save=["lm_head"])
    folder = f"{folder}/{dist.get_rank()}"  # no rank reads what another one is writing
    shard(alone).save_pretrained(folder)
    again = peft.PeftModel.from_pretrained(tiny("qwen2"), folder)
    assert_close(logits(again, text(2, 9)), logits(alone, text(2, 9)))


def recomputed_and_compiled() -> None:
    """Activation checkpoints, reentrant ones too, around layers with LoRA in all linears; the same, compiled."""
    alone = adapted()
    want = {length: gradients(alone, text(2, length)) for length in (9, 12)}
    for reentrant in (False, True):
        model = shard(alone).train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
        for length in want:
            assert_close(gradients(model, text(2, length)), want[length])
    model = shard(alone)
    for layer in model.get_base_model().model.layers:
        layer.compile(backend="aot_eager")
    assert_close(gradients(model, text(2, 9)), want[9])


def draws_dropout() -> None:
    """With dropout and one seed, ranks go on with the same numbers and gradients, also where they do not divide a linear."""
    for others in ({}, {"intermediate_size": 45}):
        model = shard(adapted(lora_dropout=0.3, others=others)).train()
        torch.manual_seed(5)
        mine = gradients(model, text(2, 9)), torch.rand(1)
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, mine)
        assert_close(everybody[0], everybody[1])


def refused() -> list[str]:
    """PEFT's adapters that weft.parallelize does not take."""
    import peft

    messages = []
    of_all = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    for kind, made in (
        ("llama", peft.IA3Config(task_type="CAUSAL_LM", **of_all)),
        ("mixtral", config(target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])),
    ):
        try:
            weft.parallelize(peft.get_peft_model(tiny(kind), made).get_base_model(), mesh())
        except ValueError as error:
            messages.append(str(error))
    return messages


def comes_late() -> list[str]:
    """Adapters that come after weft.parallelize, around sharded linears or into LoRA layers that are there."""
    import peft

    messages = []
    late = weft.parallelize(tiny("qwen2"), mesh(), schedule=SCHEDULE)
    wrapped = peft.get_peft_model(late, config(target_modules=["up_proj"]))
    second = shard(adapted(target_modules=["o_proj"]))
    second.add_adapter("second", config(target_modules=["o_proj"]))
    for model in (wrapped, second):
        try:
            logits(model, text(2, 9))
        except ValueError as error:
            messages.append(str(error))
    return messages
