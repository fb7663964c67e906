"""The control segment of a rank, in which it publishes its calls and its state for the other ranks of its group.

Each rank owns one. All ranks of its node map it; ranks of other nodes have a copy of it, by a Relay.

    word 0 ENTERED   calls that the rank has entered           word 3 STATE  running, failed, closed, or failed and notified
    word 1 CREATED   shared segments that it has created       text: two slots for its calls' texts, by parity of the agreement
    word 2 MAPPED    rounds of segments that it has mapped     text: why it failed; text: name of its newest segment
    words 4, 5       a number that it offers, by parity        words: the number of each of its last calls, by call
    word 6 RAISED    errors since its last call, each raised
                     instead of a call; the text why it failed
                     has the last one
    word 7 CAPTURED  calls that it has captured in CUDA graphs
    word 8 ALARM     set by a peer that has failed, so that this rank need not read the states of all peers in each call

A Relay exchanges control segments between nodes through the process group's store.

Ranks of one node map each other's control segments (weft.comm.rank_group). For each rank of another node, this process has a
private copy of its segment: `publish` puts this rank's segment into the store, and `refresh` updates the copies. So code that
reads a control segment need not know on which node its rank runs.

    rank 0, node 0                    store                 rank 2, node 1
    own segment --publish-->          "0": snapshot         --refresh--> copy of rank 0's
    copy of rank 2's <--refresh--     "2": snapshot         <--publish-- own segment

A thread publishes four times a second, whatever its rank does. So a rank that publishes nothing new for many seconds
(`silent_s`) is lost. If a rank of this node dies, the thread publishes that in its place.

The relay has its own connection to the store, and only reads keys that exist, so no request waits for long.
"""

from __future__ import annotations

import mmap
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from weft.comm.shared_memory import SharedSegment

TEXT_BYTES = 4096
"""The size of a text in a control segment."""
RUNNING, FAILED, CLOSED, NOTIFIED = range(4)
"""The states. NOTIFIED is the state of a rank that has failed, or knows of a failure, once all of its calls report that."""
ENDED_BADLY = (FAILED, NOTIFIED)
AGREED = (0, 1)
"""The numbers of calls on which the ranks agreed as they entered them, by the slot of their text."""
_WORDS = 9
_ENTERED, _STATE, _OFFERED, _ALARM = 0, 3, 4, 8
_FAILURE_AT, _NAME_AT, _LOG_AT = (number * TEXT_BYTES for number in (3, 4, 5))
LOGGED = 4096
"""The number of calls that stay in the log. It is larger than the number of calls that a GPU has enqueued, which is the most
that a rank can be ahead of another one."""
NUMBERS = 1 << 24
"""A logged call is the call's position times NUMBERS, plus its number."""
CONTROL_BYTES = _LOG_AT + 8 * LOGGED
_RELAYED = 512
"""The number of logged calls, the newest ones, that are relayed to other nodes."""


class _Word:
    """An attribute that reads and writes a word of a control segment."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __get__(self, control: ControlSegment, owner: object) -> int:
        return control.words.load(self._number)

    def __set__(self, control: ControlSegment, value: int) -> None:
        control.words.store(self._number, value)


class ControlSegment:
    """A rank's control segment: this rank's, another's, or a copy."""

    def __init__(self, segment: SharedSegment) -> None:
        self.segment = segment
        self.words, self._log = segment.view_words(0, _WORDS), segment.view_words(_LOG_AT, LOGGED)
        self.load_alarm = self.words.make_loader(_ALARM)
        """Returns `alarm`. Every call reads it, so it has a fast loader."""
        self.fast_log = (*self._log.store_at, *self.words.store_at)
        """The functions, and their orders, with which `RankGroup.log_agreed_call` does as `log` in a single frame."""

    @classmethod
    def private(cls) -> ControlSegment:
        """Return a segment that no other process maps."""
        return cls(SharedSegment("private", mmap.mmap(-1, CONTROL_BYTES)))

    def copy(self) -> ControlSegment:
        """Return a copy that no other process maps."""
        made = ControlSegment.private()
        made.segment.write_bytes(0, self.segment.read_bytes(0, CONTROL_BYTES))
        return made

    entered, created, mapped, state = _Word(_ENTERED), _Word(1), _Word(2), _Word(_STATE)
    raised = _Word(6)
    """The number of errors that the rank has raised instead of calls since its last call."""
    captured = _Word(7)
    """The number of calls that the rank has captured in CUDA graphs. Neither these calls nor their replays are logged."""
    alarm = _Word(_ALARM)
    """1 once a peer has failed, else 0."""

    def publish_error_instead(self, count: int, text: str) -> None:
        """Publish the number of errors that the rank has raised since its last call, and the text of the last one."""
        self.segment.write_text(_FAILURE_AT, TEXT_BYTES, text)
        self.raised = count

    def create(self, name: str, rounds: int) -> None:
        """Publish the name of the newest segment, and the number of segments so far."""
        self.segment.write_text(_NAME_AT, TEXT_BYTES, name)
        self.created = rounds

    @property
    def newest(self) -> str:
        """Return the name that was published last."""
        return self.segment.read_text(_NAME_AT, TEXT_BYTES)

    def offer(self, parity: int, text: str, number: int) -> None:
        """Publish the text of the rank's next call, and a number that it offers."""
        self.segment.write_text((1 + parity) * TEXT_BYTES, TEXT_BYTES, text)
        self.words.store(_OFFERED + parity, number)

    def offered(self, parity: int) -> int:
        return self.words.load(_OFFERED + parity)

    def slot(self, parity: int) -> str:
        return self.segment.read_text((1 + parity) * TEXT_BYTES, TEXT_BYTES)

    def log(self, call: int, number: int, *, after_errors: bool = True) -> None:
        """Publish that the rank has entered a call, and the call's number.

        after_errors: the rank may have raised errors since its previous call.
        """
        if after_errors:
            self.raised = 0
        self._log.store(call % LOGGED, call * NUMBERS + number)
        self.words.store(_ENTERED, call)

    def number_of(self, call: int) -> int | None:
        """Return the number of a call, or None if the log no longer has it."""
        logged, number = divmod(self._log.load(call % LOGGED), NUMBERS)
        return number if logged == call else None

    @property
    def failure(self) -> str:
        return self.segment.read_text(_FAILURE_AT, TEXT_BYTES)

    def fail(self, text: str) -> None:
        """Publish that the rank has failed, and why."""
        self.segment.write_text(_FAILURE_AT, TEXT_BYTES, text)
        self.state = FAILED

    def snapshot(self) -> bytes:
        """Return all words and texts, and the log's newest entries, compressed."""
        count = self.entered
        newest = b"".join(self._log.load(call % LOGGED).to_bytes(8, "little") for call in _newest(count))
        return zlib.compress(count.to_bytes(8, "little") + self.segment.read_bytes(0, _LOG_AT) + newest, 1)

    def restore(self, snapshot: bytes) -> None:
        """Replace the content by that of a snapshot.

        The words are written last, because readers look at them first. The number of calls is the one at which the log was
        read.
        """
        data = zlib.decompress(snapshot)
        count, data = int.from_bytes(data[:8], "little"), data[:8] + data[16:]
        for place, call in enumerate(_newest(count)):
            at = _LOG_AT + 8 * place
            self._log.store(call % LOGGED, int.from_bytes(data[at : at + 8], "little"))
        self.segment.write_bytes(TEXT_BYTES, data[TEXT_BYTES:_LOG_AT])
        for word in reversed(range(_WORDS)):
            self.words.store(word, int.from_bytes(data[8 * word : 8 * word + 8], "little"))


