"""Products multiplies matrices for a lane, by the cuBLAS algorithm that was fastest on this GPU.

cuBLAS picks an algorithm by a product's sizes. Its other suggestions are often faster: for 10 pairs of k and n and 21 numbers
of rows on H200, the best of its first four picks, and of its picks for one more row, takes 0.94 of the time (geomean). With few
rows, not a power of two, it takes 0.46 at best (docs/lab/log.md). So when a program rehearses, each product is timed with
torch's pick and with these. An algorithm replaces torch's pick if it is faster by 2%. The process then always uses it, so that
the same tensors give the same bits. Other processes, and ranks, may choose differently.
torch.use_deterministic_algorithms(True) leaves all products to torch.

    all       sleep | torch's pick, some times | algorithm 0, as often | algorithm 1 ...      three such rounds, medians
    a duel    sleep | torch's pick | the fastest                                              nine rounds

The sleep lets the host get ahead, so that the time of launches does not count. The smallest of several medians is usually too
small, so the fastest algorithm is compared with torch's pick again, in a duel. A product that was not timed before its first
use remains torch's. This happens if a capture is its first use, if its strides differ from the rehearsal's, if its schedule was
chosen at other row counts, and with schedule="planned".

ScaledProducts multiplies FP8 operands, out = (a * scales of a) @ (b * scales of b), for one lane of one program.

On GPUs torch multiplies by cuBLAS or CUTLASS, or weft's GEMM kernel does if torch has no kernel for the dtypes or sizes. On
CPUs, and on GPUs without matrix units for FP8, the operands are dequantised and multiplied in float32.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

import torch

from weft.compat.cublas import (
    ALIGN_BYTES,
    Algorithm,
    CublasProduct,
    Library,
    library,
    matmul_settings,
    needs_torch,
    scaled_mm,
    supports,
    takes,
)
from weft.compat.device import capabilities, current_device
from weft.compat.streams import raw_stream
from weft.core.errors import warn_once
from weft.core.machine import Machine
from weft.core.problem import LEAST_MAGNITUDE, SCALE_BLOCK, Scaling
from weft.runtime.bindings import CallTensors, FactorScales, Issue, NotPreparedError
from weft.runtime.choose import nearest_profile

if TYPE_CHECKING:
    from weft.kernels.gemm import PlainGemm

WORKSPACE = 128 << 10
"""Bytes for each lane. A larger workspace gains nothing: 1.0715 over all products measured, instead of 1.0725."""
_OWN, _OTHERS, _ROWS_MORE = 4, 2, 1
"""The number of cuBLAS's picks that are timed for the product, the number for a product with more rows, and how many more."""
FEWEST_FLOPS, _LONGEST_US = 1 << 27, 30_000.0
"""Products with fewer FLOPs, or that take longer, are not timed."""
GAIN = 0.98
"""An algorithm must take at most this fraction of the time of torch's pick to replace it."""
_ROUNDS, _DUEL_ROUNDS, _SAMPLE_US, _MOST_CALLS = 3, 9, 600.0, 16
_FLOPS_PER_US, _HOST_US, _CYCLES_PER_US = 5e8, 8.0, 2000


@dataclass(frozen=True, kw_only=True)
class MatmulChoice:
    """A MatmulChoice says how a product [m, k] @ [k, n] is multiplied.

    transposed: whether a is column-major, and whether b is.
    torch_us: the time with torch's pick, if it was timed.
    us: the time with each other algorithm.
    algorithm: the index in `us` of the chosen algorithm. None for torch's pick.
    """

    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    transposed: tuple[bool, bool]
    accumulate: bool
    torch_us: float | None
    us: tuple[float, ...]
    algorithm: int | None

    @property
    def speed_up(self) -> float:
        """The speed relative to torch's pick. It is 1 if that was chosen or was not timed."""
        return self.torch_us / self.us[self.algorithm] if self.algorithm is not None and self.torch_us else 1.0


@dataclass(frozen=True)
class _Chosen:
    choice: MatmulChoice
    product: CublasProduct | None
    algorithm: Algorithm | None


_CHOSEN: dict[Hashable, _Chosen] = {}
_CHOOSING = threading.Lock()
_CACHED = 4096
"""The number of products that a process caches. The oldest is dropped first."""


def matmul_choices() -> list[MatmulChoice]:
    """Return how this process multiplies each product, in the order of their first calls."""
    return [chosen.choice for chosen in list(_CHOSEN.values())]


