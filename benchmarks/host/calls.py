"""Part `calls` of benchmarks.host: single warm calls without gradients."""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import weft
from benchmarks.host.clock import check_differences, difference, host_times, measure_methods, wall_times
from benchmarks.measure import Failed, row, together
from benchmarks.rows import AUTO, UNOVERLAPPED, Row
from weft.core.problem import Op, Problem

Tensor = torch.Tensor
Call = Callable[[Tensor], Tensor]
GROUP = 8
"""Calls between two waits for the GPU."""
LOOP, LOOP_ROUNDS = 200, 5
"""Calls in a loop without waiting, and how often each method runs that loop."""
WARM_UP = 80
COPIES, KEPT = 331, 61
"""Copies of the input that calls take in turn, and results that are kept alive. Both are primes, so that no set of addresses
comes again soon. Their number is larger than that of the graphs of a program that weft keeps."""
SAME, NEW, STREAMS = VARIANTS = ("same tensors", "new addresses", "two streams")
NEW_OUTPUT, OWN_OUTPUT, ONE_SHOT, MATMUL = (
    "sequential/new",
    "sequential/preallocated",
    "peer/torch one_shot",
    "computation/cublas",
)
OPERATORS: dict[str, Callable[..., Tensor]] = {
    "all_gather_matmul": weft.all_gather_matmul,
    "matmul_reduce_scatter": weft.matmul_reduce_scatter,
    "matmul_all_reduce": weft.matmul_all_reduce,
}
BY_NAME = {"all_gather_matmul": "flag_gated:2", "matmul_reduce_scatter": "shard_p2p", "matmul_all_reduce": "one_shot"}
"""Schedules that overlap, which are measured by name where `auto` chose one that does not."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operator and its sizes. m: rows of the whole product. k, n: contraction and columns of a rank's matmul."""

    op: Op
    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.op} {self.name}"

    @property
    def name(self) -> str:
        return f"M={self.m} k={self.k} n={self.n}"

    def problem(self, ranks: int) -> Problem:
        if self.op == "all_gather_matmul":
            return Problem(op=self.op, m=self.m, k=self.k, n=self.n * ranks, world_size=ranks)
        return Problem(op=self.op, m=self.m, k=self.k * ranks, n=self.n, world_size=ranks)


CASES = {
    "cuda": (
        Case(op="all_gather_matmul", m=512, k=8192, n=4096),
        Case(op="matmul_reduce_scatter", m=512, k=4096, n=8192),
        *(Case(op="matmul_all_reduce", m=rows, k=4096, n=8192) for rows in (1, 16, 128)),
    ),
    "cpu": (
        Case(op="all_gather_matmul", m=16, k=64, n=32),
        Case(op="matmul_reduce_scatter", m=16, k=32, n=64),
        Case(op="matmul_all_reduce", m=4, k=32, n=64),
    ),
}
"""By device. Those of CPUs only show that the benchmark works."""


