"""Schedules of ranks on several nodes, without ranks: what is proved and refused, drawn, predicted and prepared for GPUs."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
from machine_tiny import tiny
from refusals import refused
from spans import log
from test_launch_plan import FakeProgram, play

import weft
from weft.checker import ScheduleError, check
from weft.core import codec, machine
from weft.core.hardware import Network
from weft.core.machine import Machine
from weft.core.problem import COLLECTIVE_OPS, LOOKUP_OPS, OPS, CollectiveProblem, LookupProblem, Op, Problem
from weft.core.schedule import (
    Buffer,
    Collective,
    Copy,
    Flag,
    Gemm,
    Lane,
    Lookup,
    Receive,
    Reduce,
    Region,
    Schedule,
    Send,
    SendReceive,
    Signal,
    Step,
    Sum,
    Wait,
    regions,
    signalled_flags,
)
from weft.planner import plan
from weft.runtime.launch_plan import LaunchPlan
from weft.runtime.launches import FlagOperations
from weft.schedules import build, candidates, names, specs, unfit

EVERY_OP: tuple[Op, ...] = (*OPS, *LOOKUP_OPS)
COMBINE = Problem(op="matmul_all_to_all", m=16, n=8, k=8, world_size=4, nodes=(2, 2))


def problem_of(op: Op, nodes: tuple[int, ...], *, m: int = 16, n: int = 8, k: int = 8) -> Problem:
    if op in LOOKUP_OPS:
        dims = tuple((2, 3) if rank != 1 else () for rank in range(sum(nodes)))
        return dataclasses.replace(LookupProblem.of(batch=m, dims=dims), nodes=nodes)
    return Problem(op=op, m=m, n=n, k=k, world_size=sum(nodes), nodes=nodes)


def with_network(schedule: Schedule, rank: int, steps: list[Step]) -> Schedule:
    """Other steps on a rank's network lane."""
    lanes = tuple(
        dataclasses.replace(lane, steps=tuple(steps)) if lane.kind == "network" else lane for lane in schedule.ranks[rank]
    )
    return dataclasses.replace(schedule, ranks=(*schedule.ranks[:rank], lanes, *schedule.ranks[rank + 1 :]))


def network(schedule: Schedule, rank: int) -> list[Step]:
    return next(list(lane.steps) for lane in schedule.ranks[rank] if lane.kind == "network")


def messages(schedule: Schedule, rank: int) -> list[SendReceive]:
    return [step for step in network(schedule, rank) if isinstance(step, SendReceive)]


@pytest.mark.parametrize("op", EVERY_OP)
@pytest.mark.parametrize("nodes", [(2, 2), (1, 1), (3, 1), (2, 2, 2)])
def test_slices_are_right(op: Op, nodes: tuple[int, ...]) -> None:
    for (m, n, k), chunks in itertools.product(((13, 11, 9), (1, 5, 7), (0, 4, 3)), (1, 3)):
        problem = problem_of(op, nodes, m=m, n=n, k=k)
        if not unfit("node_slices", problem):
            check(build(problem, "node_slices", chunks, fan_out=chunks == 3))
        check(build(problem, "sequential"))


@pytest.mark.parametrize("op", OPS)
def test_messages_without_elements_are_left_out(op: Op) -> None:
    for nodes, m, chunks in itertools.product(((2, 2), (1, 1), (4, 4, 4)), (0, 1, 9), (1, 3)):
        schedule = build(problem_of(op, nodes, m=m, n=0, k=64), "node_slices", chunks)
        check(schedule)
        sent = [each for rank, lanes in enumerate(schedule.ranks) for lane in lanes for each in lane.steps]
        sizes = [send.src.size for step in sent if isinstance(step, SendReceive) for send in step.sends]
        assert all(sizes)
        assert not sizes or op in ("all_gather_matmul", "all_to_all_matmul"), "a is sent all the same"