def settings(dtype: torch.dtype | None = None) -> tuple[object, ...]:
    """Return torch's settings on which the algorithm of a product depends. dtype: that of the factors, if it is known.

    They are the SMs left free, determinism, sums in float16, and torch's choice of kernels: float32 as TF32, partial sums in
    16 bits, cuBLAS or another library.
    """
    return matmul_settings(dtype)


class Products:
    """Products multiplies matrices for one lane of one program. They run one after the other and share a workspace.

    machine: the GPU's profile, by default the nearest.
    """

    def __init__(self, device: torch.device, machine: Machine | None = None) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._library = _library(self._index)
        self._workspace = torch.empty(WORKSPACE if self._library else 0, dtype=torch.uint8, device=device)
        self._scaled = ScaledProducts(device, machine)
        self._chosen: dict[Hashable, _Chosen] = {}
        """This program's choices. It keeps choices that the process drops, so that its calls and graphs give the same bits."""

    def multiply(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        *,
        accumulate: bool,
        times: bool,
        scales: FactorScales | None = None,
    ) -> None:
        """Compute out = a @ b, or out += a @ b, on torch's current stream.

        times: measure algorithms now if this product has none.
        scales: the scales of FP8 operands. torch multiplies these.
        """
        if scales is not None:
            self._scaled.multiply(a, b, out, scales)
            return
        a, b, out = _by_rows(a, b, out)
        key = self._key(a, b, out, accumulate)
        if key is not None and a.is_cuda and current_device() != self._index:  # the calling thread has not set its device
            with torch.cuda.device(self._index):
                self.multiply(a, b, out, accumulate=accumulate, times=times)
            return
        chosen = None if key is None else self._chosen.get(key)
        if key is not None and chosen is None:
            chosen = _CHOSEN.get(key) or (self._choose if times else _choose_untimed)(a, b, out, accumulate)
            self._chosen[key] = chosen = _remember(key, chosen)
        if chosen is None or chosen.product is None or chosen.algorithm is None:
            by_torch(a, b, out, accumulate=accumulate)
        else:
            chosen.product.run(chosen.algorithm, a, b, out, self._workspace, raw_stream(self._index))

    def _key(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, accumulate: bool) -> Hashable | None:
        """Return what determines the algorithm of a product. None if only torch can multiply it."""
        if self._library is None or needs_torch(a.dtype) or (a.data_ptr() | b.data_ptr() | out.data_ptr()) % ALIGN_BYTES:
            return None
        return (self._index, accumulate, a.dtype, out.dtype, a.shape, b.shape, a.stride(), b.stride(), out.stride(0))

    def prepare(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, tensors: CallTensors, *, accumulate: bool = False
    ) -> Issue:
        """Return a function that computes out = a @ b, or out += a @ b, as `multiply` does, for calls of one layout.

        a, b, out: the matrices of the first call, which are in memory of `tensors` or in memory that never moves. Those of
            later calls have the same alignment.

        It is valid as long as torch's settings are (`settings`), and runs on torch's current stream and device.
        """
        a, b, out = _by_rows(a, b, out)
        chosen = self._chosen.get(self._key(a, b, out, accumulate))
        if chosen is not None and chosen.product is not None and chosen.algorithm is not None:
            first, second, third = (tensors.number(one.data_ptr()) for one in (a, b, out))
            return chosen.product.prepare(chosen.algorithm, (first, second, third), tensors.addresses, self._workspace)
        if a.dtype != out.dtype:
            raise NotPreparedError("torch needs several operations for it")
        first, second, third = tensors.view(a), tensors.view(b), tensors.view(out)
        views, mm = tensors.views, torch.mm

        def run(stream: int) -> None:
            mm(views[first], views[second], out=views[third])

        def add(stream: int) -> None:
            views[third].addmm_(views[first], views[second])

        return add if accumulate else run

    def _choose(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, accumulate: bool) -> _Chosen:
        flops = 2.0 * a.shape[0] * a.shape[1] * b.shape[1]
        plain = out.dtype == a.dtype and not accumulate
        torchs = _choose_untimed(a, b, out, accumulate)
        # Some algorithms round the product to 16 bits before they add it to a 16-bit result.
        if not supports((a, b, out)) or not (plain or out.dtype == torch.float32):
            return torchs
        assert self._library is not None
        product = CublasProduct(self._library, a, b, out, accumulate=accumulate)
        if flops < FEWEST_FLOPS or flops / _FLOPS_PER_US > _LONGEST_US:
            # torch needs several kernels unless the product is plain. cuBLAS needs one.
            found = [] if plain else product.algorithms(1, WORKSPACE)
            return _Chosen(torchs.choice, product, found[0]) if found else torchs
        found = candidates(self._library, product, a, b, out, accumulate)
        if not found:
            return torchs
        stream = raw_stream(self._index)
        variants: list[Callable[[], None]] = [
            lambda one=one: product.run(one, a, b, out, self._workspace, stream)  # type: ignore[misc]
            for one in found
        ]
        if plain:
            variants.insert(0, lambda: by_torch(a, b, out, accumulate=accumulate))
        us = timed(variants, flops / _FLOPS_PER_US, _ROUNDS)
        torch_us = us.pop(0) if plain else None
        best = fastest(torch_us, us)
        if best is not None and torch_us is not None:
            torch_us, us[best] = timed([variants[0], variants[1 + best]], flops / _FLOPS_PER_US, _DUEL_ROUNDS)
            best = best if us[best] <= GAIN * torch_us else None
        choice = _choice(a, b, out, accumulate, torch_us, tuple(us), best)
        return _Chosen(choice, product, None if best is None else found[best])


