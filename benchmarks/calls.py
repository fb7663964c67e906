"""What do single calls cost: the first ones of a program, and those that bring a row count which was never called before?

    torchrun --nproc-per-node 2 -m benchmarks.calls row_counts --json out/row_counts.jsonl
    export WEFT_CACHE_DIR=/tmp/plans TRITON_CACHE_DIR=/tmp/triton
    torchrun --nproc-per-node 2 -m benchmarks.calls first_call --label "nothing cached" --json out/first_call.jsonl
    torchrun --nproc-per-node 2 -m benchmarks.calls first_call --label restarted --json out/first_call.jsonl

first_call: seconds and GPU memory. The four matmuls of a Llama 3 8B layer at 8192 tokens (bfloat16), each called for the first
time in this process by `schedule="auto"`, then once more. A first call compiles kernels, measures a few schedules and binds the
fastest. Memory is what is taken of the GPU, less what torch's allocator has reserved: weft's symmetric buffers, flags and
streams, and the kernels and graphs that were loaded meanwhile. Nothing else may run on the GPU. Run it twice with the same
empty folders for WEFT_CACHE_DIR and TRITON_CACHE_DIR: the second run is what a restarted program pays, which finds the choices
and the compiled kernels of the first.

row_counts: serving calls with another number of tokens at nearly every step. `auto` is measured at the row counts OWN, which
get programs of their own; then it is called with many in the doubling LOW to HIGH, each of them three times, and with some of
them by name, which binds a program of its own. A sample is one call; LEADS calls of a known row count go before it, so that the
host is ahead of the GPU.

    first    the call that brings a new row count, where the program that it runs by was bound before
    chosen   the host's share of that until the program is found: all that a known row count does without
    again    the next call of the same rows
    moved    the one after that, of another a
    bound    as first, where the bucket's program has to be bound
    named    the first call of a new row count by name, which binds a program of its own
    own      the next one by name: what the copies of rows cost

Protocol of row_counts: medians of the slowest rank's times, of the GPU by events, of the host until Python goes on; eager.
Trap: a call whose tensors lie where none lay is enqueued step by step.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

import weft
from benchmarks import measure
from benchmarks.measure import Failed, alarm, append, parser, release, row, say, start, stop
from benchmarks.rows import sentence
from weft.runtime.groups import GROUPS
from weft.runtime.programs import Programs

HIDDEN, WIDTH, HEADS, TOKENS = 4096, 14336, 6144, 8192
"""Of Llama 3 8B."""
OWN = (1024, 1536, 2048, 3072)
LOW, HIGH = 2048, 4096
COUNTS = 60
LEADS = 2
N, K = 28672, 8192
"""Of Llama 3 70B's MLP."""


def drawn(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16).mul_(scale)


