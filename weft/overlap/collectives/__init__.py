"""Collectives whose data copy engines move, and a set number of SMs sum. They leave most SMs to a concurrent matmul.

These write into the caller's tensors, with torch.distributed's names and arguments:

    all_gather_into_tensor(output, input)        reduce_scatter_tensor(output, input, op)
    all_to_all_single(output, input)             all_reduce(tensor, op)

These are functions, which support autograd and torch.compile:

    all_gather(x)    reduce_scatter(x, op)       all_to_all(x)    all_reduced(x, op)

Peers can write tensors of `empty` directly. Results in such tensors need no staging memory and no final copy.

A sum adds the ranks in order, in float32, and rounds once. So every call gives the same bits, and all_reduce gives the same
bits on every rank. All ranks of the group make the same calls in the same order.

functions.py   all of these       calls.py   arguments, and running calls
"""

from __future__ import annotations

from weft.overlap.collectives.calls import Work
from weft.overlap.collectives.functions import (
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    all_reduced,
    all_to_all,
    all_to_all_single,
    empty,
    reduce_scatter,
    reduce_scatter_tensor,
)

__all__ = [
    "Work",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_reduced",
    "all_to_all",
    "all_to_all_single",
    "empty",
    "reduce_scatter",
    "reduce_scatter_tensor",
]
