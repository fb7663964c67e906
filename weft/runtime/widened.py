"""Calls of row counts that come and go, by the program of a few rows more.

A program is for one row count. To bind one takes milliseconds in which ranks meet, and where tokens differ from step to step
nearly every call would. So a call whose schedule is taken over from the row counts around its own (weft.planner.between) runs
by the program of the next count on a coarse scale, which those around it run by, too:

    a         each piece: its rows | as many more as make it as high as the program's      one copy
    result    each piece: its rows | cut off                                                one copy; of one piece none

A piece is a rank's shard, or what goes to, or comes from, one rank. Rows are multiplied each by itself, so nobody has to fill
those that are added. A row count that stays, for CALLS calls between which fewer than RECENT others come, gets a program of its
own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import eq
from typing import Literal

import torch

from weft.core.problem import Op, Problem, split
from weft.planner.between import but_rows, of_rows
from weft.runtime.bound import Outputs
from weft.runtime.calls import Call, MatmulCall, Site
from weft.runtime.trial import Choice

CALLS = 100
"""Of one row count by a program of more rows. A model calls with one count once a layer and step: such counts may still go."""
RECENT = 4
"""Row counts whose calls are counted, of calls that are alike in all else: another one takes the place of the oldest, which is
new if it returns. Else each count of many would, in the end, get a program, which the others soon put out."""
_STEPS = 3
"""Binary digits of a piece's rows that count, after the first: up to an eighth more rows."""
_Pieces = Literal["own", "each", "mine", "whole"]
_PIECES: dict[Op, tuple[_Pieces, _Pieces]] = {
    "all_gather_matmul": ("own", "each"),
    "matmul_reduce_scatter": ("each", "own"),
    "matmul_all_reduce": ("whole", "whole"),
    "matmul_all_to_all": ("each", "mine"),
    "all_to_all_matmul": ("each", "mine"),
}
"""Of a and of the result: the own shard; each rank's, one below the other; as high as the own, one of each rank; all rows."""


