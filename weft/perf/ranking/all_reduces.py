"""Estimates for kernels that multiply and exchange at once, and for the other schedules of a matmul and an all-reduce."""

from __future__ import annotations

import dataclasses

from weft.perf.lanes import ComputeLane, CopyLanes, Rank
from weft.perf.ranking.scatters import overlapped_scatter_ends
from weft.perf.terms import collective_us, hbm_us, padded_us, streamed_cost, whole_collective_us
from weft.schedules.matmul_all_reduce import ONE_HOP_BYTES
from weft.schedules.traits import FamilyTraits


def _norm_us(rank: Rank) -> float:
    """Return the time of a norm of the whole result as a kernel of its own, if the problem has one."""
    problem = rank.problem
    if problem.norm_eps is None:
        return 0.0
    return rank.launch_us + hbm_us(rank.machine, 2 * problem.m * problem.n * problem.itemsize)


def estimate_exchanging_kernel_us(rank: Rank, hops: int) -> float:
    """Return the time of one kernel that multiplies and exchanges."""
    machine = rank.machine
    if machine.gpu.capabilities:
        cost, fixed_us = streamed_cost(machine, rank.problem, hops), machine.kernels.exchange_us
    else:
        cost, fixed_us = rank.library_gemm(rank.rows), 0.0
    lane, lanes = ComputeLane(rank), CopyLanes(rank, 1, matmul_us=rank.matmul_us)
    x_at_us = lanes.enqueue_x()
    lane.free_at_us = rank.launch_us + fixed_us + cost.busy_us * rank.power_slowdown(0.0, cost) + _exchange_us(rank, hops)
    lane.enqueue_weight_gradients(x_at_us=x_at_us)
    return lane.free_at_us + (_norm_us(rank) if hops == 2 else 0.0)


def estimate_all_reduce_us(rank: Rank, family: FamilyTraits, chunks: int) -> float:
    """Return the time of a matmul and an all-reduce: after each other, or an overlapping reduce-scatter and an all-gather."""
    return _sum_us(rank, family, chunks) + _norm_us(rank)


def _sum_us(rank: Rank, family: FamilyTraits, chunks: int) -> float:
    problem, machine = rank.problem, rank.machine
    product_bytes, lane = problem.m * problem.n * problem.itemsize, ComputeLane(rank)
    if family.matmul == "whole":
        lane.enqueue_matmul(rank.library_gemm(rank.rows))
        if family.scatter == "store_kernel":
            hops = 1 if product_bytes * (rank.node_ranks - 1) <= ONE_HOP_BYTES else 2
            return lane.free_at_us + rank.launch_us + _exchange_us(rank, hops)
        lane.free_at_us += whole_collective_us(machine, problem)
        if problem.addends:
            lane.enqueue_kernel(hbm_us(machine, (2 + len(problem.addends)) * product_bytes))
        return lane.free_at_us
    scattered = dataclasses.replace(problem, op="matmul_reduce_scatter", addends=(), norm_eps=None)
    ends = overlapped_scatter_ends(Rank(scattered, machine), family, chunks)
    gather_us = collective_us(machine, "all_gather", scattered.shard_bytes, problem.world_size, problem.nodes)
    padding_us = padded_us(machine, "all_gather", problem, product_bytes)
    return max(ends.compute_at_us + rank.fork_us + gather_us + padding_us, ends.copies_at_us)


def _exchange_us(rank: Rank, hops: int) -> float:
    """Return the time to store the product at the peers and to add what arrives; with two hops, also to send the sums."""
    machine, problem = rank.machine, rank.problem
    product_bytes = problem.m * problem.n * problem.itemsize
    piece_bytes = product_bytes if problem.op == "matmul_all_reduce" and hops == 1 else product_bytes / rank.node_ranks
    stores_us = rank.stores_us(piece_bytes) + rank.latency_us()
    adds_us = hbm_us(machine, (rank.node_ranks + 1 + len(problem.addends)) * piece_bytes)
    return hops * stores_us + adds_us + (hops - 1) * hbm_us(machine, 2 * (rank.node_ranks - 1) * piece_bytes)
