"""This module simulates T3's headline without each mechanism, and on systems that differ in one number.

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import simpy

from weft_studies.profile import changed
from weft_studies.published import geomean
from weft_studies.t3.configurations import Overlapped, SubLayerRun, fused
from weft_studies.t3.gemm import slices_under_way
from weft_studies.t3.memory import GpuMemory, Policy
from weft_studies.t3.study import run_sublayers
from weft_studies.t3.system import Mechanisms, T3System
from weft_studies.t3.work import SUBLAYERS, LayerGemm, SubLayer

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
