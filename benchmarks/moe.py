"""How much of a Mixtral layer's exchange do experts over ranks hide, forward and with the backward?

    torchrun --nproc-per-node 4 benchmarks/moe.py --json benchmarks/results/moe.jsonl
    torchrun --nproc-per-node 4 benchmarks/moe.py --only forward --modes eager

Protocol: measure.py's; bf16, normal data; results and gradients are compared with torch's before anything is timed. One layer
of Mixtral 8x7B (hidden 4096, width 14336, 8 experts, 2 of them for each token), of which each rank has its share of experts and
of tokens. Routing is drawn uniformly, and given: sorting rows by expert is in every time, the router is not.

Baselines of the same run: `torch known`, all_to_all_single and torch._grouped_mm with splits that the host knows, which no real
program does, and which a CUDA graph needs; `torch`, the real program, whose host waits for the counts; computation: the two
grouped matmuls and the activation of rows that have arrived; communication: the two exchanges, and those of the backward.
ideal = the larger of computation and communication. overlapped = weft's, with --capacity times the rows that a rank sends.
Traps: rows arrive by rank, and are put in the order of experts for a grouped matmul, and back, in torch's time; weft's
activation also passes over the empty rows of its capacity, in its time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import measure
import torch
import torch.distributed as dist
from measure import Failed, Times, Work, append, close_to, parser, release, row, say, start, stop, together, trial

from weft.nn.experts import Routing, experts_apart

ROUNDS, REPEAT, ALARM_S = 7, 2, 55
HIDDEN, WIDTH, EXPERTS, TOP_K = 4096, 14336, 8, 2
Tensors = tuple[torch.Tensor, ...]


class _Exchange(torch.autograd.Function):
    """all_to_all_single of rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, got: list[int], sent: list[int]) -> torch.Tensor:
        ctx.got, ctx.sent = got, sent
        return _exchanged(rows, got, sent)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _exchanged(grads[0].contiguous(), ctx.sent, ctx.got), None, None


def _exchanged(rows: torch.Tensor, got: list[int], sent: list[int]) -> torch.Tensor:
    landed = rows.new_empty(sum(got), rows.shape[1])
    dist.all_to_all_single(landed, rows, got, sent)
    return landed


def act(hidden: torch.Tensor) -> torch.Tensor:
    gate, up = hidden.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


class Layer:
    """This rank's tokens and experts. Legend: T tokens, H hidden, F width, e experts of this rank."""

    def __init__(self, tokens: int, capacity: float) -> None:
        self.size, self.capacity = dist.get_world_size(), capacity
        own, mine = tokens // self.size, EXPERTS // self.size
        self.x_TH = _normal(own, HIDDEN)
        self.grad_TH = _normal(own, HIDDEN).detach()
        self.up_e2FH = _normal(mine, 2 * WIDTH, HIDDEN, scale=HIDDEN**-0.5)
        self.down_eHF = _normal(mine, HIDDEN, WIDTH, scale=WIDTH**-0.5)
        scores, self.index = torch.rand(own, EXPERTS, device="cuda").topk(TOP_K)
        self.weights = scores / scores.sum(1, keepdim=True)
        counts = Routing(self.index, EXPERTS).counts.view(self.size, mine)
        self.known = self._exchanged_counts(counts)
        self.arrived = _normal(sum(self.known[1]), HIDDEN)

    def _exchanged_counts(self, counts: torch.Tensor) -> tuple[list[int], list[int], torch.Tensor]:
        """(rows to each rank, rows from each rank, counts by rank that they come from and expert of this rank)."""
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        both = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        return both[0], both[1], arriving

    def theirs(self, *, known: bool) -> torch.Tensor:
        """torch's: a collective, a grouped matmul, one after the other."""
        routing = Routing(self.index, EXPERTS)
        sent, got, arriving = self.known if known else self._exchanged_counts(routing.counts.view(self.size, -1))
        rows = _Exchange.apply(routing.spread(self.x_TH), got, sent)
        order, offsets = self._by_expert(arriving, sum(got))
        made = torch.empty_like(rows).index_copy(0, order, self.experts(rows[order], offsets))
        return routing.gather(_Exchange.apply(made, sent, got), self.weights)

    def _by_expert(self, arriving: torch.Tensor, total: int) -> Tensors:
        """(where each row by expert has landed, where each expert's rows end)."""
        expert = torch.arange(arriving.shape[1], device="cuda").repeat(arriving.shape[0])
        of_row = torch.repeat_interleave(expert, arriving.flatten(), output_size=total)
        return of_row.argsort(stable=True), arriving.sum(0).cumsum(0).to(torch.int32)

    def experts(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        hidden = torch._grouped_mm(rows, self.up_e2FH.transpose(1, 2), offs=offsets)
        return torch._grouped_mm(act(hidden), self.down_eHF.transpose(1, 2), offs=offsets)

    def ours(self) -> torch.Tensor:
        group, routing = dist.group.WORLD, Routing(self.index, EXPERTS)
        assert group is not None
        into, out = self.up_e2FH.transpose(1, 2), self.down_eHF.transpose(1, 2)
        return experts_apart(self.x_TH, routing, self.weights, into, out, act, group, self.capacity)

    def computed(self) -> torch.Tensor:
        """As if rows had arrived."""
        return self.experts(self.arrived, self.known[2].sum(0).cumsum(0).to(torch.int32))

    def exchanges(self, count: int) -> Work:
        """That many exchanges of this layer's rows."""
        sent, got, _ = self.known
        rows = self.x_TH.detach().repeat(TOP_K, 1)

        def run() -> None:
            for _ in range(count):
                _exchanged(rows, got, sent)

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

    def works(self, part: str) -> dict[str, Work]:
        ways = {"torch known": lambda: self.theirs(known=True), "torch": lambda: self.theirs(known=False), "weft": self.ours}
        if part == "forward":
            made = {name: self.forward(make) for name, make in ways.items()}
            return made | {"computation": self.forward(self.computed), "communication": self.exchanges(2)}
        made = {name: self.step(make, self.x_TH) for name, make in ways.items()}
        return made | {"computation": self.step(self.computed, self.arrived), "communication": self.exchanges(4)}


def _normal(*extents: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*extents, device="cuda", dtype=torch.bfloat16) * scale).requires_grad_()


