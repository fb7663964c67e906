"""The simulator: exact event logs of small stories, conservation of bytes, fair links, and every family everywhere."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import simpy
from families import PAIRS, TP_NAMES
from hypothesis import given, settings
from hypothesis import strategies as st
from machine_tiny import tiny
from spans import log

from weft.core.fused_collective import spelled_out
from weft.core.hardware import Topology
from weft.core.machine import Machine, load
from weft.core.problem import Op, Problem
from weft.core.schedule import Copy, Flag, Gemm, Lane, Part, Push, Region, Schedule, Signal, Step, Wait
from weft.perf import Outcome, run, simulate
from weft.perf.network import Fabric
from weft.schedules import build

GATHER = Problem(op="all_gather_matmul", m=8, n=8, k=8, world_size=2)
SCATTER = Problem(op="matmul_reduce_scatter", m=8, n=8, k=8, world_size=2)
TOPOLOGIES: tuple[Topology, ...] = ("switch", "mesh", "ring", "pcie")


def test_story_shard_by_shard() -> None:
    """64 bytes at 64 a us, after 2 us of fixed cost; each GEMM is one tile of 1.5 us, after a launch of 3."""
    assert log(simulate(build(GATHER, "shard_p2p"), tiny())) == [
        "compute: gemm 4x4x8 0 4.5",
        "copy: wait free[1] 0 0.5",
        "copy: copy a[0:4] -> 1 0.5 3.5",
        "copy: signal arrived[0]@1 3.5 4",
        "compute: wait arrived[1] 4.5 5",
        "compute: gemm 4x4x8 5 9.5",
        "compute: signal free[0]@1 9.5 10",
    ]


def test_story_gate_opens_late() -> None:
    """The peer's rows are in at 6.5, signalled at 7 and seen at 7.25: the second tile ends at 8.75, without a launch."""
    assert log(simulate(build(GATHER, "flag_gated", 1), tiny(link_gbps=0.016))) == [
        "compute: gemm 8x4x8 in 2 parts 0 8.75",
        "copy: wait free[1] 0 0.5",
        "copy: copy a[0:4] -> 1 0.5 6.5",
        "copy: signal arrived[0]@1 6.5 7",
        "compute: signal free[0]@1 8.75 9.25",
    ]


def _one_slice_late(column: int, *, rows: int = 8) -> Schedule:
    """A GEMM of 8 columns on one rank, whose last 4 rows wait at `column`, for a flag that is raised at 5."""
    problem = Problem(op="all_gather_matmul", m=rows, n=4, k=8, world_size=1)
    late, tick = Wait(Flag("late", 0)), Flag("tick", 0)
    parts = [Part(Region("a", 0, (i, i + 4), (0, 8)), Region("out", 0, (i, i + 4), (0, 4))) for i in range(0, rows, 4)]
    parts[-1] = dataclasses.replace(parts[-1], inner=((column, late),))
    gemm = Gemm(Region("b", 0, (0, 8), (0, 4)), tuple(parts))
    lanes = (Lane("compute", "compute", (gemm,)), Lane("copy", "copy", (*[Signal(tick)] * 9, Signal(late.flag))))
    return dataclasses.replace(build(problem, "sequential"), ranks=(lanes,))


@pytest.mark.parametrize(("column", "end"), [(2, 6.125), (4, 5.75), (6, 5.375)])
def test_story_a_slice_arrives_late(column: int, end: float) -> None:
    """A tile starts at 3 and takes 1.5. Its flag comes at 5, when it has multiplied what lies before `column`; what is left is
    in proportion."""
    gemm = next(s for s in simulate(_one_slice_late(column), tiny()) if s.kind == "gemm")
    assert gemm.end_us == end


@pytest.mark.parametrize(("waits_first", "end"), [(False, 6.0), (True, 7.25)])
def test_story_a_tile_that_waits_for_a_slice_holds_its_sm(waits_first: bool, end: float) -> None:
    """Four tiles on two SMs. If the one that waits is last, it starts at 4.5 and finds its gate open at 5.25. If it is first,
    it holds its SM until 5.75, and the fourth starts no sooner."""
    schedule = _one_slice_late(4, rows=16)
    gemm, (compute, copy) = schedule.ranks[0][0].steps[0], schedule.ranks[0]
    assert isinstance(gemm, Gemm)
    parts = gemm.parts[::-1] if waits_first else gemm.parts
    lanes = (dataclasses.replace(compute, steps=(dataclasses.replace(gemm, parts=parts),)), copy)
    spans = simulate(dataclasses.replace(schedule, ranks=(lanes,)), tiny())
    assert next(s.end_us for s in spans if s.kind == "gemm") == end


