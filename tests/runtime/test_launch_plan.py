"""Launch plans: what every rank gives its streams, run by a machine of words alone, in random order, for several calls.

No GPU: copies, matmuls and kernels do nothing here. What is tested is that the memory operations of all ranks together
never block for good, and that no signal is lost: a word is never raised while it is still up from before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pytest
import torch
from families import PAIRS

from weft.compat.streams import Word
from weft.core.fused_collective import spelled_out
from weft.core.machine import load
from weft.core.problem import Op, Problem
from weft.core.schedule import Flag, Gemm, Push, Region, Schedule, waits
from weft.kernels.flag_operations import split_into_phases
from weft.runtime.bindings import Where
from weft.runtime.bound import signal_values
from weft.runtime.launch_plan import LaneRun, LaunchPlan, merge_flag_operations
from weft.runtime.launches import FlagOperations, Launch, WaiterWords
from weft.schedules import build

CALLS = 4
CPU = torch.device("cpu")
_RANK_BYTES, _PROGRESS, _MARK = 1 << 20, 1 << 40, 1 << 41


class FakeProgram:
    """What a LaunchPlan asks of a CudaProgram, with addresses that name (rank, slot)."""

    sms_for_kernels = sms_for_pushes = tries = 0
    submitter = row_counts = None
    device, dtype, machine = CPU, torch.bfloat16, load("h200x8")

    def __init__(self, schedule: Schedule, rank: int) -> None:
        schedule = spelled_out(schedule).schedule  # as where the device has no kernel for a fused collective
        self.schedule, self.rank, self.flags = schedule, rank, WaiterWords(schedule)
        self.kernels: dict[tuple[str, int], Any] = {}
        self._signal_values = signal_values(self)  # type: ignore[arg-type]

    def runs_as_kernel(self, step: object) -> bool:
        return isinstance(step, (Gemm, Push))

    def dtype_of(self, buffer: str) -> torch.dtype:
        return self.dtype

    def signal_value(self, flag: Flag) -> int:
        return self._signal_values.get(flag, 1)

    def copier(self, src: Region, dst: Region) -> Any:
        return lambda bindings, stream: None

    def collective(self, step: object, where: Where) -> Any:
        return lambda call: None

    messages = collective

    def prepare_copy(self, src: Region, dst: Region) -> Any:
        return None

    def prepare_collective(self, step: Any) -> Any:
        return None

    def progress_word(self, where: Where) -> Word:
        return Word("progress", _PROGRESS + self.rank, where.position + 1)

    def end_words(self, lane: str) -> tuple[Word, ...]:
        return Word("lower", _PROGRESS + self.rank, 0), Word("lower", _MARK + self.rank, 0)

    def gate_address(self, flag: Flag, where: Where) -> int:
        return self.rank * _RANK_BYTES + 4 * self.flags.slot[flag, where.lane, where.position]

    def waiters(self, flag: Flag) -> list[int]:
        return [flag.rank * _RANK_BYTES + 4 * slot for slot in self.flags.slots[flag]]

    def left_over(self) -> Iterator[tuple[int, int]]:
        """Words that the first call finds raised, as if a call had been before, and how far."""
        for lane in self.schedule.ranks[self.rank]:
            for position, step in enumerate(lane.steps):
                for wait in waits(step):
                    if wait.on_previous_call:
                        where = Where(self.rank, lane.name, position, step)
                        yield self.gate_address(wait.flag, where), self.signal_value(wait.flag)


def words_of(program: FakeProgram) -> list[list[Word]]:
    """By lane, its memory operations of one call: as they are on copy lanes, phase by phase on the others."""
    plan = LaunchPlan(program, frozenset())  # type: ignore[arg-type]
    return [
        [
            word
            for item in items
            if isinstance(item, FlagOperations)
            for word in (item.words if kind == "copy" else in_phases(item.words))
        ]
        for kind, items in streams_of(plan, program.rank)
    ]


def streams_of(plan: LaunchPlan, rank: int) -> list[tuple[str, list[Launch]]]:
    """What each stream is given, with the kind of its lane: signals aside have one of their own, which waits for the lane to
    come to each of them, by a word that no schedule has."""
    found: list[tuple[str, list[Launch]]] = []
    for lane, items in plan.by_lane:
        main, aside = list[Launch](), list[Launch]()
        for item in items:
            if not (isinstance(item, FlagOperations) and item.aside):
                main.append(item)
                continue
            here = rank * _RANK_BYTES + _RANK_BYTES // 2 + 4 * len(aside)
            main.append(FlagOperations(where=item.where, words=(Word("signal", here, 1),)))
            aside.append(FlagOperations(where=item.where, words=(Word("wait", here, 1), Word("lower", here, 0), *item.words)))
        found += [(lane.kind, main)] + [("copy", aside)] * bool(aside)
    return found


def in_phases(batch: Sequence[Word]) -> list[Word]:
    """What the kernel does with a batch, one operation after the other."""
    kinds: tuple[Literal["progress", "wait", "lower", "signal"], ...] = ("progress", "wait", "lower", "signal")
    return [
        Word(kind, *operation)
        for phase in split_into_phases(batch)
        for kind, operations in zip(kinds, phase.kinds, strict=True)
        for operation in operations
    ]


def play(programs: list[FakeProgram], seed: int) -> None:
    """Run all ranks' lanes op by op in random order; a rank's next call starts when all its lanes have ended."""
    chance = random.Random(seed)
    memory = dict(word for program in programs for word in program.left_over())
    lanes = [words_of(program) for program in programs]
    at = [[0] * len(rank) for rank in lanes]
    calls = [0] * len(programs)
    while min(calls) < CALLS:
        ready = [
            (r, i)
            for r, rank in enumerate(lanes)
            if calls[r] < CALLS
            for i in range(len(rank))
            if _can(rank[i], at[r][i], memory)
        ]
        for r, rank in enumerate(lanes):
            if calls[r] < CALLS and all(n == len(rank[i]) for i, n in enumerate(at[r])):
                calls[r], at[r] = calls[r] + 1, [0] * len(rank)
                break
        else:
            assert ready, f"every lane waits for good: calls {calls}, positions {at}"
            r, i = chance.choice(ready)
            _do(lanes[r][i][at[r][i]], memory)
            at[r][i] += 1


def _can(words: list[Word], position: int, memory: dict[int, int]) -> bool:
    if position == len(words):
        return False
    word = words[position]
    return word.kind != "wait" or memory.get(word.address, 0) >= word.value


def _do(word: Word, memory: dict[int, int]) -> None:
    if word.kind == "signal":
        assert memory.get(word.address, 0) == 0, "a signal came while its word was still up: it is lost"
    if word.kind != "wait" and word.address < _PROGRESS:
        memory[word.address] = word.value


@pytest.mark.parametrize(("op", "name"), PAIRS)
@pytest.mark.parametrize(
    "size", [(64, 48, 32, 4, 2), (5, 7, 3, 3, 2), (2, 3, 1, 3, 1), (24, 8, 8, 2, 3), (24, 0, 8, 2, 2), (3, 0, 8, 3, 1)]
)
def test_no_wait_is_for_good_and_no_signal_is_lost(op: Op, name: str, size: tuple[int, int, int, int, int]) -> None:
    """Also where b has no columns: no tile counts, and flags are raised all the same."""
    m, n, k, world_size, chunks = size
    schedule = build(Problem(op=op, m=m, n=n, k=k, world_size=world_size), name, chunks)
    for seed in range(5):
        play([FakeProgram(schedule, rank) for rank in range(world_size)], seed)


def test_a_word_that_is_not_lowered_loses_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine above notices a broken launch plan."""
    schedule = build(Problem(op="all_gather_matmul", m=64, n=48, k=32, world_size=2), "hetero_unfused_1d", 2)
    programs = [FakeProgram(schedule, rank) for rank in range(2)]
    do = _do

    def forgets_to_lower(word: Word, memory: dict[int, int]) -> None:
        if word != Word("lower", word.address, 0):
            do(word, memory)

    monkeypatch.setattr("test_launch_plan._do", forgets_to_lower)
    with pytest.raises(AssertionError, match="it is lost"):
        play(programs, 0)


