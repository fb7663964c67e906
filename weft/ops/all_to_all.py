"""matmul_all_to_all and all_to_all_matmul: rows by destination.

    matmul_all_to_all(a, b)    replaces   c = a @ b; dist.all_to_all_single(out, c)
    all_to_all_matmul(a, b)    replaces   dist.all_to_all_single(received, a); received @ b

Every rank has an a and a b of its own. Legend: M rows of a, m those of them for one rank, N and K of a rank's matmul. Each is a
torch.library custom operator (weft::...) with a fake implementation, so that it traces under torch.compile.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.distributed as dist

from weft.library.all_to_all import run_combine, run_dispatch
from weft.ops.checks import check_operands, group_of, spec_of
from weft.schedule import Schedule


def matmul_all_to_all(
    a: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup | None = None, *, schedule: str | Schedule = "auto"
) -> torch.Tensor:
    """all_to_all(a @ b), with the exchange hidden behind the matmul.

    Replaces
        c = a @ b; dist.all_to_all_single(out, c, group=group)

    a: [M, ..., K], any strides, of one shape on all ranks; its first dimension is cut by destination as torch.chunk cuts it:
    part d goes to rank d. b: [K, N], each rank's own. group, schedule: as for all_gather_matmul.

    Returns out [world_size * m, ..., N]: the rows for this rank from every rank, in the order of ranks. Raises as
    all_gather_matmul does.

    Where experts combine: a is what an expert computes of its tokens, sorted by the rank that they came from, in equal shares.
    Where Ulysses' attention goes from parts of the sequence to heads, the rows are features of heads, and the weight is `a`:

        qkv = matmul_all_to_all(weight, x.t())    weight [3 * heads * dim, hidden], heads outermost; x [tokens, hidden], a part
        qkv = qkv.view(world_size, -1, tokens)    for each part of the sequence, the features of this rank's heads

    Source: fused computation-collectives (arXiv 2305.06942); see docs/schedules.md.
    """
    check_operands(a, [b], 1)
    group_name, rank, world_size = group_of(group)
    out = run_combine(_flat(a), b, group_name, rank, world_size, _per_entry(a), spec_of(schedule))
    return _shaped(out, a)


@overload
def all_to_all_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    return_received: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def all_to_all_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    return_received: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def all_to_all_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    return_received: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """all_to_all(a) @ b, with the exchange hidden behind the matmul.

    Replaces
        dist.all_to_all_single(received, a, group=group); out = received @ b

    a, b, group, schedule: as for matmul_all_to_all. return_received: also return the rows that were multiplied.

    Returns out [world_size * m, ..., N]: for the rows that this rank has from every rank, in the order of ranks; with
    return_received, (that, received [world_size * m, ..., K]). Raises as all_gather_matmul does.

    Where tokens are dispatched to experts: a is this rank's tokens, sorted by the expert's rank, in equal shares; b is the
    expert's weight. Source: fused computation-collectives (arXiv 2305.06942); see docs/schedules.md.
    """
    check_operands(a, [b], 1)
    group_name, rank, world_size = group_of(group)
    results = run_dispatch(_flat(a), b, group_name, rank, world_size, _per_entry(a), spec_of(schedule), return_received)
    out = _shaped(results[0], a)
    return (out, _shaped(results[1], a)) if return_received else out


def _per_entry(a: torch.Tensor) -> int:
    """Rows of the flat matrix for one entry of the first dimension."""
    unit = 1
    for extent in a.shape[1:-1]:
        unit *= extent
    return unit


def _flat(a: torch.Tensor) -> torch.Tensor:
    return a.reshape(a.shape[0] * _per_entry(a), a.shape[-1]) if a.dim() > 2 else a


def _shaped(flat: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """A flat result with the middle dimensions of a."""
    unit = _per_entry(a)
    return flat if a.dim() == 2 else flat.view(flat.shape[0] // max(1, unit), *a.shape[1:-1], flat.shape[1])
