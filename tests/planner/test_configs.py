"""config.json of many families: what is planned has the shapes of transformers' modules, and what cannot be read is refused."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.core import codec
from weft.planner.models import Model, load_model, operator_calls
from weft.planner.models.config import FAMILIES

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
ABSENT = "transformers is not installed: pip install transformers"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(data: Any, name: str = "config.json") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
        return path

    return write


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without transformers."""
    monkeypatch.setitem(sys.modules, "transformers", None)


def without(*keys: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**LLAMA, **changes}.items() if key not in keys}


def shapes(model: Model) -> dict[str, tuple[int, int]]:
    return {call.name: (call.n, call.k) for call in operator_calls(model)}


# --- against transformers' modules -----------------------------------------------------------------------------------

EIGHT = {"num_hidden_layers": 8}
DEFAULTS = """
llama mistral qwen2 qwen3 gemma gemma2 gemma3_text gemma3n_text gemma4_text phi phi3 granite olmo olmo2 olmo3 cohere cohere2
glm glm4 starcoder2 stablelm vaultgemma bitnet smollm3 seed_oss arcee apertus ernie4_5 exaone4 helium gpt2 gpt_neox gptj
gpt_neo gpt_bigcode bloom falcon opt mpt persimmon mixtral qwen2_moe qwen3_moe olmoe phimoe gpt_oss granitemoe ernie4_5_moe
aria_text llama4_text glm4_moe granitemoeshared minimax_m2 hy_v3 nemotron_h bert recurrent_gemma t5 whisper
"""
MIXED = """
deepseek_v3 minicpm3 glm4_moe_lite kimi_linear deepseek_v4 jamba qwen3_next qwen3_5_text falcon_h1 minimax olmo_hybrid mamba
mamba2 mimo_v2_flash lfm2 xlstm zamba2
"""
SMALL: dict[str, dict[str, Any]] = {
    **{family: {} for family in DEFAULTS.split()},
    **dict.fromkeys(MIXED.split(), EIGHT),
    "bamba": {**EIGHT, "attn_layer_indices": [2, 5]},
    "granitemoehybrid": {**EIGHT, "layer_types": ["mamba", "attention"] * 4, "num_local_experts": 0},
    "deepseek_v2": {**EIGHT, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": None},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": 8, "num_hidden_layers": 4},
    "longcat_flash": {"num_layers": 2},
}
REFUSED = {"zamba2", "longcat_flash", "t5", "whisper", "bert", "recurrent_gemma"}
"""Families of the list that are refused, by model_type or is_encoder_decoder."""


