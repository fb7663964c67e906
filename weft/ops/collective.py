"""This operator runs a collective of whole rows and returns a new tensor. The functions of weft.collectives call it.

weft::collective(x [m, ...], op, ...)   -> out

op                out                      its gradient
all_gather        [world_size * m, ...]    reduce_scatter, sum
reduce_scatter    [m / world_size, ...]    all_gather, divided by world_size if it averages
all_to_all        [m, ...]                 all_to_all
all_reduce        [m, ...]                 all_reduce
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from weft.compat.dispatch import without_inference_mode
from weft.core.problem import Op
from weft.ops.common import choose_backward_schedule
from weft.ops.operator import define
from weft.runtime.choose import readable_profile
from weft.runtime.collective_calls import CollectiveCall, check_summed, staging_from_environment

_BACKWARD: dict[str, Op] = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
    "all_reduce": "all_reduce",
}


class _Options(NamedTuple):
    """_Options holds the options of weft::collective.

    group: the name of the process group.
    staging_bytes, sms: 0 for the default.
    """

    op: str
    reduce_op: str
    group: str
    world_size: int
    schedule: str
    staging_bytes: int
    sms: int

    def shape(self, x: torch.Tensor) -> tuple[Any, ...]:
        """Return the shape of the result."""
        rows = {"all_gather": x.shape[0] * self.world_size, "reduce_scatter": x.shape[0] // self.world_size}
        return (rows.get(self.op, x.shape[0]), *x.shape[1:])


def default_sms(device: torch.device) -> int:
    """Return the number of SMs that a lane of communication blocks occupies on this machine."""
    return 2 * readable_profile(device).stores.sms


def collective_call(
    op: str,
    x: torch.Tensor,
    out: torch.Tensor,
    group: str,
    schedule: str,
    reduce_op: str,
    staging_bytes: int | None,
    sms: int | None,
    **more: Any,
) -> CollectiveCall:
    """Return a CollectiveCall. group: its name. staging_bytes, sms: None or 0 for the default."""
    staging_bytes, sms = staging_bytes or staging_from_environment(x.device), sms or default_sms(x.device)
    options: dict[str, Any] = {"op": op, "reduce_op": reduce_op, "staging_bytes": staging_bytes, "sms": sms}
    return CollectiveCall(a=x, out=out, group=group, schedule=schedule, **options, **more)


def _run(x: torch.Tensor, options: _Options) -> CollectiveCall:
    op, reduce_op, group, _, schedule, staging_bytes, sms = options
    with without_inference_mode():  # as results of a BoundCall, and of other operators
        out = x.new_empty(options.shape(x))
    return collective_call(op, x.contiguous(), out, group, schedule, reduce_op, staging_bytes, sms, fresh=True)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.options = inputs


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor]:
    options: _Options = ctx.options
    op = _BACKWARD[options.op]
    if op == "reduce_scatter":
        check_summed(op, f"the gradient of {options.op}", grad)
    if options.op == "reduce_scatter" and options.reduce_op == "avg":
        grad = grad / options.world_size
    schedule = options.schedule if op == options.op else choose_backward_schedule(options.schedule, op)
    reduce_op = options.reduce_op if op == "all_reduce" else "sum"
    return (collective(grad, *options._replace(op=op, reduce_op=reduce_op, schedule=schedule)),)


collective = define(
    "collective",
    _run,
    lambda x, options: x.new_empty(options.shape(x)),
    returns=torch.Tensor,
    save=_save,
    backward=_backward,
)
"""The operator weft::collective."""
