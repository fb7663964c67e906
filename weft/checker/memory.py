"""Models one buffer on one rank during the walk: the content of each part, its writer, and its readers since.

Accesses must come in an order that is consistent with happens-before. `read` and `write` raise `Conflict` unless the given
ancestors include the nodes that wrote the accessed elements and, for `write`, those that read them. Nodes are bit numbers,
ancestor sets ints. A buffer is cut into disjoint fragments. Nearly all accesses match one fragment exactly, which costs one
look-up.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.checker.content import Cells, Content
from weft.checker.program import Rect, area, overlap

Reader = tuple[int, Rect]


class Conflict(Exception):
    """An access that is not ordered after another, or a read of elements that were never written (other is None).

    aliased: an input and the result may share the memory. The access is described by the input's memory.
    """

    def __init__(
        self, memory: int, rect: Rect, node: int, other: int | None, *, wrote: bool = True, aliased: bool = False
    ) -> None:
        super().__init__(memory, rect, node, other, wrote, aliased)
        self.access, self.node, self.other, self.wrote, self.aliased = (memory, rect), node, other, wrote, aliased


class Fragment:
    """A rectangle that one node wrote, and the nodes that have read it since."""

    __slots__ = ("content", "readers", "writer")

    def __init__(self, content: Content | None, writer: int, readers: list[Reader]) -> None:
        self.content, self.writer, self.readers = content, writer, readers


class Fragments(dict[Rect, Fragment]):
    """Disjoint fragments by rectangle, with an index by rows that finds those that overlap a rectangle.

    A fragment of fewer than 2**level rows is listed under (level, top >> level), so it extends at most into the next key.
    """

    def __init__(self) -> None:
        super().__init__()
        self._listed: dict[int, dict[int, dict[Rect, None]]] = {}

    def __setitem__(self, rect: Rect, fragment: Fragment) -> None:
        level = (rect[1] - rect[0]).bit_length()
        self._listed.setdefault(level, {}).setdefault(rect[0] >> level, {})[rect] = None
        super().__setitem__(rect, fragment)

    def __delitem__(self, rect: Rect) -> None:
        super().__delitem__(rect)
        level = (rect[1] - rect[0]).bit_length()
        del self._listed[level][rect[0] >> level][rect]

    def under(self, rect: Rect) -> list[Rect]:
        """Return the fragments that `rect` overlaps."""
        top, bottom, left, right = rect
        found: list[Rect] = []
        for level, keys in self._listed.items():
            low, high = (top >> level) - 1, (bottom - 1 >> level) + 1
            near = range(low, high) if high - low < len(keys) else [key for key in keys if low <= key < high]
            for key in near:
                found += [p for p in keys.get(key, ()) if p[0] < bottom and top < p[1] and p[2] < right and left < p[3]]
        return found


class Memory:
    """The fragments of a memory. Elements outside all fragments were never written."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.fragments = Fragments()

    def read(self, rect: Rect, node: int, ancestors: int) -> Cells:
        """Return the contents of `rect` as disjoint cells."""
        exact = self.fragments.get(rect)
        if exact is not None:
            if not ancestors >> exact.writer & 1:
                raise Conflict(self.number, rect, node, exact.writer)
            exact.readers.append((node, rect))
            return [(rect, exact.content)]
        return self._read_across(rect, node, ancestors)

    def _read_across(self, rect: Rect, node: int, ancestors: int) -> Cells:
        cells: Cells = []
        missing = area(rect)
        for place in self.fragments.under(rect):
            fragment, common = self.fragments[place], overlap(place, rect)
            assert common
            if not ancestors >> fragment.writer & 1:
                raise Conflict(self.number, common, node, fragment.writer)
            fragment.readers.append((node, common))
            cells.append((common, fragment.content))
            missing -= area(common)
        if missing:
            raise Conflict(self.number, rect, node, None)
        first = cells[0][1]
        return [(rect, first)] if all(content == first for _, content in cells) else cells

    def write(self, rect: Rect, content: Content | None, node: int, ancestors: int) -> None:
        """Replace the content of `rect`."""
        exact = self.fragments.get(rect)
        if exact is None:
            for place in self.fragments.under(rect):
                self._cut(place, rect, node, ancestors)
            self.fragments[rect] = Fragment(content, node, [])
            return
        self._check_write(exact, rect, node, ancestors)
        exact.content, exact.writer, exact.readers = content, node, []

    def give_back(self, node: int, ancestors: int) -> None:
        """Record that the caller may read and write the whole memory, so no other node may access it at the same time."""
        for rect, fragment in self.fragments.items():
            self._check_write(fragment, rect, node, ancestors)
            fragment.content, fragment.writer, fragment.readers = None, node, []

    def _cut(self, place: Rect, rect: Rect, node: int, ancestors: int) -> None:
        fragment = self.fragments[place]
        del self.fragments[place]
        self._check_write(fragment, rect, node, ancestors)
        for rest in _remainders(place, rect):
            readers = [r for r in fragment.readers if overlap(r[1], rest)]
            self.fragments[rest] = Fragment(fragment.content, fragment.writer, readers)

    def _check_write(self, fragment: Fragment, rect: Rect, node: int, ancestors: int) -> None:
        if fragment.writer != node and not ancestors >> fragment.writer & 1:
            raise Conflict(self.number, rect, node, fragment.writer)
        for reader, place in fragment.readers:
            if reader != node and not ancestors >> reader & 1 and overlap(place, rect):
                raise Conflict(self.number, rect, node, reader, wrote=False)


