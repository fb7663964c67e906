"""What ranks do in tests of collectives: tensors alike on every rank, results by torch alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from rank_work import here

from weft import collectives

SPECS = ("sequential", "copy_engine:1", "copy_engine:3")
GATHERS = (*SPECS, "copy_engine_pull:2")
"""Of all_gather, and of all_reduce."""
SUMS = (*GATHERS, "one_shot")
"""Of all_reduce."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """elements: of a rank's part."""

    elements: int
    dtype: torch.dtype
    seed: int
    staging_bytes: int | None = None

    def drawn(self, rank: int) -> torch.Tensor:
        """A rank's input: world_size parts; the same on every rank that draws it, since their devices are alike."""
        generator = torch.Generator(device=here()).manual_seed(self.seed * 64 + rank)
        count = self.elements * dist.get_world_size()
        if self.dtype.is_floating_point:
            return torch.randn(count, generator=generator, device=here()).to(self.dtype)
        return torch.randint(0, 2, (count,), generator=generator, device=here()).to(self.dtype)

    @property
    def everyone(self) -> list[torch.Tensor]:
        return [self.drawn(rank) for rank in range(dist.get_world_size())]

    def summed(self, op: str = "sum") -> torch.Tensor:
        """In float32, in the order of ranks, rounded once."""
        total = self.drawn(0).float()
        for rank in range(1, dist.get_world_size()):
            total += self.drawn(rank)
        return (total / dist.get_world_size() if op == "avg" else total).to(self.dtype)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        low = self.elements * dist.get_rank()
        return whole[low : low + self.elements]


def moves(case: Case, spec: str) -> None:
    """all_gather and all_to_all."""
    mine, options = case.drawn(dist.get_rank()), {"schedule": spec, "staging_bytes": case.staging_bytes}
    out = torch.empty_like(mine)
    collectives.all_gather_into_tensor(out, case.part(mine), **options)  # type: ignore[arg-type]
    expected = torch.cat([one[r * case.elements : (r + 1) * case.elements] for r, one in enumerate(case.everyone)])
    assert torch.equal(out, expected), (case, spec, "all_gather")
    if not spec.startswith("copy_engine_pull"):
        collectives.all_to_all_single(out, mine, **options)  # type: ignore[arg-type]
        assert torch.equal(out, torch.cat([case.part(one) for one in case.everyone])), (case, spec, "all_to_all")


def sums(case: Case, spec: str, op: str = "sum") -> None:
    """reduce_scatter and all_reduce, exactly, unless the library has an order of its own; all_reduce alone where only it has
    the schedule."""
    mine, options = case.drawn(dist.get_rank()), {"schedule": spec, "staging_bytes": case.staging_bytes}
    expected, out = case.summed(op), torch.empty_like(case.part(mine))
    by_library = _summed_by_library(spec, mine)
    if not spec.startswith(("copy_engine_pull", "one_shot")):
        collectives.reduce_scatter_tensor(out, mine, op, **options)  # type: ignore[arg-type]
        agree(out, case.part(expected), by_library, (case, spec, op, "reduce_scatter"))
    collectives.all_reduce(mine, op, **options)  # type: ignore[arg-type]
    agree(mine, expected, by_library, (case, spec, op, "all_reduce"))


def in_place(case: Case, spec: str) -> None:
    """What is given is a part of the result, or the result a part of what is given."""
    whole, options = case.drawn(dist.get_rank()), {"schedule": spec, "staging_bytes": case.staging_bytes}
    collectives.all_gather_into_tensor(whole, case.part(whole), **options)  # type: ignore[arg-type]
    expected = torch.cat([one[r * case.elements : (r + 1) * case.elements] for r, one in enumerate(case.everyone)])
    assert torch.equal(whole, expected), (case, spec, "all_gather in place")
    if case.dtype.is_floating_point and not spec.startswith("copy_engine_pull"):
        whole = case.drawn(dist.get_rank())
        collectives.reduce_scatter_tensor(case.part(whole), whole, **options)  # type: ignore[arg-type]
        by_library = _summed_by_library(spec, whole)
        agree(case.part(whole), case.part(case.summed()), by_library, (case, spec, "reduce_scatter in place"))


def straight(elements: int, spec: str, calls: int) -> None:
    """Results in symmetric memory, at some place of it, that are used again call after call."""
    size, rank = dist.get_world_size(), dist.get_rank()
    memory = collectives.empty(size * elements + 24, dtype=torch.float32, device=here())
    for turn in range(calls):
        # Many pieces, of as many as a schedule may have: each rank sends to all.
        case = Case(elements=elements, dtype=torch.float32, seed=turn, staging_bytes=(max(1, size // 2) ** 2) << 16)
        out, mine, by_library = memory[8 : 8 + size * elements], case.drawn(rank), _summed_by_library(spec, memory)
        gathered = torch.cat([one[r * elements : (r + 1) * elements] for r, one in enumerate(case.everyone)])
        collectives.all_gather_into_tensor(out, case.part(mine), schedule=spec)
        assert torch.equal(out, gathered), (turn, spec)
        collectives.all_to_all_single(out, mine, schedule=spec)
        assert torch.equal(out, torch.cat([case.part(one) for one in case.everyone])), (turn, spec)
        out.copy_(mine)
        collectives.all_gather_into_tensor(out, case.part(out), schedule=spec)
        assert torch.equal(out, gathered), (turn, spec)
        out.copy_(mine)
        collectives.all_reduce(out, schedule=spec, staging_bytes=case.staging_bytes)
        agree(out, case.summed(), by_library, (turn, spec))


def _summed_by_library(spec: str, tensor: torch.Tensor) -> bool:
    """Whether a sum has, or may have, NCCL's order."""
    return spec in ("sequential", "auto") and tensor.is_cuda


def agree(got: torch.Tensor, expected: torch.Tensor, by_library: bool, where: object) -> None:
    if by_library:
        torch.testing.assert_close(got, expected, atol=0.1, rtol=0.05, msg=str(where))
    else:
        assert torch.equal(got, expected), where