def _newest(count: int) -> range:
    return range(max(1, count - _RELAYED + 1), count + 1)


_BEAT_S = 0.25
_LEAST_S = 1e-3
"""The shortest time between two reads of the store."""
_BEAT_BYTES = 8
_LAST_BEAT = 2**63
"""The beat count in the snapshot that is published for a dead rank."""


class Relay:
    """A Relay publishes one rank's control segment and reads those of other nodes. Collective.

    store: a store that only this relay uses.
    own: this rank's segment.
    copies: for each rank of another node, the copy of its segment.
    death_notices: for each other rank of this node, a function that returns the segment to publish once its process has died.
    timeout_s: the bound of the start, and of each request to the store.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        own: ControlSegment,
        copies: Mapping[int, ControlSegment],
        death_notices: Mapping[int, Callable[[], ControlSegment | None]],
        timeout_s: float,
    ) -> None:
        self._rank, self._own = rank, own
        self._copies, self._death_notices = copies, dict(death_notices)
        self._store = store
        self._store.set_timeout(timedelta(seconds=timeout_s))
        self._beat = 0
        self._seen = {far: (b"", time.monotonic()) for far in copies}
        self._looked = 0.0
        self._publishing, self._refreshing = threading.Lock(), threading.Lock()
        self._stop = threading.Event()
        self.publish()
        self._store.wait([str(far) for far in copies], timedelta(seconds=timeout_s))
        self.refresh()
        self._thread = threading.Thread(target=self._keep_publishing, name=f"weft-relay-{rank}", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        """Publish the current content of this rank's segment to other nodes."""
        with self._publishing:
            self._beat += 1
            self._put(self._rank, self._beat, self._own)

    def _put(self, rank: int, beat: int, control: ControlSegment) -> None:
        self._store.set(str(rank), beat.to_bytes(_BEAT_BYTES, "little") + control.snapshot())

    def refresh(self) -> None:
        """Update the copies, unless they were updated just now, or another thread is updating them."""
        if time.monotonic() - self._looked < _LEAST_S or not self._refreshing.acquire(blocking=False):
            return
        try:
            for far, snapshot in zip(self._copies, self._get([str(far) for far in self._copies]), strict=True):
                if snapshot != self._seen[far][0]:
                    self._seen[far] = snapshot, time.monotonic()
                    self._copies[far].restore(snapshot[_BEAT_BYTES:])
                    if self._copies[far].state in ENDED_BADLY:  # a rank of another node cannot raise this rank's alarm
                        self._own.alarm = 1
            self._looked = time.monotonic()
        finally:
            self._refreshing.release()

    def _get(self, keys: Sequence[str]) -> list[bytes]:
        if self._store.has_extended_api():
            return list(self._store.multi_get(list(keys)))
        return [self._store.get(key) for key in keys]

    def silent_s(self, far: int) -> float:
        """Return for how many seconds a rank has published nothing new, as of the last read."""
        return self._looked - self._seen[far][1]

    def _keep_publishing(self) -> None:
        while not self._stop.wait(_BEAT_S):
            try:
                self.publish()
                self._publish_deaths()
            except RuntimeError:
                # A group whose store is lost cannot continue. A rank that waits for a peer gets the error from `refresh`.
                return

    def _publish_deaths(self) -> None:
        for rank, make_notice in list(self._death_notices.items()):
            notice = make_notice()
            if notice is not None:
                self._put(rank, _LAST_BEAT, notice)
                del self._death_notices[rank]

    def close(self) -> None:
        """End the thread, and publish for the last time."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        try:
            self.publish()
        except RuntimeError:
            return  # the store is gone already, with its process
