"""Decides whether two schedules are the same program: equal except for the names of flags and the layout of scratch memory.

On few ranks, different families may give the same program. With one peer, each step of hetero_fused_1d has one piece, as each
step of hetero_unfused_1d always has. With one piece per shard, both are shard_p2p. One orders arrived pieces by step, the other
by shard. Such schedules take the same time, and a difference between their measurements is noise. So one name stands for all:
the simplest, which is the first of them in `weft.schedules.FAMILIES`.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from weft.core.schedule import Flag, Gemm, Region, Schedule


def is_same_program(one: Schedule, other: Schedule) -> bool:
    """Return whether both schedules have the same steps on the same buffers after renaming flags and places in local and
    symmetric buffers one to one. The parts of a matmul must be contiguous in both or in neither. The comparison ends at the
    first step that differs."""
    if (one.problem, one.buffers) != (other.problem, other.buffers) or _outline(one) != _outline(other):
        return False
    return _Renaming(one).same(one.ranks, other.ranks)


def _outline(schedule: Schedule) -> list[list[int]]:
    """Return the number of steps of each lane of each rank, in which most schedules differ."""
    return [[len(lane.steps) for lane in lanes] for lanes in schedule.ranks]


class _Renaming:
    """A partial mapping of the names of one schedule to those of the other, built while they are compared."""

    def __init__(self, schedule: Schedule) -> None:
        self._scratch = {buffer.name for buffer in schedule.buffers if buffer.kind in ("local", "symmetric")}
        self._there: dict[object, object] = {}
        self._back: dict[object, object] = {}

    def same(self, one: object, other: object) -> bool:
        """Return whether two parts of the schedules are equal after renaming."""
        if type(one) is not type(other):
            return False
        if isinstance(one, tuple):
            assert isinstance(other, tuple)
            return len(one) == len(other) and all(map(self.same, one, other))
        if isinstance(one, Flag):
            return _where(one) == _where(other) and self._renamed(one, other)
        if isinstance(one, Region) and one.buffer in self._scratch:
            return _where(one) == _where(other) and self._renamed(one, other)
        if isinstance(one, Gemm) and _joints(one) != _joints(other):
            return False
        names = _fields(type(one))  # type: ignore[arg-type]
        return all(self.same(getattr(one, name), getattr(other, name)) for name in names) if names else one == other

    def _renamed(self, one: object, other: object) -> bool:
        return self._there.setdefault(one, other) == other and self._back.setdefault(other, one) == one


def _where(part: object) -> object:
    """Return what renaming does not change."""
    if isinstance(part, Region):
        return part.buffer, part.rank, part.shape
    return part.rank if isinstance(part, Flag) else None


def _joints(step: Any) -> list[tuple[bool, bool]]:
    """Return for each two consecutive parts whether their rows of a, and of the product, are contiguous: if not, a cuBLAS
    matmul needs them gathered, or scattered."""
    return [(a.a.rows[1] == b.a.rows[0], a.out.rows[1] == b.out.rows[0]) for a, b in pairwise(step.parts)]


@cache
def _fields(kind: type) -> tuple[str, ...]:
    """Return the names of the fields of a kind's values, or () if they have none."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()
