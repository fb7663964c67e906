"""Replays of the caller's graphs end within the bound, without a GPU: what lanes write in a replay, what the watchdog reads,
and what it does when a replay does not go on."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from single_process_ranks import wait_for
from test_failures_on_gpus import LONG_S, Ranks, _closing, _program, ranks

from weft.compat.streams import Word
from weft.core.errors import PeerLost, WaitTimeout
from weft.runtime import watchdog
from weft.runtime.cuda import CudaProgram
from weft.runtime.fused_collective import FusedCollectiveKernel
from weft.runtime.order import PendingCall, memory_of_results
from weft.runtime.watchdog import CapturedPrograms

__all__ = ["ranks"]
BOUND_S = 0.4


class Replayed:
    """A captured program with one lane, and the words that its replays write."""

    def __init__(self, name: str, out: torch.Tensor | None = None) -> None:
        self.replayed = PendingCall.of(name, lambda: f"{name} waits", 0)
        self.replayed.enqueued = True
        self.replayed.results = tuple(memory_of_results(out))
        self.step = self.asked = self.looks = 0

    def ask(self, stream: int) -> None:
        self.asked = 1

    def look(self) -> tuple[tuple[int, ...], bool]:
        self.looks += 1
        return (self.step,), bool(self.step and not self.asked)

    def ends(self) -> None:
        self.step = self.asked = 0

    def looked_at(self, times: int = 3) -> bool:
        last = self.looks + times
        return wait_for(lambda: self.looks >= last, 10.0)


@pytest.fixture
def captured(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Replayed]:
    """Returns a program that a graph of rank 0 holds."""
    monkeypatch.setattr(watchdog, "_LOOKS_S", 0.02)
    monkeypatch.setattr(watchdog, "_LAST_WORK_S", 0.01)
    monkeypatch.setattr(watchdog, "_IDLE_TICKS", 1)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    ranks.rank_group.timeout_s = BOUND_S

    def add(name: str, out: torch.Tensor | None = None) -> Replayed:
        program = Replayed(name, out)
        ranks.resources.watchdog.captured(program)
        return program

    return add


def test_a_replay_that_does_not_go_on_ends_at_the_bound_and_not_before(ranks: Ranks, captured: Callable[..., Replayed]) -> None:
    """Its results are NaN once it has ended; the next call and weft.synchronize raise."""
    out = torch.ones(4, 3)
    program = captured("a program", out)
    ranks.resources.releaser.add(0, program.ends)
    began = time.monotonic()
    program.step = 2
    ranks.raised_after(lambda: None, WaitTimeout, "a program waits after 0.4 s, in a replay of a CUDA graph")
    assert time.monotonic() - began > BOUND_S
    assert wait_for(lambda: bool(out.isnan().all()))
    assert ranks.rank_group.unraised is None, "a call has raised it"


def test_weft_close_raises_what_cut_a_replay_short_if_no_call_has(ranks: Ranks, captured: Callable[..., Replayed]) -> None:
    captured("a program").step = 2
    assert ranks.failed()
    assert isinstance(ranks.rank_group.unraised, WaitTimeout)


def _goes_on(ranks: Ranks, program: Replayed, then: Callable[[], object]) -> None:
    """For three bounds, with a look between any two things that happen."""
    until = time.monotonic() + 3 * BOUND_S
    while time.monotonic() < until:
        assert program.looked_at()
        then()
    assert ranks.rank_group.broken is None


def test_a_replay_that_goes_on_slowly_is_no_failure(ranks: Ranks, captured: Callable[..., Replayed]) -> None:
    program = captured("a program")
    program.step = 1
    _goes_on(ranks, program, lambda: setattr(program, "step", program.step + 1))


def test_replays_that_are_in_one_step_at_every_look_are_no_failure(ranks: Ranks, captured: Callable[..., Replayed]) -> None:
    program = captured("a program")

    def replays() -> None:
        program.ends()
        program.step = 2

    _goes_on(ranks, program, replays)


def test_a_replay_that_has_ended_is_no_failure(ranks: Ranks, captured: Callable[..., Replayed]) -> None:
    program = captured("a program")
    program.step = 2
    assert program.looked_at()
    program.ends()
    _goes_on(ranks, program, lambda: None)


def test_the_one_of_two_programs_that_does_not_go_on_is_named(ranks: Ranks, captured: Callable[..., Replayed]) -> None:
    """What the other one has returned is right."""
    mine, others = torch.ones(3), torch.ones(3)
    captured("the other", others)
    program = captured("a program", mine)
    ranks.resources.releaser.add(0, program.ends)
    program.step = 2
    ranks.raised_after(lambda: None, WaitTimeout, "a program waits after")
    assert wait_for(lambda: bool(mine.isnan().all()))
    assert bool((others == 1).all())


def test_a_peer_that_is_lost_in_a_replay_makes_its_results_nan(ranks: Ranks, captured: Callable[..., Replayed]) -> None:
    """Not before it has ended: it would write over them. What the caller has dropped is not written."""
    ranks.rank_group.timeout_s = LONG_S
    out, dropped = torch.ones(3), torch.ones(3)
    program = captured("a program", out)
    captured("the other", dropped).step = 1
    del dropped
    program.step = 2
    ranks.raised_after(ranks.peer_fails, PeerLost, "planted")
    assert isinstance(ranks.rank_group.broken, PeerLost)
    assert program.looked_at()
    assert bool((out == 1).all())
    program.ends()
    assert wait_for(lambda: bool(out.isnan().all()))
    assert [entry for entry in ranks.resources.driver.log if entry[0] == "fill"] == [("fill", out.nbytes)]


def test_a_driver_that_does_not_answer_a_look_holds_nobody_up(
    ranks: Ranks,
    captured: Callable[..., Replayed],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The watchdog sees its peers fail. The program that is read keeps its memory, and its results may be wrong."""
    monkeypatch.setattr(watchdog, "_ASK_S", 0.05)
    out, answers, asked = torch.ones(3), threading.Event(), threading.Event()
    program = captured("a program", out)

    def look() -> tuple[tuple[int, ...], bool]:
        asked.set()
        answers.wait(LONG_S)
        return (0,), False

    program.look = look  # type: ignore[method-assign]
    assert asked.wait(LONG_S)
    ranks.raised_after(ranks.peer_fails, PeerLost, "planted")
    assert not ranks.resources.watchdog.captured_programs.remove(program)
    answers.set()
    assert wait_for(lambda: bool(out.isnan().all()))


