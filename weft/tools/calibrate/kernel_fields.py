"""This module computes fields of a machine profile from timings of weft's own kernels, in the order of their dependencies.

Each function takes the partly calibrated Machine and all samples, and returns values by field path. The functions invert the
cost terms of weft.perf: with the returned values, the terms predict the samples. They raise ValueError if a sample is missing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.core.machine import Machine
from weft.core.problem import DType, Problem
from weft.perf import run
from weft.perf.terms import staged_us
from weft.schedules import build
from weft.tools.calibrate.common import ProbeSample, of

Samples = Sequence[ProbeSample]
_DTYPE: DType = "bfloat16"
_FREE_US = 1e-3
_BAG = 32


@dataclass(frozen=True, kw_only=True)
class Derived:
    """A Derived describes how some fields of the profile are computed.

    paths: the fields.
    values: the function that computes them, by path.
    samples: the names of the samples that it needs.
    method: how the fields were measured, as the profile's `sources` say it.
    """

    paths: tuple[str, ...]
    values: Callable[[Machine, Samples], dict[str, Any]]
    samples: tuple[str, ...]
    method: str


def _kernel_tiles(machine: Machine, samples: Samples) -> dict[str, Any]:
    """flag_efficiency is the largest tile's rate divided by that of cuBLAS's tile of the same area. It applies to all tiles."""
    reached = _reached(machine, of(samples, "counted tiles"))
    largest = max(reached, key=math.prod)
    bare = dataclasses.replace(machine.gpu, kernel_tiles=(), stored_tiles=())
    share = round(reached[largest] / bare.kernel_efficiency(*largest), 4)
    return {"gpu.flag_efficiency": share, "gpu.kernel_tiles": _listed(reached, share)}


def _stored_tiles(machine: Machine, samples: Samples) -> dict[str, Any]:
    reached = _reached(machine, of(samples, "stored tiles"))
    return {"gpu.stored_tiles": _listed(reached, machine.gpu.flag_efficiency)}


def _reached(machine: Machine, samples: Samples) -> dict[tuple[int, int], float]:
    """Return for each tile the fraction of the matrix peak that its main loop reaches."""
    found = {}
    for sample in samples:
        rows, cols, *_, inner = sample.key
        math_us = _tile_us(machine, sample) - machine.gpu.tile_us
        found[rows, cols] = 2 * rows * cols * inner / (math_us * _sm_flop_per_us(machine))
    return found


def _listed(reached: dict[tuple[int, int], float], share: float) -> list[dict[str, Any]]:
    return [{"rows": rows, "cols": cols, "efficiency": round(at / share, 4)} for (rows, cols), at in reached.items()]


def _tile_us(machine: Machine, sample: ProbeSample) -> float:
    """Return the time of one wave. The sample has only whole waves."""
    return (sample.median_us - machine.launch_us) / _waves(machine, sample)


def _waves(machine: Machine, sample: ProbeSample) -> float:
    rows, cols, m, n, _ = sample.key
    return (m // rows) * (n // cols) / machine.gpu.sms


def _sm_flop_per_us(machine: Machine) -> float:
    return machine.tflops(_DTYPE) * 1e6 / machine.gpu.sms


def _half_tile(machine: Machine, samples: Samples) -> dict[str, Any]:
    cut = of(samples, "cut tiles")[0]
    whole = next(sample for sample in of(samples, "counted tiles") if sample.key[:2] == cut.key[:2])
    share = (cut.median_us - whole.median_us) / _tile_us(machine, whole)
    return {"gpu.half_tile": round(min(1.0, max(0.5, share)), 3)}


def _far_tiles(machine: Machine, samples: Samples) -> dict[str, Any]:
    """With small K the links limit the kernel, which gives their rate. With large K the SMs do, which gives the cost of stores
    per tile."""
    near, far = (sorted(of(samples, what), key=lambda sample: sample.key) for what in ("near tiles", "far tiles"))
    rows, cols, m, n, _ = far[0].key
    rate, tile_bytes = machine.stores.rate(machine.gpu.sms), 2 * rows * cols
    sent_us = far[0].median_us - machine.launch_us - _tile_us(machine, near[0])
    share = min(1.0, 2 * m * n / sent_us / 1e3 / rate)
    stored_us = tile_bytes * machine.gpu.sms / (rate * share * 1e3)
    stall = (_tile_us(machine, far[-1]) - _tile_us(machine, near[-1])) / stored_us
    return {"stores.tiles": round(share, 3), "stores.stall": round(max(0.0, stall), 3)}


def _gather_share(machine: Machine, samples: Samples) -> dict[str, Any]:
    sample, gpu = of(samples, "lookup")[0], machine.gpu
    rows, row_bytes = sample.key
    burst = (row_bytes + gpu.burst_bytes - math.gcd(row_bytes, gpu.burst_bytes)) / row_bytes
    moved = (sample.median_us - machine.launch_us) * gpu.hbm_gbps * 1e3 - rows * row_bytes / _BAG
    return {"gpu.gather_share": round(rows * row_bytes * burst / moved, 3)}


def _sm_gbps(machine: Machine, samples: Samples) -> dict[str, Any]:
    return {"kernels.sm_gbps": _rate_of_an_sm(machine, of(samples, "sums")[0])}


def _pull_gbps(machine: Machine, samples: Samples) -> dict[str, Any]:
    return {"kernels.pull_gbps": _rate_of_an_sm(machine, of(samples, "pulled sums")[0])}


def _rate_of_an_sm(machine: Machine, sample: ProbeSample) -> float:
    nbytes, sms = sample.key
    return round(nbytes / sms / (sample.median_us - machine.launch_us) / 1e3, 2)


def _streamed(machine: Machine, samples: Samples) -> dict[str, Any]:
    """With few rows, the time for each row of b is that of its loads. With many rows, it is that of its multiplications."""
    few_us, many_us = (_row_us(machine, pair) for pair in _pairs(samples))
    *_, rows, cols = _pairs(samples)[1][0].key
    full_us = 2 * rows * cols / _sm_flop_per_us(machine)
    return {"kernels.row_us": round(few_us, 5), "kernels.streamed": round(min(1.0, full_us / many_us), 3)}


def _pairs(samples: Samples) -> tuple[tuple[ProbeSample, ProbeSample], tuple[ProbeSample, ProbeSample]]:
    """Return two pairs of samples, for few and for many rows. Each pair has a small and a large K."""
    few, more, many, most = sorted(of(samples, "one_shot"), key=lambda sample: sample.key)
    return (few, more), (many, most)


def _row_us(machine: Machine, pair: tuple[ProbeSample, ProbeSample]) -> float:
    """Return the time for each row of b. All ranks' parts of K are equal."""
    low, high = pair
    return (high.median_us - low.median_us) / (high.key[2] - low.key[2]) * machine.world_size


