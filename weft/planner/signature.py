"""Measures where the time of an overlap goes: a schedule's decomposition and contention losses, as in FiCCO (arXiv 2512.10236).

    DIL   decomposition inefficiency loss: the time of the pieces alone / the time of the whole alone
    CIL   contention inefficiency loss: the time while the other kind runs / the time alone

Both exist for the matmul and for the communication, and 1 is no loss. A family's inefficiency signature is how these four grow
with sizes and chunk counts. The exposed time is what a call takes beyond the longer of its pieces' times alone: head, tail,
waits, and CIL.

To simulate one half alone, the same schedule runs on a machine on which the other half costs nothing: copies, stores, flags,
collectives and the network between nodes, or tiles and memory. So waits and orders stay the same.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import chain

from weft.core.fused_collective import spelled_out
from weft.core.hardware import AlphaBeta, Tile
from weft.core.machine import Machine
from weft.core.problem import CollectiveProblem, ColumnProblem, LookupProblem, Problem
from weft.core.schedule import Copy, Push, Reduce, Schedule, steps_of
from weft.perf import run
from weft.perf.terms import whole_collective_us, whole_gemm_us
from weft.planner.values import Candidate, predicted
from weft.schedules import spec

FREE_US, FREE_GBPS, FREE_TFLOPS = 1e-6, 1e9, 1e9


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The losses of one schedule of one problem.

    where: the machine on which it was simulated or measured. total_us: the time of the overlapped call.
    computation_us, communication_us: the times of the whole matmul and the whole collective alone.
    pieces_us, transfers_us: the times of the schedule's matmuls alone, and of its communication alone.
    gemm_cil, communication_cil: the contention losses. A loss is None if it is not known.
    """

    problem: Problem | LookupProblem | CollectiveProblem | ColumnProblem
    spec: str
    where: str
    total_us: float
    computation_us: float
    communication_us: float
    pieces_us: float
    transfers_us: float
    gemm_cil: float | None = None
    communication_cil: float | None = None

    @property
    def gemm_dil(self) -> float:
        return self.pieces_us / self.computation_us if self.computation_us else 1.0

    @property
    def communication_dil(self) -> float:
        return self.transfers_us / self.communication_us if self.communication_us else 1.0

    @property
    def ideal_us(self) -> float:
        return max(self.computation_us, self.communication_us)

    @property
    def loss(self) -> float:
        """The factor by which it is slower than the ideal."""
        return self.total_us / self.ideal_us - 1 if self.ideal_us else 0.0

    @property
    def of_ideal(self) -> str:
        """The loss as text. Schedules without cuBLAS's or NCCL's calls may take less than the ideal."""
        return f"{abs(self.loss):.0%} {'over' if self.loss >= 0 else 'under'} the ideal"

    @property
    def exposed_us(self) -> float:
        """The time beyond the longer half of the pieces."""
        return max(0.0, self.total_us - max(self.pieces_us, self.transfers_us))

    def __str__(self) -> str:
        return f"{self.problem}: {self.spec} {self.total_us:.0f} us, {self.of_ideal}"


def signature(schedule: Schedule, machine: Machine, whole: Candidate | None = None) -> Signature:
    """Simulate a schedule's losses. Raises ValueError as `run` does.

    whole: the prediction of the schedule, if it is known. Without it, one more simulation is run."""
    problem = schedule.problem
    whole = whole or predicted(schedule, run(schedule, machine), machine)
    pieces, transfers = run(schedule, without_communication(machine)), run(schedule, without_computation(machine))
    return Signature(
        problem=problem,
        spec=spec(schedule.name, schedule.chunks),
        where=f"simulated {machine.name}",
        total_us=whole.predicted_us,
        computation_us=whole_gemm_us(machine, problem),
        communication_us=whole_collective_us(machine, problem),
        pieces_us=pieces.total_us,
        transfers_us=transfers.total_us,
        gemm_cil=None if _moves(schedule) else _over(whole.computation_us, max(pieces.kernel_us)),
        communication_cil=_over(whole.communication_us, max(transfers.transfer_us)),
    )


