"""What does the fused chain of serving gain: a row-parallel matmul, its all-reduce, the residual and the RMSNorm that follows?

Parts, all in one run unless --only names some. Models: Llama 3 8B and 70B and Qwen 3 32B, bfloat16, random operands, tensor
parallel over all ranks. Matmuls: o_proj and down_proj of each.

    few        1 to 128 rows, as in decoding
    step       a decoding step of two layers of Llama 3 70B (serving_step.py: what stands for attention, and what is compiled)
    prefill    512 to 8192 rows
    product    1 to 128 rows of a finished product: weft.all_reduce_norm

Methods (serving_chains.py). The residual's sum and the norm are one kernel of Inductor's (torch.compile(dynamic=False)),
except where weft's call has them. On CPUs nothing is compiled.

    sequential/default      matmul, NCCL's all-reduce, norm
    sequential/scattered    prefill: matmul, NCCL's reduce-scatter, norm of own rows, all-gather; the residual is sharded
    peer/torch KIND         matmul, PyTorch's one_shot or two_shot all-reduce in symmetric memory, norm
    weft/unfused            weft.matmul_all_reduce, norm
    weft/scattered          prefill: weft.matmul_reduce_scatter, norm of own rows, all-gather; the residual is sharded
    weft/auto               weft.matmul_all_reduce_norm, or weft.all_reduce_norm
    weft/residual_sharded   prefill: with residual_sharded=True
    weft/token_split:N      prefill: by that schedule
    part/matmul_all_reduce  weft.matmul_all_reduce alone

Protocol: measure.py's. On GPUs a sample is a CUDA graph of several calls. On CPUs everything is tiny and eager, and only shows
that the benchmark works. `error` of a row is, for the norm and the sum of each method, the norm of the difference from float64
over the norm of the latter, of about 128 rows, on rank 0. A method that raises, or whose error exceeds TOLERANCE, is left out,
with the reason in `missing`. serving_table.py prints the figures again. A case whose rows are in the --json file is not
measured again, so that a run that was cut off can be started again.

    torchrun --nproc-per-node 2 -m benchmarks.serving --json benchmarks/results/h200x2/serving.jsonl
    torchrun --nproc-per-node 2 -m benchmarks.serving --quick --only few,step
    python -m benchmarks.serving_table benchmarks/results/h200x2/serving.jsonl

Cases that have not begun when the time of --budget-s is over are left out, and the run ends with status 1. Run it again with
the same file for the others. Give WEFT_CACHE_DIR a folder, so that what auto chose is taken over.
Traps: the calls of a graph use one weight, of which the GPU's cache keeps a part; this favours all methods. A finished product
is zeros while it is timed, since NCCL's and PyTorch's sums in place would grow without bound. NVLink multicast is off, so that
PyTorch's multimem all-reduces are not among the peers. How long all cases take on GPUs was not measured; the default of
--budget-s keeps a run below five minutes.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, zip_longest
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

import weft
from benchmarks import measure
from benchmarks.decoder import Sizes
from benchmarks.measure import AnyProblem, Check, Failed, Work, each_mode, parser, row, together, trial
from benchmarks.rows import AUTO, CASE, Row
from benchmarks.runner import make_presence_check, parse_only, run_parts
from benchmarks.serving_chains import (
    EPS,
    Pair,
    Symmetric,
    add_norm,
    double,
    few_chains,
    norm_of,
    prefill_chains,
    sharded_chains,
    symmetric_memories,
    unavailable,
)
from benchmarks.serving_step import make_step
from benchmarks.serving_table import ALONE, BENCH, PARTS, REFERENCE, summary
from benchmarks.training import MODELS, tiny
from weft.core.problem import Problem

Tensor = torch.Tensor
Part = Literal["few", "step", "prefill", "product"]
ROUNDS, ALARM_S, BUDGET_S = 9, 120, 270
"""Inductor compiles in a stage. The budget leaves half a minute of five for the start and the last case."""
TOLERANCE = 0.05
"""The largest error with which a method is measured. Two layers of bfloat16 are off by about 0.01."""
SAMPLED = 128
"""Rows of a result that are compared with float64."""
SERVED = ("llama3-8b", "llama3-70b", "qwen3-32b")
ROWS: dict[str, dict[Part, tuple[int, ...]]] = {
    "cuda": {
        "few": (16, 128, 1, 64, 8, 32),
        "step": (16, 1, 128, 64),
        "prefill": (2048, 8192, 512, 4096, 1024),
        "product": (16, 128, 1, 64, 8, 32),
    },
    "cpu": {"few": (4, 1), "step": (4, 1), "prefill": (32, 16), "product": (4, 1)},
}
"""By device. Parts take turns. The first numbers of rows are --quick's."""
OPS: dict[Part, str] = {
    "few": "matmul_all_reduce_norm",
    "product": "all_reduce_norm",
    "step": "decoding_step",
    "prefill": "matmul_all_reduce_norm",
}
SAMPLE_US, FEWEST_CALLS, MOST_CALLS = 1500.0, 2, 16
"""About the time of a sample, and the least and the most calls that it has."""
_RATE = 5e8
"""FLOPs in a microsecond that a rank's matmul may reach."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """layer: o_proj, down_proj; "" where the part has none. m: rows. k: of all ranks. sizes: of the model, tiny on CPUs."""

    part: Part
    model: str
    sizes: Sizes
    layer: str = ""
    m: int
    k: int = 0
    bench: str = field(default=BENCH, init=False)
    dtype: str = field(default="bfloat16", init=False)

    def __str__(self) -> str:
        return f"{self.part}: {self.name}"

    @property
    def op(self) -> str:
        return OPS[self.part]

    @property
    def n(self) -> int:
        return self.sizes.hidden

    @property
    def name(self) -> str:
        if self.part == "step":
            return f"{self.model} x {self.sizes.layers} layers M={self.m}"
        return f"{self.model} {self.layer} M={self.m}" if self.layer else f"N={self.n} M={self.m}"

    def calls(self, ranks: int) -> int:
        """Of a sample."""
        layer = self.sizes.hidden * (self.sizes.heads + 2 * self.sizes.kv_heads) * self.sizes.head + self.sizes.hidden * (
            self.sizes.heads * self.sizes.head + 3 * self.sizes.width
        )
        products = self.sizes.layers * layer if self.part == "step" else self.k * self.n
        bytes_us = products / ranks * 2 / 4e6  # a weight is read at 4 TB/s
        us = 15 + max(bytes_us, 2 * self.m * products / ranks / _RATE)
        return max(FEWEST_CALLS, min(MOST_CALLS, round(SAMPLE_US / us)))


def cases(parts: Sequence[str], device: str, *, quick: bool) -> list[Case]:
    """First the first number of rows of each part, then the second ones. quick: only the first ones, of one model."""
    models = {name: replace(MODELS[name], layers=2) for name in SERVED[: 1 if quick else None]}
    if device == "cpu":
        models = {name: tiny(sizes) for name, sizes in models.items()}
    turns = zip_longest(*(ROWS[device][part] for part in ROWS[device]))
    found: list[Case] = []
    for turn in islice(turns, 1 if quick else None):
        for part, m in zip(ROWS[device], turn, strict=True):
            if part in parts and m is not None:
                found += _of_rows(part, models, m, device)
    return found


def _of_rows(part: Part, models: Mapping[str, Sizes], m: int, device: str) -> list[Case]:
    if part == "step":
        name, sizes = "llama3-70b", replace(MODELS["llama3-70b"], layers=2)
        return [Case(part=part, model=name, sizes=tiny(sizes) if device == "cpu" else sizes, m=m)]
    if part == "product":
        of_width = {sizes.hidden: (name, sizes) for name, sizes in models.items()}
        return [Case(part=part, model=name, sizes=sizes, m=m) for name, sizes in of_width.values()]
    return [
        Case(part=part, model=name, sizes=sizes, layer=layer, m=m, k=k)
        for name, sizes in models.items()
        for layer, k in (("o_proj", sizes.heads * sizes.head), ("down_proj", sizes.width))
    ]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is timed of a case, by method. expected: (norm, sum) in float64, of the rows `sampled`. outcome: makes what is
    compared from a method's name and the result of its call. problem: of the fused call."""

    works: Mapping[str, Work]
    expected: Pair
    sampled: Tensor
    rows: int
    outcome: Callable[[str, Any], Pair] = lambda name, result: result
    problem: AnyProblem | None = None

    def errors(self, normed: Tensor, whole: Tensor) -> dict[str, float]:
        """The norm is of all rows; the sum may be of this rank's alone."""
        wanted, at = self.expected[1], self.sampled
        if len(whole) < self.rows:
            low = len(whole) * dist.get_rank()
            own = (at >= low) & (at < low + len(whole))
            wanted, at = wanted[own], at[own] - low
        return {"norm": error(normed[self.sampled], self.expected[0]), "sum": error(whole[at], wanted)}

    def check(self, found: dict[str, dict[str, float]]) -> Check:
        """A trial's check. found: is given the errors of each method."""

        def check(name: str, result: object) -> None:
            if name == ALONE:
                return
            found[name] = self.errors(*self.outcome(name, result))
            wrong = {what: round(value, 4) for what, value in found[name].items() if not value <= TOLERANCE}
            if wrong:
                raise ArithmeticError(f"WRONG RESULT: relative errors {wrong}; {TOLERANCE} is allowed")

        return check


