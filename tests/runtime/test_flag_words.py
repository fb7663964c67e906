"""Words of flags on GPUs: one for each step that waits, and none shared."""

from __future__ import annotations

import pytest
from families import PAIRS

from weft.core.problem import Op, Problem
from weft.core.schedule import Copy, Gemm, Signal, Wait, waits
from weft.runtime.launches import WaiterWords
from weft.schedules import build


@pytest.mark.parametrize(("op", "name"), PAIRS)
@pytest.mark.parametrize("size", [(64, 48, 32, 4), (5, 7, 3, 3), (2, 3, 1, 3), (8, 8, 8, 1)])
def test_every_family(op: Op, name: str, size: tuple[int, int, int, int]) -> None:
    m, n, k, world_size = size
    for fan_out in (False, True):
        schedule = build(Problem(op=op, m=m, n=n, k=k, world_size=world_size), name, 3, fan_out=fan_out)
        words = WaiterWords(schedule)
        taken: dict[int, set[int]] = {}
        for (flag, _, _), slot in words.slot.items():
            assert slot not in taken.setdefault(flag.rank, set())
            taken[flag.rank].add(slot)
        assert max((len(slots) for slots in taken.values()), default=0) == words.words


def test_a_kernels_own_gates_lie_together() -> None:
    schedule = build(Problem(op="all_gather_matmul", m=64, n=8, k=8, world_size=4), "track_and_trigger", 2)
    words = WaiterWords(schedule)
    for rank, lane, position, step in schedule:
        own = sorted({words.slot[w.flag, lane.name, position] for w in waits(step) if not w.on_previous_call})
        assert not own or own[-1] - own[0] == len(own) - 1, (rank, lane.name, position)
        assert isinstance(step, (Gemm, Wait, Copy, Signal))
