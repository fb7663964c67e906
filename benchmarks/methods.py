"""Every program that does what an operator does, written once for all operators: `every` has them by name (rows.py).

A Matmul has the operands of one rank. EXCHANGES says of each operator which collective it has, and whether rows travel before
the product or after it; from that follow the sequential program, its two halves alone, and weft's call. In FP8, operands have
rowwise scales and fast accumulation, and NCCL gathers rows, then their scales.

Traps: multicast stays off, so async TP is always asked for the gathered a: without that it may take multimem kernels for small
M. Registered memory is used in place, and the same memory by all methods of a transport. The order of the methods is part of
the protocol: turns are shuffled by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch.distributed import _functional_collectives as functional

import weft
from benchmarks.measure import Check, Work
from benchmarks.nccl import Transport
from weft.core.problem import COLUMN_OPS, Op, Problem
from weft.core.problem import EXCHANGES as ALL_TO_ALLS

FLOAT8 = torch.float8_e4m3fn
FLOAT8_SPECS = ("one_shot", "two_shot", "sequential_stores", "auto")
"""Schedules of matmul_all_reduce with operands in FP8."""
TORCH = ("one_shot", "two_shot")
"""PyTorch's symmetric-memory all-reduces."""
SAMPLED = 256
TOLERANCE = 0.03
Program = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What an operator does besides the product. collective: a method of Transport. first: rows travel before the product, not
    after it. weft: the operator."""

    collective: str
    weft: Callable[..., Tensor]
    first: bool = False


EXCHANGES: dict[Op, Exchange] = {
    "all_gather_matmul": Exchange(collective="all_gather", weft=weft.all_gather_matmul, first=True),
    "matmul_reduce_scatter": Exchange(collective="reduce_scatter", weft=weft.matmul_reduce_scatter),
    "matmul_all_to_all": Exchange(collective="all_to_all", weft=weft.matmul_all_to_all),
    "all_to_all_matmul": Exchange(collective="all_to_all", weft=weft.all_to_all_matmul, first=True),
    "matmul_all_reduce": Exchange(collective="all_reduce", weft=weft.matmul_all_reduce),
    "matmul_all_to_all_columns": Exchange(collective="all_to_all", weft=partial(weft.matmul_all_to_all, split_dim=-1)),
    "all_to_all_columns_matmul": Exchange(
        collective="all_to_all", weft=partial(weft.all_to_all_matmul, gather_dim=-1), first=True
    ),
}
TENSOR_PARALLEL: tuple[Op, ...] = ("all_gather_matmul", "matmul_reduce_scatter")


class Matmul:
    """Operands of this rank, normally distributed. turned: b lies as linear layers keep a weight. float8: a and b are quantised
    by rows and columns; `given` is the a that they were made from."""

    def __init__(self, problem: Problem, *, turned: bool = False, float8: bool = False) -> None:
        rank = dist.get_rank()
        self.problem, self.exchange, self.float8 = problem, EXCHANGES[problem.op], float8
        self.options: dict[str, Any] = {"device": "cuda", "dtype": getattr(torch, problem.dtype)}
        self.scales: dict[str, Any] = {}
        columns = problem.n if problem.op in COLUMN_OPS else problem.columns(rank)
        inner = problem.k if problem.op in COLUMN_OPS else problem.inner(rank)
        self.a = self.given = torch.randn(problem.a_rows(rank), problem.a_columns(rank), **self.options)
        b = torch.randn(*((columns, inner) if turned else (inner, columns)), **self.options) * problem.k**-0.5
        self.b = b.t() if turned else b
        self.shape = problem.product_rows(rank), columns
        if float8:
            self.a, scale_a = quantised(self.a)
            b, scale_b = quantised(self.b.t().contiguous())
            self.b = b.t()
            self.scales = {"scale_a": scale_a, "scale_b": scale_b.t(), "use_fast_accum": True}
            self.all_scales = scale_a.new_empty(problem.m, 1) if self.exchange.collective == "all_gather" else scale_a

    @cached_property
    def product(self) -> Tensor:
        """Memory for it."""
        return torch.empty(*self.shape, **self.options)

    def multiply(self, a: Tensor, out: Tensor) -> Tensor:
        if not self.float8:
            return torch.mm(a, self.b, out=out)
        scales = self.all_scales, self.scales["scale_b"]
        return torch._scaled_mm(a, self.b, *scales, out_dtype=out.dtype, use_fast_accum=True, out=out)

    def weft(self, spec: str, **keywords: Any) -> Work:
        """One call by this schedule."""
        return partial(self.exchange.weft, self.a, self.b, schedule=spec, **self.scales, **keywords)


def quantised(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in FP8, and their scales."""
    scales = matrix.abs().amax(1, keepdim=True).float() / torch.finfo(FLOAT8).max
    return (matrix.float() / scales).to(FLOAT8), scales


