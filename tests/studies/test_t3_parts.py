"""The parts of the simulated T3, each alone: arbiter, tracker, grid, and what they refuse."""

from __future__ import annotations

import dataclasses
import math

import pytest
import simpy
from t3_tiny import product, tiny, with_numbers

from weft_studies.profile import changed
from weft_studies.t3.configurations import fused
from weft_studies.t3.fused import Tracker, mapping
from weft_studies.t3.kernels import Chunks, Grid, chunk_at
from weft_studies.t3.memory import GpuMemory, Policy
from weft_studies.t3.system import SUBLAYERS, load

# Arbitration


def shares(policy: Policy, starvation: int = 3) -> tuple[int, int]:
    """When 64 units of compute and 64 of communication end, each of which wants three quarters of the memory's time."""
    env = simpy.Environment()
    memory = GpuMemory(env, with_numbers(tiny(), {"arbiter.starvation": starvation}), policy)
    ends: dict[str, int] = {}

    def stream(name: str, done: simpy.Event) -> simpy.Event:
        assert done.callbacks is not None
        done.callbacks.append(lambda _: ends.update({name: int(env.now)}))
        return done

    for name in ("compute", "communication"):
        stream(name, memory.flow(name, 48 * 64, lambda: 48.0, {f"{name}_read": 48 * 64}))  # type: ignore[arg-type]
    env.run()
    return ends["compute"], ends["communication"]


def test_round_robin_gives_half() -> None:
    assert shares("round_robin") == (96, 96)


def test_compute_first_leaves_what_is_over() -> None:
    """Compute has its 3/4, communication 1/4 until compute ends at 64; then 32 of its 48 are left at 3/4."""
    assert shares("compute_first") == (64, 64 + math.ceil(32 / 0.75))


def test_stores_come_after_reads() -> None:
    """Both want all of the memory's 64 a ns: reads have it for 10 ns, then posted stores, though they came first."""
    env = simpy.Environment()
    memory = GpuMemory(env, tiny())
    stores = memory.flow("compute", 640, lambda: 64.0, {"gemm_write": 640}, posted=True)
    reads = memory.flow("compute", 640, lambda: 64.0, {"gemm_read": 640})
    env.run(until=reads)
    assert env.now == 10
    env.run(until=stores)
    assert env.now == 20


def test_memory_that_is_used_up_leaves_stores_nothing() -> None:
    """Reads ask for more than what communication leaves; what rounding leaves of that must not turn stores back."""
    sublayer = next(s for s in SUBLAYERS if s.name == "Mega-GPT-2 TP8 IP")
    slow = fused(changed(load(), "hbm.gbps", 1.0), sublayer.gemm, 8, "compute_first")
    assert slow.ns >= sum(slow.traffic.values())
    assert slow.peak <= 1 + 1e-9


def test_starvation_has_a_limit() -> None:
    """One request in two is communication's."""
    assert shares("compute_first", starvation=1) == (96, 96)


@pytest.mark.parametrize(
    ("policy", "threshold", "wait"), [("round_robin", None, 64), ("compute_first", None, 64), ("compute_first", 5, 5)]
)
def test_reads_wait_behind_communication(policy: Policy, threshold: int | None, wait: int) -> None:
    """Entries of a ns each; an update takes twice as long."""
    system = tiny(hbm__queue_entries=64, hbm__update_cost=2.0)
    memory = GpuMemory(simpy.Environment(), system, policy, threshold)
    assert memory.latency_ns() == 20
    memory.flow("communication", 64, lambda: 1.0, {"rs_write": 64}, update=frozenset(["rs_write"]))
    assert memory.latency_ns() == 20 + 2 * wait


@pytest.mark.parametrize(("moved", "threshold"), [(0, None), (7, None), (8, 30), (24, 10), (40, 5), (64, 5)])
def test_the_first_stage_sets_the_threshold(moved: int, threshold: int | None) -> None:
    memory = GpuMemory(simpy.Environment(), tiny(), "compute_first")
    memory.observe(moved, 1)
    assert memory.threshold == threshold


# Tracker


