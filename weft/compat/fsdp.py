"""Private parts of FSDP2 (`torch.distributed.fsdp.fully_shard`): who moves its bytes, and when it gathers.

torch has public setters for some of this (`set_custom_all_gather`, `set_modules_to_forward_prefetch`), but they refuse modules
whose parameters have several meshes, or cannot be undone. So weft reads and sets the attributes behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
except ImportError:
    raise ImportError(f"torch {torch.__version__} cannot take other collectives for fully_shard; torch 2.11 can") from None

__all__ = [
    "AllGather",
    "ReduceScatter",
    "before_registered_methods",
    "collectives_of",
    "forward_has_begun",
    "param_groups",
    "prefetched",
    "reshards_after_forward",
    "scatter_dtypes",
    "set_collectives",
    "set_prefetched",
    "state_of",
]


def state_of(module: FSDPModule) -> Any:
    """fully_shard's state of a module. Modules that were given to fully_shard together share one."""
    return module._get_fsdp_state()


def param_groups(module: FSDPModule) -> tuple[Any, ...]:
    """The parameter groups of this module: what is gathered in one collective. Since torch 2.12 there is one for each mesh that
    the parameters are sharded over. Empty where the children have all parameters."""
    state = state_of(module)
    if hasattr(state, "_fsdp_param_groups"):
        return tuple(state._fsdp_param_groups)
    return () if state._fsdp_param_group is None else (state._fsdp_param_group,)


def collectives_of(group: Any) -> tuple[Any, Any]:
    """What gathers the parameters of a group, and what scatters its gradients."""
    return group._all_gather_comm, group._reduce_scatter_comm


def set_collectives(group: Any, collectives: tuple[Any, Any]) -> None:
    """Let a group communicate by these from now on."""
    group._all_gather_comm, group._reduce_scatter_comm = collectives


def scatter_dtypes(group: Any) -> list[torch.dtype]:
    """The dtypes in which gradients of a group are scattered. Since torch 2.15 each parameter has a policy of its own."""
    dtypes = []
    for each in group.fsdp_params:
        parameter, policy = each.sharded_param, getattr(group, "mp_policy", None) or each.mp_policy
        if parameter.requires_grad:
            dtypes.append(policy.reduce_dtype or policy.param_dtype or parameter.dtype)
    return dtypes


def reshards_after_forward(group: Any) -> bool:
    """Whether a group's parameters go back to the very shards that they had, once the forward pass has used them."""
    return bool(group._reshard_after_forward and not group._use_post_forward_mesh)


def prefetched(state: Any) -> list[Any]:
    """The states whose parameters are gathered while this one's forward pass runs."""
    return list(state._states_to_forward_prefetch)


def set_prefetched(state: Any, ahead: Sequence[Any]) -> None:
    """Set what `prefetched` reads."""
    state._states_to_forward_prefetch = list(ahead)


def forward_has_begun(module: FSDPModule) -> bool:
    """Whether the root's forward pass is under way."""
    return state_of(module)._state_ctx.iter_forward_root is not None


def before_registered_methods(module: FSDPModule, call: Callable[[Any], None]) -> None:
    """Call `call(module)` before each method of `register_fsdp_forward_method`, which runs no hooks of the module's."""
    state = state_of(module)
    begin = state._pre_forward

    @wraps(begin)
    def called_first(entered: Any, args: Any, kwargs: Any) -> Any:
        call(entered)
        return begin(entered, args, kwargs)

    state._pre_forward = called_first
