"""This module takes DTensors apart and makes them without the checks and conversions of torch's public functions.

`DTensor.to_local` and `DTensor.from_local` take 10 to 20 us of host time each, which a model would pay for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.tensor import DTensor

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


def differentiable_dtensor_of(local: torch.Tensor, spec: Any) -> DTensor:
    """Do as `dtensor_of`, for a tensor with any strides, or with gradients."""
    strides = strides_like(local, spec.shape)
    return DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=strides)


def strides_like(local: torch.Tensor, shape: Sequence[Any]) -> tuple[Any, ...]:
    """Return the strides of a dense tensor of this shape whose dimensions lie in memory in the order of those of `local`.

    They are what a DTensor of that shape states, so that its views succeed exactly where those of its parts do. Parts need not
    be even, so they do not follow from the strides of one part and the number of ranks.
    """
    if local.is_contiguous():
        return torch.empty(tuple(shape), device="meta").stride()
    steps = local.stride()
    order = sorted(range(local.dim()), key=lambda dim: (-steps[dim], dim))
    found = torch.empty([shape[dim] for dim in order], device="meta").stride()
    return tuple([found[order.index(dim)] for dim in range(local.dim())])


def run_first(node: Any) -> None:
    """Make a backward pass run a node of an autograd.Function as soon as its gradients are there.

    Of the nodes that are ready, autograd runs the one that was created last. A node that stays for many passes would run last.
    """
    node._set_sequence_nr(MOST_URGENT)
