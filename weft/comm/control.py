"""The control segment of a rank, in which it publishes its calls and its state for the other ranks of its group.

Each rank owns one. All ranks of its node map it; ranks of other nodes have a copy of it (weft.comm.relay).

    word 0 ENTERED   calls that the rank has entered           word 3 STATE  running, failed, closed, or failed and notified
    word 1 CREATED   shared segments that it has created       text: two slots for its calls' texts, by parity of the agreement
    word 2 MAPPED    rounds of segments that it has mapped     text: why it failed; text: name of its newest segment
    words 4, 5       a number that it offers, by parity        words: the number of each of its last calls, by call
    word 6 RAISED    errors since its last call, each raised
                     instead of a call; the text why it failed
                     has the last one
    word 7 CAPTURED  calls that it has captured in CUDA graphs
    word 8 ALARM     set by a peer that has failed, so that this rank need not read the states of all peers in each call
"""

from __future__ import annotations

import mmap
import zlib

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
