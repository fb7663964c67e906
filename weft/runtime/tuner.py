"""The tuner decides which schedule "auto" runs in a process group.

A choice comes from an autotuning run in this group, from an earlier process, or from another row count.

    specs            returns the candidates for a problem: one if the choice is known, several if they must be measured
    prepare_run      sets up the autotuning run of those (weft.runtime.autotune)
    record_choice    records the winner; rank 0 writes it to the user's plan cache on disk (weft.runtime.plan_cache)

All ranks run what rank 0 has read from its cache. If rank 0 finds nothing there, all ranks measure. What another rank finds
adds only measured times to its own report. Everything else here depends only on calls that the ranks have agreed on, so all
ranks come to the same result.

Row-count bucketing lets a few programs run calls whose number of rows changes from call to call.

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
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache
from typing import Literal

import torch

from weft import schedules
from weft.comm.rank_group import RankGroup
from weft.compat.device import gpu_number
from weft.core.problem import Op, Problem, split
from weft.runtime import plan_cache as plans
from weft.runtime.autotune import AutotuningRun, Choice, Measurement, queued_timer_for, timer_for
from weft.runtime.bindings import Outputs
from weft.runtime.bound import BoundProgram
from weft.runtime.calls import Call, MatmulCall
from weft.runtime.choose import MODES, auto_candidates, planned, profile_for
from weft.runtime.plan_cache import links_between, machine_of, versions

CHOICES = 4096
"""A group remembers the choices of this many problems. The oldest is dropped, and then read from disk or measured again."""

Key = tuple[Problem, str, torch.device]
"""A program is looked up by its problem, the caller's `schedule=`, and the device."""


class Tuner:
    """A Tuner holds the choices of one process group, and finds new ones."""

    def __init__(self, rank_group: RankGroup, row_counts: RowCounts) -> None:
        self._rank_group, self._row_counts = rank_group, row_counts
        self._choices: OrderedDict[tuple[Problem, torch.device], Choice] = OrderedDict()
        self._planned: OrderedDict[tuple[Problem, torch.device], Choice] = OrderedDict()
        """What the planner has chosen for calls with "planned". Calls with "auto" may measure the same problems."""
        self._plan_cache = GroupPlanCache(rank_group)

    def choices(self) -> list[Choice]:
        return [*self._choices.values(), *self._planned.values()]

    def specs(self, problem: Problem, call: Call) -> tuple[str, ...]:
        """Return the candidates for a call: one schedule, or several at the first call of a problem that must be measured.

        Collective. Raises ValueError on all ranks if one of them cannot read its machine profile.
        """
        device = call.device
        if call.schedule in MODES:
            agree(self._rank_group, device)
        if call.schedule != "auto":
            return (call.schedule,)
        known = self._choices.get((problem, device))
        if known is None and not (call.tried and timer_for(device)):
            return (planned(problem, device),)
        known = known or self._plan_cache.find(problem, device) or self._row_counts.like(problem, device)
        if known is None:
            return auto_candidates(problem, device)
        _remember(known, device, self._choices)
        if known.from_cache:
            self._row_counts.measured(known, device)
        return (known.spec,)

    def measures(self, problem: Problem, call: Call) -> bool:
        """Return whether a program that is bound without an autotuning run may time its matmul algorithms.

        It may not with "planned", which measures nothing, nor if the schedule was taken over from another row count.
        """
        known = self._choices.get((problem, call.device)) if call.schedule == "auto" else None
        return call.schedule != "planned" and not (known and known.like)

    def prepare_run(
        self, call: Call, bind: Callable[[str], BoundProgram], drop: Callable[[BoundProgram], None]
    ) -> AutotuningRun[BoundProgram]:
        """Set up an autotuning run that makes calls like this one."""
        timer = timer_for(call.device)
        assert timer is not None, "schedules are measured only where calls can be timed"
        return AutotuningRun(
            bind=bind,
            drop=drop,
            call=lambda program: program.run(call.inputs),
            timer=timer,
            queued=queued_timer_for(call.device),
            exchange=self._rank_group.agree_on_call,
        )

    def record_choice(self, program: BoundProgram, key: Key, measurements: tuple[Measurement, ...]) -> None:
        """Record which program was bound for a call. measurements: what was measured; empty if there was one candidate."""
        problem, asked, device = key
        choices = self._planned if asked == "planned" else self._choices
        if asked not in MODES or (problem, device) in choices:
            return
        chosen, profile = program.schedule, ""
        if asked == "planned" or timer_for(device) is None:
            profile = profile_for(device, self._rank_group.world_size).name
        spec = schedules.spec(chosen.name, chosen.chunks)
        _remember(Choice(problem=problem, spec=spec, measurements=measurements, predicted_for=profile), device, choices)
        if measurements:
            self._row_counts.measured(choices[problem, device], device)
            self._plan_cache.keep(choices[problem, device], device)