def test_neighbours_are_one_submission() -> None:
    where = Where(0, "compute", 0, None)  # type: ignore[arg-type]
    first = FlagOperations(where=where, words=(Word("signal", 0, 1),))
    second = FlagOperations(where=where, words=(Word("wait", 4, 1),))
    assert merge_flag_operations([first, second]) == [FlagOperations(where=where, words=first.words + second.words)]


def test_a_lane_that_waits_on_says_once_where_it_is() -> None:
    where = Where(0, "copy", 0, None)  # type: ignore[arg-type]
    here, wait, lower, signal = (lambda at, k=kind: Word(k, at, 1) for kind in ("progress", "wait", "lower", "signal"))  # type: ignore[misc]
    first, second = (here(0), wait(4), lower(4)), (here(0), wait(8), lower(8))
    (both,) = merge_flag_operations(
        [FlagOperations(where=where, words=words) for words in (first, second, (signal(12),), second)]
    )
    assert isinstance(both, FlagOperations)
    assert both.words == (*first, *second[1:], signal(12), *second)


def test_phases() -> None:
    """Waits that follow each other are one phase; what comes after a signal is another; so is a step that says where it is."""
    here, wait, lower, signal = (lambda at, k=kind: Word(k, at, at) for kind in ("progress", "wait", "lower", "signal"))  # type: ignore[misc]
    batch = [here(9), wait(1), lower(1), wait(2), lower(2), signal(3), wait(4), lower(4), here(7)]
    first, second, third = split_into_phases(batch)
    assert first.kinds == ([(9, 9)], [(1, 1), (2, 2)], [(1, 1), (2, 2)], [(3, 3)])
    assert second.kinds == ([], [(4, 4)], [(4, 4)], [])
    assert third.kinds == ([(7, 7)], [], [], [])
    gates, after = split_into_phases([lower(1), lower(2), wait(3), lower(3)])
    assert gates.kinds == ([], [], [(1, 1), (2, 2)], [])
    assert after.kinds == ([], [(3, 3)], [(3, 3)], [])


