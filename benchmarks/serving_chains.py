"""The programs that benchmarks/serving.py measures. Each makes (norm, sum) from a, b, a residual and a norm's weight.

Capitals M N are full extents, k is a rank's part of K. a [M, k], b [k, N], residual [M, N], weight [N].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

import weft
from benchmarks.measure import Failed, say, together
from benchmarks.methods import TORCH, world
from benchmarks.rows import AUTO
from benchmarks.serving_table import REFERENCE, SCATTERED, SHARDED, UNFUSED

EPS = 1e-5
SPLITS = ("token_split:1", "token_split:2", "token_split:4")
Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
Norm = Callable[[Tensor, Tensor, Tensor], Pair]
Chain = Callable[[Tensor, Tensor, Tensor, Tensor], Pair]


def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Pair:
    """The RMSNorm of x + residual, and that sum."""
    whole = x + residual
    return torch.nn.functional.rms_norm(whole, (whole.shape[-1],), weight, EPS), whole


@cache
def norm_of(device: str) -> Norm:
    """add_norm, on GPUs as one kernel of Inductor's."""
    return add_norm if device == "cpu" else torch.compile(add_norm, dynamic=False, fullgraph=True)


def double(a: Tensor, b: Tensor, residual: Tensor, weight: Tensor) -> Pair:
    """All of it in float64."""
    x = a.double() @ b.double()
    dist.all_reduce(x)
    return add_norm(x, residual.double(), weight.double())


def nccl(norm: Norm, a: Tensor, b: Tensor, residual: Tensor, weight: Tensor) -> Pair:
    x = torch.mm(a, b)
    dist.all_reduce(x)
    return norm(x, residual, weight)


def nccl_scattered(norm: Norm, a: Tensor, b: Tensor, own: Tensor, weight: Tensor) -> Pair:
    """own: this rank's rows of the residual."""
    x, mine = torch.mm(a, b), torch.empty_like(own)
    dist.reduce_scatter_tensor(mine, x)
    return gathered(*norm(mine, own, weight))


def gathered(normed: Tensor, whole: Tensor) -> Pair:
    """The norm of all ranks' rows, and the sum of this one's."""
    out = normed.new_empty(len(normed) * dist.get_world_size(), normed.shape[1])
    dist.all_gather_into_tensor(out, normed)
    return out, whole


class Symmetric:
    """Memory that the ranks of the world share, one tensor for each shape, and PyTorch's all-reduce of it. kind: of TORCH."""

    def __init__(self, kind: str, device: str) -> None:
        ops = torch.ops.symm_mem
        self.reduce = ops.one_shot_all_reduce if kind == "one_shot" else ops.two_shot_all_reduce_
        self.device, self.made = torch.device(device), dict[tuple[torch.Size, torch.dtype], Tensor]()

    def memory(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Collective where the shape is new, which is before a graph is captured."""
        if (shape, dtype) not in self.made:
            made = symmetric_memory.empty(*shape, device=self.device, dtype=dtype)
            symmetric_memory.rendezvous(made, world().group_name)
            self.made[shape, dtype] = made
        return self.made[shape, dtype]

    def all_reduce(self, x: Tensor) -> Tensor:
        """x: of `memory`."""
        found: Tensor = self.reduce(x, "sum", world().group_name)
        return found

    def chain(self, norm: Norm, a: Tensor, b: Tensor, residual: Tensor, weight: Tensor) -> Pair:
        return norm(self.all_reduce(torch.mm(a, b, out=self.memory(residual.shape, a.dtype))), residual, weight)


@cache
def unavailable(device: str) -> dict[str, str]:
    """By method, why PyTorch's symmetric-memory all-reduces do not run here. Collective; printed once."""
    found = {}
    for kind in TORCH:

        def probe(kind: str = kind) -> None:
            made = Symmetric(kind, device)
            made.all_reduce(made.memory(torch.Size([64, 64]), torch.bfloat16).zero_())

        try:
            together(f"peer/torch {kind}", probe)
        except Failed as failed:
            found[failed.name] = failed.reason
            say(f"LEFT OUT {failed}")
    return found


def symmetric_memories(device: str) -> dict[str, Symmetric]:
    """By method, those that run here."""
    found = {f"peer/torch {kind}": kind for kind in TORCH}
    return {name: Symmetric(kind, device) for name, kind in found.items() if name not in unavailable(device)}


def weft_unfused(norm: Norm, a: Tensor, b: Tensor, residual: Tensor, weight: Tensor) -> Pair:
    return norm(weft.matmul_all_reduce(a, b), residual, weight)


def weft_scattered(norm: Norm, a: Tensor, b: Tensor, own: Tensor, weight: Tensor) -> Pair:
    return gathered(*norm(weft.matmul_reduce_scatter(a, b), own, weight))


def weft_fused(
    a: Tensor, b: Tensor, residual: Tensor, weight: Tensor, *, schedule: str = "auto", residual_sharded: bool = False
) -> Pair:
    how = {"schedule": schedule, "residual_sharded": residual_sharded}
    return weft.matmul_all_reduce_norm(a, b, residual, weight, eps=EPS, **how)  # type: ignore[arg-type]


def torch_chains(device: str) -> dict[str, Chain]:
    """What a user has without weft, with the residual whole on every rank."""
    norm = norm_of(device)
    peers = {name: partial(memory.chain, norm) for name, memory in symmetric_memories(device).items()}
    return {REFERENCE: partial(nccl, norm), **peers}


def few_chains(device: str) -> dict[str, Chain]:
    return {**torch_chains(device), UNFUSED: partial(weft_unfused, norm_of(device)), AUTO: weft_fused}


def prefill_chains(device: str) -> dict[str, Chain]:
    return few_chains(device) | {f"weft/{spec}": partial(weft_fused, schedule=spec) for spec in SPLITS}


def sharded_chains(device: str) -> dict[str, Chain]:
    """Those with a sharded residual, of which each rank has its own rows."""
    return {
        "sequential/scattered": partial(nccl_scattered, norm_of(device)),
        SCATTERED: partial(weft_scattered, norm_of(device)),
        SHARDED: partial(weft_fused, residual_sharded=True),
    }
