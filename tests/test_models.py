"""Models: presets have their published sizes, configs of every family are read right, and bad ones end in one clear line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.core import codec
from weft.core.problem import LookupProblem
from weft.planner.models import LookupSite, Model, load_model, preset_names, sites

Write = Callable[..., Path]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "hidden_act": "silu",
}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(data: Any, name: str = "config.json") -> Path:
        path = tmp_path / name
        path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
        return path

    return write


def shapes(model: Model) -> dict[str, tuple[int, int]]:
    return {site.name: (site.n, site.k) for site in sites(model)}


def without(*keys: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**LLAMA, **changes}.items() if key not in keys}


# --- presets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", preset_names())
def test_preset_loads_cites_its_source_and_round_trips(name: str) -> None:
    model = load_model(name)
    assert model.name == name
    assert model.source
    assert codec.loads(Model, codec.dumps(model)) == model
    assert sites(model)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama3-8b", 8.0), ("llama3-70b", 70.6), ("llama3-405b", 405.8), ("t-nlg", 17.2), ("gpt3-175b", 174.6)],
)
def test_preset_sizes_add_up_to_the_published_parameter_count(name: str, billions: float) -> None:
    """Weights of the sites plus the embeddings (Llama: untied) give the count that the model is known by."""
    model = load_model(name)
    vocabulary = 2 * 128256 if name.startswith("llama") else 51200
    layer = sum(n * k for n, k in shapes(model).values())
    assert (layer * model.layers + vocabulary * model.hidden) / 1e9 == pytest.approx(billions, rel=0.01)


def test_sites_of_a_gated_layer() -> None:
    assert shapes(load_model("llama3-70b")) == {
        "attention QKV": (10240, 8192),
        "attention out": (8192, 8192),
        "MLP gate/up": (57344, 8192),
        "MLP down": (8192, 28672),
    }


def test_sites_of_a_layer_without_gate() -> None:
    assert shapes(load_model("t-nlg"))["MLP up"] == (17024, 4256)
    assert shapes(load_model("t-nlg"))["attention QKV"] == (3 * 4256, 4256)


def test_a_site_becomes_a_problem() -> None:
    site = next(iter(sites(load_model("llama3-8b"))))
    problem = site.problem(512, 4, "float32")
    assert (problem.op, problem.m, problem.n, problem.k) == ("all_gather_matmul", 512, 6144, 4096)
    assert (problem.world_size, problem.dtype) == (4, "float32")


def test_experts_have_sites() -> None:
    mixtral = {s.name: s for s in sites(load_model("mixtral-8x7b"))}
    assert list(mixtral) == ["attention QKV", "attention out", "expert dispatch + gate/up", "expert down + combine"]
    dispatch, combine = (mixtral[name].problem(513, 4, "bfloat16") for name in list(mixtral)[2:])
    assert (dispatch.op, dispatch.m, dispatch.n, dispatch.k) == ("all_to_all_matmul", 257, 28672, 4096)
    assert (combine.op, combine.m, combine.n, combine.k) == ("matmul_all_to_all", 257, 4096, 14336)


def test_embedding_tables_are_spread_over_ranks() -> None:
    (site,) = sites(load_model("dlrm-mlperf"))
    assert isinstance(site, LookupSite)
    problem = site.problem(512, 4, "float32")
    assert isinstance(problem, LookupProblem)
    assert [len(own) for own in problem.dims] == [7, 7, 7, 5]
    assert (problem.m, problem.n, problem.k) == (512, 26 * 128, 8)


# --- config.json -----------------------------------------------------------------------------------------------------


def test_llama_config(write: Write) -> None:
    model = load_model(str(write(LLAMA)))
    assert (model.kv_heads, model.head_dim, model.layers, model.notes) == (2, 8, 3, ())
    assert shapes(model) == {
        "attention QKV": (96, 64),
        "attention out": (64, 64),
        "MLP gate/up": (320, 64),
        "MLP down": (64, 160),
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "qwen3", "head_dim": 16}, {"attention QKV": (192, 64), "attention out": (64, 128)}),
        ({"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}, {"MLP gate/up": (320, 64)}),
        ({"model_type": "phi3"}, {"MLP gate/up": (320, 64)}),
        ({"model_type": "gpt_neox", "num_key_value_heads": None}, {"attention QKV": (192, 64), "MLP up": (160, 64)}),
        ({"model_type": "falcon", "multi_query": True}, {"attention QKV": (80, 64), "MLP up": (160, 64)}),
    ],
)
def test_families(write: Write, changes: dict[str, Any], expected: dict[str, tuple[int, int]]) -> None:
    model = load_model(str(write({**LLAMA, **changes})))
    assert model.notes == ()
    assert {name: shapes(model).get(name) for name in expected} == expected


def test_gpt2_config_has_four_times_its_width(write: Write) -> None:
    config = {"model_type": "gpt2", "n_embd": 48, "n_head": 4, "n_layer": 2, "n_inner": None}
    model = load_model(str(write(config)))
    assert (model.intermediate, model.kv_heads, model.gated, model.layers) == (192, 4, False, 2)


def test_opt_config(write: Write) -> None:
    config = {"model_type": "opt", "hidden_size": 48, "num_attention_heads": 4, "ffn_dim": 100, "num_hidden_layers": 2}
    assert shapes(load_model(str(write(config))))["MLP up"] == (100, 48)


def test_experts_in_a_config(write: Write) -> None:
    with pytest.raises(ValueError, match="num_experts_per_tok is 99, but there are 2 experts"):
        load_model(str(write(without(model_type="mixtral", num_local_experts=2, num_experts_per_tok=99))))
    mixtral = load_model(str(write(without(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2))))
    assert (mixtral.experts, mixtral.experts_per_token, mixtral.expert_intermediate, mixtral.intermediate) == (8, 2, 160, 0)
    qwen = without(model_type="qwen2_moe", num_experts=60, moe_intermediate_size=32, shared_expert_intermediate_size=96)
    assert shapes(load_model(str(write(qwen))))["shared expert gate/up"] == (192, 64)


def test_families_that_name_experts_and_heads_otherwise(write: Write) -> None:
    ernie = without(model_type="ernie4_5_moe", moe_num_experts=64, moe_k=6, moe_intermediate_size=32, moe_num_shared_experts=2)
    model = load_model(str(write({**ernie, "moe_layer_start_index": 1})))
    assert (model.experts, model.experts_per_token, model.intermediate) == (64, 6, 64)
    assert "some layers have a dense MLP" in model.notes[-1]
    glm = without("num_hidden_layers", "num_key_value_heads", model_type="chatglm", num_layers=5)
    model = load_model(str(write({**glm, "multi_query_attention": True, "multi_query_group_num": 2})))
    assert (model.layers, model.kv_heads) == (5, 2)
    deepseek = without(model_type="deepseek", n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=2)
    model = load_model(str(write({**deepseek, "moe_intermediate_size": 24, "first_k_dense_replace": 1})))
    assert model.intermediate == 48
    assert "some layers have a dense MLP" in model.notes[-1]


def test_a_folder_stands_for_its_config(write: Write) -> None:
    path = write(LLAMA)
    assert load_model(str(path.parent)).name == path.parent.name


def test_name_comes_from_the_config_or_the_file(write: Write) -> None:
    assert load_model(str(write({**LLAMA, "_name_or_path": "someone/Tiny-1B"}))).name == "Tiny-1B"
    assert load_model(str(write(LLAMA, "tiny.json"))).name == "tiny"


@pytest.mark.parametrize(("activation", "gated"), [("silu", True), ("gelu", False), ("swiglu", True), ("relu", False)])
def test_unknown_family_is_read_by_its_activation_and_says_so(write: Write, activation: str, gated: bool) -> None:
    model = load_model(str(write({**LLAMA, "model_type": "novel", "hidden_act": activation})))
    assert model.gated is gated
    assert "'novel'" in model.notes[0]
    assert activation in model.notes[0]


def test_text_config_is_found(write: Write) -> None:
    model = load_model(str(write({"model_type": "llava", "text_config": LLAMA})))
    assert (model.hidden, model.notes) == (64, ("read from text_config",))


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds list data"),
        ("{}", "missing hidden_size or n_embd, num_attention_heads or n_head, intermediate_size or ffn_dim"),
        (without("intermediate_size"), "missing intermediate_size or ffn_dim"),
        (without(hidden_size="64"), "hidden_size is '64'; it must be a whole number"),
        (without(hidden_size=64.5), "hidden_size is 64.5"),
        (without(hidden_size=True), "hidden_size is True"),
        (without(hidden_size=-64), "hidden_size is -64"),
        (without(num_attention_heads=0), "num_attention_heads is 0"),
        (without(hidden_size=10**12), "whole number from 1 to 2147483647"),
        (without(num_attention_heads=7), "not a multiple of 7 heads"),
        (without(num_key_value_heads=3), "must divide the 8 heads"),
        (without(kv_lora_rank=512), "latent attention"),
        (without(model_type="qwen"), "its intermediate_size counts gate and up together"),
        (without(model_type="llama4_text"), "model_type 'llama4_text' is not read"),
    ],
)
def test_bad_config_is_one_line_that_names_the_file(write: Write, data: Any, says: str) -> None:
    path = write(data)
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        load_model(str(path))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not JSON"):
        load_model(str(path))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*none\.json: No such file"):
        load_model(str(tmp_path / "none.json"))


def test_unknown_name_lists_presets_and_suggests() -> None:
    with pytest.raises(ValueError, match=r"did you mean llama3-70b\?.*gpt3-175b.*config\.json"):
        load_model("llama-70b")
    with pytest.raises(ValueError, match="model is 'x'; weft knows"):
        load_model("x")