def test_a_program_that_is_closed_is_looked_at_no_more(ranks: Ranks, captured: Callable[..., Replayed]) -> None:
    """Its memory is another's."""
    program, other = captured("a program"), captured("the other")
    program.step = 2
    assert program.looked_at()
    assert ranks.resources.watchdog.captured_programs.remove(program)
    looks = program.looks
    _goes_on(ranks, other, lambda: None)
    assert program.looks == looks


def test_a_program_that_is_removed_during_a_look_takes_no_bound_from_others(
    ranks: Ranks,
    captured: Callable[..., Replayed],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was late, and its look ends with an error, since it has dropped what a look reads. Another one is late after it."""
    monkeypatch.setattr(watchdog, "_ASK_S", 0.05)
    ranks.rank_group.timeout_s = LONG_S
    programs, answers, asked = ranks.resources.watchdog.captured_programs, threading.Event(), threading.Event()
    program, other = captured("a program"), captured("the other")
    program.step = 2
    assert program.looked_at()

    def look() -> tuple[tuple[int, ...], bool]:
        asked.set()
        answers.wait(LONG_S)
        raise AttributeError("dropped")

    program.look = look  # type: ignore[method-assign]
    assert asked.wait(LONG_S)
    assert not programs.remove(program)
    other.step = 2
    answers.set()
    assert other.looked_at(10)
    assert programs.all() == [other]
    assert programs.find_late(0.0) is other


def test_a_program_that_is_read_keeps_its_memory_when_it_is_closed(
    ranks: Ranks,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = list[Any]()
    heap: Any = SimpleNamespace(free=given.append, free_cached=lambda: None)
    ranks.resources.heap = heap
    monkeypatch.setattr(CapturedPrograms, "remove", lambda self, program: False)
    _closing(ranks.resources, None, captured=True).close()
    assert given == []
    assert "the program has calls that have not ended" in caplog.text


def test_an_error_of_a_look_ends_no_group(
    ranks: Ranks,
    captured: Callable[..., Replayed],
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = captured("a program")
    program.look = lambda: 1 // 0  # type: ignore[assignment, method-assign]
    assert wait_for(lambda: "replays of CUDA graphs are not bounded any more: ZeroDivisionError" in caplog.text)
    time.sleep(0.1)
    assert ranks.rank_group.broken is None


def test_what_captured_calls_return_is_remembered_while_somebody_holds_it(ranks: Ranks) -> None:
    order, call, first, second = ranks.resources.order, PendingCall.of("a program", str, 0), torch.ones(3), torch.ones(4)
    order.add_results(call, list(memory_of_results(first)))
    order.add_results(call, list(memory_of_results(second)))
    assert [nbytes for _, _, nbytes in call.results] == [12, 16]
    del first
    order.add_results(call, ())
    assert [nbytes for _, _, nbytes in call.results] == [16]
    order.forget_results(call)
    assert call.results == ()


def _write(words: tuple[Word, ...]) -> None:
    for word in words:
        ctypes.c_int32.from_address(word.address).value = word.value


def test_words_of_lanes_show_where_a_replay_is_and_whether_it_is_another_one(ranks: Ranks) -> None:
    """Three words of flags, then the steps of two lanes and their second words. The copy lane has no marks."""
    words = torch.zeros(7, dtype=torch.int32)
    at = {name: words.data_ptr() + 4 * (3 + lane) for lane, name in enumerate(("copy", "compute"))}
    kernel = SimpleNamespace(call_under_way=lambda: 0)
    program = _program(
        ranks.resources, _words=words, _progress_at=at, _marked=[1], kernels={0: kernel}, flags=SimpleNamespace(words=3)
    )

    def reaches(lane: str, position: int) -> None:
        where: Any = SimpleNamespace(lane=lane, position=position)
        _write((CudaProgram.progress_word(program, where),))

    assert program.end_words("copy") == ()
    assert program.look() == ((0, 0), False)
    reaches("copy", 4)
    assert program.look() == ((0, 0), False)
    reaches("compute", 0)
    assert program.look() == ((1, 0), True)
    _write((Word("lower", program._mark_of("compute"), 1),))
    assert program.look() == ((1, 0), False)
    reaches("compute", 2)
    assert program.look() == ((3, 0), False)
    _write(program.end_words("compute"))
    assert program.look() == ((0, 0), False)
    reaches("compute", 2)
    assert program.look() == ((3, 0), True)
    assert words.tolist() == [0, 0, 0, 5, 3, 0, 0]
    kernel.call_under_way = lambda: 9
    assert program.look()[0] == (3, 9)


def test_a_kernel_that_counts_calls_is_in_one_until_all_blocks_have_ended_it() -> None:
    kernel, epochs = FusedCollectiveKernel.__new__(FusedCollectiveKernel), torch.tensor([[6, 3], [6, 3]])
    kernel._memory = cast(Any, SimpleNamespace(begun=torch.tensor([6]), epochs=epochs))
    assert kernel.call_under_way() == 0
    kernel._memory.begun[0] = 7
    assert kernel.call_under_way() == 7
    epochs[0, 0] = 7
    assert kernel.call_under_way() == 7
    epochs[1, 0] = 9  # a call of another program has begun and ended since
    epochs[0, 0] = 9
    assert kernel.call_under_way() == 0
