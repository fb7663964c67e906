"""The plug-in with the real vLLM, on CPU ranks. `make integrations` installs vLLM in a folder of its own and runs these."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed; `make integrations` installs it")


def run(case: str, ranks: int, spoil: str = "") -> tuple[int, str]:
    """Return the status of a case, and what its ranks print."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), str(HERE / "ranks.py"), case]
    settings = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_DISABLE_COMPILE_CACHE": "1",
        "OMP_NUM_THREADS": "1",
        "WEFT_VLLM_SPOIL": spoil,
    }
    found = subprocess.run(words, env={**os.environ, **settings}, capture_output=True, text=True, timeout=600, check=False)
    return found.returncode, found.stdout + found.stderr


@pytest.mark.parametrize(
    ("case", "ranks"),
    [("eager", 2), ("compiled", 2), ("fp8", 2), ("pipeline", 4), ("size_one", 2), ("reasons", 2), ("off", 2)],
)
def test_weft_computes_what_vllm_does(case: str, ranks: int) -> None:
    code, text = run(case, ranks)
    assert code == 0, text[-4000:]
    assert text.count(f"{case}: ok") == ranks


@pytest.mark.parametrize(
    ("spoil", "message"), [("shard", "largest difference"), ("unregistered", "0 calls of weft instead of 1")]
)
def test_a_broken_layer_is_noticed(spoil: str, message: str) -> None:
    code, text = run("eager", 2, spoil)
    assert code != 0
    assert message in text
