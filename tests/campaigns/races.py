"""Do lanes touch only what their schedule says, in an order that flags enforce, however slow any of them is?

The checker proves schedules, and executors run them. Here host executors of 2 to 4 ranks call every operator by every family
three times in a row with new data, and `recorder` records what their lanes did: each operation's reads and writes, flag stores
and waits. The following is checked with vector clocks:

    order         any two accesses to the same bytes, of which one is a write, are ordered by lanes, flags, the barriers of a
                  collective, and the calls of one rank. A wait is ordered after the store that it needed, not after a later one
                  that it may have found, so a race is found even if it did not happen in this run. On CPUs ranks meet between
                  calls. That orders nothing here, because GPUs have no such meeting.
    provenance    each wait was satisfied by a store that was made
    conformance   a step touches nothing but what its schedule says that it reads and writes
    result        the result is right, within rounding

Each case runs undisturbed, then with each lane of each rank delayed in turn before each of its steps, then with random delays.

    python tests/campaigns/races.py --json out/races.jsonl
    python tests/campaigns/races.py --only 'matmul_all_reduce two_shot' --ranks 4 --random 50

Limits: only steps that torch runs are recorded, so this runs without Triton's interpreter and does not see fused kernels.
Memory is followed in words of 4 bytes, so cases are float32.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import calls
import numpy as np
import torch
import torch.distributed as dist
from calls import Case, even
from campaign import Options, append
from recorder import CALLER, Event, Place, Recorder

import weft
from weft.runtime.bindings import Where
from weft.runtime.ranks import Ranks

CALLS = 3
DELAY_S = 0.003
Log = Mapping[str, Sequence[Event]]
Lane = tuple[int, str]
_WORD = 4


@dataclass(frozen=True, kw_only=True)
class Delay:
    """lane: the one that is late before each step, or nobody. chance: of any step to be late, by a seed."""

    lane: Lane | None = None
    chance: float = 0.0
    seed: int = 0
    seconds: float = DELAY_S

    def __str__(self) -> str:
        if self.lane:
            return f"rank {self.lane[0]} lane {self.lane[1]} late"
        return f"late at random, seed {self.seed}" if self.chance else "undisturbed"


class Race(AssertionError):
    """What was done in no order, or where it must not be."""


def recorded(case: Case, delay: Delay, seed: int = 1) -> Log:
    """One rank's calls, checked, and what its lanes did."""
    rank, on = dist.get_rank(), torch.device("cpu")
    late = random.Random(delay.seed * 64 + rank)

    def pause(where: Where) -> None:
        if delay.lane == (rank, where.lane) or late.random() < delay.chance:
            time.sleep(delay.seconds)

    with Recorder(pause) as recorder:
        for call in range(CALLS):
            run, expected = calls.work(case, seed + call, on)
            calls.check(case, run(), expected, dist.get_world_size())
    weft.close()
    return recorder.log


class Shadow:
    """Of each word of a memory: the lane that wrote it last, the time of that lane then, and the time of each lane when it last
    read the word."""

    def __init__(self, lanes: int) -> None:
        self.writer, self.written = np.zeros((2, 0), dtype=np.int64)
        self.read = np.zeros((lanes, 0), dtype=np.int64)

    def grow(self, words: int) -> None:
        more = (0, max(0, words - len(self.writer)))
        self.writer, self.written, self.read = (
            np.pad(self.writer, more),
            np.pad(self.written, more),
            np.pad(self.read, ((0, 0), more)),
        )


