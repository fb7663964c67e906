"""DLRM at scale, its mechanisms: one node stands for all exactly, closed forms, conservation, and stories event by event."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest
import simpy
from dlrm_tiny import Everybody, OnePort, run_all, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.machine import load as load_machine
from weft_studies.dlrm import kernels
from weft_studies.dlrm.fabric import FatTree, Symmetric, SymmetricFabric, Torus, fabric, routes, torus_dims
from weft_studies.dlrm.iteration import METHODS, IterationRun, Method, NodeNetwork, buckets, operator_ns, run
from weft_studies.dlrm.system import DlrmSystem, Topology, load
from weft_studies.profile import changed

LATENCY = 7


def torus(*dims: int) -> Torus:
    return Torus(dims=dims, gbps=2.0, latency_ns=LATENCY)


def tree(ranks: int, leaf: int, taper: float = 1.0) -> FatTree:
    return FatTree(ranks=ranks, leaf=leaf, taper=taper, gbps=2.0, latency_ns=LATENCY)


def exchanged(on: SymmetricFabric, size: float) -> int:
    links = Symmetric(simpy.Environment(), on)
    links.env.run(until=links.all_to_all(size))
    return int(links.env.now)


def exchanged_by_all(on: SymmetricFabric, size: float) -> int:
    """The same with every message over every link."""
    everybody = Everybody(on)
    arrived = [OnePort(everybody, rank).all_to_all(size) for rank in range(on.world_size)]
    everybody.env.run(until=everybody.env.all_of(arrived))
    return int(everybody.env.now)


def with_slices(system: DlrmSystem, slices: int) -> DlrmSystem:
    return dataclasses.replace(system, fused=dataclasses.replace(system.fused, slices=slices))


# One node for all


FABRICS = [torus(5), torus(8), torus(4, 4), torus(3, 5), torus(2, 2, 4), torus(8, 8), tree(8, 8), tree(16, 4, 2.0), tree(24, 4)]


@pytest.mark.parametrize("on", FABRICS, ids=str)
def test_an_exchange_of_one_node_is_that_of_all(on: SymmetricFabric) -> None:
    assert exchanged(on, 1000) == exchanged_by_all(on, 1000)


@pytest.mark.parametrize(
    ("topology", "nodes", "method"),
    [
        ("torus_2d", 8, "unfused"),
        ("torus_2d", 8, "fused"),
        ("torus_3d", 16, "fused"),
        ("fat_tree", 8, "fused"),
    ],
)
def test_iterations_of_one_node_are_those_of_all(topology: Topology, nodes: int, method: Method) -> None:
    """Every event of every node at the same nanosecond, every link of a kind with the same bytes. What is sent is received."""
    system = with_slices(load(), 2)
    if topology == "fat_tree":
        system = changed(changed(system, "tree.leaf", 4), "tree.taper", 2.0)
    on = fabric(system, topology, nodes)
    one = run(system, on, method, 2)
    every, everybody = run_all(system, on, method, 2)
    assert all((node.log, node.spans, node.ns) == (one.log, one.spans, one.ns) for node in every)
    for link, usage in everybody.links.usage.items():
        assert usage.bytes == pytest.approx(one.usage[on.kind(link)].bytes, rel=1e-9)
        assert usage.peak_gbps == pytest.approx(one.usage[on.kind(link)].peak_gbps)
        assert usage.peak_gbps <= on.rate(link) * (1 + 1e-9)
    assert everybody.sent == pytest.approx(everybody.received)
    assert len(everybody.sent) == nodes


def test_kinds_have_as_many_links_as_they_say() -> None:
    for on in FABRICS:
        pairs = [(src, dst) for src in range(on.world_size) for dst in range(on.world_size) if src != dst]
        kinds: dict[object, set[object]] = {}
        for src, dst in pairs:
            for link in on.path(src, dst):
                kinds.setdefault(on.kind(link), set()).add(link)
        assert {kind: len(links) for kind, links in kinds.items()} == {kind: on.count(kind) for kind in kinds}  # type: ignore[arg-type]


def test_routes_of_a_ring_of_six() -> None:
    """Upwards 1 + 2 + 3 hops, downwards 2 + 1; the latency is that of the farthest."""
    up, down = routes(torus(6), range(1, 6))
    assert (up.load, up.delay_ns) == (((("axis", 0, 1), 6),), 3 * LATENCY)
    assert (down.load, down.delay_ns) == (((("axis", 0, -1), 3),), 2 * LATENCY)


# Closed forms


@pytest.mark.parametrize("length", [3, 9])
def test_all_to_all_on_odd_tori_is_bisection(length: int) -> None:
    """Each link of a d x d torus carries d (d^2 - 1) / 8 messages, all at once; the farthest one has d - 1 hops."""
    on = torus(length, length)
    expected = length * (length**2 - 1) / 8 * 1000 / 2.0 + (length - 1) * LATENCY
    assert exchanged(on, 1000) == pytest.approx(expected, abs=LATENCY * length)


@pytest.mark.parametrize("dims", [(4, 4), (4, 8), (4, 4, 8)])
def test_all_to_all_on_even_tori(dims: tuple[int, ...]) -> None:
    """Never faster than half of all messages over the 2 N / d links each way across the middle of the longest axis, d: that is
    N d / 8 a link. Slower by 2 / d, since messages that go halfway around all go upwards."""
    nodes, length = math.prod(dims), max(dims)
    bisection = nodes * length / 8 * 1000 / 2.0
    took = exchanged(torus(*dims), 1000)
    assert took > bisection
    assert took == pytest.approx(bisection * (1 + 2 / length), abs=LATENCY * sum(dims))


def test_all_to_all_on_a_fat_tree() -> None:
    """At the ports' rate if the tree is full, else at the trunks': 12 of 16 ranks lie behind one that 4 share."""
    assert exchanged(tree(16, 4), 1000) == 15 * 500 + 4 * LATENCY
    assert exchanged(tree(16, 4, taper=2.0), 1000) == 12 * 4 * 1000 / 4.0 + 4 * LATENCY
    assert exchanged(tree(64, 4), 1000) == 63 * 500 + 6 * LATENCY


@pytest.mark.parametrize("on", [torus(8), torus(4, 8), torus(2, 4, 4), tree(4, 8), tree(16, 4)], ids=str)
def test_all_reduce_is_hierarchical(on: SymmetricFabric) -> None:
    """Around a ring of each axis and back: 2 (d - 1) steps of the bytes that the axes before have left. One axis: a ring."""
    system = tiny()
    links = Symmetric(simpy.Environment(), on)
    network = NodeNetwork(links.env, links, on.axes, on.world_size - 1, system)
    links.env.run(until=network.all_reduce("sum", 64_000))
    expected, size = system.collectives.fixed_ns, 64_000.0
    for axis, length in enumerate(on.axes):
        size /= length
        hops = 1 if isinstance(on, Torus) else 2 if axis == 0 else 4
        # A trunk carries the step of all ranks of a leaf at once, at the rate of their ports.
        expected += 2 * (length - 1) * math.ceil(size / system.collectives.share / 2.0 + hops * LATENCY + system.message_ns)
    assert links.env.now == expected


def test_different_rows_are_as_many_as_drawn() -> None:
    """Rows that a uniform draw hits at least once, against the exact expectation R (1 - (1 - 1 / R)^L)."""
    system = tiny(model__rows=50)
    drawn = 4 * 10 * 3
    different = 50 * (1 - (1 - 1 / 50) ** drawn)
    expected = 1 + drawn * (4 + 4) + different * 2 * (4 + 4)
    assert kernels.update_ns(system, kernels.bags(system, 4)) == pytest.approx(expected, rel=0.01)


# Tables and layers


@pytest.mark.parametrize(("nodes", "tables", "width"), [(8, 32.0, 92), (256, 1.0, 92), (4096, 1.0, 6)])
def test_tables_are_spread(nodes: int, tables: float, width: int) -> None:
    """Whole, or cut by columns; nothing gets lost."""
    system = load()
    found = kernels.bags(system, nodes)
    assert (found.tables, found.width) == (tables, width)
    assert found.tables * found.width * nodes >= system.model.tables * system.model.dim


def test_wider_cuts_read_more() -> None:
    """A row of 24 bytes is read as a sector of 64."""
    system = load()
    whole, cut = (kernels.lookup_us(system, kernels.bags(system, nodes)) for nodes in (256, 4096))
    assert cut / whole == pytest.approx((16 * (64 + 8)) / (384 + 8), rel=0.02)


def test_gpu_is_that_of_the_machine() -> None:
    host = load_machine("mi210x4")
    gpu = dataclasses.replace(host.gpu, gather_share=load().gpu.gather_share, burst_bytes=load().gpu.burst_bytes)
    assert (load().gpu, load().launch_us) == (gpu, host.launch_us)


def test_buckets_hold_all_layers() -> None:
    system = load()
    each = kernels.layer_bytes(system)
    for layers in (1, 14, 29):
        found = buckets(system, layers)
        assert sum(found) == layers
        assert all(count * each >= system.collectives.bucket_bytes for count in found[:-1])


# Stories


def story(method: Method) -> tuple[str, ...]:
    """Of 4 nodes on a 2 x 2 torus, until the table is updated."""
    system = tiny()
    log = run(system, fabric(system, "torus_2d", 4), method, 2).log
    return log[: next(number for number, line in enumerate(log) if line.endswith(" update")) + 1]


def test_story_of_an_unfused_iteration() -> None:
    """120 rows of 8 bytes with their indices, 160 bytes written, a launch: 1121. The exchange: 20 to start, 3 messages of 1;
    each link has two messages of 40 bytes at half of 0.05: 3200; two hops of 7. A layer takes 897 forward, and as long for each
    of its gradients. While gradients are under way, so is the first step of bucket 1, and has a third of its link: 4800."""
    assert story("unfused") == (
        "0 lookup",
        "1121 bottom forward",
        "1121 all-to-all starts",
        "4358 all-to-all arrived",
        "4358 repack",
        "4679 interaction",
        "4840 top forward",
        "6634 top backward 1",
        "8428 top backward 2",
        "8428 top bucket 1 starts",
        "10222 interaction backward",
        "10543 repack",
        "10864 bottom backward 1",
        "10864 gradients starts",
        "12658 sort",
        "15701 gradients arrived",
        "15701 update",
    )


def test_all_reduces_wait_for_exchanges() -> None:
    """The first bucket has 8 steps of 128, 64, 64 and 128 bytes, and goes on when no exchange is under way."""
    system = tiny()
    log = run(system, fabric(system, "torus_2d", 4), "unfused", 2).log
    alone = 20 + sum(1 + round(size / 0.5 / 0.05) + LATENCY for size in (128, 64, 64, 128))
    at = {line.split(" ", 1)[1]: int(line.split()[0]) for line in reversed(log)}
    assert at["top bucket 2 ends"] - at["top bucket 2 starts"] == alone
    assert at["top bucket 1 ends"] - at["top bucket 1 starts"] > alone + 3200


def test_an_all_reduce_begins_no_step_during_an_exchange() -> None:
    env, steps, exchange_ns = simpy.Environment(), list[float](), 10_000

    class Links:
        def all_to_all(self, size: float) -> simpy.Event:
            return env.timeout(exchange_ns)

        def shift(self, axis: int, size: float) -> simpy.Event:
            steps.append(env.now)
            return env.timeout(1)

    network = NodeNetwork(env, Links(), axes=(2,), peers=1, system=tiny())
    network.put("rows", 64)
    network.all_reduce("bucket", 64)
    env.run()
    assert len(steps) == 2
    assert min(steps) >= exchange_ns


# Laws


@settings(max_examples=12, deadline=None)
@given(
    topology=st.sampled_from(["torus_2d", "torus_3d", "fat_tree"]),
    nodes=st.sampled_from([8, 16, 36, 48, 128]),
    gbps=st.floats(0.01, 10.0),
    slices=st.integers(1, 5),
    method=st.sampled_from(METHODS),
)
def test_bytes_are_conserved(topology: Topology, nodes: int, gbps: float, slices: int, method: Method) -> None:
    """All that leaves nodes arrives; no link is above its rate; a lane does one thing at a time, and the GPU's are the
    iteration."""
    system = changed(changed(changed(tiny(), "link.gbps", gbps), "fused.slices", slices), "tree.leaf", 4)
    on = fabric(system, topology, nodes)
    done = run(system, on, method, 2)
    for kind, usage in done.usage.items():
        assert usage.peak_gbps <= on.rate(kind) * (1 + 1e-9)
    crossed = sum(usage.bytes * on.count(kind) for kind, usage in done.usage.items())
    assert crossed == pytest.approx(expected_crossings(system, on, method))
    assert sum(span.duration_us for span in done.spans if span.lane == "compute") == pytest.approx(done.ns / 1e3, rel=1e-6)
    for lane in ("compute", "all-to-all", "all-reduce"):
        found = sorted((span for span in done.spans if span.lane == lane), key=lambda span: span.start_us)
        assert all(before.end_us <= after.start_us + 1e-3 for before, after in pairwise(found))


def expected_crossings(system: DlrmSystem, on: SymmetricFabric, method: Method) -> float:
    """Bytes times links that they cross, of two iterations of all nodes."""
    nodes, share = on.world_size, system.collectives.share
    message = kernels.bags(system, nodes).message(system.itemsize)
    hops = sum(len(on.path(0, peer)) for peer in range(1, nodes))
    exchanges = hops * message * (1 / share + (1 if method == "fused" else 1 / share))
    reduces = 0.0
    for layers in (*buckets(system, system.model.top_layers), *buckets(system, system.model.bottom_layers)):
        size = layers * kernels.layer_bytes(system)
        for axis, length in enumerate(on.axes):
            size = -(-size // length)
            reduces += 2 * (length - 1) * size / share * len(on.path(0, on.after(0, axis)))
    return 2 * nodes * (exchanges + reduces)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("topology", ["torus_2d", "fat_tree"])
def test_faster_links_are_never_slower(topology: Topology, method: Method) -> None:
    times = [times_at(gbps, topology, method).ns for gbps in (6.0, 12.5, 25.0, 50.0, 1e4)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def times_at(gbps: float, topology: Topology, method: Method) -> IterationRun:
    system = changed(load(), "link.gbps", gbps)
    return run(system, fabric(system, topology, 64), method)


def test_thinner_slices_converge() -> None:
    """Without a cost a message, what slices add halves with each cut, down to the longer of looking up and sending: on an axis
    of 16, a link upwards carries the messages of 8 rows, from 1 to 8 hops away."""
    system = dataclasses.replace(changed(load(), "link.gbps", 20.0), message_ns=0)
    on = fabric(system, "torus_2d", 128)
    found = kernels.bags(system, 128)
    times = [operator_ns(with_slices(system, slices), on, found, "fused") for slices in (1, 2, 4, 8, 16, 32, 64)]
    gains = [before - after for before, after in pairwise(times)]
    assert all(0 < after < 0.6 * before for before, after in pairwise(gains))
    sending = 8 * sum(range(9)) * found.message(4) / 20.0
    assert times[-1] == pytest.approx(max(sending, 1e3 * kernels.lookup_us(system, found, 0.875)), rel=0.03)


def test_messages_cost() -> None:
    """With a cost a message there is a best number of slices."""
    system = changed(load(), "message_ns", 2000)
    on = fabric(system, "torus_2d", 128)
    times = {slices: run(with_slices(system, slices), on, "fused").ns for slices in (1, 16, 256)}
    assert times[16] < min(times[1], times[256])


def test_fused_hides_no_more_than_there_is() -> None:
    """It never takes less than the lookups, nor than the exchange; unfused takes both."""
    system = load()
    for topology, nodes in (("torus_2d", 128), ("torus_3d", 512), ("fat_tree", 32)):
        on = fabric(system, topology, nodes)  # type: ignore[arg-type]
        found = kernels.bags(system, nodes)
        looking, sending = 1e3 * kernels.lookup_us(system, found), exchanged(on, found.message(4))
        assert operator_ns(system, on, found, "fused") > max(looking, sending)
        assert operator_ns(system, on, found, "unfused") > looking + sending


# Mistakes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fabric(load(), "torus_2d", 127), "nodes is 127"),
        (lambda: torus_dims(0, 2), "nodes is 0"),
        (lambda: fabric(load(), "fat_tree", 24), r"nodes is 24"),
        (lambda: tree(10, 4), "ranks is 10"),
        (lambda: tree(8, 1), "leaf is 1"),
        (lambda: tree(8, 4, taper=0.0), r"taper is 0\.0"),
        (lambda: changed(load(), "nodes", []), "nodes is empty"),
    ],
)
def test_mistakes_are_named(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
