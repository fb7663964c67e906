"""all_gather_matmul and matmul_reduce_scatter: tensor and sequence parallel.

    all_gather_matmul(a, b)        replaces   dist.all_gather_into_tensor(a_full, a); a_full @ b
    matmul_reduce_scatter(a, b)    replaces   c = a @ b; dist.reduce_scatter_tensor(out, c)

Legend: M N K full extents, m n k a rank's part. Each is a torch.library custom operator (weft::...) with a fake
implementation, so that it traces under torch.compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
import torch.distributed as dist

from weft.core.errors import require
from weft.core.problem import split
from weft.core.schedule import Schedule
from weft.ops.checks import check_operands, group_of, listed, spec_of
from weft.ops.library.tensor_parallel import run_gather, run_scatter
from weft.ops.rows import flat, per_entry


@overload
def all_gather_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    return_gathered: Literal[False] = False,
    gather_dim: int = 0,
    rows: int | None = None,
    keep_gathered: bool = False,
) -> torch.Tensor: ...


@overload
def all_gather_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    return_gathered: Literal[True],
    gather_dim: int = 0,
    rows: int | None = None,
    keep_gathered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def all_gather_matmul(
    a: torch.Tensor,
    b: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    return_gathered: Literal[False] = False,
    gather_dim: int = 0,
    rows: int | None = None,
    keep_gathered: bool = False,
) -> list[torch.Tensor]: ...


@overload
def all_gather_matmul(
    a: torch.Tensor,
    b: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    return_gathered: Literal[True],
    gather_dim: int = 0,
    rows: int | None = None,
    keep_gathered: bool = False,
) -> tuple[list[torch.Tensor], torch.Tensor]: ...


def all_gather_matmul(
    a: torch.Tensor,
    b: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    return_gathered: bool = False,
    gather_dim: int = 0,
    rows: int | None = None,
    keep_gathered: bool = False,
) -> torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor | list[torch.Tensor], torch.Tensor]:
    """all_gather(a, dim=gather_dim) @ b, with the gather hidden behind the matmul.

    Replaces

        dist.all_gather_into_tensor(a_full, a, group); out = a_full @ b

    Args:
        a: [m, ..., K], this rank's shard; any strides.
        b: [K, n], or several of them that share one gather (Q, K and V, say).
        group: any process group; on several hosts see docs/nodes.md. Default: the whole world.
        schedule: "auto": the fastest of a few that are measured at the first call of a problem (on CPUs the planner's choice).
            "planned": the planner's choice; nothing is measured. Or a name of `weft schedules`, "name:chunks", or a Schedule
            value.
        return_gathered: also return the gathered a.
        gather_dim: the dimension that is gathered (not the last).
        rows: extent of gather_dim over all ranks, where it is not world_size times a's: then a's is the part that torch.chunk
            would give this rank.
        keep_gathered: for b's gradient, keep the gathered a, M x K, from forward to backward; else it is gathered again.

    Returns out [M, ..., n], or a list, one for each b; with return_gathered, (that, gathered a).
    Raises ValueError for wrong shapes, dtypes or names; RankMismatch if ranks call different things; PeerLost and
    WaitTimeout if a rank is lost. Sources: FiCCO (arXiv 2512.10236), T3 (arXiv 2401.16677); see docs/schedules.md.
    """
    bs = [b] if isinstance(b, torch.Tensor) else listed("b", b, "pass a matrix, or several in a list")
    check_operands(a, bs, len(bs))
    group_name, rank, world_size = group_of(group)
    dim = _dimension(a, gather_dim, "gather_dim")
    moved = a.movedim(dim, 0) if dim else a
    _check_rows(rows, moved.shape[0], rank, world_size)
    total = world_size * moved.shape[0] if rows is None else rows
    unit = per_entry(moved)
    keep = keep_gathered and torch.is_grad_enabled() and any(one.requires_grad for one in bs)
    spec, gathered = spec_of(schedule, "all_gather_matmul"), return_gathered or keep
    results = run_gather(flat(moved), bs, group_name, total * unit, max(unit, 1), spec, gathered, keep)
    shaped = [_shaped(r, total, moved, dim) for r in results]
    outs = shaped[: len(bs)]
    out = outs[0] if isinstance(b, torch.Tensor) else outs
    return (out, shaped[-1]) if return_gathered else out


def matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    op: str = "sum",
    scatter_dim: int = 0,
) -> torch.Tensor:
    """reduce_scatter(a @ b, dim=scatter_dim), with the exchange hidden behind the matmul.

    Replaces

        c = a @ b; dist.reduce_scatter_tensor(out, c, op, group)

    Args:
        a: [M, ..., k], any strides.
        b: [k, N].
        group: as for all_gather_matmul.
        schedule: as for all_gather_matmul, but for the families that it alone has.
        op: "sum" or "avg".
        scatter_dim: the dimension that is scattered (not the last).

    Partial products are rounded to the dtype, summed in float32 in the order of ranks, and rounded once.

    Returns out [m, ..., N]: this rank's part as torch.chunk would cut it; where M does not divide, the last ranks' are
    shorter or empty. Raises as all_gather_matmul does.
    """
    check_operands(a, [b], 1)
    if op not in ("sum", "avg"):
        raise ValueError(f"op is {op!r}; use 'sum' or 'avg'")
    group_name, rank, world_size = group_of(group)
    dim = _dimension(a, scatter_dim, "scatter_dim")
    moved = a.movedim(dim, 0) if dim else a
    unit = per_entry(moved)
    out = run_scatter(
        flat(moved), b, group_name, rank, world_size, max(unit, 1), spec_of(schedule, "matmul_reduce_scatter"), op
    )
    low, high = split(moved.shape[0], world_size)[rank]
    return _shaped(out, high - low, moved, dim)


def _shaped(out: torch.Tensor, entries: int, moved: torch.Tensor, dim: int) -> torch.Tensor:
    """A matrix with its first dimension, of `entries`, where the caller has it, and the middle ones of `moved`."""
    if moved.dim() == 2:
        return out
    return out.view(entries, *moved.shape[1:-1], out.shape[1]).movedim(0, dim)


def _dimension(a: torch.Tensor, dim: int, name: str) -> int:
    require(name, dim, int, f"it must be in 0 to {a.dim() - 2}")
    found = dim + a.dim() if dim < 0 else dim
    if not 0 <= found < a.dim() - 1:
        raise ValueError(f"{name} is {dim}; for a of {a.dim()} dimensions it must be in 0 to {a.dim() - 2}")
    return found


def _check_rows(rows: int | None, mine: int, rank: int, world_size: int) -> None:
    if rows is None:
        return
    require("rows", rows, (int, torch.SymInt), "it must be a whole number, or None")
    low, high = split(rows, world_size)[rank]
    if mine != high - low:
        raise ValueError(
            f"rows is {rows}: torch.chunk over {world_size} ranks gives rank {rank} {high - low} rows, but a has {mine}"
        )
