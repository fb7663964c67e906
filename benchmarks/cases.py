"""The operators' benchmarks: their questions, their cases, and the schedules that are tried. `benchmarks.run` runs them.

Protocol of all: measure.py's; normally distributed data; results are compared with the sequential program's before anything is
timed. Methods are methods.py's, lookups.py's and ragged.py's. NCCL, alone and in sequential, is by its fastest transport
(nccl.py), by case and mode. ideal = the larger of the communication alone and the computation alone. Host time of weft includes
the handshake of the ranks at each call; that of the others does not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks import lookups, paper
from benchmarks.lookups import LookupCase, Tables
from benchmarks.measure import Work
from benchmarks.methods import Matmul, every, halves, windows
from benchmarks.nccl import REGISTERED, Transport
from benchmarks.ragged import Ragged
from benchmarks.runner import Bench, Comparison
from weft.core.problem import ColumnProblem, Op, Problem

SPECS: dict[Op, tuple[str, ...]] = {
    "all_gather_matmul": (
        *("shard_p2p", "hetero_unfused_1d:2", "flag_gated:1", "flag_gated:2", "track_and_trigger:1", "direct_store:1"),
        *("sequential", "sequential_stores", "flag_gated_2d:4"),
    ),
    "matmul_reduce_scatter": (
        *("shard_p2p", "hetero_unfused_1d:2", "track_and_trigger:1", "track_and_trigger:2", "track_and_trigger:4"),
        *("direct_store:1", "sequential", "sequential_stores"),
    ),
    "matmul_all_reduce": ("one_shot", "two_shot", "sequential", "sequential_stores"),
    "matmul_all_to_all": (
        *("shard_p2p", "hetero_unfused_1d:2", "track_and_trigger:1", "track_and_trigger:2", "direct_store:1"),
        *("sequential", "sequential_stores"),
    ),
    "all_to_all_matmul": (
        *("shard_p2p", "hetero_unfused_1d:2", "flag_gated:1", "flag_gated:2", "direct_store:1"),
        *("sequential", "sequential_stores"),
    ),
    "matmul_all_to_all_columns": ("shard_p2p", "hetero_unfused_1d:2", "track_and_trigger:1", "track_and_trigger:2"),
    "all_to_all_columns_matmul": ("uniform_fused_1d:2", "flag_gated:2", "flag_gated:4", "direct_store:4"),
    "embedding_bag_all_to_all": ("direct_store:1", "direct_store:2", "track_and_trigger:1"),
}
NODE_SPECS = ("node_slices:1", "node_slices:2", "node_slices:4")
LONG_FLOPS = 8e11
"""A rank's matmul of about 1 ms: fewer calls are enough."""
ALL_TO_ALLS: tuple[Op, ...] = ("matmul_all_to_all", "all_to_all_matmul")
_MODELS = (("llama3-8b", 4096, 14336), ("llama3-70b", 8192, 28672), ("llama3-405b", 16384, 53248), ("t-nlg", 4256, 17024))
"""Name, hidden size, width of the MLP."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """The first matmul of an MLP (all_gather_matmul) or the second (matmul_reduce_scatter). Sizes are global; N and K of each
    rank follow from world_size."""

    name: str
    op: Op
    m: int
    n: int
    k: int

    def problem(self, world_size: int) -> Problem:
        return Problem(op=self.op, m=self.m, n=self.n, k=self.k, world_size=world_size)


def _case(model: str, hidden: int, width: int, op: Op, m: int) -> Case:
    n, k = (width, hidden) if op == "all_gather_matmul" else (hidden, width)
    return Case(name=f"{model} M={m}", op=op, m=m, n=n, k=k)


CASES: tuple[Case, ...] = tuple(
    _case(model, hidden, width, op, m)
    for op in ("all_gather_matmul", "matmul_reduce_scatter")
    for model, hidden, width, m in (
        *((*sizes, 8192) for sizes in _MODELS),
        *((*_MODELS[1], m) for m in (2048, 512, 32768)),
    )
)
"""The 14 tensor-parallel cases that all figures speak of."""
DECODE = tuple((k, n, m) for k, n in ((3584, 8192), (1024, 8192), (6656, 16384), (8192, 8192)) for m in (1, 8, 32, 64, 128))
"""K of each rank, N and the batch of a matmul_all_reduce."""
EVEN = ((4096, 14336, 4096), (8192, 2048, 7168), (16384, 1536, 4096), (4096, 4096, 4096), (16384, 8192, 8192))
"""M, K and N of each rank."""
RAGGED = ((8192, 4096, 4096, 2), (16384, 2048, 7168, 8))
"""M, K, N and the experts of each rank."""
PROJECTIONS: dict[Op, tuple[tuple[int, int, int], ...]] = {
    "matmul_all_to_all_columns": ((4096, 4096, 6144), (8192, 8192, 10240), (16384, 4096, 6144)),
    "all_to_all_columns_matmul": ((4096, 4096, 4096), (8192, 8192, 8192), (16384, 4096, 4096)),
}
"""Tokens of each rank, width of the model, features of all heads: Llama 3 8B and 70B, attention's projections: query, key and
value, and output."""
LOOKUPS = (
    LookupCase(tables=8, dim=128, pooling=32, batch=8192),
    LookupCase(tables=32, dim=128, pooling=32, batch=8192),
    LookupCase(tables=32, dim=128, pooling=32, batch=65536),
    LookupCase(tables=16, dim=256, pooling=70, batch=16384),
    LookupCase(tables=64, dim=92, pooling=70, batch=8192),
)
BAGS = [LookupCase(tables=t, dim=256, pooling=70, batch=b, rows=20_000) for b in (256, 1024, 4096) for t in (64, 256)]
VECTORS = [(k, n, 1) for n in (8192, 16384, 65536) for k in (8192, 16384, 65536)]
"""K of all ranks, N, and one row."""
TOKENS = [(m, 4096, 4096) for m in (512, 1024, 2048, 4096, 8192)]
BETWEEN_NODES: dict[Op, tuple[tuple[int, int, int], ...]] = {
    "matmul_all_to_all": ((8192, 7168, 2048), (4096, 4096, 4096)),
    "all_to_all_matmul": ((8192, 7168, 2048), (4096, 4096, 4096)),
    "all_gather_matmul": ((8192, 14336, 4096),),
    "matmul_reduce_scatter": ((8192, 4096, 14336),),
    "matmul_all_reduce": ((64, 8192, 14336),),
}
"""M, N, K as a Problem has them."""


def _every(problem: Problem, turned: bool, float8: bool, found: Sequence[Transport], specs: Sequence[str]) -> dict[str, Work]:
    return every(Matmul(problem, turned=turned, float8=float8), found, specs)


def tensor_parallel(world_size: int, dtype: str) -> list[Comparison]:
    problems = [(case.name, case.problem(world_size)) for case in CASES]
    return [
        Comparison(
            bench="tp",
            op=problem.op,
            name=name,
            methods=partial(_every, problem, False, dtype != "bfloat16"),
            specs=SPECS[problem.op],
            repeat=4 if problem.flops < LONG_FLOPS else 2,
            dtype=dtype,
            problem=problem,
            windows=windows(problem),
        )
        for name, problem in problems
    ]


def all_reduce(cases: Sequence[tuple[int, int, int]], specs: Sequence[str], world_size: int) -> list[Comparison]:
    """cases: K of each rank, N, rows."""
    made = []
    for k, n, m in cases:
        problem = Problem(op="matmul_all_reduce", m=m, n=n, k=k * world_size, world_size=world_size)
        about = Comparison(
            bench="all_reduce",
            op=problem.op,
            name=f"{k}x{n} batch={m}",
            methods=partial(_every, problem, True, False),
            specs=specs,
            repeat=20,
            problem=problem,
            windows=windows(problem),
            needed=("computation/cublas", "sequential/default"),
        )
        made.append(about)
    return made


def even(
    op: Op, sizes: tuple[int, int, int], specs: Sequence[str], problem: Problem, *, known: bool = True, nccl: bool = True
) -> Comparison:
    """An all-to-all in even shares. sizes: as the case is named. known: the row has the problem. nccl: by all transports."""
    return Comparison(
        bench="all_to_all",
        op=op,
        name="x".join(map(str, sizes)),
        methods=partial(_every, problem, False, False),
        specs=specs,
        repeat=3,
        problem=problem if known else None,
        windows=windows(problem) if nccl else (0, 0),
    )


def rows_exchanged(cases: Sequence[tuple[int, int, int]], op: Op, specs: Sequence[str], world_size: int) -> list[Comparison]:
    """cases: M, K, N of each rank."""
    return [even(op, (m, k, n), specs, Problem(op=op, m=m, n=n, k=k, world_size=world_size)) for m, k, n in cases]


def ragged(op: Op) -> list[Comparison]:
    """The host knows no problem of them, and weft has one schedule for them."""

    def methods(sizes: tuple[int, int, int, int], found: Sequence[Transport], specs: Sequence[str]) -> dict[str, Work]:
        return Ragged(op, *sizes).works()

    return [
        Comparison(
            bench="all_to_all",
            op=op,
            name="x".join(map(str, sizes[:3])) + f" experts={sizes[3]}",
            methods=partial(methods, sizes),
            repeat=3,
        )
        for sizes in RAGGED
    ]


def all_to_all(world_size: int, dtype: str) -> list[Comparison]:
    """The two operators take turns."""
    first, second = ([*rows_exchanged(EVEN, op, SPECS[op], world_size), *ragged(op)] for op in ALL_TO_ALLS)
    return [case for pair in zip(first, second, strict=True) for case in pair]


def ulysses(world_size: int, dtype: str) -> list[Comparison]:
    made = []
    for op, cases in PROJECTIONS.items():
        for tokens, width, features in cases:
            m, n, k = (tokens, features, width)
            if op == "all_to_all_columns_matmul":
                m, n, k = (tokens * world_size, width, features)
            problem = ColumnProblem(op=op, m=m, n=n, k=k, world_size=world_size)
            made.append(even(op, (tokens, width, features), SPECS[op], problem, known=False, nccl=False))
    return made


def embedding(cases: Sequence[LookupCase], specs: Sequence[str], world_size: int) -> list[Comparison]:
    def methods(case: LookupCase, found: Sequence[Transport], specs: Sequence[str]) -> dict[str, Work]:
        return Tables(case).works(specs)

    return [
        Comparison(
            bench="embedding",
            op="embedding_bag_all_to_all",
            name=case.name,
            methods=partial(methods, case),
            specs=specs,
            repeat=lookups.REPEAT,
            dtype="float32",
            problem=case.problem(world_size),
            needed=lookups.NEEDED,
            make_check=lookups.checked,
        )
        for case in cases
    ]


def of_the_paper(world_size: int, dtype: str) -> list[Comparison]:
    return [
        *embedding(BAGS, (), world_size),
        *all_reduce([(k // world_size, n, m) for k, n, m in VECTORS], (), world_size),
        *rows_exchanged(TOKENS, "matmul_all_to_all", (), world_size),
    ]


def _between_nodes(make: Callable[[], Matmul | Tables], found: Sequence[Transport], specs: Sequence[str]) -> dict[str, Work]:
    operands = make()
    if isinstance(operands, Matmul):
        works = halves(operands, drawn=True)
    else:
        works = {"communication/default": operands.exchange, "computation/weft": operands.lookup()}
    works["sequential/default"] = operands.weft("sequential")
    return works | {f"weft/{spec}": operands.weft(spec) for spec in specs}


def between_nodes(world_size: int, dtype: str) -> list[Comparison]:
    per_node = int(os.environ["WEFT_RANKS_PER_NODE"])
    if per_node >= world_size > 1:
        raise ValueError(
            f"WEFT_RANKS_PER_NODE is {per_node}, which makes one node of {world_size} ranks; set it to {world_size // 2}"
        )
    nodes = tuple(min(per_node, world_size - first) for first in range(0, world_size, per_node))
    about = partial(Comparison, bench="nodes", specs=NODE_SPECS, repeat=3, extra={"nodes": nodes})
    made = []
    for op, cases in BETWEEN_NODES.items():
        for m, n, k in cases:
            make = partial(Matmul, Problem(op=op, m=m, n=n, k=k, world_size=world_size))
            made.append(about(op=op, name=f"M={m} N={n} K={k}", methods=partial(_between_nodes, make)))
    needed = ("sequential/default", "communication/default", "computation/weft")
    for case in LOOKUPS[:2]:
        methods = partial(_between_nodes, partial(Tables, case))
        made.append(about(op="embedding_bag_all_to_all", name=case.name, methods=methods, dtype="float32", needed=needed))
    return made


_BENCHES = (
    Bench(
        name="tp",
        question="""How much of the communication do the tensor-parallel operators hide, on the 14 cases?