@pytest.mark.parametrize("op", COLLECTIVE_OPS)
def test_collectives_alone_are_by_nccl(op: Op) -> None:
    problem = CollectiveProblem(op=op, m=1 << 20, world_size=4, nodes=(3, 1))
    assert str(problem) == f"{op} M=1048576 bfloat16 world_size=4 on nodes of 3, 1"
    assert codec.loads(CollectiveProblem, codec.dumps(problem)) == problem
    (schedule,) = candidates(problem)
    check(schedule)
    assert schedule.name == "sequential"
    for name in names(op)[1:]:
        with pytest.raises(ValueError, match=rf"^schedule is '{name}', which .* on nodes of \(3, 1\) ranks, use sequential$"):
            build(problem, name)
    found = plan(problem, machine.load("h200x8"))
    assert [candidate.spec for candidate in found.candidates] == ["sequential"]
    one_node = plan(dataclasses.replace(problem, nodes=()), machine.load("h200x8"))
    assert found.sequential_us > one_node.sequential_us


def swapped(landing: str) -> Schedule:
    """An all_reduce of two ranks on a node each: each receives the other's a into `landing`, and sums in the order of ranks."""
    problem = CollectiveProblem(op="all_reduce", m=8, world_size=2, dtype="float32", nodes=(1, 1))
    buffers = tuple(
        Buffer(name, kind, (8, 8), (1, 1)) for name, kind in (("a", "input"), ("out", "output"), ("landed", "local"))
    )
    a, out, landed = ([buffer.whole(rank) for rank in range(2)] for buffer in buffers)
    into = {"landed": landed, "out": out}[landing]
    ranks = []
    for rank in range(2):
        done, mine = Flag("landed", rank), (a[rank], into[rank])
        exchange = SendReceive((Send(a[rank], 1 - rank),), (Receive(into[rank], 1 - rank),))
        total = Reduce((Sum(mine if rank == 0 else mine[::-1], out[rank]),))
        network = Lane("network", "network", (exchange, Signal(done)))
        ranks.append((Lane("compute", "compute", (Wait(done), total)), network))
    return Schedule(problem=problem, name="swapped", buffers=buffers, ranks=tuple(ranks))


def test_what_is_received_must_be_right_in_place_too() -> None:
    check(swapped("landed"))
    with pytest.raises(ScheduleError, match=r"rank \d, lane network.*touches a@\d\["):
        check(swapped("out"))


@pytest.mark.parametrize("op", EVERY_OP)
def test_nothing_but_messages_leaves_a_node(op: Op) -> None:
    """No region and no flag of another node is named, and what is received there comes from every rank that has some."""
    schedule = build(problem_of(op, (2, 2)), "node_slices", 2)
    node_of = schedule.problem.node_of
    for rank, _, _, step in schedule:
        places = [region.rank for region in regions(step)] + [flag.rank for flag in signalled_flags(step)]
        assert {node_of[place] for place in places} <= {node_of[rank]}, step
    crossing = [(rank, send.to) for rank in range(4) for step in messages(schedule, rank) for send in step.sends]
    assert crossing
    assert all(node_of[src] != node_of[dst] for src, dst in crossing)


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_rows_cross_once_a_node(op: Op) -> None:
    """A shard goes to another node once, however many ranks it has; so does the node's sum of another's rows."""
    problem = Problem(op=op, m=24, n=6, k=12, world_size=6, nodes=(3, 3))
    schedule = build(problem, "node_slices", 2)
    sent = sum(send.src.size for rank in range(6) for step in messages(schedule, rank) for send in step.sends)
    width = problem.k if op == "all_gather_matmul" else problem.n
    # Of an all-reduce, each node has a sum of all rows; else a node has another's rows, or sums of them.
    assert sent == (2 if op == "matmul_all_reduce" else 1) * problem.m * width


