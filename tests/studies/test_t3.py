"""T3's mechanisms on systems small enough to follow by hand: exact event logs, closed forms, conservation."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from t3_tiny import product, tiny

from weft_studies.profile import changed, scaled
from weft_studies.t3.configurations import Overlapped, all_gather, fused, gemm_alone, reduce_scatter
from weft_studies.t3.fused import Collective, mapping
from weft_studies.t3.kernels import Grid
from weft_studies.t3.memory import Policy
from weft_studies.t3.system import SUBLAYERS, LayerGemm, T3System, load

COLLECTIVES: tuple[Collective, ...] = ("ring_reduce_scatter", "direct_reduce_scatter", "all_to_all", "all_gather")
POLICIES: tuple[Policy, ...] = ("round_robin", "compute_first")


def story(work: LayerGemm, world_size: int, collective: Collective, system: T3System | None = None) -> tuple[str, ...]:
    return fused(system or tiny(), work, world_size, "round_robin", collective=collective, log=True).log


def test_story_of_a_ring() -> None:
    """Three chunks of two tiles, one a wave. A wave is 20 of fill, 128 of products and 2 of handing over; 1 more of fill while
    a link works. Position 0 leaves with its stores at 148; 1 waits for its own and its peer's; 2 stays."""
    assert story(product(8, 12, 4), 3, "ring_reduce_scatter") == (
        "212 sent 0[0:2] link 0",
        "222 arrived 0[0:2] link 0",
        "303 stored 1[0:2]",
        "303 ready 1[0:2]",
        "335 sent 1[0:1] link 0",
        "345 arrived 1[0:1] link 0",
        "367 sent 1[1:2] link 0",
        "377 arrived 1[1:2] link 0",
        "453 stored 2[0:2]",
        "453 ready 2[0:2]",
    )


def test_story_of_a_direct_reduce_scatter() -> None:
    """Both chunks of others go to their owners, each over its link; the own one has three updates an element."""
    assert story(product(8, 12, 4), 3, "direct_reduce_scatter") == (
        "212 sent 0[0:2] link 0",
        "222 arrived 0[0:2] link 0",
        "363 sent 1[0:2] link 1",
        "373 arrived 1[0:2] link 1",
        "454 stored 2[0:2]",
        "454 ready 2[0:2]",
    )


def test_a_gemm_alone() -> None:
    """Three waves of 150, and 64 bytes that leave the cache at the end, at 64 a ns."""
    part = gemm_alone(tiny(), product(8, 12, 4))
    assert part.ns == 3 * (20 + 128 + 2) + 1
    assert part.traffic == {"gemm_read": (2 + 3) * 4 * 4 * 2, "gemm_write": 8 * 12 * 2}


def test_slices_wait_for_memory_that_is_slow() -> None:
    """A slice that is fetched in 200 takes 200, not 128; with a third one in shared memory 128 again."""
    slow = tiny(hbm__latency_ns=200)
    assert gemm_alone(slow, product(8, 8, 12)).ns - gemm_alone(slow, product(8, 8, 8)).ns == 2 * 200
    deeper = changed(slow, "tile.stages", 3)
    assert gemm_alone(deeper, product(8, 8, 12)).ns - gemm_alone(deeper, product(8, 8, 8)).ns == 2 * 128


# Closed forms


def without_contention(**changes: float) -> T3System:
    """Memory and units that never bind."""
    return tiny(hbm__gbps=1e6, hbm__latency_ns=1, llc__latency_ns=1, unit_gbps=1e6, **changes)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ring_collectives_are_hops(world_size: int) -> None:
    """(N - 1) * (c / b + latency)."""
    work = product(80, 128, 4)
    hops = (world_size - 1) * (work.out_bytes / world_size + 10)
    system = without_contention()
    assert all_gather(system, work, world_size).ns == pytest.approx(hops, abs=world_size)
    assert reduce_scatter(system, work, world_size, near_memory=True).ns == pytest.approx(hops, abs=world_size)
    assert reduce_scatter(system, work, world_size).ns == pytest.approx(hops, abs=world_size)


def test_the_last_sum_is_what_near_memory_saves() -> None:
    """3 c at the memory's rate."""
    system, work = changed(without_contention(), "hbm.gbps", 8.0), product(80, 128, 4)
    chunk = work.out_bytes / 4
    plain, near = reduce_scatter(system, work, 4).ns, reduce_scatter(system, work, 4, near_memory=True).ns
    assert plain - near == pytest.approx(3 * chunk / 8, abs=4)


def test_a_kernel_on_few_units_goes_at_their_pace() -> None:
    """Units at 1/4 of the link's rate: an all-gather's step touches two bytes for each it sends, and a fourth of a chunk of 64
    is touched before the first leaves: 64 * 8 * (1 + 1 / 4)."""
    system = tiny(unit_gbps=0.25)
    assert all_gather(system, product(8, 8, 4), 2, units=1).ns == 64 * 8 * 5 // 4 + 10


def recurrence(gemm_ns: float, hop_ns: float, world_size: int, *, first: float, pipelined: bool) -> float:
    """When a ring that is fused with a GEMM ends. P(s) = s G / N is when a chunk is made, X(s) when it has arrived:

    X(s) = max(P(s), X(s - 1)) + hop    where it is sent whole
    X(s) = max(P(s), X(s - 1) + hop)    where each of its parts is sent as it gets ready
    """
    made = [gemm_ns * (s + 1) / world_size for s in range(world_size)]
    arrived = first
    for ready in made[1:-1]:
        arrived = max(ready, arrived + hop_ns) if pipelined else max(ready, arrived) + hop_ns
    return max(made[-1], arrived)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("gbps", [0.5, 4.0, 32.0])
