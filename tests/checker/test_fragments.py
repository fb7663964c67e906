"""The checker finds the fragments of a buffer that a rectangle overlaps, looking at few others."""

from __future__ import annotations

import itertools
import random
from typing import Any

from weft.checker.memory import Fragment, Fragments
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
