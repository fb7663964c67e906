"""matmul_all_to_all and all_to_all_matmul: rows by destination, in even shares or as `splits` has it.

    matmul_all_to_all(a, b)    replaces   c = a @ b; dist.all_to_all_single(out, c)
    all_to_all_matmul(a, b)    replaces   dist.all_to_all_single(received, a); received @ b

or between parts of rows and parts of columns (split_dim=-1, gather_dim=-1), as Ulysses' attention has it.

Every rank has an a and a b of its own. Legend: M rows of a, m those of them for one rank, N and K of a rank's matmul. Each is a
torch.library custom operator (weft::...) with a fake implementation, so that it traces under torch.compile.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.distributed as dist

from weft.core.problem import split
from weft.core.schedule import Schedule
from weft.ops.common import as_matrix, check_operands, group_of, rows_per_entry, spec_of
from weft.ops.library.all_to_all import run_combine, run_dispatch
from weft.ops.library.columns import run_apart, run_beside
from weft.ops.ragged import ragged_combine, ragged_dispatch, refuse_max_rows, refuse_schedule


@overload
def matmul_all_to_all(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    split_dim: Literal[0, -1] = 0,
) -> torch.Tensor: ...


@overload
def matmul_all_to_all(
    a: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup | None = None, *, splits: torch.Tensor, max_rows: int
) -> tuple[torch.Tensor, torch.Tensor]: ...


def matmul_all_to_all(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    split_dim: Literal[0, -1] = 0,
    splits: torch.Tensor | None = None,
    max_rows: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """all_to_all(a @ b), with the exchange hidden behind the matmul.

    Replaces

        c = a @ b; dist.all_to_all_single(out, c, group=group)

    Args:
        a: [M, ..., K], any strides, of one shape on all ranks; its first dimension is cut by destination as torch.chunk cuts
            it: part d goes to rank d.
        b: [K, N], each rank's own; with splits also [experts, K, N].
        group: as for all_gather_matmul.
        schedule: as for all_gather_matmul; not with splits.
        split_dim: what is cut by destination: 0 for rows, -1 for the product's columns.
        splits: how many rows go where, in numbers that only the device knows; see below.
        max_rows: with splits: the most rows that may arrive, on all ranks the same.

    Returns out [world_size * m, ..., N]: the rows for this rank from every rank, in the order of ranks. Raises as
    all_gather_matmul does.

    **splits**, for experts whose rows go home: int32 or int64 on a's device, [world_size] rows by destination; or, with b
    [experts, K, N], [experts, world_size] rows by expert and destination. Then a [rows, K] has its rows in that order, and may
    have more; for gradients, as many on all ranks.

    Returns (out [max_rows, N], counts int32 [world_size, experts], or [world_size] for a b of two dimensions): rows by the
    rank that they come from and by its expert; those past the counts are zero. No host waits for a device. What does not fit
    (in a, or in max_rows) is left out, never written elsewhere, and a ValueError says so in a call after the next; on CPUs at
    once. On GPUs: bfloat16 and float16, K and N multiples of 8; a has no more rows than max_rows, or than any rank's a in the
    first call with these sizes, which decides how much room there is for products.

    **split_dim=-1** cuts the product's columns instead, and needs a multiple of world_size of them: part d goes to rank d.

    Returns out [world_size * M, ..., n]: those columns, for the rows of every rank. So Ulysses' attention goes from parts of
    the sequence to heads (arXiv 2309.14509), heads being outermost in the weight's columns:

        qkv = matmul_all_to_all(x, weight, split_dim=-1)    x [tokens, hidden], a part; weight [hidden, heads * 3 * dim]
        qkv.view(world_size * tokens, -1, 3, dim)           of the whole sequence, this rank's heads

    Source: fused computation-collectives (arXiv 2305.06942); see docs/schedules.md, and docs/kernels.md for splits.
    """
    by_columns = _is_last("split_dim", split_dim, splits)
    if splits is not None:
        refuse_schedule(schedule)
        return ragged_combine(a, b, group, splits, max_rows)
    refuse_max_rows(max_rows)
    if by_columns:
        return _apart(a, b, group, schedule)
    check_operands(a, [b])
    group_name, rank, world_size = group_of(group)
    out = run_combine(
        as_matrix(a), b, group_name, rank, world_size, max(1, rows_per_entry(a)), spec_of(schedule, "matmul_all_to_all")
    )
    return _shaped(out, a, rank, world_size)


@overload
def all_to_all_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    gather_dim: Literal[0, -1] = 0,
    return_received: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def all_to_all_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    gather_dim: Literal[0, -1] = 0,
    return_received: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def all_to_all_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    splits: torch.Tensor,
    max_rows: int,
    return_received: bool = False,
) -> tuple[torch.Tensor, ...]: ...


def all_to_all_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    gather_dim: Literal[0, -1] = 0,
    splits: torch.Tensor | None = None,
    max_rows: int | None = None,
    return_received: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """all_to_all(a) @ b, with the exchange hidden behind the matmul.

    Replaces

        dist.all_to_all_single(received, a, group=group); out = received @ b

    Args:
        a: as for matmul_all_to_all.
        b: as for matmul_all_to_all; with gather_dim=-1 [world_size * k, N].
        group: as for all_gather_matmul.
        schedule: as for all_gather_matmul; not with splits.
        gather_dim: how received rows lie: 0 for below each other, -1 for side by side.
        splits: how many rows go where, in numbers that only the device knows; see below.
        max_rows: with splits: the most rows that may arrive, on all ranks the same.
        return_received: also return the rows that were multiplied.

    Returns out [world_size * m, ..., N]: for the rows that this rank has from every rank, in the order of ranks; with
    return_received, (that, received [world_size * m, ..., K]). Raises as all_gather_matmul does.

    **splits**, for tokens that are dispatched to experts: [world_size] rows by destination, or, with b [experts, K, N],
    [world_size, experts] (or flat) rows by destination and its expert; a [rows, K] has its rows in that order. What arrives
    lies by this rank's experts, then by the rank that it comes from.

    Returns (out [max_rows, N], counts int32 [experts, world_size], or [world_size]; with return_received the rows [max_rows,
    K]). counts are the splits of the matmul_all_to_all that takes the rows home, to the places that they came from:

        hidden, counts = all_to_all_matmul(tokens, up, splits=splits, max_rows=capacity)
        home, _ = matmul_all_to_all(act(hidden), down, splits=counts, max_rows=len(tokens))

    All else is as there.

    **gather_dim=-1** lays the received rows side by side, in the order of ranks, instead of below each other: b is
    [world_size * k, N] for a [M, ..., k], whose first dimension must be a multiple of world_size.

    Returns out [m, ..., N]; with return_received, (that, received [m, ..., world_size * k]). So Ulysses' attention goes back
    from heads to parts of the sequence:

        x = all_to_all_matmul(attended, weight, gather_dim=-1)    attended [sequence, heads * dim of this rank]

    Source: fused computation-collectives (arXiv 2305.06942); see docs/schedules.md, and
    docs/kernels.md for splits.
    """
    beside = _is_last("gather_dim", gather_dim, splits)
    if splits is not None:
        refuse_schedule(schedule)
        return ragged_dispatch(a, b, group, splits, max_rows, return_received=return_received)
    refuse_max_rows(max_rows)
    if beside:
        return _beside(a, b, group, schedule, return_received=return_received)
    check_operands(a, [b])
    group_name, rank, world_size = group_of(group)
    spec = spec_of(schedule, "all_to_all_matmul")
    results = run_dispatch(as_matrix(a), b, group_name, rank, world_size, max(1, rows_per_entry(a)), spec, return_received)
    out = _shaped(results[0], a, rank, world_size)
    return (out, _shaped(results[1], a, rank, world_size)) if return_received else out


def _is_last(name: str, dim: int, splits: torch.Tensor | None) -> bool:
    """Whether an exchange cuts, or lays together, the last dimension instead of the first."""
    if not isinstance(dim, int) or dim not in (0, -1) or isinstance(dim, bool):
        raise ValueError(f"{name} is {dim!r}; it must be 0 (rows) or -1 (columns)")
    if dim and splits is not None:
        raise ValueError(f"{name} is {dim}; with splits it must be 0: they count rows")
    return dim == -1


def _apart(a: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup | None, schedule: str | Schedule) -> torch.Tensor:
    """matmul_all_to_all of columns."""
    check_operands(a, [b])
    name, _, world_size = group_of(group)
    if b.shape[1] % world_size:
        raise ValueError(f"b has {b.shape[1]} columns; with split_dim=-1 they must be a multiple of {world_size}, the ranks")
    out = run_apart(as_matrix(a), b, name, world_size, spec_of(schedule, "matmul_all_to_all_columns"))
    return _with_middle(out, a, world_size * a.shape[0])


def _beside(
    a: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup | None, schedule: str | Schedule, *, return_received: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """all_to_all_matmul of columns side by side."""
    name, _, world_size = group_of(group)
    check_operands(a, [b], parts=world_size)
    if a.shape[0] % world_size:
        raise ValueError(f"a has {a.shape[0]} rows; with gather_dim=-1 they must be a multiple of {world_size}, the ranks")
    spec = spec_of(schedule, "all_to_all_columns_matmul")
    results = run_beside(as_matrix(a), b, name, world_size, spec, return_received)
    entries = a.shape[0] // world_size
    out = _with_middle(results[0], a, entries)
    return (out, _with_middle(results[1], a, entries)) if return_received else out


def _shaped(out: torch.Tensor, a: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """The rows that this rank has from every rank, with the middle dimensions of a."""
    rows = rows_per_entry(a)
    if rows:
        return _with_middle(out, a, out.shape[0] // rows)
    low, high = split(a.shape[0], world_size)[rank]
    return _with_middle(out, a, world_size * (high - low))


def _with_middle(out: torch.Tensor, a: torch.Tensor, entries: int) -> torch.Tensor:
    return out if a.dim() == 2 else out.view(entries, *a.shape[1:-1], out.shape[1])
