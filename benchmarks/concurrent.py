"""How near does weft.concurrent bring independent GEMMs and a collective to the longer of the two?

Parts:
    cases    three pairs of GEMMs and an all_reduce, and the same bytes in the other collectives; by every method of the device
    conccl   30 pairs of GEMM, collective and size, as ConCCL (arXiv 2412.14335) has them; its measure is the share of the ideal
             speed-up, (sequential / t - 1) / (sequential / ideal - 1)

Protocol: measure.py's; bf16, normal data. sequential is GEMMs, then NCCL, on one stream; ideal the longer of the two alone.
`nccl` is two plain streams, what PyTorch does by itself; `auto` is what weft.concurrent found in its own autotuning run, before
anything is timed here. Each method's results are first compared with NCCL's from fresh data. Bytes are of the larger tensor.

Traps: an all_reduce adds in place, so it takes the mean, which does not grow from call to call. Methods that hold NCCL to some
blocks have communicators of their own, made in that run: some 0.1 s each, not timed. In a graph two branches have no order but
their priority.

    torchrun --nproc-per-node 2 -m benchmarks.concurrent --part cases --json benchmarks/results/h200x2/concurrent.jsonl
    torchrun --nproc-per-node 4 -m benchmarks.concurrent --part conccl --modes eager
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import weft
from benchmarks import measure
from benchmarks.measure import Failed, Work, WrongResult, append, each_mode, parser, release, say, start, stop, together, trial
from benchmarks.rows import Row, sentence, summary
from weft.core.concurrent import ConcurrentProblem
from weft.overlap.concurrent import ConcurrentCollective
from weft.schedules.concurrent import candidates

ROUNDS, REPEAT = 7, 3
ALARM_S = 40
MIB = 1 << 20
MORE = "nccl+priority+ctas=4,nccl+priority+ctas=12,nccl+late+priority+ctas=16"
"""Methods that are measured in addition to weft's candidates."""
NAMES = {"sequential": "sequential/default", "nccl": "peer/two_streams"}
"""Names in rows of the methods that a user can run without weft."""
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True, kw_only=True)
class Case:
    """count GEMMs of m x k x n, concurrent with a collective whose larger tensor has nbytes."""

    count: int
    m: int
    k: int
    n: int
    nbytes: int
    op: str

    def __str__(self) -> str:
        return f"{self.count} x {self.m}x{self.k}x{self.n} + {self.op} {self.nbytes // MIB} MiB"


def cases() -> list[Case]:
    """Of part `cases`."""
    pairs = ((3, 8192, 8192, 8192, 512), (8, 4096, 4096, 4096, 128), (4, 8192, 3584, 8192, 256))
    return [Case(count=c, m=m, k=k, n=n, nbytes=mib * MIB, op=op) for c, m, k, n, mib in pairs for op in OPS]


def conccl() -> list[Case]:
    """Of part `conccl`: GEMMs of Llama 3 70B and 405B and squares, from bound by communication to bound by computation."""
    gemms = (
        (2, 8192, 8192, 8192),
        (6, 4096, 4096, 4096),
        (1, 8192, 8192, 28672),
        (1, 8192, 16384, 13312),
        (4, 2048, 8192, 8192),
    )
    return [
        Case(count=c, m=m, k=k, n=n, nbytes=mib * MIB, op=op)
        for c, m, k, n in gemms
        for op in ("all_reduce", "all_gather", "all_to_all")
        for mib in (128, 512)
    ]


def row_name(method: str) -> str:
    """Return a method's name in a row."""
    return NAMES.get(method, f"weft/{method}")


