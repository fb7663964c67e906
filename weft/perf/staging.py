"""What cuBLAS and NCCL need done around them, simulated: rows brought together, shards made equal.

A cuBLAS matmul takes one matrix and gives one; NCCL's collectives take shards of one length. Where a schedule's steps are
otherwise, the executor runs kernels of torch before and after, each with a launch and its traffic (weft.runtime.arithmetic,
weft.runtime.nccl). weft's own kernels need none of this.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.schedule import Collective, Gemm, Region, runs
from weft.core.work import region_bytes
from weft.perf.terms import padded_us, staged_us
from weft.perf.world import Process, World, ns


def staged(world: World, step: Gemm) -> Process:
    """Rows of a that are not one run are copied together, by one kernel, and those of the product to their places, by one for
    each run."""
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


def padded(world: World, step: Collective) -> Process:
    """A collective's shards made equal."""
    whole = step.dst if step.op == "all_gather" else step.src
    us = padded_us(world.machine, step.op, world.schedule.problem, region_bytes(world.schedule, whole))
    if us:
        yield world.env.timeout(ns(us))


def _bytes(world: World, regions: Sequence[Region]) -> int:
    return sum(region_bytes(world.schedule, region) for region in regions)