class AlternatingMemory(Memory):
    """Memory with two places, which calls use in turn.

    nodes: the place of each node in the schedule. Its last number is the call.
    """

    def __init__(self, number: int, nodes: Sequence[Sequence[int]]) -> None:
        self.nodes, self.places = nodes, (Memory(number), Memory(number))

    def read(self, rect: Rect, node: int, ancestors: int) -> Cells:
        return self.places[self.nodes[node][-1] % 2].read(rect, node, ancestors)

    def write(self, rect: Rect, content: Content | None, node: int, ancestors: int) -> None:
        self.places[self.nodes[node][-1] % 2].write(rect, content, node, ancestors)


class Constant:
    """An input that never conflicts. The caller writes it before all lanes start, and not again until they have ended."""

    def __init__(self, content: Content) -> None:
        self.content = content

    def read(self, rect: Rect, node: int, ancestors: int) -> Cells:
        return [(rect, self.content)]


class AliasedInput:
    """An input that may share memory with the result, or a part of it.

    The caller writes it before all lanes start, and each write of the result overwrites it. No node may read an element after
    its write or at the same time, except for the node that writes it.

    alias: the row of this input that is row 0 of the result.
    """

    def __init__(self, number: int, content: Content, whole: Rect, alias: int) -> None:
        self.number, self.content, self.whole, self.alias = number, content, whole, alias
        self._readers: list[Reader] = []
        self._overwritten: list[Reader] = []

    def read(self, rect: Rect, node: int, ancestors: int) -> Cells:
        for writer, place in self._overwritten:
            common = overlap(place, rect)
            if common:
                raise Conflict(self.number, common, node, writer, aliased=True)
        self._readers.append((node, rect))
        return [(rect, self.content)]

    def place(self, out: Rect) -> Rect | None:
        """Return the rectangle of this input that shares memory with one of the result; None if there is none."""
        return overlap((out[0] + self.alias, out[1] + self.alias, out[2], out[3]), self.whole)

    def overwrite(self, rect: Rect, node: int, ancestors: int, *, by_collective: bool) -> None:
        """Record a write of `rect`. by_collective: a collective writes, which may read and write one element in any order."""
        for reader, place in self._readers:
            same = reader == node and (by_collective or place == rect)
            if not same and not ancestors >> reader & 1 and overlap(place, rect):
                raise Conflict(self.number, rect, node, reader, wrote=False, aliased=True)
        self._overwritten.append((node, rect))


def _remainders(place: Rect, rect: Rect) -> list[Rect]:
    """Return `place` without `rect`, as up to four rectangles."""
    top, bottom, left, right = place
    low, high = max(top, rect[0]), min(bottom, rect[1])
    rests = [
        (top, low, left, right),
        (high, bottom, left, right),
        (low, high, left, max(left, rect[2])),
        (low, high, min(right, rect[3]), right),
    ]
    return [r for r in rests if r[0] < r[1] and r[2] < r[3]]
