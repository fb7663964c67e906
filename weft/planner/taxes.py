"""What a schedule pays for being made of kernels that end before others begin: the "three taxes" of arXiv 2511.02168.

    bulk synchrony         by how much the call is longer than its own matmuls alone, in the pieces that the schedule has: they
                           wait for data, or are slowed by it. What cutting a matmul costs is not in it (see its DIL)
    inter-kernel locality  what one step writes to memory and a later one reads again: staging buffers, gathered rows, partial
                           results. A kernel that hands data on in registers, or straight to a peer, has none of it
    kernel launches        by how much the call would be shorter if launching a kernel cost nothing

The first and the last are times of the call. Traffic between kernels is given in bytes, and as the time that the GPU's memory
takes for it: at most so much can be saved, since memory may work while something else takes longer. The three do not add up.
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
"""Steps that are a kernel each, unless a fused kernel has them."""


@dataclass(frozen=True, kw_only=True)
class Taxes:
    """Those of one schedule, of the rank that pays most of each. help(weft.planner.taxes) says what they are.

    total_us: the call. pieces_us: its matmuls alone. waiting_us: its bulk synchrony. between_bytes: traffic between kernels.
    between_us: what memory takes for it. launch_us: what launches cost the call. kernels: how many a rank launches.
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
            f"{self.launch_us:.0f} us by launching {launches}."
        )


def taxes(schedule: Schedule, machine: Machine, losses: Signature | None = None) -> Taxes:
    """What a schedule pays on a machine, simulated: one run, and three more where `losses`, its signature there, is not given.
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
    """How many kernels a rank launches. A fused kernel has several steps."""
    spelled = spelled_out(schedule)
    count = 0
    for lane in spelled.schedule.ranks[rank]:
        fused = spelled.of_lane(rank, lane.name)
        inside = {at for low, high in fused for at in range(low, high)}
        count += len(fused) + sum(isinstance(step, _KERNELS) and at not in inside for at, step in enumerate(lane.steps))
    return count


def _between(schedule: Schedule, rank: int) -> int:
    """Bytes that steps of all ranks write to and read from those of a rank's buffers that are neither operand nor result."""
    found = (one for lanes in schedule.ranks for lane in lanes for step in lane.steps for one in regions(step))
    staged = (one for one in found if one.rank == rank and schedule.buffer[one.buffer].kind in ("symmetric", "local"))
    return sum(region_bytes(schedule, one) for one in staged)
