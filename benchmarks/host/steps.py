"""How benchmarks.host measures training steps: host time, wall time and memory of methods that take turns."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.host.clock import check_differences, difference, host_times, measure_methods, wall_times
from benchmarks.measure import row, step_bytes, synchronize
from benchmarks.rows import Row

Tensor = torch.Tensor
GROUP, ROUNDS = 5, 10
"""Steps of a method in a row, each from an idle GPU, and how often each method has its turn."""
LOOP, LOOP_ROUNDS = 10, 5
"""Steps in a loop without waiting, and how often each method runs that loop."""
WARM_UP = 25


@dataclass(frozen=True, kw_only=True)
class Step:
    """One method's training step.

    run: forward and backward, until the host goes on. module, inputs: their gradients are dropped between steps. outcome: parts
    of the result and of the gradients, after a run.
    """

    run: Callable[[], Tensor]
    module: nn.Module
    inputs: tuple[Tensor, ...] = ()
    outcome: Callable[[Tensor], dict[str, Tensor]]

    def clear(self) -> None:
        for parameter in (*self.module.parameters(), *self.inputs):
            parameter.grad = None

    def time_from_idle(self) -> int:
        """Run a step from an idle GPU, and return its host time in ns."""
        synchronize()
        self.clear()
        begun_ns = time.perf_counter_ns()
        self.run()
        return time.perf_counter_ns() - begun_ns

    def run_again(self) -> None:
        self.clear()
        self.run()

    def find_outcome(self) -> dict[str, Tensor]:
        self.clear()
        found = {what: part.detach().clone() for what, part in self.outcome(self.run()).items()}
        self.clear()
        return found


def own_part(grad: Tensor) -> Tensor:
    """Return a rank's part of a weight's gradient, and the sum over ranks of a norm's, which torch leaves as addends."""
    if not isinstance(grad, DTensor):
        return grad
    return grad.full_tensor() if grad.dim() == 1 else grad.to_local()


def measure_steps(
    makers: Mapping[str, Callable[[], Step]],
    expected: Mapping[str, Tensor],
    arguments: argparse.Namespace,
    *,
    recover: Callable[[], None],
    **about: Any,
) -> Row:
    """Measure the steps of all methods in turns. expected: the outcome that each must have. about: fields of the row."""
    on_gpu = arguments.device == "cuda"
    differences: dict[str, dict[str, float]] = {}
    memory: dict[str, int] = {}

    def check(name: str, step: Step) -> None:
        found = step.find_outcome()
        differences[name] = {what: round(difference(found[what], part), 5) for what, part in expected.items()}
        check_differences(differences[name])

    def warm_up(name: str, step: Step) -> None:
        for _ in range(WARM_UP if on_gpu else 1):
            step.run_again()
        step.clear()
        nbytes = step_bytes(step.run, step.clear)
        if nbytes is not None:
            memory[name] = nbytes

    def measure(steps: Mapping[str, Step]) -> tuple[dict[str, Any], dict[str, float]]:
        rounds, loop_rounds, loop = (arguments.rounds, LOOP_ROUNDS, LOOP) if on_gpu else (1, 1, 1)
        host = host_times({name: step.time_from_idle for name, step in steps.items()}, rounds, GROUP if on_gpu else 1)
        wall = wall_times({name: step.run_again for name, step in steps.items()}, loop_rounds, loop)
        for step in steps.values():
            step.clear()
        return host, wall

    (host, wall), missing = measure_methods(makers, check, warm_up, measure, recover)
    extra = {
        "p10": {name: round(spread.p10, 1) for name, spread in host.items()},
        "p90": {name: round(spread.p90, 1) for name, spread in host.items()},
        "difference": {name: found for name, found in differences.items() if name in host},
        "step_bytes": _largest({name: nbytes for name, nbytes in memory.items() if name in host}),
    }
    made = row(
        bench="host",
        dtype="bfloat16",
        mode="eager",
        us={name: round(us, 1) for name, us in wall.items()},
        host_us={name: round(spread.median, 1) for name, spread in host.items()},
        missing=missing,
        extra=extra,
        device=arguments.device,
        arguments=arguments,
        **about,
    )
    return replace(made, samples=arguments.rounds * GROUP if on_gpu else 1)


def _largest(nbytes: Mapping[str, int]) -> dict[str, int]:
    """Return the largest of all ranks."""
    if not nbytes:
        return {}
    largest = torch.tensor(list(nbytes.values()), dtype=torch.int64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return dict(zip(nbytes, largest.tolist(), strict=True))
