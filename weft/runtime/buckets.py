"""Row-count bucketing lets a few programs run calls whose number of rows changes from call to call.

A program is bound for one row count, which takes milliseconds, and `auto` measures it, which takes a second. A model in
training has a few row counts. In serving, nearly every step has another one. So for calls of `auto` that differ only in their
row count:

    the first OWN_COUNTS row counts    each has a program of its own, and is measured
    every later one                    is padded to a bucket, whose program serves all row counts up to it; one bucket of each
                                       doubling of the row count is measured, and the others run what that one chose

Buckets are a fixed series with eight steps to a doubling, so a call multiplies at most an eighth more rows than it has, and a
decode step never runs a prefill's program. Inputs and results are divided into pieces, usually one for each rank, and each
piece is padded separately:

    a         piece: its rows | as many more as make it as high as the bucket's      one copy
    result    piece: its rows | cut off                                              one copy, and none where there is one piece

Rows are multiplied independently, so padding may contain any values. It is zeros where rows are also summed, for the gradients
of weights.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Literal

import torch

from weft.core.problem import Op, Problem, split
from weft.runtime.autotune import Choice
from weft.runtime.bindings import Outputs
from weft.runtime.calls import Call, MatmulCall

OWN_COUNTS = 4
"""The number of row counts that get separate programs, for training, evaluation, prefill and decode of fixed sizes."""
_DIGITS = 3
"""A bucket has this many binary digits after the first one, which gives eight buckets to a doubling."""
_MOST = 4096
"""The most entries of each table here. The oldest is dropped first."""
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
    """Return the problem whose program runs this one padded.

    It is the problem itself if its row count is in the series, or if it is never padded: on several nodes, and for operators
    that exchange columns.
    """
    if problem.op not in _PIECES or problem.nodes:
        return problem
    pieces = 1 if problem.op == "matmul_all_reduce" else problem.world_size
    high = -(-(problem.m // problem.row_multiple) // pieces)
    step = 1 << max(0, high.bit_length() - 1 - _DIGITS)
    rows = -(-high // step) * step * pieces * problem.row_multiple
    return problem if rows == problem.m else replace(problem, m=rows)


def serves(problem: Problem, rows: int) -> bool:
    """Return whether calls with this many rows may use the problem's program."""
    if rows == problem.m:
        return True
    if problem.op not in _PIECES or not 0 < rows < problem.m or rows % problem.row_multiple:
        return False
    return bucket(replace(problem, m=rows)) == problem


class RowCounts:
    """RowCounts records which row counts have separate programs, and what was measured for each doubling.

    It depends only on calls that ranks have agreed on, so it is the same on all ranks.
    """

    def __init__(self) -> None:
        self._own: OrderedDict[Problem, set[int]] = OrderedDict()
        self._measured: OrderedDict[Hashable, Choice] = OrderedDict()

    def padded(self, call: Call, problem: Problem) -> Problem:
        """Return the problem whose program runs a call: its own, or its bucket."""
        if call.schedule != "auto" or not isinstance(call, MatmulCall) or problem.op not in _PIECES:
            return problem
        own = self._own.setdefault(replace(problem, m=0), set())
        _drop_oldest(self._own)
        if len(own) < OWN_COUNTS:
            own.add(problem.m)
        return problem if problem.m in own else bucket(problem)

    def measured(self, choice: Choice, device: torch.device) -> None:
        """Record a choice that was measured for exactly this problem."""
        self._measured.setdefault(_doubling(choice.problem, device), choice)
        _drop_oldest(self._measured)

    def like(self, problem: Problem, device: torch.device) -> Choice | None:
        """Return the choice for a bucket whose doubling was measured at another row count.

        Return None if it was not measured, or if the problem's row count has a separate program.
        """
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
    """Return the call padded to this many rows."""
    sizes = _sizes(call, _PIECES[call.op][0], rank, world_size)
    high = rows if call.op == "matmul_all_reduce" else rows // world_size
    extras = {name: _pad_pieces(tensor, sizes, high) if name == "residual" else tensor for name, tensor in call.extras.items()}
    scales = call.scales
    if scales is not None and scales.a is not None and scales.scaling.recipe != "tensorwise":
        scales = scales._replace(a=_pad_pieces(scales.a, sizes, high))
    zeros = bool(call.weight_gradients)
    a, *more = [_pad_pieces(one, sizes, high, zeros=zeros) for one in (call.a, *call.more)]
    x = call.x
    if x is not None:
        x = _pad_pieces(x, sizes if call.weight_gradients == "whole" else [x.shape[0]], high, zeros=True)
    return replace(call, a=a, more=more, rows=rows, extras=extras, scales=scales, x=x)


def cut(found: Outputs, call: MatmulCall, rank: int, world_size: int) -> dict[str, list[torch.Tensor]]:
    """Return the results of the padded call without the padding. call: the call before it was padded."""
    sizes = _sizes(call, _PIECES[call.op][1], rank, world_size)
    return {
        name: matrices if name == "gradients" else [_remove_rows(matrix, sizes) for matrix in matrices]
        for name, matrices in found.items()
    }


def _sizes(call: MatmulCall, pieces: _Pieces, rank: int, world_size: int) -> list[int]:
    """Return the rows of each piece."""
    if pieces == "whole":
        return [call.rows]
    sizes = [(high - low) * call.row_multiple for low, high in split(call.rows // call.row_multiple, world_size)]
    if pieces == "each":
        return sizes
    return [sizes[rank]] * (world_size if pieces == "mine" else 1)


def _pad_pieces(matrix: torch.Tensor, sizes: Sequence[int], high: int, *, zeros: bool = False) -> torch.Tensor:
    columns = matrix.shape[1]
    out = (matrix.new_zeros if zeros else matrix.new_empty)(len(sizes) * high, columns)
    places = out.view(len(sizes), high, columns)
    if len(set(sizes)) == 1:
        places[:, : sizes[0]].copy_(matrix.view(len(sizes), sizes[0], columns))
    else:
        for place, piece in zip(places, torch.split(matrix, list(sizes)), strict=True):
            place[: piece.shape[0]].copy_(piece)
    return out


def _remove_rows(matrix: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    columns = matrix.shape[1]
    if len(sizes) == 1:
        # It shares the memory without being a view, because a view made without gradients cannot be changed in place with them.
        return matrix.new_empty(0).set_(matrix.untyped_storage(), matrix.storage_offset(), (sizes[0], columns), matrix.stride())
    pieces = matrix.view(len(sizes), matrix.shape[0] // len(sizes), columns)
    if len(set(sizes)) == 1:
        return pieces[:, : sizes[0]].reshape(len(sizes) * sizes[0], columns)
    return torch.cat([piece[:rows] for piece, rows in zip(pieces, sizes, strict=True)])
