"""The checker finds the fragments of a buffer that a rectangle overlaps, looking at few others."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from weft.checker.memory import Conflict, Fragment, Fragments, Memory
from weft.checker.program import Rect


def disjoint(rng: random.Random, rows: int, cols: int) -> list[Rect]:
    """Disjoint rectangles of all heights, not in order, with gaps between them."""
    found: list[Rect] = []
    top = 0
    while top < rows:
        bottom = min(rows, top + rng.choice([1, 1, 2, 3, 7, 40]))
        cuts = sorted({0, cols, *(rng.randrange(cols) for _ in range(rng.randrange(3)))})
        found += [(top, bottom, left, right) for left, right in itertools.pairwise(cuts) if rng.random() < 0.8]
        top = bottom
    rng.shuffle(found)
    return found


def test_all_fragments_that_a_rectangle_overlaps_are_found() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        rows, cols = rng.choice([1, 17, 300]), 12
        fragments = Fragments()
        for rect in disjoint(rng, rows, cols):
            fragments[rect] = Fragment(None, 0, [])
        for rect in rng.sample(list(fragments), len(fragments) // 3):
            del fragments[rect]
        for _ in range(50):
            (top, bottom), (left, right) = (sorted(rng.sample(range(extent + 1), 2)) for extent in (rows, cols))
            naive = {f for f in fragments if f[0] < bottom and top < f[1] and f[2] < right and left < f[3]}
            found = fragments.under((top, bottom, left, right))
            assert set(found) == naive
            assert len(found) == len(naive)


WRITER, READER, CUTTER, LATER = range(4)


def after(*nodes: int) -> int:
    return sum(1 << node for node in nodes)


def cut_after_a_read() -> Memory:
    """Rows 0 to 8 were written and read; what is left of them after a write of rows 0 to 4 has the same reader."""
    memory = Memory(0)
    memory.write((0, 8, 0, 1), None, WRITER, 0)
    memory.read((0, 8, 0, 1), READER, after(WRITER))
    memory.write((0, 4, 0, 1), None, CUTTER, after(WRITER, READER))
    return memory


def test_a_fragment_that_is_cut_keeps_its_readers_and_writer() -> None:
    for ancestors, other in ((after(WRITER), READER), (after(READER), WRITER)):
        with pytest.raises(Conflict) as refused:
            cut_after_a_read().write((4, 8, 0, 1), None, LATER, ancestors)
        assert refused.value.other == other
    cut_after_a_read().write((4, 8, 0, 1), None, LATER, after(WRITER, READER))


def test_a_write_over_a_part_comes_after_who_wrote_it() -> None:
    memory = Memory(0)
    memory.write((0, 8, 0, 1), None, WRITER, 0)
    with pytest.raises(Conflict):
        memory.write((2, 4, 0, 1), None, LATER, 0)


class Looked(tuple[int, ...]):
    """A rectangle that counts how often one of its numbers is looked at."""

    looks = 0

    def __getitem__(self, at: Any) -> Any:
        Looked.looks += 1
        return super().__getitem__(at)


def test_a_few_of_many_fragments_are_looked_at() -> None:
    fragments = Fragments()
    for row in range(1000):
        fragments[Looked((row, row + 1, 0, 1))] = Fragment(None, 0, [])  # type: ignore[index]
    Looked.looks = 0
    assert fragments.under((500, 501, 0, 1)) == [(500, 501, 0, 1)]
    assert Looked.looks < 50
