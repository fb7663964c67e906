"""NCCL's collectives by each transport that this PyTorch offers; "the best NCCL" is the fastest of them.

    default        plain buffers
    symmetric      buffers registered as symmetric windows: NCCL takes its symmetric kernels
    copy_engine    such buffers, and a communicator of the zero-CTA policy: copy engines, for all_gather and all_to_all

Registered buffers come from ncclMemAlloc, through a memory pool of the group's allocator; each is a window of its own, made
once for the largest case. Callers compute into them and read from them, so that registering costs no copy: that favours NCCL.
Each registered transport has a group of its own, and the world's communicator stays as it is.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import Failed, say, together

REGISTERED = ("symmetric", "copy_engine")
_CTA_POLICY_ZERO = 2


@dataclass(kw_only=True)
class Transport:
    """One transport of NCCL. windows: memory of a shard and of a whole; None if plain buffers do."""

    name: str
    group: dist.ProcessGroup
    windows: tuple[torch.Tensor, torch.Tensor] | None = None
    pool: Any = field(default=None, repr=False)

    def shard(self, rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Memory for a rank's part. The same memory at each call, where it is registered."""
        return self._memory(0, rows, cols, dtype)

    def whole(self, rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Memory for all ranks' parts."""
        return self._memory(1, rows, cols, dtype)

    def _memory(self, which: int, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        if self.windows is None:
            return torch.empty(rows, cols, device="cuda", dtype=dtype)
        return self.windows[which][: rows * cols * dtype.itemsize].view(dtype).view(rows, cols)

    def runs(self, op: str) -> bool:
        """Whether this transport differs from the others for a collective: copy engines do not add."""
        return self.name != "copy_engine" or op in ("all_gather", "all_to_all")

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        dist.all_gather_into_tensor(whole, shard, group=self.group)
        return whole

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        dist.reduce_scatter_tensor(shard, whole, group=self.group)
        return shard

    def all_to_all(self, whole: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        """Rows in equal shares. Both tensors have a whole's size."""
        dist.all_to_all_single(whole, shard, group=self.group)
        return whole

    def all_reduce(self, whole: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
        """In place: `same` is `whole`, so that all four have two arguments."""
        dist.all_reduce(whole, group=self.group)
        return whole

    def close(self) -> None:
        """Give the windows back, before the group is destroyed. Collective."""
        if self.windows is not None:
            _backend(self.group).deregister_mem_pool(self.pool)
            self.windows = self.pool = None


def transports(names: str, shard_bytes: int, whole_bytes: int) -> tuple[list[Transport], dict[str, str]]:
    """(the default and those of the named transports that work here, why others are missing). Collective.

    names: of REGISTERED, with commas. Their windows have the given sizes. Raises ValueError for another name.
    """
    unknown = [name for name in names.split(",") if name and name not in REGISTERED]
    if unknown:
        raise ValueError(f"--nccl has {unknown[0]!r}; use {', '.join(REGISTERED)}, or nothing")
    world = dist.group.WORLD
    assert world is not None
    found, missing = [Transport(name="default", group=world)], {}
    for name in filter(None, names.split(",")):
        try:
            found.append(together(name, partial(_registered, name, shard_bytes, whole_bytes)))
            say(f"NCCL {name}: windows of {shard_bytes >> 20} and {whole_bytes >> 20} MiB registered")
        except Failed as failed:
            missing[f"communication/{name}"] = failed.reason
            say(f"LEFT OUT NCCL {failed}", file=sys.stderr)
    return found, missing


def _registered(name: str, shard_bytes: int, whole_bytes: int) -> Transport:
    group = dist.new_group(backend="nccl", pg_options=_zero_cta() if name == "copy_engine" else None)
    # The communicator, which windows belong to, exists from the group's first collective on.
    dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    torch.cuda.synchronize()
    backend = _backend(group)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        windows = tuple(torch.empty(nbytes, dtype=torch.uint8, device="cuda") for nbytes in (shard_bytes, whole_bytes))
    backend.register_mem_pool(pool, symm=True)
    return Transport(name=name, group=group, windows=(windows[0], windows[1]), pool=pool)


def _zero_cta() -> Any:
    """Options of a communicator that uses copy engines where it can. Raises AttributeError where PyTorch has none."""
    options = dist.ProcessGroupNCCL.Options()
    assert hasattr(options.config, "cta_policy"), "this PyTorch has no config.cta_policy"
    options.config.cta_policy = getattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO", _CTA_POLICY_ZERO)
    return options


def _backend(group: dist.ProcessGroup) -> Any:
    return group._get_backend(torch.device("cuda", torch.cuda.current_device()))