def test_story_stores_to_the_owner() -> None:
    """Two tiles of 1 us, stretched by half a us of stalls, end at 4.5; their 64 bytes land at 5.5 and are signalled at 5.75. By
    then the own tiles are multiplied. Both add at once: at 256 bytes a us, the peer's 64 bytes take a quarter."""
    slow = dataclasses.replace(tiny(), gpu=dataclasses.replace(tiny().gpu, hbm_gbps=0.256))
    for machine, end in ((tiny(), "5.75 "), (slow, "6 ")):
        gemm, signal = log(simulate(build(SCATTER, "direct_store", 1), machine))
        assert gemm == f"compute: gemm 8x8x4 in 2 parts 0 {end}".strip()
        assert signal.startswith(f"compute: signal free[0]@1 {end}")


def test_story_collective_waits_for_the_slowest() -> None:
    """K of 9 is cut into 5 and 4: the ranks' two waves of tiles end at 5.25 and 5, the collective for both at 12.25."""
    spans = simulate(build(dataclasses.replace(SCATTER, k=9), "sequential"), tiny())
    assert log(spans, 0) == ["compute: gemm 8x8x5 0 5.25", "compute: reduce_scatter 5.25 12.25"]
    assert log(spans, 1) == ["compute: gemm 8x8x4 0 5", "compute: reduce_scatter 5 12.25"]


def test_story_blocks_take_an_sm() -> None:
    """Of two SMs one stores to the peer, so the kernel's four tiles run one after the other: 3 + 4 x 1.5. The stores and their
    signal are one kernel."""
    assert log(simulate(build(dataclasses.replace(GATHER, n=16), "direct_store", 1), tiny())) == [
        "compute: gemm 8x8x8 in 2 parts 0 9",
        "blocks: wait free[1] 3 3.5",
        "blocks: push a[0:4] -> 1 3.5 4.501",
        "compute: signal free[0]@1 9 9.5",
    ]


def test_pieces_of_one_gemm_share_tiles() -> None:
    """Two pieces of two rows fill one row of 4 x 4 tiles: a wave of two tiles, not two waves of half-empty ones."""
    spans = simulate(build(dataclasses.replace(GATHER, n=16), "uniform_fused_1d", 2), tiny())
    assert [s.duration_us for s in spans if s.kind == "gemm"] == pytest.approx([4.5] * 4)


def pushes(steps: list[list[Step]], chunks: int = 1) -> Schedule:
    """A schedule of copy lanes alone: steps by rank."""
    size = len(steps)
    problem = Problem(op="all_gather_matmul", m=4 * size, n=8, k=8, world_size=size)
    buffers = build(problem, "shard_p2p").buffers
    lanes = tuple((Lane("copy", "copy", tuple(s)),) for s in steps)
    return Schedule(problem=problem, name="pushes", buffers=buffers, ranks=lanes, chunks=chunks)


def push(src: int, dst: int) -> Copy:
    return Copy(Region("a", src, (0, 4), (0, 8)), Region("a_full", dst, (4 * src, 4 * src + 4), (0, 8)))


def test_a_freed_link_speeds_up_who_stays() -> None:
    """0 sends 64 bytes to 2 while 1 sends two such: shared for 2 us, then rank 1's second copy has the port alone."""
    spans = simulate(pushes([[push(0, 2)], [push(1, 2), push(1, 2)], []]), tiny(world_size=3))
    assert [(s.rank, s.start_us, s.end_us) for s in spans] == [(0, 0.0, 4.0), (1, 0.0, 4.0), (1, 4.0, 7.0)]


def test_ring_takes_the_shorter_way_over_every_link_between() -> None:
    outcome = run(pushes([[push(0, 2)], [push(1, 2)], [], []]), tiny(world_size=4, topology="ring"))
    carried = {key: usage.bytes for key, usage in outcome.usage.items() if key[0] == "link"}
    assert carried == {("link", 0, 1): 64, ("link", 1, 2): 128}