def _by_rows(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a product whose result is stored by rows: the same, or its transpose."""
    return (b.t(), a.t(), out.t()) if out.stride(0) == 1 < out.stride(1) else (a, b, out)


def fastest(torch_us: float | None, us: list[float]) -> int | None:
    """Return the index of the fastest algorithm, or None if torch's pick was timed and no algorithm gains enough."""
    best = min(range(len(us)), key=us.__getitem__)
    return best if torch_us is None or us[best] <= GAIN * torch_us else None


def candidates(
    of: Library, product: CublasProduct, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, accumulate: bool
) -> list[Algorithm]:
    """Return the algorithms that are worth timing, each once."""
    found = {one.identity: one for one in product.algorithms(_OWN, WORKSPACE)}
    more = CublasProduct(of, a, b, out, accumulate=accumulate, rows=a.shape[0] + _ROWS_MORE)
    for one in more.algorithms(_OTHERS, WORKSPACE):
        if one.identity not in found and product.takes(one, WORKSPACE):
            found[one.identity] = one
    return list(found.values())


def timed(variants: list[Callable[[], None]], about_us: float, rounds: int) -> list[float]:
    """Return the median time of each variant in us, measured in turns. about_us: a lower estimate of the time of one call."""
    calls = max(1, min(_MOST_CALLS, round(_SAMPLE_US / about_us)))
    samples: list[list[float]] = [[] for _ in variants]
    for variant in variants:  # loads its kernel
        variant()
    for _ in range(rounds):
        torch.cuda._sleep(round(_HOST_US * calls * len(variants) * _CYCLES_PER_US))  # type: ignore[no-untyped-call]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(variants) + 1)]  # type: ignore[no-untyped-call]
        events[0].record()
        for variant, event in zip(variants, events[1:], strict=True):
            for _ in range(calls):
                variant()
            event.record()
        events[-1].synchronize()
        for number, sample in enumerate(samples):
            sample.append(events[number].elapsed_time(events[number + 1]) * 1e3 / calls)
    return [statistics.median(sample) for sample in samples]


def by_torch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, accumulate: bool) -> None:
    if out.dtype == a.dtype:
        if accumulate:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)
        return
    product = torch.mm(a, b, out_dtype=out.dtype)
    if accumulate:
        out += product
    else:
        out.copy_(product)


def _remember(key: Hashable, chosen: _Chosen) -> _Chosen:
    """Store a choice, and return the choice that all threads use: the first one stored."""
    with _CHOOSING:
        chosen = _CHOSEN.setdefault(key, chosen)
        if len(_CHOSEN) > _CACHED:
            _CHOSEN.pop(next(iter(_CHOSEN)))
        return chosen


def _choose_untimed(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, accumulate: bool) -> _Chosen:
    return _Chosen(_choice(a, b, out, accumulate, None, (), None), None, None)


