"""Why `auto` lost: each cause follows from the times of a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import lost
from benchmarks.rows import AUTO

PROBLEM = {"op": "all_gather_matmul", "m": 8192, "n": 14336, "k": 4096, "world_size": 8}
"""On eight H200s the ranking puts shard_p2p among the first, and uniform_fused_2d:32 behind."""
WHERE = {"bench": "tp", "op": "all_gather_matmul", "case": "x M=8192", "dtype": "bfloat16", "world_size": 8, "mode": "graph"}


def found(path: Path, us: dict[str, float], **changes: Any) -> list[lost.Loss]:
    row = {**WHERE, "machine": "8 x NVIDIA H200", "problem": PROBLEM, "us": {"peer/async_tp": 300.0, **us}, **changes}
    path.write_text(json.dumps(row) + "\n")
    return list(lost.losses(path))


@pytest.mark.parametrize(
    ("us", "chosen", "why"),
    [
        ({AUTO: 330.0, "weft/shard_p2p": 320.0, "weft/sequential": 400.0}, "shard_p2p", "no schedule"),
        ({AUTO: 330.0, "weft/shard_p2p": 320.0, "weft/uniform_fused_2d:32": 280.0}, "shard_p2p", "no candidate"),
        ({AUTO: 330.0, "weft/shard_p2p": 290.0, "weft/sequential": 400.0}, "shard_p2p", "by chance"),
        ({AUTO: 330.0, "weft/shard_p2p": 290.0, "weft/sequential": 325.0}, "sequential", "wrong choice"),
    ],
)
def test_each_cause(tmp_path: Path, us: dict[str, float], chosen: str, why: str) -> None:
    (loss,) = found(tmp_path / "x.jsonl", us, chosen=chosen)
    assert loss.why == why
    assert str(loss).endswith(why)


def test_what_is_no_loss(tmp_path: Path) -> None:
    assert found(tmp_path / "x.jsonl", {AUTO: 301.0, "weft/shard_p2p": 301.0}, chosen="shard_p2p") == []
    assert found(tmp_path / "x.jsonl", {AUTO: 330.0, "weft/shard_p2p": 320.0}, chosen="shard_p2p", problem={}) == []