@pytest.mark.parametrize("op", ["matmul_all_to_all", *LOOKUP_OPS])
def test_a_slice_is_sent_once_its_rows_are_counted(op: Op) -> None:
    """The rows of other nodes are made first, and those of the first slice before those of the second."""
    schedule = build(problem_of(op, (2, 2)), "node_slices", 2)
    compute = next(lane for lane in schedule.ranks[0] if lane.name == "compute")
    parts = [part for step in compute.steps if isinstance(step, (Gemm, Lookup)) for part in step.parts]
    counted = [part.count for part in parts if part.count is not None and part.count.name == "sliced"]
    assert [part.count for part in parts[: len(counted)]] == counted
    steps = network(schedule, 0)
    assert [step.flag for step in steps if isinstance(step, Wait)] == counted
    sent = [at for at, step in enumerate(steps) if isinstance(step, SendReceive)]
    assert [len([step for step in steps[:at] if isinstance(step, Wait)]) for at in sent] == [len(counted) // 2, len(counted)]


def test_stores_to_another_node_are_refused() -> None:
    everywhere = dataclasses.replace(COMBINE, nodes=())
    for name in names("matmul_all_to_all"):
        schedule = dataclasses.replace(build(everywhere, name), problem=COMBINE)
        if name == "sequential":
            check(schedule)
        else:
            refused(schedule, "is on another node, out of reach")


def test_families_that_store_everywhere_are_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=re.escape("'direct_store', which loads from and stores to all ranks; on nodes of (2, 2)")
    ):
        build(COMBINE, "direct_store")
    assert {schedule.name for schedule in candidates(COMBINE)} == {"sequential", "node_slices"}


def test_on_one_node_slices_are_no_candidate() -> None:
    """They are what there is for one node, under another name."""
    one = dataclasses.replace(COMBINE, nodes=())
    assert build(one, "node_slices", 2).ranks == build(one, "track_and_trigger", 2).ranks
    assert "node_slices" not in {schedule.name for schedule in candidates(one)}
    assert not [name for name in specs(one) if name.startswith("node_slices")]
    assert specs(one, "node_slices")


def test_a_slice_that_is_sent_unmade_is_refused() -> None:
    schedule = build(COMBINE, "node_slices", 2)
    refused(with_network(schedule, 0, network(schedule, 0)[1:]), "lane network", "product@0[8:10, 0:8]", "gemm")


def test_rows_that_are_multiplied_before_they_land_are_refused() -> None:
    schedule = build(problem_of("all_to_all_matmul", (2, 2)), "node_slices", 1)
    lanes = schedule.ranks[1]
    early = tuple(
        dataclasses.replace(lane, steps=tuple(s for s in lane.steps if s != Wait(Flag("landed", 1)))) for lane in lanes
    )
    refused(dataclasses.replace(schedule, ranks=(schedule.ranks[0], early, *schedule.ranks[2:])), "rank 1", "recv@1")


def test_a_message_without_its_other_end_is_refused() -> None:
    schedule = build(COMBINE, "node_slices", 2)
    refused(
        with_network(schedule, 0, network(schedule, 0)[:-1]), "rank 0 sends 1 messages to rank 2 in a call, which receives 2"
    )
    first = messages(schedule, 0)[0]
    less = [dataclasses.replace(step, sends=step.sends[1:]) if step == first else step for step in network(schedule, 0)]
    refused(with_network(schedule, 0, less), "rank 0 sends 1 messages to rank 2 in a call, which receives 2 from it")


def test_ranks_that_receive_before_they_send_deadlock() -> None:
    schedule = build(COMBINE, "node_slices", 1)
    for rank in range(4):
        separate: list[Step] = []
        for step in network(schedule, rank):
            separate += [SendReceive((), step.receives), SendReceive(step.sends)] if isinstance(step, SendReceive) else [step]
        schedule = with_network(schedule, rank, separate)
    refused(
        schedule, "deadlock: rank 0, lane network", "waits for rank 2 to begin its end of message 0", "rank 2, lane network"
    )


