"""These probes run on GPUs and CPUs: matmuls by shape, local copies, and collectives as `sequential` runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.core.problem import Op, Problem
from weft.core.schedule import Collective, steps_of
from weft.runtime.nccl import NcclCollective
from weft.schedules import build
from weft.tools.calibrate.clock import Clock
from weft.tools.calibrate.samples import ProbeSample

COLLECTIVES: dict[str, Op] = {
    "all_gather": "all_gather_matmul",
    "reduce_scatter": "matmul_reduce_scatter",
    "all_reduce": "matmul_all_reduce",
    "all_to_all": "matmul_all_to_all",
}
"""For each NCCL collective, an operator whose sequential program contains it."""
_COLS = 4096
_SHORT_US = 2000.0
_FLOPS_PER_US = {"cuda": 4e8, "cpu": 5e4}


def gemms(device: str, shapes: Sequence[tuple[int, int, int]], dtype: str) -> list[ProbeSample]:
    """Measure torch's matmul. key: its M, N and K."""
    clock = Clock(device)
    found = []
    for m, n, k in shapes:
        options: dict[str, Any] = {"device": clock.device, "dtype": getattr(torch, dtype)}
        a, b = torch.randn(m, k, **options), torch.randn(k, n, **options)
        out = torch.empty(m, n, **options)
        repeat = max(1, min(20, round(_SHORT_US * _FLOPS_PER_US[device] / (2 * m * n * k))))
        found.append(clock.sample(f"gemm {dtype}", (m, n, k), lambda: torch.mm(a, b, out=out), repeat=repeat))  # noqa: B023
    return found


def memory(device: str, nbytes: int) -> list[ProbeSample]:
    """Measure a copy within the rank's memory. key: its bytes."""
    clock = Clock(device)
    src = torch.ones(nbytes, dtype=torch.uint8, device=clock.device)
    dst = torch.empty_like(src)
    return [clock.sample("memory", (nbytes,), lambda: dst.copy_(src), repeat=4)]


def collectives(device: str, op: str, sizes: Sequence[int]) -> list[ProbeSample]:
    """Measure a collective as `sequential` runs it. key: the bytes of a shard, to one peer, or of an all-reduce's part."""
    clock = Clock(device)
    return [_collective(clock, op, nbytes) for nbytes in sizes]


def _collective(clock: Clock, op: str, nbytes: int) -> ProbeSample:
    """Measure one size. On CPUs the dtype is float32, because their libraries may lack other types."""
    dtype = torch.bfloat16 if clock.device.type == "cuda" else torch.float32
    size, cols = dist.get_world_size(), min(_COLS, nbytes // dtype.itemsize)
    rows = nbytes // dtype.itemsize // cols
    name = str(dtype).removeprefix("torch.")
    problem = Problem(op=COLLECTIVES[op], m=rows * size, n=cols, k=cols, world_size=size, dtype=name)  # type: ignore[arg-type]
    schedule = build(problem, "sequential")
    step = next(steps_of(Collective, schedule.ranks[dist.get_rank()]))
    group = dist.group.WORLD
    assert group is not None
    collective = NcclCollective(group, step, problem)
    src, dst = (torch.zeros(*region.shape, dtype=dtype, device=clock.device) for region in (step.src, step.dst))
    return clock.sample(op, (nbytes,), lambda: collective.run(src, dst), repeat=4 if nbytes < 1 << 22 else 1)
