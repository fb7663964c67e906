"""The control segment of a rank: what it lets the other ranks of its group see.

Each rank owns one. All ranks of its node map it; ranks of other nodes have a copy of it (weft.comm.relay).

    word 0 ENTERED   calls that the rank has entered           word 3 STATE  running, failed, closed, or failed and notified
    word 1 CREATED   shared segments that it has created       text: two slots for what it calls, by parity of the agreement
    word 2 MAPPED    rounds of segments that it has mapped     text: why it failed; text: name of its newest segment
    words 4, 5       a number that it offers, by parity        words: what each of its last calls was, by call
    word 6 RAISED    errors since its last call, each in the
                     place of a call; the text why it failed
                     has the last one
    word 7 CAPTURED  calls that it has captured in CUDA graphs
"""

from __future__ import annotations

import mmap
import zlib

from weft.comm.shared_memory import SharedSegment

TEXT_BYTES = 4096
"""Of a text in a control segment."""
RUNNING, FAILED, CLOSED, NOTIFIED = range(4)
"""States. NOTIFIED is of a rank that has failed, or knows of a failure, and none of whose calls can end any more as if nothing
had happened."""
ENDED_BADLY = (FAILED, NOTIFIED)
AGREED = (0, 1)
"""Numbers of calls on which the ranks agreed as they entered them, by the slot of their text."""
_WORDS = 8
_ENTERED, _STATE, _OFFERED = 0, 3, 4
_FAILURE_AT, _NAME_AT, _LOG_AT = (number * TEXT_BYTES for number in (3, 4, 5))
LOGGED = 4096
"""Calls whose numbers can be read: more than a rank can be ahead of another, which is as many calls as a GPU has under way."""
NUMBERS = 1 << 24
"""A logged call is the call's position times NUMBERS, plus its number."""
CONTROL_BYTES = _LOG_AT + 8 * LOGGED
_RELAYED = 512
"""Logged calls that are relayed to other nodes: the newest."""


class _Word:
    """A word of a control segment, as an attribute."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __get__(self, control: ControlSegment, owner: object) -> int:
        return control.words.load(self._number)

    def __set__(self, control: ControlSegment, value: int) -> None:
        control.words.store(self._number, value)


class ControlSegment:
    """One rank's control segment: its own, another's, or a copy."""

    def __init__(self, segment: SharedSegment) -> None:
        self.segment = segment
        self.words, self._log = segment.view_words(0, _WORDS), segment.view_words(_LOG_AT, LOGGED)
        self.load_state = self.words.make_loader(_STATE)
        """Returns `state`. Every call asks for that of all peers."""

    @classmethod
    def private(cls) -> ControlSegment:
        """One that no other process has."""
        return cls(SharedSegment("private", mmap.mmap(-1, CONTROL_BYTES)))

    entered, created, mapped, state = _Word(_ENTERED), _Word(1), _Word(2), _Word(_STATE)
    raised = _Word(6)
    """Errors that the rank has raised since its last call, each in the place of a call."""
    captured = _Word(7)
    """Calls that the rank has captured in CUDA graphs. They are not logged, and neither are replays."""

    def publish_error_instead(self, count: int, text: str) -> None:
        """Publish that the rank has raised so many errors since its last call, the last one with this text."""
        self.segment.write_text(_FAILURE_AT, TEXT_BYTES, text)
        self.raised = count

    def create(self, name: str, rounds: int) -> None:
        """Publish a segment's name, the newest of so many."""
        self.segment.write_text(_NAME_AT, TEXT_BYTES, name)
        self.created = rounds

    @property
    def newest(self) -> str:
        """The name that was published last."""
        return self.segment.read_text(_NAME_AT, TEXT_BYTES)

    def offer(self, parity: int, text: str, number: int) -> None:
        """Publish what the rank is about to call, and a number that it gives."""
        self.segment.write_text((1 + parity) * TEXT_BYTES, TEXT_BYTES, text)
        self.words.store(_OFFERED + parity, number)

    def offered(self, parity: int) -> int:
        return self.words.load(_OFFERED + parity)

    def slot(self, parity: int) -> str:
        return self.segment.read_text((1 + parity) * TEXT_BYTES, TEXT_BYTES)

    def log(self, call: int, number: int, *, after_errors: bool = True) -> None:
        """Publish that the rank has entered a call, and what it was. after_errors: it raised errors since the one before."""
        if after_errors:
            self.raised = 0
        self._log.store(call % LOGGED, call * NUMBERS + number)
        self.words.store(_ENTERED, call)

    def number_of(self, call: int) -> int | None:
        """What a call was; None if that is no longer there."""
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
        """All words and texts, and the log's newest entries."""
        count = self.entered
        newest = b"".join(self._log.load(call % LOGGED).to_bytes(8, "little") for call in _newest(count))
        return zlib.compress(count.to_bytes(8, "little") + self.segment.read_bytes(0, _LOG_AT) + newest, 1)

    def restore(self, snapshot: bytes) -> None:
        """Take over what another one says. The words come last, since others look at them first, and the number of calls is
        that at which the log was read."""
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
