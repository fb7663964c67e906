"""What the simulator knows of weft's own kernels and of what repeats: their tile shapes, their sweeps over b, a warm cache, SMs
that copies find between tiles."""

from __future__ import annotations

import dataclasses

import pytest
from devices import BLOCK_OF_H200

from weft.core.machine import Machine, load
from weft.core.problem import LookupProblem, Problem
from weft.core.schedule import Gemm, Schedule
from weft.perf import kernels, run
from weft.perf.shapes import SHAPES, shape_of, streamed_tile, whole_tiles
from weft.perf.terms import gemm_cost, kernel_cost, warm, whole_gemm_us
from weft.perf.world import FullKernel, World
from weft.schedules import build, parse

H200 = load("h200x8")


def problem(m: int, n: int, k: int, size: int = 4, op: str = "all_gather_matmul") -> Problem:
    return Problem(op=op, m=m, n=n, k=k, world_size=size)  # type: ignore[arg-type]


def scheduled(of: Problem, spec: str) -> Schedule:
    return build(of, *parse(spec))


def cost_of(schedule: Schedule, machine: Machine = H200) -> tuple[Gemm, kernels.GemmCost]:
    world = World(schedule, machine)
    step = next(step for lane in world.schedule.ranks[0] for step in lane.steps if isinstance(step, Gemm))
    return step, kernels._cost(world, 0, step, tuple(kernels._groups(step, 0)))


