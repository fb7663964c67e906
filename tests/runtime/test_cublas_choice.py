"""Which of cuBLAS's algorithms a product gets, with a library and a clock that tests drive. What a GPU says of them:
tests/gpu/test_products_cuda.py."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from weft_log import warned

import weft
from weft.compat.cublas import Algorithm, stored, supports
from weft.runtime import products
from weft.runtime.products import Products, fastest, settings


class Library:
    """Of three picks a product, and of other numbers of rows one more, by name."""

    def __init__(self) -> None:
        self.ran: list[int] = []


class Product:
    def __init__(self, of: Library, a: Any, b: Any, out: Any, *, accumulate: bool, rows: int | None = None) -> None:
        self._of, self._rows = of, rows

    def algorithms(self, most: int, workspace: int) -> list[Algorithm]:
        names = [1, 2, 3] if self._rows is None else [2, 9, 8]
        return [Algorithm(algo=(name,) * 8) for name in names[:most]]

    def takes(self, algorithm: Algorithm, workspace: int) -> bool:
        return bool(algorithm.algo[0] != 8)

    def run(self, algorithm: Algorithm, a: Any, b: Any, out: Any, workspace: Any, stream: int) -> None:
        self._of.ran.append(algorithm.algo[0])
        out.fill_(algorithm.algo[0])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """us: what torch's pick and the algorithms that are tried take; duel: torch's and the fastest, once more; looked: how often
    the former was asked."""
    made = SimpleNamespace(us=[100.0, 90.0, 50.0, 95.0, 60.0], duel=[100.0, 80.0], looked=0, library=Library())

    def timed(variants: list[Callable[[], None]], about_us: float, rounds: int) -> list[float]:
        if rounds == products._DUEL_ROUNDS:
            assert len(variants) == 2
            return list(made.duel)
        made.looked += 1
        made.variants = len(variants)
        return list(made.us[-len(variants) :])

    monkeypatch.setattr(products, "timed", timed)
    monkeypatch.setattr(products, "CublasProduct", Product)
    monkeypatch.setattr(products, "_library", lambda device: made.library)
    monkeypatch.setattr(products, "_CHOSEN", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return made


def matrices(m: int = 512, n: int = 512, k: int = 512, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.ones(m, k, dtype=dtype), torch.ones(k, n, dtype=dtype), torch.zeros(m, n, dtype=dtype)]


def call(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, times: bool = True, accumulate: bool = False) -> float:
    """What is in the result: the algorithm's name, or k by torch."""
    Products(torch.device("cpu")).multiply(a, b, out, accumulate=accumulate, times=times)
    return float(out[0, 0])


def test_the_fastest_algorithm_is_timed_once_and_kept(clock: SimpleNamespace) -> None:
    assert call(*matrices()) == 2.0
    assert call(*matrices(), times=False) == 2.0
    assert (clock.looked, clock.variants) == (1, 5)  # torch's, 1, 2, 3, and 9 of a row more; 8 needs too much
    (choice,) = products.matmul_choices()
    assert (choice.algorithm, choice.torch_us, choice.us, choice.speed_up) == (1, 100.0, (90.0, 80.0, 95.0, 60.0), 1.25)
    clock.us = [100.0, 99.0, 98.5, 100.0, 99.0]
    assert call(*matrices(m=256)) == 512.0  # by less than 2%: torch's
    clock.us, clock.duel = [100.0, 90.0, 50.0, 95.0, 60.0], [80.0, 79.0]
    assert call(*matrices(m=128)) == 512.0  # not when it was looked at once more
    assert [choice.speed_up for choice in products.matmul_choices()] == [1.25, 1.0, 1.0]


def test_what_was_not_timed_at_first_stays_torchs(clock: SimpleNamespace) -> None:
    """Else a product's last bits would change from one call to the next."""
    assert call(*matrices(), times=False) == 512.0
    assert call(*matrices()) == 512.0
    assert clock.looked == 0
    (choice,) = products.matmul_choices()
    assert (choice.algorithm, choice.torch_us, choice.speed_up) == (None, None, 1.0)


