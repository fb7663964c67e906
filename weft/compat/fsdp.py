"""This module reads the private attributes of FSDP2 (`torch.distributed.fsdp.fully_shard`), and sets when it gathers. Of
DistributedDataParallel it reads which one is running.

torch has public setters for some of this (`set_modules_to_forward_prefetch`), but they refuse modules whose parameters have
several meshes, or cannot be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed._composable_state import _get_module_state, _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "averaging_around",
    "before_registered_methods",
    "data_parallel_state",
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
    return _groups_of(state_of(module))


def _groups_of(state: Any) -> tuple[Any, ...]:
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


def data_parallel_state() -> tuple[int, int]:
    """Return a value that changes when `averaging_around` may return something else for a module."""
    return len(_module_state_mapping), id(DistributedDataParallel._get_active_ddp_module())  # type: ignore[no-untyped-call]


def averaging_around(module: nn.Module) -> tuple[str, str, set[int]]:
    """Return what averages gradients of the model in which a module runs, the module's name in it, and over which ranks.

    There are no ranks if nothing averages the gradients of other modules, or if the caller has set the number by which
    fully_shard divides the module's own.
    """
    running = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if running is not None:
        names = {each: name for name, each in running.module.named_modules()}
        return "DistributedDataParallel", names.get(module, ""), set(dist.get_process_group_ranks(running.process_group))
    around = [names for each in list(_module_state_mapping) if module in (names := dict(_named(each)))]
    if not around:
        return "", "", set()
    names = max(around, key=len)
    states = {id(state): state for each in names if (state := _get_module_state(each)) is not None}
    groups = [group for state in states.values() for group in _groups_of(state)]
    if any(module in _modules_of(group) and group.gradient_divide_factor is not None for group in groups):
        return "", "", set()
    others = [group for group in groups if _modules_of(group) - {module} and group.gradient_divide_factor != 1]
    return "fully_shard", names[module], {rank for group in others for rank in _ranks_of(group.mesh_info)}


def _named(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    return ((each, name) for name, each in module.named_modules())


def _modules_of(group: Any) -> set[nn.Module]:
    """Return the modules whose parameters a group has."""
    return {parameter._module_info.module for parameter in group.fsdp_params}


def _ranks_of(mesh_info: Any) -> set[int]:
    """Return the ranks with which this one averages gradients, along each dimension of a mesh."""
    names = ("shard_process_group", "replicate_process_group")
    groups = (getattr(mesh_info, name, None) for name in names)
    return {rank for group in groups if group is not None for rank in dist.get_process_group_ranks(group)}
