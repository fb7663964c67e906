"""These functions of tensors, and of nested lists of tensors, have only private names in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed import _functional_collectives as functional
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from weft.compat.c10d import begin_gather, begin_sum
from weft.compat.dispatch import observed

__all__ = ["all_gathered", "all_reduced", "grouped_mm", "multiplies", "tree_flatten", "tree_leaves", "tree_unflatten"]

AwaitWork = Callable[[str, str, Any], None]
"""Waits for torch's work of a collective on CPUs: the name of the group, what is waited for, and the work."""


@cache
def multiplies(dtype: torch.dtype) -> bool:
    """Return whether this CPU has native matmuls for `dtype`. Without them, matmuls take 100 times as long as in float32."""
    if dtype == torch.float32:
        return True
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    return bool(getattr(torch.ops.mkldnn, name)())


def grouped_mm(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the product of each group of a's columns and b's rows, [groups, K, N] in bfloat16.

    a, b: [K, rows] and [rows, N]. On GPUs they begin at multiples of 16 bytes.
    ends: the end of each group, on the device. Rows past the last end are in no group, and are not read.
    """
    return torch._grouped_mm(a, b, offs=ends.to(torch.int32))


def all_reduced(x: torch.Tensor, group: str, await_work: AwaitWork, *, own: bool = False) -> torch.Tensor:
    """Return the sum of x over the ranks of torch's process group with this name. The caller's stream waits for it.

    await_work: waits on CPUs in eager code. Compiled code, and torch's modes that observe operators, wait by torch's functions.
    own: x is a contiguous tensor that nobody else has, so the result may have its memory.
    """
    if type(x) is torch.Tensor and not torch.compiler.is_compiling() and not observed():
        # A functional collective takes some 50 us of host time.
        total = x if own else x.clone(memory_format=torch.contiguous_format)
        _await(begin_sum(total, group), total, group, await_work, "sum")
        return total
    total = functional.all_reduce(x.contiguous(), "sum", group)  # type: ignore[arg-type]
    found: torch.Tensor = functional.wait_tensor(total)  # type: ignore[no-untyped-call]
    return found


def all_gathered(x: torch.Tensor, shape: Sequence[int], group: str, await_work: AwaitWork) -> torch.Tensor:
    """Return the elements of all ranks' x, rank by rank, in a contiguous tensor of this shape. The caller's stream waits.

    x: as many elements on each rank of torch's process group with this name.
    await_work: as for all_reduced.
    """
    x = x.contiguous()
    if type(x) is torch.Tensor and not torch.compiler.is_compiling() and not observed():
        whole = x.new_empty(shape)
        _await(begin_gather(whole.view(-1), x.view(-1), group), x, group, await_work, "gather")
        return whole
    found: torch.Tensor = functional.wait_tensor(  # type: ignore[no-untyped-call]
        functional.all_gather_tensor(x.view(-1), 0, group)  # type: ignore[arg-type]
    )
    return found.view(shape)


def _await(work: Any, x: torch.Tensor, group: str, await_work: AwaitWork, what: str) -> None:
    """Order what comes next after a collective. work is None if the backend has already done that."""
    if work is None:
        return
    if x.is_cpu:
        await_work(group, f"{what} of {x.dtype} {list(x.shape)} by torch", work)
    else:
        work.wait()
