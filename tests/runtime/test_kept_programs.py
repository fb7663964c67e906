"""What a group keeps: programs that a graph of the caller's holds stay, on every rank, however many come after them."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture

import weft
from weft.runtime import programs
from weft.runtime.bound_call import RememberedCall
from weft.runtime.groups import GROUPS, GroupState


def _state() -> GroupState:
    world = dist.group.WORLD
    assert world is not None
    return GROUPS.state(world.group_name)


def _call(rows: int) -> None:
    a = torch.ones(rows, 4)
    out = weft.all_gather_matmul(a, torch.eye(4), schedule="shard_p2p")
    assert torch.equal(out, torch.ones(rows * dist.get_world_size(), 4))


def _rows() -> list[int]:
    """Of a rank, by program, the least recently used first."""
    return [program.schedule.problem.m // dist.get_world_size() for program in _state().bound()]


def _captures(rows: int, mine: bool) -> list[int]:
    """The order after this rank, if it is one that does, has made a call while it captures: as if there were GPUs, and a call
    that all ranks know. It must not move what others leave where it is."""
    state, before = _state(), _rows()
    if mine and rows in before:
        program = next(program for program in state.bound() if program.schedule.problem.m == rows * dist.get_world_size())
        known, play = programs.KnownCall(number=0, program=program), program.run
        call = SimpleNamespace(
            key="captured",
            device=torch.device("cuda"),
            inputs={},
            outputs=None,
            reached={},
            invalidated=(),
            spans=None,
            tried=False,
        )
        state._known["captured"] = known  # type: ignore[index]
        capturing, torch.cuda.is_current_stream_capturing = torch.cuda.is_current_stream_capturing, lambda: True
        program.run = lambda *_, **__: {}  # type: ignore[method-assign]
        try:
            state.make_call(call)  # type: ignore[arg-type]
        finally:
            torch.cuda.is_current_stream_capturing, program.run = capturing, play  # type: ignore[method-assign]
            del state._known["captured"]  # type: ignore[arg-type]
    return before


def _held(captured_on: int) -> list[list[int]]:
    """Room for 3 programs beside those in graphs. One rank has captured those of 1 and 3 rows."""
    weft.close()  # of what other tests have called
    usual, programs._AT_ONCE = (programs.OVERHEAD_BYTES, programs._AT_ONCE), 2
    programs.OVERHEAD_BYTES, os.environ["WEFT_PROGRAM_MEMORY_GB"] = 10**9, "3.1" if dist.get_rank() else "3.9"
    found = []
    try:
        for rows in range(1, 9):
            _call(rows)
            if rows in (1, 3) and dist.get_rank() == captured_on:
                _state().bound()[-1].captured = True
            assert rows < 3 or _captures(3, dist.get_rank() == captured_on) == _rows()
            found.append(_rows())
        _call(1)
        found.append(_rows())
    finally:
        weft.close()
        programs.OVERHEAD_BYTES, programs._AT_ONCE = usual
        del os.environ["WEFT_PROGRAM_MEMORY_GB"]
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("captured_on", [0, 1, -1])
def test_what_a_graph_holds_stays_on_every_rank(ranks: RankFixture, captured_on: int) -> None:
    first, second = ranks(2).run(_held, captured_on)
    assert first == second
    if captured_on < 0:
        assert first[2:] == [[1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6], [5, 6, 7], [6, 7, 8], [7, 8, 1]]
    else:
        # The fourth comes while one, or two, of the others are held.
        assert first[3:] == [[1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 3, 4, 5, 6], [1, 3, 5, 6, 7], [1, 3, 6, 7, 8], [3, 6, 7, 8, 1]]


def _forgotten() -> list[list[bool]]:
    """Whether the calls of 1 to 3 rows are forgotten, after so many that two are known, and after their programs are closed."""
    weft.close()
    usual, programs.KNOWN_CALLS = programs.KNOWN_CALLS, 2
    found = []
    try:
        known = []
        for rows in (1, 2, 3):
            _call(rows)
            known.append(next(reversed(_state()._known.values())))
        found.append([one.forgotten for one in known])
        _state().forget(_state().bound())
        found.append([one.forgotten for one in known])
    finally:
        programs.KNOWN_CALLS = usual
        weft.close()
    return found


@pytest.mark.ranks
def test_a_call_that_is_forgotten_says_so(ranks: RankFixture) -> None:
    """Warm calls ask it, and must not be made once other ranks agree anew on such calls."""
    assert ranks(2).run(_forgotten) == [[[True, False, False], [True, True, True]]] * 2


class Bound:
    """What stands for a BoundCall, which only GPUs have."""

    fixed: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, known: programs.KnownCall) -> None:
        self._known = known

    @property
    def is_forgotten(self) -> bool:
        return self._known.forgotten


def _held_for_warm_calls() -> list[bool]:
    """Whether something is held for warm calls of 1 and 2 rows, once the program of the first one is closed."""
    weft.close()
    world = dist.group.WORLD
    assert world is not None
    bound = []
    for rows in (1, 2):
        _call(rows)
        bound.append(Bound(next(reversed(_state()._known.values()))))
        GROUPS.remembered.add((rows,), [torch.ones(rows)], RememberedCall(world, bound[-1]))  # type: ignore[arg-type]
    _state().forget(_state().bound()[:1])
    found = [GROUPS.remembered.get((rows,), [torch.ones(rows)]) is not None for rows in (1, 2)]
    weft.close()
    return found


@pytest.mark.ranks
def test_nothing_is_held_for_warm_calls_of_a_closed_program(ranks: RankFixture) -> None:
    """The launches of such calls refer to the memory of the program, which could not be freed."""
    assert ranks(2).run(_held_for_warm_calls) == [[False, True]] * 2


def _destroyed() -> list[int]:
    """Groups that are known, after each of some that were used and destroyed without having been closed."""
    weft.close()
    known = []
    for _ in range(3):
        group = dist.new_group()
        weft.all_gather_matmul(torch.ones(2, 4), torch.eye(4), group, schedule="shard_p2p")
        dist.destroy_process_group(group)
        known.append(len(GROUPS._states))
    _call(1)
    return [*known, len(GROUPS._states)]


def test_what_was_kept_for_a_destroyed_group_goes_with_the_next_one(ranks: RankFixture) -> None:
    assert ranks(2).run(_destroyed) == [[1, 1, 1, 1]] * 2
