"""Row-count bucketing: where the number of rows changes from call to call, few programs serve all of it.

A program is bound for one row count, which takes milliseconds, and `auto` measures it, which takes a second. A model in
training has a few row counts; one in serving has another at nearly every step. So for the calls of `auto` that differ in their
row count alone:

    the first OWN_COUNTS row counts    each has a program of its own, and is measured
    every later one                    is padded to a bucket, whose program serves all row counts up to it; one bucket of each
                                       doubling of the row count is measured, and the others run what that one chose

Buckets are a fixed series with eight steps to a doubling, so a call multiplies at most an eighth more rows than it has: a
decode step never pays for a prefill's program. Both sides of a call are cut into pieces, one for each rank as a rule, and each
piece is padded by itself:

    a         piece: its rows | as many more as make it as high as the bucket's      one copy
    result    piece: its rows | cut off                                              one copy, and none where there is one piece

Each row is multiplied by itself, so padding holds whatever lies in the memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Literal

import torch

from weft.core.problem import Op, Problem, split
from weft.runtime.autotune import Choice
from weft.runtime.bound import Outputs
from weft.runtime.calls import Call, MatmulCall

OWN_COUNTS = 4
"""Row counts that get programs of their own: those of training, evaluation, prefill and decode, each of a fixed size."""
_DIGITS = 3
"""Binary digits of a piece's rows that a bucket keeps after the first: eight buckets to a doubling."""
_MOST = 4096
"""Entries that each table here holds; the oldest goes first."""
_Pieces = Literal["own", "each", "mine", "whole"]
_PIECES: dict[Op, tuple[_Pieces, _Pieces]] = {
    "all_gather_matmul": ("own", "each"),
    "matmul_reduce_scatter": ("each", "own"),
    "matmul_all_reduce": ("whole", "whole"),
    "matmul_all_to_all": ("each", "mine"),
    "all_to_all_matmul": ("each", "mine"),
}
"""The pieces of a and of the result: this rank's shard; each rank's shard, one below the other; one of each rank, as high as
this rank's shard; all rows in one."""


def bucket(problem: Problem) -> Problem:
    """The problem whose program runs this one padded; itself if its row count is in the series, or if nothing is padded: rows
    that travel as columns, or between nodes."""
    if problem.op not in _PIECES or problem.nodes:
        return problem
    pieces = 1 if problem.op == "matmul_all_reduce" else problem.world_size
    high = -(-(problem.m // problem.row_multiple) // pieces)
    step = 1 << max(0, high.bit_length() - 1 - _DIGITS)
    rows = -(-high // step) * step * pieces * problem.row_multiple
    return problem if rows == problem.m else replace(problem, m=rows)


def serves(problem: Problem, rows: int) -> bool:
    """Whether calls of so many rows may run by the problem's program."""
    if rows == problem.m:
        return True
    if problem.op not in _PIECES or not 0 < rows < problem.m or rows % problem.row_multiple:
        return False
    return bucket(replace(problem, m=rows)) == problem


class RowCounts:
    """Which row counts have programs of their own, and what was measured of each doubling. It is a function of the calls that
    ranks have agreed on, and so the same on all of them."""

    def __init__(self) -> None:
        self._own: OrderedDict[Problem, set[int]] = OrderedDict()
        self._measured: OrderedDict[Hashable, Choice] = OrderedDict()

    def padded(self, call: Call, problem: Problem) -> Problem:
        """The problem whose program runs a call: its own, or its bucket's."""
        if call.schedule != "auto" or not isinstance(call, MatmulCall) or problem.op not in _PIECES:
            return problem
        own = self._own.setdefault(replace(problem, m=0), set())
        _drop_oldest(self._own)
        if len(own) < OWN_COUNTS:
            own.add(problem.m)
        return problem if problem.m in own else bucket(problem)

    def measured(self, choice: Choice, device: torch.device) -> None:
        """Note a choice that was measured of its very problem."""
        self._measured.setdefault(_doubling(choice.problem, device), choice)
        _drop_oldest(self._measured)

    def like(self, problem: Problem, device: torch.device) -> Choice | None:
        """The choice for a bucket whose doubling was measured at another row count; None if it was not, or the problem's row
        count has a program of its own."""
        found = self._measured.get(_doubling(problem, device))
        if found is None or problem.m in self._own.get(replace(problem, m=0), ()):
            return None
        return Choice(problem=problem, spec=found.spec, like=(found.problem.m,))


def _doubling(problem: Problem, device: torch.device) -> Hashable:
    return replace(problem, m=0), problem.m.bit_length(), device


def _drop_oldest(table: OrderedDict[Hashable, Choice] | OrderedDict[Problem, set[int]]) -> None:
    if len(table) > _MOST:
        table.popitem(last=False)


def pad(call: MatmulCall, rows: int, rank: int, world_size: int) -> MatmulCall:
    """The call with so many rows."""
    sizes = _sizes(call, _PIECES[call.op][0], rank, world_size)
    high = rows if call.op == "matmul_all_reduce" else rows // world_size
    extras = {name: _spread(tensor, sizes, high) if name == "residual" else tensor for name, tensor in call.extras.items()}
    scales = call.scales
    if scales is not None and scales.a is not None and scales.scaling.recipe != "tensorwise":
        scales = scales._replace(a=_spread(scales.a, sizes, high))
    return replace(call, a=_spread(call.a, sizes, high), rows=rows, extras=extras, scales=scales)


def cut(found: Outputs, call: MatmulCall, rank: int, world_size: int) -> dict[str, list[torch.Tensor]]:
    """The results of the padded call, without its padding. call: as it was."""
    sizes = _sizes(call, _PIECES[call.op][1], rank, world_size)
    return {name: [_taken(matrix, sizes) for matrix in matrices] for name, matrices in found.items()}


def _sizes(call: MatmulCall, pieces: _Pieces, rank: int, world_size: int) -> list[int]:
    """Rows of the pieces, one below the other."""
    if pieces == "whole":
        return [call.rows]
    sizes = [(high - low) * call.row_multiple for low, high in split(call.rows // call.row_multiple, world_size)]
    if pieces == "each":
        return sizes
    return [sizes[rank]] * (world_size if pieces == "mine" else 1)


def _spread(matrix: torch.Tensor, sizes: Sequence[int], high: int) -> torch.Tensor:
    columns = matrix.shape[1]
    out = matrix.new_empty(len(sizes) * high, columns)
    places = out.view(len(sizes), high, columns)
    if len(set(sizes)) == 1:
        places[:, : sizes[0]].copy_(matrix.view(len(sizes), sizes[0], columns))
    else:
        for place, piece in zip(places, torch.split(matrix, list(sizes)), strict=True):
            place[: piece.shape[0]].copy_(piece)
    return out


def _taken(matrix: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    columns = matrix.shape[1]
    if len(sizes) == 1:
        # Of the same memory, but no view: one that was made without gradients could not be changed in place with them.
        return matrix.new_empty(0).set_(matrix.untyped_storage(), matrix.storage_offset(), (sizes[0], columns), matrix.stride())
    pieces = matrix.view(len(sizes), matrix.shape[0] // len(sizes), columns)
    if len(set(sizes)) == 1:
        return pieces[:, : sizes[0]].reshape(len(sizes) * sizes[0], columns)
    return torch.cat([piece[:rows] for piece, rows in zip(pieces, sizes, strict=True)])
