"""When FSDP2 gathers parameters, and how long they stay gathered.

fully_shard moves parameters and gradients by NCCL, on streams of its own. A way says how far ahead of the layers that need them
parameters are gathered, and how often a step. `vendor` alone is what fully_shard does by itself: then nothing is hooked.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from weft.compat.dispatch import NO_BACKWARD, backward_pass
from weft.compat.fsdp import before_registered_methods, forward_has_begun
from weft.ops.common import group_of
from weft.overlap.concurrent.calls import calls_of
from weft.overlap.concurrent.choice import ConcurrentChoice
from weft.overlap.hooks.gathered import GatherOrder
from weft.overlap.hooks.ways import named
from weft.runtime.groups import GROUPS
from weft.schedules.concurrent import PLAIN, Method, parse

KEPT = "vendor+keep"
"""What auto takes where there is room for all parameters: they are gathered once a step and not twice."""
_FSDP_DECIDES = ("late", "pull", "left", "resident", "priority", "ctas")
_LIKE = ("vendor", "vendor+ahead=1", KEPT)


def fsdp(
    model: nn.Module,
    *,
    way: str = "vendor",
    group: dist.ProcessGroup | None = None,
    key: str = "fsdp",
    spare_bytes: int = 0,
) -> ConcurrentChoice:
    """Say when the modules of `model` that fully_shard was applied to gather their parameters. Once, before the first step.

    Args:
        model: one of whose modules fully_shard was applied to.
        way: vendor, with +ahead=N (groups gathered ahead in forward) and +keep (gathered once a step, not twice); or auto,
            which is vendor+keep where spare_bytes has room for all parameters, and else vendor.
        group: the ranks that agree on it. Default: the default group.
        key: names this model in weft.concurrent_choices.
        spare_bytes: what gathered parameters may take more of this device's memory than fully_shard has them take. The same on
            every rank.

    What is returned has the way that steps take. Any mixed precision, reshard_after_forward and offloading to CPUs may be
    fully_shard's. Raises ValueError for a model without such a module, on no device yet, or that has this hook already, and for
    another way; RankMismatch where ranks take different ways.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    parameters = [each for each in model.parameters() if isinstance(each, DTensor)]
    if not sharded or not parameters:
        raise ValueError("model has no module of fully_shard's; call torch.distributed.fsdp.fully_shard on it first")
    if parameters[0].device.type == "meta":
        raise ValueError("model is on the meta device; materialise it first")
    way = named(way, plain="vendor", without=_FSDP_DECIDES, like=_LIKE)
    if way != "auto" and parse(way).transport != "vendor":
        raise ValueError(
            f"way is {way!r}, but fully_shard overlaps by itself, by NCCL; use auto, or one like {', '.join(_LIKE)}"
        )
    if any(isinstance(getattr(hook, "__self__", None), _Steps) for hook in model._forward_pre_hooks.values()):
        raise ValueError("model has this hook already; call weft.hooks.fsdp once a model")
    choice = ConcurrentChoice(key=key, way=way, note="it was given")
    if way == "auto":
        nbytes = sum(each.numel() * each.element_size() for each in parameters)
        fits = nbytes <= spare_bytes
        why = f"all parameters take {nbytes} bytes, and spare_bytes is {spare_bytes}"
        choice = ConcurrentChoice(key=key, way=KEPT if fits else str(PLAIN), note=why)
    calls_of(GROUPS.state(group_of(group)[0])).add_hook(choice)
    method = parse(choice.way)
    if method != PLAIN:
        steps = _Steps(method, GatherOrder(sharded))
        model.register_forward_pre_hook(steps.forward, prepend=True)
        for module in sharded:
            before_registered_methods(module, steps.enter)
    return choice


class _Steps:
    """A forward pass gathers as the method says. One without gradients is fully_shard's own: kept parameters would be stale
    once the optimizer has changed them. Other methods begin a pass, too, by torch's register_fsdp_forward_method: a module's
    hooks do not see them."""

    def __init__(self, method: Method, gathered: GatherOrder) -> None:
        self._method, self._gathered = method, gathered

    def forward(self, module: nn.Module, args: Any) -> None:
        self._gathered.take(self._method if torch.is_grad_enabled() else PLAIN)

    def enter(self, module: Any) -> None:
        """Before a registered method of a module, unless a backward pass makes up for what was not kept."""
        if backward_pass() != NO_BACKWARD:
            return
        if not forward_has_begun(module):
            self.forward(module, ())
        self._gathered.note(module)