def multiplied(family: str, changes: dict[str, Any]) -> tuple[int, Counter[tuple[int, ...]]]:
    """Of the modules that transformers builds: how many weights all layers multiply by, and the shape of each."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    config = CONFIG_MAPPING[family](**changes)
    auto = MODEL_FOR_CAUSAL_LM_MAPPING if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else MODEL_MAPPING
    with torch.device("meta"):
        model = auto[type(config)](config) if auto is MODEL_MAPPING else AutoModelForCausalLM.from_config(config)
    found: Counter[tuple[int, ...]] = Counter()
    for name, module in model.named_modules(remove_duplicate=False):
        if not any(part.isdigit() for part in name.split(".")) or "altup_" in name:
            continue  # of no layer
        if isinstance(module, (torch.nn.Embedding, torch.nn.Conv1d)):
            continue
        for weight, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1 and "bias" not in weight and weight != "A_log":
                found[tuple(parameter.shape)] += 1
    return sum(math.prod(shape) * count for shape, count in found.items()), found


EACH = "llama gemma3n_text gpt2 mixtral deepseek_v3 qwen3_next falcon bloom gpt_oss t5 longcat_flash hunyuan_v1_moe"
"""One for each kind of module; the others are read in the same way."""


@pytest.mark.parametrize("family", [pytest.param(name, marks=[pytest.mark.slow][name in EACH.split() :]) for name in SMALL])
def test_planned_shapes_are_those_of_the_modules(write: Write, family: str) -> None:
    """Every weight of every layer is part of an operator call or listed as not covered, and each is counted once."""
    transformers = pytest.importorskip("transformers", reason=ABSENT)
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    path = write({"model_type": family, **SMALL[family]})
    if family in REFUSED:
        with pytest.raises(ValueError, match=r"model_type|is_encoder_decoder"):
            load_model(str(path))
        return
    model = load_model(str(path))
    total, found = multiplied(family, SMALL[family])
    planned = sum(
        call.n * call.k * call.layers * (model.experts if call.op.count("all_to_all") else 1) for call in operator_calls(model)
    )
    assert planned + sum(one.n * one.k * one.layers for one in model.uncovered) == total
    for call in operator_calls(model):
        if call.op in ("matmul_reduce_scatter", "matmul_all_to_all") and "shared" not in call.name:
            assert any(sorted(shape[-2:]) == sorted((call.n, call.k)) for shape in found), call
    assert codec.loads(Model, codec.dumps(model)) == model


KNOWN: dict[str, tuple[dict[str, Any], dict[str, tuple[int, int, int]]]] = {
    "gated attention and linear attention: Qwen3-Next": (
        {"model_type": "qwen3_next"},
        {
            "attention QKV": (2 * 16 * 256 + 2 * 2 * 256, 2048, 12),
            "attention out": (2048, 16 * 256, 12),
            "linear attention in": (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32, 2048, 36),
            "linear attention out": (2048, 32 * 128, 36),
            "expert dispatch + gate/up": (2 * 512, 2048, 48),
            "shared expert down": (2048, 512, 48),
        },
    ),
    "latent attention: DeepSeek-V3": (
        {"model_type": "deepseek_v3"},
        {
            "attention q_b_proj": (128 * 192, 1536, 61),
            "attention kv_b_proj": (128 * 256, 512, 61),
            "attention out": (7168, 128 * 128, 61),
            "MLP gate/up": (2 * 18432, 7168, 3),
            "expert dispatch + gate/up": (2 * 2048, 7168, 58),
            "shared expert down": (7168, 2048, 58),
        },
    ),
    "one mixer a layer: Nemotron-H": (
        {
            "model_type": "nemotron_h",
            "hidden_size": 512,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size": 1024,
            "mamba_num_heads": 16,
            "mamba_head_dim": 64,
            "n_groups": 2,
            "ssm_state_size": 32,
            "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp"],
        },
        {
            "state space in": (2 * 1024 + 2 * 2 * 32 + 16, 512, 2),
            "MLP up": (1024, 512, 2),
            "attention QKV": (12 * 64, 512, 1),
        },
    ),
    "silu and no gate: Apertus": ({"model_type": "apertus", "hidden_act": "silu"}, {"MLP up": (14336, 4096, 32)}),
    "head sizes by layer: Gemma 4": (
        {"model_type": "gemma4_text", "num_hidden_layers": 12},
        {"attention QKV of layer 0": (4096, 2304, 10), "attention QKV of layer 5": (8192, 2304, 2)},
    ),
}


@pytest.mark.parametrize("case", KNOWN)
def test_published_shapes_and_counts_of_layers(write: Write, case: str) -> None:
    pytest.importorskip("transformers", minversion="5.0", reason=ABSENT)
    config, expected = KNOWN[case]
    found = {call.name: (call.n, call.k, call.layers) for call in operator_calls(load_model(str(write(config))))}
    assert {name: found.get(name) for name in expected} == expected


def test_what_is_not_covered_is_listed_with_its_share(write: Write) -> None:
    pytest.importorskip("transformers", minversion="5.0", reason=ABSENT)
    model = load_model(str(write({"model_type": "jamba"})))
    inner = {one.name: one for one in model.uncovered}["mamba.x_proj"]
    assert (inner.n, inner.k, inner.layers) == (4096 // 16 + 2 * 16, 8192, 28)
    mamba, mlp = 16384 * 4096 + 4096 * 8192 + 288 * 8192 + 8192 * 256, 3 * 14336 * 4096
    dense, expert = mamba + mlp, mamba + 2 * mlp + 16 * 4096
    layers = 28 * inner.n * inner.k / inner.share
    assert 12 * dense + 16 * expert == pytest.approx(layers, rel=0.02)
    assert any("mamba.x_proj" in note for note in model.notes)
    assert any("28 of 32 layers" in note for note in model.notes)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"model_type": "mixtral", "num_experts_per_tok": 99}, "num_experts_per_tok is 99"),
        ({"model_type": "mixtral", "num_experts_per_tok": 2, "moe_topk": 4}, "moe_topk is 4 and num_experts_per_tok is 2"),
        ({"model_type": "deepseek_v2", "num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({"model_type": "hunyuan_v1_moe", "moe_topk": [1, 2, 2, 2], "head_dim": 64, "num_hidden_layers": 4}, "moe_topk is"),
        ({"model_type": "mllama"}, "model_type is 'mllama_text_model'"),
        ({"model_type": "kimi_k2"}, "model_type is 'kimi_k2', which transformers"),
        ({"model_type": "llama", "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"model_type": "llama", "hidden_size": "64"}, "hidden_size"),
        ({"model_type": "llama", "num_attention_heads": 0}, "transformers"),
    ],
)
def test_what_modules_do_not_say_is_refused_by_its_key(write: Write, config: dict[str, Any], key: str) -> None:
    pytest.importorskip("transformers", minversion="5.0", reason=ABSENT)
    with pytest.raises(ValueError, match=key) as caught:
        load_model(str(write(config)))
    assert "\n" not in str(caught.value)


def test_keys_that_transformers_does_not_read_are_noted(write: Write) -> None:
    pytest.importorskip("transformers", minversion="5.0", reason=ABSENT)
    config = {"model_type": "deepseek_v2", "num_experts_per_tok": 6, "num_hidden_layers": 4}
    notes = load_model(str(write({**config, "moe_layer_freq": 2, "ep_size": 1}))).notes
    assert [note for note in notes if "moe_layer_freq" in note and "ep_size" not in note]
    assert not any("moe_layer_freq" in note for note in load_model(str(write(config))).notes)


def test_cross_attention_is_no_operator_call(write: Write) -> None:
    """Its keys and values are of an encoder's rows."""
    pytest.importorskip("transformers", reason=ABSENT)
    plain, crossed = (
        load_model(str(write({"model_type": "gpt2", "n_layer": 2, "add_cross_attention": on}))) for on in (False, True)
    )
    assert operator_calls(crossed) == operator_calls(plain)
    assert {one.name.split(".")[0] for one in crossed.uncovered} == {"crossattention"}


