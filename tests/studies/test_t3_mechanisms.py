"""T3's mechanisms, each too small or switched off: what it costs, in time and in memory traffic."""

from __future__ import annotations

import dataclasses
from functools import cache
from itertools import pairwise

import pytest
from t3_tiny import product, tiny

from weft_studies.profile import changed, switches
from weft_studies.t3 import evaluation
from weft_studies.t3.configurations import Overlapped, SubLayerRun, fused, run_sublayer
from weft_studies.t3.fused import Collective, mapping, unrotated
from weft_studies.t3.kernels import slices_under_way
from weft_studies.t3.memory import Policy
from weft_studies.t3.system import SUBLAYERS, SubLayer, T3System, load

COLLECTIVES: tuple[Collective, ...] = ("ring_reduce_scatter", "direct_reduce_scatter", "all_to_all", "all_gather")
MANY = 10**6
"""Entries of a tracker that never fills."""


def sublayer(name: str) -> SubLayer:
    return next(each for each in SUBLAYERS if each.name == name)


LARGE, SMALL = sublayer("T-NLG TP8 FC2"), sublayer("T-NLG TP8 OP")


def fuse(system: T3System, each: SubLayer, policy: Policy = "compute_first") -> Overlapped:
    return fused(system, each.gemm, each.world_size, policy)


def without(name: str, system: T3System | None = None) -> T3System:
    return changed(system or load(), f"mechanisms.{name}", "false")


@cache
def shipped(name: str) -> Overlapped:
    """T3-MCA on the shipped system."""
    return fuse(load(), sublayer(name))


# A full tracker


def test_story_of_a_full_tracker() -> None:
    """The ring of test_t3.py with one entry. The second tile of each chunk is counted in memory, and its second update waits
    for the count: 20 ns, or 21 while a link works."""
    run = fused(tiny(tracker__entries=1), product(8, 12, 4), 3, "round_robin", log=True)
    assert run.log == (
        "212 sent 0[0:2] link 0",
        "222 arrived 0[0:2] link 0",
        "303 stored 1[0:2]",
        "303 ready 1[0:1]",
        "324 ready 1[1:2]",
        "335 sent 1[0:1] link 0",
        "345 arrived 1[0:1] link 0",
        "367 sent 1[1:2] link 0",
        "377 arrived 1[1:2] link 0",
        "453 stored 2[0:2]",
        "453 ready 2[0:1]",
        "473 ready 2[1:2]",
    )
    assert (run.ns, run.spilled, run.traffic["tracker"]) == (473, 2, 2 * 2 * 64)


@pytest.mark.parametrize("name", ["Mega-GPT-2 TP8 OP", "T-NLG TP8 FC2", "T-NLG TP16 IP"])
def test_a_smaller_tracker_is_slower(name: str) -> None:
    """Under T3-MCA, up to the size from which on nothing is spilled. (Under T3 a late command may leave memory to the GEMM.)"""
    most = fuse(changed(load(), "tracker.entries", MANY), sublayer(name)).entries
    runs = [fuse(changed(load(), "tracker.entries", size), sublayer(name)) for size in (4, 64, 256, most, MANY)]
    assert all(small.ns >= large.ns for small, large in pairwise(runs))
    assert all(small.traffic["tracker"] >= large.traffic["tracker"] for small, large in pairwise(runs))
    assert runs[0].ns > runs[-1].ns
    assert runs[-2] == runs[-1]
    assert (runs[-1].spilled, runs[-1].traffic["tracker"]) == (0, 0)


def test_counts_in_memory_are_traffic() -> None:
    """Of a ring each count is written once and read once. The own chunk of a direct reduce-scatter has N updates: each but the
    last writes the count, each but the first reads it."""
    system, work = tiny(tracker__entries=2), product(32, 32, 4)
    plain = tiny(tracker__entries=MANY)
    per_tile: dict[Collective, int] = {"ring_reduce_scatter": 2, "direct_reduce_scatter": 2 * (4 - 1), "all_to_all": 0}
    for collective, accesses in per_tile.items():
        run, before = (fused(each, work, 4, "compute_first", collective=collective) for each in (system, plain))
        assert run.traffic["tracker"] == accesses * run.spilled * 64
        assert (run.spilled > 0) == (accesses > 0)
        assert {**run.traffic, "tracker": 0} == before.traffic


def test_counts_take_the_memorys_time() -> None:
    """Larger counts take longer; without bytes moved in less time than the memory needs."""
    runs = [
        fused(tiny(tracker__entries=1, tracker__spill_bytes=size), product(64, 64, 4), 4, "compute_first")
        for size in (64, 4096)
    ]
    assert runs[1].ns > runs[0].ns
    for run in runs:
        assert run.ns * 64 >= sum(run.traffic.values())
        assert run.peak <= 1 + 1e-9


