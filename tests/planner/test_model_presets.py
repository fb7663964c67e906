"""Models by name: presets have their published sizes, and a wrong name ends in one clear line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import preset_files
import pytest

from weft.cli.choices import choose_layers
from weft.core import codec
from weft.core.problem import LookupProblem, RaggedProblem, split
from weft.planner.models import EmbeddingCall, Model, choose_expert_calls, load_model, operator_calls, preset_names


def shapes(model: Model) -> dict[str, tuple[int, int]]:
    return {call.name: (call.n, call.k) for call in operator_calls(model)}


@pytest.mark.parametrize("name", preset_names())
def test_preset_loads_cites_its_source_and_round_trips(name: str) -> None:
    model = load_model(name)
    assert model.name == name
    assert model.source
    assert codec.loads(Model, codec.dumps(model)) == model
    assert operator_calls(model)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama3-8b", 8.0), ("llama3-70b", 70.6), ("qwen3-32b", 32.8), ("t-nlg", 17.2), ("gpt3-175b", 174.6)],
)
def test_preset_sizes_add_up_to_the_published_parameter_count(name: str, billions: float) -> None:
    """The weights of the operator calls plus the embeddings (Llama, Qwen: untied) give the count that the model is known by."""
    model = load_model(name)
    vocabulary = {"llama3": 2 * 128256, "qwen3": 2 * 151936}.get(name.partition("-")[0], 51200)
    layer = sum(n * k for n, k in shapes(model).values())
    assert (layer * model.layers + vocabulary * model.hidden) / 1e9 == pytest.approx(billions, rel=0.01)


def test_an_operator_call_becomes_a_problem() -> None:
    call = next(iter(operator_calls(load_model("llama3-8b"))))
    problem = call.problem(512, 4, "float32")
    assert (problem.op, problem.m, problem.n, problem.k) == ("all_gather_matmul", 512, 6144, 4096)
    assert (problem.world_size, problem.dtype) == (4, "float32")


def test_experts_have_operator_calls() -> None:
    mixtral = {s.name: s for s in operator_calls(load_model("mixtral-8x7b"))}
    assert list(mixtral) == ["attention QKV", "attention out", "expert dispatch + gate/up", "expert down + combine"]
    dispatch, combine = (mixtral[name].problem(513, 4, "bfloat16") for name in list(mixtral)[2:])
    assert (dispatch.op, dispatch.m, dispatch.n, dispatch.k) == ("all_to_all_matmul", 257, 28672, 4096)
    assert (combine.op, combine.m, combine.n, combine.k) == ("matmul_all_to_all", 257, 4096, 14336)


def test_embedding_tables_are_spread_over_ranks() -> None:
    (call,) = operator_calls(load_model("dlrm-mlperf"))
    assert isinstance(call, EmbeddingCall)
    problem = call.problem(512, 4, "float32")
    assert isinstance(problem, LookupProblem)
    assert [len(own) for own in problem.dims] == [7, 7, 7, 5]
    assert (problem.m, problem.n) == (512, 26 * 128)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_lookup_is_planned_by_the_rank_that_reads_the_most_rows(ranks: int) -> None:
    """The bags of one table have 100 rows, those of most tables one to ten."""
    model = load_model("dlrm-mlperf")
    (call,) = operator_calls(model)
    problem = call.problem(512, ranks, "float32")
    assert isinstance(problem, LookupProblem)
    read = max(sum(model.pooling[low:high]) for low, high in split(26, ranks))
    most = max(len(own) for own in problem.dims)
    assert read <= problem.k * most < read + most
    assert call.k == 8


def test_experts_are_planned_with_splits() -> None:
    model, calls = choose_expert_calls(load_model("mixtral-8x7b"), operator_calls(load_model("mixtral-8x7b")), 4)
    dispatch, combine = (call.problem(513, 4, "bfloat16") for call in calls[2:])
    assert isinstance(dispatch, RaggedProblem)
    assert isinstance(combine, RaggedProblem)
    sizes = [(one.op, one.m, one.n, one.k, one.capacity, one.experts) for one in (dispatch, combine)]
    assert sizes == [
        ("ragged_all_to_all_matmul", 257, 28672, 4096, 257, 2),
        ("ragged_matmul_all_to_all", 257, 4096, 14336, 257, 2),
    ]
    assert "calls with splits" in model.notes[0]


@pytest.mark.parametrize(("ranks", "even", "why"), [(3, "", "8 experts on 3 ranks"), (4, "it is asked for", "it is asked for")])
def test_experts_that_are_not_planned_with_splits_have_a_note_that_says_why(ranks: int, even: str, why: str) -> None:
    model = load_model("mixtral-8x7b")
    found, calls = choose_expert_calls(model, operator_calls(model), ranks, even=even)
    assert calls == operator_calls(model)
    assert why in found.notes[0]
    other = replace(model, read=calls)
    assert "not known" in choose_expert_calls(other, calls, 4)[0].notes[0]


def test_unknown_name_lists_presets_and_suggests() -> None:
    with pytest.raises(ValueError, match=r"llama3-70b"):
        load_model("llama-70b")
    with pytest.raises(ValueError, match="model is 'x'"):
        load_model("x")


MODULES = [(name, ranks) for name in preset_files.CONFIGS for ranks in (2, 8)]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [pytest.param(*each, marks=() if each == ("gpt-oss-20b", 8) else pytest.mark.slow) for each in MODULES],
)
def test_a_preset_of_modules_is_what_its_config_is_planned_as(tmp_path: Path, name: str, ranks: int) -> None:
    """`python tests/helpers/preset_files.py` writes the presets anew."""
    pytest.importorskip("transformers", minversion="5.0")
    made = preset_files.make(name, tmp_path, ranks)
    stored, calls = choose_layers(name, None, ranks=ranks)
    assert replace(stored, source="") == replace(made, source="")
    assert calls == made.read


def test_a_preset_of_modules_promises_what_weft_parallelize_runs() -> None:
    assert [call.name for call in operator_calls(load_model("gpt-oss-120b"))] == ["attention QKV", "attention out"]
    _, calls = choose_layers("deepseek-v3", None, ranks=8)
    assert not any("q_b_proj" in call.name or "kv_b_proj" in call.name for call in calls)
    assert [call.layers for call in calls if call.name.startswith("expert")] == [58, 58]
    refused, _ = choose_layers("gpt-oss-120b", None, ranks=16)
    assert refused.places == ()
    assert "divides the 8 key and value heads" in refused.notes[0]
