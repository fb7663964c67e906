"""The "three taxes" of arXiv 2511.02168: the costs of a schedule whose kernels end before others begin.

    bulk synchrony         the time of the call beyond its matmul pieces alone, which wait for data or are slowed by it. The
                           cost of cutting the matmul is its DIL
    inter-kernel locality  the data that one step writes to memory and a later step reads: staging buffers, gathered rows,
                           partial results
    kernel launches        the time that the call would save if launches were free

Traffic between kernels has two numbers: bytes, and the time of the GPU's memory for them. That time is an upper bound of the
saving, because memory may work while something else takes longer. The three taxes do not add up.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from weft.core.fused_collective import spelled_out
from weft.core.machine import Machine
from weft.core.schedule import Collective, Gemm, GroupedGemm, Lookup, Push, Reduce, Schedule, regions
from weft.core.work import region_bytes
from weft.perf import run
from weft.planner.signature import FREE_US, Signature, signature

_KERNELS = (Gemm, GroupedGemm, Lookup, Reduce, Push, Collective)
"""Each of these steps is a kernel, unless it is part of a fused kernel."""


@dataclass(frozen=True, kw_only=True)
class Taxes:
    """Taxes has the three taxes of one schedule, each of the rank that pays most. help(weft.planner.taxes) explains them.

    total_us: the time of the call. pieces_us: the time of its matmuls alone. waiting_us: its bulk synchrony.
    between_bytes, between_us: the traffic between kernels, and the memory's time for it.
    launch_us: the cost of launches. kernels: the number of kernels that a rank launches.
    """

    spec: str
    total_us: float
    pieces_us: float
    waiting_us: float
    between_bytes: int
    between_us: float
    launch_us: float
    kernels: int

    def __str__(self) -> str:
        launches = f"{self.kernels} {'kernel' if self.kernels == 1 else 'kernels'}"
        return (
            f"Three taxes of {self.spec}: {self.waiting_us:.0f} of {self.total_us:.0f} us waiting or slowed, beyond the "
            f"{self.pieces_us:.0f} that its pieces of matmul take alone; "
            f"{self.between_bytes / 1e6:,.0f} MB from kernel to kernel, {self.between_us:.0f} us of memory; "
            f"{self.launch_us:.0f} us would be saved if launching {launches} cost nothing."
        )


def taxes(schedule: Schedule, machine: Machine, losses: Signature | None = None) -> Taxes:
    """Simulate the taxes of a schedule on a machine. This takes one run, and three more without `losses`, its signature there.

    Raises ValueError as weft.schedule.simulate does."""
    losses = losses or signature(schedule, machine)
    free = run(schedule, dataclasses.replace(machine, launch_us=FREE_US))
    spelled = spelled_out(schedule).schedule
    between = max(_between(spelled, rank) for rank in range(len(spelled.ranks)))
    return Taxes(
        spec=losses.spec,
        total_us=losses.total_us,
        pieces_us=losses.pieces_us,
        waiting_us=max(0.0, losses.total_us - losses.pieces_us),
        between_bytes=between,
        between_us=between / (machine.gpu.hbm_gbps * 1e3),
        launch_us=max(0.0, losses.total_us - free.total_us),
        kernels=max(_launched(schedule, rank) for rank in range(len(schedule.ranks))),
    )


def _launched(schedule: Schedule, rank: int) -> int:
    """Return the number of kernels that a rank launches. A fused kernel has several steps."""
    spelled = spelled_out(schedule)
    count = 0
    for lane in spelled.schedule.ranks[rank]:
        fused = spelled.of_lane(rank, lane.name)
        inside = {at for low, high in fused for at in range(low, high)}
        count += len(fused) + sum(isinstance(step, _KERNELS) and at not in inside for at, step in enumerate(lane.steps))
    return count


def _between(schedule: Schedule, rank: int) -> int:
    """Return the bytes that all ranks write to and read from a rank's intermediate buffers."""
    found = (one for lanes in schedule.ranks for lane in lanes for step in lane.steps for one in regions(step))
    staged = (one for one in found if one.rank == rank and schedule.buffer[one.buffer].kind in ("symmetric", "local"))
    return sum(region_bytes(schedule, one) for one in staged)