def every(m: Matmul, found: Sequence[Transport], specs: Sequence[str]) -> dict[str, Work]:
    """Everything that is timed."""
    torch.compiler.reset()  # Dynamo keeps a few compiled versions of a function and then gives up: each case begins anew
    works = by_columns(m) if m.problem.op in COLUMN_OPS else sequential(m, found)
    works |= peers(m)
    works |= {f"weft/{spec}": m.weft(spec) for spec in specs}
    return works | in_float8(m, works)


def sequential(m: Matmul, found: Sequence[Transport]) -> dict[str, Work]:
    """cuBLAS and NCCL one after the other in each of NCCL's transports, and both alone. An all-reduce alone is not timed."""
    op, works = m.problem.op, dict[str, Work]()
    if op == "matmul_all_reduce":
        works["computation/cublas"] = partial(m.multiply, m.a, m.product)
    for transport in found:
        if not transport.runs(m.exchange.collective):
            continue
        whole, communication, computation = parts(m, transport)
        works[f"sequential/{transport.name}"] = whole
        if op != "matmul_all_reduce":
            works[f"communication/{transport.name}"] = communication
        if op in TENSOR_PARALLEL and transport.name == "default":
            works["computation/cublas"] = computation
    if op in ALL_TO_ALLS:
        works["computation/cublas"] = partial(torch.mm, m.a, m.b)
    return works


def parts(m: Matmul, transport: Transport) -> tuple[Work, Work, Work]:
    """(both, the communication, the computation) by one transport of NCCL."""
    rows, columns = m.shape
    run = getattr(transport, m.exchange.collective)
    if m.exchange.first:
        bytes_or_values = m.a.view(torch.uint8) if m.float8 else m.a
        sent = transport.shard(*bytes_or_values.shape, bytes_or_values.dtype).copy_(bytes_or_values)
        landed = transport.whole(rows, sent.shape[1], sent.dtype)
        values = landed.view(m.a.dtype)

        def gather() -> None:
            run(landed, sent)
            dist.all_gather_into_tensor(m.all_scales, m.scales["scale_a"])

        communication: Work = gather if m.float8 else partial(run, landed, sent)
        computation: Work = partial(m.multiply, values, m.product)

        def product_last() -> object:
            communication()
            return computation()

        return product_last, communication, computation
    if m.exchange.collective == "all_to_all":
        sent, landed = transport.shard(rows, columns), transport.whole(rows, columns)
    elif m.exchange.collective == "reduce_scatter":
        sent, landed = transport.whole(rows, columns), transport.shard(m.problem.out_rows(dist.get_rank()), columns)
    else:
        sent = landed = transport.whole(rows, columns)

    def product_first() -> object:
        m.multiply(m.a, sent)
        return run(landed, sent)

    return product_first, partial(run, landed, sent), partial(m.multiply, m.a, sent)


