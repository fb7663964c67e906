"""Derives a Machine from samples. Each number has a source, with the variation of its samples.

Fits minimise relative errors, so small sizes count as much as large ones. Numbers that no probe measures are those of a base
profile, and their sources say so. For GPUs the base is the nearest shipped profile, and for a CPU a model of the host executor.
If a probe failed, its numbers are also those of the base profile, with the reason.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from weft.compat.device import of_properties
from weft.core import codec
from weft.core.errors import warn_once
from weft.core.hardware import AlphaBeta, CopyEngines, Gpu, Links, Stores, Table, Tile, numbers
from weft.core.machine import Machine, load
from weft.core.problem import ITEMSIZE
from weft.core.settings import put
from weft.perf.terms import gemm_us
from weft.runtime.choose import nearest_profile
from weft.tools.calibrate.common import ProbeSample, of, typical_spread
from weft.tools.calibrate.kernel_fields import DERIVED, Derived

T = TypeVar("T")

REPORTED = "the device's own report"
"""The source of numbers that the device reports, which need no probe."""
_TILE = 64
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
PAIRS = ("gemm during copy", "copy during gemm", "gemm during all_gather", "all_gather during gemm")
_ASSUMED = "assumed: as "
_LEAST_US = 0.05
_SCALES = np.linspace(0.4, 1.3, 37)
_TILE_US = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
_ENOUGH = 0.85
"""The share of the rate of all SMs that communication blocks should reach."""
_ALL = 0.98
"""The same share for blocks that run alone on the GPU."""


@dataclass(frozen=True, kw_only=True)
class LinearCost:
    """LinearCost is the cost us = fixed_us + bytes / (gbps * 1e3)."""

    fixed_us: float
    gbps: float


def line(points: Iterable[tuple[float, float]]) -> LinearCost:
    """Fit a line through points (bytes, us) with the least relative errors.

    >>> line([(1000, 3.0), (3000, 5.0), (5000, 7.0)])
    LinearCost(fixed_us=2.0, gbps=1.0)
    """
    pairs = list(points)
    weighted = np.array([[1 / us, nbytes / us] for nbytes, us in pairs])
    (fixed, slope), *_ = np.linalg.lstsq(weighted, np.ones(len(pairs)), rcond=None)
    if slope <= 0:  # no size was large enough to show a rate
        slope = min(us / nbytes for nbytes, us in pairs)
    return LinearCost(fixed_us=round(max(_LEAST_US, float(fixed)), 3), gbps=round(1e-3 / float(slope), 3))


class Profile:
    """Profile builds a Machine.

    when: the date and the device, for sources. failed: why numbers were not measured, by the prefix of their paths."""

    def __init__(
        self,
        base: Machine,
        samples: Sequence[ProbeSample],
        *,
        world_size: int,
        when: str,
        failed: Mapping[str, str] | None = None,
    ) -> None:
        self.base, self.samples, self.world_size, self._when = base, samples, world_size, when
        self._failed = dict(failed or {})
        self._sources: dict[str, str] = {"world_size": f"measured {when}"}
        self._spreads: dict[str, float] = {}

    def machine(self, name: str, words: str, *, device: str = "") -> Machine:
        """Return the base with the measured numbers in place of its own. device: the device of the Machine.

        If the samples of a number are missing or invalid, it stays that of the base, with a warning."""
        base = self.base
        values: dict[str, Any] = {
            "gpu": self._gpu(),
            "copies": self._or(base.copies, self._copies, "copies."),
            "stores": self._or(base.stores, self._stores, "stores.gbps", "stores.sms"),
            "links": self._or(base.links, self._links, "links."),
            "launch_us": self._or(base.launch_us, lambda: self._single("launch_us", "launch"), "launch_us"),
            "flag_us": self._or(base.flag_us, lambda: self._single("flag_us", "flag"), "flag_us"),
            "collectives": {**base.collectives, **self._collectives()},
            "contention": {**base.contention, **self._or({}, self._contention, "contention.")},
            "wake_us": self._or(base.wake_us, self._wake_us, "wake_us"),
        }
        values |= {"name": name, "description": words, "world_size": self.world_size, "device": device}
        unchanged = {part.name: getattr(base, part.name) for part in dataclasses.fields(base) if part.name not in values}
        values = {**unchanged, **values, "sources": {}, "spreads": {}}
        paths = dict.fromkeys(path for key, value in values.items() for path, _ in numbers(value, key))
        sources = {path: self._sources.get(path) or self._assumed(path) for path in paths}
        made = Machine(**{**values, "sources": sources, "spreads": self._spreads})
        for derived in DERIVED:
            if any(sample.what == derived.samples[0] for sample in self.samples):
                made = self._or(made, lambda: self._with(made, derived), *derived.paths)  # noqa: B023
        late = {path: self._assumed(path) for path, source in made.sources.items() if source.startswith(_ASSUMED)}
        return dataclasses.replace(made, sources={**made.sources, **late})

    def _or(self, otherwise: T, measured: Callable[[], T], *paths: str) -> T:
        """Return the measured value. If that fails or is not valid in a Machine, return `otherwise`.

        paths: the prefixes of the paths, for the warning and the sources."""
        sources, spreads = dict(self._sources), dict(self._spreads)
        try:
            return measured()
        except Exception as error:  # any error in one probe's numbers must leave those of the others valid
            self._sources, self._spreads = sources, spreads
            reason = " ".join(f"{error}".split()) or type(error).__name__
            if not set(paths) & set(self._failed):
                warn_once(f"calibration: {', '.join(paths)} as in {self.base.name}: {reason}")
            self._failed = {**dict.fromkeys(paths, reason), **self._failed}
            return otherwise

    def _assumed(self, path: str) -> str:
        said = self.base.sources.get(path, "")
        if said == REPORTED:
            return said
        why = next((f"; {why}" for begin, why in self._failed.items() if path.startswith(begin)), "")
        return f"{_ASSUMED}{self.base.name}{why}"

    def _with(self, machine: Machine, derived: Derived) -> Machine:
        """Return `machine` with the fields derived from samples of weft's kernels. Raises ValueError if they are not valid."""
        values = derived.values(machine, self.samples)
        data: dict[str, Any] = codec.dump(machine)
        for path, value in values.items():
            put(data, path, lambda _: value)  # noqa: B023
            data["sources"][path] = f"measured {self._when}: {derived.method}"
            used = [sample for what in derived.samples for sample in of(self.samples, what)]
            data["spreads"][path] = typical_spread(used)
        made: Machine = codec.load(Machine, data)
        return made

    def _say(self, path: str, what: str, samples: Sequence[ProbeSample]) -> None:
        self._sources[path] = f"measured {self._when}: {what}"
        self._spreads[path] = typical_spread(samples)

    def _single(self, path: str, what: str) -> float:
        found = of(self.samples, what)
        self._say(path, f"median of {len(found[0].us)}, {found[0].key[0]} in a row", found)
        return round(max(_LEAST_US, found[0].median_us), 3)

    def _gpu(self) -> Gpu:
        gpu = self.base.gpu
        for measured, *paths in (
            (self._with_memory, "gpu.hbm_gbps"),
            (self._with_gathers, "gpu.gather_share"),
            (self._with_peaks, "gpu.tflops."),
            (self._with_tiles, "gpu.tiles", "gpu.tile_us"),
            (self._with_power, "gpu.sustained"),
        ):
            gpu = self._or(gpu, lambda: measured(gpu), *paths)  # noqa: B023
        return gpu

    def _with_memory(self, gpu: Gpu) -> Gpu:
        copied = of(self.samples, "memory")
        (nbytes,) = copied[0].key
        self._say("gpu.hbm_gbps", f"a copy of {nbytes >> 20} MiB, read and write", copied)
        gbps = 2e-3 * nbytes / copied[0].median_us
        # On a busy machine, the rate of a small copy may round to zero.
        return dataclasses.replace(gpu, hbm_gbps=round(gbps, 1) or gbps)

    def _with_gathers(self, gpu: Gpu) -> Gpu:
        """Set the gather share of a CPU, on which torch does the lookups."""
        gathered = [sample for sample in self.samples if sample.what == "gather"]
        if not gathered:
            return gpu
        rows, row_bytes = gathered[0].key
        self._say("gpu.gather_share", f"{rows} rows of {row_bytes} bytes in bags of 32, over a copy's rate", gathered)
        share = rows * row_bytes * (1 + 1 / 32) / gathered[0].median_us / 1e3 / gpu.hbm_gbps
        return dataclasses.replace(gpu, gather_share=round(share, 3) or share)

    def _with_power(self, gpu: Gpu) -> Gpu:
        """Set the rate of matmuls in a row relative to one after a pause. The base says when the slowdown starts."""
        found = sorted((sample for sample in self.samples if sample.what == "power"), key=lambda sample: sample.key)
        if len(found) < 2 or gpu.burst_us is None:
            return gpu
        one, many = found
        more_us = (many.key[0] * many.median_us - one.median_us) / (many.key[0] - 1)
        self._say("gpu.sustained", f"one matmul after a pause over one of {many.key[0]} in a row", found)
        return dataclasses.replace(gpu, sustained=round(min(1.0, one.median_us / more_us), 4))

    def _with_peaks(self, gpu: Gpu) -> Gpu:
        """Set the peak of each dtype to that of the base, or to the measured rate if that is higher."""
        found = dict(gpu.tflops)
        for dtype in gpu.tflops:
            samples = [sample for sample in self.samples if sample.what == f"gemm {dtype}"]
            if samples:
                reached = max(_tflops_of(sample) for sample in samples)
                if reached > found[dtype]:
                    found[dtype] = round(reached, 3)
                    self._say(f"gpu.tflops.{dtype}", "the most that a matmul reached", samples)
        return dataclasses.replace(gpu, tflops=found)

    def _with_tiles(self, gpu: Gpu) -> Gpu:
        """Scale the efficiencies of the base's tile shapes by one factor, and set a tile's fixed time. Both are fitted to the
        matmuls."""
        dtype, samples = self._matmuls(gpu)
        launch_us = of(self.samples, "launch")[0].median_us

        def scaled(scale: float, tile_us: float) -> Gpu:
            tiles = tuple(Tile(rows=t.rows, cols=t.cols, efficiency=round(t.efficiency * scale, 4)) for t in gpu.tiles)
            return dataclasses.replace(gpu, tiles=tiles, tile_us=tile_us)

        def error(candidate: Gpu) -> float:
            machine = dataclasses.replace(self.base, gpu=candidate, launch_us=launch_us)
            return statistics.fmean(abs(_gemm_us(machine, s, dtype) / s.median_us - 1) for s in samples)

        best = min((scaled(scale, tile_us) for scale in _SCALES for tile_us in _TILE_US), key=error)
        what = f"fitted to {len(samples)} matmuls in {dtype}, mean error {error(best):.0%}; shapes as in {self.base.name}"
        self._say("gpu.tiles", what, samples)
        self._say("gpu.tile_us", what, samples)
        return best

    def _matmuls(self, gpu: Gpu) -> tuple[str, list[ProbeSample]]:
        """Return the dtype with the most samples, and these samples."""
        by_dtype = {dtype: [s for s in self.samples if s.what == f"gemm {dtype}"] for dtype in gpu.tflops}
        dtype = max(by_dtype, key=lambda each: len(by_dtype[each]))
        return dtype, of(self.samples, f"gemm {dtype}")

    def _copies(self) -> CopyEngines:
        pushes = of(self.samples, "copy push")
        fitted = line((s.key[0] * s.key[1], s.median_us) for s in pushes if s.key[1] == 1)
        many = [s.median_us / s.key[1] - s.key[0] / (fitted.gbps * 1e3) for s in pushes if s.key[1] > 1]
        copy_us = round(max(_LEAST_US, statistics.median(many)), 3) if many else fitted.fixed_us
        self._say("copies.copy_us", "of several in a row, less their bytes" if many else "fitted to copies by size", pushes)
        self._say("copies.gbps", "fitted to copies by size, all ranks at once", pushes)
        rates = {"copy_us": copy_us, "gbps": fitted.gbps, "several_gbps": fitted.gbps}
        copies = dataclasses.replace(self.base.copies, **rates, engines=1)  # type: ignore[arg-type]
        return self._with_several(copies)

    def _with_several(self, copies: CopyEngines) -> CopyEngines:
        found = [sample for sample in self.samples if sample.what == "several"]
        if len(found) < 2:
            self._sources["copies.several_gbps"] = self._sources["copies.gbps"]
            self._sources["copies.engines"] = f"measured {self._when}: one stream was all there was to try"
            return copies
        copies = self._with_turns(copies, found)
        one, more = sorted(found, key=lambda sample: sample.key[1])
        self._say("copies.several_gbps", f"to every peer, on {more.key[1]} streams", [more])
        self._say("copies.engines", "the faster of one stream and one for each peer", found)
        several_gbps = (self.world_size - 1) * more.key[0] / more.median_us / 1e3
        faster = more.median_us < 0.95 * one.median_us
        return dataclasses.replace(copies, several_gbps=round(several_gbps, 2), engines=more.key[1] if faster else 1)

    def _with_turns(self, copies: CopyEngines, several: Sequence[ProbeSample]) -> CopyEngines:
        """Set by how much copies to all peers in turns are slower than whole ones, apart from the fixed cost of more copies."""
        turns = [sample for sample in self.samples if sample.what == "turns"]
        if not turns:
            return copies
        one, (nbytes, rounds) = min(several, key=lambda sample: sample.key[1]), turns[0].key
        pushes = self.world_size - 1
        whole_us = one.median_us - pushes * copies.copy_us
        longer = (turns[0].median_us - pushes * rounds * copies.copy_us) / max(_LEAST_US, whole_us) - 1
        self._say("copies.turning", f"to every peer, {nbytes >> 20} MiB in {rounds} rounds", turns)
        return dataclasses.replace(copies, turning=round(max(0.001, longer / (1 - 1 / rounds)), 3))

    def _stores(self) -> Stores:
        found = sorted((s for s in self.samples if s.what == "stores"), key=lambda sample: sample.key[1])
        if not found:
            return self.base.stores
        rates = [(s.key[1], round((self.world_size - 1) * s.key[0] / s.median_us / 1e3, 2)) for s in found]
        most = max(rate for _, rate in rates)
        self._say("stores.gbps", f"to every peer, {found[0].key[0] >> 20} MiB each", found)
        self._say("stores.sms", f"the fewest that reach {_ENOUGH:.0%} of the most", found)
        self._say("stores.sms_alone", f"the fewest that reach {_ALL:.0%} of the most, half of all at most", found)
        sms, alone = (next(sms for sms, rate in rates if rate >= share * most) for share in (_ENOUGH, _ALL))
        half = max(1, self.base.gpu.sms // 2)
        return dataclasses.replace(self.base.stores, gbps=tuple(rates), sms=min(sms, half), sms_alone=min(alone, half))

    def _links(self) -> Links:
        """Return the rate of the fastest measured transfer, and the latency. A round of hops is a signal, the latency, a wait
        and a reset of the flag."""
        pushes, hops = of(self.samples, "copy push"), of(self.samples, "hop")
        self._say("links.gbps", "the fastest copy, without its fixed cost", pushes)
        fitted = line((s.key[0], s.median_us) for s in pushes if s.key[1] == 1)
        flag_us = of(self.samples, "flag")[0].median_us
        latency_us = self.base.links.latency_us
        if self.base.wake_us is None:
            self._say("links.latency_us", "a round of signals between neighbours, less three flag operations", hops)
            latency_us = round(max(_LEAST_US, hops[0].median_us - 3 * flag_us), 3)
        host_gbps = self.base.links.host_gbps
        if host_gbps is not None:
            self._say("links.host_gbps", "all ranks' copies at once", pushes)
            host_gbps = round(fitted.gbps * self.world_size, 2)
        return dataclasses.replace(self.base.links, gbps=fitted.gbps, latency_us=latency_us, host_gbps=host_gbps)

    def _wake_us(self) -> float | None:
        """Return the wake-up time of a stream that sleeps while it waits: a round of signals minus its operations and the
        latency."""
        if self.base.wake_us is None:
            return None
        hops, flag_us = of(self.samples, "hop"), of(self.samples, "flag")[0].median_us
        self._say("wake_us", "a round of signals between neighbours, less three flag operations and the links' latency", hops)
        return round(max(_LEAST_US, hops[0].median_us - 3 * flag_us - self.base.links.latency_us), 3)

    def _collectives(self) -> dict[str, Any]:
        found = {op: self._or(None, lambda: self._collective(op), f"collectives.{op}") for op in COLLECTIVES}  # noqa: B023
        return {op: table for op, table in found.items() if table}

    def _collective(self, op: str) -> Table:
        """Return the table of one collective. Times are raised where noise makes them fall with size."""
        found = sorted(of(self.samples, op), key=lambda sample: sample.key)
        self._say(f"collectives.{op}.points", "as `sequential` runs it", found)
        self._sources[f"collectives.{op}.world_size"] = f"measured {self._when}"
        points, at_least = [], 0.0
        for sample in found:
            at_least = max(at_least, round(sample.median_us, 3))
            points.append((sample.key[0], at_least))
        return Table(world_size=self.world_size, points=tuple(points))

    def _contention(self) -> dict[str, float]:
        """Return the slowdowns of measured pairs: their concurrent time divided by the time alone."""
        found = {}
        for pair in PAIRS:
            concurrent = [sample for sample in self.samples if sample.what == pair]
            if concurrent:
                alone = of(self.samples, f"{pair.split()[0]} alone")
                self._say(f"contention.{pair}", "the first during the second, over its time alone", [*concurrent, *alone])
                found[pair] = round(max(0.01, concurrent[0].median_us / alone[0].median_us), 3)
        return found


def _gemm_us(machine: Machine, sample: ProbeSample, dtype: str) -> float:
    m, n, k = sample.key
    return gemm_us(machine, m, n, k, dtype)


def _tflops_of(sample: ProbeSample) -> float:
    m, n, k = sample.key
    return 2 * m * n * k / sample.median_us / 1e6


def base(device: str, ranks: int) -> Machine:
    """Return a complete profile, in which measured numbers replace others. device: "cpu" or "cuda"."""
    return _host(ranks) if device == "cpu" else _gpu()


def _gpu() -> Machine:
    nearest = nearest_profile(torch.device("cuda", 0))
    found = torch.cuda.get_device_properties(0)
    block = dataclasses.asdict(of_properties(found))
    block.pop("warp")
    gpu = dataclasses.replace(nearest.gpu, l2_bytes=found.L2_cache_size, **block)
    reported = dict.fromkeys(("gpu.sms", "gpu.l2_bytes", "gpu.shared_bytes"), REPORTED)
    return dataclasses.replace(nearest, gpu=gpu, sources={**nearest.sources, **reported})


def _host(ranks: int) -> Machine:
    """Model a rank's share of the cores as SMs with small square tiles. All copies share the host's memory.

    Every 1 is a placeholder for a number that is measured, or that does not matter for the host executor."""
    threads = max(2, (os.cpu_count() or 1) // ranks)
    gpu = Gpu(
        sms=threads,
        tflops=dict.fromkeys(ITEMSIZE, 1e-3),
        tiles=(Tile(rows=_TILE, cols=_TILE, efficiency=1.0),),
        tile_us=1.0,
        flag_efficiency=1.0,
        hbm_gbps=1.0,
        l2_bytes=1,
        half_tile=1.0,
        cut_k=8192,
        gather_share=1.0,
        burst_bytes=64,
    )
    values: dict[str, Any] = {
        "name": "host executor",
        "description": "modelled",
        "world_size": ranks,
        "gpu": gpu,
        "copies": CopyEngines(copy_us=1.0, gbps=1.0, several_gbps=1.0, engines=1),
        "stores": Stores(gbps=((1, 1.0), (threads, 1.0)), sms=1, sms_alone=1, stall=1.0),
        "kernels": load("h200x8").kernels,
        "links": Links(topology="pcie", gbps=1.0, latency_us=1.0, host_gbps=1.0),
        "launch_us": 1.0,
        "flag_us": 1.0,
        "collectives": {op: AlphaBeta(fixed_us=1.0, step_us=1.0, gbps=1.0) for op in ("all_gather", "reduce_scatter")},
    }
    paths = dict.fromkeys(path for key, value in values.items() for path, _ in numbers(value, key))
    return Machine(**values, sources=dict.fromkeys(paths, "assumed, a placeholder of the model"))


def derive(machine: Machine, world_size: int, name: str) -> Machine:
    """Return `machine` with `world_size` GPUs. Its sources say which numbers are derived.

    Computation, copies, stores, flags and launches are those of the measured profile. The links lead to a switch, so a port's
    rate does not change. The tables of collectives do not change either: predictions for more ranks add a hop for each further
    rank and scale the time per byte by the number of peers, but stay within the links' rate (weft.perf.terms.collective_us).
    Raises ValueError for fewer GPUs than it has, and for links whose rate more GPUs would have to share."""
    if world_size <= machine.world_size:
        raise ValueError(f"--ranks is {world_size}; {machine.name} has {machine.world_size}: derive a profile of more")
    if machine.links.topology != "switch":
        raise ValueError(
            f"links.topology is {machine.links.topology!r}; only behind a switch do more GPUs leave links as they are"
        )
    description = f"{world_size} GPUs, derived from {machine.name} ({machine.description})"
    known = {path: f"derived from {machine.name}: {source}" for path, source in machine.sources.items()}
    known["world_size"] = f"derived from {machine.name}"
    return dataclasses.replace(machine, name=name, description=description, world_size=world_size, sources=known, spreads={})
