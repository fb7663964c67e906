"""Parts `training` and `compiled` of benchmarks.host: steps of MLP blocks under tensor and sequence parallelism.

A block is x + down(silu(gate(norm(x))) * up(norm(x))). Each rank has its part of the tokens, of the columns of gate and up, and
of the rows of down. All methods have the same weights.

`peer/hand` is what a careful person writes without weft: autograd functions over NCCL's collectives, one gather for gate and
up, and one sum of all norms' gradients at the end of a step. torch's styles leave those gradients as addends: the sum, which an
optimizer needs, is not in their time.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import weft
from benchmarks.by_hand import Gather, Link, Scatter, cut, sum_gradients
from benchmarks.host.steps import Step, measure_steps, own_part
from benchmarks.measure import release, together
from benchmarks.models import METHODS, compile_for, world
from benchmarks.rows import Row

Tensor = torch.Tensor
HAND = "peer/hand"
EAGER = ("torch", "weft")
COMPILED = ("torch_compiled", "weft_compiled", "weft_pass")
"""Of benchmarks.models.METHODS. The method by hand is measured with both."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """blocks: how many. width: of hidden states. inner: columns of gate and up on all ranks. tokens: of all ranks."""

    blocks: int
    width: int
    inner: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.blocks} blocks, d={self.width} h={self.inner}, {self.tokens} tokens"


CASES = {
    "cuda": (
        Case(blocks=4, width=1024, inner=4096, tokens=512),
        Case(blocks=2, width=4096, inner=14336, tokens=2048),
        Case(blocks=2, width=8192, inner=28672, tokens=2048),
        Case(blocks=2, width=4096, inner=14336, tokens=8192),
    ),
    "cpu": (Case(blocks=2, width=32, inner=64, tokens=16),),
}
"""By device. Those of CPUs only show that the benchmark works."""


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.ff = FeedForward(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.ff(self.norm(x))
        return out


class HandBlock(nn.Module):
    """A rank's part of a block, with NCCL's collectives."""

    def __init__(self, whole: Block, link: Link) -> None:
        super().__init__()
        self.norm, self.link = whole.norm, link
        self.w1, self.w3, self.w2 = (
            nn.Parameter(cut(linear.weight, dim, link))
            for linear, dim in ((whole.ff.w1, 0), (whole.ff.w3, 0), (whole.ff.w2, 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = Gather.apply(self.norm(x), self.link)  # type: ignore[no-untyped-call]
        inner = nn.functional.silu(nn.functional.linear(y, self.w1)) * nn.functional.linear(y, self.w3)
        out: Tensor = x + Scatter.apply(nn.functional.linear(inner, self.w2), self.link)  # type: ignore[no-untyped-call]
        return out


Plan = dict[str, ParallelStyle]


def torch_plan() -> Plan:
    return {
        "norm": SequenceParallel(),
        "ff": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "ff.w1": ColwiseParallel(),
        "ff.w3": ColwiseParallel(),
        "ff.w2": RowwiseParallel(output_layouts=Shard(1)),
    }


def weft_plan() -> Plan:
    return {
        "norm": weft.SequenceParallel(use_local_output=True),
        "ff": weft.SharedInput(("w1", "w3")),
        "ff.w2": weft.RowwiseParallel(output_layouts=Shard(1)),
    }


class Models:
    """One case's input and models. A compiled method shares its model with the eager one of the same styles."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device, self.mesh = case, device, world(device)
        torch.manual_seed(7)
        shape = (1, case.tokens, case.width)
        parts = [torch.randn(shape, device=device, dtype=torch.bfloat16).chunk(self.mesh.size(), 1) for _ in range(2)]
        self.x, self.grad = (part[dist.get_rank()].contiguous() for part in parts)
        self.x.requires_grad_()
        self._sharded: dict[str, nn.Module] = {}

    def whole(self) -> nn.Sequential:
        """The unsharded model, whose weights are the same on every rank and for every method."""
        torch.manual_seed(0)
        with torch.device(self.device):
            blocks = [Block(self.case.width, self.case.inner) for _ in range(self.case.blocks)]
        return nn.Sequential(*blocks).to(torch.bfloat16)

    def sharded(self, kind: str) -> nn.Module:
        if kind not in self._sharded:
            model = self.whole()
            for block in model:
                parallelize_module(block, self.mesh, weft_plan() if kind == "weft" else torch_plan(), src_data_rank=None)
            self._sharded[kind] = model
        return self._sharded[kind]

    def by_hand(self) -> Step:
        link = Link.of()
        model = nn.Sequential(*[HandBlock(block, link) for block in self.whole()])  # type: ignore[arg-type]
        norms: list[Any] = [block.norm.weight for block in model]  # type: ignore[union-attr]

        def run() -> Tensor:
            out: Tensor = model(self.x)
            out.backward(self.grad)  # type: ignore[no-untyped-call]
            sum_gradients([norm.grad for norm in norms], link)
            return out

        first: Any = model[0]
        return self._step(run, model, [first.norm.weight, first.w1, first.w3, first.w2])

    def by_styles(self, name: str) -> Step:
        model = self.sharded("weft" if name in ("weft", "weft_compiled") else "torch")
        called = compile_for(name, model) if name in COMPILED else model

        def run() -> Tensor:
            out: Tensor = called(self.x)
            out.backward(self.grad)  # type: ignore[no-untyped-call]
            return out

        first: Any = model[0]  # type: ignore[index]
        weights = [first.norm.weight, first.ff.w1.weight, first.ff.w3.weight, first.ff.w2.weight]
        return self._step(run, model, weights)

    def _step(self, run: Callable[[], Tensor], model: nn.Module, weights: list[nn.Parameter]) -> Step:
        def outcome(out: Tensor) -> dict[str, Tensor]:
            tensors = [out, self.x.grad, *(own_part(weight.grad) for weight in weights)]  # type: ignore[arg-type]
            return dict(zip(("output", "input", "norm", "gate", "up", "down"), tensors, strict=True))  # type: ignore[arg-type]

        return Step(run=run, module=model, inputs=(self.x,), outcome=outcome)


def measured(case: Case, arguments: argparse.Namespace, *, part: str) -> Iterator[Row]:
    """Measure the steps of one case: of all eager methods, or of all compiled ones."""
    models = together(str(case), partial(Models, case, arguments.device))
    makers: dict[str, Callable[[], Step]] = {HAND: models.by_hand}
    for name in EAGER if part == "training" else COMPILED:
        makers[METHODS[name]] = partial(models.by_styles, name)
    expected = together(HAND, lambda: models.by_hand().find_outcome())
    yield measure_steps(makers, expected, arguments, recover=close, op=part, case=str(case))


def close() -> None:
    """Free what weft holds. Collective."""
    weft.close(world("cuda" if torch.cuda.is_available() else "cpu").get_group())
    release()


def after() -> None:
    torch.compiler.reset()
    gc.collect()
    close()
