"""Does a model learn the same under weft's operators as under torch's? Losses of one training run, step by step.

    torchrun --nproc-per-node 2 tests/campaigns/losses.py --json out/losses.jsonl

A small Llama of transformers, random weights, bfloat16, with AdamW on float32 copies of the weights. The text is drawn from a
fixed Markov chain, so that a loss has a floor, the chain's entropy, which only a model that learns comes close to. Three runs
from the same weights, on the same batches:

    alone    the whole model on every rank, no communication
    torch    torch's styles over its collectives, sequence parallel
    weft     weft.parallelize

What bfloat16 does by itself is measured, too: `alone` and `torch` are one program whose sums have other orders. So weft's
distance from torch is to be no larger than torch's from `alone`. A distance is the mean over steps of |difference of losses|;
both are in the last JSON line. With --dtype float32 there is next to no noise, and curves are to lie on each other.

Traps: `auto` would keep NCCL where a model is as small as this, so a family is named, by which every operator overlaps. Losses
are means over the same tokens on all ranks.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from campaign import Options
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import weft

ALARM_S = 80
NEXT_WORDS = 4
"""What may follow a word."""
RUNS = ("alone", "torch", "weft")
Losses = list[float]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all runs have in common. length: tokens of a sequence, a multiple of the ranks."""

    hidden: int = 1024
    width: int = 2816
    layers: int = 4
    heads: int = 16
    words: int = 512
    batch: int = 8
    length: int = 512
    steps: int = 200
    lr: float = 1e-3
    warm_up: int = 20
    dtype: str = "bfloat16"
    schedule: str = "track_and_trigger"

    def model(self, device: torch.device) -> Any:
        """The same weights each time, on every rank."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads // 2,
            vocab_size=self.words,
            max_position_embeddings=self.length,
            pad_token_id=None,
            use_cache=False,
        )
        torch.manual_seed(0)
        return LlamaForCausalLM(config).to(device, getattr(torch, self.dtype))


class Text:
    """Sequences of a Markov chain: after each word one of NEXT_WORDS, some of them likelier."""

    def __init__(self, words: int) -> None:
        draw = torch.Generator().manual_seed(1)
        self.next_WN = torch.randint(words, (words, NEXT_WORDS), generator=draw)
        self.chances_N = torch.tensor([0.5, 0.25, 0.15, 0.1])

    @property
    def entropy(self) -> float:
        """Of a word, given the one before, in nats."""
        return -float((self.chances_N * self.chances_N.log()).sum())

    def batch(self, step: int, batch: int, length: int) -> torch.Tensor:
        """[batch, length], another one each step."""
        draw = torch.Generator().manual_seed(1000 + step)
        words = [torch.randint(len(self.next_WN), (batch,), generator=draw)]
        which = torch.multinomial(self.chances_N, batch * length, replacement=True, generator=draw).view(length, batch)
        for turn in which[1:]:
            words.append(self.next_WN[words[-1], turn])
        return torch.stack(words, 1)


class MasterWeights:
    """AdamW on float32 copies; the model's weights are those, rounded."""

    def __init__(self, parameters: Sequence[torch.Tensor], setup: Setup) -> None:
        self.parameters = list(parameters)
        self.copies = [p.detach().float().clone() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.copies, lr=setup.lr, weight_decay=0.01)
        self.setup = setup

    @torch.no_grad()
    def step(self, number: int) -> None:
        """After a backward. The rate rises over the first steps."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.setup.lr * min(1.0, (number + 1) / self.setup.warm_up)
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            copy.grad = _settled(parameter).float()
            parameter.grad = None
        self.optimizer.step()
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            parameter.copy_(copy)


def _settled(parameter: torch.Tensor) -> torch.Tensor:
    """A gradient that lies as its parameter does; torch leaves norms' as parts of a sum."""
    grad = parameter.grad
    assert grad is not None
    if isinstance(parameter, DTensor) and isinstance(grad, DTensor):
        return grad.redistribute(placements=parameter.placements)
    return grad


