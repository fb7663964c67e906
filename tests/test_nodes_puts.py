"""Messages by put-with-signal: where they lie, that turns are kept without any other order, and every operator by them.

CPUs have no NVSHMEM: torch's operations are stood in for by memory of this host (puts_work).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nodes_work import check_every_operator
from puts_work import Shmem, Words

import weft
from weft.core.schedule import Buffer, Lane, Receive, Region, Schedule, Send, SendReceive
from weft.runtime.bindings import Bindings, Where
from weft.runtime.host import HostProgram
from weft.runtime.puts import Puts
from weft.runtime.ranks import Ranks
from weft.runtime.slots import Slot, Slots

CALLS = 8


def _schedule(op: str, nodes: tuple[int, ...], chunks: int = 2, m: int = 37) -> Schedule:
    problem = weft.Problem(op=op, m=m, n=24, k=16, world_size=sum(nodes), nodes=nodes, dtype="float32")  # type: ignore[arg-type]
    return weft.build(problem, "node_slices", chunks)


CASES = [
    (op, nodes, m)
    for op in ("matmul_all_to_all", "all_to_all_matmul", "all_gather_matmul", "matmul_reduce_scatter")
    for nodes in ((2, 2), (1, 1, 1), (3, 1, 2))
    for m in (37, 3)
]


@pytest.mark.parametrize(("op", "nodes", "m"), CASES, ids=str)
def test_slots_of_a_rank_share_no_byte(op: str, nodes: tuple[int, ...], m: int) -> None:
    schedule = _schedule(op, nodes, m=m)
    slots = Slots(schedule, itemsize=4)
    steps = {(rank, lane.name, at): step for rank, lane, at, step in schedule if isinstance(step, SendReceive)}
    assert set(slots.at) == set(steps)
    sent = [slot for sends, _ in slots.at.values() for slot in sends]
    assert sorted(sent, key=_word) == sorted((slot for _, got in slots.at.values() for slot in got), key=_word)
    for place, step in steps.items():
        sends, receives = slots.at[place]
        assert [(s.src_rank, s.dst_rank, s.span[1] - s.span[0]) for s in sends] == [
            (place[0], send.to, 4 * send.src.size) for send in step.sends
        ]
        assert [(s.src_rank, s.dst_rank, s.span[1] - s.span[0]) for s in receives] == [
            (got.source, place[0], 4 * got.dst.size) for got in step.receives
        ]
    assert [slot.word for slot in sorted(sent, key=_word)] == list(range(slots.words))
    for one, other in combinations(sent, 2):
        if {one.src_rank, one.dst_rank} & {other.src_rank, other.dst_rank}:
            assert one.span[1] <= other.span[0] or other.span[1] <= one.span[0]
    assert all(8 * slots.words <= slot.span[0] and slot.span[1] <= slots.nbytes for slot in sent)


def test_a_rank_needs_no_more_than_what_it_sends_and_receives() -> None:
    """Whatever other ranks exchange among themselves lies in the same bytes."""
    schedule = _schedule("matmul_all_to_all", (4, 4), m=4096)
    slots = Slots(schedule, itemsize=4)
    own = [slot for (rank, _, _), ends in slots.at.items() if rank == 0 for slots_ in ends for slot in slots_]
    assert slots.nbytes - 8 * slots.words <= 1.01 * sum(slot.span[1] - slot.span[0] for slot in own) + 1024


def _word(slot: Slot) -> int:
    return slot.word


class Rank:
    """One rank's end of a schedule, on a thread: it sends rows that name the call, and nothing but turns orders it."""

    def __init__(self, schedule: Schedule, slots: Slots, rank: int, memory: torch.Tensor, shmem: Shmem, mapped: range) -> None:
        self.turns = memory[: 8 * slots.words].view(torch.int64)
        self.puts = Puts(slots, rank, memory, Words(shmem, memory, slots.words, mapped))
        self.places = [
            Where(r, lane.name, at, step) for r, lane, at, step in schedule if r == rank and (r, lane.name, at) in slots.at
        ]
        self.bindings = Bindings()
        for buffer in schedule.buffers:
            shape = buffer.rows[rank], buffer.cols[rank]
            self.bindings.bind(buffer.name, rank, torch.zeros(shape))
        self.rank = rank

    def call(self, number: int) -> None:
        for where in self.places:
            assert isinstance(where.step, SendReceive)
            for send in where.step.sends:
                self.bindings.view(send.src).fill_(1000.0 * self.rank + number)
            self.puts.exchange(where, self.bindings)
            for got in where.step.receives:
                view = self.bindings.view(got.dst)
                assert bool((view == 1000.0 * got.source + number).all()), (self.rank, number, view)


