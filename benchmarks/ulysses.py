"""How much of the exchanges around Ulysses' attention do matmul_all_to_all and all_to_all_matmul hide, columns being cut?

Protocol: measure.py's; bf16, normal data; results are compared with sequential's before anything is timed. A case is the
tokens of each rank, the model's width, and the columns of the projection to heads, or rows of the one back.
Baselines of the same run: sequential (torch.mm, NCCL's all_to_all, and the copy that puts columns where they belong), NCCL
alone, cuBLAS alone. ideal = the larger of NCCL alone and cuBLAS alone. Trap: that copy is no part of the ideal.

A part of benchmarks/fused.py, which runs it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

import weft
from benchmarks.all_to_all import drawn, rows_of
from benchmarks.measure import Job, Work
from weft.core.problem import Op

SPECS: dict[Op, tuple[str, ...]] = {
    "matmul_all_to_all_columns": ("shard_p2p", "hetero_unfused_1d:2", "track_and_trigger:1", "track_and_trigger:2"),
    "all_to_all_columns_matmul": ("uniform_fused_1d:2", "flag_gated:2", "flag_gated:4", "direct_store:4"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """tokens of each rank; width of the model; features of all heads."""

    tokens: int
    width: int
    features: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.width}x{self.features}"


CASES: dict[Op, tuple[Case, ...]] = {
    "matmul_all_to_all_columns": (
        Case(tokens=4096, width=4096, features=6144),
        Case(tokens=8192, width=8192, features=10240),
        Case(tokens=16384, width=4096, features=6144),
    ),
    "all_to_all_columns_matmul": (
        Case(tokens=4096, width=4096, features=4096),
        Case(tokens=8192, width=8192, features=8192),
        Case(tokens=16384, width=4096, features=4096),
    ),
}
"""Llama 3 8B and 70B, attention's projections: query, key and value, and output."""


def _to_heads(case: Case, specs: Sequence[str]) -> dict[str, Work]:
    size = dist.get_world_size()
    a, b = drawn(case.tokens, case.width), drawn(case.width, case.features) * case.width**-0.5
    sent, landed = (torch.empty(size, case.tokens, case.features // size, device="cuda", dtype=a.dtype) for _ in range(2))

    def sequential() -> torch.Tensor:
        sent.copy_(torch.mm(a, b).view(case.tokens, size, -1).transpose(0, 1))
        dist.all_to_all_single(landed, sent)
        return landed.view(size * case.tokens, -1)

    return {
        "sequential/default": sequential,
        "communication/default": lambda: dist.all_to_all_single(landed, sent),
        "computation/cublas": partial(torch.mm, a, b),
        **{f"weft/{spec}": partial(weft.matmul_all_to_all, a, b, schedule=spec, split_dim=-1) for spec in specs},
    }


def _from_heads(case: Case, specs: Sequence[str]) -> dict[str, Work]:
    size = dist.get_world_size()
    a, b = drawn(size * case.tokens, case.features // size), drawn(case.features, case.width) * case.features**-0.5
    landed, beside = torch.empty_like(a), drawn(case.tokens, case.features)

    def sequential() -> torch.Tensor:
        dist.all_to_all_single(landed, a)
        beside.view(case.tokens, size, -1).copy_(landed.view(size, case.tokens, -1).transpose(0, 1))
        return torch.mm(beside, b)

    return {
        "sequential/default": sequential,
        "communication/default": lambda: dist.all_to_all_single(landed, a),
        "computation/cublas": partial(torch.mm, beside, b),
        **{f"weft/{spec}": partial(weft.all_to_all_matmul, a, b, schedule=spec, gather_dim=-1) for spec in specs},
    }


def jobs(op: Op, specs: Sequence[str], arguments: argparse.Namespace) -> list[Job]:
    """Cases of one way to measure."""
    works = _to_heads if op == "matmul_all_to_all_columns" else _from_heads
    return [
        Job(name=f"{op} {case}", run=partial(rows_of, op, case, partial(works, case, specs), arguments)) for case in CASES[op]
    ]
