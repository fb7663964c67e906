"""What does a Llama-3 70B MLP block gain, forward and backward?

The block, with sequence and tensor parallelism; x is split by rows, the weights by the MLP's width:

    gate, up = all_gather(x) @ (w_gate, w_up)     one gather       grad_x = reduce_scatter(grad_gate, grad_up @ weights^T)
    h        = silu(gate) * up                                     grad_w = all_gather(x)^T @ grads, gathered again
    y        = reduce_scatter(h @ w_down)                          grad_h = all_gather(grad_y) @ w_down^T, and grad_w_down

Methods: sequential (NCCL's collectives on plain buffers, cuBLAS), PyTorch's async TP (symm_mem.fused_*), weft by schedule;
each is an autograd function in both directions, and all of them gather x anew in the backward. Weights lie apart, or w_gate
and w_up in one matrix ("joined"): then the backward needs no concatenation. A method counts by its better layout.

Protocol: measure.py's; a call is forward and backward, through torch.autograd.grad. The result and all gradients are
compared with sequential's before anything is timed. computation: the same block on one rank's part with no communication;
communication: its five collectives alone; ideal: the larger. Trap: activations and gradients come from the allocator.

    torchrun --nproc-per-node 4 benchmarks/mlp.py --json benchmarks/results/mlp.jsonl
"""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # registers torch.ops.symm_mem
from measure import Times, Work, close_to, parser, row, together, trial
from parts import run_parts

import weft
from weft import schedules

ROUNDS, REPEAT = 11, 2
MODEL, HIDDEN, WIDTH = "llama3-70b", 8192, 28672
ROWS = (8192, 2048)
SPECS = ("auto", "flag_gated:1", "track_and_trigger:1", "shard_p2p")
Tensors = tuple[torch.Tensor, ...]


