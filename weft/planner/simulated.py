"""One schedule simulated on one machine: its spans, its time and the sequential program's, and where the time goes.

`signature` has the schedule's decomposition and contention losses, as in FiCCO (arXiv 2512.10236):

    DIL   decomposition inefficiency loss: the time of the pieces alone / the time of the whole alone
    CIL   contention inefficiency loss: the time while the other kind runs / the time alone

Both exist for the matmul and for the communication, and 1 is no loss. A family's inefficiency signature is how these four grow
with sizes and chunk counts. The exposed time is what a call takes beyond the longer of its pieces' times alone: head, tail,
waits, and CIL.

`taxes` has the "three taxes" of arXiv 2511.02168: what a schedule pays for kernels that end before the next ones begin.

    bulk synchrony         how much longer the call takes than its matmul pieces would alone, because they wait for data or
                           are slowed down. The DIL has the cost of splitting the matmul
    inter-kernel locality  the data that one step writes to memory and a later step reads: staging buffers, gathered rows,
                           partial results
    kernel launches        the time that the call would save if launches were free

Inter-kernel locality is given in bytes, and as the time that the GPU's memory takes for them. The call can save at most that
time, because memory may work while something else takes longer. The three taxes overlap, so their sum has no meaning.

To simulate one half alone, the same schedule runs on a machine on which the other half costs nothing: copies, stores, flags,
collectives and the network between nodes, or tiles and memory. So waits and orders stay the same.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from weft.core.fused_collective import spelled_out
from weft.core.hardware import AlphaBeta, Tile
from weft.core.machine import Machine
from weft.core.problem import CollectiveProblem, ColumnProblem, LookupProblem, Problem, RaggedProblem
from weft.core.schedule import Collective, Copy, Gemm, GroupedGemm, Lookup, Push, Reduce, Schedule, regions, steps_of
from weft.core.span import Span
from weft.core.work import region_bytes
from weft.perf import run
from weft.perf.ragged import program_us
from weft.perf.terms import whole_collective_us, whole_gemm_us
from weft.planner.values import Candidate, predicted
from weft.planner.words import count, percent, us
from weft.schedules import build, spec

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
    def exposed_us(self) -> float:
        """The time beyond the longer half of the pieces."""
        return max(0.0, self.total_us - max(self.pieces_us, self.transfers_us))

    @property
    def losses(self) -> dict[str, float | None]:
        """The four losses by name."""
        return {
            "matmul DIL": self.gemm_dil,
            "matmul CIL": self.gemm_cil,
            "communication DIL": self.communication_dil,
            "communication CIL": self.communication_cil,
        }

    def __str__(self) -> str:
        # Schedules without cuBLAS's or NCCL's calls may take less than the ideal.
        ideal = f"{percent(abs(self.loss))} {'over' if self.loss >= 0 else 'under'} the ideal"
        named = ", ".join(f"{name} {loss:.2f}" for name, loss in self.losses.items() if loss is not None)
        return f"{self.spec}: {us(self.total_us)} us, {ideal}, {us(self.exposed_us)} us exposed; {named}."


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


_KERNELS = (Gemm, GroupedGemm, Lookup, Reduce, Push, Collective)
"""Each of these steps is a kernel, unless it is part of a fused kernel."""


@dataclass(frozen=True, kw_only=True)
class Taxes:
    """Taxes has the three taxes of one schedule, each of the rank that pays most. help(weft.planner.simulated) explains them.

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
        launching = count(self.kernels, "kernel")
        return (
            f"Three taxes of {self.spec}: the call takes {us(self.total_us)} us, {us(self.waiting_us)} us more than its "
            f"matmul pieces alone ({us(self.pieces_us)} us); kernels pass on {self.between_bytes / 1e6:,.0f} MB through "
            f"memory, which takes memory {us(self.between_us)} us; without the cost of launching {launching} it "
            f"would take {us(self.launch_us)} us less."
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
    launched = 0
    for lane in spelled.schedule.ranks[rank]:
        fused = spelled.of_lane(rank, lane.name)
        inside = {at for low, high in fused for at in range(low, high)}
        launched += len(fused) + sum(isinstance(step, _KERNELS) and at not in inside for at, step in enumerate(lane.steps))
    return launched


def _bytes_between_kernels(schedule: Schedule, rank: int) -> int:
    """Return the bytes that all ranks write to and read from a rank's intermediate buffers."""
    accessed = (one for lanes in schedule.ranks for lane in lanes for step in lane.steps for one in regions(step))
    intermediate = (one for one in accessed if one.rank == rank and schedule.buffer[one.buffer].kind in ("symmetric", "local"))
    return sum(region_bytes(schedule, one) for one in intermediate)


Progress = Callable[[str, int, int], None]
FLAGS = ("wait", "signal")


@dataclass(frozen=True, kw_only=True)
class LaneUse:
    """The use of a lane of one rank in a call.

    busy_us: the time of steps that work, including gates of a kernel. waiting_us: the time of waits. Neither includes signals.
    """

    rank: int
    lane: str
    steps: int
    busy_us: float
    waiting_us: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The simulation of one schedule.

    machine: the name of the machine. sequential_us: the time of the same problem's sequential program.
    losses: the decomposition and contention losses, and the exposed time. spans: the spans of all steps of all ranks.
    """

    machine: str
    sequential_us: float
    losses: Signature
    spans: tuple[Span, ...]

    @property
    def total_us(self) -> float:
        return self.losses.total_us

    @property
    def slowest(self) -> int:
        """The first of the ranks that end last."""
        return max(self.spans, key=lambda span: (span.end_us, -span.rank)).rank if self.spans else 0

    @property
    def lanes(self) -> tuple[LaneUse, ...]:
        """The use of each lane, in the order of ranks and lanes."""
        return tuple(lane_uses(self.spans))


def predict_sequential_us(problem: Problem, machine: Machine, *, known: bool = False) -> float:
    """Return the time of the program without overlap. For a call with splits that is none of weft's schedules, but NCCL and a
    grouped matmul of torch. known: as in `program_us`."""
    if isinstance(problem, RaggedProblem):
        return program_us(machine, problem, known=known)
    return run(build(problem, "sequential"), machine).total_us


def simulated(schedule: Schedule, machine: Machine, progress: Progress) -> Simulation:
    """Simulate a schedule. Raises ValueError as `weft.perf.run` does."""
    steps = ("the schedule", "its halves alone", "the sequential program")
    progress(steps[0], 0, len(steps))
    whole = run(schedule, machine)
    progress(steps[1], 1, len(steps))
    losses = signature(schedule, machine, predicted(schedule, whole, machine))
    progress(steps[2], 2, len(steps))
    sequential_us = predict_sequential_us(schedule.problem, machine)
    progress(steps[2], 3, len(steps))
    return Simulation(machine=machine.name, sequential_us=sequential_us, losses=losses, spans=whole.spans)


def lanes_of(spans: Iterable[Span]) -> list[tuple[int, str]]:
    """Return (rank, lane) of the spans in order of rank. The compute lane is first, and numbers in names sort by value."""

    def key(lane: tuple[int, str]) -> tuple[int, bool, list[tuple[int, str]]]:
        parts = re.findall(r"(\D*)(\d*)", lane[1])
        return lane[0], lane[1] != "compute", [(int(digits or 0), words) for words, digits in parts]

    return sorted({(span.rank, span.lane) for span in spans}, key=key)


def lane_uses(spans: Sequence[Span]) -> Iterator[LaneUse]:
    """Yield the use of each lane. A lane runs one step at a time, so durations add up."""
    by_lane: dict[tuple[int, str], list[Span]] = {}
    for span in spans:
        by_lane.setdefault((span.rank, span.lane), []).append(span)
    for rank, lane in lanes_of(spans):
        items = by_lane[rank, lane]
        busy_us = sum(span.duration_us - span.waited_us for span in items if span.kind not in FLAGS)
        waiting_us = sum(span.duration_us if span.kind == "wait" else span.waited_us for span in items)
        yield LaneUse(rank=rank, lane=lane, steps=len(items), busy_us=busy_us, waiting_us=waiting_us)