def _exchange_us(machine: Machine, samples: Samples) -> dict[str, Any]:
    """Return the measured time minus the time that is simulated without an exchange."""
    sample = _pairs(samples)[0][0]
    m, n, k, *_ = sample.key
    free = dataclasses.replace(machine, kernels=dataclasses.replace(machine.kernels, exchange_us=_FREE_US))
    problem = Problem(op="matmul_all_reduce", m=m, n=n, k=k, world_size=machine.world_size, dtype=_DTYPE)
    rest_us = sample.median_us - run(build(problem, "one_shot"), free).total_us
    return {"kernels.exchange_us": round(max(0.05, rest_us), 3)}


def _lookup_copies(machine: Machine, samples: Samples) -> dict[str, Any]:
    """lookup_copy_bytes is the memory rate that the lookup loses, divided by the copies' rate."""
    nbytes, slowed_copy = of(samples, "strided copy alone")[0].key[0], of(samples, "strided copy during lookup")[0]
    alone, slowed = of(samples, "lookup alone")[0], of(samples, "lookup during strided copy")[0]
    gbps = nbytes / (slowed_copy.median_us - machine.launch_us) / 1e3
    lost = machine.gpu.hbm_gbps * max(0.0, 1 - alone.median_us / slowed.median_us)
    return {"kernels.lookup_copy_gbps": round(gbps, 1), "kernels.lookup_copy_bytes": max(1, round(lost / gbps))}


