"""Collectives as functions of a tensor, along its first dimension, which autograd goes through.

    forward                    backward
    all_gather(x)              reduce_scatter(grad)
    reduce_scatter(x)          all_gather(grad)
    all_to_all(x)              all_to_all(grad)
    all_reduced(x)             all_reduced(grad)

Backward is collective, with the forward's options: all ranks run it, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from weft.collectives.checks import Reduction, call_of, reduction
from weft.collectives.work import run
from weft.ops.checks import group_of, shape_of
from weft.problem import Op
from weft.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class _Options:
    group: dist.ProcessGroup | None
    reduce_op: Reduction = "sum"
    schedule: str | Schedule = "auto"
    staging_bytes: int | None = None
    sms: int | None = None


def all_gather(
    x: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    staging_bytes: int | None = None,
    sms: int | None = None,
) -> torch.Tensor:
    """[m, ...] of every rank as [world_size * m, ...]. Any dtype. Options as for all_gather_into_tensor."""
    options = _Options(group=group, schedule=schedule, staging_bytes=staging_bytes, sms=sms)
    return _applied("all_gather", x, options)


def reduce_scatter(
    x: torch.Tensor,
    op: Reduction = "sum",
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    staging_bytes: int | None = None,
    sms: int | None = None,
) -> torch.Tensor:
    """[world_size * m, ...] of every rank, summed or averaged; this rank's [m, ...]. Options as for reduce_scatter_tensor."""
    options = _Options(group=group, reduce_op=reduction(op), schedule=schedule, staging_bytes=staging_bytes, sms=sms)
    return _applied("reduce_scatter", x, options)


def all_to_all(
    x: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    staging_bytes: int | None = None,
    sms: int | None = None,
) -> torch.Tensor:
    """[world_size * m, ...]: rows of part d go to rank d; as many rows, from all ranks. Options as for all_to_all_single."""
    options = _Options(group=group, schedule=schedule, staging_bytes=staging_bytes, sms=sms)
    return _applied("all_to_all", x, options)


def all_reduced(
    x: torch.Tensor,
    op: Reduction = "sum",
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    staging_bytes: int | None = None,
    sms: int | None = None,
) -> torch.Tensor:
    """The sum, or average, of all ranks' x, as a new tensor. Options as for all_reduce."""
    options = _Options(group=group, reduce_op=reduction(op), schedule=schedule, staging_bytes=staging_bytes, sms=sms)
    return _applied("all_reduce", x, options)


def _applied(op: Op, x: torch.Tensor, options: _Options) -> torch.Tensor:
    if not isinstance(x, torch.Tensor) or x.dim() < 1:
        raise ValueError(f"x is {shape_of(x)}; it must be a tensor of at least one dimension")
    world_size = group_of(options.group)[2]
    if op in ("reduce_scatter", "all_to_all") and x.shape[0] % world_size:
        raise ValueError(f"x is {shape_of(x)}; its first dimension must be a multiple of world_size, {world_size}")
    return _Collective.apply(x, op, options)  # type: ignore[no-any-return, no-untyped-call]


def _run(op: Op, x: torch.Tensor, options: _Options) -> torch.Tensor:
    world_size = group_of(options.group)[2]
    rows: dict[str, Callable[[int], int]] = {
        "all_gather": lambda m: m * world_size,
        "reduce_scatter": lambda m: m // world_size,
    }
    out = x.new_empty(rows.get(op, int)(x.shape[0]), *x.shape[1:])
    name, call = call_of(
        op,
        out,
        x.contiguous(),
        options.group,
        names=("x", "x"),
        reduce_op=options.reduce_op,
        schedule=options.schedule,
        staging_bytes=options.staging_bytes,
        sms=options.sms,
    )
    run(name, call, async_op=False, stream=None)
    return out


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: Op, options: _Options) -> torch.Tensor:
        ctx.op, ctx.options = op, options
        return _run(op, x, options)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        back: dict[Op, Op] = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
        op, options = back.get(ctx.op, ctx.op), ctx.options
        if ctx.op == "reduce_scatter" and options.reduce_op == "avg":
            grad = grad / group_of(options.group)[2]
        if op != "all_reduce":
            options = replace(options, reduce_op="sum")
        if ctx.op != op and not isinstance(options.schedule, str):
            options = replace(options, schedule="auto")
        return _run(op, grad, options), None, None