In FP8, operands have rowwise scales, cuBLAS alone is the faster of rowwise and tensorwise products, and `quantised/...` compare
an `a` of bfloat16 that weft quantises on its way with a compiled quantisation before sequential.""",
        cases=tensor_parallel,
        rounds=11,
        alarm_s=90,
        nccl=REGISTERED,
        dtypes=("bfloat16", "float8_e4m3fn"),
    ),
    Bench(
        name="all_reduce",
        question="""How much faster than a matmul and an all-reduce is matmul_all_reduce, where a decode step has few rows?

Weights lie as linear layers keep them (b = weight.t()). Cases: K x N of each rank, by batch. Traps: multicast stays off, so
PyTorch's multimem all-reduces are not among the peers. Calls follow each other on one weight, so that all methods profit from
what a cache keeps of it. Baselines reduce in place and in registered memory, which favours them.""",
        cases=lambda world_size, dtype: all_reduce(DECODE, SPECS["matmul_all_reduce"], world_size),
        nccl=REGISTERED[:1],
    ),
    Bench(
        name="all_to_all",
        question="""\
How much of an all-to-all do matmul_all_to_all and all_to_all_matmul hide, in even shares and with splits on the
device? Cases: M x K x N of each rank; ragged.py says what ragged ones are.""",
        cases=all_to_all,
        nccl=REGISTERED,
    ),
    Bench(
        name="ulysses",
        question="""\
