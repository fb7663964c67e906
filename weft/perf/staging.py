"""What vendors' libraries need done around them, simulated: rows brought together, sums added, shards made equal.

A vendor's matmul takes one matrix and gives one, without adding to what is there in another type; its collectives take shards
of one length. Where a schedule's steps are otherwise, the executor runs kernels of torch before and after, each with a launch
and its traffic (weft.runtime.arithmetic, weft.runtime.nccl). weft's own kernels need none of this.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.schedule import Collective, Gemm, Region, runs
from weft.core.work import region_bytes
from weft.perf.terms import hbm_us
from weft.perf.world import Process, World, ns


def staged(world: World, step: Gemm) -> Process:
    """Rows of a that are not one run are copied together, by one kernel, and those of the product to their places, by one for
    each run; what is accumulated is added by a kernel that reads both and writes one."""
    if not world.machine.stages or any(
        part.waits or part.adds or part.count or part.out.rank != part.a.rank for part in step.parts
    ):
        return  # one of weft's kernels
    rows, outs = [part.a for part in step.parts], [part.out for part in step.parts]
    launches, moved = 0, 0
    if len(runs(rows)) > 1:
        launches, moved = 1, 2 * _bytes(world, rows)
    if step.accumulate or world.schedule.buffer[outs[0].buffer].float32:
        launches, moved = launches + 1, moved + (3 if step.accumulate else 2) * _bytes(world, outs)
    elif len(runs(outs)) > 1:
        launches, moved = launches + len(runs(outs)), moved + 2 * _bytes(world, outs)
    yield world.env.timeout(ns(launches * world.machine.launch_us + hbm_us(world.machine, moved)))


def padded(world: World, step: Collective) -> Process:
    """An all-gather's shards are taken apart in one pass, a kernel a rank; a product to be scattered is cleared, copied, and
    its sum copied once more."""
    shards = world.schedule.problem.shards
    if (
        not world.machine.stages
        or step.op not in ("all_gather", "reduce_scatter")
        or shards[0][1] - shards[0][0] == shards[-1][1] - shards[-1][0]  # none is shorter than the last
    ):
        return
    passes, whole = (2, step.dst) if step.op == "all_gather" else (3, step.src)
    kernels_us = (len(shards) + 2) * world.machine.launch_us
    yield world.env.timeout(ns(kernels_us + hbm_us(world.machine, passes * region_bytes(world.schedule, whole))))


def _bytes(world: World, regions: Sequence[Region]) -> int:
    return sum(region_bytes(world.schedule, region) for region in regions)
