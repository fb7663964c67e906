"""Ranks agree: in a meeting at the first call of a kind, by numbers that are compared later at the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from threading import Thread

import pytest
import torch.distributed as dist
from conftest import RankFixture
from single_process_ranks import rank_groups, wait_for

from weft.comm.control import CLOSED, NOTIFIED, TEXT_BYTES
from weft.comm.rank_group import _PEER_CHECK_S, RankGroup
from weft.comm.texts import Remembered, clipped, difference
from weft.core.errors import PeerLost, RankMismatch, WaitTimeout, WeftError

BEFORE_SLEEP = 51
"""How often a wait looks before it sleeps."""


def _repeat_same_calls(rank_group: RankGroup) -> int:
    """Make many more calls than the log holds, with one rank far ahead of the other. Return the number of calls."""
    first = rank_group.number_agreed_text("op: gather") if rank_group.agree_on_call("op: gather") else 0
    rank_group.agree_on_call("op: scatter")
    second = rank_group.number_agreed_text("op: scatter")
    assert first != second
    for call in range(3000):
        rank_group.begin_agreed_call((first, second)[call % 2])
        if rank_group.rank and call % 500 == 0:
            time.sleep(0.01)
    rank_group.check_peers()
    rank_group.agree_on_call("op: barrier")
    rank_group.check_peers(may_leave=True)
    return rank_group.calls


def _noticed(rank_group: RankGroup, *calls: Callable[[], object]) -> str:
    """What a rank is told that makes these calls, and then waits for nothing."""
    try:
        for call in calls:
            call()
        rank_group.wait_until(lambda: False, lambda: "nothing")
    except (RankMismatch, PeerLost) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing noticed"


def _different(rank_group: RankGroup) -> str:
    numbers = []
    for text in ("op: gather\nM: 64", "op: scatter\nM: 64"):
        rank_group.agree_on_call(text)
        numbers.append(rank_group.number_agreed_text(text))
    rank_group.begin_agreed_call(numbers[0])
    return _noticed(rank_group, partial(rank_group.begin_agreed_call, numbers[rank_group.rank % 2]))


def _known_and_new(rank_group: RankGroup) -> str:
    """One rank repeats what all know, the other meets for something new."""
    rank_group.agree_on_call("op: gather\nM: 64")
    number = rank_group.number_agreed_text("op: gather\nM: 64")
    return _noticed(
        rank_group,
        partial(rank_group.begin_agreed_call, number)
        if rank_group.rank
        else partial(rank_group.agree_on_call, "op: gather\nM: 128"),
    )


def _late_to_look(rank_group: RankGroup) -> str:
    """What the other rank repeated is noticed when it has repeated others."""
    rank_group.agree_on_call("op: gather\nM: 64")
    numbers = [rank_group.number_agreed_text(f"op: gather\nM: {m}") for m in (0, 1, 2, 8)]
    others = [numbers[0], numbers[3 if rank_group.rank else 1], numbers[2]]
    return _noticed(
        rank_group,
        *(partial(rank_group.begin_agreed_call, number) for number in others),
        partial(rank_group.agree_on_call, "op: barrier"),
    )


def _last_call(rank_group: RankGroup) -> str:
    """Rank 2 ends its last call, and leaves, while rank 1 still waits for rank 0 in it. Then rank 1 calls once more."""
    rank_group.agree_on_call("op: last")
    if rank_group.rank == 0:
        while rank_group._control[2].state != CLOSED:
            time.sleep(1e-3)
        time.sleep(10 * _PEER_CHECK_S)
    if rank_group.rank != 1:
        return ""
    rank_group.wait_until(lambda: rank_group._control[0].state == CLOSED, lambda: "rank 0 leaves")
    try:
        rank_group.agree_on_call("op: one more")
    except PeerLost as error:
        return str(error)
    return "nothing noticed"


def _when_notified(rank_group: RankGroup) -> float:
    """Rank 0 fails, and waits until all ranks know. Rank 1 fails, too, and later rank 2 closes the group.
    Return when each rank did so, by the host's clock, and when rank 0's wait ended."""
    rank_group.agree_on_call("op: last")
    if rank_group.rank == 0:
        assert not rank_group.has_failed_peer()
        began = time.monotonic()
        rank_group.fail(PeerLost("planted"))
        rank_group.await_notified(0.2)
        assert time.monotonic() - began >= 0.2
        dist.barrier()
        rank_group.await_notified(60.0)
        assert rank_group.has_failed_peer()
        return time.monotonic()
    assert wait_for(rank_group.has_failed_peer)
    dist.barrier()
    time.sleep(0.5 * rank_group.rank)
    before = time.monotonic()
    if rank_group.rank == 1:
        rank_group.fail(PeerLost("rank 0 failed"))
        rank_group.await_notified(0.0)
        assert rank_group._control[1].state == NOTIFIED
    return before


def _with_rank_group(function: str) -> object:
    group = dist.group.WORLD
    assert group is not None
    rank_group = RankGroup(group, timeout_s=20.0)
    try:
        return globals()[function](rank_group)
    finally:
        rank_group.close()


def test_calls_alike(ranks: RankFixture) -> None:
    assert ranks(2).run(_with_rank_group, "_repeat_same_calls") == [3003, 3003]


def test_a_slow_rank_reads_what_was_offered_for_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast rank goes on to its next agreement before the slow one has read the numbers of this one."""
    fast, slow = rank_groups()
    control = fast._control[0]
    read = control.offered

    def read_late(parity: int) -> int:
        time.sleep(0.2)
        return read(parity)

    monkeypatch.setattr(control, "offered", read_late)
    found: dict[str, list[tuple[int, ...]]] = {"fast": [], "slow": []}

    def agree(name: str, rank_group: RankGroup) -> None:
        for call in range(3):
            found[name].append(tuple(rank_group.agree_on_call(f"op: {call}", 10 * call + rank_group.rank)))

    threads = [Thread(target=agree, args=("fast", fast)), Thread(target=agree, args=("slow", slow))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {key: [(0, 1), (10, 11), (20, 21)] for key in ("fast", "slow")}


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("_different", ("ranks disagree in call 4", "op: rank 0 has gather, rank 1 has scatter")),
        ("_known_and_new", ("M: rank", "64", "128")),
        ("_late_to_look", ("ranks disagree in call 3", "M: ")),
    ],
)
def test_calls_that_differ_are_noticed(ranks: RankFixture, function: str, words: tuple[str, ...]) -> None:
    messages = ranks(2).run(_with_rank_group, function)
    assert any(all(word in message for word in words) for message in messages), messages
    assert all("nothing noticed" not in message for message in messages)


