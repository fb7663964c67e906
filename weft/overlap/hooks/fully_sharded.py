"""A hook that sets when FSDP2 gathers parameters, and how long they stay gathered.

fully_shard moves parameters and gradients by NCCL on streams of its own. A schedule's name (`method`) says how many parameter
groups are gathered ahead of the computation, and whether they are gathered once or twice a step. `nccl` alone is
fully_shard's own behaviour, and registers no hooks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from weft.compat.dispatch import NO_BACKWARD, backward_pass
from weft.compat.dtensors import before_registered_methods, forward_has_begun
from weft.ops.common import resolve_group
from weft.overlap.concurrent.calls import get_caches
from weft.overlap.concurrent.choice import ConcurrentChoice
from weft.overlap.hooks.gathered import GatherOrder
from weft.overlap.hooks.methods import check_method
from weft.runtime.groups import GROUPS
from weft.schedules.concurrent import PLAIN, Method, parse

UNSHARDED = "nccl+unsharded"
"""auto uses this if memory has room for all parameters: they are gathered once a step instead of twice."""
_SET_BY_FSDP = ("late", "pull", "left", "resident", "priority", "ctas")
_EXAMPLES = ("nccl", "nccl+ahead=1", UNSHARDED)


def fsdp(
    model: nn.Module,
    *,
    method: str = "nccl",
    group: dist.ProcessGroup | None = None,
    key: str = "fsdp",
    spare_bytes: int = 0,
) -> ConcurrentChoice:
    """Set when a model that uses fully_shard gathers its parameters. Call it once, before the first step.

    Args:
        model: a model in which fully_shard was applied to at least one module.
        method: "nccl", with any of +ahead=N (gather N groups ahead in the forward pass) and +unsharded (parameters stay
            unsharded after the forward pass, so they are gathered once a step instead of twice), or "auto".
            "auto" is nccl+unsharded if all parameters fit into spare_bytes, and nccl otherwise.
        group: the ranks that must use the same schedule. Default: the default group.
        key: names this model in weft.concurrent_choices.
        spare_bytes: how much more of this device's memory gathered parameters may take than with fully_shard alone. It must be
            the same on every rank.

    The `method` of the returned choice is the schedule that steps run. fully_shard may use any mixed precision,
    reshard_after_forward and CPU offloading. Raises ValueError for a model without fully_shard, on the meta device, or with
    this hook already, and for an unknown method. Raises RankMismatch if ranks use different methods.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    parameters = [each for each in model.parameters() if isinstance(each, DTensor)]
    if not sharded or not parameters:
        raise ValueError("model has no module of fully_shard's; call torch.distributed.fsdp.fully_shard on it first")
    if parameters[0].device.type == "meta":
        raise ValueError("model is on the meta device; materialise it first")
    method = check_method(method, plain="nccl", without=_SET_BY_FSDP, like=_EXAMPLES)
    if method != "auto" and parse(method).transport != "nccl":
        raise ValueError(
            f"method is {method!r}, but fully_shard overlaps by itself, by NCCL; use auto, or one like {', '.join(_EXAMPLES)}"
        )
    if any(isinstance(getattr(hook, "__self__", None), _ForwardHooks) for hook in model._forward_pre_hooks.values()):
        raise ValueError("model has this hook already; call weft.hooks.fsdp once a model")
    choice = ConcurrentChoice(key=key, method=method, note="the caller chose it")
    if method == "auto":
        nbytes = sum(each.numel() * each.element_size() for each in parameters)
        fits = nbytes <= spare_bytes
        why = f"all parameters take {nbytes} bytes, and spare_bytes is {spare_bytes}"
        choice = ConcurrentChoice(key=key, method=UNSHARDED if fits else str(PLAIN), note=why)
    get_caches(GROUPS.state(resolve_group(group)[0])).add_hook(choice)
    chosen = parse(choice.method)
    if chosen != PLAIN:
        steps = _ForwardHooks(chosen, GatherOrder(sharded))
        model.register_forward_pre_hook(steps.forward, prepend=True)
        for module in sharded:
            before_registered_methods(module, steps.enter)
    return choice


class _ForwardHooks:
    """_ForwardHooks sets the gather method at the start of each forward pass.

    A forward pass without gradients uses fully_shard's own method. Parameters that stay gathered after it would be stale once
    the optimizer has changed them. A pass may also begin in another method of a module, which torch's
    register_fsdp_forward_method registers. Forward hooks do not see such calls, so `enter` handles them.
    """

    def __init__(self, method: Method, gathered: GatherOrder) -> None:
        self._method, self._gathered = method, gathered

    def forward(self, module: nn.Module, args: Any) -> None:
        self._gathered.use_method(self._method if torch.is_grad_enabled() else PLAIN)

    def enter(self, module: Any) -> None:
        """Prepare a forward pass before a registered method of a module. Do nothing while a backward pass recomputes it."""
        if backward_pass() != NO_BACKWARD:
            return
        if not forward_has_begun(module):
            self.forward(module, ())
        self._gathered.record_module(module)
