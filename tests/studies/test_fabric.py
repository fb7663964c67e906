"""Fabrics: routes, shared links, and collectives made of sends, which take what closed forms say and deliver everything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.studies.fabric import Fabric, Hosts, Mesh, Send, Switch, Torus, deliver
from weft.studies.fabric import collectives as c

SIZE, GBPS, LATENCY = 1000, 2.0, 7
CHUNK = SIZE / GBPS


def torus(*dims: int, gbps: float = GBPS) -> Torus:
    return Torus(dims=dims, gbps=gbps, latency_ns=LATENCY)


def mesh(ranks: int) -> Mesh:
    return Mesh(ranks=ranks, gbps=GBPS, latency_ns=LATENCY)


def switch(ranks: int) -> Switch:
    return Switch(ranks=ranks, gbps=GBPS, latency_ns=LATENCY)


def hosts(inside: Fabric, count: int, sharing: int = 1, gbps: float = GBPS / 2) -> Hosts:
    return Hosts(inside=inside, hosts=count, gbps=gbps, latency_ns=100, sharing=sharing)


def end(fabric: Fabric, sends: Sequence[Send]) -> int:
    return max(deliver(fabric, sends))


# Routes


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


def test_routes_between_hosts_go_through_adapters() -> None:
    fabric = hosts(mesh(4), 2, sharing=2)
    assert fabric.path(1, 3) == (("host", 0, ("link", 1, 3)),)
    assert fabric.path(5, 7) == (("host", 1, ("link", 1, 3)),)
    assert fabric.path(1, 6) == (("adapter out", 0), ("adapter in", 3))
    assert [fabric.rate(link) for link in (fabric.path(1, 3)[0], fabric.path(1, 6)[0])] == [GBPS, GBPS / 2]


# Single messages


def test_a_message_pays_every_hop() -> None:
    """Its bytes once, since it streams through; the latency at each hop."""
    assert end(torus(8), [Send(src=0, dst=3, size=SIZE)]) == CHUNK + 3 * LATENCY
    assert end(switch(8), [Send(src=0, dst=3, size=SIZE)]) == CHUNK + LATENCY
    assert end(hosts(mesh(2), 2), [Send(src=0, dst=3, size=SIZE)]) == 2 * CHUNK + 100


def test_messages_share_links() -> None:
    """Two over link 1-2 of a ring, one of which goes on: both take twice as long; a third elsewhere does not."""
    sends = [Send(src=0, dst=2, size=SIZE), Send(src=1, dst=2, size=SIZE), Send(src=4, dst=5, size=SIZE)]
    assert deliver(torus(8), sends) == (2 * CHUNK + 2 * LATENCY, 2 * CHUNK + LATENCY, CHUNK + LATENCY)


def test_a_message_waits_for_others_to_arrive() -> None:
    sends = [Send(src=0, dst=1, size=SIZE), Send(src=1, dst=2, size=SIZE, after=(0,)), Send(src=2, dst=3, size=0, after=(1, 0))]
    first = CHUNK + LATENCY
    assert deliver(mesh(4), sends) == (first, 2 * first, 2 * first + LATENCY)


def test_ranks_share_an_adapter() -> None:
    """Four ranks of a host send to the other host, over four adapters, two, and one."""
    sends = [Send(src=rank, dst=rank + 4, size=SIZE) for rank in range(4)]
    assert [end(hosts(mesh(4), 2, sharing), sends) for sharing in (1, 2, 4)] == [2 * CHUNK * n + 100 for n in (1, 2, 4)]


# Closed forms


@pytest.mark.parametrize("world_size", [2, 5])
def test_ring(world_size: int) -> None:
    expected = (world_size - 1) * (CHUNK + LATENCY)
    assert end(torus(world_size), c.ring_all_gather(range(world_size), SIZE)) == expected
    assert end(torus(world_size), c.ring_reduce_scatter(range(world_size), SIZE)) == expected
    assert end(switch(world_size), c.ring_all_gather(range(world_size), SIZE)) == expected


@pytest.mark.parametrize("world_size", [2, 5])
def test_direct(world_size: int) -> None:
    for sends in (c.direct_all_gather(world_size, SIZE), c.all_to_all(world_size, SIZE)):
        assert end(mesh(world_size), sends) == CHUNK + LATENCY
        assert end(switch(world_size), sends) == (world_size - 1) * CHUNK + LATENCY


@pytest.mark.parametrize("dims", [(4,), (2, 3, 4)])
def test_torus(dims: tuple[int, ...]) -> None:
    gathered = [math.prod(dims[:axis]) for axis in range(len(dims))]
    expected = sum((d - 1) * (parts * CHUNK + LATENCY) for d, parts in zip(dims, gathered, strict=True))
    assert end(torus(*dims), c.torus_all_gather(dims, SIZE)) == expected


@pytest.mark.parametrize("world_size", [2, 8])
def test_doubling(world_size: int) -> None:
    expected = (world_size - 1) * CHUNK + math.log2(world_size) * LATENCY
    assert end(switch(world_size), c.doubling_all_gather(world_size, SIZE)) == expected


def test_hosts() -> None:
    """Three hops between four hosts at half the rate, then four chunks at once to each of a host's others."""
    expected = 3 * (2 * CHUNK + 100) + 4 * CHUNK + LATENCY
    assert end(hosts(mesh(4), 4), c.hosts_all_gather(4, 4, SIZE)) == expected
    flat = end(hosts(mesh(4), 4), c.direct_all_gather(16, SIZE))
    assert flat > expected


