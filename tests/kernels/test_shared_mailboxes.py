"""Programs of a group share mailboxes: calls of many layouts in one of them, how many there are, and what they take."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pools import interpreted_ranks
from rank_work import bound, check_all_reduce, check_norm, check_scatter, whole

import weft
from weft.comm.symmetric_heap import heap_of
from weft.core.problem import Op, Problem, split
from weft.core.schedule import MAILBOX_COPIES
from weft.runtime.groups import GROUPS, GroupState
from weft.runtime.mailboxes import SharedMailboxes
from weft.runtime.ranks import Ranks

interpreted = interpreted_ranks([2], slow=[3])
SMALL, LARGE = 3 * (72 << 10), 3 * (144 << 10)
"""The bytes of the mailboxes of small calls, and of 64 x 320 elements on 2 and 3 ranks."""
CASES: list[tuple[int, int, str, Any, bool, int]] = [
    (33, 40, "float32", "two", True, 4),
    (1, 8, "float16", "one", True, 1),
    (5, 40, "float16", "scatter", True, 2),
    (33, 17, "float16", "one", False, 4),
    (2, 40, "float32", "scatter", False, 1),
    (18, 70, "float16", "two", False, 2),
]
"""Rows, columns, dtype, hops, whether the kernel multiplies, and SMs of calls that follow each other."""


def _state() -> GroupState:
    world = dist.group.WORLD
    assert world is not None
    return GROUPS.state(world.group_name)


def _mailboxes() -> SharedMailboxes:
    return _state()._resources_of(torch.device("cpu")).mailboxes


def _in_turns() -> list[tuple[int, int]]:
    """Calls of other sizes, operators and numbers of blocks than the call before, twice. Returns how many mailboxes there are
    after each round, and their bytes."""
    size, found, seed = dist.get_world_size(), [], 0
    for _ in range(2):
        for m, n, name in ((33, 40, "two_shot"), (64, 320, "one_shot"), (1, 17, "one_shot"), (18, 40, "sequential_stores")):
            check_all_reduce(m, n, 8 * size, torch.float16, name, seed, addends=seed % 4)
            check_norm(m % 40, 17, 8 * size, torch.float16, "one_shot", seed)
            check_scatter(m % 40, 20, 8 * size, torch.float16, "one_shot", seed)
            seed += 1
        found.append((len(_mailboxes()), _mailboxes().nbytes))
    weft.close()
    return found


@pytest.mark.ranks
def test_operators_and_sizes_take_turns(interpreted: Ranks) -> None:
    for rounds in interpreted.run(_in_turns):
        assert set(rounds) == {(2, SMALL + LARGE)}


def _bare() -> None:
    """Calls of the bare kernel in one mailbox: only the kernel holds a rank back, and rank 1 sums late. Large calls follow
    small ones and the reverse, in all three copies, so words that a call leaves uncleared are summed by a later one."""
    from weft.comm.rank_group import RankGroup
    from weft.kernels import all_reduce as kernel

    rank, size, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    layouts = []
    for m, n, dtype, hops, multiply, sms in CASES:
        op: Op = "matmul_reduce_scatter" if hops == "scatter" else "matmul_all_reduce"
        problem = Problem(op=op, m=m, n=n, k=8 * size, world_size=size, dtype=dtype)
        owned = problem.shards if hops == "scatter" else split(n, size)
        layouts.append(kernel.plan(problem, rank, owned, hops=hops, multiply=multiply, device=device, sms=sms))
    assert len({layout.blocks for layout in layouts}) > 2
    rank_group = RankGroup(dist.group.WORLD)  # type: ignore[arg-type]
    copy_bytes = max(layout.copy_bytes for layout in layouts)
    piece = heap_of(rank_group, device).allocate(MAILBOX_COPIES * copy_bytes)
    memory = kernel.mailbox(piece.addresses, copy_bytes, kernel.most_blocks(4), device)
    received, under_way = kernel.received, set[int]()

    def late(*arguments: Any) -> Any:
        under_way.add(int(memory.begun) - int(memory.epochs[:, 0].min()))
        time.sleep(0.002 * (rank == 1))
        return received(*arguments)

    kernel.received = late  # type: ignore[assignment]
    try:
        for call, at in enumerate([0, 1, 2, 0, 3, 3, 4, 1, 5, 0, 4, 0]):
            layout, (m, n, name, hops, multiply, _) = layouts[at], CASES[at]
            dtype: torch.dtype = getattr(torch, name)
            a, b, expected = whole(m, n, 8 * size, dtype, call)
            mine = slice(8 * rank, 8 * rank + 8)
            factors = a[:, mine].contiguous(), b[mine]
            low, high = layout.problem.shards[rank] if hops == "scatter" else (0, m)
            out = torch.empty(high - low, n, dtype=dtype)
            options: dict[str, Any] = {"bias": None, "residual": None, "live": True, "tries": 20_000}
            partial = None if multiply else (factors[0].double() @ factors[1].double()).to(dtype)
            kernel.all_reduce(layout, memory, out, factors=factors if multiply else None, partial=partial, **options)
            assert memory.status.tolist() == [0, 0], call
            assert set(memory.epochs[:, 0].tolist()) == {call + 1}, "all know the call, also blocks that it did not have"
            assert int(memory.begun) == call + 1
            assert under_way == {1}, "a rank that waits has begun a call that has not ended"
            error = (out.double() - expected[low:high]).abs()
            assert bool((error <= bound(dtype, 8 * size, 2 * size, expected)).all()), (call, CASES[at])
    finally:
        kernel.received = received
        dist.barrier()
        rank_group.close()


@pytest.mark.ranks
def test_a_mailbox_is_empty_for_a_call_of_any_layout(interpreted: Ranks) -> None:
    interpreted.run(_bare)


def _forty_sizes() -> tuple[int, int, int]:
    """One row to forty, as an engine captures them. Then the programs of odd rows are closed while the others use their
    mailbox, and at last the others. Returns the bytes after each."""
    size, found = dist.get_world_size(), []
    for m in range(1, 41):
        check_all_reduce(m, 24, 8 * size, torch.float16, "one_shot", m)
    found.append(_mailboxes().nbytes)
    programs = _state().bound()
    assert len(programs) == 40
    kernels: list[Any] = [kernel for program in programs for kernel in program.kernels.values()]
    assert len({kernel._memory.begun.data_ptr() for kernel in kernels}) == 40, "each names the calls that it has begun"
    _state().forget([program for program in programs if program.schedule.problem.m % 2])
    for m in (2, 40, 4, 3, 40, 2):
        check_all_reduce(m, 24, 8 * size, torch.float16, "one_shot", m + 1)
    found.append(_mailboxes().nbytes)
    _state().forget(_state().bound())
    found.append(_mailboxes().nbytes)
    weft.close()
    first, second, third = found
    return first, second, third


@pytest.mark.ranks
def test_forty_sizes_take_one_mailbox(interpreted: Ranks) -> None:
    for first, second, third in interpreted.run(_forty_sizes):
        assert (first, second, third) == (SMALL, SMALL, 0)


def test_programs_count_equal_parts_of_a_shared_mailbox() -> None:
    """The limit on the memory of programs would otherwise count a mailbox as often as it is used."""

    class Heap:
        def __init__(self) -> None:
            self.made: list[int] = []

        def allocate(self, nbytes: int, *, reusable: bool) -> Any:
            self.made.append(nbytes)
            return SimpleNamespace(addresses=[0], nbytes=nbytes)

        def free(self, piece: Any) -> None:
            self.made.remove(piece.nbytes)

    pytest.importorskip("triton", reason="Triton is not installed")
    heap = Heap()
    mailboxes = SharedMailboxes(heap, torch.device("cpu"), 4)  # type: ignore[arg-type]
    one, other, larger = mailboxes.take(72 << 10), mailboxes.take(72 << 10), mailboxes.take(144 << 10)
    assert one is other
    assert heap.made == [SMALL, LARGE]
    assert (one.bytes_per_user, larger.bytes_per_user) == (SMALL // 2, LARGE)
    mailboxes.give_back(one)
    assert (one.bytes_per_user, heap.made) == (SMALL, [SMALL, LARGE])
    mailboxes.give_back(other)
    assert heap.made == [LARGE]
    assert mailboxes.take(72 << 10) is not one