How much of the exchanges around Ulysses' attention do matmul_all_to_all and all_to_all_matmul hide, where columns
are cut? Cases: tokens of each rank x width x features. Trap: the copy that puts columns where they belong is part of
sequential, and no part of the ideal.""",
        cases=ulysses,
    ),
    Bench(
        name="embedding",
        question="""How much of the All-to-All does embedding_bag_all_to_all hide?

float32, bags of a set length, uniform random rows of tables far larger than any cache, int64 indices. Sequential is torch's
embedding bags and NCCL: the faster of a call for each table and one call over all tables. `weft/sequential` is weft's own
lookup kernel, then NCCL. ideal = the larger of weft's lookup alone (`computation/weft`) and NCCL alone.""",
        cases=lambda world_size, dtype: embedding(LOOKUPS, SPECS["embedding_bag_all_to_all"], world_size),
        dtypes=("float32",),
    ),
    Bench(
        name="paper",
        question=paper.__doc__ or "",
        cases=of_the_paper,
        summary=paper.summary,
    ),
    Bench(
        name="nodes",
        question="""How much of what goes between nodes do slices hide?

The GPUs of one host are cut into nodes of WEFT_RANKS_PER_NODE ranks (2), which reach each other by NCCL's messages alone.
Sequential is weft's: cuBLAS, or weft's lookup, and NCCL over all ranks. Traps: here the "network" is NVLink. So this says
whether slices leave while the rest is computed, and what a slice costs; it does not say what an adapter of 50 GB/s gives,
behind which there is far more to hide. NCCL's sequential program knows of no nodes, and uses all links in the same way.""",
        cases=between_nodes,
        rounds=7,
        environment={"WEFT_RANKS_PER_NODE": "2"},
    ),
)
BENCHES = {bench.name: bench for bench in _BENCHES}
