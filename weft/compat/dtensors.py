"""This module takes DTensors apart and makes them without the checks and conversions of torch's public functions.

`DTensor.to_local` and `DTensor.from_local` take 10 to 20 us of host time each, which a model would pay for each parameter.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_global_tensor_info

MOST_URGENT = 2**63
"""A sequence number that is higher than that of any node of a forward pass."""


def local_tensor_of(dtensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds this rank's part. It is not an alias."""
    return cast(DTensor, dtensor)._local_tensor


def own_spec_of(dtensor: torch.Tensor) -> Any:
    """Return a copy of a DTensor's mesh, placements, shape and strides."""
    return copy.copy(cast(DTensor, dtensor)._spec)


def dtensor_of(local: torch.Tensor, spec: Any) -> DTensor:
    """Return a DTensor that does not require gradients. local: this rank's part, with the strides that the spec implies."""
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def differentiable_dtensor_of(local: torch.Tensor, spec: Any) -> DTensor:
    """Do as `dtensor_of`, for a tensor with any strides, or with gradients."""
    _, strides = compute_global_tensor_info(local, spec.mesh, spec.placements)
    return DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=tuple(strides))


def run_first(node: Any) -> None:
    """Make a backward pass run a node of an autograd.Function as soon as its gradients are there.

    Of the nodes that are ready, autograd runs the one that was created last. A node that stays for many passes would run last.
    """
    node._set_sequence_nr(MOST_URGENT)