class Replay:
    """What all ranks' lanes did, put into one order that their waits allow, with a vector clock for each lane."""

    def __init__(self, logs: Sequence[Log]) -> None:
        self._events = {(rank, lane): list(events) for rank, log in enumerate(logs) for lane, events in log.items()}
        self._number = {lane: n for n, lane in enumerate(self._events)}
        self._clock = {lane: np.zeros(len(self._events), dtype=np.int64) for lane in self._events}
        self._at = dict.fromkeys(self._events, 0)
        self._stores: dict[tuple[str, int, int], list[tuple[int, np.ndarray]]] = {}
        self._begun: dict[tuple[int, int], np.ndarray] = {}
        self._step: dict[Lane, Event] = {}
        self._shadows: dict[tuple[Any, ...], Shadow] = {}
        self.accesses = 0

    def check(self) -> None:
        """Raises Race for the first access, wait or step that is not as it must be."""
        for clock, number in zip(self._clock.values(), self._number.values(), strict=True):
            clock[number] = 1
        while sum(self._advance(lane) for lane in self._events):
            pass
        stuck = {lane: self._events[lane][at] for lane, at in self._at.items() if at < len(self._events[lane])}
        if stuck:
            lane, event = next(iter(stuck.items()))
            raise Race(f"{_named(lane)}, call {event.call}: {event.kind} {event.flag} {event.value} came true without a store")

    def _advance(self, lane: Lane) -> int:
        """Do what a lane can do now; how many events that were."""
        before = self._at[lane]
        while self._at[lane] < len(self._events[lane]):
            event = self._events[lane][self._at[lane]]
            if not self._ready(lane, event):
                break
            self._do(lane, event)
            self._at[lane] += 1
        return self._at[lane] - before

    def _ready(self, lane: Lane, event: Event) -> bool:
        if event.kind == "seen":
            return any(value >= event.value for value, _ in self._stores.get(event.flag or ("", 0, 0), ()))
        if event.kind == "end":
            return all(
                at == len(self._events[other]) or self._events[other][at].call > event.call
                for other, at in self._at.items()
                if other[0] == lane[0] and other[1] != CALLER
            )
        return event.kind == "begin" or (lane[0], event.call) in self._begun

    def _do(self, lane: Lane, event: Event) -> None:
        clock, number = self._clock[lane], self._number[lane]
        if event.kind == "begin":
            self._begun[lane[0], event.call] = clock.copy()
            clock[number] += 1
        elif event.kind == "end":
            for other in self._events:
                if other[0] == lane[0]:
                    np.maximum(clock, self._clock[other], out=clock)
                    # What a lane does in the next call is later than what this end knows of it.
                    self._clock[other][self._number[other]] += 1
        else:
            np.maximum(clock, self._begun[lane[0], event.call], out=clock)
            self._in_call(lane, event, clock)

    def _in_call(self, lane: Lane, event: Event, clock: np.ndarray) -> None:
        if event.kind == "step":
            self._step[lane] = event
        elif event.kind == "store":
            assert event.flag
            self._stores.setdefault(event.flag, []).append((event.value, clock.copy()))
            clock[self._number[lane]] += 1
        elif event.kind == "seen":
            assert event.flag
            np.maximum(clock, next(then for value, then in self._stores[event.flag] if value >= event.value), out=clock)
        else:
            assert event.place
            self._access(lane, event, event.place, clock)

    def _access(self, lane: Lane, event: Event, place: Place, clock: np.ndarray) -> None:
        self.accesses += 1
        words, shadow = words_of(place), self._shadows.setdefault(place.space, Shadow(len(self._events)))
        shadow.grow(int(words.max()) + 1)
        self._conform(lane, event, place, words)
        unordered = shadow.written[words] > clock[shadow.writer[words]]
        if unordered.any():
            other = int(shadow.writer[words][unordered][0])
            raise Race(self._described(lane, event, f"{_named(list(self._number)[other])} has written", place))
        if event.kind == "write":
            ahead = shadow.read[:, words] > clock[:, None]
            if ahead.any():
                other = int(np.argwhere(ahead)[0][0])
                raise Race(self._described(lane, event, f"{_named(list(self._number)[other])} has read", place))
            shadow.writer[words], shadow.written[words] = self._number[lane], clock[self._number[lane]]
        else:
            shadow.read[self._number[lane], words] = clock[self._number[lane]]

    def _conform(self, lane: Lane, event: Event, place: Place, words: np.ndarray) -> None:
        """A step may read what it says that it writes: in-place sums do."""
        reads, writes = self._step[lane].declared
        allowed = [
            words_of(other) for other in (*writes, *(reads if event.kind == "read" else ())) if other.space == place.space
        ]
        if not np.isin(words, np.concatenate(allowed) if allowed else np.empty(0)).all():
            raise Race(self._described(lane, event, "its schedule does not say so", place))

    def _described(self, lane: Lane, event: Event, why: str, place: Place) -> str:
        step = self._step[lane].text
        return f"call {event.call}: {step}: a {event.kind} of {list(place.shape)} in {place.space} at byte {place.start}: {why}"


