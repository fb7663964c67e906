"""What ranks do in several tests: draw inputs alike on every rank, call an operator, compare with the whole product."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import weft
from weft.core.problem import split
from weft.schedules import names


def here() -> torch.device:
    """Where this rank's tensors belong: its GPU, if its group can carry GPU tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend_config() else torch.device("cpu")


def slowed(owner: Any, name: str, seconds: float, *, rank: int = 1) -> AbstractContextManager[Any]:
    """On one rank, each call of owner.name takes so much longer."""
    plain = getattr(owner, name)

    def late(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return plain(*arguments, **options)

    return mock.patch.object(owner, name, late) if dist.get_rank() == rank else nullcontext()


def whole(m: int, n: int, k: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A_MK, B_KN and their product in float64, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(m, k, generator=generator).to(here(), dtype)
    b = (torch.randn(k, n, generator=generator) * k**-0.5).to(here(), dtype)
    return a, b, a.double() @ b.double()


def bound(dtype: torch.dtype, k: int, partials: int, reference: torch.Tensor) -> float:
    """Largest absolute error that rounding explains: the result's own, and one for each partial sum of like size."""
    scale = float(reference.abs().max()) if reference.numel() else 0.0
    unit = torch.finfo(dtype).eps / 2
    return scale * ((1 + partials) * unit + 4 * k**0.5 * torch.finfo(torch.float32).eps)


def check_both(m: int, n: int, k: int, dtype: torch.dtype, spec: str, seed: int, op: str = "sum") -> None:
    """Both operators, or the one that has this family. op: of the sum."""
    check_gather(m, n, k, dtype, spec, seed)
    if both_have(spec):
        check_scatter(m, n, k, dtype, spec, seed, op=op)


def both_have(spec: str) -> bool:
    """Whether a schedule exists for either operator; of these two, all_gather_matmul has every family."""
    return spec.partition(":")[0] in ("auto", *names("matmul_reduce_scatter"))


def check_gather(
    m: int, n: int, k: int, dtype: torch.dtype, spec: str, seed: int, group: dist.ProcessGroup | None = None
) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    a, b, expected = whole(m, n, k, dtype, seed)
    (low, high), (left, right) = split(m, size)[rank], split(n, size)[rank]
    out, gathered = weft.all_gather_matmul(a[low:high], b[:, left:right], group, schedule=spec, rows=m, return_gathered=True)
    assert torch.equal(gathered, a)
    assert out.dtype == dtype
    error = (out.double() - expected[:, left:right]).abs().max().item() if out.numel() else 0.0
    assert error <= bound(dtype, k, 2 * size, expected), (spec, (m, n, k), error)


def check_scatter(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    spec: str,
    seed: int,
    group: dist.ProcessGroup | None = None,
    op: str = "sum",
    *,
    batch: int = 1,
) -> None:
    """batch: of m rows each, of which each rank gets the same ones."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    a, b, expected = whole(batch * m, n, k, dtype, seed)
    (low, high), (left, right) = split(m, size)[rank], split(k, size)[rank]
    given = a[:, left:right] if batch == 1 else a[:, left:right].view(batch, m, right - left)
    out = weft.matmul_reduce_scatter(given, b[left:right], group, schedule=spec, op=op, scatter_dim=given.dim() - 2)
    expected = expected.view(*given.shape[:-1], n)[..., low:high, :] / (size if op == "avg" else 1)
    assert out.shape == expected.shape
    error = (out.double() - expected).abs().max().item() if out.numel() else 0.0
    assert error <= bound(dtype, k, 2 * size, a.double() @ b.double()), (spec, (m, n, k), error)


def check_all_reduce(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    spec: str,
    seed: int,
    group: dist.ProcessGroup | None = None,
    *,
    addends: int = 0,
) -> torch.Tensor:
    """addends: 1: with bias; 2: residual; 3: both."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    a, b, expected = whole(m, n, k, dtype, seed)
    low, high = split(k, size)[rank]
    generator = torch.Generator().manual_seed(seed + 1)
    bias = torch.randn(n, generator=generator).to(here(), dtype) if addends & 1 else None
    residual = torch.randn(m, n, generator=generator).to(here(), dtype) if addends & 2 else None
    out = weft.matmul_all_reduce(a[:, low:high], b[low:high], group, schedule=spec, bias=bias, residual=residual)
    for added in (bias, residual):
        expected = expected if added is None else expected + added.double()
    assert (out.shape, out.dtype) == (expected.shape, dtype)
    error = (out.double() - expected).abs().max().item() if out.numel() else 0.0
    assert error <= bound(dtype, k, 2 * size, expected), (spec, (m, n, k), addends, error)
    return out


def told_with(settings: Sequence[dict[str, str]], spec: str) -> list[str]:
    """In a group that is new, a call in each of these environments, one after the other: "right", or the ValueError's text."""
    weft.close()
    found = []
    for environment in settings:
        with mock.patch.dict(os.environ, environment):
            try:
                check_gather(64, 48, 32, torch.float32, spec, 0)
                found.append("right")
            except ValueError as error:
                found.append(str(error))
    weft.close()
    return found


NORM_EPS = 1e-5


def check_norm(
    m: int, n: int, k: int, dtype: torch.dtype, name: str, seed: int, recipe: str | None = None, **given: bool
) -> None:
    """One call against float64: the sum is right, and the norm is that of the rounded sum. given: bias, residual. recipe: that
    of an FP8 norm."""
    rank, size = dist.get_rank(), dist.get_world_size()
    a, b, product = whole(m, n, k, dtype, seed)
    cols = slice(rank * k // size, (rank + 1) * k // size)
    make = torch.Generator().manual_seed(seed)
    residual, bias, weight = (torch.randn(shape, generator=make).to(here(), dtype) for shape in ((m, n), (n,), (n,)))
    expected = product + residual.double() * given.get("residual", True) + bias.double() * given.get("bias", False)
    *normed, r = weft.matmul_all_reduce_norm(
        a[:, cols].contiguous(),
        b[cols].contiguous(),
        residual if given.get("residual", True) else None,
        weight,
        eps=NORM_EPS,
        bias=bias if given.get("bias") else None,
        schedule=name,
        scale_recipe_normed=recipe,
    )
    agree_with_norm(normed, r, expected, weight)


def check_sum_norm(m: int, n: int, dtype: torch.dtype, name: str, seed: int, recipe: str | None = None, **given: bool) -> None:
    """As check_norm, of a sum that is there already. given: bias, residual."""
    make = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(m, n, generator=make).to(here(), dtype) for _ in range(dist.get_world_size())]
    residual, bias, weight = (torch.randn(shape, generator=make).to(here(), dtype) for shape in ((m, n), (n,), (n,)))
    mine = drawn[dist.get_rank()].clone()
    *normed, r = weft.all_reduce_norm(
        mine,
        residual if given.get("residual", True) else None,
        weight,
        eps=NORM_EPS,
        bias=bias if given.get("bias") else None,
        schedule=name,
        scale_recipe_normed=recipe,
    )
    assert torch.equal(mine, drawn[dist.get_rank()])
    total = sum(one.double() for one in drawn)
    expected = total + residual.double() * given.get("residual", True) + bias.double() * given.get("bias", False)
    agree_with_norm(normed, r, expected, weight)


def agree_with_norm(normed: list[torch.Tensor], r: torch.Tensor, expected: torch.Tensor, weight: torch.Tensor) -> None:
    """Compare a sum with that in float64, and its norm with that of the rounded sum. normed: also its scales, if it is FP8."""
    tolerance = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[r.dtype]
    torch.testing.assert_close(r.double(), expected, rtol=tolerance, atol=tolerance)
    if len(normed) == 2:
        agree_with_quantised_norm(*normed, r, weight, 1e-6)
        return
    wanted = torch.nn.functional.rms_norm(r.float(), (r.shape[-1],), weight.float(), NORM_EPS)
    torch.testing.assert_close(normed[0].float(), wanted, rtol=tolerance / 4, atol=tolerance / 8)


def agree_with_quantised_norm(
    normed: torch.Tensor, scale: torch.Tensor, r: torch.Tensor, weight: torch.Tensor, tolerance: float
) -> None:
    """Compare an FP8 norm with that of r in float64, which is not rounded before it is quantised. tolerance: of scales."""
    assert (normed.dtype, scale.dtype, normed.shape) == (torch.float8_e4m3fn, torch.float32, r.shape)
    wanted = torch.nn.functional.rms_norm(r.double(), (r.shape[-1],), weight.double(), NORM_EPS)
    blocks = wanted.view(r.shape[0], scale.shape[1], r.shape[1] // scale.shape[1])
    torch.testing.assert_close(scale.double(), blocks.abs().amax(-1) / 448, rtol=tolerance, atol=0)
    # An element is off by half a step of e4m3, which has 3 bits after the first, and never below 2^-9.
    units = (blocks / scale.double()[..., None]).view_as(wanted)
    step = torch.exp2(units.abs().clamp(min=2**-6).log2().floor() - 3)
    assert ((normed.double() - units).abs() <= step * (0.5 + 450 * tolerance)).all()
