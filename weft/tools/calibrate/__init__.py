"""Calibration: measure this machine, and write it down as a Machine profile that the planner predicts with.

    probes (in rank processes)  -> samples: each thing several times, the slowest rank's time
    profile                     -> Machine: fitted numbers, each with its source and its spread

Probes run one after the other, a task of the rank processes each, so that progress can be shown, and one that hangs is ended
by the bound of its task. All of them take BOUND_S at most. What a probe that fails would have measured stays as in the base
profile, and the source says why: a run is never lost for one probe.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.core.logs import warn_once
from weft.core.machine import Machine
from weft.core.version import __version__
from weft.runtime.ranks import RankFailed, Ranks
from weft.tools.calibrate import common, host_probes
from weft.tools.calibrate.base import base
from weft.tools.calibrate.kernel_fields import staging_check
from weft.tools.calibrate.profile import COLLECTIVES, Profile
from weft.tools.calibrate.samples import ProbeSample

Progress = Callable[[str, int, int], None]
PROBE_TIMEOUT_S = 60.0
BOUND_S = 240.0
"""For all probes together; those that are not reached have failed."""
_MIB = 1 << 20
GPU_SHAPES = (
    *((8192, 8192, 8192), (4096, 4096, 4096), (8192, 3584, 8192), (8192, 1792, 4096), (2048, 3584, 8192)),
    *((1024, 3584, 8192), (512, 3584, 8192), (256, 8192, 4096), (4096, 7168, 2048), (8192, 4096, 1792)),
    # 128 x 256 tiles: just a wave of 132 SMs, a tile row more, three waves, and one row of tiles.
    *((1408, 3072, 4096), (1536, 3072, 4096), (4224, 3072, 4096), (128, 16384, 4096)),
)
"""M, N, K of matmuls as ranks have them in the models that are known, and around whole waves of tiles."""
HOST_SHAPES = ((256, 256, 256), (128, 512, 512), (512, 512, 512), (64, 1024, 512), (512, 256, 1024))
GPU_BYTES = tuple(1 << power for power in (14, 16, 18, 20, 22, 24, 26))
HOST_BYTES = tuple(1 << power for power in (12, 14, 16, 18, 20))


NOT_MEASURED = {
    "gpu.sms": "the device says it",
    "gpu.l2_bytes": "the device says it",
    "gpu.cut_k": "which GEMMs cuBLAS cuts along K is not seen in few of them",
    "gpu.burst_bytes": "gathering rows of many lengths would show it; 64 is an access of HBM",
    "gpu.burst_us": "by when power bounds a GPU depends on what it has done before",
    "gpu.tile_step": "cuBLAS's tile shapes are read off names of its kernels",
    "gpu.step_rate": "it is fitted to hundreds of GEMMs",
    "kernels.l2_share": "it shows in GEMMs whose parts come late alone",
    "kernels.sums": "it follows from the registers of the kernel that sums",
    "kernels.lookup_copy_us": "it shows in whole lookups alone",
    "contention.computation": "it depends on a user's computation",
    "network.": "there is one host",
    "collective_sms": "NCCL does not say",
    "fork_us": "it shows in whole calls alone",
}
"""By what a path begins with: why no probe measures it."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """work: run on every rank; all give the same samples. measures: what the paths of numbers begin with that it is for."""

    name: str
    work: Callable[..., list[ProbeSample]]
    arguments: tuple[Any, ...] = ()
    measures: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Probed:
    """seconds: by probe. failed: by what paths begin with, why they were not measured."""

    samples: list[ProbeSample] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """machine: the profile. seconds: by probe. failed: probes' reasons, by what paths begin with. checks: lines that set a
    prediction with its measurement."""

    machine: Machine
    samples: tuple[ProbeSample, ...]
    seconds: Mapping[str, float]
    failed: Mapping[str, str]
    checks: tuple[str, ...]


def probes(device: str) -> tuple[Probe, ...]:
    """Everything that is measured on a device, in this order."""
    on_gpu = device == "cuda"
    own: Any = host_probes
    if on_gpu:  # imported where it is needed, since it needs Triton
        from weft.tools.calibrate import gpu_probes as own
    shapes, sizes = (GPU_SHAPES, GPU_BYTES) if on_gpu else (HOST_SHAPES, HOST_BYTES)
    first, *others = ("bfloat16", "float32") if on_gpu else ("float32", "bfloat16", "float16")
    tiles, memory = ("gpu.tiles", "gpu.tile_us", f"gpu.tflops.{first}"), (256 if on_gpu else 16) * _MIB
    found = [
        Probe(name="launches", work=own.launches, measures=("launch_us",)),
        Probe(name="memory", work=common.memory, arguments=(memory,), measures=("gpu.hbm_gbps",)),
        Probe(name=f"matmuls, {first}", work=common.gemms, arguments=(shapes, first), measures=tiles),
        *(
            Probe(name=f"a matmul, {each}", work=common.gemms, arguments=(shapes[1:2], each), measures=(f"gpu.tflops.{each}",))
            for each in others
        ),
        Probe(name="flags", work=own.flags, measures=("flag_us",)),
        Probe(name="flags between ranks", work=own.hops, measures=("wake_us", "links.latency_us")),
        *(
            Probe(name=op, work=common.collectives, arguments=(op, sizes), measures=(f"collectives.{op}",))
            for op in COLLECTIVES
        ),
        Probe(name="concurrent pairs", work=own.concurrent, measures=("contention.gemm", "contention.copy", "contention.all_")),
    ]
    if not on_gpu:
        found.append(Probe(name="gathers", work=own.gathers, arguments=(1 << 12, 128), measures=("gpu.gather_share",)))
        return (*found, Probe(name="copies", work=own.copies, measures=("copies.", "links.")))
    several = ("copies.several_gbps", "copies.engines", "copies.turning")
    found += [
        Probe(name="copies", work=own.copies, arguments=("push",), measures=("copies.", "links.")),
        Probe(name="copies to all", work=own.several, measures=several),
        Probe(name="stores", work=own.stores, measures=("stores.gbps", "stores.sms")),
        Probe(name="matmuls in a row", work=own.power, measures=("gpu.sustained",)),
    ]
    return (*found, *_kernel_probes())


def _kernel_probes() -> tuple[Probe, ...]:
    """Of weft's own kernels, on GPUs."""
    from weft.tools.calibrate import kernel_probes as own

    fields = ("kernels.lookup_copy_gbps", "kernels.lookup_copy_bytes")
    exchanged = ("kernels.row_us", "kernels.streamed", "kernels.exchange_us")
    counted = ("gpu.kernel_tiles", "gpu.flag_efficiency", "gpu.half_tile")
    return (
        Probe(name="tiles that count", work=own.counted_tiles, arguments=(4096,), measures=counted),
        Probe(name="tiles that hardware stores", work=own.stored_tiles, arguments=(4096,), measures=("gpu.stored_tiles",)),
        Probe(name="lookups", work=own.lookups, arguments=(1 << 20, 256), measures=("gpu.gather_share",)),
        Probe(name="sums", work=own.sums, arguments=(32 * _MIB,), measures=("kernels.sm_gbps", "kernels.pull_gbps")),
        Probe(name="multiplied and exchanged", work=own.exchanges, arguments=((512, 4096),), measures=exchanged),
        Probe(name="tiles at a peer", work=own.far_tiles, arguments=((512, 8192),), measures=("stores.tiles", "stores.stall")),
        Probe(name="a matrix in the cache", work=own.cached, arguments=(4096, 2560), measures=("gpu.l2_gbps",)),
        Probe(name="copies during lookups", work=own.copies_during_lookups, arguments=(1 << 20, 256), measures=fields),
        Probe(name="rows of two pieces", work=own.staged, arguments=(4096,)),
    )


