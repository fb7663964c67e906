"""This module takes DTensors apart and makes them without the checks and conversions of torch's public functions.

`DTensor.to_local` and `DTensor.from_local` take 10 to 20 us of host time each, which a model would pay for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

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
