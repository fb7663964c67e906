"""benchmarks.serving on two CPU ranks: what each part measures, what is left out, and the figures that follow from rows."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import serving_work
import torch

from benchmarks import rows, serving, serving_chains, serving_step, serving_table
from benchmarks.rows import AUTO, CASE, Row
from benchmarks.serving_table import ALONE, REFERENCE, SCATTERED, SHARDED, UNFUSED

Tensor = torch.Tensor
ROOT = Path(__file__).parents[2]
PEERS = {"peer/torch one_shot", "peer/torch two_shot"}
FEW = {REFERENCE, *PEERS, UNFUSED, AUTO}
SPLITS = {"weft/token_split:1", "weft/token_split:2", "weft/token_split:4"}
METHODS = {
    "few": {*FEW, ALONE},
    "step": FEW,
    "prefill": {*FEW, *SPLITS, "sequential/scattered", SCATTERED, SHARDED, ALONE},
    "product": {REFERENCE, *PEERS, AUTO},
}
"""By part."""


@pytest.mark.ranks
@pytest.mark.parametrize("part", METHODS)
def test_each_part_measures_its_methods(ranks: Any, part: str) -> None:
    found, others = ranks(2).run(serving_work.measure, part)
    assert [row.case for row in found] == [row.case for row in others]
    assert [row.case for row in found] == [case.name for case in serving.cases([part], "cpu", quick=True)]
    for row in found:
        assert (row.bench, row.world_size, row.mode, row.commit, row.extra["part"]) == ("serving", 2, "eager", "abc", part)
        assert (set(row.us), row.missing) == (METHODS[part], {})
        assert set(row.extra["error"]) == METHODS[part] - {ALONE}
        assert min(row.us.values()) > 0
        for errors in row.extra["error"].values():
            assert 0 < errors["norm"] < 0.02
            assert 0 < errors["sum"] < 0.02
        assert bool(row.chosen) == bool(row.problem) == (part in ("few", "prefill"))


@pytest.mark.ranks
def test_what_cpus_do_not_have_is_left_out_with_its_reason(ranks: Any) -> None:
    for found in ranks(2).run(serving_work.measure_without_peers):
        for row in found:
            assert set(row.us) == METHODS["few"] - PEERS
            assert set(row.missing) == PEERS
            assert all("SymmetricMemory" in reason for reason in row.missing.values())


@pytest.mark.ranks
def test_a_wrong_norm_is_left_out_with_its_reason(ranks: Any) -> None:
    for found in ranks(2).run(serving_work.measure_wrong_norm):
        for row in found:
            assert set(row.us) == METHODS["few"] - {AUTO}
            assert "rank 1: ArithmeticError: WRONG RESULT: relative errors {'norm':" in row.missing[AUTO]
            assert AUTO not in row.extra["error"]


@pytest.mark.ranks
def test_a_case_after_the_budget_says_so(ranks: Any) -> None:
    for found, raised in ranks(2).run(serving_work.measure_late):
        assert "the 8 s of --budget-s are over" in raised
        (row,) = found
        assert row.us == {}
        assert "the 8 s of --budget-s are over" in row.missing[CASE]
        assert "--budget-s are over" in serving_table.summary(found)


@pytest.mark.ranks
def test_errors_of_whole_and_of_sharded_sums(ranks: Any) -> None:
    first, second = ranks(2).run(serving_work.errors_of_known_results)
    for whole, _ in (first, second):
        assert whole == {"norm": 0.0, "sum": pytest.approx(math.sqrt(0.3**2 / 4))}
    assert first[1] == {"norm": 0.0, "sum": pytest.approx(math.sqrt(0.3**2 / 2))}
    assert second[1] == {"norm": 0.0, "sum": 0.0}


@pytest.mark.ranks
def test_products_are_drawn_for_comparisons_and_zeros_while_timed(ranks: Any) -> None:
    for largest, timed in ranks(2).run(serving_work.compare_products_twice):
        assert set(largest) == METHODS["product"]
        assert max(largest.values()) < 0.02
        assert 0.1 < timed["sum"] < 2  # of the residual alone


def test_a_decoding_step_is_that_of_layers_with_norms_first() -> None:
    """In float64 on one rank, written as the layers of decoder.py are: each block reads the norm of the sum before it."""
    sizes = serving.cases(["step"], "cpu", quick=True)[0].sizes
    step = serving_step.make_step(sizes, 3, 1, 0, "cpu")

    def chain(a: Tensor, b: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return serving_chains.add_norm(a @ b.double(), residual, weight.double())

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(1, keepdim=True) + serving_chains.EPS).sqrt() * weight.double()

    groups = sizes.heads // sizes.kv_heads
    x, before = step.x.double(), step.norm
    for layer in step.layers:
        qkv = (norm(x, before) @ layer.qkv.double()).view(3, -1, sizes.head)
        q, k, v = qkv.split([sizes.heads, sizes.kv_heads, sizes.kv_heads], 1)
        seen = q * k.repeat_interleave(groups, 1).sigmoid() + v.repeat_interleave(groups, 1)
        x = x + seen.flatten(1) @ layer.out.double()
        gate, up = (norm(x, layer.norm) @ layer.up.double()).split(sizes.width, 1)
        x = x + (gate * gate.sigmoid() * up) @ layer.down.double()
        before = layer.next_norm
    normed, whole = step.double(chain)
    torch.testing.assert_close(whole, x)
    torch.testing.assert_close(normed, norm(x, before))


def test_cases_of_gpus() -> None:
    found = serving.cases(list(METHODS), "cuda", quick=False)
    counts = {part: sum(case.part == part for case in found) for part in METHODS}
    assert counts == {"few": 3 * 2 * 6, "step": 4, "prefill": 3 * 2 * 5, "product": 3 * 6}
    assert len({(case.op, case.name) for case in found}) == len(found)
    assert {(case.k, case.n) for case in found if case.part == "few"} == {
        *((4096, 4096), (14336, 4096), (8192, 8192), (28672, 8192), (8192, 5120), (25600, 5120))
    }
    assert {case.m for case in found if case.part == "prefill"} == {512, 1024, 2048, 4096, 8192}
    assert [case.part for case in found[: 6 + 1 + 6 + 3]] == ["few"] * 6 + ["step"] + ["prefill"] * 6 + ["product"] * 3
    assert all(2 <= case.calls(2) <= 16 for case in found)
    assert len(serving.cases(list(METHODS), "cuda", quick=True)) == 2 + 1 + 2 + 1


def _row(case: str, us: dict[str, float], part: str = "few", **more: Any) -> Row:
    about: dict[str, Any] = {"op": "matmul_all_reduce_norm", "dtype": "bfloat16", "world_size": 2, "mode": "graph"}
    extra = {"part": part, **more.pop("extra", {})}
    return Row(bench="serving", case=case, us=us, machine="by hand", extra=extra, **about, **more)


ONE = _row(
    "one",
    {REFERENCE: 30.0, "peer/torch one_shot": 24.0, UNFUSED: 20.0, AUTO: 12.0, ALONE: 10.0},
    extra={"error": {REFERENCE: {"norm": 0.004, "sum": 0.002}, AUTO: {"norm": 0.003, "sum": 0.002}}},
)
TWO = _row(
    "two",
    {REFERENCE: 16.0, UNFUSED: 18.0, AUTO: 16.0, ALONE: 12.8},
    missing={"peer/torch one_shot": "no memory"},
    extra={"error": {REFERENCE: {"norm": 0.004, "sum": 0.002}, AUTO: {"norm": 0.012, "sum": 0.001}}},
)


def _is(found: serving_table.Ratio, mean: float, worst: float, case: str) -> bool:
    return math.isclose(found.mean, mean) and math.isclose(found.worst, worst) and (found.case, found.cases) == (case, 2)


def test_figures_by_hand() -> None:
    """The geometric mean of two ratios is the root of their product."""
    late = _row("three", {}, missing={CASE: "late"})
    unknown = _row("four", {REFERENCE: 5.0}, missing={AUTO: "wrong"})
    (found,) = serving_table.figures([ONE, TWO, late, unknown])
    assert (found.part, found.mode, found.world_size, found.cases) == ("few", "graph", 2, 4)
    assert _is(found.gains[AUTO], math.sqrt(2), 1, "two")  # 24 / 12 and 16 / 16
    assert _is(found.gains[UNFUSED], math.sqrt(24 / 20 * 16 / 18), 16 / 18, "two")
    assert _is(found.over_unfused, math.sqrt(20 / 12 * 18 / 16), 18 / 16, "two")
    assert _is(found.over_alone, math.sqrt(1.2 * 1.25), 1.25, "two")  # 12 / 10 and 16 / 12.8: the larger is the worse
    assert _is(found.errors["norm"], 1.5, 3, "two")  # 0.75 and 3
    assert _is(found.errors["sum"], math.sqrt(0.5), 1, "one")  # 1 and 0.5
    assert found.left_out == {"peer/torch one_shot: no memory": 1, "whole cases: late": 1, "weft/auto: wrong": 1}


def test_the_summary_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest row with times counts, one without times only where there is no other, and no row of another benchmark."""
    path = tmp_path / "lines.jsonl"
    old = _row("one", {REFERENCE: 1.0, AUTO: 100.0})
    other = Row(bench="tp", op="x", case="x", dtype="bfloat16", world_size=2, mode="graph", machine="x")
    for row in (old, other, ONE, _row("one", {}, missing={CASE: "late"}), _row("p", {REFERENCE: 9.0, AUTO: 6.0}, "prefill")):
        rows.append(path, row)
    monkeypatch.setattr("sys.argv", ["serving_table", str(path)])
    serving_table.main()
    assert capsys.readouterr().out.splitlines() == [
        "few rows, 2 ranks, graph, 1 cases",
        "    weft/unfused over the fastest program without weft: 1.200x, at worst 1.200x (one), 1 cases",
        "    weft/auto over the fastest program without weft: 2.000x, at worst 2.000x (one), 1 cases",
        "    weft/auto over weft/unfused: 1.667x, at worst 1.667x (one), 1 cases",
        "    time of weft/auto over that of matmul_all_reduce alone: 1.200x, at worst 1.200x (one), 1 cases",
        "    error of the norm of weft/auto over that of sequential/default: 0.750x, at worst 0.750x (one), 1 cases",
        "    error of the sum of weft/auto over that of sequential/default: 1.000x, at worst 1.000x (one), 1 cases",
        "prefill, 2 ranks, graph, 1 cases",
        "    weft/auto over the fastest program without weft: 1.500x, at worst 1.500x (p), 1 cases",
    ]
    assert serving_table.summary([other]) == "serving: nothing was measured"


def test_parts_that_there_are_not(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["serving", "--only", "few,many"])
    with pytest.raises(SystemExit, match="2"):
        serving.main()
    assert "--only has 'many'" in capsys.readouterr().err


@pytest.mark.ranks
@pytest.mark.slow
def test_the_program_writes_its_rows_and_measures_none_twice(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    start = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "benchmarks.serving")
    options = ("--quick", "--rounds", "1", "--device", "cpu", "--json", str(path), "--commit", "01234567")
    says = []
    for _ in range(2):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [*start, *options], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        says.append(done.stdout)
    found = rows.read(path)
    assert [row.case for row in found] == [case.name for case in serving.cases(list(METHODS), "cpu", quick=True)]
    assert {row.commit for row in found} == {"01234567"}
    assert serving_table.summary(found) in says[0]
    assert "0 of 6 cases were left to measure" in says[1]
