"""benchmarks.training on two CPU ranks: all methods of all models agree; what follows from rows; time budgets of traces."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import training_work

from benchmarks import alone, rows, traces, training, training_table
from benchmarks.rows import Row
from weft.core import machine
from weft.planner import plan_training
from weft.planner.models import load_model, preset_names

HALVES = {"communication/default"}
EAGER = {"sequential/torch", "weft/eager", "peer/hand", "computation/hand"}
COMPILED = {
    *("peer/torch_compile", "peer/async_tp", "weft/compiled", "weft/pass"),
    *("peer/hand_compiled", "computation/hand_compiled"),
}


def _check(found: list[Row], methods: set[str]) -> None:
    for row in found:
        assert (row.missing, set(row.us)) == ({}, methods | HALVES)
        assert set(row.extra["difference"]) == {name for name in methods if not name.startswith("computation/")}
        assert max(row.extra["difference"].values()) < 1e-4
        assert (row.extra["step_bytes"], row.extra["prediction"]) == ({}, None)
    assert [row.extra["checkpointing"] for row in found] == [False, True]


@pytest.mark.ranks
@pytest.mark.parametrize("model", training.MODELS)
def test_all_methods_agree(ranks: Any, model: str) -> None:
    for found in ranks(2).run(training_work.measure, "eager", model):
        _check(found, EAGER)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3-32b", "mixtral-8x7b"])
def test_all_compiled_methods_agree(ranks: Any, model: str) -> None:
    for found in ranks(2).run(training_work.measure, "compiled", model):
        _check(found, COMPILED)


@pytest.mark.ranks
def test_a_wrong_gradient_ends_the_run(ranks: Any) -> None:
    for said in ranks(2).run(training_work.measure_without_sum, "llama3-8b"):
        assert "peer/hand" in said
        assert "'input'" in said
        assert "'output'" not in said


@pytest.mark.ranks
def test_the_backward_by_hand_gathers_again_and_alone_nothing_is_sent(ranks: Any) -> None:
    """Two layers: QKV, and gate and up, gather in both passes and scatter in the backward; o and down the other way round."""
    for found in ranks(2).run(training_work.collectives, "llama3-8b"):
        assert found == {"all_gather_into_tensor": 2 * (2 * 2 + 2), "reduce_scatter_tensor": 2 * (2 + 2)}
    for found in ranks(2).run(training_work.collectives, "mixtral-8x7b"):
        assert found == {"all_gather_into_tensor": 2 * 3, "reduce_scatter_tensor": 2 * 2, "all_to_all_single": 2 * 4}


def _row(us: dict[str, float], model: str = "m", tokens: int = 2048, **extra: Any) -> Row:
    about = {"model": model, "tokens": tokens, "checkpointing": False, **extra}
    case = f"{model}, {tokens} tokens"
    return Row(
        bench="training",
        op="training",
        case=case,
        dtype="bfloat16",
        world_size=2,
        mode="eager",
        machine="x",
        us=us,
        extra=about,
    )


US = {"sequential/torch": 1100.0, "peer/hand": 1000.0, "computation/hand": 800.0, "weft/eager": 850.0}


def test_the_share_of_exposed_communication_that_is_hidden() -> None:
    assert training_table.hidden(_row(US), "weft/eager") == 0.75
    assert math.isnan(training_table.hidden(_row({**US, "computation/hand": 1001.0}), "weft/eager"))
    assert math.isnan(training_table.hidden(_row(US), "weft/compiled"))
    both = {**US, "peer/hand_compiled": 900.0, "computation/hand_compiled": 700.0, "weft/pass": 960.0}
    assert training_table.hidden(_row(both), "weft/pass") == -0.3
    row = training.with_figures(_row(both, step_bytes={"peer/hand": 100, "peer/hand_compiled": 80, "weft/eager": 90}))
    assert row.extra["hidden"] == {"weft/eager": 0.75, "weft/pass": -0.3}
    assert row.extra["memory_over_hand"] == {"peer/hand": 1.0, "peer/hand_compiled": 0.8, "weft/eager": 0.9}


def test_the_table_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of one case are one, those of other benchmarks are left out, and the hidden share is one of sums."""
    compiled = {"peer/hand_compiled": 900.0, "computation/hand_compiled": 800.0, "weft/compiled": 800.0, "peer/async_tp": 880.0}
    predicted = {"weft_us": 900.0, "sequential_us": 1210.0, "computation_us": 700.0}
    first = _row(US, "a", step_bytes={"peer/hand": 100, "weft/eager": 110}, prediction={"eager": predicted})
    slow = {**US, "weft/eager": 1000.0, "computation/hand": 700.0}
    found = [
        first,
        _row(compiled, "a", step_bytes={"peer/hand_compiled": 100, "weft/compiled": 120}, prediction=None),
        _row(slow, "b", step_bytes={"peer/hand": 100, "weft/eager": 110}, prediction={"eager": predicted}),
        _row(US, "c", 8192),
    ]
    other = Row(bench="traces", op="training", case="x", dtype="bfloat16", world_size=2, mode="eager", machine="x")
    path = tmp_path / "lines.jsonl"
    for row in (other, *found):
        rows.append(path, row)
    monkeypatch.setattr("sys.argv", ["training_table", str(path)])
    training_table.main()
    said = capsys.readouterr().out
    assert said == training_table.summary(found) + "\n"
    heads, first_line, second, third, empty, small, large = said.splitlines()
    assert heads.split()[:3] == ["case", "weft", "us"]
    compiled_line = ["a,", "2048", "tokens", "800", "compiled", "880", "async_tp", "1.100x", "1.00", "1.20", *"---"]
    assert first_line.split() == compiled_line
    figures = ["1.000x", "0.00", "1.10", "0.90", "1.10", "1.00"]
    assert second.split() == ["b,", "2048", "tokens", "1,000", "eager", "1,000", "hand", *figures]
    assert third.split() == ["c,", "8192", "tokens", "850", "eager", "1,000", "hand", "1.176x", "0.75", *"----"]
    assert empty == ""
    assert small.startswith(
        "2048 tokens, 2 models: 1.049x as fast as the fastest other (geometric mean), worst case 1.000x (b);"
    )
    assert "hidden 0.25 of" in small  # (100 + 0) / (100 + 300)
    assert small.endswith("memory over hand-written 1.15, at most 1.20")
    assert large.startswith("8192 tokens, 1 models: 1.176x")
    assert training_table.predicted(first, "weft/eager") == pytest.approx((900 / 850, 1.1, 700 / 800))
    assert "no case" in training_table.summary([other])


