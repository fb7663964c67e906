"""The all-to-all operators with `splits`: what they check, and how one expert is a group of one."""

from __future__ import annotations

import torch
import torch.distributed as dist

from weft.core.schedule import Schedule
from weft.ops.common import check_operands, group_of, shape_of
from weft.ops.library.ragged import run_combine, run_dispatch, run_gated


def ragged_combine(
    a: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup | None, splits: torch.Tensor, max_rows: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """matmul_all_to_all with splits."""
    name, _, world_size = group_of(group)
    experts = _check(a, b, splits, world_size, by_expert=True)
    rows = _most(max_rows)
    out, counts = run_combine(a, _grouped(b), splits.reshape(experts, world_size), name, world_size, rows)
    return out, counts if b.dim() == 3 else counts.flatten()


def ragged_dispatch(
    a: torch.Tensor,
    b: torch.Tensor,
    group: dist.ProcessGroup | None,
    splits: torch.Tensor,
    max_rows: int | None,
    *,
    return_received: bool,
) -> tuple[torch.Tensor, ...]:
    """all_to_all_matmul with splits."""
    name, _, world_size = group_of(group)
    experts = _check(a, b, splits, world_size, by_expert=False)
    rows = _most(max_rows)
    out, counts, *received = run_dispatch(
        a, _grouped(b), splits.reshape(world_size, experts), name, world_size, rows, return_received
    )
    return (out, counts if b.dim() == 3 else counts.flatten(), *received)


def ragged_gated(
    a: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup | None, splits: torch.Tensor, max_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(left half) * right half of all_to_all_matmul(a, b, splits=splits), which is computed in float32 and never stored.
    b: [experts, K, 2 F]. Returns ([max_rows, F], counts). Without gradients. Raises ValueError for an odd N."""
    name, _, world_size = group_of(group)
    experts = _check(a, b, splits, world_size, by_expert=False)
    if b.dim() != 3 or b.shape[2] % 2:
        raise ValueError(f"b is {shape_of(b)}; to be gated it must be [experts, K, 2 F]")
    return run_gated(a, b, splits.reshape(world_size, experts), name, world_size, _most(max_rows))


def refuse_max_rows(max_rows: int | None) -> None:
    if max_rows is not None:
        raise ValueError(f"max_rows is {max_rows}, but splits is None; give both, or neither for even shares")


def refuse_schedule(schedule: str | Schedule) -> None:
    if schedule != "auto":
        raise ValueError(f"schedule is {schedule}; with splits there is one way, use 'auto'")


def _grouped(b: torch.Tensor) -> torch.Tensor:
    return b if b.dim() == 3 else b[None]


def _most(max_rows: int | None) -> int:
    if not isinstance(max_rows, int) or isinstance(max_rows, bool) or max_rows < 1:
        raise ValueError(f"max_rows is {max_rows!r}; with splits, say how many rows may arrive at most, 1 or more")
    return max_rows


def _check(a: torch.Tensor, b: torch.Tensor, splits: torch.Tensor, world_size: int, *, by_expert: bool) -> int:
    """The number of experts."""
    if not isinstance(b, torch.Tensor) or b.dim() not in (2, 3) or (b.dim() == 3 and not b.shape[0]):
        raise ValueError(f"b is {shape_of(b)}; with splits it must be a matrix, or [experts, K, N] with an expert or more")
    check_operands(a, [_grouped(b)[0]])
    if a.dim() != 2:
        raise ValueError(f"a is {shape_of(a)}; with splits it must be a matrix")
    experts = b.shape[0] if b.dim() == 3 else 1
    extents = (experts, world_size) if by_expert else (world_size, experts)
    shapes = [extents] + ([(world_size,)] if experts == 1 else []) + ([] if by_expert else [(world_size * experts,)])
    if not isinstance(splits, torch.Tensor) or tuple(splits.shape) not in shapes:
        raise ValueError(f"splits is {shape_of(splits)}; for this b and group it must be {' or '.join(map(str, shapes))}")
    if splits.dtype not in (torch.int32, torch.int64) or splits.device != a.device:
        raise ValueError(f"splits is {splits.dtype} on {splits.device}; it must be int32 or int64 on {a.device}, as a is")
    return experts
