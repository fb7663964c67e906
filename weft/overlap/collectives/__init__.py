"""Collectives whose bytes are moved by copy engines, and summed by a set number of SMs. So they
take little of what a concurrent matmul needs.

Into the caller's tensors, with torch.distributed's names and arguments:

    all_gather_into_tensor(output, input)        reduce_scatter_tensor(output, input, op)
    all_to_all_single(output, input)             all_reduce(tensor, op)

As functions, which autograd and torch.compile go through:

    all_gather(x)    reduce_scatter(x, op)       all_to_all(x)    all_reduced(x, op)

Results in tensors of `empty`, which peers can write, need no room and are not copied once more.

A sum is of the ranks in their order, in float32, and rounded once: the same bits in every call, and of an all_reduce on every
rank. All ranks of the group make the same calls in the same order.

    in_place.py   the first four       functional.py   the others       work.py   a call under way       checks.py   arguments
"""

from __future__ import annotations

from weft.overlap.collectives.functional import all_gather, all_reduced, all_to_all, empty, reduce_scatter
from weft.overlap.collectives.in_place import all_gather_into_tensor, all_reduce, all_to_all_single, reduce_scatter_tensor
from weft.overlap.collectives.work import Work

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
