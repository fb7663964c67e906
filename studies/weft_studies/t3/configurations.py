"""T3's five configurations of a GEMM and its all-reduce, and the rest of a transformer layer.

| configuration | time |
| --- | --- |
| sequential | GEMM, then reduce-scatter, then all-gather, each in a kernel on all units |
| t3 | fused GEMM and reduce-scatter, round-robin arbitration; then the all-gather |
| t3_mca | the same, but the arbiter serves compute first |
| ideal | the longer of GEMM and reduce-scatter, each timed alone; then the all-gather |
| ideal_nmc | the same, with the reduce-scatter that near-memory reduction makes faster |

Source: T3, arXiv 2401.16677, section 5.3.

The end-to-end figures also need the time of a layer outside the sub-layers that T3 fuses. With T tokens, hidden size H,
sequences of L tokens, A heads and N ranks, each rank does the following work in a layer. Each GEMM runs on all units.

| | forward | backward |
| --- | --- | --- |
| GEMMs | T x 3H/N x H, T x 4H/N x H | the inputs of OP and FC2: T x H/N x H, T x 4H/N x H; four weights, K = T |
| attention, T A / N rows | rows x L x H/A, rows x H/A x L | one of the first kind, three of the second |
| passes over T x H | 10 (two norms, two biases with dropout and residual) | 16 |
| passes over T x 4H/N (GeLU) | 2 | 3 |
| passes over T A / N x L (softmax, dropout) | 4 | 5 |
| optimizer | | 28 bytes for each of 12 H H / N weights (Adam, mixed precision) |

A pass reads or writes its elements once at the memory's rate. The layer is that of Megatron-LM, arXiv 1909.08053. The passes
are those of unfused kernels, which read each input once and write each output once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import simpy

from weft_studies.t3 import kernels
from weft_studies.t3.fused import Collective, FusedRun, mapping, unrotated
from weft_studies.t3.kernels import Chunks, Grid, Process
from weft_studies.t3.memory import GpuMemory, Policy
from weft_studies.t3.system import ITEMSIZE, Layer, LayerGemm, SubLayer, T3System, Transformer

Configuration = Literal["sequential", "t3", "t3_mca", "ideal", "ideal_nmc"]
CONFIGURATIONS: tuple[Configuration, ...] = get_args(Configuration)


@dataclass(frozen=True, kw_only=True)
class KernelAlone:
    """KernelAlone is the result of a kernel that ran alone.

    ns: its time.
    traffic: the bytes of memory traffic by class.
    peak: the highest share of the memory's rate in use at any time."""

    ns: int
    traffic: Mapping[str, int]
    peak: float

    @property
    def bytes(self) -> int:
        return sum(self.traffic.values())


@dataclass(frozen=True, kw_only=True)
class Overlapped(KernelAlone):
    """Overlapped is the result of a GEMM that is fused with a collective.

    gemm_ns: when the units finished the GEMM.
    threshold: the limit that the arbiter set. None if it set none.
    entries: the largest number of wavefront tiles tracked at a time.
    spilled: the number of tiles for which the tracker had no entry.
    log: every event as text, if requested."""

    gemm_ns: int
    threshold: int | None
    entries: int
    spilled: int
    log: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SubLayerRun:
    """SubLayerRun has the results of a sub-layer in all configurations.

    `gemm`, `reduce_scatter` and `all_gather` are the kernels of sequential. `reduce_scatter_nmc` is that of ideal_nmc."""

    name: str
    world_size: int
    gemm: KernelAlone
    reduce_scatter: KernelAlone
    reduce_scatter_nmc: KernelAlone
    all_gather: KernelAlone
    t3: Overlapped
    t3_mca: Overlapped

    def ns(self, configuration: Configuration) -> int:
        """Return the time of a configuration until the all-gather ends."""
        gemm, scatter = self.gemm.ns, self.reduce_scatter.ns
        before: dict[Configuration, int] = {
            "sequential": gemm + scatter,
            "t3": self.t3.ns,
            "t3_mca": self.t3_mca.ns,
            "ideal": max(gemm, scatter),
            "ideal_nmc": max(gemm, self.reduce_scatter_nmc.ns),
        }
        return before[configuration] + self.all_gather.ns

    def speedup(self, configuration: Configuration) -> float:
        """Return the speed-up of a configuration over sequential."""
        return self.ns("sequential") / self.ns(configuration)

    def traffic(self, configuration: Literal["sequential", "t3", "t3_mca"]) -> dict[str, int]:
        """Return the bytes of memory traffic by class."""
        kernels = {"sequential": (self.gemm, self.reduce_scatter), "t3": (self.t3,), "t3_mca": (self.t3_mca,)}
        return {name: size for part in (*kernels[configuration], self.all_gather) for name, size in part.traffic.items()}