def checks(expected: object) -> Callable[[str, object], None]:
    """Compare results, and gradients where there are some, with torch's."""
    labels = ("y", "gradient of x", "gradient of gate and up", "gradient of down")
    compare = [close_to(part.detach().float()) for part in cast(Tensors, expected)]

    def check(name: str, result: object) -> None:
        if name not in ("computation", "communication"):
            for label, one, part in zip(labels, compare, cast(Tensors, result), strict=False):
                one(f"{name}: {label}", part.detach())

    return check


def measured(part: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A JSON line for each mode. In a graph the host knows all counts."""
    torch.manual_seed(dist.get_rank())
    works = Layer(arguments.tokens, arguments.capacity).works(part)
    check = checks(together("torch known", works["torch known"]))
    for mode in arguments.modes.split(","):
        timed = {name: work for name, work in works.items() if (name, mode) != ("torch", "graph")}
        needed = ("torch known", "computation", "communication")
        times, missing = trial(timed, [mode], check=check, needed=needed, rounds=arguments.rounds, repeat=REPEAT)
        case = f"mixtral-8x7b layer tokens={arguments.tokens} {part}"
        line = row(bench="moe", op="expert_parallel", case=case, dtype="bfloat16", mode=mode, arguments=arguments)
        yield line | figures(times[mode]) | {"capacity": arguments.capacity, "missing": missing}


def figures(times: Mapping[str, Times]) -> dict[str, Any]:
    us = {name: t.us for name, t in times.items()}
    return {
        "schedule": "splits",
        "sequential_us": us["torch known"],
        "communication_us": us["communication"],
        "computation_us": us["computation"],
        "ideal_us": max(us["communication"], us["computation"]),
        "overlapped_us": us.get("weft"),
        "peers": {name: us[name] for name in ("torch known", "torch") if name in us},
        "host_us": {name: t.host_us for name, t in times.items()},
    }


def sentence(line: Mapping[str, Any]) -> str:
    ours_us, peers = line["overlapped_us"], line["peers"]
    told = " ".join(f"{name}: {us:.0f}" for name, us in peers.items())
    gain = f"weft {ours_us:.0f}, " + ", ".join(f"{us / ours_us:.2f}x {name}" for name, us in peers.items()) if ours_us else "-"
    parts = f"comp {line['computation_us']:.0f} comm {line['communication_us']:.0f} {told}"
    return f"{line['case']} {line['mode']:5} {parts} | {gain}"


def main() -> None:
    options = parser(__doc__, rounds=ROUNDS, modes="eager,graph")
    options.add_argument("--only", default="forward,step", help="parts, with commas (%(default)s)")
    options.add_argument("--tokens", type=int, default=8192, help="of all ranks (%(default)s)")
    options.add_argument("--capacity", type=float, default=1.25, help="rows that fit, over those sent (%(default)s)")
    arguments = options.parse_args()
    parts: Sequence[str] = arguments.only.split(",")
    for part in parts:
        if part not in ("forward", "step"):
            raise ValueError(f"--only has {part!r}; use forward, step")
    measure.ALARM_S = ALARM_S
    start()
    for part in parts:
        try:
            for line in measured(part, arguments):
                say(sentence(line))
                append(arguments.json, line)
        except Failed as failed:
            say(f"LEFT OUT {part}: {failed}", file=sys.stderr)
        release()
    stop()


if __name__ == "__main__":
    main()
