"""transformers' Trainer, accelerate and save_pretrained on models of weft.parallelize, on CPU ranks: as one process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from model_work import SCHEDULE, assert_close, mesh, sharded, text, tiny, whole

import weft

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore::FutureWarning")]


def _port() -> int:
    with socket.socket() as given:
        given.bind(("127.0.0.1", 0))
        found: int = given.getsockname()[1]
        return found


@contextmanager
def _launched(port: int) -> Iterator[None]:
    """As torchrun starts a rank, and accelerate takes CPU ranks for GPUs' (docs/guide.md)."""
    import accelerate
    from accelerate.state import AcceleratorState

    rank, size = dist.get_rank(), dist.get_world_size()
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    device_ranks = property(lambda self: self.use_distributed)
    with (
        mock.patch.dict(os.environ, {name: str(value) for name, value in variables.items()}),
        mock.patch.object(accelerate.Accelerator, "multi_device", device_ranks),
    ):
        yield
    AcceleratorState._reset_state(True)


def _train(model: Any, folder: str, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of Trainer's steps, with accumulated gradients, clipped."""
    from transformers import Trainer, TrainingArguments

    generator = torch.Generator().manual_seed(4)
    data = [{"input_ids": (one := torch.randint(36, (13,), generator=generator)), "labels": one} for _ in range(10)]
    arguments = TrainingArguments(
        folder, use_cpu=True, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2,
        max_grad_norm=0.3, adam_epsilon=1e-3, report_to=[], disable_tqdm=True, seed=0, logging_steps=1, optim="adamw_torch",
        **{"save_strategy": "no", **options},
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return losses, {name: whole(p).detach().clone() for name, p in model.named_parameters()}


def _alone(kind: str, folder: str) -> Any:
    return _train(tiny(kind), folder)


def _by_trainer(kind: str, folder: str, port: int, want: Any) -> None:
    with _launched(port):
        got = _train(
            sharded(tiny(kind), few_tokens=0),
            folder,
            ddp_backend="gloo",
            save_strategy="steps",
            save_steps=2,
            save_only_model=True,
        )
    assert_close(got, want)


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_trainer_trains_as_in_one_process(ranks: RankFixture, kind: str, tmp_path: Path) -> None:
    (want,) = ranks(1).run(_alone, kind, str(tmp_path / "alone"))
    ranks(2).run(_by_trainer, kind, str(tmp_path), _port(), want)
    saved = tmp_path / "checkpoint-3"
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(saved)
    assert_close(dict(again.named_parameters()), want[1])


def _with_peft(folder: str, port: int) -> None:
    """Trainer on PEFT's model around a sharded one: ranks have the same losses and trained matrices."""
    import peft_work

    with _launched(port):
        model = peft_work.shard(peft_work.adapted(target_modules=["q_proj", "down_proj"]))
        losses, weights = _train(model, folder, ddp_backend="gloo")
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (losses, weights))
    assert_close(everybody[0], everybody[1])
    assert losses[0] != losses[-1]


def test_trainer_trains_peft_models(ranks: RankFixture, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="PEFT is not installed: pip install peft")
    ranks(2).run(_with_peft, str(tmp_path), _port())


def _by_accelerate(port: int) -> None:
    """accelerate's own loop, with its clipping."""
    from accelerate import Accelerator, ParallelismConfig

    def loop(model: Any, accelerator: Any) -> list[float]:
        step = torch.optim.SGD(model.parameters(), lr=0.5)
        data = torch.utils.data.DataLoader(text(6, 9), batch_size=2)
        model, step, data = accelerator.prepare(model, step, data)
        found = []
        for ids in data:
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            step.step()
            step.zero_grad()
            found.append(loss.item())
        return found

    class Nothing:
        prepare = staticmethod(lambda *given: given)
        backward = staticmethod(lambda loss: loss.backward())
        clip_grad_norm_ = staticmethod(torch.nn.utils.clip_grad_norm_)

    want = loop(tiny("mistral"), Nothing)
    with _launched(port):
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=dist.get_world_size()))
        got = loop(weft.parallelize(tiny("mistral"), mesh(), schedule=SCHEDULE), accelerator)
    assert len(want) == 3
    assert_close(got, want)


def test_accelerate_trains_as_in_one_process(ranks: RankFixture) -> None:
    ranks(2).run(_by_accelerate, _port())


def _saved(folder: str, shared: bool) -> None:
    from transformers import AutoModelForCausalLM

    alone = tiny("qwen2", tie_word_embeddings=shared)
    sharded(alone).save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert_close(dict(again.named_parameters()), dict(alone.named_parameters()))
    assert not any(parameter.grad_fn for parameter in again.parameters())


@pytest.mark.parametrize("shared", [False, True])
def test_save_pretrained_writes_whole_tensors(ranks: RankFixture, shared: bool, tmp_path: Path) -> None:
    ranks(2).run(_saved, str(tmp_path), shared)
