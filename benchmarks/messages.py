"""What does a message between nodes take, by NCCL and by NVSHMEM's put-with-signal, alone and beside a matmul?

Every rank is a node. It sends rows to one other rank and receives as many from it, by what weft's executor uses for a step of
a schedule: CudaWire and Mail. beside: on a stream of its own, while cuBLAS multiplies 4096^3 on the other.

Protocol: measure.py's; graphs; what arrives is compared with what was sent. nvshmem puts straight from the source, since the
peer's memory is mapped; staged does as behind an adapter, by torch's put and wait, from a slot of the sender's. Traps: here the
"network" is NVLink, so the rate and latency of an adapter are no part of it. Beside a matmul that fills the SMs, NCCL's blocks
wait; weft's own kernels leave 16.

    timeout 60 torchrun --nproc-per-node 2 benchmarks/messages.py --json benchmarks/results/messages.jsonl
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any

import measure
import torch
import torch.distributed as dist
from measure import Failed, Times, Work, WrongResult, append, parser, row, say, start, stop, trial

from weft.comm.team import Team
from weft.core.problem import Problem
from weft.core.schedule import Buffer, Lane, Receive, Region, Schedule, Send, SendReceive
from weft.runtime.bindings import Bindings, Where
from weft.runtime.cuda_space import CudaSpace
from weft.runtime.nvshmem import Heap
from weft.runtime.nvshmem_wire import Mail

ROUNDS, REPEAT = 7, 10
measure.ALARM_S = 40
SIZES = tuple(1 << power for power in (12, 16, 20, 24, 26))
COLS = 512
EXTENT = 4096


def exchanging(world_size: int, rows: int) -> Schedule:
    """Each rank sends `rows` rows to the one half way round, and receives as many from the one that sends to it."""
    half, whole = world_size // 2, ((0, rows), (0, COLS))

    def lane(rank: int) -> Lane:
        send = Send(Region("sent", rank, *whole), (rank + half) % world_size)
        got = Receive(Region("landed", rank, *whole), (rank - half) % world_size)
        return Lane(name="network", kind="network", steps=(SendReceive(sends=(send,), receives=(got,)),))

    nodes = (1,) * world_size
    problem = Problem(op="matmul_all_to_all", m=rows, n=COLS, k=COLS, world_size=world_size, nodes=nodes)
    buffers = [
        Buffer(name=name, kind="local", rows=(rows,) * world_size, cols=(COLS,) * world_size) for name in ("sent", "landed")
    ]
    ranks = tuple((lane(rank),) for rank in range(world_size))
    return Schedule(problem=problem, name="exchange", buffers=tuple(buffers), ranks=ranks)


class Exchange:
    """One size's messages on this rank, by each transport."""

    def __init__(self, space: CudaSpace, heap: Heap, nbytes: int) -> None:
        rank, size = space.team.rank, space.team.world_size
        rows = nbytes // (2 * COLS)
        schedule = exchanging(size, rows)
        self.sent = torch.randn(rows, COLS, device="cuda", dtype=torch.bfloat16)
        self.landed = torch.empty_like(self.sent)
        self._space, self._to, self._source = space, (rank + size // 2) % size, (rank - size // 2) % size
        self._bindings = Bindings()
        self._bindings.bind("sent", rank, self.sent)
        self._bindings.bind("landed", rank, self.landed)
        ((_, lane, position, step),) = [entry for entry in schedule if entry[0] == rank]
        self._where = Where(rank, lane.name, position, step)
        self.mail, self.staging = (Mail(space, heap, schedule, torch.bfloat16) for _ in range(2))
        self.staging.mapped = ()

    def by_nccl(self) -> None:
        assert self._space.wire
        self._space.wire.exchange([(self.sent, self._to)], [(self.landed, self._source)])

    def by_nvshmem(self) -> None:
        self.mail.exchange(self._where, self._bindings)

    def by_staged(self) -> None:
        self.staging.exchange(self._where, self._bindings)

    def close(self) -> None:
        self.mail.close()
        self.staging.close()


def works_of(exchange: Exchange, side: torch.cuda.Stream) -> dict[str, Work]:
    """Each transport alone and beside a matmul, and the matmul alone."""
    a, b, out = (torch.randn(EXTENT, EXTENT, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def matmul() -> None:
        torch.mm(a, b, out=out)

    def alone(send: Work) -> Work:
        return lambda: (send(), exchange.landed)[1]

    def beside(send: Work) -> Work:
        def work() -> torch.Tensor:
            here = torch.cuda.current_stream()
            side.wait_stream(here)
            matmul()
            with torch.cuda.stream(side):
                send()
            here.wait_stream(side)
            return exchange.landed

        return work

    transports = {"nccl": exchange.by_nccl, "nvshmem": exchange.by_nvshmem, "staged": exchange.by_staged}
    found: dict[str, Work] = {"matmul": matmul}
    found |= {name: alone(send) for name, send in transports.items()}
    return found | {f"{name} beside": beside(send) for name, send in transports.items()}


def measured(exchange: Exchange, case: str, side: torch.cuda.Stream, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One size: its JSON lines."""
    sent = [torch.empty_like(exchange.sent) for _ in range(dist.get_world_size())]
    dist.all_gather(sent, exchange.sent)
    expected = sent[(dist.get_rank() - dist.get_world_size() // 2) % dist.get_world_size()]

    def check(name: str, result: object) -> None:
        if name != "matmul" and not torch.equal(expected, result):  # type: ignore[arg-type]
            raise WrongResult(f"{name}: what has landed is not what was sent")
        exchange.landed.zero_()

    works, modes = works_of(exchange, side), arguments.modes.split(",")
    times, missing = trial(works, modes, check=check, needed=("matmul",), rounds=arguments.rounds, repeat=REPEAT)
    lines = []
    for mode, us in times.items():
        line = row(bench="messages", op="send_receive", case=case, dtype="bfloat16", mode=mode, arguments=arguments)
        lines.append(line | {"us": {name: found.us for name, found in us.items()}, "missing": missing})
        say(sentence(case, mode, us))
    return lines


def sentence(case: str, mode: str, times: Mapping[str, Times]) -> str:
    return f"{case:>12} {mode:5} " + ", ".join(f"{name} {found.us:.1f}" for name, found in times.items())


def main() -> None:
    arguments = parser(__doc__, rounds=ROUNDS, modes="graph").parse_args()
    os.environ |= {"WEFT_RANKS_PER_NODE": "1", "WEFT_NODE_TRANSPORT": "nccl"}
    device = torch.device("cuda", start())
    group = dist.group.WORLD
    assert group is not None
    team = Team(group)
    space = CudaSpace(team, device)
    heap, side = Heap.of(team, device), torch.cuda.Stream()
    left_out = []
    for nbytes in SIZES:
        exchange = Exchange(space, heap, nbytes)
        try:
            for line in measured(exchange, f"{nbytes >> 10} KiB", side, arguments):
                append(arguments.json, line)
        except Failed as failed:
            say(f"LEFT OUT {nbytes} bytes: {failed}", file=sys.stderr)
            left_out.append(f"{nbytes} bytes")
        torch.cuda.synchronize()
        exchange.close()
    space.close()
    team.close()
    stop(left_out)


if __name__ == "__main__":
    main()
