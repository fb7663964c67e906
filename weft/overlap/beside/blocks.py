"""Which way whole training steps take: blocks of consecutive steps in one way, beside blocks in the way that they had.

    steps                                   way
    (2 + COUNTED) x each way                each in turn, first the one to beat          ranks meet: the closest go on
    ROUNDS x (1 + COUNTED) x those          each in turn, last the one to beat           ranks meet: the choice

Why blocks: the host enqueues a step while the GPU is still in the one before, so a single step's time is also that of its
neighbour, and of what that left behind. A block's first step is not counted, nor a way's first two, in which copy engines are
bound and graphs captured; its time is that of the others, from the same place in one step to that in another. Why it is done
twice: of several ways that are alike the fastest looks faster than it is, so it has to be faster again, in blocks that did not
choose it. Why every block counts: where the host is the bottleneck, blocks of one way differ by 5% (fully_shard on 2 x H200),
and a median of a few does not tell 2% from nothing. So a way is chosen if its slowest block is faster than the fastest of the
way to beat.

No step waits for anything but at the two meetings. A trial of n ways takes at most `most_steps(n)` steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from weft.overlap.beside.trials import Judge, Settled
from weft.runtime.trial import MARGIN, Trial

COUNTED, ROUNDS = 3, 4
_FIRST, _AGAIN = 2, 1
"""Steps of a block that are not counted: of a way's first block, and of later ones."""
FINALISTS = 3
"""Ways that go on, beside the one to beat: those within CLOSE of it."""
CLOSE = 0.1

Turns = Generator[str, Any, Settled]
"""Yields the way of each step, is sent the mark at which the next one begins, and returns the choice."""
Span = tuple[Any, Any]
_Round = Generator[str, Any, dict[str, Span]]


def most_steps(ways: int) -> int:
    """Steps that a trial of so many ways takes at most.

    >>> most_steps(6)
    94
    """
    finals = ROUNDS * (1 + min(FINALISTS, ways - 1))
    return ways * (_FIRST + COUNTED) + finals * (_AGAIN + COUNTED) if ways > 1 else 0


def in_blocks(judge: Judge, specs: Sequence[str]) -> Turns:
    """The fastest of some ways of a step. specs: first the one to beat, which every other has to do by more than 1%."""
    base, *others = specs
    if not others:
        return Settled(key=judge.key, way=base)
    us = _us(judge, "screening", (yield from _round(specs, _FIRST)))
    near = sorted((spec for spec in others if us[spec] <= (1 + CLOSE) * us[base]), key=lambda spec: us[spec])[:FINALISTS]
    spans = []
    for _ in range(ROUNDS if near else 0):
        spans.append((yield from _round((*near, base), _AGAIN)))
    finals = [_us(judge, f"final {round_}", blocks) for round_, blocks in enumerate(spans)]
    return _settled(judge.key, specs, us, finals)


def _round(specs: Sequence[str], uncounted: int) -> _Round:
    """A block of each."""
    spans = {}
    for spec in specs:
        marks = []
        for _ in range(uncounted + COUNTED):
            marks.append((yield spec))
        spans[spec] = marks[uncounted - 1], marks[-1]
    return spans


def _us(judge: Judge, text: str, spans: Mapping[str, Span]) -> dict[str, float]:
    """A step's time in each block, on the slowest rank. Ranks meet."""
    return {spec: judge.slowest_us(f"{text}, {spec}", [span]) / COUNTED for spec, span in spans.items()}


def _settled(key: str, specs: Sequence[str], screened: Mapping[str, float], finals: Sequence[Mapping[str, float]]) -> Settled:
    """Ratios count: each block's to that of the way to beat in the same round. Times are told in that way's own."""
    base = specs[0]
    ratios = {spec: screened[spec] / screened[base] for spec in specs}
    for spec in finals[0] if finals else ():
        ratios[spec] = statistics.median(us[spec] / us[base] for us in finals)
    base_us = statistics.median(us[base] for us in finals or [screened])
    able = (spec for spec in (finals[0] if finals else ()) if ratios[spec] < 1 - MARGIN and _apart(spec, base, finals))
    way = min(able, key=lambda spec: ratios[spec], default=base)
    return Settled(key=key, way=way, trials=tuple(Trial(spec=spec, us=ratios[spec] * base_us) for spec in specs))


def _apart(spec: str, base: str, finals: Sequence[Mapping[str, float]]) -> bool:
    """Whether every block of one way is faster than any of the other."""
    return max(us[spec] for us in finals) < min(us[base] for us in finals)