# Switches


def test_near_memory_compute() -> None:
    """Without it every update is read before it is written."""
    for name in (LARGE.name, SMALL.name):
        run = fuse(without("near_memory_compute"), sublayer(name))
        assert run.ns > shipped(name).ns
        updates = run.traffic["gemm_write"] + run.traffic["rs_write"]
        assert {**run.traffic, "tracker": 0} == {**shipped(name).traffic, "tracker": 0, "update_read": updates}
    done = run_sublayer(without("near_memory_compute"), SMALL)
    assert done.reduce_scatter_nmc == done.reduce_scatter


def test_an_update_of_twice_a_write_saves_no_time() -> None:
    system = changed(load(), "hbm.update_cost", 2.0)
    assert fuse(without("near_memory_compute", system), SMALL).ns == fuse(system, SMALL).ns


def test_llc_bypass() -> None:
    """Without it outputs evict inputs, as in a GEMM alone, but those that leave for another GPU never enter the cache."""
    name = "Mega-GPT-2 TP8 FC2"
    done, before = run_sublayer(without("llc_bypass"), sublayer(name)), shipped(name)
    assert done.t3_mca.ns > before.ns
    assert before.traffic["gemm_read"] < done.t3_mca.traffic["gemm_read"] <= done.gemm.traffic["gemm_read"]
    assert done.t3_mca.traffic["gemm_write"] == before.traffic["gemm_write"]
    each = sublayer(name)
    direct = fused(without("llc_bypass"), each.gemm, each.world_size, "compute_first", collective="direct_reduce_scatter")
    assert before.traffic["gemm_read"] <= direct.traffic["gemm_read"] < done.t3_mca.traffic["gemm_read"]


def test_arbiter() -> None:
    """Without it T3-MCA is T3, which is slower on large layers."""
    run = fuse(without("arbiter"), LARGE)
    assert run == fuse(load(), LARGE, "round_robin")
    assert run.threshold is None
    assert run.ns > 1.05 * shipped(LARGE.name).ns


@pytest.mark.parametrize("each", [LARGE, SMALL], ids=lambda each: each.layer)
def test_rotation(each: SubLayer) -> None:
    """Without it the last tiles of a chunk take all of its hops after the GEMM has made them."""
    run, before = fuse(without("rotation"), each), shipped(each.name)
    assert run.ns > before.ns
    assert run.ns >= run.gemm_ns + (each.world_size - 1) * load().link.latency_ns
    assert {**run.traffic, "tracker": 0} == {**before.traffic, "tracker": 0}


@pytest.mark.parametrize("world_size", [2, 5])
def test_unrotated_chunks_reach_their_owners(world_size: int) -> None:
    """A chunk of a ring starts at the rank after its owner, and goes around; all others go where they belong at once."""
    for collective in COLLECTIVES:
        ranks = [unrotated(collective, world_size, rank) for rank in range(world_size)]
        rotated = mapping(collective, world_size)
        for rank, each in enumerate(ranks):
            assert sorted(route.updates for route in each.routes) == sorted(route.updates for route in rotated.routes)
            assert all(rank not in route.links for route in each.routes)
        if collective == "all_gather":
            continue
        for chunk in range(world_size):
            at = (chunk + 1) % world_size
            visited = [at]
            while ranks[at].routes[chunk].links:
                (at,) = ranks[at].routes[chunk].links
                visited.append(at)
            assert at == chunk
            assert len(set(visited)) == len(visited) == (world_size if collective == "ring_reduce_scatter" else 2)


def test_tracker() -> None:
    """Without it a chunk is sent when all of it is complete: later, without entries and without counts in memory."""
    for each in (LARGE, SMALL):
        run, before = fuse(without("tracker"), each), shipped(each.name)
        assert run.ns > before.ns
        assert (run.entries, run.spilled, run.traffic["tracker"]) == (0, 0, 0)
        assert {**run.traffic, "tracker": 0} == {**before.traffic, "tracker": 0}


