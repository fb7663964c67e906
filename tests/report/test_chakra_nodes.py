"""A schedule as a graph of nodes for other simulators: exact stories, nothing lost, and an order in which all of it can run."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from families import PAIRS
from machine_tiny import tiny

from weft.checker import check
from weft.core.machine import load
from weft.core.problem import LookupProblem, Op, Problem
from weft.core.schedule import Flag, Lane, Schedule, Wait
from weft.perf import run
from weft.report.chakra_nodes import FLAG_BYTES, Node, graph
from weft.schedules import build

GATHER = Problem(op="all_gather_matmul", m=8, n=8, k=8, world_size=2)
CASES: list[tuple[Op, str]] = [*PAIRS, ("embedding_bag_all_to_all", "direct_store")]


def schedule_of(op: Op, name: str, world_size: int = 3) -> Schedule:
    if op == "embedding_bag_all_to_all":
        return build(LookupProblem.of(batch=12, dims=((4,),) * world_size), name, 2)
    return build(Problem(op=op, m=12 * world_size, n=24, k=24, world_size=world_size), name, 2)


def lines(nodes: tuple[Node, ...]) -> list[str]:
    """kind, name, what it comes after and needs; the time of what computes, the other end of what does not."""
    return [
        f"{n.id} {n.kind} {n.name} {[*n.after]} {[*n.needs]} "
        + (f"{n.us:g} us" if n.kind == "compute" else f"{n.bytes} {n.peer}")
        for n in nodes
    ]


def test_story_one_shard_to_the_peer() -> None:
    """The own shard is multiplied while the other comes; the second GEMM is behind the first, and needs its flag."""
    first, _ = graph(build(GATHER, "shard_p2p"), tiny())
    assert lines(first) == [
        "0 send copy a[0:4] -> 1 [] [] 64 1",
        f"1 send signal arrived[0]@1 [0] [] {FLAG_BYTES} 1",
        "2 compute gemm 4x4x8 [] [] 4.5 us",
        "3 receive copy a[0:4] -> 0 [] [] 64 1",
        f"4 receive signal arrived[1]@0 [3] [] {FLAG_BYTES} 1",
        f"5 receive signal free[1]@0 [] [] {FLAG_BYTES} 1",
        "6 compute gemm 4x4x8 [2] [4] 4.5 us",
        f"7 send signal free[0]@1 [6] [] {FLAG_BYTES} 1",
    ]


def test_story_tiles_wait_slice_by_slice() -> None:
    """A kernel's part between two gates is a node of its own, in proportion to its columns."""
    schedule = build(dataclasses.replace(GATHER, m=16, k=16), "flag_gated_2d", 2)
    sliced = [node for node in graph(schedule, tiny())[0] if node.kind == "compute" and node.name.startswith("gemm")]
    assert len(sliced) > 2
    assert all(node.needs for node in sliced[1:] if node.after)
    whole = sum(node.flops for node in sliced)
    assert whole == 2 * 16 * 4 * 16


@pytest.mark.parametrize(("op", "name"), CASES)
def test_every_message_has_two_ends_and_all_can_run(op: Op, name: str) -> None:
    schedule, machine = schedule_of(op, name), load("h200x8")
    nodes = graph(schedule, machine)
    sends = Counter((rank, n.peer, n.tag, n.bytes) for rank, all_ in enumerate(nodes) for n in all_ if n.kind == "send")
    receives = Counter((n.peer, rank, n.tag, n.bytes) for rank, all_ in enumerate(nodes) for n in all_ if n.kind == "receive")
    assert sends == receives
    assert max(Counter((src, dst, tag) for src, dst, tag, _ in sends).values(), default=1) == 1

    _all_of_it_can_run(nodes)
    moved = {resource[1]: usage.bytes for resource, usage in run(schedule, machine).usage.items() if resource[0] == "out"}
    for rank, all_ in enumerate(nodes):
        data = [n.bytes for n in all_ if n.kind == "send" and not n.name.startswith(("signal", "ask for"))]
        assert sum(data) == moved.get(rank, 0), "as the simulator moves"


def _all_of_it_can_run(nodes: tuple[tuple[Node, ...], ...]) -> None:
    """Nodes in any order that their dependencies allow, receives once their sends have run."""
    assert all([n.id for n in all_] == list(range(len(all_))) for all_ in nodes)
    sent: set[tuple[int, int, int]] = set()
    ended: list[set[int]] = [set() for _ in nodes]
    left = [(rank, node) for rank, all_ in reversed(list(enumerate(nodes))) for node in reversed(all_)]
    while left:
        ready = [
            (rank, n)
            for rank, n in left
            if {*n.after, *n.needs} <= ended[rank] and (n.kind != "receive" or (n.peer, rank, n.tag) in sent)
        ]
        assert ready, f"nothing of {len(left)} nodes can run"
        for rank, node in ready:
            ended[rank].add(node.id)
            if node.kind == "send":
                sent.add((rank, node.peer, node.tag))
        left = [(rank, node) for rank, node in left if node.id not in ended[rank]]


def test_messages_between_nodes_meet_in_turn() -> None:
    problem = Problem(op="all_gather_matmul", m=32, n=32, k=16, world_size=4, nodes=(2, 2))
    nodes = graph(build(problem, "node_slices", 2), load("h200x8"))
    across = [n for n in nodes[0] if n.name.startswith("send ")]
    assert {n.peer for n in across} <= {2, 3}
    assert across


@pytest.mark.parametrize(
    ("problem", "name", "chunks"),
    [
        (LookupProblem.of(batch=128, dims=((), (), (7, 7)), pooling=2), "direct_store", 2),
        (LookupProblem.of(batch=2, dims=((), (1,), ()), pooling=50), "direct_store", 2),
        (Problem(op="matmul_all_to_all", m=0, n=7, k=1000, world_size=7), "shard_p2p", 3),
    ],
)
def test_lanes_that_end_without_a_node_are_no_standstill(problem: Problem, name: str, chunks: int) -> None:
    """Ranks that have nothing to do end at once, one after the other."""
    schedule = build(problem, name, chunks)
    check(schedule)
    assert len(graph(schedule, load("h200x8"))) == problem.world_size


def test_a_kernel_beside_messages_leaves_them_their_sms() -> None:
    """As in the simulator: 64 tiles that wait for one another on 16 SMs less."""
    problem = Problem(op="matmul_all_to_all", m=4096, n=8192, k=4096, world_size=2, nodes=(1, 1))
    machine = load("h200x8")
    few = dataclasses.replace(machine, network=dataclasses.replace(machine.network, sms=120))  # type: ignore[type-var]
    times = [
        sum(node.us for node in graph(build(problem, "node_slices", 2), one)[0] if node.kind == "compute")
        for one in (machine, few)
    ]
    assert times[1] > 5 * times[0]


def test_a_schedule_that_never_ends_is_refused() -> None:
    stuck = Lane("copy", "copy", (Wait(Flag("never", 0)),))
    schedule = dataclasses.replace(build(GATHER, "sequential"), ranks=((stuck,), ()))
    with pytest.raises(ValueError, match="never ends: rank 0, lane copy waits"):
        graph(schedule, tiny())
