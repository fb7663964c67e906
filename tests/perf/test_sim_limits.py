"""What no prediction may be below: SMs that are there, bytes that links and adapters carry, and each node its own links."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import simpy
from machine_tiny import tiny

from weft.core.hardware import Table, numbers
from weft.core.machine import Machine, load, rescale
from weft.core.problem import OPS, Op, Problem
from weft.core.schedule import Lane
from weft.perf import collective_us, run
from weft.perf.engine import us_within
from weft.perf.network import Fabric
from weft.perf.terms import local_copy_us, wire_us
from weft.schedules import build
from weft.schedules import names as names_of

H200 = load("h200x8")
SLICES = Problem(op="all_gather_matmul", m=2048, n=2048, k=2048, world_size=8, nodes=(4, 4))


def of(machine: Machine, part: str, **changes: Any) -> Machine:
    """`machine` with numbers of one of its parts replaced."""
    made = {part: dataclasses.replace(getattr(machine, part), **changes)}
    paths = {path for path, _ in numbers(made[part], part)}
    sources = {path: text for path, text in machine.sources.items() if not path.startswith(f"{part}.")} | dict.fromkeys(
        paths, "made up"
    )
    return dataclasses.replace(machine, sources=sources, **made)  # type: ignore[arg-type]


# SMs


@pytest.mark.parametrize("part", ["stores", "network"])
def test_a_machine_keeps_sms_for_kernels(part: str) -> None:
    with pytest.raises(ValueError, match=rf"{part}\.sms is 132"):
        of(H200, part, sms=132)
    assert getattr(of(H200, part, sms=131), part).sms == 131


def test_fewer_sms_are_never_faster() -> None:
    times = [run(build(SLICES, "node_slices", 2), of(H200, "network", sms=sms)).total_us for sms in (16, 100, 130, 131)]
    assert times == sorted(times)
    assert times[-1] > 2 * times[0]


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_to_all"])
def test_sms_without_a_tile_store_nothing(op: Op) -> None:
    """Four tiles that are stored share the stores' rate of as many SMs, however many the GPU has beside them."""
    schedule = build(Problem(op=op, m=256, n=256, k=64, world_size=2), "direct_store", 1)
    machine = of(H200, "gpu", tiles=H200.gpu.tiles[5:6], kernel_tiles=(), tile_step=None)
    rates = {dtype: 2 * rate for dtype, rate in machine.gpu.tflops.items()}
    twice = of(machine, "gpu", sms=2 * machine.gpu.sms, tflops=rates)
    assert run(schedule, twice).total_us == run(schedule, machine).total_us


def test_lanes_that_take_all_sms_are_refused() -> None:
    """Each lane's SMs are fewer than the GPU's, both together are not."""
    schedule, machine = build(SLICES, "node_slices", 2), of(of(H200, "network", sms=70), "stores", sms=70)
    (first, *others), *ranks = schedule.ranks
    blocks = Lane("blocks", "blocks", ())
    both = dataclasses.replace(schedule, ranks=((first, *others, blocks), *ranks))
    with pytest.raises(ValueError, match=r"rank 0 .*network: 70, blocks: 70"):
        run(both, machine)
    run(schedule, machine)


@pytest.mark.parametrize("op", OPS)
def test_the_order_of_lanes_is_of_no_effect(op: Op) -> None:
    for name in names_of(op):
        schedule = build(Problem(op=op, m=512, n=4096, k=4096, world_size=4), name)
        turned = dataclasses.replace(schedule, ranks=tuple(lanes[::-1] for lanes in schedule.ranks))
        assert run(turned, H200).total_us == run(schedule, H200).total_us, name


# Collectives


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("nodes", [(4, 4), (8, 4)])
def test_what_crosses_nodes_is_passed_on_within_them(op: str, nodes: tuple[int, ...]) -> None:
    """A rank's port and its adapter bring all other ranks' shards, and of what adapters bring to a node its ranks pass on
    to each other all but their own part."""
    shard, ranks = 1 << 26, sum(nodes)
    us = collective_us(H200, op, shard, ranks, nodes)
    most = max(nodes)
    assert us >= (ranks - 1) * shard / ((H200.links.gbps + H200.network.gbps) * 1e3)  # type: ignore[union-attr]
    assert us >= (most - 1) * ranks / most * shard / (H200.links.gbps * 1e3)
    assert us >= collective_us(H200, op, shard * ranks / most, most)