def test_lanes_share_the_engines_of_their_rank() -> None:
    arrived = [Flag("arrived", peer, 0) for peer in range(3)]
    lanes = tuple(Lane(f"copy.{p}", "copy", (push(0, p), Signal(arrived[p]))) for p in (1, 2))
    schedule = dataclasses.replace(pushes([[], [], []]), ranks=(lanes, (), ()))
    ends = {n: sorted(s.end_us for s in simulate(schedule, tiny(world_size=3, topology="mesh", engines=n))) for n in (1, 2)}
    assert ends == {1: [3.0, 3.5, 6.0, 6.5], 2: [3.0, 3.0, 3.5, 3.5]}


def test_a_schedule_that_never_ends_is_refused() -> None:
    schedule = pushes([[Wait(Flag("never", 0))], []])
    with pytest.raises(ValueError, match=r"rank 0, lane copy .*never\[0\]@0"):
        simulate(schedule, tiny())


def uneven(op: Op, world_size: int = 4) -> Problem:
    return Problem(op=op, m=70, n=90, k=33, world_size=world_size)


def assert_conserved(schedule: Schedule, outcome: Outcome, machine: Machine) -> None:
    """Every copy's bytes have crossed its engine, once, and no port or link ever carried more than it can."""
    copies = [(r, s) for r, lane, _, s in schedule if isinstance(s, Copy) and lane.kind == "copy" and s.src.rank != s.dst.rank]
    for rank in range(len(schedule.ranks)):
        engine = outcome.usage.get(("engine", rank))
        expected = sum(s.src.size * schedule.problem.itemsize for r, s in copies if r == rank)
        assert (engine.bytes if engine else 0) == expected
    for key, usage in outcome.usage.items():
        if key[0] in ("out", "in", "link"):
            assert usage.peak_gbps <= machine.links.gbps * (1 + 1e-9)


@pytest.mark.parametrize(("op", "name"), PAIRS)
def test_every_family_everywhere(op: Op, name: str) -> None:
    """On one topology each, in turn."""
    topology = TOPOLOGIES[PAIRS.index((op, name)) % len(TOPOLOGIES)]
    machine = tiny(world_size=4, topology=topology, engines=3 if topology == "mesh" else 1)
    schedule = build(uneven(op), name, 3, fan_out=machine.fans_out)
    outcome = run(schedule, machine)
    wanted = sorted((rank, lane.name) for rank, lane, _, _ in spelled_out(schedule).schedule)
    assert sorted((s.rank, s.lane) for s in outcome.spans) == wanted
    assert_conserved(schedule, outcome, machine)
    assert simulate(schedule, machine) == outcome.spans
    for rank, lane in set(wanted):
        spans = [s for s in outcome.spans if (s.rank, s.lane) == (rank, lane)]
        assert all(a.end_us <= b.start_us for a, b in pairwise(spans))


@pytest.mark.parametrize("name", TP_NAMES)
def test_handing_back_the_gathered_rows_takes_time(name: str) -> None:
    problem = Problem(op="all_gather_matmul", m=4096, n=8192, k=4096, world_size=4)
    plain, gathered = (
        run(build(dataclasses.replace(problem, return_gathered=more), name), load("h200x8")).total_us for more in (False, True)
    )
    assert gathered > plain


@pytest.mark.parametrize(("op", "name"), [pair for pair in PAIRS if pair[1] != "sequential"])
def test_faster_links_are_never_slower(op: Op, name: str) -> None:
    machine = load("h200x8")
    problem = Problem(op=op, m=2048, n=4096, k=4096, world_size=4)
    times = []
    for factor in (0.25, 1.0, 2.0):
        copies = dataclasses.replace(machine.copies, gbps=factor * machine.copies.gbps)
        links = dataclasses.replace(machine.links, gbps=factor * machine.links.gbps)
        stores = dataclasses.replace(machine.stores, gbps=tuple((n, factor * rate) for n, rate in machine.stores.gbps))
        changed = dataclasses.replace(machine, copies=copies, links=links, stores=stores)
        times.append(run(build(problem, name), changed).total_us)
    assert all(after < 1.02 * before for before, after in pairwise(times)), "the kernel may choose other tiles"
    assert times[0] > times[-1]


