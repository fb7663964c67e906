"""The "three taxes" of arXiv 2511.02168: what a schedule pays for kernels that end before the next ones begin.

    bulk synchrony         how much longer the call takes than its matmul pieces would alone, because they wait for data or
                           are slowed down. The DIL (weft.planner.signature) has the cost of splitting the matmul
    inter-kernel locality  the data that one step writes to memory and a later step reads: staging buffers, gathered rows,
                           partial results
    kernel launches        the time that the call would save if launches were free

Inter-kernel locality is given in bytes, and as the time that the GPU's memory takes for them. The call can save at most that
time, because memory may work while something else takes longer. The three taxes overlap, so their sum has no meaning.
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

    spec: the name of the schedule, with its number of chunks.
    total_us: the time of the call.
    pieces_us: the time that its matmul pieces take alone.
    waiting_us: the bulk synchrony.
    between_bytes: the bytes that kernels write to memory for later kernels, and that these read.
    between_us: the time that the GPU's memory takes for these bytes.
    launch_us: the time that the call would save if launches were free.
    kernels: the number of kernels that a rank launches.
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
            f"Three taxes of {self.spec}: the call takes {self.total_us:.0f} us, {self.waiting_us:.0f} us more than its matmul "
            f"pieces alone ({self.pieces_us:.0f} us); kernels pass on {self.between_bytes / 1e6:,.0f} MB through memory, which "
            f"takes memory {self.between_us:.0f} us; without the cost of launching {launches} it would take "
            f"{self.launch_us:.0f} us less."
        )


def taxes(schedule: Schedule, machine: Machine, losses: Signature | None = None) -> Taxes:
    """Simulate a schedule on a machine, and return its taxes. Raises ValueError as weft.schedule.simulate does.

    losses: the signature of the schedule on this machine, if it is known. Without it, three more simulations are run.
    """
    losses = losses or signature(schedule, machine)
    with_free_launches = run(schedule, dataclasses.replace(machine, launch_us=FREE_US))
    spelled = spelled_out(schedule).schedule
    between_bytes = max(_bytes_between_kernels(spelled, rank) for rank in range(len(spelled.ranks)))
    return Taxes(
        spec=losses.spec,
        total_us=losses.total_us,
        pieces_us=losses.pieces_us,
        waiting_us=max(0.0, losses.total_us - losses.pieces_us),
        between_bytes=between_bytes,
        between_us=between_bytes / (machine.gpu.hbm_gbps * 1e3),
        launch_us=max(0.0, losses.total_us - with_free_launches.total_us),
        kernels=max(_count_kernels(schedule, rank) for rank in range(len(schedule.ranks))),
    )


def _count_kernels(schedule: Schedule, rank: int) -> int:
    """Return the number of kernels that a rank launches. A fused kernel, which runs several steps, counts as one."""
    spelled = spelled_out(schedule)
    count = 0
    for lane in spelled.schedule.ranks[rank]:
        fused = spelled.of_lane(rank, lane.name)
        inside = {at for low, high in fused for at in range(low, high)}
        count += len(fused) + sum(isinstance(step, _KERNELS) and at not in inside for at, step in enumerate(lane.steps))
    return count


def _bytes_between_kernels(schedule: Schedule, rank: int) -> int:
    """Return the bytes that all ranks write to and read from a rank's intermediate buffers."""
    accessed = (one for lanes in schedule.ranks for lane in lanes for step in lane.steps for one in regions(step))
    intermediate = (one for one in accessed if one.rank == rank and schedule.buffer[one.buffer].kind in ("symmetric", "local"))
    return sum(region_bytes(schedule, one) for one in intermediate)
