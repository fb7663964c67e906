"""A hook that sets when FSDP2 gathers parameters, and how long they stay gathered.

fully_shard moves parameters and gradients by NCCL on streams of its own. A schedule's name (`method`) says how many parameter
groups are gathered ahead of the computation, and whether they are gathered once or twice a step. `nccl` alone is
fully_shard's own behaviour, and registers no hooks.

    ahead=0    gather 0 | compute 0 | gather 1 is enqueued when the host reaches group 1, so it is late if the host is late
    ahead=1    gather 0, gather 1 | compute 0 | gather 2 | compute 1 ...

Each group that is gathered ahead needs memory for its gathered parameters. With unsharded, a group's parameters are gathered
once a step instead of twice, and need that memory from its forward pass to its backward pass.

`units` groups modules for fully_shard. Each unit of fully_shard costs the host about 0.6 ms per pass, whatever its size. With
small blocks the GPU waits for the host, so overlap gains nothing. Larger units move the same bytes with fewer calls.

blocks  0 1 2 3 4 5 6 7 ...       in the order in which they are computed
units   [------] [------] ...     all about the same size
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from weft.compat.dispatch import NO_BACKWARD, backward_pass
from weft.compat.dtensors import (
    before_registered_methods,
    forward_has_begun,
    param_groups,
    prefetched,
    reshards_after_forward,
    set_prefetched,
    state_of,
)
from weft.core.errors import require
from weft.ops.common import resolve_group
from weft.overlap.concurrent.calls import get_caches
from weft.overlap.concurrent.choice import ConcurrentChoice
from weft.overlap.hooks.data_parallel import check_method
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


class GatherOrder:
    """A GatherOrder has the sharded modules of one model, in the order in which the first forward pass runs them."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self._order: dict[Any, None] = {}
        self._recording_hooks = [module.register_forward_pre_hook(self._before) for module in modules]
        self._resharding: tuple[Any, ...] = ()
        self._prefetched: dict[Any, list[Any]] = {}
        """The groups that each group prefetches by the caller's own settings, in the order of the forward pass."""
        self._applied: tuple[int, bool] = (0, False)

    def _before(self, module: Any, args: Any) -> None:
        self.record_module(module)

    def record_module(self, module: Any) -> None:
        """Record that a module runs, in the first forward pass. Its later runs in that pass are ignored."""
        if self._recording_hooks:
            self._order.setdefault(module)

    def use_method(self, method: Method) -> None:
        """Use a method from this forward pass on. The first pass changes nothing, because the order is not known yet."""
        if self._order and self._recording_hooks:
            self._end_recording()
        if not self._recording_hooks and self._applied != (method.ahead, method.unsharded):
            self._apply(method)

    def _end_recording(self) -> None:
        for hook in self._recording_hooks:
            hook.remove()
        self._recording_hooks = []
        self._resharding = tuple(module for module in self._order if _reshards_after_forward(module))
        states = dict.fromkeys(state_of(module) for module in self._order)  # modules of one unit share a state
        self._prefetched = {state: prefetched(state) for state in states}

    def _apply(self, method: Method) -> None:
        order = list(self._prefetched)
        if method.ahead != self._applied[0]:
            for at, state in enumerate(order):
                ahead = order[at + 1 : at + 1 + method.ahead]
                set_prefetched(state, ahead if method.ahead else self._prefetched[state])
        for module in self._resharding:
            module.set_reshard_after_forward(not method.unsharded, recurse=False)
        self._applied = method.ahead, method.unsharded


def _reshards_after_forward(module: FSDPModule) -> bool:
    """Return whether a module's parameters are resharded after its forward pass, to the shards that they had before."""
    groups = param_groups(module)
    return bool(groups) and all(map(reshards_after_forward, groups))


LEAST_BYTES = 256 << 20
"""The least size of a gathered unit. With blocks of 61 MB a GPT's step took 0.66 of its time with units of 4 blocks, and 0.5
with units of 12."""
LEAST_UNITS = 4
"""A smaller model still has 4 units, so that one unit can be computed while the next one is gathered."""


def units(modules: Iterable[nn.Module], *, least_bytes: int = LEAST_BYTES) -> list[list[nn.Module]]:
    """Group modules that are computed one after the other into lists that fully_shard takes.

    Write `for unit in units(model.blocks): fully_shard(unit)` instead of `for block in model.blocks: fully_shard(block)`. Each
    unit has about least_bytes of parameters, and at least one module. There are at least LEAST_UNITS units if there are as many
    modules. Blocks of least_bytes or more stay alone. One unit is computed while the next one is gathered, so a step needs
    memory for two.

    Args:
        modules: the modules in the order in which they are computed, such as a model's layers.
        least_bytes: the least size of a unit: this rank's share under other parallelism, in the parameters' current dtype.

    Raises ValueError if modules is empty or has anything but modules, or if least_bytes is below 1.
    """
    require("modules", modules, Iterable, "give modules that are computed one after the other, as model.blocks has them")
    found = [*modules]
    for at, module in enumerate(found):
        if not isinstance(module, nn.Module):
            raise ValueError(f"modules[{at}] is a {type(module).__name__}; give modules, as model.blocks has them")
    if not found:
        raise ValueError("modules is empty; give those that are computed one after the other, as model.blocks has them")
    if least_bytes < 1:
        raise ValueError(f"least_bytes is {least_bytes}; it must be at least 1")
    sizes = [sum(_here(each).numel() * each.element_size() for each in module.parameters()) for module in found]
    places = _places(sizes, max(LEAST_UNITS, sum(sizes) // least_bytes))
    return [[module for _, module in unit] for _, unit in groupby(zip(places, found, strict=True), key=lambda each: each[0])]


def _here(parameter: torch.Tensor) -> torch.Tensor:
    """Return the part of a parameter that other kinds of parallelism leave to this rank."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _places(sizes: Sequence[int], count: int) -> list[int]:
    """Return the unit of each module: of `count` equal units, the one that contains the module's middle byte."""
    ends = accumulate(sizes)
    return [int((end - size / 2) * count / max(1, sum(sizes))) for end, size in zip(ends, sizes, strict=True)]
