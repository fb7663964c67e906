"""Fabrics: routes, and mistakes in what is asked for. test_dlrm.py has what crosses their links."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft_studies.dlrm.fabric import FatTree, Torus


def torus(*dims: int, gbps: float = 2.0, latency_ns: int = 7) -> Torus:
    return Torus(dims=dims, gbps=gbps, latency_ns=latency_ns)


def test_routes_of_a_ring_take_the_shorter_way() -> None:
    ring = torus(5)
    assert ring.path(0, 2) == (("link", 0, 1), ("link", 1, 2))
    assert ring.path(0, 3) == (("link", 0, 4), ("link", 4, 3))
    assert torus(4).path(3, 1) == (("link", 3, 0), ("link", 0, 1))


@settings(max_examples=60, deadline=None)
@given(dims=st.lists(st.integers(2, 5), min_size=1, max_size=3), data=st.data())
def test_routes_are_connected_and_shortest(dims: list[int], data: st.DataObject) -> None:
    fabric = torus(*dims)
    src, dst = data.draw(st.lists(st.integers(0, fabric.world_size - 1), min_size=2, max_size=2, unique=True))
    path = fabric.path(src, dst)
    assert (path[0][1], path[-1][2]) == (src, dst)
    assert all(before[2] == after[1] for before, after in pairwise(path))
    distance, stride = 0, 1
    for size in dims:
        ahead = (dst // stride - src // stride) % size
        distance += min(ahead, size - ahead)
        stride *= size
    assert len(path) == distance


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torus(1), r"dims is \(1,\)"),
        (lambda: torus(4, gbps=0.0), r"gbps is 0\.0"),
        (lambda: torus(2, latency_ns=-1), r"latency_ns is -1"),
        (lambda: FatTree(ranks=1, leaf=2, gbps=1.0, latency_ns=0), r"world_size is 1"),
        (lambda: torus(4).path(0, 4), r"dst is 4"),
        (lambda: torus(4).path(1, 1), r"src and dst are both 1"),
    ],
)
def test_mistakes_are_named(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