def _remember(choice: Choice, device: torch.device, choices: OrderedDict[tuple[Problem, torch.device], Choice]) -> None:
    choices[choice.problem, device] = choice
    if len(choices) > CHOICES:
        choices.popitem(last=False)


def agree(rank_group: RankGroup, device: torch.device) -> None:
    """Check that every rank can read its machine profile, that all profiles have the same number of copy lanes, and that all
    ranks have registered the same families, because they exchange the number of a family (weft.runtime.plan_cache).

    Collective. Raises RankMismatch for different families. Otherwise it raises ValueError on all ranks, and the group stays
    usable.
    """
    wrong: ValueError | None = None
    mine = 0
    try:
        mine = 2 if profile_for(device, rank_group.world_size).fans_out else 1
    except ValueError as error:
        wrong = error
    registered = ", ".join(family.name for family in schedules.FAMILIES.values() if family.registered)
    families = f"\nregistered families: {registered or 'none'}"
    found = rank_group.agree_on_call(f"the machine profile can be read{families}", mine)
    if wrong is not None:
        raise wrong
    if 0 in found:
        raise ValueError(f"rank {found.index(0)} cannot read its machine profile (WEFT_MACHINE): see the error there")
    if len(set(found)) > 1:
        one, each = found.index(1), found.index(2)
        raise ValueError(
            f"machine profiles differ: rank {one} has one copy lane by its own, rank {each} one for each peer "
            "(copies.engines); set WEFT_MACHINE to the same profile on all ranks"
        )


class GroupPlanCache:
    """GroupPlanCache reads and writes the user's plan cache, which holds what earlier processes have measured."""

    def __init__(self, rank_group: RankGroup) -> None:
        self._rank_group = rank_group
        self._cache = plans.from_environment()
        self._links: dict[torch.device, str] = {}

    def find(self, problem: Problem, device: torch.device) -> Choice | None:
        """Return what an earlier process measured and chose. Return None if the problem must be measured. Collective."""
        if device.type == "cuda":
            numbers = self._rank_group.agree_on_call("GPUs of the group", gpu_number(device))
            self._links[device] = links_between([numbers[rank] for rank in self._rank_group.ranks_on_node])
        with self._rank_group.fail_group_on_error():
            entry = self._cache.read(self._key(problem, device)) if self._cache else None
        mine = plans.encode(entry.spec) if entry else 0
        chosen = plans.decode(self._rank_group.agree_on_call(f"cached plan of {problem}", mine)[0])
        if chosen is None:
            return None
        us = entry.us if entry and entry.spec == chosen else {}
        return Choice(
            problem=problem, spec=chosen, measurements=tuple(Measurement(spec=s, us=t) for s, t in us.items()), from_cache=True
        )

    def keep(self, choice: Choice, device: torch.device) -> None:
        """On rank 0, write a choice for later processes."""
        if self._cache and self._rank_group.rank == 0:
            with self._rank_group.fail_group_on_error():
                self._cache.write(plans.Entry(key=self._key(choice.problem, device), spec=choice.spec, us=choice.us))

    def _key(self, problem: Problem, device: torch.device) -> plans.Key:
        machine, known = _machine_and_versions(device, self._rank_group.world_size)
        if device in self._links:
            machine = machine | {"links": self._links[device]}
        machine = machine | {"profile": profile_for(device, self._rank_group.world_size).digest}  # the candidates depend on it
        return plans.Key(machine=machine, versions=known, problem=problem, families=plans.digest_of_families(problem))


@cache
def _machine_and_versions(device: torch.device, world_size: int) -> tuple[dict[str, str], dict[str, str]]:
    return machine_of(device, world_size), versions(device.type)


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

    It is the problem itself if its row count is in the series, or if it is never padded: on several nodes, with a sharded
    residual, and for operators that exchange columns.
    """
    if problem.op not in _PIECES or problem.nodes or problem.residual_sharded:
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
    zeros = bool(call.weight_gradients)  # also in x: 0 * NaN would be NaN
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
    # Copied also where a view could have these rows (one of each piece): torch.compile expects a contiguous result.
    return torch.cat([piece[:rows] for piece, rows in zip(pieces, sizes, strict=True)])