def test_the_oldest_is_forgotten(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_CACHED", 2)
    for m in (512, 256, 128):
        call(*matrices(m=m))
    assert [choice.m for choice in products.matmul_choices()] == [256, 128]


def test_a_lane_remembers_what_the_process_has_forgotten(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the same call would have other bits after many others, and a kernel that no rehearsal has loaded."""
    monkeypatch.setattr(products, "_CACHED", 1)
    a, b, out = matrices()
    lane = Products(torch.device("cpu"))
    lane.multiply(a, b, out, accumulate=False, times=True)
    call(*matrices(m=256))
    assert [choice.m for choice in products.matmul_choices()] == [256]
    lane.multiply(a, b, out.zero_(), accumulate=False, times=False)
    assert out[0, 0] == 2.0


def test_torchs_settings_hold_whenever_they_are_made(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    lane, before = Products(torch.device("cpu")), settings()
    a, b, out = matrices(dtype=torch.float16)
    found = []
    for setting in (None, "deterministic", "half", None):
        with monkeypatch.context() as patch:
            if setting == "deterministic":
                patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
            if setting == "half":
                patch.setattr(torch._C, "_get_cublas_allow_fp16_accumulation", lambda: True)
            lane.multiply(a, b, out, accumulate=False, times=True)
            assert (settings() == before) == (setting is None)
        found.append(float(out[0, 0]))
    assert found == [2.0, 512.0, 512.0, 2.0]


@pytest.mark.parametrize(
    "name",
    [
        "allow_tf32",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ],
)
def test_what_says_which_kernels_torch_takes_is_a_setting(name: str) -> None:
    """Else a call would be replayed by the kernels of before, or need some that are not loaded, behind a lane that waits."""
    own = torch.backends.cuda.matmul
    before, value = settings(), getattr(own, name)
    try:
        setattr(own, name, not value)
        assert settings() != before
    finally:
        setattr(own, name, value)


def test_the_library_that_torch_prefers_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings()
    monkeypatch.setattr(torch._C, "_get_blas_preferred_backend", lambda: torch._C._BlasBackend.Cublaslt)  # type: ignore[attr-defined]
    assert settings() != before


def test_sums_in_float32_are_one_of_cublas_kernels(clock: SimpleNamespace) -> None:
    a, b, _ = matrices()
    assert call(a, b, torch.zeros(512, 512), accumulate=True) == 2.0
    assert clock.variants == 4
    a, b, out = matrices(m=128)
    assert call(a, b, out, accumulate=True) == 512.0  # rounded twice, by some algorithms
    small = [one[:16, :16].contiguous() for one in matrices()]
    assert call(small[0], small[1], torch.zeros(16, 16)) == 1.0  # not worth timing
    assert clock.looked == 1


@pytest.mark.parametrize("why", ["deterministic", "float32", "budget", "address", "rows", "small", "long"])
def test_torch_multiplies_what_is_not_timed(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    a, b, out = matrices(dtype=torch.float32 if why == "float32" else torch.bfloat16)
    if why == "deterministic":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    if why == "budget":
        monkeypatch.setattr(torch._C, "_get_sm_carveout_experimental", lambda: 16)
    if why == "address":
        a = torch.ones(512 * 512 + 1, dtype=torch.bfloat16)[1:].view(512, 512)
    if why == "rows":
        a = torch.ones(512, 513, dtype=torch.bfloat16)[:, :512]
    if why == "small":
        a, out = a[:16], out[:16]
        monkeypatch.setattr(products, "FEWEST_FLOPS", 1 << 40)
    if why == "long":
        monkeypatch.setattr(products, "_LONGEST_US", 0.0)
    assert call(a, b, out) == 512.0
    assert clock.looked == 0
    assert clock.library.ran == []


def test_without_cublaslt_torch_multiplies(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_library", lambda device: None)
    assert call(*matrices()) == 512.0
    a, b, _ = matrices(64, 64, 64, dtype=torch.float32)
    out = torch.ones(64, 64)
    assert call(a, b, out, accumulate=True) == 65.0


def test_a_missing_library_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    monkeypatch.setattr(torch.version, "hip", None)
    products._library.cache_clear()
    with warned(r"left to torch: cuBLASLt is not found \(libcublasLt.so.99"):
        assert products._library(0) is None
    assert products._library(0) is None  # and no second warning, which would be an error here
    products._library.cache_clear()


def test_the_fastest() -> None:
    assert fastest(None, [3.0, 2.0]) == 1
    assert fastest(2.0, [3.0, 1.9]) == 1
    assert fastest(2.0, [3.0, 1.97]) is None


def test_how_matrices_lie() -> None:
    matrix = torch.zeros(6, 8, dtype=torch.bfloat16)
    assert stored(matrix) == (8, 6, 8, False)
    assert stored(matrix.t()) == (8, 6, 8, True)
    assert stored(matrix[:, ::2]) is None
    assert stored(torch.zeros(1, 8).expand(6, 8)) is None
    a, b, out = matrices(16, 24, 32)
    assert supports((a, b, out))
    assert supports((a, b, out.float()))
    assert supports((a, b.t().contiguous().t(), out))
    assert not supports((a, b, out.t().contiguous().t()))
    assert not supports((a[:, :30], b[:30, :20], torch.zeros(16, 20, dtype=torch.bfloat16)))
    assert not supports((a.float(), b.float(), out.float()))


def _which_products_are_timed() -> dict[str, bool]:
    """By what was called, whether the program that runs it may measure which algorithm is fastest."""
    from weft.runtime import groups, tuner

    timer_for, auto_candidates = tuner.timer_for, tuner.auto_candidates
    group = dist.group.WORLD
    assert group is not None
    weft.close()
    tuner.timer_for = lambda device: lambda call, calls: (call() and 0) or 1000  # type: ignore[assignment, return-value]
    tuner.auto_candidates = lambda problem, device: ("sequential", "shard_p2p")
    found = {}
    try:
        for name, rows, spec in (
            *((f"measured, {rows} rows", rows, "auto") for rows in (64, 96, 48, 32)),
            ("padded to a bucket", 78, "auto"),
            ("by name", 72, "sequential"),
            ("planned", 88, "planned"),
        ):
            before = groups.GROUPS.state(group.group_name).bound()
            weft.all_gather_matmul(torch.ones(rows // 2, 32), torch.ones(32, 16), schedule=spec)
            (made,) = set(groups.GROUPS.state(group.group_name).bound()) - set(before)
            found[name] = made.times_products
    finally:
        tuner.timer_for, tuner.auto_candidates = timer_for, auto_candidates
    weft.close()
    return found


@pytest.mark.ranks
def test_products_are_timed_where_schedules_are(ranks: RankFixture) -> None:
    """Not in programs whose choice is taken over from other row counts, nor by "planned", which measures nothing."""
    expected = {f"measured, {rows} rows": True for rows in (64, 96, 48, 32)}
    expected |= {"padded to a bucket": False, "by name": True, "planned": False}
    assert ranks(2).run(_which_products_are_timed) == [expected] * 2


@pytest.mark.parametrize(
    ("setting", "matters"),
    [
        ("_get_cublas_allow_bf16_reduced_precision_reduction", True),
        ("_get_blas_preferred_backend", True),
        ("_get_cublas_allow_fp16_accumulation", False),
        ("_get_cublas_allow_fp16_reduced_precision_reduction", False),
    ],
)
def test_products_of_bfloat16_depend_on_some_settings(setting: str, matters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before, whole = settings(torch.bfloat16), settings()
    monkeypatch.setattr(torch._C, setting, lambda: "another value")
    assert (settings(torch.bfloat16) != before) == matters
    assert settings() != whole