def wider(problem: Problem, at_most: int | None = None) -> Problem | None:
    """The problem whose program serves this one's calls, too; None if that is its own alone. at_most: rows that are known, and
    stand for the next count on the scale where that is beyond them."""
    if problem.op not in _PIECES or problem.nodes:
        return None
    pieces = 1 if problem.op == "matmul_all_reduce" else problem.world_size
    entries = problem.m // problem.row_multiple
    high = -(-entries // pieces)
    step = 1 << max(0, high.bit_length() - 1 - _STEPS)
    wide = -(-high // step) * step * pieces * problem.row_multiple
    if at_most is not None and at_most < wide and at_most % (pieces * problem.row_multiple) == 0:
        wide = at_most
    return None if wide == problem.m else of_rows(but_rows(problem), wide)


def serves(problem: Problem, rows: int) -> bool:
    """Whether calls of so many rows may run by the problem's program."""
    if rows == problem.m:
        return True
    if problem.op not in _PIECES or not 0 < rows < problem.m or rows % problem.row_multiple:
        return False
    return wider(replace(problem, m=rows), at_most=problem.m) == problem


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """The row counts of calls that differ in nothing else, from `first` to `last`, and what all of them run by. before, after:
    what ranks say of such a call, but for its row count."""

    first: int
    last: int
    site: Site
    before: str
    after: str


class Widened:
    """How often calls alike may still run by a program of more rows, and which other row counts run by it. As many calls alike
    are made on every rank."""

    def __init__(
        self, choices: Mapping[tuple[Problem, torch.device], Choice], around: Callable[[Problem], Choice | None]
    ) -> None:
        """choices: what was chosen until now. around: what was measured with fewer and with more rows."""
        self._choices, self._around = choices, around
        self._left: dict[Hashable, int] = {}
        self._recent: dict[Hashable, list[Hashable]] = {}
        self._steps: dict[Hashable, list[_Step]] = {}
        self._shares: dict[tuple[str, str], set[tuple[int, ...]]] = {}

    def met(self, call: Call, sizes: tuple[int, ...]) -> bool:
        """Note how ranks share b in a call that they met in. sizes: each one's share, by rank. Whether every rank can tell this
        call from all others by its own share: with 17 and 18 columns, a rank that has 9 of both cannot."""
        if not isinstance(call, MatmulCall):
            return False
        before, _, after = call.describe().partition(call.rows_line(call.rows))
        known = self._shares.setdefault((before, after), set())
        clear = not any(other != sizes and any(map(eq, other, sizes)) for other in known)
        if not clear and sizes not in known:
            self.unlearn()  # steps of the one whose share it has
        known.add(sizes)
        return clear

    def learn(self, call: Call, problem: Problem, sizes: tuple[int, ...], site: Site) -> None:
        """What ranks have agreed on in a call of `problem`, for those of the other row counts that its program serves."""
        found, around = self.wider(call, problem), self._around(problem)
        if found is None or around is None or found.m != site.wide:
            return
        assert isinstance(call, MatmulCall)
        unit = problem.row_multiple
        entries = range(found.m // unit)
        first = bisect_left(entries, True, lo=around.like[0] // unit + 1, key=lambda entry: serves(found, unit * entry))
        before, _, after = call.agreed(sizes).partition(call.rows_line(call.rows))
        step = _Step(first=unit * first, last=found.m, site=site, before=before, after=after)
        self._steps.setdefault(call.but_rows, []).append(step)

    def served(self, call: Call) -> tuple[str, Site] | None:
        """(what ranks agree on, the site but for its number) of a call that runs by a program that is bound, and that differs
        in its rows alone from one that ranks have met in; else None."""
        if not self._steps or not isinstance(call, MatmulCall) or call.spans is not None:
            return None
        rows = call.rows
        for step in self._steps.get(call.but_rows, ()):
            if step.first <= rows <= step.last and self.may(call.key):
                site = step.site if rows < step.last else replace(step.site, wide=0)
                return f"{step.before}{call.rows_line(rows)}{step.after}", site
        return None

    def unlearn(self) -> None:
        """Programs, and so choices, are others."""
        self._steps.clear()

    def wider(self, call: Call, problem: Problem) -> Problem | None:
        """The problem whose program is to run a call, if that is another one: what is known of both was measured around."""
        device = call.device
        if call.schedule != "auto" or not isinstance(call, MatmulCall) or call.spans is not None:
            return None
        if (problem, device) in self._choices or (around := self._around(problem)) is None:
            return None
        high = around.like[1]
        found = wider(problem, at_most=high)
        if found is None or found.m == high:
            return found
        known = self._choices.get((found, device)) or (around if found.m < high else self._around(found))
        return found if known is not None and known.spec == around.spec else None

    def may(self, key: Hashable) -> bool:
        return self._left.get(key, CALLS) > 0

    def used(self, key: Hashable, alike: Hashable) -> None:
        """Count a call. alike: what it has in common with those of other row counts."""
        recent = self._recent.setdefault(alike, [])
        if not recent or recent[-1] != key:
            if key in recent:
                recent.remove(key)
            recent.append(key)
            if len(recent) > RECENT:
                self._left.pop(recent.pop(0), None)
        self._left[key] = self._left.get(key, CALLS) - 1


def widened(call: MatmulCall, rows: int, rank: int, world_size: int) -> MatmulCall:
    """The call with as many rows. They hold anything."""
    sizes = _sizes(call, _PIECES[call.op][0], rank, world_size)
    high = rows if call.op == "matmul_all_reduce" else rows // world_size
    extras = {name: _spread(tensor, sizes, high) if name == "residual" else tensor for name, tensor in call.extras.items()}
    return replace(call, a=_spread(call.a, sizes, high), rows=rows, extras=extras)


def narrowed(found: Outputs, call: MatmulCall, rank: int, world_size: int) -> dict[str, list[torch.Tensor]]:
    """What the widened call gave, as `call` has it."""
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
