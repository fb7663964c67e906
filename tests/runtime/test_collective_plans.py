"""Collectives as CUDA streams get them, run in this process: all ranks' lanes in random order, with real memory, in place, too.

The plan's copies move bytes here, its sums add, its memory operations are on words; nothing else orders the ranks. New data in
each call, and a rank may be a call ahead. What comes out must be the whole result, whatever the order.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_launch_plan import FakeProgram, _can, _do, streams_of

from weft.core.problem import COLLECTIVE_OPS, CollectiveProblem, Op
from weft.core.schedule import Schedule
from weft.runtime.bindings import Bindings
from weft.runtime.cuda import CudaProgram
from weft.runtime.launch_plan import LaunchPlan
from weft.runtime.launches import FlagOperations, IssuedCall
from weft.schedules import build, names

CALLS = 3
FAMILIES = [(op, name) for op in COLLECTIVE_OPS for name in names(op) if name.startswith("copy_engine")]


def _copier(*, rows: int, row_bytes: int, pitches: tuple[int, int]) -> Callable[[int, int, int], object]:
    assert rows == 1 or pitches == (row_bytes, row_bytes)
    return lambda dst, src, _: ctypes.memmove(dst, src, rows * row_bytes)


class World:
    """Every rank's program, its tensors, and what it should end with."""

    def __init__(self, schedule: Schedule, *, in_place: bool) -> None:
        assert isinstance(schedule.problem, CollectiveProblem)
        self.schedule, self.problem, self.in_place = schedule, schedule.problem, in_place
        self.ranks = range(schedule.problem.world_size)
        self.callers = [self._caller(rank) for rank in self.ranks]
        shared = Bindings()
        for buffer in schedule.buffers:
            for rank in self.ranks if buffer.kind == "symmetric" else ():
                shared.bind(buffer.name, rank, torch.full((buffer.rows[rank], 1), torch.nan))
        self.lanes = [self._lanes(rank, shared) for rank in self.ranks]
        self.memory = dict(word for rank in self.ranks for word in FakeProgram(schedule, rank).left_over())

    def _caller(self, rank: int) -> dict[str, torch.Tensor]:
        """The caller's tensors: apart, or one within the other."""
        a, out = torch.zeros(self.problem.a_rows(rank), 1), torch.zeros(self.problem.out_rows(rank), 1)
        alias = self.problem.alias(rank) if self.in_place else None
        if alias is not None:
            whole, low = (a, out)[a.shape[0] < out.shape[0]], abs(alias)
            a = whole[low : low + a.shape[0]] if whole is out else a
            out = whole[low : low + out.shape[0]] if whole is a else out
        return {"a": a, "out": out}

    def _lanes(self, rank: int, shared: Bindings) -> list[list[Any]]:
        program: Any = FakeProgram(self.schedule, rank)
        program.fixed, program.driver = shared, SimpleNamespace(copier=_copier)
        program.dtype_of = lambda _: torch.float32
        for name in ("copier", "prepare_copy", "_copies", "_address_of"):
            setattr(program, name, partial(getattr(CudaProgram, name), program))
        bindings = Bindings(dict(shared.tensors))
        for name, tensor in self.callers[rank].items():
            bindings.bind(name, rank, tensor)
        for peer in self.ranks if self.problem.reachable else ():
            bindings.bind("out", peer, self.callers[peer]["out"])
        lanes: list[list[Any]] = []
        for _, items in streams_of(LaunchPlan(program, frozenset()), rank):
            lanes.append([])
            for item in items:
                found = (
                    list(item.words)
                    if isinstance(item, FlagOperations)
                    else [lambda i=item: i.issue(IssuedCall(bindings=bindings), 0)]
                )
                lanes[-1] += found
        return lanes

    def begin(self, rank: int, call: int) -> None:
        """The caller's turn: a result of before is overwritten, new data given."""
        self.callers[rank]["out"].fill_(torch.nan)
        self.callers[rank]["a"].copy_(self.given(rank, call))

    def given(self, rank: int, call: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * call + rank)
        return torch.randn(self.problem.a_rows(rank), 1, generator=generator)

    def end(self, rank: int, call: int) -> None:
        everyone = [self.given(peer, call) for peer in self.ranks]
        rows = slice(*self.problem.shards[rank])
        if self.problem.op == "all_gather":
            expected = torch.cat(everyone)
        elif self.problem.op == "all_to_all":
            expected = torch.cat([one[rows] for one in everyone])
        else:
            total = everyone[0].clone()
            for one in everyone[1:]:
                total += one
            expected = total / self.problem.divide_by
            expected = expected[rows] if self.problem.op == "reduce_scatter" else expected
        assert torch.equal(self.callers[rank]["out"], expected), (rank, call)

    def play(self, seed: int) -> None:
        """Op by op, in random order; a rank's next call begins when all its lanes have ended."""
        chance = random.Random(seed)
        calls = [0 for _ in self.ranks]
        at: list[list[int]] = [[0 for _ in lanes] for lanes in self.lanes]
        for rank in self.ranks:
            self.begin(rank, 0)
        while min(calls) < CALLS:
            ready = [
                (rank, lane)
                for rank in self.ranks
                if calls[rank] < CALLS
                for lane, ops in enumerate(self.lanes[rank])
                if at[rank][lane] < len(ops) and (callable(ops[at[rank][lane]]) or _can(ops, at[rank][lane], self.memory))
            ]
            assert ready, f"every lane waits for good: calls {calls}, positions {at}"
            rank, lane = chance.choice(ready)
            self._step(self.lanes[rank][lane][at[rank][lane]])
            at[rank][lane] += 1
            if all(done == len(ops) for done, ops in zip(at[rank], self.lanes[rank], strict=True)):
                self.end(rank, calls[rank])
                calls[rank] += 1
                at[rank] = [0 for _ in self.lanes[rank]]
                if calls[rank] < CALLS:
                    self.begin(rank, calls[rank])

    def _step(self, op: Any) -> None:
        if callable(op):
            op()
        else:
            _do(op, self.memory)


