"""The operators: what a PyTorch user calls in place of a collective and a matmul.

    all_gather_matmul(a, b)        replaces   dist.all_gather_into_tensor(a_full, a); a_full @ b
    matmul_reduce_scatter(a, b)    replaces   c = a @ b; dist.reduce_scatter_tensor(out, c)

Legend: M N K full extents, m n k a rank's part. All ranks of the group call the same operator in the same order.

Each is a torch.library custom operator (weft::...) with a fake implementation, so that it traces under torch.compile. The
first call of a group builds its Team; the first call of a problem plans, checks and binds a schedule; later calls run it.
Every call, ranks agree on what they call before anything moves (RankMismatch shows the difference).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
import torch.distributed as dist

from weft import schedules
from weft.execute.choose import CHOSEN_HERE
from weft.execute.groups import GROUPS
from weft.execute.trial import Choice
from weft.library import run_gather, run_scatter
from weft.problem import Op, split
from weft.schedule import Schedule

_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


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
) -> torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor | list[torch.Tensor], torch.Tensor]:
    """all_gather(a, dim=gather_dim) @ b, with the gather hidden behind the matmul.

    Replaces
        dist.all_gather_into_tensor(a_full, a, group); out = a_full @ b

    a: [m, ..., K], this rank's shard; any strides. b: [K, n], or several of them that share one gather (Q, K and V, say).
    group: any process group whose ranks are on one host; default: the whole world.
    schedule: "auto", "planned", a name of `weft schedules`, "name:chunks", or a Schedule value. "auto" is the fastest of a few
    that are measured at the first call of a problem (on CPUs the planner's choice); "planned" is the planner's choice.
    return_gathered: also return the gathered a. gather_dim: the dimension that is gathered (not the last).
    rows: extent of gather_dim over all ranks, where it is not world_size times a's: then a's is the part that torch.chunk
    would give this rank.

    Returns out [M, ..., n], or a list, one for each b; with return_gathered, (that, gathered a).
    Raises ValueError for wrong shapes, dtypes or names; RankMismatch if ranks call different things; PeerLost and
    WaitTimeout if a rank is lost. Sources: FiCCO (arXiv 2512.10236), T3 (arXiv 2401.16677); see docs/schedules.md.
    """
    bs = [b] if isinstance(b, torch.Tensor) else list(b)
    _check_operands(a, bs, len(bs))
    group_name, rank, world_size = _group(group)
    dim = _dimension(a, gather_dim, "gather_dim")
    moved = a.movedim(dim, 0) if dim else a
    total = world_size * moved.shape[0] if rows is None else rows
    _check_rows(rows, moved.shape[0], rank, world_size)
    unit = _per_entry(moved)
    flat = moved.reshape(moved.shape[0] * unit, a.shape[-1]) if a.dim() > 2 else a
    results = run_gather(flat, bs, group_name, total * unit, unit, _spec(schedule, "all_gather_matmul"), return_gathered)
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

    a: [M, ..., k], any strides. b: [k, N]. op: "sum" or "avg". scatter_dim: the dimension that is scattered (not the last).
    group, schedule: as for all_gather_matmul, but for the families that it alone has. Partial products are rounded to the
    dtype, summed in float32 in the order of ranks, and rounded once.

    Returns out [m, ..., N]: this rank's part as torch.chunk would cut it; where M does not divide, the last ranks' are
    shorter or empty. Raises as all_gather_matmul does.
    """
    _check_operands(a, [b], 1)
    if op not in ("sum", "avg"):
        raise ValueError(f"op is {op!r}; use 'sum' or 'avg'")
    group_name, rank, world_size = _group(group)
    dim = _dimension(a, scatter_dim, "scatter_dim")
    moved = a.movedim(dim, 0) if dim else a
    unit = _per_entry(moved)
    flat = moved.reshape(moved.shape[0] * unit, a.shape[-1]) if a.dim() > 2 else a
    out = run_scatter(flat, b, group_name, rank, world_size, unit, _spec(schedule, "matmul_reduce_scatter"), op)
    low, high = split(moved.shape[0], world_size)[rank]
    return _shaped(out, high - low, moved, dim)


def close(group: dist.ProcessGroup | None = None) -> None:
    """Give back what weft holds for a group: segments, threads, programs. The next call starts anew. Not collective.

    After an error, every rank of the group calls this before the group is used again.
    """
    GROUPS.close(_group(group)[0])


def choices(group: dist.ProcessGroup | None = None) -> list[Choice]:
    """What schedule="auto" has stood for in a group so far, a problem each: its spec, and on GPUs the times in us that
    were measured, by spec. The same on every rank. Empty where no call was made. Not collective.
    """
    return GROUPS.choices(_group(group)[0])


def _shaped(flat: torch.Tensor, entries: int, moved: torch.Tensor, dim: int) -> torch.Tensor:
    """A flat result with its first dimension, of `entries`, where the caller has it, and the middle ones of `moved`."""
    if moved.dim() == 2:
        return flat
    return flat.view(entries, *moved.shape[1:-1], flat.shape[1]).movedim(0, dim)


def _group(group: dist.ProcessGroup | None) -> tuple[str, int, int]:
    """(name, this rank, world_size) of a group. Raises ValueError if there is none, or this rank is not in it."""
    if not dist.is_initialized():
        raise ValueError("group: torch.distributed is not initialised; call dist.init_process_group, or start with torchrun")
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    if group is None or rank < 0:
        raise ValueError("group: this rank is not in it; call the operator on the group's ranks only")
    return group.group_name, rank, dist.get_world_size(group)


def _spec(schedule: str | Schedule, op: Op) -> str:
    """A schedule as a string that the operator `op` takes; values are kept and named by their content."""
    if isinstance(schedule, Schedule):
        return GROUPS.keep(schedule)
    if not isinstance(schedule, str):
        raise ValueError(f"schedule is a {type(schedule).__name__}; use a name or a weft.Schedule")
    if schedule not in CHOSEN_HERE:
        _check_name(schedule, op)
    return schedule


def _check_name(schedule: str, op: Op) -> None:
    try:
        schedules.check_op(schedules.parse(schedule)[0], op)
    except ValueError as error:
        if schedule.partition(":")[0] in schedules.NAMES:
            raise
        raise ValueError(f"{error}, or planned for auto without a trial") from None


def _per_entry(moved: torch.Tensor) -> int:
    """Rows of the flat matrix for one entry of the first dimension: the product of the middle dimensions."""
    unit = 1
    for extent in moved.shape[1:-1]:
        unit *= extent
    return unit


def _dimension(a: torch.Tensor, dim: int, name: str) -> int:
    found = dim + a.dim() if dim < 0 else dim
    if not 0 <= found < a.dim() - 1:
        raise ValueError(f"{name} is {dim}; for a of {a.dim()} dimensions it must be in 0 to {a.dim() - 2}")
    return found


def _check_rows(rows: int | None, mine: int, rank: int, world_size: int) -> None:
    if rows is None:
        return
    low, high = split(rows, world_size)[rank]
    if mine != high - low:
        raise ValueError(
            f"rows is {rows}: torch.chunk over {world_size} ranks gives rank {rank} {high - low} rows, but a has {mine}"
        )


def _check_operands(a: torch.Tensor, bs: Sequence[torch.Tensor], count: int) -> None:
    """One predicate for what both operators need of their inputs."""
    if not isinstance(a, torch.Tensor) or a.dim() < 2:
        raise ValueError(f"a is {_shape(a)}; it must be a tensor of at least 2 dimensions")
    if not bs:
        raise ValueError("b is an empty list; pass one matrix or several")
    if a.device.type not in ("cpu", "cuda"):
        raise ValueError(f"a is on {a.device}; weft runs on cpu and cuda")
    if a.dtype not in _DTYPES:
        raise ValueError(f"a is {a.dtype}; weft takes {', '.join(_DTYPES.values())}")
    for i, b in enumerate(bs):
        name = "b" if count == 1 else f"b[{i}]"
        if not isinstance(b, torch.Tensor) or b.dim() != 2:
            raise ValueError(f"{name} is {_shape(b)}; it must be a matrix")
        if b.shape[0] != a.shape[-1]:
            raise ValueError(
                f"{name} has {b.shape[0]} rows, a has {a.shape[-1]} columns ({_shape(a)} @ {_shape(b)}); they must agree"
            )
        if b.dtype != a.dtype or b.device != a.device:
            raise ValueError(f"{name} is {b.dtype} on {b.device}, a is {a.dtype} on {a.device}; they must agree")


def _shape(value: object) -> str:
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