INFINITE = {"model_type": "bamba", "num_hidden_layers": 2, "attn_layer_indices": [1]}


@pytest.mark.parametrize("limit", [{"__float__": "Infinity"}, math.inf])
def test_an_infinite_number_is_read_however_it_was_saved(write: Write, limit: Any) -> None:
    pytest.importorskip("transformers", minversion="5.0", reason=ABSENT)
    plain = load_model(str(write(INFINITE)))
    assert load_model(str(write({**INFINITE, "time_step_limit": [0.0, limit]}))) == plain


@pytest.mark.parametrize("value", [{"__float__": "Infinite"}, {"__float__": "NaN"}, {"__float__": "Infinity", "more": 1}])
def test_a_float_that_is_no_size_is_refused(write: Write, value: Any) -> None:
    with pytest.raises(ValueError, match="hidden_size"):
        load_model(str(write({**LLAMA, "hidden_size": value})))


REASONS = (
    "transformers cannot build",
    "is_encoder_decoder is true",
    "none of its layers' matmuls is one that weft overlaps",
    "weft does not know it",
    "whose layers are in several lists",
    "of which transformers has no model that reads text alone",
    "num_experts_per_tok is missing",
    "num_experts is 16384",
    "hidden_size is None",
)
"""Why a family may be refused with the default values of its config."""


@pytest.mark.slow
def test_every_decoder_of_transformers_is_read_or_refused_with_a_reason(tmp_path: Path) -> None:
    """As transformers saves the defaults of its config. Where weft says that transformers cannot build it, that is so."""
    transformers = pytest.importorskip("transformers", minversion="5.0", reason=ABSENT)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    read, unsaved, refused = set(), set(), {}
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        folder = tmp_path / family
        try:
            transformers.CONFIG_MAPPING[family]().save_pretrained(folder)
        except Exception:
            unsaved.add(family)
            continue
        try:
            load_model(str(folder))
            read.add(family)
        except ValueError as error:
            refused[family] = str(error)
    assert [error for error in refused.values() if not any(reason in error for reason in REASONS)] == []
    unbuilt = [family for family, error in refused.items() if "transformers cannot build" in error]
    assert [family for family in unbuilt if _can_be_built(tmp_path / family)] == []
    assert {"llama", "gpt2", "mixtral", "bamba", "granitemoehybrid", "nemotron_h", "deepseek_v3", "gpt_oss"} <= read
    assert len(unsaved) < 5, unsaved
    assert len(read) > len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) / 2