def problem(op: Op, world_size: int, **more: Any) -> CollectiveProblem:
    m = 20_003 if op == "all_reduce" else 4000 * world_size
    return CollectiveProblem(op=op, m=m, world_size=world_size, dtype="float32", staging_bytes=1 << 16, **more)


@pytest.mark.parametrize(("op", "name"), FAMILIES)
@pytest.mark.parametrize("reachable", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_any_order_gives_the_result(op: Op, name: str, reachable: bool, in_place: bool) -> None:
    for world_size, chunks in ((2, 1), (3, 3), (4, 5)):
        reduce_op = "avg" if op in ("reduce_scatter", "all_reduce") and world_size == 3 else "sum"
        schedule = build(problem(op, world_size, reachable=reachable, reduce_op=reduce_op), name, chunks)
        for seed in range(2):
            World(schedule, in_place=in_place).play(seed)


def test_the_room_is_taken_in_turns_here() -> None:
    """Else the test above would not have met a slot that is used again within a call."""
    schedule = build(problem("all_reduce", 3), "copy_engine", 1)
    (room,) = (buffer for buffer in schedule.buffers if buffer.name == "recv")
    assert room.rows[0] < 2 * (schedule.problem.shards[0][1])


@pytest.mark.parametrize("flag", ["free", "arrived"])
def test_a_wait_that_is_left_out_is_noticed(flag: str) -> None:
    """The machine above notices broken plans: without these waits some order gives something else."""

    def broken(seed: int) -> bool:
        world = World(build(problem("all_reduce", 3), "copy_engine", 1), in_place=True)
        slots = FakeProgram(world.schedule, 0).flags.slots
        gone = {flag_.rank * (1 << 20) + 4 * slot for flag_, found in slots.items() if flag_.name == flag for slot in found}
        world.lanes = [
            [[op for op in ops if callable(op) or op.kind != "wait" or op.address not in gone] for ops in lanes]
            for lanes in world.lanes
        ]
        try:
            world.play(seed)
        except AssertionError:
            return True
        return False

    assert any(broken(seed) for seed in range(10))
