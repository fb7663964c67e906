"""This module compares the layouts of tensors with those of earlier ones, in one call of torch.

torch.compile guards its graphs in the same way. Reading and comparing shapes, strides, dtypes and devices one by one takes
several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards

from weft.compat.dispatch import observed, traced_graph


def layout_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Return a function of as many tensors, which returns whether they are like these.

    Tensors are alike if their types, shapes, strides, dtypes and devices are equal, and whether they require gradients, are to
    be conjugated or negated, and are inference tensors. The thread must also be in the same state for torch's dispatcher:
    autocast, inference mode, a dispatch mode, a transform of torch.func and torch.jit.trace change it.

    Return None if one of them has no strides, or if something observes this thread, so that calls must not be repeated.
    """
    if observed() or traced_graph() is not None or any(one.layout is not torch.strided or one.is_neg() for one in tensors):
        return None
    try:
        shapes: Any = [list(one.shape) for one in tensors]
        strides: Any = [list(one.stride()) for one in tensors]
    except RuntimeError:  # a nested tensor
        return None
    found: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
    return found
