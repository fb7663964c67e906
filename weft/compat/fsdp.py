"""This module reads and sets when FSDP2 (`torch.distributed.fsdp.fully_shard`) gathers, by its private attributes.

torch has public setters for some of this (`set_modules_to_forward_prefetch`), but they refuse modules whose parameters have
several meshes, or cannot be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from torch.distributed.fsdp import FSDPModule

__all__ = [
    "before_registered_methods",
    "forward_has_begun",
    "param_groups",
    "prefetched",
    "reshards_after_forward",
    "set_prefetched",
    "state_of",
]


def state_of(module: FSDPModule) -> Any:
    """Return fully_shard's state of a module. Modules that were passed to fully_shard together share one."""
    return module._get_fsdp_state()


def param_groups(module: FSDPModule) -> tuple[Any, ...]:
    """Return the parameter groups of this module. Each is gathered in one collective.

    Since torch 2.12 there is one for each mesh that the parameters are sharded over. There are none if the children have all
    parameters.
    """
    state = state_of(module)
    if hasattr(state, "_fsdp_param_groups"):
        return tuple(state._fsdp_param_groups)
    return () if state._fsdp_param_group is None else (state._fsdp_param_group,)


def reshards_after_forward(group: Any) -> bool:
    """Return whether a group frees its gathered parameters after the forward pass and goes back to its original shards."""
    return bool(group._reshard_after_forward and not group._use_post_forward_mesh)


def prefetched(state: Any) -> list[Any]:
    """Return the states whose parameters are gathered while the forward pass of this one runs."""
    return list(state._states_to_forward_prefetch)


def set_prefetched(state: Any, ahead: Sequence[Any]) -> None:
    """Set the states that `prefetched` returns."""
    state._states_to_forward_prefetch = list(ahead)


def forward_has_begun(module: FSDPModule) -> bool:
    """Return whether the root module's forward pass is running."""
    return state_of(module)._state_ctx.iter_forward_root is not None


def before_registered_methods(module: FSDPModule, call: Callable[[Any], None]) -> None:
    """Call `call(module)` before each method of `register_fsdp_forward_method`. These methods do not run the module's hooks."""
    state = state_of(module)
    begin = state._pre_forward

    @wraps(begin)
    def called_first(entered: Any, args: Any, kwargs: Any) -> Any:
        call(entered)
        return begin(entered, args, kwargs)

    state._pre_forward = called_first