def _together(works: list[Callable[[], None]]) -> None:
    """All of them on threads; the first error, if any."""
    errors = list[BaseException]()

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _one_way() -> Schedule:
    """Rank 0 sends and learns nothing of rank 1: without turns it would run ahead for good."""
    problem = weft.Problem(op="matmul_all_to_all", m=8, n=4, k=4, world_size=2, nodes=(1, 1), dtype="float32")
    buffer = Buffer(name="rows", kind="local", rows=(8, 8), cols=(4, 4))
    sends = [SendReceive(sends=(Send(Region("rows", 0, rows, (0, 4)), 1),)) for rows in ((0, 5), (5, 8))]
    receives = [SendReceive(receives=(Receive(Region("rows", 1, rows, (0, 4)), 0),)) for rows in ((0, 5), (5, 8))]
    lanes = [(Lane(name="network", kind="network", steps=tuple(steps)),) for steps in (sends, receives)]
    return Schedule(problem=problem, name="one_way", buffers=(buffer,), ranks=tuple(lanes))


@pytest.mark.parametrize("late", ["put", "wait"])
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("mapped", [range(0), range(4)], ids=["staged", "straight"])
@pytest.mark.parametrize("schedule", [_one_way(), _schedule("all_to_all_matmul", (2, 2))], ids=lambda s: s.name)
def test_turns_alone_keep_calls_apart(schedule: Schedule, mapped: range, late: str, slow: int) -> None:
    """New data each call, a rank late to send or to take; ranks run ahead as far as turns let them."""
    shmem = Shmem(lambda what, rank: time.sleep(0.002) if (what, rank) == (late, slow) else None)
    slots, size = Slots(schedule, itemsize=4), schedule.problem.world_size
    memory = shmem.symmetric(slots.nbytes, size)
    ranks = [Rank(schedule, slots, rank, memory[rank], shmem, mapped) for rank in range(size)]
    with shmem.serving():
        _together([lambda r=rank: [r.call(number) for number in range(CALLS)] and None for rank in ranks])  # type: ignore[misc]
    assert shmem.puts == slots.words * CALLS
    for rank in ranks:
        assert [int(rank.turns[slot.word]) for slot in slots.of_sender(rank.rank)] == [1] * len(slots.of_sender(rank.rank))
        assert int(rank.turns.sum()) == len(slots.of_sender(rank.rank))


def test_what_waits_for_a_turn_that_never_comes_ends_when_words_are_raised() -> None:
    """As the watch does once a call has failed; until then nothing ends the wait."""
    shmem, schedule = Shmem(), _schedule("matmul_all_to_all", (1, 1))
    slots = Slots(schedule, itemsize=4)
    rank = Rank(schedule, slots, 0, shmem.symmetric(slots.nbytes, 2)[0], shmem, range(0))
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(AssertionError):  # what has come is none of the peer's rows
            rank.call(3)
        ended.set()

    with shmem.serving():
        thread = threading.Thread(target=wait)
        thread.start()
        assert not ended.wait(0.1)
        for _ in range(500):
            rank.turns.fill_(1)
            if ended.wait(0.01):
                break
        assert ended.is_set()


class PutsProgram(HostProgram):
    """The host executor, with its messages by put-with-signal."""

    shmem: Shmem
    folder: Path
    made = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        slots = Slots(self.schedule, itemsize=self.dtype.itemsize)
        PutsProgram.made += 1
        folder = self.folder / str(PutsProgram.made)
        folder.mkdir(exist_ok=True)
        dist.barrier(self.team.group)
        memory = self.shmem.symmetric(slots.nbytes, self.team.world_size, folder)
        own = memory[self.rank]
        # Of two nodes one is mapped by the others, as in a rack where some links are NVLink.
        self.puts = Puts(slots, self.rank, own, Words(self.shmem, own, slots.words, range(2)))

    def send_receive(self, step: SendReceive, bindings: Bindings, where: Where) -> None:
        self.puts.exchange(where, bindings)


def _every_operator(folder: str, slow: int) -> int:
    """Puts made. Six calls, with a rank late to put."""
    from weft.runtime import groups

    shmem = Shmem(lambda what, rank: time.sleep(0.002) if what == "put" and rank == slow else None)
    PutsProgram.shmem, PutsProgram.folder = shmem, Path(folder)
    with ExitStack() as stack:
        stack.enter_context(shmem.serving())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(groups, "HostProgram", PutsProgram)
        for call in range(6):
            for spec in ("node_slices:1", "node_slices:3"):
                check_every_operator(37, 23, 19, torch.float32, spec, call)
        check_every_operator(3, 5, 7, torch.bfloat16, "node_slices:2", 7)
        weft.close()
    return shmem.puts


@pytest.mark.ranks
def test_every_operator_by_puts(tmp_path: Path) -> None:
    with Ranks(4, environment={"WEFT_RANKS_PER_NODE": "2", "WEFT_TIMEOUT_S": "20"}) as pool:
        assert min(pool.run(_every_operator, str(tmp_path), 1)) > 100
