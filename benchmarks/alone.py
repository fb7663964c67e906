"""How long does the computation of a training step take on one GPU, and what does weft predict?

The program by hand of training.py, of one rank of two, where what others would send lies there already: one process, no group,
no collective. Layers (2) of Llama 3 8B and 70B, Qwen 3 32B and Mixtral 8x7B, with 2048 and 8192 tokens of both ranks, eager and
with rotary positions and SwiGLU as kernels of Inductor's (compiled), without and with checkpointing.

Each program is called twice to warm up. The time is the median of --rounds calls between two GPU events, enqueued one after the
other, and the prediction that of weft.planner.plan_training for as many layers. Few tokens are bound by the host: its time is
printed, too.

    python -m benchmarks.alone
    python -m benchmarks.alone --models llama3-8b --tokens 8192 --json out/alone.jsonl

Estimated duration on one H200, not measured: 2 minutes eager, and 2 more where Inductor compiles.
Traps: nothing checks results here; training.py does that for the same program. On CPUs everything is tiny and in float32, is
predicted for one H200, and only shows that it works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.by_hand import NoLink, Plain, Splits
from benchmarks.checked_options import count
from benchmarks.decoder import Decoder
from benchmarks.hand_decoder import HandDecoder
from benchmarks.training import Case, case_options, cases, names_of, predict_steps
from benchmarks.training_table import MODES
from weft.core.machine import load
from weft.runtime.choose import profile_for

RANKS, WARM_UP, ROUNDS = 2, 2, 15


def _splits(case: Case, index: torch.Tensor) -> Splits:
    """What rank 0 would learn of the rows that both ranks send. index: the experts of all tokens."""
    parts = [Plain(part, case.sizes.experts).counts.view(RANKS, -1) for part in index.chunk(RANKS)]
    arriving = torch.stack([part[0] for part in parts])
    return parts[0].sum(1).tolist(), arriving.sum(1).tolist(), arriving


def program(case: Case, device: str, dtype: torch.dtype, *, fused: bool) -> tuple[HandDecoder, torch.Tensor]:
    """The layers of rank 0, and its input [1, s, H]."""
    torch.manual_seed(0)
    whole = Decoder(case.sizes, positions=case.tokens, device=device, dtype=dtype)
    whole.checkpointing, known = case.checkpointing, None
    if case.sizes.experts:
        scores, index = torch.rand(case.tokens, case.sizes.experts, device=device).topk(case.sizes.top_k)
        known, own = _splits(case, index), case.tokens // RANKS
        whole.route(index[:own].contiguous(), (scores / scores.sum(1, keepdim=True))[:own].contiguous())
    model = HandDecoder(whole, NoLink(ranks=RANKS, rank=0, known=known), fused=fused)
    x = torch.randn(1, case.tokens // RANKS, case.sizes.hidden, device=device, dtype=dtype, requires_grad=True)
    return model, x


def timed(model: HandDecoder, x: torch.Tensor, rounds: int) -> tuple[float, float]:
    """(us of a step, us of the host until it returns), medians."""
    grad, device_us, host_us = torch.randn_like(x), [], []
    for at in range(WARM_UP + rounds):
        x.grad = None
        model.zero_grad(set_to_none=True)
        begin, end = _marks(x.device)
        started_ns = time.perf_counter_ns()
        begin.record()
        model(x).backward(grad)
        end.record()
        host = (time.perf_counter_ns() - started_ns) / 1e3
        end.synchronize()
        if at >= WARM_UP:
            device_us.append(1e3 * begin.elapsed_time(end))
            host_us.append(host)
    return statistics.median(device_us), statistics.median(host_us)


def _marks(device: torch.device) -> tuple[Any, Any]:
    if device.type == "cuda":
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    return _Clock(), _Clock()


class _Clock:
    """A torch.cuda.Event of a CPU."""

    def record(self) -> None:
        self.ns = time.perf_counter_ns()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Clock) -> float:
        """In ms."""
        return (end.ns - self.ns) / 1e6


def measured(found: list[Case], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each case and mode."""
    device = arguments.device
    dtype, name = (torch.bfloat16, "bfloat16") if device == "cuda" else (torch.float32, "float32")
    machine = profile_for(torch.device(device), RANKS) if device == "cuda" else load("h200x8")
    for case in found:
        steps = predict_steps(case, machine, RANKS, name)
        for mode in arguments.modes:
            model, x = program(case, device, dtype, fused=mode == "compiled")
            us, host_us = timed(model, x, arguments.rounds)
            del model, x
            predicted_us = steps[mode]["computation_us"]
            yield {"case": str(case), "mode": mode, "us": us, "host_us": host_us, "predicted_us": predicted_us}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    case_options(options)
    options.add_argument("--modes", type=names_of(MODES), default=",".join(MODES), help="with commas (%(default)s)")
    options.add_argument("--rounds", type=count, default=ROUNDS, help="(%(default)s)")
    options.add_argument("--json", type=Path, metavar="FILE", help="append rows as JSON lines")
    arguments = options.parse_args()
    try:
        found = cases(arguments)
    except argparse.ArgumentTypeError as error:
        options.error(f"--tokens: {error}")
    for row in measured(found, arguments):
        ratio = f"{row['predicted_us'] / row['us']:.2f}"
        print(f"{row['case']}, {row['mode']}: {row['us']:,.0f} us measured (host {row['host_us']:,.0f}), ", end="")
        print(f"{row['predicted_us']:,.0f} predicted, {ratio} of it", flush=True)
        if arguments.json:
            with arguments.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