def words_of(place: Place) -> np.ndarray:
    """The words of a space that a place touches, each once."""
    at = np.zeros(place.shape, dtype=np.int64) + place.start
    for axis, (extent, stride) in enumerate(zip(place.shape, place.stride, strict=True)):
        at += (np.arange(extent) * stride).reshape(-1, *[1] * (len(place.shape) - axis - 1))
    first = at.ravel()
    ends = [first + offset for offset in range(0, max(place.itemsize, _WORD), _WORD)]
    return np.unique(np.concatenate(ends) // _WORD)


def _named(lane: Lane) -> str:
    return f"rank {lane[0]} lane {lane[1]}"


def systematic(logs: Sequence[Log]) -> list[Delay]:
    """Each lane of each rank late in turn, as a first run has shown them."""
    return [Delay(lane=(rank, lane)) for rank, log in enumerate(logs) for lane in log if lane != CALLER]


def hunt(pool: Ranks, case: Case, *, random_delays: int) -> Iterator[dict[str, Any]]:
    """Run a case undisturbed and delayed, and check what was done: a line for each run. verdict: "ordered", or what is not."""
    case = even(case, pool.world_size)
    first = pool.run(recorded, case, Delay())
    yield _judged(pool.world_size, case, Delay(), first)
    for delay in systematic(first) + [Delay(chance=0.3, seed=seed) for seed in range(random_delays)]:
        yield _judged(pool.world_size, case, delay, pool.run(recorded, case, delay))


def _judged(ranks: int, case: Case, delay: Delay, logs: Sequence[Log]) -> dict[str, Any]:
    replay, verdict = Replay(logs), "ordered"
    try:
        replay.check()
    except Race as race:
        verdict = str(race)
    ran = {"bench": "races", "ranks": ranks, "case": str(case), "delay": str(delay)}
    return {**ran, "accesses": replay.accesses, "verdict": verdict}


def main() -> None:
    options = Options(__doc__)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    options.add_argument("--random", type=int, default=2, help="runs with random delays, a case each")
    options.add_argument("--only", default="", help="words of operator and schedule that a case must have")
    given = options.parse_args()
    chosen = [(op, name) for op, name in calls.EVERY if set(given.only.split()) <= {op, name}]
    if not chosen:
        options.error(f"--only {given.only!r}: no operator has such a schedule")
    runs, accesses, wrong, begun = 0, 0, 0, time.monotonic()
    for ranks in given.ranks:
        with Ranks(ranks, environment={"WEFT_CACHE_DIR": ""}) as pool:
            for op, name in chosen:
                for line in hunt(pool, Case(op=op, schedule=name), random_delays=given.random):
                    runs, accesses = runs + 1, accesses + line["accesses"]
                    if line["verdict"] != "ordered":
                        wrong += 1
                        print(f"{line['case']}, {ranks} ranks, {line['delay']}: {line['verdict']}", flush=True)
                    append(given, [line])
    print(f"{runs} runs, {accesses} accesses, {wrong} out of order, {time.monotonic() - begun:.0f} s")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