class Inputs:
    """What the methods of a case share. copies: of the input `a`, the first of which is the one of all other variants."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device, self.ranks = case, device, dist.get_world_size()
        options: Any = {"device": device, "dtype": torch.bfloat16}
        gathers = case.op == "all_gather_matmul"
        torch.manual_seed(dist.get_rank())
        self.a = torch.randn(case.m // self.ranks if gathers else case.m, case.k, **options)
        self.b = torch.randn(case.k, case.n, **options).mul_(case.k**-0.5)
        self.gathered = torch.randn(case.m, case.k, **options) if gathers else self.a
        self.scattered = torch.empty(case.m // self.ranks, case.n, **options)
        self._copies: list[Tensor] = []

    @property
    def copies(self) -> list[Tensor]:
        """Made when they are first needed."""
        if not self._copies:
            self._copies = [self.a.clone() for _ in range(COPIES if self.device == "cuda" else GROUP)]
        return self._copies


def torch_calls(inputs: Inputs) -> dict[str, Callable[[], Call]]:
    """Return, by method, what makes the calls of a user without weft."""
    b, gathered, scattered = inputs.b, inputs.gathered, inputs.scattered

    def gather_new(a: Tensor) -> Tensor:
        full = torch.empty(a.shape[0] * inputs.ranks, a.shape[1], dtype=a.dtype, device=a.device)
        dist.all_gather_into_tensor(full, a)
        return torch.mm(full, b)

    def gather_own(a: Tensor) -> Tensor:
        dist.all_gather_into_tensor(gathered, a)
        return torch.mm(gathered, b)

    def scatter_new(a: Tensor) -> Tensor:
        c = a @ b
        out = torch.empty(c.shape[0] // inputs.ranks, c.shape[1], dtype=c.dtype, device=c.device)
        dist.reduce_scatter_tensor(out, c)
        return out

    def scatter_own(a: Tensor) -> Tensor:
        c = a @ b
        dist.reduce_scatter_tensor(scattered, c)
        return scattered

    def reduce(a: Tensor) -> Tensor:
        y = a @ b
        dist.all_reduce(y)
        return y

    found: dict[str, dict[str, Callable[[], Call]]] = {
        "all_gather_matmul": {NEW_OUTPUT: lambda: gather_new, OWN_OUTPUT: lambda: gather_own},
        "matmul_reduce_scatter": {NEW_OUTPUT: lambda: scatter_new, OWN_OUTPUT: lambda: scatter_own},
        "matmul_all_reduce": {NEW_OUTPUT: lambda: reduce, ONE_SHOT: partial(_one_shot, inputs)},
    }
    return found[inputs.case.op]


def _one_shot(inputs: Inputs) -> Call:
    """Return torch.mm into symmetric memory, which PyTorch's one-shot all-reduce sums."""
    import torch.distributed._symmetric_memory as symmetric_memory

    world: Any = dist.group.WORLD
    name, b = world.group_name, inputs.b
    buffer = symmetric_memory.empty(inputs.case.m, inputs.case.n, device=torch.device(inputs.device), dtype=torch.bfloat16)
    symmetric_memory.rendezvous(buffer, name)
    one_shot_all_reduce = torch.ops.symm_mem.one_shot_all_reduce

    def call(a: Tensor) -> Tensor:
        torch.mm(a, b, out=buffer)
        found: Tensor = one_shot_all_reduce(buffer, "sum", name)
        return found

    return call


def matmul_call(inputs: Inputs) -> Call:
    """Return the matmul alone: of the gathered rows, if the operator gathers, and else of the given ones."""
    b, gathered = inputs.b, inputs.gathered
    if inputs.case.op == "all_gather_matmul":
        return lambda a: torch.mm(gathered, b)
    return lambda a: torch.mm(a, b)


def weft_calls(inputs: Inputs, chosen: str | None) -> dict[str, Callable[[], Call]]:
    """Return, by method, what makes weft's calls. chosen: the schedule that `auto` chose."""
    operator, b = OPERATORS[inputs.case.op], inputs.b
    named = BY_NAME[inputs.case.op] if chosen is None or f"weft/{chosen}" in UNOVERLAPPED else chosen

    def make(spec: str) -> Call:
        return lambda a: operator(a, b, schedule=spec)

    found: dict[str, Callable[[], Call]] = {AUTO: lambda: lambda a: operator(a, b)}
    return found | {f"weft/{spec}": partial(make, spec) for spec in dict.fromkeys(("sequential", named))}


class Feed:
    """Gives each call its input and its stream, keeps its result, and times the call alone.

    call: the method. inputs: what calls take in turn. kept: how many results stay alive. streams: those that calls take in
    turn, each after the work of the call before, by an event. With none, calls run on the current stream.
    """

    def __init__(self, call: Call, inputs: Sequence[Tensor], kept: int = 1, streams: Sequence[Any] = ()) -> None:
        self.call, self.inputs, self.streams, self.count = call, inputs, streams, 0
        self.results: deque[Tensor] = deque(maxlen=kept)
        self._done = torch.cuda.Event() if streams else None  # type: ignore[no-untyped-call]

    def __call__(self) -> int:
        a = self.inputs[self.count % len(self.inputs)]
        stream = self.streams[self.count % len(self.streams)] if self.streams else None
        self.count += 1
        place: AbstractContextManager[Any] = nullcontext()
        if stream is not None:
            stream.wait_event(self._done)
            place = torch.cuda.stream(stream)
        call = self.call
        with place:
            begun_ns = time.perf_counter_ns()
            result = call(a)
            took_ns = time.perf_counter_ns() - begun_ns
        if stream is not None:
            self._done.record(stream)  # type: ignore[union-attr]
        self.results.append(result)
        return took_ns


