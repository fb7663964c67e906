"""How much of a Mixtral layer's exchange do experts over ranks hide, forward and with the backward?

    torchrun --nproc-per-node 2 -m benchmarks.moe --json benchmarks/results/h200x2/moe.jsonl
    torchrun --nproc-per-node 4 -m benchmarks.moe --only forward --modes eager
    torchrun --nproc-per-node 4 -m benchmarks.moe --only pieces --modes graph

Protocol: measure.py's; bf16, normal data; results and gradients are compared with torch's before anything is timed. One layer
of Mixtral 8x7B (hidden 4096, width 14336, 8 experts, 2 of them for each token), of which each rank has its share of experts and
of tokens. Routing is drawn uniformly, and given: sorting rows by expert is in every time, the router is not.

Baselines of the same run: `torch known`, all_to_all_single and torch._grouped_mm with splits that the host knows, which no real
program does, and which a CUDA graph needs; `torch`, the real program, whose host waits for the counts; `torch, own kernels`,
splits known, with weft's kernels for rows, activation and sum, so that only exchanges and matmuls differ; computation: the two
grouped matmuls and the activation of rows that have arrived, by torch; communication: the two exchanges, and those of the
backward. ideal = the larger of computation and communication. overlapped = weft's, with --capacity times the rows that a rank
sends. pieces: what a forward consists of, each by itself.
Traps: rows arrive by rank, and are put in the order of experts for a grouped matmul, and back, in torch's time; torch's
activation is two kernels and its sum of a token's rows four, as eager PyTorch has them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import torch
import torch.distributed as dist

from benchmarks import by_hand, traces
from benchmarks.by_hand import Link
from benchmarks.measure import ALONE, Work, close_to, parser, row, together, trial
from benchmarks.rows import Row
from benchmarks.runner import add_profile_option, get_profile_folder, parse_only, run_parts
from weft.models.experts import ExpertLimits, Routing, run_experts_on_ranks, swiglu
from weft.ops import all_to_all_matmul, matmul_all_to_all
from weft.ops.ragged_all_to_all import ragged_gated

ROUNDS, REPEAT, ALARM_S = 7, 2, 55
HIDDEN, WIDTH, EXPERTS, TOP_K = 4096, 14336, 8, 2
PARTS = ("forward", "step", "pieces")
Tensors = tuple[torch.Tensor, ...]


class Layer:
    """This rank's tokens and experts. Legend: T tokens, H hidden, F width, e experts of this rank."""

    def __init__(self, tokens: int, capacity: float) -> None:
        self.size, self.capacity, self.limits = dist.get_world_size(), capacity, ExpertLimits(capacity=capacity)
        self.link = Link.of()
        own, mine = tokens // self.size, EXPERTS // self.size
        self.x_TH = _normal(own, HIDDEN)
        self.grad_TH = _normal(own, HIDDEN).detach()
        self.up_e2FH = _normal(mine, 2 * WIDTH, HIDDEN, scale=HIDDEN**-0.5)
        self.down_eHF = _normal(mine, HIDDEN, WIDTH, scale=WIDTH**-0.5)
        scores, self.index = torch.rand(own, EXPERTS, device="cuda").topk(TOP_K)
        self.weights = scores / scores.sum(1, keepdim=True)
        counts = Routing(self.index, EXPERTS).counts.view(self.size, mine)
        self.known = self.link.splits(counts)
        self.arrived = _normal(sum(self.known[1]), HIDDEN)

    def theirs(self, *, known: bool, own_kernels: bool = False) -> torch.Tensor:
        """torch's: a collective, a grouped matmul, one after the other."""
        routing = (Routing if own_kernels else by_hand.Plain)(self.index, EXPERTS)
        splits = self.known if known else self.link.splits(routing.counts.view(self.size, -1))
        return by_hand.exchanged(self.x_TH, routing, self.weights, splits, partial(self.experts, own_kernels), self.link)

    def experts(self, own_kernels: bool, rows: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        act = partial(swiglu, counts=counts) if own_kernels else by_hand.swiglu
        return by_hand.multiply_experts(rows, offsets, self.up_e2FH, self.down_eHF, act)

    def ours(self) -> torch.Tensor:
        group, routing = dist.group.WORLD, Routing(self.index, EXPERTS)
        assert group is not None
        into, out = self.up_e2FH.transpose(1, 2), self.down_eHF.transpose(1, 2)
        return run_experts_on_ranks(self.x_TH, routing, self.weights, into, out, swiglu, group, self.limits)

    def computed(self) -> torch.Tensor:
        """As if rows had arrived."""
        return self.experts(False, self.arrived, self._offsets, self.known[2])

    @property
    def _offsets(self) -> torch.Tensor:
        return self.known[2].sum(0).cumsum(0).to(torch.int32)

    def exchanges(self, count: int) -> Work:
        """That many exchanges of this layer's rows."""
        sent, got, _ = self.known
        rows = self.x_TH.detach().repeat(TOP_K, 1)

        def run() -> None:
            for _ in range(count):
                self.link.exchange(rows, got, sent)

        return run

    def forward(self, make: Callable[[], torch.Tensor]) -> Work:
        def run() -> Tensors:
            with torch.no_grad():
                return (make(),)

        return run

    def step(self, make: Callable[[], torch.Tensor], x: torch.Tensor) -> Work:
        """Forward and backward: (y, gradients of x and both weights)."""

        def run() -> Tensors:
            y = make()
            grad = self.grad_TH if y.shape == self.grad_TH.shape else torch.ones_like(y)
            return y, *torch.autograd.grad(y, (x, self.up_e2FH, self.down_eHF), grad)

        return run

    def pieces(self) -> dict[str, Callable[[], torch.Tensor]]:
        """What a forward consists of, weft's and torch's; without gradients."""
        routing, plain = Routing(self.index, EXPERTS), by_hand.Plain(self.index, EXPERTS)
        x, offsets, most = self.x_TH.detach(), self._offsets, int(self.capacity * self.index.numel())
        into, out = self.up_e2FH.detach().transpose(1, 2), self.down_eHF.detach().transpose(1, 2)
        rows, splits = routing.spread(x), routing.counts.view(self.size, -1)
        hidden, arrived, *_ = all_to_all_matmul(rows, into, splits=splits, max_rows=most)
        middle = swiglu(hidden, arrived)
        home = matmul_all_to_all(middle, out, splits=arrived, max_rows=len(rows))[0]
        found, had = self.arrived.detach(), hidden[: sum(self.known[1])]
        return {
            "sort": lambda: Routing(self.index, EXPERTS).order,
            "torch sort": lambda: by_hand.Plain(self.index, EXPERTS).order,
            "spread": lambda: routing.spread(x),
            "torch spread": lambda: plain.spread(x),
            "dispatch": lambda: all_to_all_matmul(rows, into, splits=splits, max_rows=most)[0],
            "torch exchange": lambda: self.link.exchange(rows, self.known[1], self.known[0]),
            "torch up": lambda: torch._grouped_mm(found, into, offs=offsets),
            "dispatch, gated": lambda: ragged_gated(rows, into, None, splits, most)[0],
            "swiglu": lambda: swiglu(hidden, arrived),
            "torch act": lambda: by_hand.swiglu(had),
            "combine": lambda: matmul_all_to_all(middle, out, splits=arrived, max_rows=len(rows))[0],
            "torch down": lambda: torch._grouped_mm(middle[: len(found)], out, offs=offsets),
            "gather": lambda: routing.gather(home, self.weights),
            "torch gather": lambda: plain.gather(home, self.weights),
        }

    def works(self, part: str) -> dict[str, Work]:
        if part == "pieces":
            with torch.no_grad():
                pieces = {
                    f"{'computation' if name.startswith('torch') else 'weft'}/{name}": self.forward(make)
                    for name, make in self.pieces().items()
                }
            return pieces | {"computation/torch": self.forward(self.computed), "communication/default": self.exchanges(2)}
        ways = {
            "sequential/torch known": lambda: self.theirs(known=True),
            "weft/sequential": lambda: self.theirs(known=True, own_kernels=True),
            "sequential/torch": lambda: self.theirs(known=False),
            "weft/splits": self.ours,
        }
        if part == "forward":
            made = {name: self.forward(make) for name, make in ways.items()}
            return made | {"computation/torch": self.forward(self.computed), "communication/default": self.exchanges(2)}
        made = {name: self.step(make, self.x_TH) for name, make in ways.items()}
        return made | {"computation/torch": self.step(self.computed, self.arrived), "communication/default": self.exchanges(4)}


def _normal(*extents: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*extents, device="cuda", dtype=torch.bfloat16) * scale).requires_grad_()


