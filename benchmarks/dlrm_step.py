"""What does embedding_bag_all_to_all gain in DLRM: the lookup's exchange, and a training step as a whole?

    torchrun --nproc-per-node 2 -m benchmarks.dlrm_step --json benchmarks/results/h200x2/dlrm_step.jsonl
    torchrun --nproc-per-node 4 -m benchmarks.dlrm_step --only step --batch 32768

Protocol: measure.py's; float32. MLPerf's model: 26 tables of dim 128 with its pooling, bottom 512-256-128, top
1024-1024-512-256-1, batch 65536; tables have a million rows each, and rows are drawn uniformly. The model is
examples/dlrm_model.py, tables in ranges of about even pooling. exchange: lookup and exchange, forward alone. step: forward,
loss, backward, the all-reduce of the MLPs' gradients, SGD of MLPs and tables.

Baselines of the same run: torch's embedding bags, of all of a rank's tables in one call (as one) or in a call each (by table),
and NCCL's all_to_all_single, with sparse gradients and torch's SGD for tables; the rest of the step is the same code. rest: the
step without lookup and exchange, on given columns: what no exchange could make faster.
Traps: a rate of 0, with all of its work, so that every call has the same result, which is compared; results that NCCL brings by
rank are laid side by side, which is part of every sequential program; a rank that has the table with 100 indices in a bag is
the slowest in either way.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, embedding_bag

import weft
from benchmarks.measure import ALONE, Work, close_to, parser, row, together, trial
from benchmarks.rows import Row
from benchmarks.runner import parse_only, run_parts
from weft.planner.models import load_model

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from dlrm_model import DLRM

ROUNDS, REPEAT, ALARM_S = 7, 2, 55
DENSE, DIM = 13, 128
BOTTOM, TOP = (512, 256, DIM), (1024, 1024, 512, 256, 1)
POOLING = load_model("dlrm-mlperf").pooling
PARTS = ("exchange", "step")
Tensors = tuple[torch.Tensor, ...]


class _Exchange(torch.autograd.Function):
    """Pooled columns of this rank's tables, of all samples, to all columns of this rank's samples."""

    @staticmethod
    def forward(ctx: Any, pooled: torch.Tensor, columns: list[int]) -> torch.Tensor:
        ctx.columns, size = columns, len(columns)
        m, mine = pooled.shape[0] // size, pooled.shape[1]
        landed = pooled.new_empty(m * sum(columns))
        dist.all_to_all_single(landed, pooled.view(-1), [m * each for each in columns], [m * mine] * size)
        parts = landed.split([m * each for each in columns])
        return torch.cat([part.view(m, each) for part, each in zip(parts, columns, strict=True)], 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,), columns = grads, ctx.columns
        m, mine = grad.shape[0], columns[dist.get_rank()]
        packed = torch.cat([part.reshape(-1) for part in grad.split(columns, 1)])
        home = grad.new_empty(len(columns) * m, mine)
        dist.all_to_all_single(home.view(-1), packed, [m * mine] * len(columns), [m * each for each in columns])
        return home, None


class Site:
    """The model, one batch, and each way of a step on this rank."""

    def __init__(self, batch: int, rows: int, schedule: str) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        options = {"pooling": POOLING, "optimizer": weft.SGD(lr=0.0), "mean": False, "schedule": schedule, "device": "cuda"}
        self.model = DLRM(DENSE, [(rows, DIM)] * len(POOLING), bottom=BOTTOM, top=TOP, **options)
        self.bags = self.model.bags
        torch.manual_seed(1 + rank)
        self.all = torch.randn(len(self.bags.own) * rows, DIM, device="cuda").requires_grad_()
        self.each = [table.requires_grad_() for table in self.all.detach().split(rows)]
        for at, table in zip(self.bags.own, self.each, strict=True):
            self.bags.tables[str(at)] = nn.Parameter(table)
        self.columns = [sum(dims) for dims in self.bags.dims]
        self._batch(batch, rows, batch // size)
        self.mlps = [*self.model.bottom.parameters(), *self.model.top.parameters()]
        self.sgd = torch.optim.SGD([*self.mlps, self.all, *self.each], lr=0.0)

    def _batch(self, batch: int, rows: int, mine: int) -> None:
        own = [POOLING[at] for at in self.bags.own]
        self.lengths = torch.tensor(own, device="cuda").repeat_interleave(batch)
        self.indices = torch.randint(0, rows, (sum(own) * batch,), device="cuda")
        first = torch.arange(len(own), device="cuda") * rows
        self.flat = self.indices + first.repeat_interleave(torch.tensor([pool * batch for pool in own], device="cuda"))
        self.offsets = self.lengths.cumsum(0) - self.lengths
        self.by_table = self.indices.split([pool * batch for pool in own])
        self.starts = [torch.arange(0, pool * batch, pool, device="cuda") for pool in own]
        self.batch, self.dense = batch, torch.randn(mine, DENSE, device="cuda")
        self.clicks = torch.rand(mine, device="cuda").round()
        self.given = torch.randn(mine, len(POOLING) * DIM, device="cuda")

    def ours(self) -> torch.Tensor:
        return self.bags(self.indices, self.lengths, batch=self.batch)

    def as_one(self) -> torch.Tensor:
        pooled = embedding_bag(self.flat, self.all, self.offsets, mode="sum", sparse=True)
        tables = len(self.bags.own)
        return _Exchange.apply(pooled.view(tables, self.batch, DIM).transpose(0, 1).reshape(self.batch, -1), self.columns)

    def each_table(self) -> torch.Tensor:
        bags = zip(self.by_table, self.each, self.starts, strict=True)
        pooled = torch.cat([embedding_bag(i, t, s, mode="sum", sparse=True) for i, t, s in bags], 1)
        return _Exchange.apply(pooled, self.columns)

    def forward(self, lookup: Callable[[], torch.Tensor]) -> Work:
        def run() -> Tensors:
            with torch.no_grad():
                return (lookup(),)

        return run

    def step(self, lookup: Callable[[], torch.Tensor]) -> Work:
        """One training step: (logits, the gradient of the bottom's first weights)."""

        def run() -> Tensors:
            self.sgd.zero_grad()
            logits = self.model.logits(self.dense, lookup())
            loss = binary_cross_entropy_with_logits(logits, self.clicks, reduction="sum") / self.batch
            loss.backward()
            grads = torch.cat([p.grad.view(-1) for p in self.mlps])  # type: ignore[union-attr]
            dist.all_reduce(grads)
            for parameter, grad in zip(self.mlps, grads.split([p.numel() for p in self.mlps]), strict=True):
                parameter.grad = grad.view_as(parameter)
            self.sgd.step()
            return logits.detach(), self.mlps[0].grad  # type: ignore[return-value]

        return run

    def exchange(self) -> Work:
        pooled = torch.randn(self.batch, self.columns[dist.get_rank()], device="cuda")
        return lambda: _Exchange.apply(pooled, self.columns)

    def works(self, part: str) -> dict[str, Work]:
        ways = {
            "sequential/torch as one": self.as_one,
            "sequential/torch by table": self.each_table,
            "weft/auto": self.ours,
        }
        if part == "exchange":
            return {name: self.forward(way) for name, way in ways.items()} | {"communication/default": self.exchange()}
        return {name: self.step(way) for name, way in ways.items()} | {"computation/rest": self.step(lambda: self.given)}


def checks(expected: object) -> Callable[[str, object], None]:
    compare = [close_to(part.detach().clone(), 1e-3) for part in cast(Tensors, expected)]

    def check(name: str, result: object) -> None:
        if not name.startswith(ALONE):
            for one, part in zip(compare, cast(Tensors, result), strict=True):
                one(name, part)

    return check


def measured(part: str, arguments: argparse.Namespace) -> Iterator[Row]:
    works = Site(arguments.batch, arguments.rows, arguments.schedule).works(part)
    check = checks(together("torch as one", works["sequential/torch as one"]))
    for mode in arguments.modes.split(","):
        needed = ("sequential/torch as one", "communication/default" if part == "exchange" else "computation/rest")
        times, missing = trial(works, [mode], check=check, needed=needed, rounds=arguments.rounds, repeat=REPEAT)
        case = f"dlrm-mlperf batch={arguments.batch} {part}"
        yield row(
            bench="dlrm_step",
            op="embedding_bag_all_to_all",
            case=case,
            dtype="float32",
            mode=mode,
            times=times[mode],
            chosen=_chosen(arguments.schedule),
            missing=missing,
            arguments=arguments,
        )


def _chosen(schedule: str) -> str | None:
    """What --schedule stands for."""
    found = [choice.spec for choice in weft.choices()]
    return schedule if schedule != "auto" else found[-1] if found else None


def main() -> None:
    options = parser(__doc__, rounds=ROUNDS, modes="eager")
    options.add_argument("--only", default=",".join(PARTS), help="parts, with commas (%(default)s)")
    options.add_argument("--batch", type=int, default=65536, help="of all ranks (%(default)s)")
    options.add_argument("--rows", type=int, default=1_000_000, help="of each table (%(default)s)")
    options.add_argument("--schedule", default="auto", help="weft's (%(default)s)")
    arguments = options.parse_args()
    run_parts(parse_only(arguments.only, PARTS), measured, arguments, alarm_s=ALARM_S)


if __name__ == "__main__":
    main()