def torchs(model: Any, mesh: DeviceMesh) -> Any:
    """torch's own tensor parallelism with sequence parallel norms, for transformers' Llama."""
    columns, row = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
    attention = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
    )
    layer = {
        "input_layernorm": SequenceParallel(use_local_output=True),
        "self_attn": attention,
        **{f"self_attn.{name}_proj": columns for name in "qkv"},
        "self_attn.o_proj": row,
        "post_attention_layernorm": SequenceParallel(use_local_output=True),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.gate_proj": columns,
        "mlp.up_proj": columns,
        "mlp.down_proj": row,
    }
    plan = {f"model.layers.{i}.{name}": style for i in range(len(model.model.layers)) for name, style in layer.items()}
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    plan["model.layers.0"] = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
    )
    plan["model.norm"] = SequenceParallel(use_local_output=True)
    plan["lm_head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return parallelize_module(model, mesh, plan, src_data_rank=None)


def spread(name: str, model: Any, mesh: DeviceMesh, setup: Setup) -> Any:
    if name == "alone":
        return model
    if name == "torch":
        return torchs(model, mesh)
    return weft.parallelize(model, mesh, schedule=setup.schedule, few_tokens=0, src_data_rank=None)


def learned(name: str, mesh: DeviceMesh, setup: Setup) -> tuple[Losses, str]:
    """One run: (its losses, what of it was overlapped)."""
    device = torch.device(mesh.device_type)
    model = spread(name, setup.model(device), mesh, setup)
    master, text = MasterWeights(list(model.parameters()), setup), Text(setup.words)
    losses = []
    for number in range(setup.steps):
        if number % 20 == 0:
            faulthandler.dump_traceback_later(ALARM_S, exit=True)
        words = text.batch(number, setup.batch, setup.length).to(device)
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        master.step(number)
        losses.append(loss.detach())
    report = str(weft.overlap_report(model)).partition("\n")[0] if name == "weft" else ""
    found = [float(loss) for loss in losses]
    faulthandler.cancel_dump_traceback_later()
    del model, master, loss, losses
    weft.close(mesh.get_group())
    return found, report


def distance(one: Losses, other: Losses) -> float:
    """Mean over steps."""
    return statistics.fmean(abs(a - b) for a, b in zip(one, other, strict=True))


def compared(runs: Mapping[str, Losses], floor: float) -> dict[str, Any]:
    """What is to be told of three runs."""
    pairs = (("torch", "alone"), ("weft", "torch"), ("weft", "alone"))
    between = {f"{a} from {b}": (runs[a], runs[b]) for a, b in pairs}
    return {
        "floor": floor,
        "first": {name: losses[0] for name, losses in runs.items()},
        "last": {name: statistics.fmean(losses[-10:]) for name, losses in runs.items()},
        "distance": {name: distance(*pair) for name, pair in between.items()},
        "farthest": {name: max(abs(a - b) for a, b in zip(*pair, strict=True)) for name, pair in between.items()},
    }


def all_runs(
    mesh: DeviceMesh, setup: Setup, ended: Callable[[str, Losses, str], None]
) -> tuple[dict[str, Losses], dict[str, Any]]:
    """(losses by run, what is to be told of them). ended: given each run's name and losses, and a line on it, as it ends."""
    found, reports = {}, {}
    for name in RUNS:
        begun = time.monotonic()
        found[name], reports[name] = learned(name, mesh, setup)
        first, last, seconds = found[name][0], found[name][-1], time.monotonic() - begun
        ended(name, found[name], f"{name:5} {first:.4f} to {last:.4f} in {seconds:.0f} s {reports[name]}")
    comparison = compared(found, Text(setup.words).entropy)
    return found, comparison | {"report": reports["weft"]}


def start() -> DeviceMesh:
    """Join the world: GPUs if every rank of this host has one. Nothing that an earlier run chose is taken over."""
    faulthandler.dump_traceback_later(ALARM_S, exit=True)
    os.environ["WEFT_CACHE_DIR"] = ""
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        dist.init_process_group("gloo")
        return dist.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", local))
    return dist.init_device_mesh("cuda", (dist.get_world_size(),))


def main() -> None:
    options = Options(__doc__)
    for name, default in vars(Setup()).items():
        options.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help="%(default)s")
    arguments = vars(options.parse_args())
    path, commit = arguments.pop("json"), arguments.pop("commit")
    mesh, setup = start(), Setup(**arguments)
    first = dist.get_rank() == 0
    machine = torch.cuda.get_device_name() if mesh.device_type == "cuda" else "cpu"
    head = {"bench": "losses", "machine": f"{mesh.size()} x {machine}", "torch": torch.__version__, "commit": commit}

    def write(line: dict[str, Any]) -> None:
        if first and path:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(head | line) + "\n")

    def ended(name: str, losses: Losses, line: str) -> None:
        write({"run": name, "losses": [round(loss, 5) for loss in losses]})
        if first:
            print(line, flush=True)

    runs, comparison = all_runs(mesh, setup, ended)
    write({"run": "compared", **comparison, "setup": vars(setup)})
    if first:
        print(json.dumps(comparison))
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    if not all(math.isfinite(loss) for losses in runs.values() for loss in losses):
        sys.exit("a loss is not finite")


if __name__ == "__main__":
    main()
