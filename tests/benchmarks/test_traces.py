"""benchmarks/traces.py: what is kept of a profile, and what is told of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import traces


def _event(name: str, start: float, us: float, stream: int, cat: str = "kernel", **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": cat,
        "pid": 0,
        "tid": stream,
        "ts": start,
        "dur": us,
        "name": name,
        "args": {"stream": stream, **args},
    }


@pytest.fixture
def events() -> list[dict[str, Any]]:
    """100 us of a matmul, beside it and 40 us beyond a copy, a gap of 10 us, 30 us of a local copy."""
    return [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "GPU 0"}},
        {"ph": "M", "pid": 9, "name": "process_name", "args": {"name": "python"}},
        _event("weft forward", 990, 500, 7, "gpu_user_annotation"),
        _event("ProfilerStep#1", 990, 500, 7, "gpu_user_annotation"),
        _event("nvjet_" + "x" * 300, 1000, 100, 7, grid=[1, 1, 1]),
        _event("Memcpy PtoP (Device -> Device)", 1020, 120, 9, "gpu_memcpy", bytes=64),
        _event("CatArrayBatchedCopy", 1150, 30, 7),
        _event("aten::mm", 900, 5, 1, "cpu_op"),
    ]


def test_the_gpus_side_is_kept_and_short(events: list[dict[str, Any]], tmp_path: Path) -> None:
    traces.written(traces.trimmed(events), tmp_path / "one.json.gz")
    stored = traces.read(tmp_path / "one.json.gz")
    assert [event["name"][:12] for event in stored] == [
        "process_name",
        "weft forward",
        "nvjet_xxxxxx",
        "Memcpy PtoP ",
        "CatArrayBatc",
    ]
    assert [event["ts"] for event in stored[1:]] == [-10, 0, 20, 150]
    assert stored[2]["args"] == {"stream": 7}
    assert stored[3]["args"] == {"stream": 9, "bytes": 64}
    assert len(stored[2]["name"]) == traces.NAME_LETTERS


def test_times_by_kind_and_what_is_exposed(events: list[dict[str, Any]]) -> None:
    found = traces.parts(traces.trimmed(events))
    assert traces.by_kind(found) == {"copy engine": (1, 120), "local copy": (1, 30), "matmul": (1, 100)}
    assert traces.shares(found) == {"whole": 180, "exposed": 40, "idle": 10}
    assert traces.heaviest(found, 1) == [("Memcpy PtoP (Device -> Device)", 1, 120)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopB_NNT", "matmul"),
        ("void pytorch_flash::flash_fwd_kernel<cutlass>", "attention"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "NCCL"),
        ("_push_kernel", "weft's exchange"),
        ("void at::native::vectorized_elementwise_kernel<4, SiLU>", "the rest"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert traces.kind_of(name) == kind
