"""weft::collective(x [m, ...], op, ...) -> out: a collective alone, of whole rows, as a new tensor.

    op                out                      its gradient
    all_gather        [world_size * m, ...]    reduce_scatter, sum
    reduce_scatter    [m / world_size, ...]    all_gather, divided where it averages
    all_to_all        [m, ...]                 all_to_all
    all_reduce        [m, ...]                 all_reduce

staging_bytes, sms: 0 for the default.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, cast

import torch

from weft.core.problem import Op
from weft.ops.library import backward_schedule, register, unseen
from weft.runtime.collective_calls import CollectiveCall, check_summed, staging_from_environment
from weft.runtime.groups import GROUPS
from weft.runtime.nearest import nearest_profile

_WAY_BACK: dict[str, Op] = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
    "all_reduce": "all_reduce",
}


@cache
def default_sms(device: torch.device) -> int:
    """What a lane of communication blocks occupies on the machine that this is."""
    return 2 * nearest_profile(device).stores.sms


def _shape(x: torch.Tensor, op: str, world_size: int) -> Sequence[Any]:
    rows = {"all_gather": x.shape[0] * world_size, "reduce_scatter": x.shape[0] // world_size}.get(op, x.shape[0])
    return (rows, *x.shape[1:])


def _collective(
    x: torch.Tensor, op: str, reduce_op: str, group: str, world_size: int, schedule: str, staging_bytes: int, sms: int
) -> torch.Tensor:
    out = x.new_empty(_shape(x, op, world_size))
    call = CollectiveCall(
        op=cast(Op, op),
        schedule=schedule,
        a=x.contiguous(),
        out=out,
        reduce_op=cast(Literal["sum", "avg"], reduce_op),
        staging_bytes=staging_bytes or staging_from_environment(x.device),
        sms=sms or default_sms(x.device),
    )
    GROUPS.run(group, call)
    return out


def run_collective(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """weft::collective."""
    way = _collective if unseen(x) else torch.ops.weft.collective
    return cast(torch.Tensor, way(x, *rest))


def _fake(x: torch.Tensor, op: str, reduce_op: str, group: str, world_size: int, *rest: Any) -> torch.Tensor:
    return x.new_empty(_shape(x, op, world_size))


def _context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, *ctx.site = inputs


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    op, reduce_op, group, world_size, schedule, *rest = ctx.site
    back = _WAY_BACK[op]
    if back == "reduce_scatter":
        check_summed(back, f"the gradient of {op}", grad)
    spec = schedule if back == op else backward_schedule(schedule, back)
    if op == "reduce_scatter" and reduce_op == "avg":
        grad = grad / world_size
    kept = reduce_op if back == "all_reduce" else "sum"
    return (torch.ops.weft.collective(grad, back, kept, group, world_size, spec, *rest), *([None] * 7))


register(
    "collective(Tensor x, str op, str reduce_op, str group, int world_size, str schedule, int staging_bytes, int sms)"
    " -> Tensor",
    run=_collective,
    fake=_fake,
    context=_context,
    backward=_backward,
)