class Way(ABC):
    """How a block's two sites run. Column: all_gather, then matmul. Row: matmul, then reduce_scatter."""

    @abstractmethod
    def column(self, a: torch.Tensor, bs: Sequence[torch.Tensor]) -> Tensors: ...

    @abstractmethod
    def row(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: ...


class Weft(Way):
    def __init__(self, spec: str) -> None:
        self.spec = spec

    def column(self, a: torch.Tensor, bs: Sequence[torch.Tensor]) -> Tensors:
        return tuple(weft.all_gather_matmul(a, list(bs), schedule=self.spec))

    def row(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return weft.matmul_reduce_scatter(a, b, schedule=self.spec)


class Plain(Way):
    """A way by its collectives alone: the backward of each site is the other one."""

    def column(self, a: torch.Tensor, bs: Sequence[torch.Tensor]) -> Tensors:
        return cast(Tensors, _Column.apply(self, a, *bs))  # type: ignore[no-untyped-call]

    def row(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, _Row.apply(self, a, b))  # type: ignore[no-untyped-call]

    @abstractmethod
    def gather(self, a: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def gather_matmul(self, a: torch.Tensor, bs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(the gathered a, its product with each b)."""

    @abstractmethod
    def matmul_scatter(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: ...


class Sequential(Plain):
    def gather(self, a: torch.Tensor) -> torch.Tensor:
        whole = a.new_empty(dist.get_world_size() * a.shape[0], a.shape[1])
        dist.all_gather_into_tensor(whole, a)
        return whole

    def scatter(self, whole: torch.Tensor) -> torch.Tensor:
        shard = whole.new_empty(whole.shape[0] // dist.get_world_size(), whole.shape[1])
        dist.reduce_scatter_tensor(shard, whole)
        return shard

    def gather_matmul(self, a: torch.Tensor, bs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        whole = self.gather(a)
        return whole, [whole @ b for b in bs]

    def matmul_scatter(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.scatter(a @ b)


class Local(Sequential):
    """No communication: every rank's rows are taken to be this one's."""

    def __init__(self, x: torch.Tensor) -> None:
        self.whole = x.detach().repeat(dist.get_world_size(), 1)

    def gather(self, a: torch.Tensor) -> torch.Tensor:
        return self.whole

    def scatter(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[: whole.shape[0] // dist.get_world_size()]


class AsyncTp(Sequential):
    """PyTorch's. What the backward gathers for grad_w alone is NCCL's. The gathered a is always asked for: tp.py says why."""

    @property
    def group_name(self) -> str:
        group = dist.group.WORLD
        assert group is not None
        return group.group_name

    def gather_matmul(self, a: torch.Tensor, bs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        whole, outs = torch.ops.symm_mem.fused_all_gather_matmul(a, list(bs), 0, self.group_name)
        return whole, outs

    def matmul_scatter(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, self.group_name))


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: Plain, a: torch.Tensor, *bs: torch.Tensor) -> Tensors:
        ctx.way = way
        ctx.save_for_backward(a, *bs)
        return tuple(way.gather_matmul(a, bs)[1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        a, *bs = ctx.saved_tensors
        left = grads[0] if len(grads) == 1 else torch.cat(grads, 1)
        right = bs[0].t() if len(bs) == 1 else torch.cat([b.t() for b in bs])
        grad_a = ctx.way.matmul_scatter(left, right)
        whole = ctx.way.gather(a)
        return None, grad_a, *(whole.t() @ grad for grad in grads)


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: Plain, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.way = way
        ctx.save_for_backward(a, b)
        return way.matmul_scatter(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        whole, outs = ctx.way.gather_matmul(grads[0].contiguous(), [b.t()])
        return None, outs[0], a.t() @ whole


class Block:
    """One block's part on this rank: rows of x and of the gradient of y, columns and rows of the weights.

    Legend: m a rank's rows, H hidden size, w a rank's part of the width.
    """

    def __init__(self, rows: int) -> None:
        size = dist.get_world_size()
        m, w = rows // size, WIDTH // size
        self.x_mH = _normal(m, HIDDEN)
        self.grad_mH = _normal(m, HIDDEN).detach()
        self.joined_Hw = _normal(HIDDEN, 2 * w, HIDDEN**-0.5)
        self.apart_Hw = [part.detach().contiguous().requires_grad_() for part in self.joined_Hw.chunk(2, 1)]
        self.down_wH = _normal(w, HIDDEN, WIDTH**-0.5)

    def step(self, way: Way, *, joined: bool) -> Work:
        """Forward and backward: (y, the gradients of x, of w_gate and w_up, of w_down)."""
        into = [self.joined_Hw] if joined else self.apart_Hw

        def run() -> Tensors:
            outs = way.column(self.x_mH, into)
            gate, up = outs[0].chunk(2, 1) if joined else outs
            y = way.row(torch.nn.functional.silu(gate) * up, self.down_wH)
            return y, *torch.autograd.grad(y, (self.x_mH, *into, self.down_wH), self.grad_mH)

        return run

    def collectives(self) -> Work:
        """What one step communicates: three gathers and two scatters of [M, H]."""
        way = Sequential()
        whole = way.gather(self.x_mH.detach())

        def run() -> None:
            for _ in range(3):
                way.gather(self.grad_mH)
            for _ in range(2):
                way.scatter(whole)

        return run

    def works(self, specs: Sequence[str]) -> dict[str, Work]:
        """Everything that is timed, by name."""
        found: dict[str, Work] = {}
        found_ways = {"sequential": Sequential(), "async_tp": AsyncTp()} | {spec: Weft(spec) for spec in specs}
        for name, way in found_ways.items():
            found[name] = self.step(way, joined=False)
            found[f"{name} joined"] = self.step(way, joined=True)
        found["computation"] = self.step(Local(self.x_mH), joined=True)
        found["communication"] = self.collectives()
        return found


def _normal(rows: int, cols: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16) * scale).requires_grad_()


def _parts(result: object) -> Tensors:
    """(y, gradients), those of w_gate and w_up in one."""
    y, grad_x, *into, grad_down = cast(Tensors, result)
    return y, grad_x, torch.cat(into, 1), grad_down


def checks(expected: object) -> Callable[[str, object], None]:
    """Compare a step's result and gradients with sequential's."""
    labels = ("y", "gradient of x", "gradient of w_gate, w_up", "gradient of w_down")
    compare = [close_to(part.detach().float()) for part in _parts(expected)]

    def check(name: str, result: object) -> None:
        if name not in ("computation", "communication"):
            for label, one, part in zip(labels, compare, _parts(result), strict=True):
                one(f"{name}: {label}", part.detach())

    return check


def measured(rows: int, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One size: a JSON line for each mode, as it is done. What fails in one mode may do in another."""
    torch.manual_seed(dist.get_rank())
    block, specs = Block(rows), arguments.specs.split(",")
    works = block.works(specs)
    check = checks(together("sequential", works["sequential"]))
    for mode in arguments.modes.split(","):
        needed = ("sequential", "computation", "communication")
        times, missing = trial(works, [mode], check=check, needed=needed, rounds=arguments.rounds, repeat=REPEAT)
        case = f"{MODEL} MLP M={rows}"
        line = row(bench="end_to_end", op="mlp", case=case, dtype="bfloat16", mode=mode, arguments=arguments)
        yield line | figures(times[mode], specs) | {"missing": missing}


def figures(times: dict[str, Times], specs: Sequence[str]) -> dict[str, Any]:
    us = {name: t.us for name, t in times.items()}

    def best(names: Sequence[str]) -> str | None:
        """The fastest of these methods, in either layout."""
        return min((m for name in names for m in (name, f"{name} joined") if m in us), key=lambda m: us[m], default=None)

    def fastest_us(*names: str) -> float | None:
        name = best(names)
        return us[name] if name else None

    schedule = best(specs)
    line = {
        "schedule": schedule,
        "sequential_us": fastest_us("sequential"),
        "communication_us": us["communication"],
        "computation_us": us["computation"],
        "ideal_us": max(us["communication"], us["computation"]),
        "overlapped_us": fastest_us(*specs),
        "auto_us": fastest_us("auto"),
        "candidates": {name: value for name, value in us.items() if name not in ("communication", "computation")},
        "peers": {"async_tp": fastest_us("async_tp")} if best(["async_tp"]) else {},
    }
    hosts = {"sequential": best(["sequential"]), "async_tp": best(["async_tp"]), "overlapped": schedule}
    return line | {"host_us": {label: times[name].host_us for label, name in hosts.items() if name}}


def sentence(line: Mapping[str, Any]) -> str:
    text = f"{line['case']} {line['mode']:5} comp {line['computation_us']:.0f} comm {line['communication_us']:.0f}"
    if line["overlapped_us"]:
        over = line["sequential_us"] / line["overlapped_us"]
        share = line["ideal_us"] / line["overlapped_us"]
        text += f" {line['schedule']}: {over:.2f}x sequential, {share:.2f} of ideal"
        if "async_tp" in line["peers"]:
            text += f", {line['peers']['async_tp'] / line['overlapped_us']:.2f}x async TP"
    return text + " | " + " ".join(f"{name}={us:.0f}" for name, us in line["candidates"].items())


def main() -> None:
    options = parser(__doc__, rounds=ROUNDS, modes="eager,graph")
    options.add_argument("--rows", default=",".join(map(str, ROWS)), help="M, with commas (%(default)s)")
    options.add_argument("--specs", default=",".join(SPECS), help="weft's schedules, with commas (%(default)s)")
    arguments = options.parse_args()
    for spec in arguments.specs.split(","):
        if spec != "auto":
            schedules.parse(spec)
    run_parts([int(rows) for rows in arguments.rows.split(",")], measured, sentence, arguments)


if __name__ == "__main__":
    main()
