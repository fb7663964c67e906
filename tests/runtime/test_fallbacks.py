"""Steps that cannot run as one kernel say so once, with the reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from weft.core import errors
from weft.core.problem import Problem
from weft.core.schedule import Gemm
from weft.runtime.bindings import Bindings, Where
from weft.schedules import build

fused = pytest.importorskip("weft.runtime.fused", reason="Triton is not installed")
CPU = torch.device("cpu")


def _gemm() -> Any:
    """The gated GEMM of rank 0."""
    schedule = build(Problem(op="all_gather_matmul", m=64, n=96, k=32, world_size=2), "flag_gated", 1)
    for rank, lane, position, step in schedule:
        if rank == 0 and isinstance(step, Gemm) and fused.is_fused(step):
            program = SimpleNamespace(device=CPU, machine=None, schedule=schedule, buffers_of=lambda kind: {"out"})
            return fused.FusedGemm(cast(Any, program), Where(rank, lane.name, position, step), step)
    raise AssertionError("no gated GEMM")


def _bindings(kernel: Any, *, contiguous: bool) -> Bindings:
    bindings = Bindings()
    for name, rank in {(region.buffer, region.rank) for part in kernel.step.parts for region in (part.a, part.out)}:
        rows = max(region.rows[1] for part in kernel.step.parts for region in (part.a, part.out) if region.buffer == name)
        cols = 48 if name == "out" else 32
        whole = torch.zeros(rows, 2 * cols, dtype=torch.bfloat16)
        bindings.bind(name, rank, whole[:, :cols] if contiguous else whole[:, ::2])
    bindings.bind("b", 0, torch.zeros(32, 48, dtype=torch.bfloat16))
    return bindings


def test_operands_that_the_kernel_cannot_load_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    errors.warn_once.cache_clear()
    for _ in range(2):
        kernel = _gemm()
        for _ in range(2):
            assert not kernel.runs(_bindings(kernel, contiguous=False))
    (line,) = [record.getMessage() for record in caplog.records if record.name == "weft"]
    assert "a Gemm runs part by part" in line
    assert "16-byte aligned" in line


def test_operands_that_it_can_load_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    errors.warn_once.cache_clear()
    kernel = _gemm()
    assert kernel.runs(_bindings(kernel, contiguous=True))
    assert not caplog.records