def layer() -> dict[str, Callable[[], object]]:
    """The layer's matmuls on this rank, by name."""
    size = dist.get_world_size()
    tokens, both = TOKENS // size, 2 * WIDTH // size
    shapes = {
        "qkv": (weft.all_gather_matmul, tokens, HIDDEN, HEADS // size),
        "o": (weft.matmul_reduce_scatter, TOKENS, HIDDEN // size, HIDDEN),
        "gate, up": (weft.all_gather_matmul, tokens, HIDDEN, both),
        "down": (weft.matmul_reduce_scatter, TOKENS, WIDTH // size, HIDDEN),
    }
    return {name: partial(operator, drawn(m, k, k**-0.5), drawn(k, n, n**-0.5)) for name, (operator, m, k, n) in shapes.items()}


def seconds(call: Callable[[], object]) -> float:
    """Of the slowest rank, until the GPU is done."""
    torch.cuda.synchronize()
    dist.barrier()
    begun = time.perf_counter()
    call()
    torch.cuda.synchronize()
    took = torch.tensor(time.perf_counter() - begun)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def outside_torch() -> int:
    """Bytes of the GPU that are taken, but not by torch's allocator."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def first_call(arguments: argparse.Namespace) -> list[str]:
    calls = layer()
    warm = drawn(256, 256)
    warm @ warm  # cuBLAS and NCCL are loaded by any program
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    before = outside_torch()
    first_s = {name: seconds(call) for name, call in calls.items()}
    again_s = {name: seconds(call) for name, call in calls.items()}
    held, label = outside_torch() - before, arguments.label
    chosen = {str(choice.problem): choice.spec for choice in weft.choices()}
    extra = {"first_s": first_s, "again_s": again_s, "held_bytes": held, "chosen": chosen}
    about = partial(row, bench="first_call", op="layer", case="llama3-8b layer", dtype="bfloat16", mode="eager")
    append(arguments.json, about(state=label, extra=extra, arguments=arguments))
    for name, took in first_s.items():
        say(f"{label}: {name}: first call {took:.2f} s, second {again_s[name] * 1e3:.2f} ms")
    say(f"{label}: all four {sum(first_s.values()):.1f} s; {held / 2**20:.0f} MiB of GPU memory held")
    return []


class Sample(NamedTuple):
    """us of one call, on the slowest rank: of the GPU, and until Python goes on."""

    us: float
    host_us: float


def sample(call: Callable[[], object], lead: Callable[[], object]) -> Sample:
    torch.cuda.synchronize()
    dist.barrier()
    for _ in range(LEADS):
        lead()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    called = time.perf_counter()
    call()
    host_us = 1e6 * (time.perf_counter() - called)
    end.record()
    end.synchronize()
    times = [(0.0, 0.0)] * dist.get_world_size()
    dist.all_gather_object(times, (1e3 * begin.elapsed_time(end), host_us))
    return Sample(*map(max, zip(*times, strict=True)))


@contextmanager
def choosing() -> Iterator[list[float]]:
    """us of the host's in finding what runs a call, of those that are new."""
    found: list[float] = []
    agree = Programs._agree

    def clocked(self: Programs, *given: Any) -> Any:
        begun = time.perf_counter()
        try:
            return agree(self, *given)
        finally:
            found.append(1e6 * (time.perf_counter() - begun))

    with mock.patch.object(Programs, "_agree", clocked):
        yield found


def slowest_median(own: list[float]) -> float:
    """Of each rank's samples."""
    medians = [0.0] * dist.get_world_size()
    dist.all_gather_object(medians, statistics.median(own))
    return max(medians)


def bound() -> int:
    group: Any = dist.group.WORLD
    return len(GROUPS.state(group.group_name).bound())


@torch.no_grad()
def new_rows(op: str) -> dict[str, Any]:
    """Medians of one operator's calls, as fields of a row."""
    size = dist.get_world_size()
    gather = op == "all_gather_matmul"
    k, n = (K, N // size) if gather else (N // size, K)
    b, operator = drawn(k, n), getattr(weft, op)

    def call(rows: int, schedule: str) -> Callable[[], object]:
        a = drawn(rows // size if gather else rows, k)
        return lambda: operator(a, b, schedule=schedule)

    for rows in OWN:
        call(rows, "auto")()
        alarm()
    spec = weft.choices()[OWN.index(LOW)].spec
    lead = call(LOW, "auto")
    shards = random.Random(1).sample(range(LOW // size + 1, HIGH // size), COUNTS)
    found: dict[str, list[Sample]] = {"first": [], "again": [], "moved": [], "bound": [], "named": [], "own": []}
    chosen: list[float] = []
    for shard in shards:
        before = bound()
        one = call(shard * size, "auto")
        with choosing() as us:
            first = sample(one, lead)
        found["bound" if bound() > before else "first"].append(first)
        chosen += us if bound() == before else []
        found["again"].append(sample(one, lead))
        found["moved"].append(sample(call(shard * size, "auto"), lead))
        alarm()
    for shard in shards[: COUNTS // 4]:
        one = call(shard * size, spec)
        found["named"].append(sample(one, lead))
        found["own"].append(sample(one, lead))
        alarm()
    medians = {name: Sample(*map(statistics.median, zip(*some, strict=True))) for name, some in found.items() if some}
    us = {f"weft/{name}": round(median.us, 1) for name, median in medians.items()}
    host_us = {f"weft/{name}": round(median.host_us, 1) for name, median in medians.items()}
    host_us["weft/chosen"] = round(slowest_median(chosen), 1)
    return {"us": us, "host_us": host_us, "chosen": spec, "extra": {"programs": bound()}}


def row_counts(arguments: argparse.Namespace) -> list[str]:
    """Measure both operators; those that were left out."""
    left_out = []
    for op in ("all_gather_matmul", "matmul_reduce_scatter"):
        try:
            found = new_rows(op)
        except Failed as failed:
            say(f"LEFT OUT {failed}", file=sys.stderr)
            left_out.append(op)
            continue
        case = f"rows {LOW} to {HIGH}, N={N} K={K}"
        made = row(bench="row_counts", op=op, case=case, dtype="bfloat16", mode="eager", arguments=arguments, **found)
        append(arguments.json, made)
        say(sentence(made), f"| {made.extra['programs']} programs")
        release()
    return left_out


PARTS = {"first_call": first_call, "row_counts": row_counts}


def main() -> None:
    options = parser(__doc__, rounds=1, modes="eager")
    options.add_argument("part", choices=tuple(PARTS))
    options.add_argument("--label", default="", help="first_call: what is cached when the run begins")
    arguments = options.parse_args()
    if arguments.part == "first_call":
        measure.PLANS = os.environ.get("WEFT_CACHE_DIR", "")
    start()
    stop(PARTS[arguments.part](arguments))


if __name__ == "__main__":
    main()