@pytest.mark.parametrize("model", training.MODELS)
def test_a_case_is_predicted_as_a_model_of_its_sizes(model: str) -> None:
    case = training.Case(model=model, sizes=training.MODELS[model], tokens=8192, checkpointing=True)
    found = training.predict_steps(case, machine.load("h200x8"), 2, "bfloat16")
    assert set(found) == {"eager", "compiled"}
    if model in preset_names():
        plan = plan_training(load_model(model), "h200x8", tokens=8192, ranks=2)
        layers = case.sizes.layers
        for mode, us in found.items():
            assert us["weft_us"] == pytest.approx(layers * plan.step(checkpointing=True, compiled=mode == "compiled").weft_us)
    ranked = [found["eager"][name] for name in ("computation_us", "weft_us")]
    assert ranked == sorted(ranked)
    assert found["compiled"]["computation_us"] < found["eager"]["computation_us"]


def test_computation_alone_on_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "alone.jsonl"
    options = ["alone", "--device", "cpu", "--tokens", "16", "--modes", "eager", "--rounds", "1", "--json", str(path)]
    monkeypatch.setattr("sys.argv", options)
    alone.main()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(found) == 2 * len(training.MODELS)
    assert all(row["us"] > 0 and row["predicted_us"] > 0 for row in found)


def _part(name: str, start: float, end: float) -> traces.Part:
    return traces.Part(name=name, kind=traces.kind_of(name), stream=7, start_us=start, end_us=end)


def test_a_time_budget() -> None:
    """100 us of a matmul, 60 beside it of NCCL and 40 beyond it, a gap of 10, 20 of waiting, 30 of a norm, 10 of cat."""
    hand = [
        _part("nvjet_tst", 0, 100),
        _part("ncclDevKernel_AllGather", 40, 140),
        _part("await_kernel", 150, 170),
        _part("vectorized_layer_norm_kernel", 170, 200),
        _part("CatArrayBatchedCopy", 200, 210),
    ]
    found = traces.budget(hand)
    assert {line: us for line, us in found.items() if us} == {
        "matmul": 100,
        "elementwise, norms": 30,
        "copies and cat": 10,
        "communication kernels": 100,
        "waiting": 20,
        "gaps": 10,
        "step": 210,
        "computation": 140,
        "communication": 100,
        "exposed": 60,
        "rest": 70,
    }
    assert traces.budget(hand, 2)["matmul"] == 50
    table = traces.budget_table({"hand": found, "weft": traces.budget(hand[:1])}).splitlines()
    assert table[0].split() == ["us", "per", "step", "hand", "weft", "weft", "-", "hand"]
    assert table[1].split() == ["matmul", "100", "100", "+0"]
    assert table[-1].split() == ["rest", "70", "0", "-70"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--modes", "graph"], "--modes: 'graph'"),
        (["--models", "llama"], "--models: 'llama'"),
        (["--checkpointing", "maybe"], "--checkpointing: 'maybe'"),
        (["--tokens", "8k"], "--tokens: '8k'"),
    ],
)
def test_options_that_will_not_do(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["training", *words])
    with pytest.raises(SystemExit, match="2"):
        training.main()
    assert says in capsys.readouterr().err
