"""What does a row count cost that was never called before? Of `auto`, padded to a bucket, and of a schedule by name.

Serving calls with another number of tokens at nearly every step. `auto` is measured at the row counts OWN, which get programs
of their own; then it is called with many in the doubling LOW to HIGH, each of them three times, and with some of them by name,
which binds a program of its own. A sample is one call; LEADS calls of a known row count go before it, so that the host is ahead
of the GPU.

    first    the call that brings a new row count, where the program that it runs by was bound before (what binds it is apart)
    chosen   of the host's, until that program is found: all that a known row count does without
    again    the next call of the same rows
    moved    the one after that, of another a
    bound    the same where the bucket's program has to be bound
    named    the first call of a new row count by name, which binds a program of its own
    own      the next one by name: what the copies of rows cost

    torchrun --nproc-per-node 2 -m benchmarks.row_counts --json benchmarks/results/row_counts.jsonl

Protocol: medians of the slowest rank's times, of the GPU by events, of the host until Python goes on; eager. Trap: a call whose
tensors lie where none lay is enqueued step by step.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

import weft
from benchmarks.measure import Failed, alarm, append, parser, release, row, say, start, stop
from benchmarks.rows import sentence
from weft.runtime.groups import GROUPS
from weft.runtime.programs import Programs

OWN = (1024, 1536, 2048, 3072)
LOW, HIGH = 2048, 4096
COUNTS = 60
LEADS = 2
N, K = 28672, 8192
"""Of Llama 3 70B's MLP."""


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
    return len(GROUPS.state(group.group_name).programs.bound())


def measured(op: str) -> dict[str, Any]:
    """Medians of one operator's calls, as fields of a row."""
    size = dist.get_world_size()
    gather = op == "all_gather_matmul"
    k, n = (K, N // size) if gather else (N // size, K)
    b = torch.randn(k, n, device="cuda", dtype=torch.bfloat16)
    operator = weft.all_gather_matmul if gather else weft.matmul_reduce_scatter

    def call(rows: int, schedule: str) -> Callable[[], object]:
        a = torch.randn(rows // size if gather else rows, k, device="cuda", dtype=torch.bfloat16)
        return lambda: operator(a, b, schedule=schedule)

    for rows in OWN:
        call(rows, "auto")()
        alarm()
    spec = weft.choices()[OWN.index(LOW)].spec
    lead = call(LOW, "auto")
    drawn = random.Random(1).sample(range(LOW // size + 1, HIGH // size), COUNTS)
    found: dict[str, list[Sample]] = {"first": [], "again": [], "moved": [], "bound": [], "named": [], "own": []}
    chosen: list[float] = []
    for shard in drawn:
        before = bound()
        one = call(shard * size, "auto")
        with choosing() as us:
            first = sample(one, lead)
        found["bound" if bound() > before else "first"].append(first)
        chosen += us if bound() == before else []
        found["again"].append(sample(one, lead))
        found["moved"].append(sample(call(shard * size, "auto"), lead))
        alarm()
    for shard in drawn[: COUNTS // 4]:
        one = call(shard * size, spec)
        found["named"].append(sample(one, lead))
        found["own"].append(sample(one, lead))
        alarm()
    medians = {name: Sample(*map(statistics.median, zip(*some, strict=True))) for name, some in found.items() if some}
    us = {f"weft/{name}": round(median.us, 1) for name, median in medians.items()}
    host_us = {f"weft/{name}": round(median.host_us, 1) for name, median in medians.items()}
    host_us["weft/chosen"] = round(slowest_median(chosen), 1)
    return {"us": us, "host_us": host_us, "chosen": spec, "extra": {"programs": bound()}}


def main() -> None:
    arguments = parser(__doc__, rounds=1, modes="eager").parse_args()
    start()
    left_out = []
    for op in ("all_gather_matmul", "matmul_reduce_scatter"):
        try:
            with torch.no_grad():
                found = measured(op)
        except Failed as failed:
            say(f"LEFT OUT {failed}", file=sys.stderr)
            left_out.append(op)
            continue
        case = f"rows {LOW} to {HIGH}, N={N} K={K}"
        made = row(bench="row_counts", op=op, case=case, dtype="bfloat16", mode="eager", arguments=arguments, **found)
        append(arguments.json, made)
        say(sentence(made), f"| {made.extra['programs']} programs")
        release()
    stop(left_out)


if __name__ == "__main__":
    main()
