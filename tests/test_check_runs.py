"""Copies of a lane that are one kernel: where such a run ends, what is proved of it, and that interpreted kernels do just that.

Nothing orders the copies of a run: the flag of one tells of no other. A few rows behind many are there long before those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from brute import verdict
from rank_pools import interpreted_ranks

import weft
from weft.checker import ScheduleError, check
from weft.checker.structure import compile_schedule
from weft.core.problem import Problem
from weft.core.schedule import Buffer, Copy, Flag, Gemm, Lane, LaneKind, Part, Region, Schedule, Signal, Step, Wait
from weft.runtime.ranks import Ranks
from weft.schedules.together import runs

interpreted = interpreted_ranks(2)
COLS = 8


def rows(name: str, rank: int, low: int, high: int, cols: int = COLS) -> Region:
    return Region(name, rank, (low, high), (0, cols))


def sent(src: Region, dst: Region, flag: str, index: int = 0) -> tuple[Step, Step]:
    return Copy(src, dst), Signal(Flag(flag, dst.rank, index))


A = [rows("a", 0, i, i + 1) for i in range(4)]
THERE = [rows("there", 1, i, i + 1) for i in range(4)]


@pytest.mark.parametrize(
    ("pairs", "lengths"),
    [
        ([sent(A[0], THERE[0], "f"), sent(A[1], THERE[1], "g"), sent(A[1], THERE[2], "h")], [3]),
        ([sent(A[0], THERE[0], "f"), sent(rows("b", 0, 0, 1), THERE[1], "g")], [1, 1]),
        ([sent(A[0], THERE[0], "f"), sent(rows("a", 0, 1, 3), rows("there", 1, 0, 2), "g")], [1, 1]),
        ([sent(A[0], THERE[1], "f"), sent(A[1], THERE[0], "g"), sent(A[2], THERE[1], "h")], [2, 1]),
        ([sent(A[0], THERE[0], "f"), sent(A[1], rows("there", 0, 0, 1), "f"), sent(A[0], THERE[1], "f")], [2]),
        ([sent(A[0], THERE[0], "f"), sent(rows("a", 0, 1, 1), rows("there", 1, 1, 1), "g"), sent(A[1], THERE[1], "h")], [1, 1]),
        ([sent(A[0], THERE[0], "f"), sent(A[0], A[1], "g"), sent(A[0], THERE[1], "h")], [1, 1]),
    ],
    ids=["one", "other source", "overlap", "overlap above", "same flag", "empty", "within a buffer"],
)
def test_a_run_ends_where_an_order_is_needed(pairs: Sequence[tuple[Step, Step]], lengths: list[int]) -> None:
    lane = Lane("blocks", "blocks", tuple(step for pair in pairs for step in pair))
    assert [len(run.copies) for run in runs(lane)] == lengths


def test_a_run_ends_before_fused_steps() -> None:
    steps = [step for i in range(3) for step in sent(A[i], THERE[i], "f", i)]
    lane = Lane("lane", "compute", tuple(steps), ((2, 4),))
    assert [(run.first, run.last) for run in runs(lane)] == [(0, 2), (4, 6)]


def test_a_flag_that_a_kernel_counts_is_in_no_run() -> None:
    """It grows by the tiles of either, so its waiter would not know how far."""
    counted = Gemm(rows("b", 0, 0, COLS), (Part(A[0], rows("out", 0, 0, 1), (), Flag("f", 1)),))
    assert not list(runs(Lane("lane", "blocks", (counted, *sent(A[0], THERE[0], "f")))))


def _gather(m: int, k: int, pairs: dict[str, tuple[Region, Region]], waits: Sequence[str], kind: LaneKind) -> Schedule:
    """all_gather_matmul on two ranks. pairs: what rank 0 sends to rank 1, by flag, in this order; rank 1 does alike. waits:
    those that a receiver waits for before it multiplies; for the others it waits afterwards."""
    ranks = []
    for rank in (0, 1):
        peer = 1 - rank
        swapped = [
            (flag, dataclasses.replace(src, rank=rank), dataclasses.replace(dst, rank=peer))
            for flag, (src, dst) in pairs.items()
        ]
        sends = [step for flag, src, dst in swapped for step in sent(src, dst, flag)]
        b = Region("b", rank, (0, k), (0, COLS))
        own, other = (Region("out", rank, (low * m, low * m + m), (0, COLS)) for low in (rank, peer))
        compute = (
            Gemm(b, (Part(rows("a", rank, 0, m, k), own),)),
            *(Wait(Flag(flag, rank)) for flag in waits),
            Gemm(b, (Part(rows("there", rank, 0, m, k), other),)),
            *(Wait(Flag(flag, rank)) for flag in pairs if flag not in waits),
            Signal(Flag("free", peer)),
        )
        blocks = (Wait(Flag("free", rank), 0), *sends)
        ranks.append((Lane("compute", "compute", compute), Lane("blocks", kind, blocks)))
    problem = Problem(op="all_gather_matmul", m=2 * m, n=2 * COLS, k=k, world_size=2, dtype="float16")
    buffers = (
        Buffer("a", "input", (m, m), (k, k)),
        Buffer("b", "input", (k, k), (COLS, COLS)),
        Buffer("out", "output", (2 * m, 2 * m), (COLS, COLS)),
        Buffer("there", "symmetric", (m, m), (k, k)),
        Buffer("bees", "symmetric", (k, k), (COLS, COLS)),
    )
    return Schedule(problem=problem, name="own", buffers=buffers, ranks=tuple(ranks))


def _most_and_last(m: int, k: int, waits: Sequence[str], kind: LaneKind = "blocks", few: int = 1) -> Schedule:
    """All rows but a few, and then those."""
    pairs = {
        "most": (rows("a", 0, 0, m - few, k), rows("there", 1, 0, m - few, k)),
        "last": (rows("a", 0, m - few, m, k), rows("there", 1, m - few, m, k)),
    }
    return _gather(m, k, pairs, waits, kind)


def test_the_flag_of_a_copy_tells_of_no_other_copy_of_its_run() -> None:
    for waits in (("last",), ("most",)):
        schedule = _most_and_last(3, 2, waits)
        with pytest.raises(ScheduleError, match=r"there@\d\[0:2, 0:2\]|there@\d\[2:3, 0:2\]|no write of all of it"):
            check(schedule)
        assert verdict(schedule)
    for schedule in (_most_and_last(3, 2, ("last", "most")), _most_and_last(3, 2, ("last",), kind="copy")):
        check(schedule)
        assert verdict(schedule) == ""


def test_a_copy_of_a_run_is_named_by_its_own_step() -> None:
    schedule = _most_and_last(3, 2, ("last", "most"))
    program = compile_schedule(schedule)
    assert [len(op.actions) for op in program.ops[0][1]] == [0, 2, 0, 0, 0]
    assert program.where(0, 1, 1, 0) == f"rank 0, lane blocks, step 1 ({schedule.ranks[0][1].steps[1]})"
    assert program.where(0, 1, 1, 1) == f"rank 0, lane blocks, step 3 ({schedule.ranks[0][1].steps[3]})"


def _runs_right(make: str) -> list[int]:
    """Calls on new data, one rank late; how many copies each kernel of stores has."""
    many = 8 * 65
    schedule = {"both": _both, "two sources": _two_sources, "over": _over, "often": _often}[make](many, 64)
    weft.check(schedule)
    rank = dist.get_rank()
    for call in range(6):
        generator = torch.Generator().manual_seed(call)
        a = torch.randn(2 * many, 64, generator=generator).half()
        b = (torch.randn(64, 2 * COLS, generator=generator) / 8).half()
        columns = slice(COLS * rank, COLS * rank + COLS)
        out = weft.all_gather_matmul(a.chunk(2)[rank].contiguous(), b[:, columns].contiguous(), schedule=schedule)
        assert (out.double() - a.double() @ b[:, columns].double()).abs().max() < 0.02, (make, call)
    return [len(run.copies) for run in runs(schedule.ranks[rank][1])]


def _both(m: int, k: int) -> Schedule:
    return _most_and_last(m, k, ("last", "most"), few=8)


def _two_sources(m: int, k: int) -> Schedule:
    pairs = {
        "rows": (rows("a", 0, 0, m, k), rows("there", 1, 0, m, k)),
        "factor": (rows("b", 0, 0, k), rows("bees", 1, 0, k)),
    }
    return _gather(m, k, pairs, ("rows",), "blocks")


def _over(m: int, k: int) -> Schedule:
    """Rows of the second half first go to the place of the first half, which goes there afterwards."""
    half = m // 2
    pairs = {
        "wrong": (rows("a", 0, half, m, k), rows("there", 1, 0, m - half, k)),
        "first": (rows("a", 0, 0, half, k), rows("there", 1, 0, half, k)),
        "second": (rows("a", 0, half, m, k), rows("there", 1, half, m, k)),
    }
    return _gather(m, k, pairs, ("first", "second"), "blocks")


def _often(m: int, k: int) -> Schedule:
    """Both copies raise one flag, for which the receiver waits twice: they have not as many tiles."""
    schedule = _most_and_last(m, k, ("last", "most"), few=8)

    def change(step: Step) -> Step:
        if isinstance(step, (Signal, Wait)) and step.flag.name in ("most", "last"):
            flag = dataclasses.replace(step.flag, name="some")
            return Signal(flag) if isinstance(step, Signal) else Wait(flag, 2 if step.flag.name == "most" else 1)
        return step

    ranks = tuple(
        tuple(dataclasses.replace(lane, steps=tuple(map(change, lane.steps))) for lane in lanes) for lanes in schedule.ranks
    )
    return dataclasses.replace(schedule, ranks=ranks)


@pytest.mark.parametrize(("make", "lengths"), [("both", [2]), ("two sources", [1, 1]), ("over", [1, 2]), ("often", [1])])
def test_interpreted_kernels_send_what_is_proved(interpreted: Ranks, make: str, lengths: list[int]) -> None:
    assert interpreted.run(_runs_right, make) == [lengths] * 2