def _messages_in(step: SendReceive, *, lane: str = "network", kind: str = "network") -> Schedule:
    schedule = build(COMBINE, "node_slices", 1)
    return dataclasses.replace(schedule, ranks=((*schedule.ranks[0], Lane(lane, kind, (step,))), *schedule.ranks[1:]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (_messages_in(SendReceive((Send(Region("a", 0, (0, 1), (0, 8)), 2),)), lane="more"), "one lane must do it all"),
        (
            _messages_in(SendReceive((Send(Region("a", 0, (0, 1), (0, 8)), 2),)), lane="c", kind="copy"),
            "need one of kind network",
        ),
        (_messages_in(SendReceive((Send(Region("a", 0, (0, 1), (0, 4)), 2),)), lane="more"), "is not whole rows of"),
        (_messages_in(SendReceive((Send(Region("a", 0, (0, 1), (0, 8)), 0),)), lane="more"), "rank 0 is no other end"),
        (_messages_in(SendReceive((Send(Region("a", 0, (1, 1), (0, 8)), 2),)), lane="more"), "has no elements"),
        (
            _messages_in(SendReceive((), (Receive(Region("a", 0, (0, 1), (0, 8)), 2),)), lane="more"),
            "is an input of the caller",
        ),
        (
            _messages_in(SendReceive((Send(Region("product", 1, (0, 1), (0, 8)), 2),)), lane="more"),
            "this operand must be local",
        ),
    ],
    ids=["two lanes", "copy lane", "half rows", "to itself", "nothing", "into an input", "of a peer"],
)
def test_what_messages_may_not_be(schedule: Schedule, words: str) -> None:
    refused(schedule, words)


def test_other_steps_stay_off_a_network_lane() -> None:
    schedule = build(COMBINE, "node_slices", 1)
    copy = Copy(Region("a", 0, (0, 1), (0, 8)), Region("product", 0, (0, 1), (0, 8)))
    refused(
        with_network(schedule, 0, [copy, *network(schedule, 0)]), "a network lane runs sends and receives, waits and signals"
    )


def test_messages_during_a_collective_are_refused() -> None:
    schedule = build(COMBINE, "node_slices", 1)
    ranks = tuple(
        tuple(
            dataclasses.replace(
                lane,
                steps=(
                    *lane.steps,
                    Collective("all_to_all", schedule.buffer["product"].whole(r), schedule.buffer["out"].whole(r)),
                ),
            )
            if lane.kind == "compute"
            else lane
            for lane in lanes
        )
        for r, lanes in enumerate(schedule.ranks)
    )
    refused(dataclasses.replace(schedule, ranks=ranks), "two communicators at once could deadlock")