def by_columns(m: Matmul) -> dict[str, Work]:
    """As `sequential` where columns are cut, with the copy that puts columns where they belong, which is no part of the
    halves."""
    size = dist.get_world_size()
    if not m.exchange.first:
        rows, columns = m.problem.m, m.problem.columns(dist.get_rank())
        sent, landed = (torch.empty(size, rows, columns, **m.options) for _ in range(2))

        def whole() -> Tensor:
            sent.copy_(torch.mm(m.a, m.b).view(rows, size, columns).transpose(0, 1))
            dist.all_to_all_single(landed, sent)
            return landed.view(size * rows, columns)

        multiplied = m.a
    else:
        sent, landed = m.a, torch.empty_like(m.a)
        rows, columns = m.problem.m // size, m.problem.k
        multiplied = torch.randn(rows, columns, **m.options)

        def whole() -> Tensor:
            dist.all_to_all_single(landed, sent)
            multiplied.view(rows, size, -1).copy_(landed.view(size, rows, -1).transpose(0, 1))
            return torch.mm(multiplied, m.b)

    return {
        "sequential/default": whole,
        "communication/default": lambda: dist.all_to_all_single(landed, sent),
        "computation/cublas": partial(torch.mm, multiplied, m.b),
    }


def peers(m: Matmul) -> dict[str, Work]:
    """What PyTorch has for this operator."""
    works: dict[str, Work] = {}
    if m.problem.op in TENSOR_PARALLEL:
        works["peer/async_tp"] = partial(async_tp, m)
    if m.problem.op == "matmul_all_reduce":
        works |= {f"peer/torch {kind}": torch_all_reduce(m, kind) for kind in TORCH}
    if m.problem.op not in COLUMN_OPS and not m.float8:
        works["peer/torch_compile"] = compiled(m)
    return works


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def compiled(m: Matmul) -> Work:
    """The sequential program with functional collectives by torch.compile, for these shapes. Compiled at its first call."""
    group = world()  # outside of the programs, since Dynamo does not trace it
    programs: dict[str, Program] = {
        "all_gather_matmul": lambda a, b: functional.all_gather_tensor(a, 0, group) @ b,
        "matmul_reduce_scatter": lambda a, b: functional.reduce_scatter_tensor(a @ b, "sum", 0, group),
        "matmul_all_reduce": lambda a, b: functional.all_reduce(a @ b, "sum", group),
        "matmul_all_to_all": lambda a, b: functional.all_to_all_single(a @ b, None, None, group),
        "all_to_all_matmul": lambda a, b: functional.all_to_all_single(a, None, None, group) @ b,
    }
    return partial(torch.compile(programs[m.problem.op], dynamic=False, fullgraph=True), m.a, m.b)


def async_tp(m: Matmul) -> Tensor:
    """PyTorch's asynchronous tensor parallelism, of scaled operands or of plain ones."""
    ops, name, gather = torch.ops.symm_mem, world().group_name, m.exchange.first
    if not m.float8:
        if gather:
            outs: list[Tensor] = ops.fused_all_gather_matmul(m.a, [m.b], 0, name)[1]
            return outs[0]
        out: Tensor = ops.fused_matmul_reduce_scatter(m.a, m.b, "sum", 0, name)
        return out
    scale_a, scale_b = m.scales["scale_a"], m.scales["scale_b"]
    if gather:
        dtypes, call = [torch.bfloat16], ops.fused_all_gather_scaled_matmul
        outs = call(m.a, [m.b], scale_a, [scale_b], 0, name, [None], [None], dtypes, [True])[1]
        return outs[0]
    scatter = partial(ops.fused_scaled_matmul_reduce_scatter, out_dtype=torch.bfloat16, use_fast_accum=True)
    return scatter(m.a, m.b, scale_a, scale_b, "sum", 0, 0, name, list(m.shape))  # type: ignore[no-any-return]


def torch_all_reduce(m: Matmul, kind: str) -> Work:
    """torch.mm into symmetric memory, which one of PyTorch's symmetric-memory all-reduces sums."""
    whole, name = symmetric_memory.empty(m.shape, device=torch.device("cuda"), dtype=torch.bfloat16), world().group_name
    symmetric_memory.rendezvous(whole, name)
    reduce = torch.ops.symm_mem.one_shot_all_reduce if kind == "one_shot" else torch.ops.symm_mem.two_shot_all_reduce_

    def work() -> object:
        torch.mm(m.a, m.b, out=whole)
        return reduce(whole, "sum", name)

    return work