def test_tracker_counts_elements() -> None:
    tracker = Tracker(tiny(tile__wavefronts=4), mapping("direct_reduce_scatter", 3))
    assert (tracker.elements, tracker.threshold(2)) == (4, 12)
    counted = [tracker.update(2, 0, 4), tracker.update(2, 1, 3), tracker.update(2, 0, 2)]
    assert [each.ready for each in counted] == [[], [], [(1, 2)]]
    assert tracker.live == 3 * 4
    assert tracker.update(2, 0, 1).ready == [(0, 1)]


def test_tracker_that_overflows_says_so() -> None:
    """Of ten tiles of four wavefronts, room for 16 entries: six tiles, 24 counts, are written to memory and read again."""
    tracker = Tracker(tiny(tile__wavefronts=4, tracker__entries=16), mapping("ring_reduce_scatter", 3))
    assert tracker.update(1, 0, 10) == ([], [], 0, 24)
    assert (tracker.live, tracker.most, tracker.spilled) == (40, 40, 24)
    assert tracker.update(1, 0, 10) == ([(0, 4)], [(4, 10)], 24, 0)
    assert (tracker.live, tracker.spilled) == (0, 24)
    tracker.update(2, 0, 4)
    assert tracker.spilled == 24


# Grid


def test_order_of_tiles() -> None:
    """The figure in weft_studies.t3.kernels."""
    grid = Grid(product(16, 12, 4), tiny(units=4))
    assert [grid.place(i) for i in range(12)] == [
        *[(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)],
        *[(2, 0), (3, 0), (2, 1), (3, 1), (2, 2), (3, 2)],
    ]
    assert list(grid.waves(4)) == [range(4), range(4, 8), range(8, 12)]
    assert list(Chunks(12, 384, 3).pieces(range(2, 9))) == [(0, 2, 4), (1, 0, 4), (2, 0, 1)]


def test_a_ragged_last_group() -> None:
    grid = Grid(product(12, 8, 4), tiny())
    assert [grid.place(i) for i in range(6)] == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    assert grid.panel_bytes(("a", 2)) == Grid(product(9, 8, 4), tiny()).panel_bytes(("a", 2)) * 4


@pytest.mark.parametrize("world_size", [2, 5])
def test_rotation_follows_the_ring(world_size: int) -> None:
    """What rank r makes at a position its neighbour makes at the next; each ends with its own, and makes each once."""
    for rank in range(world_size):
        order = [chunk_at(rank, position, world_size) for position in range(world_size)]
        after = [chunk_at((rank + 1) % world_size, position, world_size) for position in range(world_size)]
        assert sorted(order) == list(range(world_size))
        assert order[:-1] == after[1:]
        assert order[-1] == rank


# Mistakes


@pytest.mark.parametrize("world_size", [1, -1])
def test_a_collective_needs_two(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"world_size is {world_size}"):
        fused(tiny(), product(8, 8, 4), world_size, "round_robin")


def test_bad_work() -> None:
    with pytest.raises(ValueError, match=r"world_size is 3"):
        fused(tiny(), product(8, 8, 4), 3, "round_robin")
    with pytest.raises(ValueError, match=r"collective is 'gossip'"):
        mapping("gossip", 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"k is 0"):
        _ = dataclasses.replace(SUBLAYERS[0], world_size=10_000).gemm
    with pytest.raises(ValueError, match=r"at most 100000 are simulated"):
        Grid(product(4096, 4096, 4), tiny())


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("hbm.gbps", 0, r"hbm\.gbps is 0\.0"),
        ("hbm.gps", 1, r"'hbm\.gps' is no number of system t3"),
        ("name", 1, r"'name' is no number"),
        ("units", "1.5", r"units is 1\.5"),
        ("tile.stages", 1, r"tile\.stages is 1"),
        ("arbiter.intensities", "[0.1]", r"arbiter\.intensities has another length"),
        ("arbiter.intensities", "[0.5, 0.2, 0.1]", r"it must rise"),
    ],
)
def test_bad_numbers(path: str, value: str | float, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        changed(load(), path, value)
    assert "\n" not in str(error.value)


def test_sources_are_complete() -> None:
    system = load()
    with pytest.raises(ValueError, match=r"sources\.units is missing"):
        dataclasses.replace(system, sources={key: text for key, text in system.sources.items() if key != "units"})
    with pytest.raises(ValueError, match=r"sources\.speed is about no number"):
        dataclasses.replace(system, sources={**system.sources, "speed": "assumed"})
