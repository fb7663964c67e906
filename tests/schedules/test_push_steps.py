"""A Push, one kernel of stores: what is refused of one, what is proved of it, and that interpreted kernels do just that.

Nothing orders the parts of a Push: the flag of one implies nothing about another. Few rows after many arrive long before them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from brute import verdict
from pushes import pushed
from rank_pools import interpreted_ranks

import weft
from weft.checker import ScheduleError, check
from weft.core.problem import Problem
from weft.core.schedule import Buffer, Copy, Flag, Gemm, Lane, LaneKind, Part, Push, Region, Schedule, Signal, Step, Store, Wait
from weft.runtime.ranks import Ranks

interpreted = interpreted_ranks(2)
COLS = 8


def rows(name: str, rank: int, low: int, high: int, cols: int = COLS) -> Region:
    return Region(name, rank, (low, high), (0, cols))


def sent(src: Region, dst: Region, flag: str, index: int = 0) -> tuple[Step, Step]:
    return Copy(src, dst), Signal(Flag(flag, dst.rank, index))


def _gather(m: int, k: int, pairs: dict[str, tuple[Region, Region]], waits: Sequence[str], kind: LaneKind) -> Schedule:
    """all_gather_matmul on two ranks. pairs: what rank 0 sends to rank 1, by flag, in this order; rank 1 does the same. waits:
    those that a receiver waits for before it multiplies; for the others it waits afterwards."""
    ranks = []
    for rank in (0, 1):
        peer = 1 - rank
        swapped = [
            (flag, dataclasses.replace(src, rank=rank), dataclasses.replace(dst, rank=peer))
            for flag, (src, dst) in pairs.items()
        ]
        sends = [step for flag, src, dst in swapped for step in sent(src, dst, flag)]
        sends = pushed(sends) if kind == "blocks" else sends
        b = Region("b", rank, (0, k), (0, COLS))
        own, other = (Region("out", rank, (low * m, low * m + m), (0, COLS)) for low in (rank, peer))
        compute = (
            Gemm(b, (Part(rows("a", rank, 0, m, k), own),)),
            *(Wait(Flag(flag, rank)) for flag in waits),
            Gemm(b, (Part(rows("there", rank, 0, m, k), other),)),
            *(Wait(Flag(flag, rank)) for flag in pairs if flag not in waits),
            Signal(Flag("free", peer)),
        )
        blocks = (Wait(Flag("free", rank), on_previous_call=True), *sends)
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


def test_the_flag_of_a_part_tells_of_no_other_part() -> None:
    for waits in (("last",), ("most",)):
        schedule = _most_and_last(3, 2, waits)
        with pytest.raises(ScheduleError, match=r"there@\d\[0:2, 0:2\]|there@\d\[2:3, 0:2\]|no write of all of it"):
            check(schedule)
        assert verdict(schedule)
    for schedule in (_most_and_last(3, 2, ("last", "most")), _most_and_last(3, 2, ("last",), kind="copy")):
        check(schedule)
        assert verdict(schedule) == ""


def _with_push(*parts: Store) -> Schedule:
    """A right schedule whose rank 0 sends by this Push instead of its own."""
    schedule = _most_and_last(3, 2, ("last", "most"))
    compute, blocks = schedule.ranks[0]
    steps = tuple(Push(parts) if isinstance(step, Push) else step for step in blocks.steps)
    return dataclasses.replace(schedule, ranks=((compute, dataclasses.replace(blocks, steps=steps)), schedule.ranks[1]))


MOST, LAST = (step for step in _most_and_last(3, 2, ("last",)).ranks[0][1].steps[1].parts)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((), "it has no parts"),
        ((MOST, dataclasses.replace(LAST, count=MOST.count)), "is signalled by another step, or part, too"),
        ((MOST, dataclasses.replace(LAST, count=Flag("last", 0))), r"last\[0\]@0 is not on rank 1"),
        ((MOST, dataclasses.replace(LAST, count=Flag("free", 1))), r"free\[0\]@1 is signalled by"),
        ((MOST, dataclasses.replace(LAST, src=rows("b", 0, 0, 1, 2))), "two sources"),
        ((MOST, dataclasses.replace(LAST, src=rows("a", 0, 2, 2, 2), dst=rows("there", 1, 2, 2, 2))), "has no element"),
        ((MOST, dataclasses.replace(LAST, src=rows("a", 0, 1, 3, 2))), "a copy needs them equal"),
        ((MOST, dataclasses.replace(LAST, dst=rows("there", 1, 1, 2, 2))), "nothing orders|overlap"),
    ],
    ids=["empty", "one flag", "the sender's flag", "another's flag", "two sources", "no rows", "shapes", "one place"],
)
def test_what_a_push_may_not_be(parts: tuple[Store, ...], message: str) -> None:
    check(_with_push(MOST, LAST))
    with pytest.raises(ScheduleError, match=message):
        check(_with_push(*parts))


def test_a_push_needs_a_lane_on_sms() -> None:
    schedule = _most_and_last(3, 2, ("last", "most"))
    lanes = tuple((compute, dataclasses.replace(blocks, kind="copy")) for compute, blocks in schedule.ranks)
    with pytest.raises(ScheduleError, match=r"step 1 .push .*needs a lane of kind compute or blocks"):
        check(dataclasses.replace(schedule, ranks=lanes))


def test_a_part_of_a_push_is_named() -> None:
    schedule = _most_and_last(3, 2, ("last",))
    with pytest.raises(ScheduleError, match=r"rank 0, lane blocks, step 1 .*part 0: a@0.*-> there@1"):
        check(schedule)


def _runs_right(make: str) -> list[int]:
    """Calls on new data, one rank late; return the number of parts of each Push."""
    many = 8 * 65
    schedule = {"both": _both, "two sources": _two_sources, "over": _over}[make](many, 64)
    weft.schedule.check(schedule)
    rank = dist.get_rank()
    for call in range(6):
        generator = torch.Generator().manual_seed(call)
        a = torch.randn(2 * many, 64, generator=generator).half()
        b = (torch.randn(64, 2 * COLS, generator=generator) / 8).half()
        columns = slice(COLS * rank, COLS * rank + COLS)
        out = weft.all_gather_matmul(a.chunk(2)[rank].contiguous(), b[:, columns].contiguous(), schedule=schedule)
        assert (out.double() - a.double() @ b[:, columns].double()).abs().max() < 0.02, (make, call)
    return [len(step.parts) for step in schedule.ranks[rank][1].steps if isinstance(step, Push)]


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


@pytest.mark.parametrize(("make", "lengths"), [("both", [2]), ("two sources", [1, 1]), ("over", [1, 2])])
def test_interpreted_kernels_send_what_is_proved(interpreted: Ranks, make: str, lengths: list[int]) -> None:
    assert interpreted.run(_runs_right, make) == [lengths] * 2
