"""A lane's products, each by the algorithm of cuBLAS that was fastest here.

cuBLAS picks an algorithm by a product's sizes. Measured on H200, for 10 pairs of k and n and 21 numbers of rows: another one
of its first four picks, or of what it picks for one row more, takes 0.94 of the time (geomean), 0.46 at best, where rows are
few and no power of two (docs/lab/log.md). So each product is timed where a program rehearses: torch's own pick, and those. One
has to be faster by 2% to be taken; from then on the process uses it, so that the same tensors give the same bits. Other
processes, and ranks, may choose otherwise: torch.use_deterministic_algorithms(True) leaves all to torch.

    all       sleep | torch's pick, some times | algorithm 0, as often | algorithm 1 ...      three such rounds, medians
    a duel    sleep | torch's pick | the fastest                                              nine rounds

The sleep lets the host get ahead, so that launches do not count. The least of several medians is mostly too little: so the
fastest is held against torch's pick once more, by itself. A product that was not timed before its first use (one that
a capture comes upon, of tensors whose strides differ from the rehearsal's, of row counts whose schedule was taken over
from other row counts, or by schedule="planned") stays torch's.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache

import torch

from weft.compat.cublas import matmul_settings, needs_torch
from weft.compat.cublaslt import ALIGN_BYTES, Algorithm, CublasProduct, Library, library, supports
from weft.compat.device import current_device
from weft.compat.streams import raw_stream
from weft.core.logs import warn_once
from weft.core.machine import Machine
from weft.runtime.launches import FactorScales
from weft.runtime.scaled_products import ScaledProducts

WORKSPACE = 128 << 10
"""Bytes a lane. More gain nothing: 1.0715 over all products measured, instead of 1.0725."""
_OWN, _OTHERS, _ROWS_MORE = 4, 2, 1
"""How many of cuBLAS's picks are timed: for the product, and for one with so many more rows."""
FEWEST_FLOPS, _LONGEST_US = 1 << 27, 30_000.0
"""Products that are worth timing."""
GAIN = 0.98
"""Of the time of torch's pick: what another one may take at most."""
_ROUNDS, _DUEL_ROUNDS, _SAMPLE_US, _MOST_CALLS = 3, 9, 600.0, 16
_FLOPS_PER_US, _HOST_US, _CYCLES_PER_US = 5e8, 8.0, 2000


@dataclass(frozen=True, kw_only=True)
class MatmulChoice:
    """How a product [m, k] @ [k, n] is multiplied. us: by torch's own pick, where it was timed, and by each other algorithm.
    algorithm: which of the others was taken, None for torch's. transposed: whether a, and b, are column-major."""

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
        """Over torch's pick; 1 where that was taken, or was not timed."""
        return self.torch_us / self.us[self.algorithm] if self.algorithm is not None and self.torch_us else 1.0


@dataclass(frozen=True)
class _Chosen:
    choice: MatmulChoice
    product: CublasProduct | None
    algorithm: Algorithm | None


_CHOSEN: dict[Hashable, _Chosen] = {}
_CHOOSING = threading.Lock()
_CACHED = 4096
"""Products that a process caches; the oldest is dropped."""


def matmul_choices() -> list[MatmulChoice]:
    """Return how this process multiplies each product, in the order of their first calls."""
    return [chosen.choice for chosen in list(_CHOSEN.values())]


def settings() -> tuple[object, ...]:
    """What is set in torch that says how products are multiplied: SMs left free, the same bits each time, sums in float16; and
    by which of its kernels torch does: float32 as TF32, partial sums in 16 bits, cuBLAS or another library."""
    return matmul_settings()