def error(result: Tensor, expected: Tensor) -> float:
    """The norm of the difference over that of what is expected, in float64."""
    return float((result.double() - expected).norm() / expected.norm())


def sample(rows: int, device: str) -> Tensor:
    return torch.arange(0, rows, max(1, rows // SAMPLED), device=device)


def drawn(rows: int, columns: int, device: str, seed: int) -> tuple[Tensor, Tensor]:
    """A residual and a norm's weight, the same on every rank. Afterwards each rank draws numbers of its own."""
    torch.manual_seed(seed)
    residual = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
    weight = 1 + 0.1 * torch.randn(columns, device=device, dtype=torch.bfloat16)
    torch.manual_seed(seed + 1 + dist.get_rank())
    return residual, weight


def make_chains(case: Case, device: str) -> Bench:
    """few and prefill."""
    ranks, sharded = dist.get_world_size(), case.part == "prefill"
    residual, weight = drawn(case.m, case.n, device, 7)
    a = torch.randn(case.m, case.k // ranks, device=device, dtype=torch.bfloat16)
    b = torch.randn(case.n, case.k // ranks, device=device, dtype=torch.bfloat16).mul_(case.k**-0.5).t()
    at = sample(case.m, device)
    works: dict[str, Work] = {
        name: partial(chain, a, b, residual, weight)
        for name, chain in (prefill_chains if sharded else few_chains)(device).items()
    }
    if sharded:
        own = residual.chunk(ranks)[dist.get_rank()].contiguous()
        works |= {name: partial(chain, a, b, own, weight) for name, chain in sharded_chains(device).items()}
    return Bench(
        works={**works, ALONE: partial(weft.matmul_all_reduce, a, b)},
        expected=double(a[at], b, residual[at], weight),
        sampled=at,
        rows=case.m,
        problem=Problem(
            op="matmul_all_reduce", m=case.m, n=case.n, k=case.k, world_size=ranks, addends=("residual",), norm_eps=EPS
        ),
    )


def make_product(case: Case, device: str) -> Bench:
    """Each method has its own copy of the product, drawn before a call that is compared, and zeros while it is timed."""
    residual, weight = drawn(case.m, case.n, device, 7)
    product, norm = torch.randn_like(residual), norm_of(device)
    own, landed = torch.zeros_like(product), torch.zeros_like(product)
    copies = {REFERENCE: own, AUTO: landed}

    def nccl() -> Pair:
        dist.all_reduce(own)
        return norm(own, residual, weight)

    def symmetric(memory: Symmetric) -> Pair:
        return norm(memory.all_reduce(memory.memory(product.shape, product.dtype)), residual, weight)

    works: dict[str, Work] = {
        REFERENCE: nccl,
        AUTO: partial(weft.all_reduce_norm, landed, residual, weight, eps=EPS),
    }
    for name, memory in symmetric_memories(device).items():
        works[name] = partial(symmetric, memory)
        copies[name] = memory.memory(product.shape, product.dtype).zero_()

    def outcome(name: str, result: Any) -> Pair:
        copies[name].copy_(product)
        measure.synchronize()
        dist.barrier()  # no rank reads a peer's copy before it is drawn
        found = cast(Pair, works[name]())
        copies[name].zero_()
        return found

    expected, at = product.double(), sample(case.m, device)
    dist.all_reduce(expected)
    wanted = add_norm(expected, residual.double(), weight.double())
    return Bench(works=works, expected=(wanted[0][at], wanted[1][at]), sampled=at, rows=case.m, outcome=outcome)


def make_decoding_step(case: Case, device: str) -> Bench:
    step = make_step(case.sizes, case.m, dist.get_world_size(), dist.get_rank(), device)
    chains = few_chains(device)
    return Bench(
        works={name: partial(step.with_chain, device, chain) for name, chain in chains.items()},
        expected=step.double(double),
        sampled=torch.arange(case.m, device=device),
        rows=case.m,
    )


MAKERS: dict[Part, Callable[[Case, str], Bench]] = {
    "few": make_chains,
    "product": make_product,
    "step": make_decoding_step,
    "prefill": make_chains,
}


@torch.no_grad()
def measured(case: Case, arguments: argparse.Namespace) -> list[Row]:
    """The rows of a case, one for each mode. Raises Failed."""
    absent = unavailable(arguments.device)
    bench = together(str(case), partial(MAKERS[case.part], case, arguments.device))
    found: dict[str, dict[str, float]] = {}
    times, missing = trial(
        bench.works,
        arguments.modes.split(","),
        check=bench.check(found),
        needed=(REFERENCE,),
        rounds=arguments.rounds,
        repeat=case.calls(dist.get_world_size()),
    )
    choices = weft.choices()
    return each_mode(
        times,
        **about(case, arguments),
        problem=bench.problem,
        chosen=next((choice.spec for choice in choices if choice.problem == bench.problem), None),
        missing={**absent, **missing},
        extra={
            **extra(case),
            "error": {name: found[name] for name in bench.works if name in found and name not in missing},
            "choices": {str(choice.problem): choice.us or {choice.spec: None} for choice in choices},
        },
    )


def about(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """Arguments of measure.row."""
    found = {"bench": case.bench, "op": case.op, "case": case.name, "dtype": case.dtype}
    return {**found, "arguments": arguments, "device": arguments.device}


def extra(case: Case) -> dict[str, Any]:
    return {"part": case.part, "model": case.model, "layer": case.layer, "rows": case.m}


def measured_in_time(begun_s: float, case: Case, arguments: argparse.Namespace) -> Iterator[Row]:
    """As measured. A case that the budget has no time for, or that fails, has a row that says why, and Failed is raised."""
    try:
        yield from _within(begun_s, case, arguments)
    except Failed as failed:
        for mode in arguments.modes.split(","):
            yield row(mode=mode, us={}, missing={CASE: str(failed)}, extra=extra(case), **about(case, arguments))
        raise


def _within(begun_s: float, case: Case, arguments: argparse.Namespace) -> list[Row]:
    spent = [0.0] * dist.get_world_size()
    dist.all_gather_object(spent, time.monotonic() - begun_s)
    if max(spent) > arguments.budget_s:
        raise Failed("budget", f"the {arguments.budget_s:g} s of --budget-s are over")
    return measured(case, arguments)


def make_parser() -> argparse.ArgumentParser:
    options = parser(__doc__, rounds=ROUNDS, modes="")
    options.add_argument("--only", default=",".join(PARTS), help="parts, with commas (%(default)s)")
    options.add_argument("--quick", action="store_true", help="one model and one number of rows of each part")
    options.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds after which no case begins (%(default)s)")
    options.add_argument("--device", choices=tuple(ROWS), default="cuda" if torch.cuda.is_available() else "cpu")
    return options


def main() -> None:
    begun_s = time.monotonic()
    options = make_parser()
    arguments = options.parse_args()
    arguments.modes = arguments.modes or ("graph" if arguments.device == "cuda" else "eager")
    try:
        found = cases(parse_only(arguments.only, list(PARTS)), arguments.device, quick=arguments.quick)
    except ValueError as error:
        options.error(str(error))
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    torch._dynamo.config.recompile_limit = 256  # each function is compiled for every shape
    measure.PLANS = os.environ.get("WEFT_CACHE_DIR", "")
    is_present = make_presence_check(arguments)
    left = [case for case in found if not is_present(case)]
    run_parts(
        left,
        partial(measured_in_time, begun_s),
        arguments,
        alarm_s=ALARM_S,
        device=arguments.device,
        summarise=lambda rows: f"{len(left)} of {len(found)} cases were left to measure\n{summary(rows)}",
    )


if __name__ == "__main__":
    main()