def test_story_without_a_tracker() -> None:
    """A chunk of four tiles, made in two waves: its first two tiles wait for the others."""
    run = fused(tiny(mechanisms__tracker=False), product(16, 8, 4), 2, "round_robin", collective="all_to_all", log=True)
    ready = [line.split(" ", 1) for line in run.log if " ready " in line]
    stored = [line.split(" ", 1) for line in run.log if " stored " in line]
    assert [what for _, what in ready] == ["ready 0[0:4]", "ready 1[0:4]"]
    assert [int(ns) for ns, _ in ready] == [int(ns) for ns, _ in stored[1::2]]


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("off", [("rotation",), ("tracker",), ("llc_bypass",), ("rotation", "tracker", "llc_bypass")])
def test_switches_lose_nothing(off: tuple[str, ...], collective: Collective) -> None:
    """All runs end, and move what they moved with the mechanism on."""
    system, work = tiny(units=3, link__gbps=4.0, tracker__entries=3), product(16, 60, 8)
    before = fused(system, work, 5, "compute_first", collective=collective)
    for name in off:
        system = without(name, system)
    run = fused(system, work, 5, "compute_first", collective=collective)
    same = [name for name in before.traffic if name not in ("tracker", "gemm_read")]
    assert [run.traffic[name] for name in same] == [before.traffic[name] for name in same]
    assert run.peak <= 1 + 1e-9


@pytest.mark.parametrize(("text", "value"), [("false", False), ("0", False), ("true", True), ("1", True)])
def test_switches_are_settings(text: str, value: bool) -> None:
    for name in switches(load()):
        group, _, switch = name.partition(".")
        assert getattr(getattr(changed(load(), name, text), group), switch) is value
    assert len(list(switches(load()))) == 5


@pytest.mark.parametrize("text", ["off", "2", "0.5"])
def test_bad_switches(text: str) -> None:
    with pytest.raises(ValueError, match=r"mechanisms\.rotation is .*; it must be true or false"):
        changed(load(), "mechanisms.rotation", text)


# Fetches


def test_a_unit_has_only_so_many_bytes_under_way() -> None:
    """In the shipped system, 37.1 * 620 bytes: 1.4 slices of 16 KiB, or 0.7 of 32. A third stage holds two slices."""
    assert slices_under_way(load()) == 1
    assert slices_under_way(changed(load(), "tile.stages", 3)) == pytest.approx(37.1 * 620 / 2**14)
    assert slices_under_way(changed(load(), "tile.k", 64)) == pytest.approx(37.1 * 620 / 2**15)


# Rows


@pytest.fixture(scope="module")
def runs() -> list[SubLayerRun]:
    return [run_sublayer(load(), each) for each in (LARGE, SMALL)]


def test_rows_of_variants(runs: list[SubLayerRun]) -> None:
    """Each has the system as it is as one row, whether its runs are handed over or not."""
    both = (LARGE, SMALL)
    sizes = evaluation.tracker_sizes(load(), runs, both)
    costs = evaluation.update_costs(load(), runs, both)
    units = evaluation.more_units(load(), runs, both)
    cliff = evaluation.cliff(load(), runs, both)
    assert [row.entries for row in sizes] == [64, 256, 1024]
    assert [row.name for row in costs] == [f"hbm.update_cost = {cost}" for cost in (1.0, 1.25, 2.0)]
    assert [row.name for row in units] == ["as it is", "units = 160"]
    assert [row.name for row in cliff[1:]] == [f"{path} = {value}" for path, value in evaluation.CLIFF]
    assert units[0] == cliff[0] == dataclasses.replace(costs[1], name="as it is")
    assert dataclasses.replace(sizes[1].variant, name="as it is") == units[0]
    assert evaluation.more_units(load(), sublayers=both) == units
    assert 1 > sizes[0].spilled > sizes[1].spilled > sizes[2].spilled > 0
    assert sizes[0].traffic > sizes[1].traffic > sizes[2].traffic > 0
    assert costs[0].t3_mca > costs[1].t3_mca > costs[2].t3_mca


def test_cliff(runs: list[SubLayerRun]) -> None:
    """What T3-MCA gains falls with what a fetch takes longer under T3, and is lost where that is nothing."""
    before, stages, deeper, queue = evaluation.cliff(load(), runs, (LARGE, SMALL))
    assert before.fetch_ns > 1.5 * before.multiply_ns
    assert before.gain_others > 0.1
    for row in (stages, deeper):
        assert row.multiply_ns < row.fetch_ns < 1.2 * row.multiply_ns
        assert 0 < row.gain_others < before.gain_others
    assert queue.fetch_ns == pytest.approx(queue.fetch_mca_ns, rel=0.02)
    assert queue.gain < 0.01


def test_ablation(runs: list[SubLayerRun]) -> None:
    """No mechanism is without effect, and near-memory compute and the bypass are those that save traffic."""
    whole, *rows = evaluation.ablation(load(), runs, (LARGE, SMALL))
    assert whole.off is None
    assert [f"mechanisms.{row.off}" for row in rows] == list(switches(load()))
    assert all(row.t3_mca < whole.t3_mca for row in rows)
    assert rows[0].saved < whole.saved - 0.1
    assert whole.t3_mca == pytest.approx(evaluation.more_units(load(), runs, (LARGE, SMALL))[0].t3_mca)