def make_feed(variant: str, inputs: Inputs, make: Callable[[], Call]) -> Feed:
    if variant == NEW:
        return Feed(make(), inputs.copies, kept=KEPT)
    streams = [torch.cuda.Stream() for _ in range(2)] if variant == STREAMS else []  # type: ignore[no-untyped-call]
    return Feed(make(), [inputs.a], streams=streams)


def find_choice(inputs: Inputs) -> str | None:
    """Call weft once, and return the schedule that it chose. None if the call failed."""

    def choose() -> str:
        OPERATORS[inputs.case.op](inputs.a, inputs.b)
        problem = inputs.case.problem(inputs.ranks)
        wanted = (problem.op, problem.m, problem.n, problem.k)
        return next(one.spec for one in weft.choices() if (one.problem.op, *_sizes(one.problem)) == wanted)

    try:
        return together(AUTO, choose)
    except Failed:
        return None


def _sizes(problem: Any) -> tuple[int, int, int]:
    return problem.m, problem.n, problem.k


@torch.no_grad()
def measured(case: Case, arguments: argparse.Namespace) -> Iterator[Row]:
    """Measure one case. Yield a row for each variant, with host times, and as `us` the wall times of loops."""
    inputs = together(str(case), partial(Inputs, case, arguments.device))
    chosen = find_choice(inputs)
    without_weft = torch_calls(inputs)
    makers = {**weft_calls(inputs, chosen), **without_weft, MATMUL: lambda: matmul_call(inputs)}
    expected = together(NEW_OUTPUT, lambda: without_weft[NEW_OUTPUT]()(inputs.a).clone())
    for variant in VARIANTS if arguments.device == "cuda" else (SAME, NEW):
        yield _measure_variant(variant, inputs, makers, expected, chosen, arguments)


def _measure_variant(
    variant: str,
    inputs: Inputs,
    makers: Mapping[str, Callable[[], Call]],
    expected: Tensor,
    chosen: str | None,
    arguments: argparse.Namespace,
) -> Row:
    differences: dict[str, float] = {}

    def check(name: str, feed: Feed) -> None:
        feed()
        if arguments.device == "cuda":
            torch.cuda.synchronize()  # the call may have run on another stream
        if name != MATMUL:
            differences[name] = difference(feed.results[-1], expected)
            check_differences({"result": differences[name]})

    def warm_up(name: str, feed: Feed) -> None:
        for number in range(WARM_UP if arguments.device == "cuda" else 1):
            feed()
            if number % GROUP == GROUP - 1 and arguments.device == "cuda":
                torch.cuda.synchronize()

    def measure(feeds: Mapping[str, Feed]) -> tuple[dict[str, Any], dict[str, float]]:
        loops = LOOP if arguments.device == "cuda" else GROUP
        host = host_times(feeds, arguments.rounds, GROUP)
        return host, wall_times(feeds, LOOP_ROUNDS if arguments.device == "cuda" else 1, loops)

    feeds = {name: partial(make_feed, variant, inputs, make) for name, make in makers.items()}
    (host, wall), missing = measure_methods(feeds, check, warm_up, measure)
    extra = {
        "p10": {name: round(spread.p10, 2) for name, spread in host.items()},
        "p90": {name: round(spread.p90, 2) for name, spread in host.items()},
        "difference": {name: round(value, 5) for name, value in differences.items() if name in host},
    }
    made = row(
        bench="host",
        op=inputs.case.op,
        case=inputs.case.name,
        problem=inputs.case.problem(inputs.ranks),
        dtype="bfloat16",
        mode="eager",
        state=variant,
        us={name: round(us, 2) for name, us in wall.items()},
        host_us={name: round(spread.median, 2) for name, spread in host.items()},
        chosen=chosen,
        missing=missing,
        extra=extra,
        device=arguments.device,
        arguments=arguments,
    )
    return replace(made, samples=arguments.rounds * GROUP)
