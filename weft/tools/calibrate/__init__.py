"""Calibration measures this machine, and returns the Machine profile with which the planner predicts.

    probes (in rank processes)  -> samples: several times of each operation, each the time of the slowest rank
    profile                     -> Machine: fitted numbers, each with its source and its spread

Probes run one after the other. Each is a separate task of the rank processes, so that progress can be shown, and the timeout of
the task ends a probe that hangs. All probes together take at most TOTAL_TIMEOUT_S. If a probe fails, the calibration continues.
Its numbers are then those of the base profile, with the reason in their sources.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from weft.core import __version__
from weft.core.errors import warn_once
from weft.core.machine import Machine
from weft.runtime.ranks import RankFailed, Ranks
from weft.tools.calibrate import common
from weft.tools.calibrate.common import ProbeSample
from weft.tools.calibrate.kernel_fields import staging_check
from weft.tools.calibrate.profile import COLLECTIVES, Profile, base

Progress = Callable[[str, int, int], None]
PROBE_TIMEOUT_S, START_TIMEOUT_S = 60.0, 120.0
TOTAL_TIMEOUT_S = 240.0
"""The timeout of all probes together. Probes that have not started by then count as failed."""
_MIB = 1 << 20
GPU_SHAPES = (
    *((8192, 8192, 8192), (4096, 4096, 4096), (8192, 3584, 8192), (8192, 1792, 4096), (2048, 3584, 8192)),
    *((1024, 3584, 8192), (512, 3584, 8192), (256, 8192, 4096), (4096, 7168, 2048), (8192, 4096, 1792)),
    # In tiles of 128 x 256 on 132 SMs: one full wave, one row of tiles more than that, three waves, and a single row of tiles.
    *((1408, 3072, 4096), (1536, 3072, 4096), (4224, 3072, 4096), (128, 16384, 4096)),
)
"""M, N, K of the measured matmuls: those of ranks in the models that weft knows, and some around whole waves of tiles."""
HOST_SHAPES = ((256, 256, 256), (128, 512, 512), (512, 512, 512), (64, 1024, 512), (512, 256, 1024))
GPU_BYTES = tuple(1 << power for power in (14, 16, 18, 20, 22, 24, 26))
HOST_BYTES = tuple(1 << power for power in (12, 14, 16, 18, 20))


NOT_MEASURED = {
    "gpu.sms": "the driver reports it",
    "gpu.shared_bytes": "the driver reports it",
    "gpu.l2_bytes": "the driver reports it",
    "gpu.cut_k": "it takes many GEMMs to see which ones cuBLAS splits along K",
    "gpu.burst_bytes": "it takes gathers of rows of many lengths; 64 bytes is one access of HBM",
    "gpu.burst_us": "the time until power limits a GPU depends on what ran before",
    "gpu.tile_step": "the tile shapes of cuBLAS are read from the names of its kernels",
    "gpu.step_rate": "it is fitted to hundreds of GEMMs",
    "kernels.l2_share": "it shows only in GEMMs whose parts arrive late",
    "kernels.sums": "it follows from the registers of the kernel that sums",
    "kernels.lookup_copy_us": "it shows only in whole lookups",
    "contention.computation": "it depends on a user's computation",
    "network.": "there is one host",
    "collective_sms": "NCCL does not report it",
    "host_wait_us": "it is the time of the host, whose load differs",
    "fork_us": "it shows only in whole calls",
}
"""Why no probe measures a number, by the prefix of its path in the profile."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A Probe measures some numbers of the profile.

    name: the name for progress and messages.
    work: the function that every rank runs. It returns the same samples on every rank.
    arguments: the arguments of `work` after the device.
    measures: the prefixes of the paths of the numbers that its samples give.
    """

    name: str
    work: Callable[..., list[ProbeSample]]
    arguments: tuple[Any, ...] = ()
    measures: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ProbeResults:
    """ProbeResults has what a run of probes has given, by the name of the probe.

    samples: those of each probe that succeeded.
    seconds: the duration of each probe that ran.
    failed: why a probe has no samples.
    """

    samples: dict[str, list[ProbeSample]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A Calibration is the result of `calibrate`.

    machine: the profile.
    samples: all samples from which it was derived.
    seconds: the duration of each probe that ran, by its name.
    failed: why numbers were not measured, by the prefix of their paths.
    checks: lines of text that compare a prediction with its measurement.
    """

    machine: Machine
    samples: tuple[ProbeSample, ...]
    seconds: Mapping[str, float]
    failed: Mapping[str, str]
    checks: tuple[str, ...]