def test_a_rank_that_failed_waits_until_its_peers_know(ranks: RankFixture) -> None:
    """Those that have told their calls, and those that have left; for so long as it is told to."""
    knew, first, last = ranks(3).run(_with_rank_group, "_when_notified")
    assert max(first, last) < knew < max(first, last) + 40


def test_a_rank_may_leave_while_others_end_their_last_call(ranks: RankFixture) -> None:
    """What it had to do is done; only a rank that is needed once more is missed."""
    assert ranks(3).run(_with_rank_group, "_last_call") == ["", "rank 2 has left the group", ""]


def test_texts_that_differ_where_there_is_no_room_differ_in_what_is_compared() -> None:
    common_start = "dims\n" * TEXT_BYTES
    one, other = (clipped(f"{common_start}schedule: {name}", TEXT_BYTES) for name in ("direct_store", "sequential"))
    assert one != other
    assert len(one.encode()) == TEXT_BYTES
    assert clipped("short", TEXT_BYTES) == "short"


def _long_and_alike(rank_group: RankGroup) -> int:
    for cut in range(4):  # wherever a character's bytes are cut
        rank_group.agree_on_call("key: " + "x" * cut + "\N{GREEK SMALL LETTER MU}\N{SNOWMAN}" * TEXT_BYTES)
    return rank_group.calls


def test_long_texts_that_are_alike_are_taken_for_it(ranks: RankFixture) -> None:
    assert ranks(2).run(_with_rank_group, "_long_and_alike") == [4, 4]


def test_a_text_has_one_number_in_every_process() -> None:
    """Python's own hash of a text differs from one process to the next."""
    assert Remembered(2, 1 << 20).number("op: gather") == 104492


def test_texts_have_numbers_of_their_own_however_many_came_before() -> None:
    known, other = (Remembered(2, 1 << 24, most=48) for _ in range(2))
    assert known.number("first") == known.number("first")
    numbers = {f"text {i}": known.number(f"text {i}") for i in range(500)}
    assert len(set(numbers.values())) == 500
    assert 2 <= min(numbers.values()) <= max(numbers.values()) < 1 << 24
    last = [f"text {i}" for i in range(500 - 48, 500)]
    assert [known.text(numbers[text]) for text in last] == last
    assert [other.number(text) for text in reversed(last)] == [numbers[text] for text in reversed(last)]
    assert known.text(numbers["text 3"]) == known.text(None) == known.text(1) == known.text(1 << 24) == ""
    known.number(last[0])
    known.number("one more")
    assert known.text(numbers[last[0]]) == last[0], "it was used since"


def test_numbers_leave_no_room_to_choose() -> None:
    known = Remembered(2, 50)
    assert {known.number(str(number)) for number in range(2000)} == set(range(2, 50))


def test_what_nobody_remembers_is_said_to_be_so() -> None:
    assert difference(0, "", 1, "") == "  rank 0 makes one, rank 1 another, and both were agreed on too long ago to name them"


def test_the_first_reason_of_a_failure_stands() -> None:
    first, second = rank_groups()
    first.fail(MemoryError("no memory"))
    first.fail(ValueError("a wait was ended"))
    assert str(first.broken) == "no memory"
    with pytest.raises(PeerLost, match="rank 0 failed: no memory"):
        second.check_peers()


def test_what_has_come_while_a_rank_was_stopped_is_no_timeout() -> None:
    """The bound is over when the rank looks again, and what it waits for is there."""
    group, looks = rank_groups(timeout_s=0.0)[0], 0

    def ready() -> bool:
        nonlocal looks
        looks += 1
        return looks > BEFORE_SLEEP

    group.wait_until(ready, lambda: "nothing")
    with pytest.raises(WaitTimeout):
        group.wait_until(lambda: False, lambda: "nothing")


def test_a_failed_group_runs_nothing_again() -> None:
    group = rank_groups()[0]
    group.fail(MemoryError("no memory"))
    for call in (lambda: group.begin_agreed_call(1), lambda: group.agree_on_call("op: gather")):
        with pytest.raises(WeftError, match="no memory"):
            call()