def _l2_gbps(machine: Machine, samples: Samples) -> dict[str, Any]:
    sample = of(samples, "cached")[0]
    gbps = sample.key[0] / (sample.median_us - machine.launch_us) / 1e3
    if gbps <= machine.gpu.hbm_gbps:
        raise ValueError(f"a matrix in the last-level cache was read at {gbps:.0f} GB/s, no faster than memory")
    return {"gpu.l2_gbps": round(gbps, 1)}


_CONCURRENT = ("strided copy alone", "strided copy during lookup", "lookup alone", "lookup during strided copy")


def _derived(
    values: Callable[[Machine, Samples], dict[str, Any]], samples: tuple[str, ...], method: str, *paths: str
) -> Derived:
    return Derived(paths=paths, values=values, samples=samples, method=method)


DERIVED = (
    _derived(
        *(_kernel_tiles, ("counted tiles",), "whole waves of each tile shape of weft's GEMM, counted"),
        *("gpu.flag_efficiency", "gpu.kernel_tiles"),
    ),
    _derived(_stored_tiles, ("stored tiles",), "the same, stored by hardware", "gpu.stored_tiles"),
    _derived(_half_tile, ("cut tiles", "counted tiles"), "a last wave of halves after whole waves", "gpu.half_tile"),
    _derived(
        *(_far_tiles, ("far tiles", "near tiles"), "weft's GEMM with its result at the next rank"),
        *("stores.tiles", "stores.stall"),
    ),
    _derived(_gather_share, ("lookup",), "weft's lookup of bags of 32, over a copy's rate", "gpu.gather_share"),
    _derived(_sm_gbps, ("sums",), "weft's sum of two sources on 8 SMs", "kernels.sm_gbps"),
    _derived(_pull_gbps, ("pulled sums",), "weft's sum of six sources at a peer on 8 SMs", "kernels.pull_gbps"),
    _derived(
        *(_streamed, ("one_shot",), "one_shot with more of K, of few and of many rows"),
        *("kernels.row_us", "kernels.streamed"),
    ),
    _derived(_exchange_us, ("one_shot",), "one_shot of 16 rows, less what its terms predict", "kernels.exchange_us"),
    _derived(
        *(_lookup_copies, _CONCURRENT, "concurrent strided copies to a peer and lookups"),
        *("kernels.lookup_copy_gbps", "kernels.lookup_copy_bytes"),
    ),
    _derived(_l2_gbps, ("cached",), "a matrix that the cache holds, multiplied again and again", "gpu.l2_gbps"),
)
"""The fields that are derived from samples, in order: later entries use fields that earlier ones set."""


def staging_check(machine: Machine, samples: Samples) -> str:
    """Return a line that compares the measured time of torch's copies around a matmul with weft.perf.terms.staged_us, or ""."""
    if not any(sample.what == "two runs" for sample in samples):
        return ""
    one, two = of(samples, "one run")[0], of(samples, "two runs")[0]
    rows, row_bytes = one.key
    staged = dataclasses.replace(machine, stages=True)
    expected_us = staged_us(staged, rows=2, row_bytes=rows * row_bytes, outs=1, out_bytes=0)
    more_us = two.median_us - one.median_us
    return f"rows brought together before a matmul: {more_us:.1f} us, predicted {expected_us:.1f} ({more_us / expected_us:.2f})"