def test_signals_before_more_work_go_aside() -> None:
    """Those of the caller's stream: the next matmul need not wait until a peer's word is written."""
    schedule = build(Problem(op="matmul_all_to_all", m=64, n=48, k=32, world_size=4), "shard_p2p")
    plan = LaunchPlan(FakeProgram(schedule, 0), frozenset())  # type: ignore[arg-type]
    for lane, items in plan.by_lane:
        aside = [at for at, item in enumerate(items) if isinstance(item, FlagOperations) and item.aside]
        works = [at for at, item in enumerate(items) if not isinstance(item, FlagOperations)]
        assert bool(aside) == (lane.kind == "compute")
        assert all(word.kind == "signal" for at in aside for word in items[at].words)  # type: ignore[union-attr]
        assert not aside or works[0] < aside[0] <= aside[-1] < works[-1]
        rest = [item.words for item in items if isinstance(item, FlagOperations) and not item.aside]
        assert lane.kind != "compute" or all(words[0].kind != "signal" for words in rest[:-1])
    for lane, items in plan.lanes:
        assert not any(isinstance(item, FlagOperations) and item.aside for item in items), lane


def joined(batches: Sequence[LaneRun]) -> list[tuple[str, list[Launch]]]:
    """The launches of each lane."""
    found: dict[str, list[Launch]] = {}
    for lane, launches, _ in batches:
        found.setdefault(lane.name, []).extend(launches)
    return list(found.items())


@pytest.mark.parametrize(("op", "name"), PAIRS)
def test_a_lane_that_waits_says_when_it_has_waited_for_the_last_time(
    op: Op, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind its last wait, and without a launch of its own. A lane that never waits says nothing."""
    schedule = build(Problem(op=op, m=64, n=48, k=32, world_size=2), name, 2)
    program = FakeProgram(schedule, 0)
    plan = LaunchPlan(program, frozenset())  # type: ignore[arg-type]
    marks = program.end_words("any")
    marked_plans = plan.batches, plan.unmerged_batches
    monkeypatch.setattr(FakeProgram, "end_words", lambda self, lane: ())
    without = LaunchPlan(program, frozenset())  # type: ignore[arg-type]
    for marked, bare in zip(marked_plans, (without.batches, without.unmerged_batches), strict=True):
        for (lane, launches), (_, others) in zip(joined(marked), joined(bare), strict=True):
            flags = [one.words for one in launches if isinstance(one, FlagOperations) and not one.aside]
            kinds = [word.kind for words in flags for word in words]
            assert len(launches) == len(others), lane
            assert [word for words in flags for word in words if word in marks] == list(marks) * ("progress" in kinds), lane
            assert flags[-1][-2:] == marks if "progress" in kinds else "wait" not in kinds, lane


def test_without_work_between_them_signals_are_one_submission_with_what_follows() -> None:
    schedule = build(Problem(op="all_gather_matmul", m=64, n=48, k=32, world_size=2), "flag_gated", 1)
    for _, items in LaunchPlan(FakeProgram(schedule, 0), frozenset()).by_lane:  # type: ignore[arg-type]
        last = max((at for at, item in enumerate(items) if not isinstance(item, FlagOperations)), default=0)
        assert not any(isinstance(item, FlagOperations) and item.aside for item in items[last:])
