"""The ranking estimates the time of every schedule of a problem from closed forms. It takes milliseconds.

Contract: `estimates` is a pure function of a problem, a machine and names of schedules. It builds and
simulates only schedules of families without traits, which users have registered. It has no constants of its own: the costs of
matmuls, copies and flags come from `weft.perf.terms`, as in the event engine (weft.perf.engine), which adds ordering and
contention. A test compares the two over hundreds of problems.

The traits of a family of schedules (weft.schedules.traits) say how it cuts the matmul and how it moves the data. Three
recurrences cover the families that overlap a matmul with communication inside a node:

    gather       t_i = max(t_{i-1}, start + i c + latency) + flags + kappa g_i          pieces arrive, and are multiplied
    scatter      s_i = max(s_{i-1}, u_i + flag + wake) + c                              pieces are computed (u_i), and sent
    one kernel   max(launch + ceil(sum T / S) tau, arrival_i + ceil(T_i.. / S) tau)     tiles wait for pieces

    i            piece 1 .. n, in the order of arrival or computation; t_0 and s_0 are when the lane is ready
    c, g_i       the time to transfer a piece, and the time of the work on it
    kappa        how many times as long work takes concurrently with copies
    flag, wake   the time of a flag operation; the time from raising a flag until a lane that waited for it goes on
    T_i, S, tau  the tiles of a piece, the number of SMs, and the time of a tile

A kernel that counts or stores its tiles is the reverse of the third: piece i is ready after the waves of its own tiles and of
all tiles before them. The other families have short formulas of their own.

gathers.py        pieces arrive and are multiplied
scatters.py       pieces are computed and sent, also by weft's own GEMM kernel; matmul_all_reduce
collectives.py    operators without a matmul: collectives and embedding lookups

All of them use the lanes of weft.perf.lanes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from weft.core.errors import require
from weft.core.machine import Machine
from weft.core.problem import COLLECTIVE_OPS, COLUMN_OPS, EXCHANGES, GATHERS, LOOKUP_OPS, Problem
from weft.perf.lanes import ComputeLane, Rank
from weft.perf.ranking.collectives import estimate_collective_us, estimate_lookup_us
from weft.perf.ranking.gathers import estimate_gather_us
from weft.perf.ranking.scatters import (
    estimate_all_reduce_us,
    estimate_exchanging_kernel_us,
    estimate_scatter_us,
    estimate_whole_sum_us,
)
from weft.perf.terms import collective_us, gathered_bytes, hbm_us
from weft.schedules import FAMILIES, build, parse, specs

SAME_ON_ONE_NODE = {"matmul_all_to_all": "track_and_trigger", "matmul_all_reduce": "two_shot"}
"""The family that node_slices equals on a single node, by operator. For other operators its own traits hold."""
MARGIN = 0.01
"""An overlapping schedule must be estimated to be faster than sequential by more than 1%, as in an autotuning run."""


def ranked(problem: Problem, machine: Machine, only: str | None = None) -> dict[str, float]:
    """Return the estimates of all candidates in us, by name, fastest first. only: candidates of this family.

    On few ranks some families are the same program. Candidates with the same number of chunks and equal estimates are listed
    once, by the simplest name.

    Raises ValueError if the machine has fewer GPUs than the problem, or no rate for its dtype.
    """
    simplest: dict[tuple[float, int], str] = {}
    for spec, estimate_us in estimates(problem, machine, specs(problem, only)).items():
        simplest.setdefault((round(estimate_us, 6), parse(spec)[1] or 1), spec)
    return {spec: estimate_us for (estimate_us, _), spec in sorted(simplest.items())}


def best(problem: Problem, machine: Machine, count: int) -> tuple[str, ...]:
    """Return "sequential" and the `count` fastest other schedules. Return only "sequential" if there is nothing to overlap."""
    if problem.world_size == 1 or not problem.m or not problem.n:
        return ("sequential",)
    others = [spec for spec in ranked(problem, machine) if spec != "sequential"]
    return ("sequential", *others[:count])


def heuristic(problem: Problem, machine: Machine) -> str:
    """Return the schedule that is ranked first, as `schedule=` takes it, without a simulation.

    It is "sequential" if there is nothing to overlap, or if no other schedule is estimated to be more than 1% faster.

    Raises ValueError if the machine has fewer GPUs than the problem, or no rate for its dtype.
    """
    require(
        "machine", machine, Machine, "use a weft.Machine; weft.core.machine.load gives one by its name, once for many problems"
    )
    if problem.world_size == 1 or not problem.m or not problem.n:
        estimates(problem, machine, ())
        return "sequential"
    return choice(ranked(problem, machine))


def choice(times_us: Mapping[str, float]) -> str:
    """Return the fastest schedule, or "sequential" if none is faster by more than MARGIN. times_us: the times, by schedule."""
    fastest = min(times_us, key=times_us.__getitem__)
    return fastest if times_us[fastest] < (1 - MARGIN) * times_us["sequential"] else "sequential"


def estimates(problem: Problem, machine: Machine, schedules: Iterable[str]) -> dict[str, float]:
    """Return the estimates in us of these schedules, named as `schedule=` takes them. Raises ValueError as `ranked` does."""
    machine.require_for(problem)
    if problem.op not in COLLECTIVE_OPS:
        machine.tflops(problem.rate_name)
    if not problem.m or not problem.n:
        return dict.fromkeys(schedules, 0.0)
    rank = Rank(problem, machine)
    return {spec: _estimate_us(rank, spec) for spec in schedules}


def _estimate_us(rank: Rank, spec: str) -> float:
    problem = rank.problem
    (name, count), op = parse(spec), problem.op
    chunks = 1 if name == "shard_p2p" else count or problem.world_size
    if name == "node_slices" and problem.nodes:
        return estimate_across_nodes_us(rank, chunks)
    family = FAMILIES[SAME_ON_ONE_NODE.get(op, name) if name == "node_slices" else name].traits
    if family is None:
        return _simulate_us(rank, name, count)
    if family.matmul == "exchanging":
        return estimate_exchanging_kernel_us(rank, family.hops)
    if op == "all_reduce" and family.matmul == "whole":
        return estimate_whole_sum_us(rank)
    if op in COLLECTIVE_OPS:
        return estimate_collective_us(rank, family, chunks)
    if op in LOOKUP_OPS:
        return estimate_lookup_us(rank, family, chunks)
    if op == "matmul_all_reduce":
        return estimate_all_reduce_us(rank, family, chunks)
    return estimate_gather_us(rank, family, chunks) if op in GATHERS else estimate_scatter_us(rank, family, chunks)


def _simulate_us(rank: Rank, name: str, chunks: int | None) -> float:
    # Only this needs the simulator and its packages.
    from weft.perf.engine import run

    return run(build(rank.problem, name, chunks, fan_out=rank.machine.fans_out), rank.machine).total_us


def estimate_across_nodes_us(rank: Rank, slices: int) -> float:
    """Return the time of a problem on several nodes.

    Slices cross the network one after the other, concurrently with the matmul or lookup. The exchange inside a node follows.
    """
    problem, machine, network = rank.problem, rank.machine, rank.machine.network
    assert network is not None, "the machine of several nodes has a network"
    differs_by_rank = problem.op in (*EXCHANGES, *COLUMN_OPS, *LOOKUP_OPS)  # every rank of another node gets different data
    copies = problem.world_size - rank.node_ranks if differs_by_rank else len(problem.nodes) - 1
    sent_bytes, trips = rank.shard_bytes * copies, 2 if problem.op == "matmul_all_reduce" else 1
    crossing_us = network.step_us + network.latency_us + trips * sent_bytes / slices / (network.gbps * 1e3)
    if problem.op in LOOKUP_OPS:
        elements = problem.m * max(problem.columns(source) for source in range(problem.world_size))
        compute_us = hbm_us(machine, (gathered_bytes(problem, elements, machine) + elements * problem.itemsize) / slices)
    else:
        compute_us = rank.library_gemm(-(-rank.rows // slices)).busy_us
    computed_at_us = crossed_at_us = rank.fork_us
    for _ in range(slices):
        if problem.op in GATHERS:
            crossed_at_us += crossing_us
            computed_at_us = max(computed_at_us, crossed_at_us) + rank.launch_us + compute_us
        else:
            computed_at_us += rank.launch_us + compute_us
            crossed_at_us = max(crossed_at_us, computed_at_us + rank.flag_us) + crossing_us
    exchange_us = collective_us(machine, "all_gather", rank.shard_bytes, rank.node_ranks)
    lane = ComputeLane(rank, computed_at_us)
    lane.enqueue_weight_gradients()
    return max(lane.free_at_us, crossed_at_us) + exchange_us + rank.flag_us
