"""A short form of `races.py`: what the host executor's lanes do is ordered by flags, and what their schedules say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from calls import EVERY, Case, even
from conftest import RankFixture
from races import CALLS, Delay, Log, Race, Replay, recorded, systematic, words_of
from recorder import CALLER, Event, Place, accesses

pytestmark = pytest.mark.slow

RANKS = 3
Logs = list[Log]
Change = Callable[[Event], Event | None]


@pytest.mark.ranks
@pytest.mark.parametrize("op", dict(EVERY))
def test_calls_are_ordered(ranks: RankFixture, op: str) -> None:
    """By two families of each operator; lanes are late at random."""
    for name in [name for other, name in EVERY if other == op][-2:]:
        case = even(Case(op=op, schedule=name), RANKS)
        replay = Replay(ranks(RANKS).run(recorded, case, Delay(chance=0.2, seconds=0.001)))
        replay.check()
        assert replay.accesses > RANKS * CALLS


@pytest.fixture(scope="module")
def logs(ranks: RankFixture) -> Logs:
    """Two ranks' lanes, of a schedule every one of whose waits is needed. One lane is late throughout."""
    case = Case(op="matmul_reduce_scatter", schedule="track_and_trigger")
    first = ranks(2).run(recorded, case, Delay(lane=(1, "compute")))
    Replay(first).check()
    return first


def test_each_lane_of_each_rank_is_late_in_turn(logs: Logs) -> None:
    lanes = {(rank, lane) for rank, log in enumerate(logs) for lane in log if lane != CALLER}
    assert {delay.lane for delay in systematic(logs)} == lanes
    assert len(lanes) >= 4


def _changed(logs: Logs, change: Change) -> Iterator[Logs]:
    """The logs with one event changed, or left out, by turns."""
    for rank, log in enumerate(logs):
        for lane, events in log.items():
            for at, event in enumerate(events):
                new = change(event)
                if new != event:
                    other = [*events[:at], *([new] if new else []), *events[at + 1 :]]
                    yield [{**each, lane: other} if r == rank else each for r, each in enumerate(logs)]


def _without(kind: str) -> Change:
    return lambda event: None if event.kind == kind else event


@pytest.mark.ranks
def test_without_any_one_wait_there_is_a_race(logs: Logs) -> None:
    changed = list(_changed(logs, _without("seen")))
    assert len(changed) > 20
    for other in changed:
        with pytest.raises(Race, match=r"has (written|read)"):
            Replay(other).check()


@pytest.mark.ranks
def test_a_wait_without_its_store_is_found(logs: Logs) -> None:
    last = max((event for event in logs[0]["compute"] if event.kind == "seen"), key=lambda event: event.call)
    (other,) = _changed(logs, lambda event: replace(event, value=event.value + 1) if event is last else event)
    with pytest.raises(Race, match="came true without a store"):
        Replay(other).check()


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_step_beyond_its_regions_is_found(logs: Logs, kind: str) -> None:
    def lower(event: Event) -> Event:
        if event.kind != kind or event.place is None or event.place.space[0] != "shared":
            return event
        return replace(event, place=replace(event.place, start=event.place.start + 4096))

    other = next(_changed(logs, lower))
    with pytest.raises(Race, match="its schedule does not say so"):
        Replay(other).check()


def test_words_of_a_place() -> None:
    place = Place(("own", 0, 1), start=8, shape=(2, 3), stride=(20, 4), itemsize=4)
    assert words_of(place).tolist() == [2, 3, 4, 7, 8, 9]
    assert words_of(replace(place, shape=(2,), stride=(16,), itemsize=8)).tolist() == [2, 3, 6, 7]


@pytest.mark.parametrize(
    ("func", "roles"),
    [
        (lambda a, b, out: torch.mm(a, b, out=out), ["read", "read", "write"]),
        (lambda a, b, out: out.copy_(a), ["write", "read"]),
        (lambda a, b, out: out.add_(a), ["read write", "read"]),
        (lambda a, b, out: a[1:].t(), []),
    ],
)
def test_what_an_operation_touches(func: Callable[..., object], roles: list[str]) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            for _, writes, reads in accesses(func, args, kwargs or {}):
                seen.append(" ".join(word for word, is_so in (("read", reads), ("write", writes)) if is_so))
            return func(*args, **(kwargs or {}))

    a, b, out = (torch.ones(4, 4) for _ in range(3))
    with Watch():
        func(a, b, out)
    assert seen == roles