@pytest.mark.parametrize("nodes", [(), (4, 4)])
def test_columns_are_laid_side_by_side_on_several_nodes_too(nodes: tuple[int, ...]) -> None:
    rows, columns = (collective_us(H200, op, 2**24, 8, nodes) for op in ("all_to_all", "all_to_all_columns"))
    assert columns - rows == pytest.approx(local_copy_us(H200, 8 * 2**24))
    assert collective_us(H200, "all_to_all_columns", 2**24, 1) == 0


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_to_all", "all_reduce"])
def test_more_ranks_than_were_measured(op: str) -> None:
    """Of equal data in all: no faster than the wire, nor than fewer ranks, each of which is a hop more."""
    ranks = [8, 16, 64, 256, 1024, 4096]
    large = dataclasses.replace(H200, world_size=4096)
    times = [collective_us(large, op, 2**26 // count, count) for count in ranks]
    assert all(us >= wire_us(large, op, 2**26 // count, count) for count, us in zip(ranks, times, strict=True))
    assert times == sorted(times)
    assert times[-1] > 4000 * H200.links.latency_us


def test_more_ranks_are_no_faster_than_their_wire() -> None:
    """Also where a table grows less than that. Up to as many ranks as were measured, what was measured counts."""
    fast = Table(world_size=8, points=((1024, 1.0), (2**26, 2.0)))
    sources = {path: text for path, text in H200.sources.items() if not path.startswith("collectives.all_gather.also")}
    collectives = {**H200.collectives, "all_gather": fast}
    quick = dataclasses.replace(H200, collectives=collectives, sources=sources, world_size=16)
    assert collective_us(quick, "all_gather", 2**26, 8) == 2.0
    assert collective_us(quick, "all_gather", 2**26, 16) == pytest.approx(15 * 2**26 / 390e3)


@pytest.mark.parametrize(("topology", "shards"), [("switch", 3), ("mesh", 1), ("ring", 1.5), ("pcie", 12)])
def test_the_wire(topology: Any, shards: float) -> None:
    """Of four ranks: three shards by a port, one by each link of a mesh, half of three by either of a ring's; all twelve by a
    host that is as fast as a port."""
    machine = tiny(world_size=4, topology=topology)
    assert wire_us(machine, "all_gather", 64, 4) == pytest.approx(shards)
    assert wire_us(machine, "all_to_all", 64, 4) == pytest.approx(2 if topology == "ring" else shards)


def test_shipped_collectives_are_what_was_measured() -> None:
    """None of them was faster than the wire."""
    for op, table in H200.collectives.items():
        assert isinstance(table, Table)
        for each in (table, *table.also):
            for size, us in each.points:
                assert collective_us(H200, op, size, each.world_size) == pytest.approx(us)


def test_a_table_on_other_links() -> None:
    """What grows with bytes does with the rate; numbers stay what a machine may have."""
    table = H200.collectives["all_gather"]
    assert isinstance(table, Table)
    halved, slowest = rescale(table, 0.5), rescale(table, 1e-15)
    assert isinstance(halved, Table)
    assert halved.points[0][1] == table.points[0][1] == 13.28
    assert halved.points[-1][1] - 13.28 == pytest.approx(2 * (table.points[-1][1] - 13.28))
    assert halved.also[0].points[-1][1] > 1.9 * table.also[0].points[-1][1]
    dataclasses.replace(H200, collectives={**H200.collectives, "all_gather": slowest})


# Nodes


def other(topology: str, **more: Any) -> Machine:
    return of(H200, "links", topology=topology, **more)


def test_each_node_has_its_host() -> None:
    """Twice as many nodes, each with as much to do, take as long within them."""
    usages: list[Mapping[Any, Any]] = []
    for count in (2, 4):
        problem = Problem(
            op="matmul_reduce_scatter", m=1024 * count, n=1024, k=512 * count, world_size=2 * count, nodes=(2,) * count
        )
        usages.append(run(build(problem, "node_slices", 1), other("pcie", host_gbps=20.0)).usage)
    for count, usage in zip((2, 4), usages, strict=True):
        hosts = {key: found.bytes for key, found in usage.items() if key[0] == "host"}
        assert set(hosts) == {("host", node) for node in range(count)}
        assert len(set(hosts.values())) == 1


def test_each_node_has_its_ring() -> None:
    network = Fabric(simpy.Environment(), other("ring"), 7, (3, 4))
    assert network.path(0, 2) == (("link", 0, 2),)
    assert network.path(3, 6) == (("link", 3, 6),)
    assert network.path(3, 5) == (("link", 3, 4), ("link", 4, 5))
    assert network.path(6, 4) == (("link", 6, 3), ("link", 3, 4))
    assert network.latency_ns(3, 5) == 2 * network.latency_ns(3, 6)
    usage = run(build(dataclasses.replace(SLICES, nodes=(4, 4)), "node_slices", 1), other("ring")).usage
    assert all(key[1] // 4 == key[2] // 4 for key in usage if key[0] == "link")


def test_a_time_is_told_up_to_a_limit() -> None:
    """At the nanosecond of its end, and one before."""
    for name in ("sequential", "shard_p2p", "direct_store"):
        schedule = build(dataclasses.replace(SLICES, op="matmul_reduce_scatter", nodes=()), name)
        total_us = run(schedule, H200).total_us
        assert us_within(schedule, H200, total_us) == us_within(schedule, H200, 1e30) == total_us
        assert us_within(schedule, H200, total_us - 0.002) == float("inf")