@settings(max_examples=40, deadline=None)
@given(
    topology=st.sampled_from(TOPOLOGIES),
    moves=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 10_000)), min_size=1, max_size=12),
)
def test_rates_are_max_min_fair(topology: Topology, moves: list[tuple[int, int, int]]) -> None:
    """Each flow crosses a full resource on which no other flow is faster: nobody can gain but from someone slower."""
    env = simpy.Environment()
    network = Fabric(env, tiny(world_size=5, topology=topology), 5)
    moves = [(src, dst, size) for src, dst, size in moves if src != dst]
    events = [network.transfer(size, network.path(src, dst)) for src, dst, size in moves]
    env.run(until=1)
    streams = list(network.streams.values())
    on = {key: [s for s in streams if key in s.resources] for s in streams for key in s.resources}
    full = {key: sum(len(s.flows) * s.rate for s in found) for key, found in on.items()}
    assert max(full.values(), default=0) <= 0.064 * (1 + 1e-9)
    for stream in streams:
        assert stream.rate > 0
        tight = [key for key in stream.resources if full[key] >= 0.064 * (1 - 1e-9)]
        assert any(stream.rate >= max(s.rate for s in on[key]) * (1 - 1e-9) for key in tight)
    env.run()
    assert all(event.processed for event in events)
    assert all(usage.peak_gbps <= 0.064 * (1 + 1e-9) for usage in network.usage.values())


def test_whole_shards_leave_a_mesh_idle() -> None:
    """FiCCO, arXiv 2512.10236: peer to peer loses up to 3.9x to chunks for all peers on a full mesh of MI300X."""
    mesh, switch = load("mi300x8"), load("h200x8")
    problem = Problem(op="all_gather_matmul", m=16384, n=8192, k=8192, world_size=8)
    ratio = {
        m.name: run(build(problem, "shard_p2p"), m).total_us / run(build(problem, "flag_gated", fan_out=m.fans_out), m).total_us
        for m in (mesh, switch)
    }
    assert ratio["mi300x8"] > 3
    assert ratio["h200x8"] < 1.1


def test_one_gated_kernel_loses_less_than_many() -> None:
    """Decomposition: on links that cost nothing, pieces as GEMMs of their own take longer than one kernel with gates."""
    machine = load("t3_ring8")
    problem = Problem(op="all_gather_matmul", m=8192, n=16384, k=4096, world_size=8)
    one, many = (max(run(build(problem, name), machine).kernel_us) for name in ("flag_gated", "hetero_unfused_1d"))
    alone = run(build(problem, "sequential"), machine).kernel_us[0]
    assert one == pytest.approx(alone, rel=0.01)
    assert many > 1.5 * alone


def _bytes_within_ranks(schedule: Schedule) -> int:
    """Of copies, and parts of pushes, whose both ends lie on one rank."""
    moves = [step for *_, step in schedule if isinstance(step, Copy)]
    moves += [part for *_, step in schedule if isinstance(step, Push) for part in step.parts]
    return 2 * sum(move.src.size for move in moves if move.src.rank == move.dst.rank)


def test_flops_and_bytes_are_all_there() -> None:
    problem = Problem(op="all_gather_matmul", m=64, n=32, k=16, world_size=4)
    for name in TP_NAMES:
        spans = simulate(build(problem, name), tiny(world_size=4))
        assert sum(s.flops for s in spans) == 2 * 64 * 32 * 16
        moved = sum(s.bytes for s in spans if s.kind in ("collective", "copy"))
        assert moved - _bytes_within_ranks(build(problem, name)) == 3 * 64 * 16 * 2


def test_stores_of_a_kernel_to_one_peer_leave_in_order() -> None:
    """Else parts of which the first are done early all arrive late, and what follows part by part begins late."""
    h200 = load("h200x8")
    problem = Problem(op="matmul_all_to_all", m=4096, n=7168, k=2048, world_size=8)
    schedule = build(problem, "direct_store")
    slow, fast = (run(schedule, machine).total_us for machine in (h200, h200.what_if({"gpu.sms": 264})))
    assert fast <= 1.02 * slow


def test_a_push_alone_has_the_sms_that_the_runtime_gives_it() -> None:
    """Beside a cuBLAS matmul there is none of weft's kernels, which would leave it fewer."""
    h200 = load("h200x8")
    schedule = build(Problem(op="all_gather_matmul", m=8192, n=1024, k=8192, world_size=4), "sequential_stores")
    few = run(schedule, h200.what_if({"stores.sms_alone": 4})).total_us
    assert few > 1.2 * run(schedule, h200).total_us
    assert run(schedule, h200.what_if({"stores.sms": 4})).total_us == run(schedule, h200).total_us
