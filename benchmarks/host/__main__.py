"""How long do calls and training steps keep the host busy? Parts, one or several a run:

    calls      single warm calls without gradients: weft, the same two calls of PyTorch, and the matmul alone (calls.py)
    training   forward and backward of MLP blocks under tensor and sequence parallelism, eager (training.py)
    compiled   the same under torch.compile
    layer      forward and backward of a Llama layer of transformers, sharded by weft.parallelize, and unsharded (layer.py)

`host_us` of a row is the time until Python goes on, where the GPU is not behind; `us` is the wall time of a call or a step in a
loop that waits for the GPU only at its end. So `us` is the larger of what the host and what the GPU needs.

Protocol: all methods of a case take turns round by round, in an order that changes each round. Before each turn all GPUs are
idle, and all ranks are here. A turn of `calls` is 8 calls, and a turn of the other parts is 5 steps, each from an idle GPU.
Waiting for the GPU is not timed, so neither the GPU's time nor the limits of its queues count. The figure is the median of all
calls (1,000) or steps (50) of a rank, and of these the slowest rank's. p10 and p90 are percentiles of the same calls.

Results, and of steps gradients too, are compared before anything is timed. `difference` is the norm of the difference from
what PyTorch's calls give (in steps: the hand-written one, or the unsharded model), divided by the norm of the latter.
`step_bytes` is what torch's allocator hands out during a step, at most. It does not count weft's symmetric buffers.

Variants of calls (`state` of a row): `same tensors`; `new addresses`: 331 copies of the input in turn, and results that stay
alive for 61 calls; `two streams`: two streams in turn, each ordered after the other by an event. Host times leave out the
events and the change of the stream; wall times have them. A loop of `us` has 200 calls (10 steps). On machines without GPUs
everything is small, and only shows that the benchmark works.

Traps: host times differ by half from machine to machine, so compare them within a row. The first run on a machine compiles
kernels. What `auto` chose in an earlier run is taken over from WEFT_CACHE_DIR, if it is set, which saves time.

    torchrun --nproc-per-node 2 -m benchmarks.host --part calls --json benchmarks/results/h200x2/host.jsonl
    torchrun --nproc-per-node 2 -m benchmarks.host --part compiled --cases 0,1 --json benchmarks/results/h200x2/host.jsonl
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import measure
from benchmarks.host import calls, layer, steps, training
from benchmarks.measure import parser
from benchmarks.rows import Row
from benchmarks.runner import run_parts

ALARM_S = {"calls": 120, "training": 120, "compiled": 280, "layer": 120}
"""By part, how long a stage may take. Inductor compiles a method in one stage."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """measure: makes the rows of a case. cases: by device. rounds: how often each method has its turn."""

    measure: Callable[[Any, argparse.Namespace], Iterator[Row]]
    cases: Mapping[str, Sequence[Any]]
    rounds: int


PARTS = {
    "calls": Part(measure=calls.measured, cases=calls.CASES, rounds=125),
    "training": Part(measure=partial(training.measured, part="training"), cases=training.CASES, rounds=steps.ROUNDS),
    "compiled": Part(measure=partial(training.measured, part="compiled"), cases=training.CASES, rounds=steps.ROUNDS),
    "layer": Part(measure=layer.measured, cases=layer.CASES, rounds=steps.ROUNDS),
}


@dataclass(frozen=True, kw_only=True)
class PartCase:
    """A case of a part. rounds: of this part, or of --rounds."""

    part: str
    case: Any
    rounds: int

    def __str__(self) -> str:
        return f"{self.part}: {self.case}"

    def measure(self, arguments: argparse.Namespace) -> Iterator[Row]:
        given = argparse.Namespace(**{**vars(arguments), "rounds": self.rounds})
        return PARTS[self.part].measure(self.case, given)


def list_cases(arguments: argparse.Namespace) -> list[PartCase]:
    """Return the cases that the options name. Raises ValueError for an unknown part or number."""
    found = []
    for name in arguments.part.split(","):
        if name not in PARTS:
            raise ValueError(f"--part has {name!r}; use {', '.join(PARTS)}")
        part = PARTS[name]
        cases = part.cases[arguments.device]
        for number in arguments.cases.split(",") if arguments.cases else map(str, range(len(cases))):
            if not number.isdecimal() or int(number) >= len(cases):
                raise ValueError(f"--cases has {number!r}; part {name} has the cases 0 to {len(cases) - 1}")
            found.append(PartCase(part=name, case=cases[int(number)], rounds=arguments.rounds or part.rounds))
    return found


def main() -> None:
    options = parser(__doc__, rounds=0, modes="eager")  # 0: as many as the part has
    options.add_argument("--part", default=",".join(PARTS), help="with commas (%(default)s)")
    options.add_argument("--cases", default="", help="numbers of a part's cases from 0, with commas; default: all")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = options.parse_args()
    try:
        cases = list_cases(arguments)
    except ValueError as error:
        options.error(str(error))
    measure.PLANS = os.environ.get("WEFT_CACHE_DIR", "")
    alarm_s = max(ALARM_S[case.part] for case in cases)
    run_parts(cases, PartCase.measure, arguments, alarm_s=alarm_s, after=training.after, device=arguments.device)


if __name__ == "__main__":
    main()
