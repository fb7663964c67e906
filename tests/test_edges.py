"""Flags as edges: every family's flags may be raised and lowered; what would lose a signal is refused."""

from __future__ import annotations

import dataclasses

import pytest
from families import PAIRS

from weft.core.problem import Op, Problem
from weft.core.schedule import Copy, Flag, Gemm, Lane, Part, Region, Schedule, Signal, Wait, waits
from weft.runtime.edges import Edges
from weft.schedules import build


@pytest.mark.parametrize(("op", "name"), PAIRS)
@pytest.mark.parametrize("size", [(64, 48, 32, 4), (5, 7, 3, 3), (2, 3, 1, 3), (8, 8, 8, 1)])
def test_every_family(op: Op, name: str, size: tuple[int, int, int, int]) -> None:
    m, n, k, world_size = size
    for fan_out in (False, True):
        schedule = build(Problem(op=op, m=m, n=n, k=k, world_size=world_size), name, 3, fan_out=fan_out)
        edges = Edges(schedule)
        taken: dict[int, set[int]] = {}
        for (flag, _, _), slot in edges.slot.items():
            assert slot not in taken.setdefault(flag.rank, set())
            taken[flag.rank].add(slot)
        assert max((len(slots) for slots in taken.values()), default=0) == edges.words


def test_a_kernels_own_gates_lie_together() -> None:
    schedule = build(Problem(op="all_gather_matmul", m=64, n=8, k=8, world_size=4), "track_and_trigger", 2)
    edges = Edges(schedule)
    for rank, lane, position, step in schedule:
        own = sorted({edges.slot[w.flag, lane.name, position] for w in waits(step) if w.at_least})
        assert not own or own[-1] - own[0] == len(own) - 1, (rank, lane.name, position)
        assert isinstance(step, (Gemm, Wait, Copy, Signal))


def pair(*lanes: tuple[object, ...]) -> Schedule:
    """One lane a rank, of signals and waits."""
    problem = Problem(op="all_gather_matmul", m=0, n=0, k=1, world_size=len(lanes))
    ranks = tuple((Lane("compute", "compute", lane),) for lane in lanes)  # type: ignore[arg-type]
    return Schedule(problem=problem, name="pair", buffers=(), ranks=ranks)


def test_a_signal_that_does_not_wait_for_its_reader_is_refused() -> None:
    ready, read = Flag("ready", 1), Flag("read", 0)
    with pytest.raises(ValueError, match=r"pair: ready\[0\]@1 may be signalled again before rank 1, lane compute, step 0"):
        Edges(pair((Signal(ready),), (Wait(ready),)))
    Edges(pair((Wait(read, 0), Signal(ready)), (Wait(ready), Signal(read))))
    with pytest.raises(ValueError, match=r"read\[0\]@0 may be signalled again before rank 0, lane compute, step 1"):
        Edges(pair((Signal(ready), Wait(read, 0)), (Wait(ready), Signal(read))))


@pytest.mark.parametrize("inner", [True, False])
def test_an_inner_gate_orders_what_follows_its_kernel(inner: bool) -> None:
    """Rank 1 may raise `sent` again once rank 0 has said so, whose kernel waited for rank 2, which waited for `sent`."""
    sent, ready, read = Flag("sent", 2), Flag("ready", 0), Flag("read", 1)
    a, b, out = (Region(name, 0, (0, 0), (0, 2)) for name in ("a", "b", "out"))
    part = Part(a, out, inner=((1, Wait(ready)),) if inner else ())
    ring = pair((Gemm(b, (part,)), Signal(read)), (Wait(read, 0), Signal(sent)), (Wait(sent), Signal(ready)))
    if inner:
        Edges(ring)
    else:
        with pytest.raises(ValueError, match=r"(sent|ready|read)\[0\]@\d may be signalled again"):
            Edges(ring)


def test_two_signals_a_call_are_refused() -> None:
    ready = Flag("ready", 1)
    with pytest.raises(ValueError, match="is signalled 2 times a call; on GPUs, signal each flag once"):
        Edges(pair((Signal(ready), Signal(ready)), (Wait(ready, 2),)))


def test_a_lost_release_is_found() -> None:
    """Without `free`, a peer may raise `arrived` again while the last one is not yet lowered."""
    schedule = build(Problem(op="all_gather_matmul", m=8, n=8, k=8, world_size=2), "flag_gated", 1)
    lanes = [
        tuple(
            dataclasses.replace(lane, steps=tuple(s for s in lane.steps if not (isinstance(s, Wait) and s.flag.name == "free")))
            for lane in rank
        )
        for rank in schedule.ranks
    ]
    with pytest.raises(ValueError, match=r"arrived\[.\]@. may be signalled again"):
        Edges(dataclasses.replace(schedule, ranks=tuple(lanes)))