class Products:
    """The products of one lane of one program, which never run at once: they share a workspace. machine: the GPU's profile,
    by default the nearest."""

    def __init__(self, device: torch.device, machine: Machine | None = None) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._library = _library(self._index)
        self._workspace = torch.empty(WORKSPACE if self._library else 0, dtype=torch.uint8, device=device)
        self._scaled = ScaledProducts(device, machine)
        self._chosen: dict[Hashable, _Chosen] = {}
        """This program's choices. It keeps those that the process drops, so that its calls and graphs give the same bits."""

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
        """out = a @ b, or out += a @ b, on torch's current stream. times: now is the time to measure algorithms. scales:
        of FP8 operands, whose products are torch's."""
        if scales is not None:
            self._scaled.multiply(a, b, out, scales)
            return
        if self._library is None or needs_torch(a.dtype):
            by_torch(a, b, out, accumulate=accumulate)
            return
        if a.is_cuda and current_device() != self._index:  # of a thread that has set none
            with torch.cuda.device(self._index):
                self.multiply(a, b, out, accumulate=accumulate, times=times)
            return
        key = (self._index, accumulate, a.dtype, out.dtype, a.shape, b.shape, a.stride(), b.stride(), out.stride(0))
        if (a.data_ptr() | b.data_ptr() | out.data_ptr()) % ALIGN_BYTES:
            by_torch(a, b, out, accumulate=accumulate)
            return
        chosen = self._chosen.get(key)
        if chosen is None:
            chosen = _CHOSEN.get(key) or (self._choose if times else _choose_untimed)(a, b, out, accumulate)
            self._chosen[key] = chosen = _remember(key, chosen)
        if chosen.product is None or chosen.algorithm is None:
            by_torch(a, b, out, accumulate=accumulate)
            return
        stream = raw_stream(self._index)
        chosen.product.run(chosen.algorithm, a, b, out, self._workspace, stream)

    def _choose(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, accumulate: bool) -> _Chosen:
        flops = 2.0 * a.shape[0] * a.shape[1] * b.shape[1]
        plain = out.dtype == a.dtype and not accumulate
        torchs = _choose_untimed(a, b, out, accumulate)
        # What is added to 16 bits is rounded to them first, by some algorithms.
        if not supports((a, b, out)) or not (plain or out.dtype == torch.float32):
            return torchs
        assert self._library is not None
        product = CublasProduct(self._library, a, b, out, accumulate=accumulate)
        if flops < FEWEST_FLOPS or flops / _FLOPS_PER_US > _LONGEST_US:
            # What torch does in several kernels is one of cuBLAS's.
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


def fastest(torch_us: float | None, us: list[float]) -> int | None:
    """Which of the algorithms is taken; None for torch's pick, where that was timed, and none is faster by enough."""
    best = min(range(len(us)), key=us.__getitem__)
    return best if torch_us is None or us[best] <= GAIN * torch_us else None


def candidates(
    of: Library, product: CublasProduct, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, accumulate: bool
) -> list[Algorithm]:
    """The algorithms that are worth timing, each once."""
    found = {one.identity: one for one in product.algorithms(_OWN, WORKSPACE)}
    more = CublasProduct(of, a, b, out, accumulate=accumulate, rows=a.shape[0] + _ROWS_MORE)
    for one in more.algorithms(_OTHERS, WORKSPACE):
        if one.identity not in found and product.takes(one, WORKSPACE):
            found[one.identity] = one
    return list(found.values())


def timed(variants: list[Callable[[], None]], about_us: float, rounds: int) -> list[float]:
    """Return the median time of each variant in us, measured in turns. about_us: what one may take at least."""
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
    if out.dtype == a.dtype and not accumulate:
        torch.mm(a, b, out=out)
        return
    product = torch.mm(a, b) if out.dtype == a.dtype else torch.mm(a, b, out_dtype=out.dtype)
    if accumulate:
        out += product
    else:
        out.copy_(product)


def _remember(key: Hashable, chosen: _Chosen) -> _Chosen:
    """The first that a thread has chosen is everyone's."""
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
    """None where torch has no cuBLASLt (ROCm), or, with a warning, where it is not found."""
    if torch.version.hip is not None:
        return None
    try:
        return library(device)
    except OSError as error:
        warn_once(f"matmuls are left to torch: cuBLASLt is not found ({error})")
        return None
