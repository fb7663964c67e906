"""The private parts of DTensor and of FSDP2.

`DTensor.to_local` and `DTensor.from_local` take 10 to 20 us of host time each, which a model would pay for each parameter.

torch has public setters for some attributes of FSDP2 (`set_modules_to_forward_prefetch`), but they refuse modules whose
parameters have several meshes, or cannot be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable_state import _get_module_state, _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "averaging_around",
    "before_registered_methods",
    "data_parallel_state",
    "forward_has_begun",
    "param_groups",
    "prefetched",
    "prepare_fully_sharded",
    "reshards_after_forward",
    "set_prefetched",
    "state_of",
]

MOST_URGENT = 2**63
"""A sequence number that is higher than that of any node of a forward pass."""


local_tensor_of: Callable[[torch.Tensor], torch.Tensor] = attrgetter("_local_tensor")
"""Returns the tensor object that holds this rank's part of a DTensor. Another object means that its memory was replaced."""

spec_of: Callable[[torch.Tensor], Any] = attrgetter("_spec")
"""Returns a DTensor's mesh, placements, shape and strides, as a value that torch does not change."""


def dtensor_of(local: torch.Tensor, spec: Any) -> DTensor:
    """Return a DTensor that does not require gradients. local: this rank's part, with the strides that the spec implies."""
    # DTensor.__init__ does nothing, and takes 5 us, because torch.compile is disabled in it.
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def differentiable_dtensor_of(local: torch.Tensor, mesh: Any, placements: Sequence[Any], shape: Sequence[Any]) -> DTensor:
    """Return a DTensor of this shape, whose parts need not be even. local: this rank's part, with any strides and gradients.

    Its dimensions lie in memory in the order of those of the part, or as in a contiguous tensor if some rank's part does not
    show that order. Ranks whose strides differ would not agree on which views are possible.
    """
    if not _shows_order(mesh, placements, shape):
        local = local.contiguous()
    strides = _strides_like(local, shape)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)


def _shows_order(mesh: Any, placements: Sequence[Any], shape: Sequence[Any]) -> bool:
    """Return whether the strides of every rank's part show in which order its dimensions lie in memory.

    The stride of a dimension of extent 1 or 0 does not show it. The result is equal on all ranks. Where several dimensions of
    the mesh cut one dimension unevenly, it may be False although all parts show the order.
    """
    ranks = [1] * len(shape)
    for dim, placement in enumerate(placements):
        cut = getattr(placement, "dim", None)
        if cut is not None:
            ranks[cut] *= mesh.size(dim)
    for extent, count in zip(shape, ranks, strict=True):
        if extent % count and extent - -(-extent // count) * (count - 1) < 2:  # the last rank's part
            return False
    return True


def _strides_like(local: torch.Tensor, shape: Sequence[Any]) -> tuple[Any, ...]:
    """Return the strides of a dense tensor of this shape whose dimensions lie in memory in the order of those of `local`.

    A view of the DTensor should fail if the same view of this rank's part fails. Parts need not be even, so these strides do
    not follow from the strides of one part and the number of ranks.
    """
    if local.is_contiguous():
        return torch.empty(tuple(shape), device="meta").stride()
    steps = local.stride()
    order = sorted(range(local.dim()), key=lambda dim: (-steps[dim], dim))
    found = torch.empty([shape[dim] for dim in order], device="meta").stride()
    return tuple([found[order.index(dim)] for dim in range(local.dim())])


def patch_grad_scaler() -> None:
    """Make a GradScaler exchange an inf over all dimensions of meshes along which some gradient differs between ranks.

    torch (2.13) exchanges it along those of the first gradient alone. If that is whole on every rank, as the gradient of a norm
    whose sum weft has made, only the rank that found the inf would skip the step. This puts a function around torch's, in the
    table from operators to functions that DTensor keeps in the process. Calling it again changes nothing.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    operator = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    torchs = handlers.get(operator)
    if torchs is not None and not isinstance(torchs, _FoundInfs):
        handlers[operator] = _FoundInfs(torchs)


@dataclass(frozen=True)
class _FoundInfs:
    """torchs: unscales gradients, which are DTensors, and exchanges found_inf by the layout of the first one."""

    torchs: Callable[..., None]

    def __call__(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.torchs(operator, args, kwargs)
        (first, *others), found_inf = args[0], args[1]
        for mesh, dim in dict.fromkeys(place for grad in others for place in _where_it_differs(grad)):
            if (mesh, dim) not in _where_it_differs(first):
                dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=mesh.get_group(dim))


def _where_it_differs(grad: torch.Tensor) -> list[tuple[Any, int]]:
    """Return the dimensions of a DTensor's mesh along which ranks have different parts of it."""
    if not isinstance(grad, DTensor):
        return []
    spec = spec_of(grad)
    return [(spec.mesh, dim) for dim, placement in enumerate(spec.placements) if not placement.is_replicate()]


def is_part_of_a_mesh(mesh: Any) -> bool:
    """Return whether a mesh is a slice of a larger one. DistributedDataParallel takes DTensors only with such a mesh."""
    return bool(mesh._get_root_mesh() != mesh)


def run_first(node: Any) -> None:
    """Make a backward pass run a node of an autograd.Function as soon as its gradients are there.

    Of the nodes that are ready, autograd runs the one that was created last. A node that stays for many passes would run last.
    """
    node._set_sequence_nr(MOST_URGENT)


def styles_of_torch(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the styles of torch that parallelize_module has applied to a module.

    torch does not record them. They are known by the hooks that torch puts on the module, which hold the style or its methods.
    """
    found: dict[str, None] = {}
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if not getattr(hook, "__module__", "").startswith("torch.distributed.tensor."):
            continue
        for cell in getattr(hook, "__closure__", None) or ():
            held = cell.cell_contents
            if isinstance(held, partial):
                found[held.func.__qualname__.partition(".")[0]] = None
            elif isinstance(held, ParallelStyle):
                found[type(held).__name__] = None
    return tuple(found)


def state_of(module: FSDPModule) -> Any:
    """Return fully_shard's state of a module. Modules that were passed to fully_shard together share one."""
    return module._get_fsdp_state()


def prepare_fully_sharded(module: nn.Module) -> None:
    """Let fully_shard prepare the modules within this one. Otherwise each is prepared in its first forward pass."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            state_of(each)._lazy_init()


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
    return {parameter._module_info.module for parameter in group.fsdp_params}


def _ranks_of(mesh_info: Any) -> set[int]:
    """Return the ranks with which this one averages gradients, along each dimension of a mesh."""
    names = ("shard_process_group", "replicate_process_group")
    groups = (getattr(mesh_info, name, None) for name in names)
    return {rank for group in groups if group is not None for rank in dist.get_process_group_ranks(group)}
