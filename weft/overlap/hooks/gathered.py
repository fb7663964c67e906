"""Sets when fully_shard gathers the parameters of a group, and how long they stay gathered, as a method says.

    ahead=0    gather 0 | compute 0 | gather 1 is enqueued when the host comes to group 1, so waits for a host that is late
    ahead=1    gather 0, gather 1 | compute 0 | gather 2 | compute 1 ...

Each group ahead takes room for its parameters, gathered. unsharded: a group's parameters are gathered once a step instead
of twice, and take that room from its forward pass to its backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.fsdp import FSDPModule

from weft.compat.fsdp import param_groups, prefetched, reshards_after_forward, set_prefetched, state_of
from weft.schedules.concurrent import Method


class GatherOrder:
    """The sharded modules of one model. The first forward pass shows in which order they come."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self._came: dict[Any, None] = {}
        self._notes = [module.register_forward_pre_hook(self._before) for module in modules]
        self._freed: tuple[Any, ...] = ()
        self._users: dict[Any, list[Any]] = {}
        """What each group gathers ahead as the caller has it, groups in order."""
        self._taken: tuple[int, bool] = (0, False)

    def _before(self, module: Any, args: Any) -> None:
        self.note(module)

    def note(self, module: Any) -> None:
        """A module's turn has come. Of several, the first in the first pass counts."""
        if self._notes:
            self._came.setdefault(module)

    def take(self, method: Method) -> None:
        """Follow a method from this forward pass on. Before the first pass the order of groups is not known."""
        if self._came and self._notes:
            self._know()
        if not self._notes and self._taken != (method.ahead, method.unsharded):
            self._set(method)

    def _know(self) -> None:
        for note in self._notes:
            note.remove()
        self._notes = []
        self._freed = tuple(module for module in self._came if _freed_after_forward(module))
        states = dict.fromkeys(state_of(module) for module in self._came)  # a unit's modules share one
        self._users = {state: prefetched(state) for state in states}

    def _set(self, method: Method) -> None:
        order = list(self._users)
        if method.ahead != self._taken[0]:
            for at, state in enumerate(order):
                ahead = order[at + 1 : at + 1 + method.ahead]
                set_prefetched(state, ahead if method.ahead else self._users[state])
        for module in self._freed:
            module.set_reshard_after_forward(not method.unsharded, recurse=False)
        self._taken = method.ahead, method.unsharded


def _freed_after_forward(module: FSDPModule) -> bool:
    """Whether a module's parameters go back to the shards that they had. Other meshes, and roots, are left as they are."""
    groups = param_groups(module)
    return bool(groups) and all(map(reshards_after_forward, groups))
