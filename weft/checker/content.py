"""Symbolic content: the elements of the problem's matrices that a rectangle of memory holds. Pure functions on small tuples.

A content describes element (i, j) of its buffer by a displacement, so cutting a rectangle does not change it:

    ("A", dr, dc)               A[i + dr, j + dc] of the global A; "B" and "X" are the same for B and X, and "X^T" for the
                                transpose of X; "P" is the pooled result of a lookup
    ("AB", dr, dc, ks, div)     the sum over k in ks of A[i + dr, k] * B[k, j + dc], divided by div
    ("XA", dr, dc, ks, div)     the same of X^T and A, which are gradients of weights
    ("N", dr, dc, sum)          the norm of row i + dr of a sum, times the norm's weight of column j + dc; `sum` has its kind,
                                ks and div. "W" is that weight
    ("?", why)                  a value that no result may hold

Each addend of a result counts as one more k, in the range ADDED. If one row is added to every row, its dr is None. Any other
row that is copied to several rows becomes "?".

ks is a tuple of disjoint, sorted, merged ranges, in which each k occurs once. An empty sum is ZERO in any buffer.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

from weft.checker.program import Rect, overlap

Content = tuple[Any, ...]
Cells = list[tuple[Rect, Any]]
"""Disjoint rectangles and their contents."""

Ranges = tuple[tuple[int, int], ...]
ZERO: Content = ("AB", 0, 0, (), 1)
SUMS = {"AB": "A @ B", "XA": "X^T @ A"}
"""The contents that are sums, as texts."""
_PRODUCTS = {("A", "B"): "AB", ("X^T", "A"): "XA"}
ADDED: dict[str, tuple[int, int]] = {"bias": (-2, -1), "residual": (-4, -3)}
"""The ranges of addends are below every k, with gaps between them, so that no two merge."""


def moved(cells: Cells, src: Rect, dst: Rect) -> Cells:
    """Return the cells of `src` after a copy to `dst`."""
    down, right = dst[0] - src[0], dst[2] - src[2]
    if src[1] - src[0] == 1 < dst[1] - dst[0]:
        return [((dst[0], dst[1], r[2] + right, r[3] + right), _for_all(_displaced(c, down, right))) for r, c in cells]
    if not (down or right):
        return cells
    return [((r[0] + down, r[1] + down, r[2] + right, r[3] + right), _displaced(c, down, right)) for r, c in cells]


def _displaced(content: Content, down: int, right: int) -> Content:
    if content[0] == "?" or content == ZERO:
        return content
    rows = None if content[1] is None else content[1] - down
    return (content[0], rows, content[2] - right, *content[3:])


def _for_all(content: Content) -> Content:
    """Return the content of rows to which one row was copied. All rows then hold the same values."""
    if content[0] == "?" or content == ZERO or content[1] is None:
        return content
    return ("?", "one row of a matrix, the same for all rows")


def add(one: Content, two: Content) -> Content:
    """Return the sum of two contents, element by element."""
    if one == ZERO or two == ZERO:
        return two if one == ZERO else one
    if one[0] == "?" or two[0] == "?":
        return one if one[0] == "?" else two
    if one[0] not in SUMS or two[0] != one[0]:
        return ("?", "a sum of inputs")
    if one[1] is None:
        one, two = two, one
    rows = one[1] if two[1] is None else two[1]
    if (one[1], one[2]) != (rows, two[2]) or one[4] != two[4]:
        return ("?", f"a sum of different elements: {describe(one)} and {describe(two)}")
    union = _union(one[3], two[3])
    return ("?", f"K summed twice: {describe(one)} and {describe(two)}") if union is None else (*one[:3], union, one[4])


@lru_cache(maxsize=4096)
def _union(one: Ranges, two: Ranges) -> Ranges | None:
    """Return the union of two sets of ranges, or None if they overlap."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(one + two):
        if merged and low < merged[-1][1]:
            return None
        if merged and low == merged[-1][1]:
            merged[-1] = (merged[-1][0], high)
        else:
            merged.append((low, high))
    return tuple(merged)


def divided(cells: Cells, by: int) -> Cells:
    """Divide all contents."""
    return cells if by == 1 else [(rect, _divided(content, by)) for rect, content in cells]


def _divided(content: Content, by: int) -> Content:
    if content == ZERO or content[0] == "?":
        return content
    return (*content[:4], content[4] * by) if content[0] in SUMS else ("?", "an input, divided")


def total(sums: list[Cells]) -> Cells:
    """Add up overlapping cells."""
    cells = sums[0]
    for more in sums[1:]:
        cells = added(cells, more)
    return cells


def added(one: Cells, two: Cells) -> Cells:
    """Return the sum of two sets of cells of the same rectangle."""
    if len(one) == 1 == len(two):
        return [(one[0][0], add(one[0][1], two[0][1]))]
    common = [(overlap(r, s), add(c, d)) for r, c in one for s, d in two]
    return [(rect, content) for rect, content in common if rect]


