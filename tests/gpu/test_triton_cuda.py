"""weft.triton on GPUs: the documented examples, the protocols of its interpreted tests, once in a CUDA graph, the tutorial."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from on_gpus import NEEDS_TWO, SIZES
from rank_pools import ranks_on_gpus
from triton_work import documented, hammer, one_rank_stays_away, run_example, run_protocol, run_protocol_in_a_graph, wrap_around

from weft.runtime.ranks import Ranks

pytestmark = NEEDS_TWO
EXAMPLES = documented()
TUTORIAL = sorted((Path(__file__).parents[2] / "examples" / "triton").glob("[0-9]_*.py"))
PROTOCOLS = [
    ("exchange", 77, "bfloat16"),
    ("exchange", 136, "bfloat16"),
    ("exchange", 40_000, "float32"),
    ("sums", 10_001, "float32"),
    ("slices", 20, "float16"),
]
pool = ranks_on_gpus(SIZES, 20)


@pytest.mark.parametrize("name", EXAMPLES)
def test_documented_example(pool: Ranks, name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.py"
    path.write_text(EXAMPLES[name], encoding="utf-8")
    pool.run(run_example, str(path), timeout_s=90)


@pytest.mark.parametrize(("name", "size", "dtype"), PROTOCOLS)
def test_calls_on_new_data(pool: Ranks, name: str, size: int, dtype: str) -> None:
    pool.run(run_protocol, name, size, dtype, 12, 0.1, timeout_s=90)


@pytest.mark.parametrize(("name", "size", "dtype"), PROTOCOLS)
def test_calls_in_a_graph(pool: Ranks, name: str, size: int, dtype: str) -> None:
    pool.run(run_protocol_in_a_graph, name, size, dtype, 12, timeout_s=90)


@pytest.mark.parametrize("dtype", ["float32", "int32", "int64"])
def test_no_addition_and_no_signal_is_lost(pool: Ranks, dtype: str) -> None:
    pool.run(hammer, dtype, 1000, timeout_s=90)


def test_a_flag_may_wrap_around(pool: Ranks) -> None:
    pool.run(wrap_around, timeout_s=90)


def test_a_rank_that_stays_away_is_told_of(pool: Ranks) -> None:
    messages = pool.run(one_rank_stays_away, timeout_s=90)
    assert "PeerLost: rank" in messages.pop(1)
    for message in messages:
        assert "WaitTimeout: rank" in message or "PeerLost: rank" in message
    assert any("flag arrived[" in message and "expected at least 1, seen 0" in message for message in messages)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs that no ranks share: it starts a rank for each")
@pytest.mark.parametrize("path", TUTORIAL, ids=lambda path: path.stem)
def test_tutorial(path: Path, tmp_path: Path) -> None:
    """As its users start it, on two GPUs."""
    done = subprocess.run([sys.executable, path], cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("6 calls on 2 cuda ranks: ")
