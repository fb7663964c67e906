"""This module simulates all that T3's evaluation reports on one T3System. A T3Study has the results.

Contract: `run(system)` is a pure function: the same system gives the same T3Study, to the nanosecond. It takes a few seconds.

Its variants are the headline without each mechanism, and on systems that differ in one number.

| function | what it varies |
| --- | --- |
| tracker_sizes | entries of the tracker: 64, 256 and 1,024 |
| ablation | T3-MCA with each mechanism switched off |
| update_costs | memory time of a near-memory update: 1, 1.25 and 2 times that of a write. 2 is the paper's number |
| more_units | twice the compute units |
| cliff | three numbers that remove T3-MCA's gain over T3, or most of it |

Why there is a cliff. In this model communication slows a GEMM down because reads wait longer. A slice of the main loop takes
the longer of its multiplication and its fetch. A fetch takes the memory's latency plus the time of the communication's entries
in the queue. In the shipped system a multiplication takes 731 ns. T3 lets communication fill the queue, so a fetch takes
1,210 ns and the large layers (FC2, FC1, IP) are slower. T3-MCA limits communication to 30 entries there, so a fetch takes
758 ns. With a queue of 32 entries, T3's communication holds hardly more entries than T3-MCA's. A fetch takes 767 ns, and the
arbiter gains nothing. Its cost remains: in OP layers the stores of a wave use the whole memory rate, and compute first makes
communication wait for them, although these layers end when communication ends. The thresholds are not the cause, because with
32 entries or three stages the intensity of every first stage stays in its class. They are not scaled with the queue, because
the paper gives them as numbers of entries.

With a third stage or a deeper slice, the cliff was a defect of the model: a unit fetched all slices for which shared memory had
room, whatever their size, and so hid all of T3's latency. Now a unit has at most `unit_gbps` times the latency bytes in flight,
as for its stores and the kernels of collectives, and T3-MCA keeps a gain of 3 to 4 %. The remaining step is a limit of the
model: every read takes the mean latency, so all fetches are hidden or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import simpy

from weft_studies.figures import geomean
from weft_studies.profile import Progress, changed
from weft_studies.t3.configurations import (
    PHASE,
    Overlapped,
    Phase,
    SubLayerRun,
    all_gather,
    fused,
    gemm_alone,
    other_ns,
    reduce_scatter,
    run_sublayer,
)
from weft_studies.t3.fused import Collective, mapping
from weft_studies.t3.kernels import Chunks, Grid, slices_under_way
from weft_studies.t3.memory import GpuMemory, Policy
from weft_studies.t3.system import (
    LARGE_SUBLAYERS,
    MODELS,
    SUBLAYERS,
    Layer,
    LayerGemm,
    Mechanisms,
    SubLayer,
    T3System,
    Transformer,
)

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


Runs = Sequence[SubLayerRun] | None
AS_IT_IS = ("", None)
TRACKER_ENTRIES = (64, 256, 1024)
UPDATE_COSTS = (1.0, 1.25, 2.0)
CLIFF: tuple[tuple[str, int], ...] = (("tile.stages", 3), ("tile.k", 64), ("hbm.queue_entries", 32))


@dataclass(frozen=True, kw_only=True)
class VariantRow:
    """VariantRow has the headline of one system. Means are geometric.

    name: the number that was changed. "as it is" if none was.
    t3, t3_mca, ideal: the mean speed-ups over sequential, minus 1.
    t3_max, t3_mca_max, ideal_max: the largest speed-ups, minus 1.
    gain: the mean speed-up of T3-MCA over T3 before the all-gather, minus 1.
    gain_op, gain_others: the same in OP layers only, and in the other layers only.
    saved: the mean share of memory traffic that T3-MCA saves.
    multiply_ns: the time to multiply one slice of a tile.
    fetch_ns, fetch_mca_ns: the time to fetch one slice during T3's communication, and under T3-MCA's highest threshold.
    """

    name: str
    t3: float
    t3_max: float
    t3_mca: float
    t3_mca_max: float
    ideal: float
    ideal_max: float
    gain: float
    gain_op: float
    gain_others: float
    saved: float
    multiply_ns: float
    fetch_ns: float
    fetch_mca_ns: float


@dataclass(frozen=True, kw_only=True)
class TrackerSizeRow:
    """TrackerSizeRow has the results of one tracker size, under T3-MCA.

    spilled: the share of wavefront tiles that were counted in memory.
    traffic: the share of memory traffic that reads and writes these counts."""

    entries: int
    spilled: float
    traffic: float
    variant: VariantRow


@dataclass(frozen=True, kw_only=True)
class AblationRow:
    """AblationRow has the results of T3-MCA without one mechanism.

    off: the mechanism's name. None if all are on.
    t3_mca, t3_mca_max: the geometric mean and the maximum of the speed-ups over sequential, minus 1.
    saved: the geometric mean of the share of memory traffic saved."""

    off: str | None
    t3_mca: float
    t3_mca_max: float
    saved: float


def tracker_sizes(system: T3System, runs: Runs = None, sublayers: Sequence[SubLayer] = SUBLAYERS) -> tuple[TrackerSizeRow, ...]:
    """Return the headline by the number of tracker entries.

    runs: the runs of the unchanged system, if available. The functions below use it in the same sense."""
    rows = []
    for entries in TRACKER_ENTRIES:
        sized = changed(system, "tracker.entries", entries)
        rows.append(_tracker_size(sized, sublayers, _runs(sized, sublayers, runs if sized == system else None)))
    return tuple(rows)


def ablation(system: T3System, runs: Runs = None, sublayers: Sequence[SubLayer] = SUBLAYERS) -> tuple[AblationRow, ...]:
    """Return the results with all mechanisms on, and with each one off. Without rotation this takes several seconds."""
    before = _runs(system, sublayers, runs)
    rows = [_ablated(None, before, [run.t3_mca for run in before])]
    for switch in fields(Mechanisms):
        off = changed(system, f"mechanisms.{switch.name}", value=False)
        rows.append(_ablated(switch.name, before, list(_fused(off, sublayers))))
    return tuple(rows)


def update_costs(system: T3System, runs: Runs = None, sublayers: Sequence[SubLayer] = SUBLAYERS) -> tuple[VariantRow, ...]:
    """Return the headline by the memory time of a near-memory update.

    At 2 an update takes as long as the read and the write that it replaces, so near-memory compute saves only traffic."""
    return _changed(system, runs, sublayers, [("hbm.update_cost", cost) for cost in UPDATE_COSTS])


def more_units(system: T3System, runs: Runs = None, sublayers: Sequence[SubLayer] = SUBLAYERS) -> tuple[VariantRow, ...]:
    """Return the headline as it is, and with twice the compute units, whose faster GEMM hides less communication."""
    return _changed(system, runs, sublayers, [AS_IT_IS, ("units", 2 * system.units)])


def cliff(system: T3System, runs: Runs = None, sublayers: Sequence[SubLayer] = SUBLAYERS) -> tuple[VariantRow, ...]:
    """Return the headline as it is, and with each number that removes T3-MCA's gain over T3. See the module's text."""
    return _changed(system, runs, sublayers, [AS_IT_IS, *CLIFF])


def _runs(system: T3System, sublayers: Sequence[SubLayer], runs: Runs) -> Sequence[SubLayerRun]:
    return list(run_sublayers(system, sublayers)) if runs is None else runs


def _changed(
    system: T3System, runs: Runs, sublayers: Sequence[SubLayer], changes: Sequence[tuple[str, Any]]
) -> tuple[VariantRow, ...]:
    """Return the headline for each of these changes of one number."""
    rows = []
    for path, value in changes:
        other = changed(system, path, value) if path else system
        name = f"{path} = {value}" if path else "as it is"
        rows.append(_variant(name, other, sublayers, _runs(other, sublayers, runs if other == system else None)))
    return tuple(rows)


def _variant(name: str, system: T3System, sublayers: Sequence[SubLayer], runs: Sequence[SubLayerRun]) -> VariantRow:
    t3, mca, ideal = ([run.speedup(kind) - 1 for run in runs] for kind in ("t3", "t3_mca", "ideal"))
    gains = {
        kind: [run.t3.ns / run.t3_mca.ns for run, each in zip(runs, sublayers, strict=True) if (each.layer == "OP") == kind]
        for kind in (True, False)
    }
    return VariantRow(
        name=name,
        t3=_mean(t3),
        t3_max=max(t3),
        t3_mca=_mean(mca),
        t3_mca_max=max(mca),
        ideal=_mean(ideal),
        ideal_max=max(ideal),
        gain=geomean(gains[True] + gains[False]) - 1,
        gain_op=geomean(gains[True]) - 1 if gains[True] else 0.0,
        gain_others=geomean(gains[False]) - 1 if gains[False] else 0.0,
        saved=1 - geomean(_bytes(run, run.t3_mca) / sum(run.traffic("sequential").values()) for run in runs),
        multiply_ns=system.slice_ns,
        fetch_ns=_fetch_ns(system, "round_robin"),
        fetch_mca_ns=_fetch_ns(system, "compute_first"),
    )


def _mean(gains: Sequence[float]) -> float:
    return geomean(1 + gain for gain in gains) - 1


def _bytes(run: SubLayerRun, overlapped: Overlapped) -> int:
    """Return the memory traffic of a fused GEMM and the all-gather after it."""
    return overlapped.bytes + run.all_gather.bytes


def _fetch_ns(system: T3System, policy: Policy) -> float:
    """Return the time to fetch one slice while a ring transfer is in progress."""
    memory = GpuMemory(simpy.Environment(), system, policy, max(system.arbiter.thresholds))
    memory.flow("communication", 1, lambda: 1.0, {"rs_read": 1, "rs_write": 1}, update=frozenset(["rs_write"]))
    return memory.latency_ns() / slices_under_way(system)


def _tracker_size(system: T3System, sublayers: Sequence[SubLayer], runs: Sequence[SubLayerRun]) -> TrackerSizeRow:
    counted = [run.t3_mca.traffic["gemm_write"] * _wavefronts_per_byte(system) for run in runs]
    return TrackerSizeRow(
        entries=system.tracker.entries,
        spilled=sum(run.t3_mca.spilled for run in runs) / sum(counted),
        traffic=sum(run.t3_mca.traffic["tracker"] for run in runs) / sum(_bytes(run, run.t3_mca) for run in runs),
        variant=_variant(f"tracker.entries = {system.tracker.entries}", system, sublayers, runs),
    )


def _wavefronts_per_byte(system: T3System) -> float:
    """Return the number of wavefront tiles per byte of output."""
    return system.tile.wavefronts / (2 * system.tile.rows * system.tile.cols)


def _fused(system: T3System, sublayers: Sequence[SubLayer]) -> Iterator[Overlapped]:
    """Simulate T3-MCA's fused GEMM of each sub-layer. Equal sub-layers are simulated once."""
    known: dict[tuple[LayerGemm, int], Overlapped] = {}
    for sublayer in sublayers:
        key = replace(sublayer.gemm, name="GEMM"), sublayer.world_size
        if key not in known:
            known[key] = fused(system, *key, "compute_first")
        yield known[key]


def _ablated(off: str | None, before: Sequence[SubLayerRun], after: Sequence[Overlapped]) -> AblationRow:
    pairs = list(zip(before, after, strict=True))
    gains = [run.ns("sequential") / (each.ns + run.all_gather.ns) - 1 for run, each in pairs]
    left = (_bytes(run, each) / sum(run.traffic("sequential").values()) for run, each in pairs)
    return AblationRow(off=off, t3_mca=_mean(gains), t3_mca_max=max(gains), saved=1 - geomean(left))
