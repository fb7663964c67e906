"""A call that one rank captures in a CUDA graph and another makes eagerly: the ranks' logs of calls differ then, and the error
says why."""

from __future__ import annotations

import pytest
from single_process_ranks import rank_groups

from weft.comm.rank_group import RankGroup
from weft.comm.texts import Remembered
from weft.core.errors import RankMismatch, WaitTimeout, WeftError

REMEDY = "capture a call on every rank, or on none"


def _knowing() -> tuple[tuple[RankGroup, RankGroup], int, int]:
    """Two ranks that have agreed on two calls, and the calls' numbers."""
    one, other = rank_groups(timeout_s=0.2)
    for rank_group in (one, other):
        rank_group._agreed_texts = Remembered(2, 1 << 24)
        numbers = [rank_group.number_agreed_text(f"op: {name}") for name in ("first", "second")]
    return (one, other), numbers[0], numbers[1]


def test_captures_are_not_compared() -> None:
    """Ranks may capture a call several times, each as often as it likes."""
    (one, other), first, second = _knowing()
    one.count_captured_call()
    one.count_captured_call()
    other.count_captured_call()
    for rank_group in (one, other):
        rank_group.begin_agreed_call(first)
        rank_group.begin_agreed_call(second)
    one.check_peers()
    other.check_peers()


def test_a_call_that_one_rank_captures_alone_is_named_as_the_reason() -> None:
    (one, other), first, second = _knowing()
    one.count_captured_call()
    other.begin_agreed_call(first)
    for rank_group in (one, other):
        rank_group.begin_agreed_call(second)
    with pytest.raises(RankMismatch, match="rank 0 has captured 1 calls in CUDA graphs, rank 1 0") as caught:
        one.check_peers()
    assert REMEDY in str(caught.value)


def test_a_rank_that_waits_for_one_that_has_captured_says_so() -> None:
    """As at the call at which ranks compare a choice that was not measured here."""
    (one, other), first, _ = _knowing()
    one.count_captured_call()
    other.begin_agreed_call(first)
    with pytest.raises(WaitTimeout, match=REMEDY):
        other.agree_on_call("op: second")


def test_ranks_that_capture_nothing_hear_nothing_of_graphs() -> None:
    (one, other), first, second = _knowing()
    one.begin_agreed_call(first)
    other.begin_agreed_call(second)
    with pytest.raises(RankMismatch) as caught:
        one.check_peers()
    assert REMEDY not in str(caught.value)


def test_a_failed_group_captures_nothing() -> None:
    (one, _), _, _ = _knowing()
    one.fail(ValueError("planted"))
    with pytest.raises(WeftError, match="planted"):
        one.count_captured_call()