def _choice(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    accumulate: bool,
    torch_us: float | None,
    us: tuple[float, ...],
    best: int | None,
) -> MatmulChoice:
    (m, k), n = a.shape, b.shape[1]
    return MatmulChoice(
        m=m,
        n=n,
        k=k,
        dtype=str(a.dtype).removeprefix("torch."),
        out_dtype=str(out.dtype).removeprefix("torch."),
        transposed=(a.stride(1) != 1, b.stride(1) != 1),
        accumulate=accumulate,
        torch_us=torch_us,
        us=us,
        algorithm=best,
    )


@cache
def _library(device: int) -> Library | None:
    """Return cuBLASLt. Return None on ROCm, where torch has none, or with a warning if it is not found."""
    if torch.version.hip is not None:
        return None
    try:
        return library(device)
    except OSError as error:
        warn_once(f"matmuls are left to torch: cuBLASLt is not found ({error})")
        return None


def dequantised(matrix: torch.Tensor, scales: torch.Tensor, scaling: Scaling, operand: Literal["a", "b"]) -> torch.Tensor:
    """Return the elements of an operand times their scales, in float32. scales: of the shape that Scaling names."""
    if scaling.recipe == "blockwise":
        if operand == "b":
            scales = scales.repeat_interleave(SCALE_BLOCK, 0)[: matrix.shape[0]]
        scales = scales.repeat_interleave(SCALE_BLOCK, 1)[:, : matrix.shape[1]]
    return matrix.float() * scales


def quantise(matrix: torch.Tensor, elements: torch.Tensor, scales: torch.Tensor, scaling: Scaling) -> None:
    """Write a matrix as FP8 elements and their scales, rowwise or by blocks of 128 columns.

    A scale is the largest magnitude of its elements, but at least LEAST_MAGNITUDE, over the largest value of the dtype.
    """
    rows, most = matrix.float(), torch.finfo(elements.dtype).max
    blocks = rows.view(matrix.shape[0], scales.shape[1], matrix.shape[1] // scales.shape[1])
    magnitudes = blocks.abs().amax(-1).clamp(min=LEAST_MAGNITUDE)
    # It divides by a tensor, because on GPUs torch's division by a number multiplies by the inverse.
    torch.div(magnitudes, torch.full_like(magnitudes, most), out=scales)
    elements.copy_((blocks / scales[..., None]).clamp(-most, most).view_as(rows))


def multiply_dequantised(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scales: FactorScales) -> None:
    """Compute out = a @ b in float32, on any device."""
    out.copy_(dequantised(a, scales.a, scales.scaling, "a") @ dequantised(b, scales.b, scales.scaling, "b"))


@cache
def products_on(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, FactorScales], None]:
    """Return a function (a, b, out, scales) that computes out = a @ b for FP8 operands outside of a program."""
    return ScaledProducts(device).multiply if device.type == "cuda" else multiply_dequantised


class ScaledProducts:
    """ScaledProducts multiplies FP8 operands on a GPU.

    machine: the profile by which tile shapes are chosen, by default the nearest.
    """

    def __init__(self, device: torch.device, machine: Machine | None = None) -> None:
        self._device, self._machine = device, machine
        self._kernels: dict[tuple[int, int, int, Scaling], PlainGemm | None] = {}
        """The kernels, by M, N, K and scaling. They live as long as the program, because graphs contain addresses of their
        tables."""

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scales: FactorScales) -> None:
        """Compute out = a @ b on torch's current stream."""
        scaling = scales.scaling
        if takes(a, b, out, scaling.recipe):
            scaled_mm(a, b, scales.a, scales.b, out, recipe=scaling.recipe, use_fast_accum=scaling.use_fast_accum)
            return
        kernel = self._kernel(a, b, scaling)
        if kernel is None:
            multiply_dequantised(a, b, out, scales)
        else:
            kernel.multiply(a, b, out, scales.a, scales.b, scaling)

    def _kernel(self, a: torch.Tensor, b: torch.Tensor, scaling: Scaling) -> PlainGemm | None:
        """Return weft's kernel, or None if the GPU has no matrix units for FP8, or TMA cannot load the operands."""
        from weft.kernels.gemm import PlainGemm, fits  # needs Triton
        from weft.perf.shapes import shapes_for

        if not fits(a, b):
            return None
        size = a.shape[0], b.shape[1], a.shape[1]
        key = (*size, scaling)
        if key not in self._kernels:
            found = shapes_for(capabilities(self._device), scaling)
            machine = self._machine or nearest_profile(self._device)
            self._kernels[key] = PlainGemm(size, self._device, machine, scaling) if found else None
        return self._kernels[key]