def checks(expected: object) -> Callable[[str, object], None]:
    """Compare results, and gradients where there are some, with torch's."""
    labels = ("y", "gradient of x", "gradient of gate and up", "gradient of down")
    compare = [close_to(part.detach().float()) for part in cast(Tensors, expected)]

    def check(name: str, result: object) -> None:
        if not name.startswith(ALONE):
            for label, one, part in zip(labels, compare, cast(Tensors, result), strict=False):
                one(f"{name}: {label}", part.detach())

    return check


def measured(part: str, arguments: argparse.Namespace) -> Iterator[Row]:
    """A row for each mode. In a graph the host knows all counts."""
    torch.manual_seed(dist.get_rank())
    works = Layer(arguments.tokens, arguments.capacity).works(part)
    whole = part != "pieces"
    case = f"mixtral-8x7b layer tokens={arguments.tokens} {part}"
    made = partial(row, op="expert_parallel", case=case, dtype="bfloat16", arguments=arguments)
    if arguments.profile:
        names = {"torch, own kernels": "weft/sequential", "weft": "weft/splits", "computation": "computation/torch"}
        wanted = {title: works[name] for title, name in names.items() if name in works}
        for found in traces.profiled(wanted, part, get_profile_folder(arguments)):
            yield made(bench="traces", mode="eager", extra=found)
        return
    check = checks(together("torch known", works["sequential/torch known"])) if whole else lambda name, result: None
    for mode in arguments.modes.split(","):
        timed = {name: work for name, work in works.items() if (name, mode) != ("sequential/torch", "graph")}
        needed = ("sequential/torch known", "computation/torch", "communication/default") if whole else ()
        times, missing = trial(timed, [mode], check=check, needed=needed, rounds=arguments.rounds, repeat=REPEAT)
        yield made(bench="moe", mode=mode, times=times[mode], missing=missing, extra={"capacity": arguments.capacity})


def main() -> None:
    options = parser(__doc__, rounds=ROUNDS, modes="eager,graph")
    options.add_argument("--only", default="forward,step", help="parts, with commas (%(default)s)")
    options.add_argument("--tokens", type=int, default=8192, help="of all ranks (%(default)s)")
    options.add_argument("--capacity", type=float, default=1.25, help="rows that fit, over those sent (%(default)s)")
    add_profile_option(options)
    arguments = options.parse_args()
    run_parts(parse_only(arguments.only, PARTS), measured, arguments, alarm_s=ALARM_S)


if __name__ == "__main__":
    main()
