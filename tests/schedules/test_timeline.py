"""The timeline of a schedule: exact text for two small ones, and limits for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest
from damage import with_step

from weft.core.problem import Problem
from weft.core.schedule import Wait
from weft.schedules import build
from weft.schedules.timelines import Line, OpenLane, Placer, timeline

GATED = """\
flag_gated, chunks=1: all_gather_matmul M=4 N=4 K=4 bfloat16 world_size=2

rank 0, compute              rank 0, copy                    other ranks
gemm 4x2x4 in 2 parts        wait prev free[1] <~~~~~~~~~~~~~~~ rank 1 prev free[1]
  a[0:2] -> out[0:2]         copy a[0:2] -> a_full@1[0:2]
                             signal arrived[0] ~~~~~~~~~~~~~~~> rank 1
  a_full[2:4] -> out[2:4] <~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~ rank 1 arrived[1]
signal free[0] ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~> rank 1"""

TRIGGERED = """\
track_and_trigger, chunks=1: matmul_reduce_scatter M=4 N=4 K=4 bfloat16 world_size=2

rank 0, compute                           rank 0, copy                        other ranks
gemm 4x4x2 in 2 parts
  count made[1]: a[2:4] -> partial[2.. -> wait made[1]
                                          wait prev free[1] <~~~~~~~~~~~~~~~~~~~ rank 1 prev free[1]
                                          copy partial[2:4] -> recv@1[0:2]
                                          signal arrived[0] ~~~~~~~~~~~~~~~~~~~> rank 1
  a[0:2] + recv -> out[0:2] <~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~ rank 1 arrived[1]
signal free[0] ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~> rank 1"""


def test_gated_gather_reads_as_drawn() -> None:
    assert timeline(build(Problem(op="all_gather_matmul", m=4, n=4, k=4, world_size=2), "flag_gated", 1)) == GATED


def test_triggered_scatter_reads_as_drawn() -> None:
    problem = Problem(op="matmul_reduce_scatter", m=4, n=4, k=4, world_size=2)
    assert timeline(build(problem, "track_and_trigger", 1)) == TRIGGERED


def test_arrows_between_shown_ranks() -> None:
    schedule = build(Problem(op="all_gather_matmul", m=4, n=4, k=4, world_size=2), "shard_p2p", 1)
    text = timeline(schedule, ranks=(0, 1), width=200)
    assert "other ranks" not in text
    assert "signal arrived[0] ~~~~~~~~~~~~> wait arrived[0]" in text


def test_a_deadlock_is_drawn_up_to_where_it_stops() -> None:
    schedule = build(Problem(op="all_gather_matmul", m=4, n=4, k=4, world_size=2), "shard_p2p", 1)
    place = next((0, i, 0) for i, lane in enumerate(schedule.ranks[0]) if lane.name == "copy")
    flag = schedule.ranks[0][place[1]].steps[0].flag  # type: ignore[union-attr]
    stuck = with_step(schedule, place, Wait(dataclasses.replace(flag, name="nobody")))
    assert "never: rank 0, copy: wait nobody[1]" in timeline(stuck)
    assert "never: rank 0, copy: copy a[0:2] -> a_full@1[0:2]" in timeline(stuck)


def test_refuses_ranks_and_widths_that_make_no_sense() -> None:
    schedule = build(Problem(op="all_gather_matmul", m=4, n=4, k=4, world_size=2), "sequential")
    with pytest.raises(ValueError, match=r"ranks is \(2,\); use some of 0 to 1"):
        timeline(schedule, ranks=(2,))
    with pytest.raises(ValueError, match="width is 10"):
        timeline(schedule, width=10)
    with pytest.raises(ValueError, match="ranks is a int; use a row of ranks"):
        timeline(schedule, ranks=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"ranks is \('0',\)"):
        timeline(schedule, ranks="0")  # type: ignore[arg-type]
    many = build(Problem(op="all_gather_matmul", m=16, n=16, k=16, world_size=16), "shard_p2p")
    with pytest.raises(ValueError, match="width is 100; 32 lanes need at least 256: use that, or fewer ranks"):
        timeline(many, ranks=range(16))
    assert max(map(len, timeline(many, ranks=range(16), width=256).splitlines())) <= 256


def test_lanes_are_looked_at_where_something_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every lane again for each line: a schedule of many chunks would take minutes."""
    looked, placed = [0], [0]
    ready, place = Placer._ready, Placer._place

    def counted(self: Placer, lane: OpenLane) -> Iterable[tuple[Line, int]]:
        looked[0] += 1
        return ready(self, lane)

    def counted_place(self: Placer, lane: OpenLane, line: Line, row: int) -> None:
        placed[0] += 1
        place(self, lane, line, row)

    monkeypatch.setattr(Placer, "_ready", counted)
    monkeypatch.setattr(Placer, "_place", counted_place)
    timeline(build(Problem(op="all_gather_matmul", m=64, n=64, k=64, world_size=4), "flag_gated", 4))
    assert 100 < placed[0] < looked[0] < 2 * placed[0]