def product(a: tuple[Rect, Cells], b: tuple[Rect, Cells], out: Rect) -> Cells:
    """Return the cells that a matmul of two rectangles writes to `out`."""
    (a_rect, a_cells), (b_rect, b_cells) = a, b
    if len(a_cells) == 1 == len(b_cells):
        return [(out, _term(a_rect, a_cells[0], b_rect, b_cells[0], out))]
    cells: Cells = []
    for rows in _bands([r for r, _ in a_cells], 0):
        for cols in _bands([r for r, _ in b_cells], 2):
            place = (out[0] + rows[0] - a_rect[0], out[0] + rows[1] - a_rect[0])
            across = (out[2] + cols[0] - b_rect[2], out[2] + cols[1] - b_rect[2])
            left = [(r, c) for r, c in a_cells if r[0] <= rows[0] < r[1]]
            right = [(r, c) for r, c in b_cells if r[2] <= cols[0] < r[3]]
            content = ZERO
            for one in left:
                for two in right:
                    content = add(content, _term(a_rect, one, b_rect, two, out))
            cells.append(((*place, *across), content))
    return cells


def transposed(of: tuple[Rect, Cells]) -> tuple[Rect, Cells]:
    """Return the transpose of a rectangle and its cells."""
    rect, cells = of
    return (*rect[2:], *rect[:2]), [((*r[2:], *r[:2]), _transposed(content)) for r, content in cells]


def _transposed(content: Content) -> Content:
    if content[0] == "?":
        return content
    return ("X^T", content[2], content[1]) if content[0] == "X" else ("?", f"the transpose of {describe(content)}")


def normalised(src: tuple[Rect, Cells], weight: tuple[Rect, Cells], out: Rect) -> Cells:
    """Return the cells that a norm of whole rows writes to `out`. A row must be one sum, from its first column to its last."""
    (rect, cells), (weight_rect, weights) = src, weight
    down, right = rect[0] - out[0], rect[2] - out[2]
    found: Cells = []
    for top, bottom in _bands([r for r, _ in cells], 0):
        first, *others = {content for r, content in cells if r[0] <= top < r[1]}
        if any(content[0] != "W" or content[2] + weight_rect[2] for _, content in weights):
            content: Content = ("?", "a norm times something else than its weight")
        elif others or first[0] not in SUMS or first[1] is None or first[2] + rect[2]:
            content = ("?", f"a norm of rows that are not whole rows of one sum: {describe(first)}")
        else:
            content = ("N", first[1] + down, first[2] + right, (first[0], *first[3:]))
        found.append(((top - down, bottom - down, out[2], out[3]), content))
    return found


def _bands(rects: list[Rect], at: int) -> list[tuple[int, int]]:
    """Return the ranges between neighbouring edges of the rectangles: of rows (at=0) or columns (at=2)."""
    edges = sorted({r[at] for r in rects} | {r[at + 1] for r in rects})
    return list(pairwise(edges))


def _term(a_rect: Rect, a: tuple[Rect, Content], b_rect: Rect, b: tuple[Rect, Content], out: Rect) -> Content:
    """Return the part of a product that two cells contribute, or ZERO if they have no k in common."""
    (ra, ca), (rb, cb) = a, b
    low = max(ra[2] - a_rect[2], rb[0] - b_rect[0])
    high = min(ra[3] - a_rect[2], rb[1] - b_rect[0])
    if low >= high or ca == ZERO or cb == ZERO:
        return ZERO
    name = _PRODUCTS.get((ca[0], cb[0]))
    if name is None:
        return ca if ca[0] == "?" else cb if cb[0] == "?" else ("?", f"a product of {describe(ca)} and {describe(cb)}")
    first = low + a_rect[2] + ca[2]
    if first != low + b_rect[0] + cb[1]:
        return ("?", f"a product of columns of {ca[0]} with other rows of {cb[0]}: {describe(ca)} and {describe(cb)}")
    return (name, ca[1] + a_rect[0] - out[0], cb[2] + b_rect[2] - out[2], ((first, first + high - low),), 1)


def describe(content: Content | None, rect: Rect = (0, 1, 0, 1)) -> str:
    """Return the text of a content for an element range of its buffer."""
    if not content or content[0] == "?":
        return content[1] if content else "nothing"
    if content[0] == "N":
        return f"the norm of {describe((content[3][0], *content[1:3], *content[3][1:]), rect)}"
    down = 0 if content[1] is None else content[1]
    rows = f"{rect[0] + down}:{rect[1] + down}, {rect[2] + content[2]}:{rect[3] + content[2]}"
    if content[0] not in SUMS:
        return f"{content[0]}[{rows}]"
    names = {span: name for name, span in ADDED.items()}
    ranges = " and ".join(names.get(span, f"{span[0]}:{span[1]}") for span in reversed(content[3])) or "nothing"
    return f"({SUMS[content[0]]})[{rows}] over K of {ranges}" + (f", divided by {content[4]}" if content[4] != 1 else "")
