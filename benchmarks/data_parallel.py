"""What does a data-parallel training step of a 1.5 B-parameter GPT gain, under DistributedDataParallel and fully_shard?

The model is examples/train_gpt.py's, of GPT-2 XL's size (48 layers, width 1600, 25 heads), in bfloat16, with activations of a
batch of 4 x 1024 tokens a GPU; a step is forward, backward and SGD. Methods: PyTorch as it is (`stock`), and weft's hooks in
each way that they would try, and `auto`, which tries them in its first steps.

Protocol: each method has a model of its own, made anew, WARM_UP steps (`auto`: as many as its trial takes, and some), and then
STEPS steps, each between two GPU events on the slowest rank; medians. Methods come one after the other, stock first and last:
the two show how far the machine drifted meanwhile. computation is a step of one rank alone.

    torchrun --nproc-per-node 4 benchmarks/data_parallel.py --json benchmarks/results/data_parallel.jsonl
    torchrun --nproc-per-node 4 benchmarks/data_parallel.py --kinds fsdp --layers 24
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import measure
import torch
import torch.distributed as dist
from measure import Failed, alarm, append, parser, release, row, say, start, stop, together
from torch import nn

import weft
from weft.beside.steps import WARM_UP as BEFORE_TRIAL
from weft.beside.trials import ROUNDS as TURNS
from weft.hooks.data_parallel import WAYS as DDP_WAYS
from weft.hooks.fully_sharded import WAYS as FSDP_WAYS

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from train_gpt import Gpt, replicated, sharded

ALARM_S = 40
STEPS, WARM_UP = 8, 3
BATCH, LENGTH, VOCABULARY = 4, 1024, 50304
KINDS: dict[str, tuple[Callable[[Gpt], nn.Module], Callable[..., object], tuple[str, ...]]] = {
    "ddp": (replicated, weft.hooks.ddp, DDP_WAYS),
    "fsdp": (sharded, weft.hooks.fsdp, FSDP_WAYS),
}


class Training:
    """One method's model, and its step."""

    def __init__(self, kind: str, method: str, arguments: Any) -> None:
        wrap, hook, _ = KINDS[kind]
        torch.manual_seed(0)
        sizes = {"layers": arguments.layers, "width": arguments.width, "heads": arguments.heads}
        with torch.device("cuda"):
            model = Gpt(**sizes, length=LENGTH, vocabulary=VOCABULARY).to(torch.bfloat16)
            self.text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
        self.model = model if method == "computation" else wrap(model)
        if method not in ("computation", "stock", "stock again"):
            hook(self.model, way=method, key=kind)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(self.text)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def timed_us(self, warm_up: int) -> list[float]:
        """Each step's time on this rank."""
        for _ in range(warm_up):
            self.step()
            alarm()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            self.step()
            mark.record()
        torch.cuda.synchronize()
        return [1e3 * before.elapsed_time(after) for before, after in pairwise(marks)]


def measured_us(kind: str, method: str, arguments: Any) -> float:
    """A step's median time, of the slowest rank. Raises Failed where a rank cannot. Collective."""

    def run() -> list[float]:
        training = Training(kind, method, arguments)
        tried = len(KINDS[kind][2]) * (1 + TURNS) + BEFORE_TRIAL if method == "auto" else 0
        return training.timed_us(WARM_UP + tried)

    times = torch.tensor(together(f"{kind} {method}", run), dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    torch.cuda.empty_cache()
    return statistics.median(times.tolist())


def compared(kind: str, arguments: Any) -> dict[str, Any]:
    """All methods of one kind: a JSON line."""
    us: dict[str, float] = {}
    missing: dict[str, str] = {}
    for method in ("computation", "stock", *KINDS[kind][2], "auto", "stock again"):
        try:
            us[method] = measured_us(kind, method, arguments)
        except Failed as failed:
            missing[method] = failed.reason
            say(f"LEFT OUT {failed}", file=sys.stderr)
            release()
    stock_us = min(us["stock"], us["stock again"])
    chosen = next((choice.way for choice in weft.concurrent_choices() if choice.key == kind), "")
    case = f"gpt {arguments.layers} x {arguments.width}"
    made = row(bench="data_parallel", op=kind, case=case, dtype="bfloat16", mode="eager", arguments=arguments)
    return made | {
        "schedule": chosen,
        "sequential_us": us.get("sequential"),
        "computation_us": us["computation"],
        "overlapped_us": us.get("auto"),
        "candidates": us,
        "missing": missing,
        "peers": {"stock": stock_us},
    }


def main() -> None:
    options = parser(__doc__, rounds=STEPS, modes="eager")
    options.add_argument("--kinds", default="ddp,fsdp", help="with commas (%(default)s)")
    for name, default in (("layers", 48), ("width", 1600), ("heads", 25)):
        options.add_argument(f"--{name}", type=int, default=default)
    arguments = options.parse_args()
    measure.ALARM_S = ALARM_S
    start()
    for kind in arguments.kinds.split(","):
        line = compared(kind, arguments)
        append(arguments.json, line)
        every = " ".join(f"{method}={us / 1e3:.1f}" for method, us in line["candidates"].items())
        say(f"{kind} {line['case']}, ms a step: {every} | auto took {line['schedule']}")
    release()
    stop()


if __name__ == "__main__":
    main()