def in_float8(m: Matmul, works: Mapping[str, Work]) -> dict[str, Work]:
    """What is timed only in FP8, and of matmul_all_reduce in FP8 in rows of bfloat16."""
    if m.problem.op == "matmul_all_reduce":
        return {f"float8/{spec}": _all_reduce_in_float8(m, spec) for spec in FLOAT8_SPECS}
    if not m.float8:
        return {}
    gather, one, product = m.exchange.first, m.scales["scale_a"][:1], m.product

    def tensorwise() -> Tensor:
        a = m.a.new_empty(m.shape[0], m.a.shape[1]) if gather else m.a
        return torch._scaled_mm(a, m.b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True, out=product)

    made: dict[str, Work] = {"computation/tensorwise": tensorwise}
    if gather:
        quantise = torch.compile(quantised, dynamic=False, fullgraph=True)
        after = works["sequential/default"]
        made["quantised/sequential"] = lambda: (quantise(m.given), after())[1]
        scales = {"scale_b": m.scales["scale_b"], "use_fast_accum": True}
        made["quantised/auto"] = lambda: weft.all_gather_matmul(m.given, m.b, **scales)
    return made


def _all_reduce_in_float8(m: Matmul, spec: str) -> Work:
    (a, scale_a), (b, scale_b) = quantised(m.a), quantised(m.b.t())
    scales: dict[str, Any] = {"scale_a": scale_a, "scale_b": scale_b.t(), "use_fast_accum": True}
    return partial(weft.matmul_all_reduce, a, b.t(), schedule=spec, **scales)


def windows(problem: Problem) -> tuple[int, int]:
    """Bytes of a shard and of a whole that NCCL's registered buffers hold for a problem of one host."""
    if problem.op in TENSOR_PARALLEL:
        return problem.shard_bytes, problem.shard_bytes * problem.world_size
    width = problem.k if EXCHANGES[problem.op].first else problem.n
    return (problem.m * width * problem.itemsize,) * 2


def halves(m: Matmul, *, drawn: bool = False) -> dict[str, Work]:
    """The whole collective by NCCL, in shards of the longest one's rows, and the whole product by cuBLAS. drawn: what travels
    is normally distributed, and not zeros, but for sums, which would grow from call to call."""
    rows, columns = m.shape
    a = m.a if len(m.a) == rows else torch.randn(rows, m.a.shape[1], **m.options)
    out = None if drawn else torch.empty(rows, columns, **m.options)
    return {
        "communication/default": alone(m.problem, m.options, drawn=drawn),
        "computation/cublas": partial(torch.mm, a, m.b, out=out),
    }


def alone(problem: Problem, options: Mapping[str, Any], *, columns: int = 0, drawn: bool = False) -> Work:
    """A problem's collective by NCCL. columns: of what travels; default: as the problem has them."""
    first = problem.op in ("all_gather_matmul", "all_to_all_matmul")
    columns, make = columns or (problem.k if first else problem.n), torch.randn if drawn else torch.zeros
    low, high = problem.shards[0]
    if problem.op == "matmul_all_reduce":
        return partial(dist.all_reduce, torch.zeros(problem.m, problem.n, **options))
    whole = make((high - low) * problem.world_size, columns, **options)
    if problem.op == "all_gather_matmul":
        return partial(dist.all_gather_into_tensor, whole, make(high - low, columns, **options))
    if problem.op == "matmul_reduce_scatter":
        return partial(dist.reduce_scatter_tensor, make(high - low, columns, **options), whole)
    return partial(dist.all_to_all_single, torch.empty_like(whole), whole)


def close_sample(expected: Tensor) -> Check:
    """A check of a few hundred rows: differences of at most 3% of their largest element. A wrong result is left out like a
    method that fails, with its reason, so that the other problems are still measured."""
    rows = _sample(expected)
    largest = float(rows.abs().max()) or 1.0

    def check(name: str, result: object) -> None:
        if name.startswith(("computation/", "communication/")):
            return
        worst = float((_sample(result) - rows).abs().max()) / largest  # type: ignore[arg-type]
        if not worst <= TOLERANCE:
            raise ArithmeticError(f"WRONG RESULT: {name} is off by {worst:.3g} of the largest element; {TOLERANCE} is allowed")

    return check


def _sample(result: Tensor) -> Tensor:
    return result[:: max(1, len(result) // SAMPLED)].float()
