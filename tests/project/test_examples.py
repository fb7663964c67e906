"""The examples, each run as a user would; most of those for torchrun on ranks that are quicker to start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from torchrun import torchrun

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SECONDS = 600

pytestmark = pytest.mark.ranks


ABORTED_AT_EXIT = "terminate called without an active exception"
"""DTensor's caches keep gloo's threads until the process ends, which now and then aborts in them."""


def run(*words: str, folder: Path) -> str:
    """Standard output of a command that must succeed, from another folder than the tree's root."""
    done = _ended(words, folder)
    if done.returncode and ABORTED_AT_EXIT in done.stderr:
        warnings.warn(f"{words}: {ABORTED_AT_EXIT}; run once more", stacklevel=2)
        done = _ended(words, folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def _ended(words: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def ranks_of(name: str, *words: str, folder: Path, ranks: int = 2) -> str:
    """Standard output of an example's ranks."""
    return torchrun(EXAMPLES / name, *words, ranks=ranks, folder=folder, timeout_s=SECONDS)


@pytest.mark.slow
def test_one_operator_under_torchrun(tmp_path: Path) -> None:
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    text = run(*command, str(EXAMPLES / "01_one_operator.py"), "--rows", "24", folder=tmp_path)
    (difference,) = re.findall(r"largest difference .*: (\S+) of the largest element", text)
    assert float(difference) < 0.02


@pytest.mark.slow
def test_without_torchrun_it_is_named(tmp_path: Path) -> None:
    done = _ended((str(EXAMPLES / "dlrm.py"), "--steps", "1"), tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"torchrun starts its ranks: torchrun --nproc-per-node 2 {EXAMPLES / 'dlrm.py'} --steps 1\n"


def test_schedule_by_hand(tmp_path: Path) -> None:
    text = run(str(EXAMPLES / "02_schedule_by_hand.py"), folder=tmp_path)
    assert "by_hand, chunks=2: all_gather_matmul" in text
    assert re.search(r"Without the wait for `free` on rank 0:\nrank 0, lane copy, .* nothing orders the two", text)
    times = {name: int(us) for name, us in re.findall(r"^  (\w+) +(\d+) us$", text, re.MULTILINE)}
    assert times["by_hand"] < times["shard_p2p"] < times["sequential"]
    (difference,) = re.findall(r"^Run on two CPU ranks: .* (\S+) of the largest element$", text, re.MULTILINE)
    assert float(difference) < 1e-5


def test_a_schedule_of_sums(tmp_path: Path) -> None:
    assert "reduce partial + recv -> out" in run(str(EXAMPLES / "schedule_of_sums.py"), folder=tmp_path)
    options = ("--schedule", "counted", "--ranks", "3", "--device", "cpu", "--tokens", "32", "--import", "schedule_of_sums")
    text = run("-m", "weft", "run", "llama3-8b", "--op", "matmul_reduce_scatter", *options, folder=EXAMPLES)
    assert "All results are right" in text


@pytest.mark.slow
def test_plan_a_small_config(tmp_path: Path) -> None:
    text = run(str(EXAMPLES / "03_plan_a_config.py"), "--report", str(tmp_path / "report"), "--tokens", "16", folder=tmp_path)
    assert "4 of 4 results right on 2 cpu ranks" in text
    assert "small-llama" in (tmp_path / "report" / "index.html").read_text(encoding="utf-8")


def test_ulysses(tmp_path: Path) -> None:
    chosen = ("--into", "hetero_unfused_1d:2", "--out", "uniform_fused_1d:2", "--tokens", "24")
    text = ranks_of("04_ulysses.py", *chosen, folder=tmp_path)
    assert "Ulysses on 2 cpu ranks: 48 tokens, 4 heads, y [24, 256]" in text
    (difference,) = re.findall(r"largest difference .*: (\S+) of the largest element", text)
    assert float(difference) < 1e-5


@pytest.mark.slow
def test_training_with_and_without_weft(tmp_path: Path) -> None:
    text = ranks_of("train_gpt.py", "--layers", "1", "--steps", "48", "--batch", "8", folder=tmp_path)
    for kind in ("ddp", "fsdp"):
        ((first, last, mine),) = re.findall(rf"^{kind}: loss (\S+) to (\S+), with weft (\S+)$", text, re.MULTILINE)
        assert float(last) < float(first)
        assert float(mine) == pytest.approx(float(last), abs=2e-4)
        assert f"{kind}: last step " in text
    assert re.search(
        r"^ddp uses (sequential|nccl)\S*, because the planner chose it: .* Nothing was measured\.$", text, re.MULTILINE
    )
    (difference,) = re.findall(r"^largest difference of losses: (\S+)$", text, re.MULTILINE)
    assert float(difference) < 1e-4


@pytest.mark.slow
def test_a_llama_in_training(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    checkpoint, page = tmp_path / "weights", tmp_path / "report.html"
    options = ("--steps", "6", "--checkpoint", str(checkpoint), "--report", str(page))
    text = ranks_of("train_llama_tp.py", *options, folder=tmp_path)
    ((first, last),) = re.findall(r"^2 cpu ranks, dp 1: loss (\S+) to (\S+)$", text, re.MULTILINE)
    assert float(last) < float(first)
    assert re.search(r"^LlamaForCausalLM: overlapped \d of 13 places that communicate", text, re.MULTILINE)
    assert "model.layers.*.mlp: down_proj" in page.read_text(encoding="utf-8")
    assert (checkpoint / ".metadata").is_file()


@pytest.mark.slow
def test_generation(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    text = ranks_of("generate_tp.py", "--tokens", "4", folder=tmp_path)
    assert "\nas in one process: 100%\n" in text
    assert "matmul_all_reduce_norm M=1 " in text


def test_pipeline(tmp_path: Path) -> None:
    text = ranks_of("pipeline.py", "--microbatches", "26", "--rows", "8", ranks=3, folder=tmp_path)
    (difference,) = re.findall(r"^26 microbatches through 3 stages, largest difference (\S+)$", text, re.MULTILINE)
    assert float(difference) < 1e-5
    assert re.search(r"^tick uses \S+, because ", text, re.MULTILINE)


@pytest.mark.slow
def test_mixtral_with_experts_on_ranks(tmp_path: Path) -> None:
    small = ("--layers", "1", "--width", "32", "--length", "16", "--steps", "8")
    text = ranks_of("mixtral_ep.py", *small, folder=tmp_path)
    ((first, last),) = re.findall(r"^each expert on one rank: loss (\S+) to (\S+)$", text, re.MULTILINE)
    assert float(last) < float(first)
    ((whole, spread),) = re.findall(r"^parameters of a rank: (\S+) MB, then (\S+) MB$", text, re.MULTILINE)
    assert float(spread) < 0.75 * float(whole)
    (difference,) = re.findall(r"^largest difference of losses: (\S+)$", text, re.MULTILINE)
    assert float(difference) < 1e-4


@pytest.mark.slow
def test_dlrm(tmp_path: Path) -> None:
    text = ranks_of("dlrm.py", "--steps", "20", folder=tmp_path)
    assert "6 tables on 2 cpu ranks, [2, 4] each" in text
    ((first, last, unseen, loaded),) = re.findall(r"^loss (\S+) to (\S+), of .* (\S+), loaded (\S+)$", text, re.MULTILINE)
    assert float(last) < 0.5 * float(first)
    assert unseen == loaded


TUTORIAL = sorted((EXAMPLES / "triton").glob("[0-9]_*.py"))


@pytest.mark.parametrize("path", TUTORIAL, ids=lambda path: path.stem)
@pytest.mark.slow
def test_tutorial_of_device_functions(path: Path, tmp_path: Path) -> None:
    assert run(str(path), folder=tmp_path).startswith("6 calls on 2 cpu ranks: ")


@pytest.mark.slow
def test_tutorial_on_three_ranks(tmp_path: Path) -> None:
    assert "6 calls on 3 cpu ranks: " in ranks_of(f"triton/{TUTORIAL[-1].name}", ranks=3, folder=tmp_path)