def _moves(schedule: Schedule) -> bool:
    """Return whether kernels of the compute lane move data themselves, so that their time is not that of a matmul."""
    schedule = spelled_out(schedule).schedule
    lanes = list(chain(*schedule.ranks))
    computing = [lane for lane in lanes if lane.kind == "compute"]
    copies = any(steps_of(Copy, computing)) or any(steps_of(Push, computing))
    sums = (part for step in steps_of(Reduce, lanes) for part in step.parts)
    return copies or any(src.rank != part.out.rank for part in sums for src in part.srcs)


def _over(beside_us: float, alone_us: float) -> float | None:
    return beside_us / alone_us if alone_us > FREE_US else None


def without_contention(machine: Machine) -> Machine:
    """Return `machine` with kernels and copies that do not slow each other."""
    sources, spreads = (
        {path: value for path, value in known.items() if not path.startswith("contention.")}
        for known in (machine.sources, machine.spreads)
    )
    return dataclasses.replace(machine, contention={}, slow_lookups=False, sources=sources, spreads=spreads)  # type: ignore[arg-type]


def without_communication(machine: Machine) -> Machine:
    """Return `machine` with free copies, stores, links, flags, collectives and network. They still occupy their SMs."""
    machine = without_contention(machine)
    network = machine.network and dataclasses.replace(machine.network, gbps=FREE_GBPS, latency_us=FREE_US, step_us=FREE_US)
    host_gbps = FREE_GBPS if machine.links.host_gbps else None
    # The paths of a model's numbers differ from those of a table, and every number needs a source.
    gone = ("collectives.", "fork_us")
    sources = {path: source for path, source in machine.sources.items() if not path.startswith(gone)}
    spreads = {path: spread for path, spread in machine.spreads.items() if path in sources}
    for op in machine.collectives:
        sources |= dict.fromkeys((f"collectives.{op}.{name}" for name in ("fixed_us", "step_us", "gbps")), "assumed, nothing")
    return dataclasses.replace(
        machine,
        copies=dataclasses.replace(machine.copies, copy_us=FREE_US, gbps=FREE_GBPS, several_gbps=FREE_GBPS),
        stores=dataclasses.replace(machine.stores, gbps=tuple((sms, FREE_GBPS) for sms, _ in machine.stores.gbps), stall=0.0),
        links=dataclasses.replace(machine.links, gbps=FREE_GBPS, latency_us=FREE_US, host_gbps=host_gbps),
        flag_us=FREE_US,
        wake_us=machine.wake_us and FREE_US,
        fork_us=None,
        collectives=dict.fromkeys(machine.collectives, AlphaBeta(fixed_us=FREE_US, step_us=FREE_US, gbps=FREE_GBPS)),
        network=network,
        sources=sources,
        spreads=spreads,
    )


def without_computation(machine: Machine) -> Machine:
    """Return `machine` with free tiles and memory. Launches keep their cost, because a collective is launched, too."""
    machine = without_contention(machine)
    gpu = machine.gpu
    tiles = tuple(Tile(rows=tile.rows, cols=tile.cols, efficiency=1.0) for tile in gpu.tiles)
    fast = dataclasses.replace(
        gpu,
        tflops=dict.fromkeys(gpu.tflops, FREE_TFLOPS),
        tiles=tiles,
        tile_us=FREE_US,
        hbm_gbps=FREE_GBPS,
    )
    return dataclasses.replace(machine, gpu=fast, kernels=dataclasses.replace(machine.kernels, row_us=FREE_US))


def without_fixed_costs(machine: Machine) -> Machine:
    """Return `machine` on which launches, copies, waits, signals, messages and starts of lanes cost only the time of bytes."""
    return dataclasses.replace(
        machine,
        launch_us=FREE_US,
        flag_us=FREE_US,
        wake_us=machine.wake_us and FREE_US,
        fork_us=machine.fork_us and FREE_US,
        copies=dataclasses.replace(machine.copies, copy_us=FREE_US),
        network=machine.network and dataclasses.replace(machine.network, step_us=FREE_US),
    )