def probes(device: str) -> tuple[Probe, ...]:
    """Return the probes for a device, "cpu" or "cuda", in the order in which they run."""
    on_gpu = device == "cuda"
    launches, flags, hops, concurrent = common.host_launches, common.host_flags, common.host_hops, common.host_concurrent
    if on_gpu:  # imported here because it needs Triton
        from weft.tools.calibrate.gpu_probes import concurrent, flags, hops, launches
    shapes, sizes = (GPU_SHAPES, GPU_BYTES) if on_gpu else (HOST_SHAPES, HOST_BYTES)
    first, *others = ("bfloat16", "float32") if on_gpu else ("float32", "bfloat16", "float16")
    tiles, memory = ("gpu.tiles", "gpu.tile_us", f"gpu.tflops.{first}"), (256 if on_gpu else 16) * _MIB
    listed = [
        Probe(name="launches", work=launches, measures=("launch_us",)),
        Probe(name="memory", work=common.memory, arguments=(memory,), measures=("gpu.hbm_gbps",)),
        Probe(name=f"matmuls, {first}", work=common.gemms, arguments=(shapes, first), measures=tiles),
        *(
            Probe(name=f"a matmul, {each}", work=common.gemms, arguments=(shapes[1:2], each), measures=(f"gpu.tflops.{each}",))
            for each in others
        ),
        Probe(name="flags", work=flags, measures=("flag_us",)),
        Probe(name="flags between ranks", work=hops, measures=("wake_us", "links.latency_us")),
        *(
            Probe(name=op, work=common.collectives, arguments=(op, sizes), measures=(f"collectives.{op}",))
            for op in COLLECTIVES
        ),
        Probe(
            name="concurrent pairs",
            work=concurrent,
            measures=("contention.gemm", "contention.copy", "contention.all_"),
        ),
    ]
    if not on_gpu:
        listed.append(Probe(name="gathers", work=common.host_gathers, arguments=(1 << 12, 128), measures=("gpu.gather_share",)))
        return (*listed, Probe(name="copies", work=common.host_copies, measures=("copies.", "links.")))
    return (*listed, *_gpu_probes())


def _gpu_probes() -> tuple[Probe, ...]:
    """Return the probes that run on GPUs only: of copy engines, stores and weft's own kernels."""
    from weft.tools.calibrate import gpu_probes as gpu

    several = ("copies.several_gbps", "copies.engines", "copies.turning")
    fields = ("kernels.lookup_copy_gbps", "kernels.lookup_copy_bytes")
    exchanged = ("kernels.row_us", "kernels.streamed", "kernels.exchange_us")
    counted = ("gpu.kernel_tiles", "gpu.flag_efficiency", "gpu.half_tile")
    return (
        Probe(name="copies", work=gpu.copies, arguments=("push",), measures=("copies.", "links.")),
        Probe(name="copies to all", work=gpu.several, measures=several),
        Probe(name="stores", work=gpu.stores, measures=("stores.gbps", "stores.sms")),
        Probe(name="matmuls in a row", work=gpu.power, measures=("gpu.sustained",)),
        Probe(name="tiles that count", work=gpu.counted_tiles, arguments=(4096,), measures=counted),
        Probe(name="tiles that hardware stores", work=gpu.stored_tiles, arguments=(4096,), measures=("gpu.stored_tiles",)),
        Probe(name="lookups", work=gpu.lookups, arguments=(1 << 20, 256), measures=("gpu.gather_share",)),
        Probe(name="sums", work=gpu.sums, arguments=(32 * _MIB,), measures=("kernels.sm_gbps", "kernels.pull_gbps")),
        Probe(name="multiplied and exchanged", work=gpu.exchanges, arguments=((512, 4096),), measures=exchanged),
        Probe(
            name="tiles at a peer",
            work=gpu.far_tiles,
            arguments=((512, 8192),),
            measures=("stores.tiles", "stores.stall"),
        ),
        Probe(name="a matrix in the cache", work=gpu.cached, arguments=(4096, 2560), measures=("gpu.l2_gbps",)),
        Probe(name="copies during lookups", work=gpu.copies_during_lookups, arguments=(1 << 20, 256), measures=fields),
        Probe(name="rows of two pieces", work=gpu.staged, arguments=(4096,)),
    )