class Pair:
    """One case on this rank: its tensors, and everything that is timed."""

    def __init__(self, case: Case) -> None:
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        size, elements = dist.get_world_size(), case.nbytes // 2
        self.case = case
        self.a = torch.randn(case.m, case.k, **options)
        self.b = torch.randn(case.k, case.n, **options)
        self.c = torch.empty(case.m, case.n, **options)
        self.source = torch.randn(elements // size if case.op == "all_gather" else elements, **options)
        self.given = self.source.clone()
        self.out = self.given
        if case.op != "all_reduce":
            self.out = torch.empty(elements // size if case.op == "reduce_scatter" else elements, **options)
        self.collective = self._collective()

    def _collective(self) -> ConcurrentCollective:
        if self.case.op == "all_reduce":
            return weft.AllReduce(self.given, reduction="avg")
        kinds: dict[str, Callable[..., ConcurrentCollective]] = {
            "all_gather": weft.AllGather,
            "reduce_scatter": weft.ReduceScatter,
            "all_to_all": weft.AllToAll,
        }
        return kinds[self.case.op](self.out, self.given)

    def compute(self) -> None:
        for _ in range(self.case.count):
            torch.mm(self.a, self.b, out=self.c)

    def run_concurrently(self, method: str) -> torch.Tensor:
        weft.concurrent(self.compute, self.collective, key=str(self.case), repeatable=True, method=method)
        return self.out

    def works(self, methods: Sequence[str]) -> dict[str, Work]:
        return {
            "computation/cublas": self.compute,
            "communication/default": lambda: self.collective.enqueue(self.collective.ranks, async_op=False),
            "weft/auto": partial(self.run_concurrently, "auto"),
            **{row_name(method): partial(self.run_concurrently, method) for method in methods},
        }

    def verify(self, methods: Sequence[str]) -> dict[str, str]:
        """Compare each method's result, from fresh data, with the sequential one's; why methods are missing.

        Raises WrongResult, and Failed where auto does not run."""
        self._fresh("sequential")
        expected, missing = self.out.clone(), {}
        together("auto", partial(self._compare, "auto", expected))
        for method in methods:
            try:
                together(method, partial(self._compare, method, expected))
            except Failed as failed:
                missing[row_name(method)] = failed.reason
                say(f"LEFT OUT {failed}", file=sys.stderr)
        return missing

    def _fresh(self, method: str) -> None:
        self.out.zero_()
        self.given.copy_(self.source)
        self.run_concurrently(method)

    def _compare(self, method: str, expected: torch.Tensor) -> None:
        self._fresh(method)
        worst = float((self.out.float() - expected.float()).abs().max())
        if not worst <= 0.02 * float(expected.abs().max()):
            raise WrongResult(f"{method} is off by {worst:.3g}")


def measured(case: Case, every: bool, arguments: Any) -> list[Row]:
    """One case in every mode."""
    torch.manual_seed(dist.get_rank())
    pair = Pair(case)
    abilities = weft_device(pair).abilities((pair.collective,))
    size = dist.get_world_size()
    problem = ConcurrentProblem(collectives=(pair.collective.problem(size, ()),), world_size=size)
    found = candidates(problem, abilities)
    methods = list(dict.fromkeys([*found, *filter(None, arguments.methods.split(","))])) if every else ["sequential", "nccl"]
    missing = pair.verify(methods[1:])
    works = {name: work for name, work in pair.works(methods).items() if name not in missing}
    times, lost = trial(
        works,
        arguments.modes.split(","),
        check=lambda name, result: None,
        needed=("sequential/default", "computation/cublas", "communication/default", "weft/auto"),
        rounds=arguments.rounds,
        repeat=REPEAT,
    )
    chosen = next(choice for choice in weft.concurrent_choices() if choice.key == str(case))
    return each_mode(
        times,
        bench="concurrent",
        op=case.op,
        case=str(case),
        dtype="bfloat16",
        chosen=chosen.method,
        missing={**missing, **lost},
        extra={"trial": chosen.us},
        arguments=arguments,
    )


def weft_device(pair: Pair) -> Any:
    """Return the executor of this rank's GPU."""
    from weft.overlap.concurrent.cuda import CudaExecutor

    return CudaExecutor(pair.a.device)


def main() -> None:
    options = parser(__doc__, rounds=ROUNDS, modes="eager,graph")
    options.add_argument("--part", choices=("cases", "conccl"), default="cases")
    options.add_argument(
        "--methods", default=MORE, help="further methods that part `cases` measures, separated by commas (%(default)s)"
    )
    options.add_argument("--only", default="", help="cases whose name has this")
    arguments = options.parse_args()
    measure.ALARM_S = ALARM_S
    start()
    found, left_out = [], list[str]()
    for case in cases() if arguments.part == "cases" else conccl():
        if arguments.only in str(case):
            try:
                mine = measured(case, arguments.part == "cases", arguments)
            except Failed as failed:
                say(f"LEFT OUT {case}: {failed}", file=sys.stderr)
                left_out.append(str(case))
                release()
                continue
            found += mine
            for row in mine:
                append(arguments.json, row)
                say(sentence(row))
            torch.cuda.empty_cache()
    say(summary(found))
    stop(left_out)


if __name__ == "__main__":
    main()