def test_whole_chunks_follow_the_stage_recurrence(gbps: float, policy: Policy) -> None:
    """A wave is a chunk, and a command moves all of it."""
    system, work, world_size = without_contention(link__gbps=gbps, units=64, dma_tiles=64), product(64, 64, 8), 4
    run = fused(system, work, world_size, policy)
    gemm_ns = gemm_alone(system, work).ns
    hop = work.out_bytes / world_size / gbps + 10
    first = gemm_ns / world_size + hop
    assert run.ns == pytest.approx(recurrence(gemm_ns, hop, world_size, first=first, pipelined=False), abs=10)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("gbps", [0.05, 0.22, 4.0])
def test_tiles_follow_the_pipelined_recurrence(gbps: float, policy: Policy) -> None:
    """Within a wave and a command a stage; and never later than whole chunks would."""
    system, work, world_size = without_contention(link__gbps=gbps), product(64, 64, 8), 4
    run = fused(system, work, world_size, policy)
    hop = work.out_bytes / world_size / gbps + 10
    first = max(run.gemm_ns / world_size, hop)
    slack = world_size * (run.gemm_ns / 128 + 2 * 32 / gbps + 10)
    assert run.ns == pytest.approx(recurrence(run.gemm_ns, hop, world_size, first=first, pipelined=True), abs=slack)
    assert run.ns <= recurrence(run.gemm_ns, hop, world_size, first=first, pipelined=False) + slack


def test_commands_that_shrink_converge() -> None:
    """To the ring's 3 hops from the first wave on, with the latency of one command at each."""
    work = product(64, 64, 8)
    sizes = (64, 16, 4, 1)
    systems = [without_contention(units=64, link__gbps=1.0, dma_tiles=tiles) for tiles in sizes]
    ends = [fused(system, work, 4, "round_robin").ns for system in systems]
    assert ends == sorted(ends, reverse=True)
    assert all(later <= earlier for earlier, later in pairwise(a - b for a, b in pairwise(ends)))
    assert ends[-1] == pytest.approx(2 * 128 + 3 * work.out_bytes / 4 + 3 * 10, abs=4 * 32)


# Conservation


def assert_every_tile_once(run: Overlapped, work: LayerGemm, collective: Collective, world_size: int, system: T3System) -> None:
    """Tiles that are tracked become ready once, those that are sent arrive once on each link, and nothing else happens."""
    routes = mapping(collective, world_size).routes
    each = Grid(work, system).tiles // world_size
    seen: dict[tuple[str, ...], int] = {}
    for line in run.log:
        _, what, where, *link = line.split(" ", 3)
        position, low, high = where.replace("[", ":").strip("]").split(":")
        for tile in range(int(low), int(high)):
            key = (what, position, str(tile), *link)
            seen[key] = seen.get(key, 0) + 1
    expected = [("ready", str(p), str(t)) for p, r in enumerate(routes) if r.updates for t in range(each)]
    expected += [("stored", str(p), str(t)) for p, r in enumerate(routes) if not r.remote for t in range(each)]
    for p, route in enumerate(routes):
        for link in route.links:
            expected += [(what, str(p), str(t), f"link {link}") for what in ("sent", "arrived") for t in range(each)]
    assert seen == dict.fromkeys(expected, 1)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 9),
    cols=st.integers(1, 9),
    k=st.integers(1, 20),
    world_size=st.integers(2, 6),
    collective=st.sampled_from(COLLECTIVES),
    policy=st.sampled_from(POLICIES),
    units=st.integers(1, 7),
    gbps=st.sampled_from([0.1, 1.0, 50.0]),
)
def test_nothing_is_lost(
    rows: int, cols: int, k: int, world_size: int, collective: Collective, policy: Policy, units: int, gbps: float
) -> None:
    system, work = tiny(units=units, link__gbps=gbps, hbm__gbps=2.0), product(4 * rows, 4 * cols * world_size, k)
    run = fused(system, work, world_size, policy, collective=collective, log=True)
    assert_every_tile_once(run, work, collective, world_size, system)
    assert run.peak <= 1 + 1e-9
    routes = mapping(collective, world_size).routes
    chunk = work.out_bytes // world_size
    assert run.traffic["gemm_write"] == chunk * sum(not route.remote for route in routes)
    name = "rs" if collective.endswith("reduce_scatter") else "moved"
    assert run.traffic[f"{name}_write"] == chunk * sum(len(route.links) for route in routes)
    assert run.traffic.get(f"{name}_read", 0) == chunk * sum(len(route.links) for route in routes if not route.remote)
    busiest = max(sum(link in route.links for route in routes) for link in range(mapping(collective, world_size).links))
    assert run.ns >= busiest * chunk / gbps
    assert run.ns * system.hbm.gbps >= sum(run.traffic.values())


@pytest.mark.parametrize("path", ["link.gbps", "hbm.gbps", "clock_ghz"])
def test_a_faster_system_is_never_slower(path: str) -> None:
    sublayer = next(s for s in SUBLAYERS if s.name == "T-NLG TP16 OP")
    work, size = sublayer.gemm, sublayer.world_size
    times = []
    for factor in (1.0, 2.0):
        system = scaled(load(), path, factor)
        parts = [gemm_alone(system, work), reduce_scatter(system, work, size), all_gather(system, work, size)]
        times.append([*(part.ns for part in parts), *(fused(system, work, size, policy).ns for policy in POLICIES)])
    for slower, faster in pairwise(times):
        assert all(b <= a for a, b in zip(slower, faster, strict=True))
        assert slower > faster
