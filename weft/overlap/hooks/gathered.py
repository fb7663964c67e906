"""Sets when fully_shard gathers the parameters of a group, and how long they stay gathered.

    ahead=0    gather 0 | compute 0 | gather 1 is enqueued when the host reaches group 1, so it is late if the host is late
    ahead=1    gather 0, gather 1 | compute 0 | gather 2 | compute 1 ...

Each group that is gathered ahead needs memory for its gathered parameters. With unsharded, a group's parameters are gathered
once a step instead of twice, and need that memory from its forward pass to its backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.fsdp import FSDPModule

from weft.compat.dtensors import param_groups, prefetched, reshards_after_forward, set_prefetched, state_of
from weft.schedules.concurrent import Method


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