def calibrate(*, device: str, ranks: int, name: str, progress: Progress) -> Calibration:
    """Measure this machine with `ranks` processes, and return its profile with all samples.

    A probe that raises, or takes longer than PROBE_TIMEOUT_S, logs a warning, and its numbers are not measured.
    Raises ValueError for fewer than two ranks, or more than there are GPUs. Raises RankFailed if ranks do not start.

    device: "cpu" or "cuda".
    name: the name of the profile.
    progress: called before each probe as progress(probe name, number of probes done, number of probes).
    """
    if ranks < 2:
        raise ValueError(f"ranks is {ranks}; links between ranks need at least 2")
    gpus = torch.cuda.device_count() if device == "cuda" else ranks
    if ranks > gpus:
        raise ValueError(f"ranks is {ranks}, but this machine has {gpus} GPUs; use fewer ranks, or --device cpu")
    todo = probes(device)
    results = run_probes(device, ranks, todo, progress)
    failed = {}
    for probe in todo:
        if probe.name in results.failed:
            reason = f"probe {probe.name!r}: {results.failed[probe.name]}"
            warn_once(f"calibration: {reason}")
            failed.update(dict.fromkeys(probe.measures, reason))
    samples = tuple(chain(*results.samples.values()))
    today = datetime.datetime.now(datetime.UTC).date()
    hardware = torch.cuda.get_device_name(0) if device == "cuda" else f"CPU of {os.cpu_count()} cores"
    description = f"{ranks} x {hardware}, calibrated" if device == "cuda" else f"{ranks} processes on a {hardware}, calibrated"
    profile = Profile(base(device, ranks), samples, world_size=ranks, when=f"{today}, weft {__version__}", failed=failed)
    machine = profile.machine(name, description, device=torch.cuda.get_device_name(0) if device == "cuda" else "cpu")
    check = staging_check(machine, samples)
    return Calibration(
        machine=machine,
        samples=samples,
        seconds=results.seconds,
        failed=failed,
        checks=(check,) if check else (),
    )


def run_probes(
    device: str,
    ranks: int,
    todo: Sequence[Probe],
    progress: Progress = lambda *_: None,
    *,
    probe_s: float = PROBE_TIMEOUT_S,
    total_s: float = TOTAL_TIMEOUT_S,
    start_s: float = START_TIMEOUT_S,
    environment: dict[str, str] | None = None,
) -> ProbeResults:
    """Run the probes in turn, in rank processes with these variables of the environment.

    Probes that have not started within total_s are not tried. Raises RankFailed if the ranks do not start.
    """
    results, deadline, start_failure = ProbeResults(), time.monotonic() + total_s, ""
    start: dict[str, Any] = {"device": device, "environment": environment, "start_s": start_s}
    pool = Ranks(ranks, **start)
    try:
        for done, probe in enumerate(todo):
            progress(probe.name, done, len(todo))
            begun = time.monotonic()
            timeout_s = min(probe_s, deadline - begun)
            if start_failure or timeout_s < 1:
                results.failed[probe.name] = start_failure or f"not tried within {total_s:g} s"
                continue
            try:
                results.samples[probe.name] = pool.run(probe.work, device, *probe.arguments, timeout_s=timeout_s)[0]
            except RankFailed as error:
                results.failed[probe.name] = _first_line(error)
                # New processes run the remaining probes, because a process keeps an error of CUDA.
                pool.close(grace_s=0.0 if error.lost else 1.0)
                try:
                    pool = Ranks(ranks, **start)
                except RankFailed as again:
                    start_failure = f"ranks do not start after probe {probe.name!r}: {_first_line(again)}"
            results.seconds[probe.name] = time.monotonic() - begun
        progress("done", len(todo), len(todo))
    finally:
        pool.close()
    return results


def _first_line(error: RankFailed) -> str:
    return str(error).splitlines()[0][:200]
