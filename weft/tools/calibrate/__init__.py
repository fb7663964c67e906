"""Calibration: measure this machine, and write it down as a Machine profile that the planner predicts with.

    probes (in rank processes)  -> samples: each thing several times, the slowest rank's time
    profile                     -> Machine: fitted numbers, each with its source and its spread

Probes run one after the other, a task of the rank processes each, so that progress can be shown, and one that hangs is ended
by the bound of its task. On 4 x H200 they are meant to take less than 3 minutes in all.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.core.machine import Machine
from weft.core.version import __version__
from weft.runtime.ranks import Ranks
from weft.tools.calibrate import common, host_probes
from weft.tools.calibrate.base import base
from weft.tools.calibrate.profile import COLLECTIVES, Profile
from weft.tools.calibrate.samples import ProbeSample

Progress = Callable[[str, int, int], None]
PROBE_TIMEOUT_S = 60.0
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


@dataclass(frozen=True, kw_only=True)
class Probe:
    """work: run on every rank; all give the same samples."""

    name: str
    work: Callable[..., list[ProbeSample]]
    arguments: tuple[Any, ...] = ()


def probes(device: str) -> tuple[Probe, ...]:
    """Everything that is measured on a device, in this order."""
    on_gpu = device == "cuda"
    own: Any = host_probes
    if on_gpu:  # imported where it is needed, since it needs Triton
        from weft.tools.calibrate import gpu_probes as own
    shapes, sizes = (GPU_SHAPES, GPU_BYTES) if on_gpu else (HOST_SHAPES, HOST_BYTES)
    first, *others = ("bfloat16", "float32") if on_gpu else ("float32", "bfloat16", "float16")
    found = [
        Probe(name="launches", work=own.launches),
        Probe(name="memory", work=common.memory, arguments=((256 if on_gpu else 16) * _MIB,)),
        Probe(name="gathers", work=common.gathers, arguments=(1 << 20, 256) if on_gpu else (1 << 12, 128)),
        Probe(name=f"matmuls, {first}", work=common.gemms, arguments=(shapes, first)),
        *(Probe(name=f"a matmul, {each}", work=common.gemms, arguments=(shapes[1:2], each)) for each in others),
        Probe(name="flags", work=own.flags),
        Probe(name="flags between ranks", work=own.hops),
        *(Probe(name=op, work=common.collectives, arguments=(op, sizes)) for op in COLLECTIVES),
        Probe(name="one beside the other", work=own.beside),
    ]
    if on_gpu:
        found += [Probe(name=f"copies, {way}", work=own.copies, arguments=(way,)) for way in ("push", "pull")]
        found += [Probe(name="copies to all", work=own.several), Probe(name="stores", work=own.stores)]
        found.append(Probe(name="matmuls in a row", work=own.power))
    else:
        found.append(Probe(name="copies", work=own.copies))
    return tuple(found)


def calibrate(*, device: str, ranks: int, name: str, progress: Progress) -> tuple[Machine, tuple[ProbeSample, ...]]:
    """This machine's profile as `ranks` processes measure it, and every sample.

    device: "cpu" or "cuda". name: of the profile. progress(what, done, total) is called before each probe.
    Raises ValueError for fewer than two ranks, or more than there are GPUs, RankFailed if a rank is lost or a probe takes
    longer than PROBE_TIMEOUT_S.
    """
    if ranks < 2:
        raise ValueError(f"ranks is {ranks}; links between ranks need at least 2")
    gpus = torch.cuda.device_count() if device == "cuda" else ranks
    if ranks > gpus:
        raise ValueError(f"ranks is {ranks}, but this machine has {gpus} GPUs; use fewer ranks, or --device cpu")
    samples = tuple(_run(device, ranks, probes(device), progress))
    today = datetime.datetime.now(datetime.UTC).date()
    where = torch.cuda.get_device_name(0) if device == "cuda" else f"CPU of {os.cpu_count()} cores"
    words = f"{ranks} x {where}, calibrated" if device == "cuda" else f"{ranks} processes on a {where}, calibrated"
    made = Profile(base(device, ranks), samples, world_size=ranks, when=f"{today}, weft {__version__}")
    return made.machine(name, words, device=torch.cuda.get_device_name(0) if device == "cuda" else "cpu"), samples


def _run(device: str, ranks: int, todo: Sequence[Probe], progress: Progress) -> list[ProbeSample]:
    found: list[ProbeSample] = []
    with Ranks(ranks, device=device) as pool:
        for done, probe in enumerate(todo):
            progress(probe.name, done, len(todo))
            found += pool.run(probe.work, device, *probe.arguments, timeout_s=PROBE_TIMEOUT_S)[0]
        progress("done", len(todo), len(todo))
    return found