def alone(system: T3System, body: Callable[[GpuMemory], Process]) -> KernelAlone:
    """Simulate one kernel on an idle GPU."""
    memory = GpuMemory(simpy.Environment(), system)
    memory.env.run(until=memory.env.process(body(memory)))
    return KernelAlone(ns=int(memory.env.now), traffic=dict(memory.traffic), peak=memory.peak)


def gemm_alone(system: T3System, work: LayerGemm, *, units: int | None = None) -> KernelAlone:
    """Simulate the GEMM as a kernel on `units` units (default: all)."""
    return alone(system, lambda memory: kernels.cached(memory, Grid(work, system), units or system.units))


def reduce_scatter(
    system: T3System, work: LayerGemm, world_size: int, *, units: int | None = None, near_memory: bool = False
) -> KernelAlone:
    """Simulate a ring reduce-scatter of the GEMM's output as a kernel on `units` units (default: all)."""
    chunk = Chunks(Grid(work, system).tiles, work.out_bytes, world_size).bytes
    kernel = kernels.reduce_scatter_near_memory if near_memory else kernels.reduce_scatter
    return alone(system, lambda memory: kernel(memory, chunk, world_size, units or system.units))


def all_gather(system: T3System, work: LayerGemm, world_size: int, *, units: int | None = None) -> KernelAlone:
    """Simulate a ring all-gather of the GEMM's reduced output as a kernel on `units` units (default: all)."""
    chunk = Chunks(Grid(work, system).tiles, work.out_bytes, world_size).bytes
    return alone(system, lambda memory: kernels.all_gather(memory, chunk, world_size, units or system.units))