@pytest.mark.parametrize("world_size", [7])
def test_all_to_all_on_an_odd_ring(world_size: int) -> None:
    """Each link carries 1 + 2 + .. + (N - 1) / 2 chunks each way, all at once; the farthest message has the most hops."""
    far = (world_size - 1) // 2
    assert end(torus(world_size), c.all_to_all(world_size, SIZE)) == pytest.approx(
        far * (far + 1) / 2 * CHUNK + far * LATENCY, rel=0.01
    )


@pytest.mark.parametrize("world_size", [4])
def test_faster_links_are_never_slower(world_size: int) -> None:
    for sends in (c.all_to_all(world_size, SIZE), c.ring_reduce_scatter(range(world_size), SIZE)):
        times = [end(torus(world_size, gbps=gbps), sends) for gbps in (0.5, 1.0, 2.0, 64.0)]
        assert times == sorted(set(times), reverse=True)


# What arrives


def gathered(world_size: int, sends: Sequence[Send]) -> list[set[int]]:
    """What each rank has in the end. It sends its own and what has arrived by what it waits for, and gets nothing twice."""
    before: list[dict[int, set[int]]] = []
    final = [{rank} for rank in range(world_size)]
    for send in sends:
        has = {send.src}.union(*(before[number].get(send.src, set()) for number in send.after))
        assert set(send.chunks) <= has
        assert not set(send.chunks) & final[send.dst]
        final[send.dst] |= set(send.chunks)
        known = {send.dst: set(send.chunks)}
        before.append(known)
    return final


GATHERS = {
    "ring in another order": lambda: (5, c.ring_all_gather((3, 0, 4, 1, 2), SIZE)),
    "torus": lambda: (24, c.torus_all_gather((2, 3, 4), SIZE)),
    "doubling": lambda: (8, c.doubling_all_gather(8, SIZE)),
    "hosts": lambda: (12, c.hosts_all_gather(3, 4, SIZE)),
    "one host": lambda: (4, c.hosts_all_gather(1, 4, SIZE)),
}


@pytest.mark.parametrize("name", GATHERS)
def test_everybody_gets_everything_once(name: str) -> None:
    world_size, sends = GATHERS[name]()
    assert gathered(world_size, sends) == [set(range(world_size))] * world_size
    assert sum(send.size for send in sends) == world_size * (world_size - 1) * SIZE


def test_a_reduce_scatter_sums_each_part_once() -> None:
    """By rank and chunk, whose parts are in its sum: each send adds parts that were not there."""
    order = (2, 0, 3, 1)
    sums = {(rank, chunk): {rank} for rank in order for chunk in order}
    for send in c.ring_reduce_scatter(order, SIZE):
        (chunk,) = send.chunks
        assert not sums[send.src, chunk] & sums[send.dst, chunk]
        sums[send.dst, chunk] |= sums[send.src, chunk]
    assert all(sums[rank, rank] == set(order) for rank in order)


def test_all_to_all_has_every_pair() -> None:
    sends = c.all_to_all(5, SIZE)
    assert sorted(chunk for send in sends for chunk in send.chunks) == [s * 5 + d for s in range(5) for d in range(5) if s != d]
    assert all(send.chunks == (send.src * 5 + send.dst,) for send in sends)


# Mistakes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torus(1), r"dims is \(1,\)"),
        (lambda: torus(4, gbps=0.0), r"gbps is 0\.0"),
        (lambda: mesh(1), r"world_size is 1"),
        (lambda: Mesh(ranks=2, gbps=1.0, latency_ns=-1), r"latency_ns is -1"),
        (lambda: hosts(mesh(4), 1), r"hosts is 1"),
        (lambda: hosts(mesh(4), 2, sharing=3), r"sharing is 3"),
        (lambda: mesh(4).path(0, 4), r"dst is 4"),
        (lambda: switch(4).path(1, 1), r"src and dst are both 1"),
        (lambda: deliver(mesh(4), [Send(src=0, dst=1, size=-1)]), r"size of send 0 is -1"),
        (lambda: deliver(mesh(4), [Send(src=0, dst=1, size=1, after=(0,))]), r"after of send 0 is \(0,\)"),
        (lambda: c.ring_reduce_scatter([0, 1, 0], SIZE), r"order has 3 ranks, 2 of them different"),
        (lambda: c.doubling_all_gather(6, SIZE), r"world_size is 6"),
    ],
)
def test_mistakes_are_named(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