def _can_be_built(folder: Path) -> bool:
    """Whether transformers builds the decoder of a config, which is read by transformers alone."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
    for auto in (AutoModelForCausalLM, AutoModel):
        try:
            with torch.device("meta"):
                auto.from_config(config)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                return False
        except Exception:
            return False
        else:
            return True
    return True  # it has no model, so that nothing is built


@pytest.mark.parametrize(("key", "value"), [("moe_topk", 6), ("moe_topk", [6] * 4)])
def test_keys_for_top_k(write: Write, key: str, value: Any) -> None:
    pytest.importorskip("transformers", minversion="5.0", reason=ABSENT)
    config = {"model_type": "hunyuan_v1_moe", "head_dim": 128, "num_experts": 64, "num_hidden_layers": 4, key: value}
    model = load_model(str(write(config)))
    dispatch = next(call for call in operator_calls(model) if call.op == "all_to_all_matmul")
    assert dispatch.problem(8192, 8, "bfloat16").m == 1024 * 6


# --- without transformers --------------------------------------------------------------------------------------------

EXPLICIT = {
    "gpt2": {"n_embd": 48, "n_head": 4, "n_layer": 2},
    "opt": {**LLAMA, "ffn_dim": 100},
    "mixtral": {**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {**LLAMA, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


@pytest.mark.parametrize("given", [{}, {"head_dim": 16, "num_key_value_heads": 4}])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_read_by_their_keys_as_by_their_modules(
    write: Write, monkeypatch: pytest.MonkeyPatch, family: str, given: dict[str, int]
) -> None:
    pytest.importorskip("transformers", reason=ABSENT)
    if FAMILIES[family].head_dim == "required":
        given = {"head_dim": 16, **given}
    path = str(write({**EXPLICIT.get(family, LLAMA), **given, "model_type": family}))
    by_modules = load_model(path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    by_keys = load_model(path)
    assert (by_keys.read, by_keys.layers, by_keys.hidden) == ((), by_modules.layers, by_modules.hidden)
    assert shapes(by_keys) == shapes(by_modules)
    assert {call.visits for call in operator_calls(by_keys)} == {call.visits for call in operator_calls(by_modules)}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("config", "key"),
    [
        (without("intermediate_size"), "intermediate_size is missing"),
        (without(model_type="qwen3"), "head_dim is missing"),
        ({"model_type": "gemma3", "text_config": without(model_type="gemma3_text")}, "head_dim is missing"),
        (without(model_type="mixtral", num_local_experts=8), "num_experts_per_tok is missing"),
        (without(model_type="mixtral", num_local_experts=2, num_experts_per_tok=99), "num_experts_per_tok is 99"),
        ({**EXPLICIT["qwen3_moe"], "model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        (without(model_type="novel"), r"model_type is 'novel'.*pip install transformers"),
        (without(hidden_size="64"), "hidden_size is '64'"),
        (without(hidden_size=10**12), "hidden_size is 1000000000000"),
        (without(num_attention_heads=7), "not a multiple of 7 heads"),
        (without(num_key_value_heads=3), "kv_heads is 3"),
    ],
)
def test_a_shape_that_would_be_guessed_is_refused(write: Write, config: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key) as caught:
        load_model(str(write(config)))
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("alone")
def test_text_config_is_found(write: Write) -> None:
    model = load_model(str(write({"model_type": "llava", "text_config": LLAMA})))
    assert (model.hidden, model.notes) == (64, ("read from text_config",))


# --- files and names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds list data"),
        ("{}", "model_type is None"),
        ({"model_type": "novel"}, "model_type is 'novel'"),
    ],
)
def test_bad_file_is_one_line_that_names_it(write: Write, data: Any, says: str) -> None:
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        load_model(str(write(data)))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("alone")
class TestNames:
    """Names do not depend on how sizes are read."""

    def test_a_folder_stands_for_its_config(self, write: Write) -> None:
        path = write(LLAMA, "Tiny-2B/config.json")
        assert load_model(str(path.parent)).name == load_model(str(path)).name == "Tiny-2B"

    def test_the_config_or_the_file_gives_the_name(self, write: Write) -> None:
        assert load_model(str(write({**LLAMA, "_name_or_path": "someone/Tiny-1B"}))).name == "Tiny-1B"
        assert load_model(str(write(LLAMA, "tiny.json"))).name == "tiny"

    def test_a_snapshot_of_the_hub_is_named_by_its_repository(self, write: Write) -> None:
        blob = write(LLAMA, "models--Qwen--Qwen3-8B/blobs/deadbeef")
        snapshot = blob.parents[1] / "snapshots" / "0123abc"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").symlink_to("../../blobs/deadbeef")
        assert load_model(str(snapshot)).name == "Qwen3-8B"
        assert load_model(str(snapshot / "config.json")).name == "Qwen3-8B"