def calibrate(*, device: str, ranks: int, name: str, progress: Progress) -> Calibration:
    """This machine's profile as `ranks` processes measure it, and every sample.

    device: "cpu" or "cuda". name: of the profile. progress(what, done, total) is called before each probe. A probe that raises,
    or takes longer than PROBE_TIMEOUT_S, costs the numbers that it is for, with a warning.
    Raises ValueError for fewer than two ranks, or more than there are GPUs, RankFailed if ranks do not start.
    """
    if ranks < 2:
        raise ValueError(f"ranks is {ranks}; links between ranks need at least 2")
    gpus = torch.cuda.device_count() if device == "cuda" else ranks
    if ranks > gpus:
        raise ValueError(f"ranks is {ranks}, but this machine has {gpus} GPUs; use fewer ranks, or --device cpu")
    found = _run(device, ranks, probes(device), progress)
    today = datetime.datetime.now(datetime.UTC).date()
    where = torch.cuda.get_device_name(0) if device == "cuda" else f"CPU of {os.cpu_count()} cores"
    words = f"{ranks} x {where}, calibrated" if device == "cuda" else f"{ranks} processes on a {where}, calibrated"
    when = f"{today}, weft {__version__}"
    profile = Profile(base(device, ranks), found.samples, world_size=ranks, when=when, failed=found.failed)
    machine = profile.machine(name, words, device=torch.cuda.get_device_name(0) if device == "cuda" else "cpu")
    check = staging_check(machine, found.samples)
    return Calibration(
        machine=machine,
        samples=tuple(found.samples),
        seconds=found.seconds,
        failed=found.failed,
        checks=(check,) if check else (),
    )


def _run(device: str, ranks: int, todo: Sequence[Probe], progress: Progress) -> Probed:
    """Each probe in turn. After one that fails the ranks are new: an error of CUDA's stays with its process."""
    found, until, lost = Probed(), time.monotonic() + BOUND_S, ""
    pool = Ranks(ranks, device=device)
    try:
        for done, probe in enumerate(todo):
            progress(probe.name, done, len(todo))
            begun = time.monotonic()
            left_s = min(PROBE_TIMEOUT_S, until - begun)
            if lost or left_s < 1:
                found.failed.update(dict.fromkeys(probe.measures, lost or f"not tried within {BOUND_S:g} s"))
                continue
            try:
                found.samples.extend(pool.run(probe.work, device, *probe.arguments, timeout_s=left_s)[0])
            except RankFailed as error:
                found.failed.update(dict.fromkeys(probe.measures, _reason(f"probe {probe.name!r} failed", error)))
                pool.close(grace_s=1.0)
                try:
                    pool = Ranks(ranks, device=device)
                except RankFailed as again:
                    lost = _reason(f"ranks do not start after probe {probe.name!r}", again)
            found.seconds[probe.name] = time.monotonic() - begun
        progress("done", len(todo), len(todo))
    finally:
        pool.close()
    return found


def _reason(what: str, error: RankFailed) -> str:
    """In one line, which is logged."""
    reason = f"{what}: {' '.join(str(error).split())[:200]}"
    warn_once(f"calibration: {reason}")
    return reason
