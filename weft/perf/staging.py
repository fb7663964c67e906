"""The simulation of copies around cuBLAS and NCCL calls.

A cuBLAS matmul reads one contiguous matrix and writes one, and NCCL's collectives need shards of equal length. If a step has
other operands, the executor runs torch kernels before and after it, each with a launch and its traffic
(weft.runtime.arithmetic, weft.runtime.network). weft's own kernels need no such copies.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.schedule import Collective, Gemm, Region, runs
from weft.core.work import region_bytes
from weft.perf.terms import padded_us, staged_us
from weft.perf.world import Process, World, ns


def stage_rows(world: World, step: Gemm) -> Process:
    """Copy the rows of a into one matrix by one kernel, and each run of the product to its place by a kernel of its own."""
    if not world.machine.stages or any(
        part.waits or part.adds or part.count or part.out.rank != part.a.rank for part in step.parts
    ):
        return  # one of weft's kernels
    rows, outs = [part.a for part in step.parts], [part.out for part in step.parts]
    us = staged_us(
        world.machine,
        rows=len(runs(rows)),
        row_bytes=_bytes(world, rows),
        outs=len(runs(outs)),
        out_bytes=_bytes(world, outs),
    )
    yield world.env.timeout(ns(us))


def pad_shards(world: World, step: Collective) -> Process:
    """Copy the shards of a collective so that they have equal lengths."""
    whole = step.dst if step.op == "all_gather" else step.src
    us = padded_us(world.machine, step.op, world.schedule.problem, region_bytes(world.schedule, whole))
    if us:
        yield world.env.timeout(ns(us))


def _bytes(world: World, regions: Sequence[Region]) -> int:
    return sum(region_bytes(world.schedule, region) for region in regions)