def fused(
    system: T3System,
    work: LayerGemm,
    world_size: int,
    policy: Policy,
    *,
    collective: Collective = "ring_reduce_scatter",
    log: bool = False,
) -> Overlapped:
    """Simulate the GEMM fused with a collective of its output, which the tracker triggers.

    Raises ValueError if the output's tiles do not divide evenly among `world_size` ranks.
    """
    runs = _simulated(system, Grid(work, system), world_size, policy, collective)
    first = runs[0]
    traffic = Counter({"tracker": 0})
    for run in runs:
        traffic.update(run.memory.traffic)
    tracked = system.mechanisms.tracker
    return Overlapped(
        ns=max(run.end_ns for run in runs),
        traffic={name: size // len(runs) for name, size in traffic.items()},
        peak=max(run.memory.peak for run in runs),
        gemm_ns=max(run.gemm_ns for run in runs),
        threshold=first.memory.threshold if first.memory.policy == "compute_first" else None,
        entries=max(run.tracker.most for run in runs) if tracked else 0,
        spilled=max(run.tracker.spilled for run in runs),
        log=tuple(map(str, first.events)) if log else (),
    )


def _simulated(system: T3System, grid: Grid, world_size: int, policy: Policy, collective: Collective) -> Sequence[FusedRun]:
    """Simulate one GPU that represents all, or all GPUs if they differ, and return the finished runs."""
    env, switches = simpy.Environment(), system.mechanisms
    arbitration: Policy = policy if switches.arbiter else "round_robin"
    if switches.rotation:
        mappings = [mapping(collective, world_size)]
    else:
        mappings = [unrotated(collective, world_size, rank) for rank in range(world_size)]
    runs = [FusedRun(GpuMemory(env, system, arbitration), grid, each) for each in mappings]
    for run in runs:
        run.receivers = () if switches.rotation else runs
        env.process(run.run())
    env.run()
    for run in runs:
        assert not run.tracker.live, f"{run.tracker.live} entries of the tracker were never complete"
    return runs


def run_sublayer(system: T3System, sublayer: SubLayer) -> SubLayerRun:
    """Simulate a sub-layer in all configurations."""
    work, world_size = sublayer.gemm, sublayer.world_size
    return SubLayerRun(
        name=sublayer.name,
        world_size=world_size,
        gemm=gemm_alone(system, work),
        reduce_scatter=reduce_scatter(system, work, world_size),
        reduce_scatter_nmc=reduce_scatter(system, work, world_size, near_memory=system.mechanisms.near_memory_compute),
        all_gather=all_gather(system, work, world_size),
        t3=fused(system, work, world_size, "round_robin"),
        t3_mca=fused(system, work, world_size, "compute_first"),
    )


Phase = Literal["forward", "backward"]
PHASE: dict[Layer, Phase] = {"OP": "forward", "FC2": "forward", "FC1": "backward", "IP": "backward"}
HIDDEN_PASSES: dict[Phase, int] = {"forward": 10, "backward": 16}
GELU_PASSES: dict[Phase, int] = {"forward": 2, "backward": 3}
SCORE_PASSES: dict[Phase, int] = {"forward": 4, "backward": 5}
OPTIMIZER_BYTES = 28


def other_ns(system: T3System, model: Transformer, world_size: int, phase: Phase) -> int:
    """Return one layer's time for one batch without the four sub-layers that end in an all-reduce.

    The backward phase includes the optimizer."""
    gemms = sum(gemm_alone(system, gemm).ns for gemm in _gemms(model, world_size, phase))
    return gemms + round(_moved(model, world_size, phase) / system.hbm.gbps)


def _gemms(model: Transformer, world_size: int, phase: Phase) -> Iterator[LayerGemm]:
    tokens, hidden, rows = model.tokens, model.hidden, model.tokens * model.heads // world_size
    head = hidden // model.heads
    wide, narrow = 4 * hidden // world_size, hidden // world_size
    scores = LayerGemm(name="scores", m=rows, n=model.sequence, k=head)
    values = LayerGemm(name="values", m=rows, n=head, k=model.sequence)
    if phase == "forward":
        yield LayerGemm(name="IP", m=tokens, n=3 * hidden // world_size, k=hidden)
        yield LayerGemm(name="FC1", m=tokens, n=wide, k=hidden)
        yield from (scores, values)
        return
    yield LayerGemm(name="OP input", m=tokens, n=narrow, k=hidden)
    yield LayerGemm(name="FC2 input", m=tokens, n=wide, k=hidden)
    for name, cols in (("IP", 3 * hidden // world_size), ("OP", narrow), ("FC1", wide), ("FC2", wide)):
        yield LayerGemm(name=f"{name} weight", m=hidden, n=cols, k=tokens)
    yield from (scores, values, values, values)


def _moved(model: Transformer, world_size: int, phase: Phase) -> int:
    """Return the bytes that elementwise kernels and the optimizer read and write."""
    tokens, hidden = model.tokens, model.hidden
    passes = HIDDEN_PASSES[phase] * tokens * hidden
    passes += GELU_PASSES[phase] * tokens * 4 * hidden // world_size
    passes += SCORE_PASSES[phase] * tokens * model.heads * model.sequence // world_size
    weights = 12 * hidden * hidden // world_size if phase == "backward" else 0
    return passes * ITEMSIZE + weights * OPTIMIZER_BYTES
