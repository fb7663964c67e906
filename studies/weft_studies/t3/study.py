"""This module simulates all that T3's evaluation reports on one T3System. A T3Study has the results.

Contract: `run(system)` is a pure function: the same system gives the same T3Study, to the nanosecond. It takes a few seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from weft_studies.profile import Progress
from weft_studies.t3.configurations import (
    Overlapped,
    SubLayerRun,
    all_gather,
    fused,
    gemm_alone,
    reduce_scatter,
    run_sublayer,
)
from weft_studies.t3.grid import Chunks, Grid
from weft_studies.t3.layers import PHASE, Phase, other_ns
from weft_studies.t3.mapping import Collective, mapping
from weft_studies.t3.system import T3System
from weft_studies.t3.work import LARGE_SUBLAYERS, MODELS, SUBLAYERS, Layer, LayerGemm, SubLayer, Transformer

Pass = Literal["training", "prompt"]
PHASES: dict[Pass, tuple[Phase, ...]] = {"training": ("forward", "backward"), "prompt": ("forward",)}
CONCURRENT_UNITS = (8, 16)
MAPPED = SubLayer(model=MODELS[1], layer="FC2", world_size=8)
"""The sub-layer whose GEMM is fused with other collectives than the ring reduce-scatter."""


@dataclass(frozen=True, kw_only=True)
class EndToEnd:
    """EndToEnd is the result of a whole model.

    share: the share of sequential's time that the four sub-layers take.
    speedup: the speed-up with T3-MCA.
    speedup_t3: the speed-up with T3."""

    name: str
    kind: Pass
    share: float
    speedup: float
    speedup_t3: float


@dataclass(frozen=True, kw_only=True)
class ConcurrentAllReduce:
    """ConcurrentAllReduce is a GEMM that runs during the all-reduce of another GEMM's output, without memory contention.

    Section 3.2 of the paper does not name its sub-layers. These are the 16 of the paper's other figures.

    units: the number of units of the all-reduce. The GEMM has the others. None gives all units to both, which is the limit
        of what overlap can gain.
    gemm_slowdowns, all_reduce_slowdowns: by sub-layer, the time relative to a run alone on all units.
    speedups: by sub-layer, the speed-up over one after the other.
    """

    units: int | None
    gemm_slowdowns: tuple[float, ...]
    all_reduce_slowdowns: tuple[float, ...]
    speedups: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """Mapped is the result of MAPPED's GEMM with another collective, on GPUs with a link to each peer.

    communication_ns: the time of the transfers alone."""

    collective: Collective
    gemm_ns: int
    communication_ns: int
    fused: Overlapped


@dataclass(frozen=True, kw_only=True)
class T3Study:
    """T3Study has the results of the whole evaluation. `large` and `large_end_to_end` are those of the large models."""

    system: T3System
    sublayers: tuple[SubLayerRun, ...]
    large: tuple[SubLayerRun, ...]
    end_to_end: tuple[EndToEnd, ...]
    large_end_to_end: tuple[EndToEnd, ...]
    concurrent: tuple[ConcurrentAllReduce, ...]
    mapped: tuple[Mapped, ...]


def run(
    system: T3System,
    progress: Progress = lambda text, done, total: None,
    mapped: Sequence[Collective] = ("direct_reduce_scatter", "all_to_all", "all_gather"),
) -> T3Study:
    """Simulate the whole evaluation.

    progress: called with the next item, the items done and the total. mapped: the other collectives.

    Raises ValueError if the tiles of an output do not divide evenly among its ranks, or if the units are too few to share.
    """
    if system.units <= max(CONCURRENT_UNITS):
        raise ValueError(f"units is {system.units}; sharing them needs more than {max(CONCURRENT_UNITS)}")
    total = len(SUBLAYERS) + len(LARGE_SUBLAYERS) + 3
    sublayers = tuple(run_sublayers(system, SUBLAYERS, lambda text, done: progress(text, done, total)))
    large = tuple(run_sublayers(system, LARGE_SUBLAYERS, lambda text, done: progress(text, len(SUBLAYERS) + done, total)))
    progress("end to end", total - 3, total)
    whole = tuple(_end_to_end(system, SUBLAYERS, sublayers))
    whole_large = tuple(_end_to_end(system, LARGE_SUBLAYERS, large))
    progress("naive concurrency", total - 2, total)
    concurrent_runs = tuple(concurrent(system, units) for units in (None, *CONCURRENT_UNITS))
    progress("other mappings", total - 1, total)
    others = tuple(_mapped(system, collective) for collective in mapped)
    progress("done", total, total)
    return T3Study(
        system=system,
        sublayers=sublayers,
        large=large,
        end_to_end=whole,
        large_end_to_end=whole_large,
        concurrent=concurrent_runs,
        mapped=others,
    )


def require_tiles(system: T3System) -> None:
    """Raise ValueError if the tiles of an output do not divide evenly among its ranks. Nothing is simulated."""
    for sublayer in (*SUBLAYERS, *LARGE_SUBLAYERS):
        gemm = sublayer.gemm
        Chunks(tiles=Grid(gemm, system).tiles, out_bytes=gemm.out_bytes, world_size=sublayer.world_size)


def run_sublayers(
    system: T3System, sublayers: Sequence[SubLayer], progress: Callable[[str, int], None] = lambda text, done: None
) -> Iterator[SubLayerRun]:
    """Yield the results of each sub-layer in all configurations. Sub-layers with the same GEMM are simulated once."""
    known: dict[LayerGemm, SubLayerRun] = {}
    for done, sublayer in enumerate(sublayers):
        progress(sublayer.name, done)
        same = replace(sublayer.gemm, name=f"{sublayer.world_size} ranks")
        if same not in known:
            known[same] = run_sublayer(system, sublayer)
        yield replace(known[same], name=sublayer.name)


def _end_to_end(system: T3System, sublayers: Sequence[SubLayer], runs: Sequence[SubLayerRun]) -> Iterator[EndToEnd]:
    """Yield the results of the models that consist of these sub-layers. `runs` has the result of each sub-layer."""
    parts: dict[tuple[Transformer, int], dict[Layer, SubLayerRun]] = {}
    for sublayer, run in zip(sublayers, runs, strict=True):
        parts.setdefault((sublayer.model, sublayer.world_size), {})[sublayer.layer] = run
    for (model, world_size), own in parts.items():
        others = {phase: other_ns(system, model, world_size, phase) for phase in PHASES["training"]}
        for kind, phases in PHASES.items():
            rest = sum(others[phase] for phase in phases)
            ran = [run for layer, run in own.items() if PHASE[layer] in phases]
            yield _whole(f"{model.name} TP{world_size}", kind, rest, ran)


def _whole(name: str, kind: Pass, rest: int, runs: Sequence[SubLayerRun]) -> EndToEnd:
    """Return the result of a model that takes `rest` ns outside these sub-layers."""
    before, t3, t3_mca = (rest + sum(run.ns(each) for run in runs) for each in ("sequential", "t3", "t3_mca"))
    share, speedup, speedup_t3 = 1 - rest / before, before / t3_mca, before / t3
    return EndToEnd(name=name, kind=kind, share=share, speedup=speedup, speedup_t3=speedup_t3)


def concurrent(system: T3System, units: int | None) -> ConcurrentAllReduce:
    """Simulate all sub-layers with `units` units for the all-reduce. Raises ValueError if no units are left for the GEMM."""
    if units is not None and not 0 < units < system.units:
        raise ValueError(f"units is {units}; of {system.units} each side needs at least 1")
    rest = None if units is None else system.units - units
    pairs = list(zip(_kernels_ns(system, None, None), _kernels_ns(system, rest, units), strict=True))
    return ConcurrentAllReduce(
        units=units,
        gemm_slowdowns=tuple(slow[0] / fast[0] for fast, slow in pairs),
        all_reduce_slowdowns=tuple(slow[1] / fast[1] for fast, slow in pairs),
        speedups=tuple(sum(fast) / max(slow) for fast, slow in pairs),
    )


def _kernels_ns(system: T3System, rest: int | None, units: int | None) -> Iterator[tuple[int, int]]:
    """Yield the times, each alone, of every sub-layer's GEMM on `rest` units and its all-reduce on `units` units.

    None stands for all units. Equal sub-layers are simulated once."""
    known: dict[tuple[LayerGemm, int], tuple[int, int]] = {}
    for sublayer in SUBLAYERS:
        gemm, world_size = replace(sublayer.gemm, name="GEMM"), sublayer.world_size
        if (gemm, world_size) not in known:
            parts = (collective(system, gemm, world_size, units=units) for collective in (reduce_scatter, all_gather))
            known[gemm, world_size] = gemm_alone(system, gemm, units=rest).ns, sum(part.ns for part in parts)
        yield known[gemm, world_size]


def _mapped(system: T3System, collective: Collective) -> Mapped:
    gemm, world_size = MAPPED.gemm, MAPPED.world_size
    done = fused(system, gemm, world_size, "compute_first", collective=collective)
    chunks = sum(0 in route.links for route in mapping(collective, world_size).routes)
    moved = chunks * gemm.out_bytes / world_size / system.link.gbps
    return Mapped(
        collective=collective,
        gemm_ns=gemm_alone(system, gemm).ns,
        communication_ns=round(moved) + system.link.latency_ns,
        fused=done,
    )
