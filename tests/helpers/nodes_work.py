"""What ranks on several nodes do in tests, on CPUs and GPUs: every operator by every schedule that goes across nodes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from embedding_work import Case
from embedding_work import check as check_lookup
from rank_work import check_all_reduce, check_gather, check_scatter
from test_all_to_all import check_both as check_exchanges

SPECS = ("sequential", "node_slices:1", "node_slices:3")


def check_every_operator(m: int, n: int, k: int, dtype: torch.dtype, spec: str, seed: int) -> None:
    """All six, each against the whole product."""
    check_exchanges(m, n, k, dtype, spec, spec, seed)
    check_gather(m, n, k, dtype, spec, seed)
    check_scatter(m, n, k, dtype, spec, seed, op=("sum", "avg")[seed % 2])
    check_all_reduce(m, n, k, dtype, spec, seed, addends=seed % 4)
    check_lookup(lookup_case(dtype), spec, seed)


def lookup_case(dtype: torch.dtype) -> Case:
    """Tables of several widths; one rank has none."""
    size = dist.get_world_size()
    return Case(dims=tuple(((8, 4), (), (16,))[rank % 3] for rank in range(size)), batch=21, dtype=dtype)
