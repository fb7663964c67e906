"""This module compares the layouts of tensors with those of earlier ones, and allocates tensors, in one call of torch each.

torch.compile guards its graphs in the same way. Reading and comparing shapes, strides, dtypes and devices one by one takes
several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._C._dynamo import guards

from weft.compat.dispatch import observed, traced_graph

address_of: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
"""Returns the address of a tensor's first element."""


def layout_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Return a function of as many tensors, which returns whether they have the layouts of these, and no two are one object.

    That is so if their types, shapes, strides, dtypes and devices are equal, and whether they require gradients, are to be
    conjugated or negated, and are inference tensors. The thread must also be in the same state for torch's dispatcher:
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
    found: Callable[..., bool] = guards.TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
    return found


def make_empty(shape: Sequence[int], like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function that allocates a contiguous tensor of this shape, with the dtype of another one on its device.

    It skips torch's dispatcher, and takes a third of the time of torch.empty. The device must be the current one, and no mode
    may observe the thread.
    """
    strides, step = list[int](), 1
    for extent in reversed(shape):
        strides.insert(0, step)
        step *= max(extent, 1)
    functions: Any = guards
    allocate = functions._empty_strided_cuda if like.is_cuda else functions._empty_strided_cpu
    return partial(allocate, tuple(shape), tuple(strides), like.dtype)