def test_a_signal_to_another_node_is_refused() -> None:
    schedule = build(COMBINE, "node_slices", 1)
    lanes = [*network(schedule, 0), Signal(Flag("notified", 2))]
    refused(
        with_network(schedule, 0, lanes), "notified[0]@2 is on another node", "send a message, and signal where it is received"
    )


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ((4,), r"it must be the ranks of two nodes or more"),
        ((2, 1), "4 in all"),
        ((4, 0), "each at least 1"),
        ((5, -1), "each"),
    ],
)
def test_nodes_that_do_not_add_up(nodes: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(COMBINE, nodes=nodes)


def test_timeline() -> None:
    drawn = weft.schedule.timeline(
        build(Problem(op="all_to_all_matmul", m=4, n=2, k=2, world_size=2, nodes=(1, 1)), "node_slices", 1), width=120
    )
    assert [line.rstrip() for line in drawn.splitlines()[3:]] == [
        "gemm a[0:2] -> out[0:2]       send a[2:4] to 1; receive recv[2:4] from 1",
        "wait landed[0] <------------- signal landed[0]",
        "gemm recv[2:4] -> out[2:4]",
    ]


def connected(**changes: object) -> Machine:
    """The tiny machine, hosts of which are connected at half the rate of its links."""
    one = tiny(**changes)  # type: ignore[arg-type]
    sources = dict(one.sources) | {f"network.{name}": "made up" for name in ("gbps", "latency_us", "step_us", "sms")}
    return dataclasses.replace(one, network=Network(gbps=0.032, latency_us=0.5, step_us=2.0, sms=1), sources=sources)


def test_story_of_a_message() -> None:
    """64 bytes at 32 a us, after 2 us of fixed cost, and half a us until the last one is seen. Two tiles take 1.5 us, one after
    the other on the SM that the network leaves, after a launch of 3; the second GEMM is launched as the rows are in."""
    problem = Problem(op="all_to_all_matmul", m=8, n=4, k=8, world_size=2, nodes=(1, 1))
    assert log(weft.schedule.simulate(build(problem, "node_slices", 1), connected(world_size=1))) == [
        "compute: gemm 4x4x8 0 4.5",
        "network: send 1, receive 1 0 4.5",
        "compute: wait landed[0] 4.5 5.5",
        "network: signal landed[0] 4.5 5",
        "compute: gemm 4x4x8 5.5 10",
    ]


def test_messages_share_an_adapter() -> None:
    """Two messages of 128 bytes out of one rank, and two into another, at 32 bytes a us."""
    problem = Problem(op="all_to_all_matmul", m=24, n=1, k=8, world_size=3, nodes=(1, 1, 1))
    spans = weft.schedule.simulate(build(problem, "node_slices", 1), connected(world_size=1))
    sent = next(span for span in spans if span.lane == "network")
    assert sent.end_us == 2 + 2 * 128 / 32 + 0.5
    assert sent.bytes == 2 * 128


def test_a_machine_without_a_network_has_no_plan_across_nodes() -> None:
    with pytest.raises(ValueError, match="machine tiny has no network"):
        weft.plan(COMBINE, tiny(world_size=2))
    with pytest.raises(ValueError, match=r"machine tiny has 1 GPUs"):
        weft.plan(COMBINE, connected(world_size=1))


def test_a_plan_across_nodes_hides_what_an_adapter_takes() -> None:
    found = weft.plan(
        Problem(op="matmul_all_to_all", m=8192, n=7168, k=4096, world_size=4, nodes=(2, 2)), machine.load("h200x8")
    )
    assert found.chosen.schedule == "node_slices"
    assert {candidate.schedule for candidate in found.candidates} == {"sequential", "node_slices"}
    assert found.ideal_us < found.chosen.predicted_us < found.sequential_us


def test_what_crosses_nodes_bounds_a_collective() -> None:
    """Half of an all-to-all's 8 x 64 MiB goes through one adapter of 46 GB/s."""
    h200 = machine.load("h200x8")
    us = weft.perf.collective_us(h200, "all_to_all", 64 << 20, 16, (8, 8))
    assert us == pytest.approx(12 + 4 + 8 * (64 << 20) / 46e3)
    assert us > weft.perf.collective_us(h200, "all_to_all", 64 << 20, 8)


@pytest.mark.parametrize("op", OPS)
def test_no_lane_blocks_for_good_on_gpus(op: Op) -> None:
    """Messages do nothing here, so ranks of different nodes are not held together: words alone must do."""
    schedule = build(problem_of(op, (2, 2)), "node_slices", 2)
    for seed in range(3):
        play([FakeProgram(schedule, rank) for rank in range(4)], seed)


@pytest.mark.parametrize("op", OPS)
def test_a_lane_says_that_it_has_waited_for_the_last_time_behind_its_messages(op: Op) -> None:
    program = FakeProgram(build(problem_of(op, (2, 2)), "node_slices", 2), 0)
    marks, lanes = program.end_words("any"), 0
    for _, launches in LaunchPlan(program, frozenset()).by_lane:  # type: ignore[arg-type]
        at = max((at for at, one in enumerate(launches) if isinstance(one.where.step, SendReceive)), default=None)
        if at is not None:
            lanes += 1
            behind = launches[at] if isinstance(launches[at], FlagOperations) else launches[at + 1 :][-1]
            assert isinstance(behind, FlagOperations)
            assert behind.words[-2:] == marks
            assert all(marks[0] not in one.words for one in launches if isinstance(one, FlagOperations) and one is not behind)
    assert lanes


def test_a_plan_of_slices_alone() -> None:
    found = weft.plan(COMBINE, machine.load("h200x8"), only="node_slices")
    assert {candidate.schedule for candidate in found.candidates} == {"node_slices"}