@pytest.mark.parametrize("spec", ["flag_gated:1", "direct_store:1", "track_and_trigger:2"])
def test_a_kernel_with_gates_is_simulated_in_the_tiles_that_it_takes(spec: str) -> None:
    step, cost = cost_of(scheduled(problem(1950, 4608, 3584), spec))
    shape = shape_of(step, BLOCK_OF_H200, H200)
    assert (shape.m, shape.n) != (128, 256), "small tiles end first: most of the work comes late"
    assert cost.tiles == tuple(-(-part.a.shape[0] // shape.m) * -(-step.b.shape[1] // shape.n) for part in step.parts)


def test_tiles_of_the_last_wave_are_cut_in_two_where_the_kernel_cuts_them() -> None:
    step, cost = cost_of(scheduled(problem(4096, 12768, 4256, 2), "flag_gated:1"))
    tiles = sum(cost.tiles)
    assert cost.halves == tiles - whole_tiles(tiles, cost.sms, shape_of(step, BLOCK_OF_H200, H200)) == tiles % cost.sms > 0
    assert cost.busy_us == pytest.approx(cost.tile_us * (tiles // cost.sms + H200.gpu.half_tile))


def test_b_is_read_by_each_group_of_row_tiles_and_by_parts_that_come_late() -> None:
    """402 MB of b, which no cache holds: 94 us each time."""
    sizes = {"rows": (64,) * 4, "n": 32768, "k": 6144, "dtype": "bfloat16", "flags": True}
    shape = dataclasses.replace(SHAPES[2], group=4)

    def traffic_us(**more: object) -> float:
        cost = gemm_cost(H200, **sizes, tiles=(H200.gpu.kernel_tiles[2],), shape=shape, **more)  # type: ignore[arg-type]
        return cost.memory_us * -(-sum(cost.tiles) // cost.sms)

    once = traffic_us()
    sweep_us = 2 * 32768 * 6144 / (H200.gpu.hbm_gbps * 1e3)
    assert sweep_us == pytest.approx(93.6, abs=0.1)
    assert traffic_us(late_sweeps=2.0) - once == pytest.approx(2 * sweep_us)
    shape = dataclasses.replace(shape, group=1)
    assert traffic_us() - once == pytest.approx(3 * sweep_us)


def test_parts_come_late_by_what_brings_them() -> None:
    slow = dataclasses.replace(H200, copies=dataclasses.replace(H200.copies, copy_us=100.0))
    sizes = {"rows": (64,) * 4, "n": 32768, "k": 6144, "dtype": "bfloat16", "shape": dataclasses.replace(SHAPES[2], group=8)}
    sweep_us = 2 * 32768 * 6144 / (H200.gpu.hbm_gbps * 1e3)

    def sweeps(machine: Machine, *late_bytes: float) -> float:
        cost = kernel_cost(machine, late_bytes=late_bytes, **sizes)  # type: ignore[arg-type]
        return (cost.memory_us - kernel_cost(machine, **sizes).memory_us) * -(-sum(cost.tiles) // cost.sms) / sweep_us  # type: ignore[arg-type]

    late = (64 * 6144 * 2.0,) * 3
    assert sweeps(slow, *late) == pytest.approx(3.0), "each of three parts that wait"
    assert 1.0 < sweeps(H200, *late) < 3.0


@pytest.mark.parametrize(("m", "n", "k", "fits"), [(8, 6144, 6144, True), (8, 8192, 8192, False), (4096, 8192, 1024, False)])
def test_a_call_that_repeats_finds_what_fits_in_the_cache(m: int, n: int, k: int, fits: bool) -> None:
    of = problem(m, n, k, 2, "matmul_all_reduce")
    cold, hot = whole_gemm_us(H200, of), whole_gemm_us(warm(H200, of), of)
    assert (hot < cold) if fits else (warm(H200, of) is H200)
    bare = dataclasses.replace(H200, gpu=dataclasses.replace(H200.gpu, l2_gbps=None), sources=sources(H200, "gpu.l2_gbps"))
    assert warm(bare, of) is bare
    bags = LookupProblem.of(batch=64, dims=((8,),) * 2, pooling=2)
    assert warm(H200, bags) is H200


def sources(machine: Machine, path: str) -> dict[str, str]:
    return {known: words for known, words in machine.sources.items() if known != path}


@pytest.mark.parametrize(("name", "width"), [("one_shot", 4608), ("two_shot", 2304)])
def test_a_kernel_that_exchanges_streams_b_through_its_own_tiles(name: str, width: int) -> None:
    of = problem(9, 4608, 36864, 2, "matmul_all_reduce")
    _, cost = cost_of(scheduled(of, name))
    pieces = 1 if name == "one_shot" else 2
    rows, cols = streamed_tile(of, width, pieces, 9, H200.gpu.sms)
    assert sum(cost.tiles) == -(-9 // rows) * -(-4608 // cols)
    assert cost.math_us >= 18432 * H200.kernels.row_us
    _, plain = cost_of(scheduled(of, "sequential"))
    assert cost.busy_us > plain.busy_us


def test_an_exchange_behind_a_matmul_is_launched() -> None:
    of = problem(1, 8192, 4096, op="matmul_all_reduce")
    slower = dataclasses.replace(H200, launch_us=H200.launch_us + 10.0)
    assert run(scheduled(of, "sequential_stores"), slower).total_us == pytest.approx(
        run(scheduled(of, "sequential_stores"), H200).total_us + 20.0, abs=0.1
    ), "a matmul and an exchange"


def test_copies_find_sms_between_tiles() -> None:
    world = World(scheduled(problem(64, 64, 64), "sequential"), H200)
    ended = world.env.event()
    found: dict[str, int] = {}

    def waits(name: str, filled: FullKernel, at: int):  # type: ignore[no-untyped-def]
        yield world.env.timeout(at)
        yield filled.next_free(world.env)
        found[name] = world.now

    def ends():  # type: ignore[no-untyped-def]
        yield world.env.timeout(1000)
        ended.succeed()

    tiled = FullKernel(ended, since=100, tile_ns=300)
    world.env.process(ends())
    for name, filled, at in (
        ("before", tiled, 0),
        ("within", tiled, 450),
        ("last", tiled, 950),
        ("whole", FullKernel(ended), 450),
    ):
        world.env.process(waits(name, filled, at))
    world.env.run()
    assert found == {"before": 400, "within": 700, "last": 1000, "whole": 1000}


def test_an_nccl_collective_beside_copies_begins_late() -> None:
    of = problem(64, 4096, 4096, 2, "matmul_all_reduce")
    bare = dataclasses.replace(H200, fork_us=None, sources=sources(H200, "fork_us"))
    last = {}
    for name, machine in (("bare", bare), ("forked", H200)):
        spans = [span for span in run(scheduled(of, "shard_p2p"), machine).spans if span.name == "all_gather" and not span.rank]
        last[name] = spans[-1].end_us - spans[-1].start_us
    assert last["forked"] == pytest.approx(last["bare"] + H200.fork_us)  # type: ignore[operator]
