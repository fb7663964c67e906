"""What ranks do in tests of embedding_bag_all_to_all: draw tables and bags alike on every rank, call, compare with torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_work import here
from torch.nn.functional import embedding_bag

import weft
from weft.core.problem import split

SPECS = ("sequential", "track_and_trigger:1", "track_and_trigger:2", "direct_store:1", "direct_store:2")


@dataclass(frozen=True, kw_only=True)
class Case:
    """dims: by rank. rows: of the tables, in turn. lengths: of bags, at most; or those of all bags, in turn. spare: indices
    that no bag holds. exact: tables of small whole numbers, whose sums have no rounding."""

    dims: tuple[tuple[int, ...], ...]
    batch: int = 11
    rows: tuple[int, ...] = (7, 40, 1)
    lengths: int | tuple[int, ...] = 6
    mode: str = "sum"
    weighted: bool = False
    dtype: torch.dtype = torch.float32
    index: torch.dtype = torch.int64
    spare: int = 0
    exact: bool = False

    def height(self, table: int) -> int:
        return self.rows[table % len(self.rows)]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One rank's tables and bags."""

    tables: list[torch.Tensor]
    indices: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None

    def pooled(self, case: Case) -> list[torch.Tensor]:
        """[batch, dim] of each table by torch, in float64; differentiable."""
        found = []
        for at, table in enumerate(self.tables):
            own = self.offsets[at * case.batch : (at + 1) * case.batch + 1].long()
            part = slice(int(own[0]), int(own[-1]))
            weights = None if self.weights is None else self.weights[part].double()
            indices, offsets = self.indices[part].long(), own - own[0]
            options: dict[str, Any] = {"mode": case.mode, "include_last_offset": True, "per_sample_weights": weights}
            found.append(embedding_bag(indices, table.double(), offsets, **options))
        return found


def draw(case: Case, seed: int, rank: int) -> Drawn:
    """The same for a rank wherever it is drawn."""
    generator = torch.Generator().manual_seed(1009 * seed + rank)
    tables, parts, lengths = [], [], []
    for at, dim in enumerate(case.dims[rank]):
        table = torch.randn(case.height(at), dim, generator=generator)
        tables.append((table.mul(4).round() if case.exact else table).to(here(), case.dtype))
        if isinstance(case.lengths, int):
            bags = torch.randint(0, case.lengths + 1, (case.batch,), generator=generator)
        else:
            bags = torch.tensor([case.lengths[i % len(case.lengths)] for i in range(case.batch)])
        parts.append(torch.randint(0, case.height(at), (int(bags.sum()),), generator=generator))
        lengths.append(bags)
    nothing = torch.zeros(0, dtype=torch.int64)
    spare = torch.full((case.spare,), 10**6)
    indices = torch.cat([nothing, *parts, spare])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), *lengths]).cumsum(0)
    weights = torch.randn(indices.numel(), generator=generator).to(here(), case.dtype) if case.weighted else None
    return Drawn(tables=tables, indices=indices.to(here(), case.index), offsets=offsets.to(here(), case.index), weights=weights)


def options_of(case: Case, drawn: Drawn) -> dict[str, Any]:
    """Keywords of the call that the case stands for."""
    found = {"dims": case.dims, "batch": case.batch, "dtype": case.dtype, "mode": case.mode}
    return found | {"per_sample_weights": drawn.weights}


def expected(case: Case, seed: int, rank: int) -> torch.Tensor:
    """This rank's result in float64."""
    low, high = split(case.batch, len(case.dims))[rank]
    columns = [one[low:high] for src in range(len(case.dims)) for one in draw(case, seed, src).pooled(case)]
    return torch.cat([torch.zeros(high - low, 0, dtype=torch.float64, device=here()), *columns], 1)


def bound(case: Case, reference: torch.Tensor) -> float:
    """Largest absolute error that rounding explains: one to the dtype, and of sums in float32 of the longest bag's numbers."""
    if case.exact:
        return 0.0
    longest = case.lengths if isinstance(case.lengths, int) else max(case.lengths)
    largest = float(reference.abs().max()) if reference.numel() else 0.0
    return largest * torch.finfo(case.dtype).eps / 2 + 16 * max(1, longest) * torch.finfo(torch.float32).eps


def check(case: Case, schedule: str, seed: int, group: dist.ProcessGroup | None = None) -> None:
    rank = dist.get_rank(group)
    drawn = draw(case, seed, rank)
    options = options_of(case, drawn)
    out = weft.embedding_bag_all_to_all(drawn.indices, drawn.offsets, drawn.tables, group, schedule=schedule, **options)
    assert out.dtype == case.dtype
    wanted = expected(case, seed, rank)
    assert out.shape == wanted.shape
    error = (out.double() - wanted).abs().max().item() if out.numel() else 0.0
    assert error <= bound(case, wanted), (schedule, case, error)


def cases(world_size: int) -> list[Case]:
    """Every option once, and what is ragged, empty or uneven."""
    plain = Case(dims=((8, 4),) * world_size)
    uneven = tuple((8, 12, 92)[: 1 + rank % 3] for rank in range(world_size))
    return [
        plain,
        Case(dims=uneven, batch=9, index=torch.int32, weighted=True, spare=5),
        Case(dims=(*uneven[:-1], ()), batch=world_size + 1, mode="mean"),
        replace(plain, batch=world_size - 1, lengths=(0,)),
        replace(plain, batch=5, lengths=(0, 700, 1, 0, 3)),
        replace(plain, batch=1),
    ]


def check_bad_index(index: int) -> None:
    """The rank that has it is told which; it adds nothing, and the others have their result."""
    case, rank = Case(dims=((8, 4),) * 2, lengths=(2, 3)), dist.get_rank()
    drawn = draw(case, 0, rank)
    fenced = torch.full((42, 4), torch.nan)
    fenced[1:-1] = drawn.tables[1]
    drawn.tables[1] = fenced[1:-1]
    wanted = expected(case, 0, rank)
    at = int(drawn.offsets[case.batch + 4]) + 1
    row = draw(case, 0, 1).tables[1][draw(case, 0, 1).indices[at]]
    for spec in SPECS:
        if rank == 1:
            broken = drawn.indices.clone()
            broken[at] = index
            with pytest.raises(IndexError, match=rf"indices\[{at}\], in bag 4 of table 1, is {index}; .* rows 0 to 39"):
                weft.embedding_bag_all_to_all(broken, drawn.offsets, drawn.tables, schedule=spec)
        else:
            out = weft.embedding_bag_all_to_all(drawn.indices, drawn.offsets, drawn.tables, schedule=spec)
            reference = wanted.clone()
            reference[4, 20:] -= row.double()
            torch.testing.assert_close(out, reference.float())
    if rank == 1:
        offsets = drawn.offsets.clone()
        offsets[3] = 10**9
        with pytest.raises(ValueError, match=r"offsets\[3\] is 1000000000 after .* at most the number of indices, 54"):
            weft.embedding_bag_all_to_all(drawn.indices, offsets, drawn.tables, schedule="direct_store:1")
    else:
        weft.embedding_bag_all_to_all(drawn.indices, drawn.offsets, drawn.tables, schedule="direct_store:1")
    check(case, "direct_store:1", 1)
