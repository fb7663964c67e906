"""The estimate for problems on several nodes.

Slices cross the network one after the other, concurrently with the matmul or lookup. The exchange inside a node follows.
"""

from __future__ import annotations

from weft.core.problem import COLUMN_OPS, EXCHANGES, GATHERS, LOOKUP_OPS
from weft.perf.lanes import ComputeLane, Rank
from weft.perf.terms import collective_us, gathered_bytes, hbm_us


def estimate_across_nodes_us(rank: Rank, slices: int) -> float:
    """Return the time of a problem on several nodes."""
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
