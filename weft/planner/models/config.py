"""Reading a model's sizes from a Hugging Face config.json.

Families name the same size differently; each size below has its keys in order of preference. A family that is not known
by name is read by the same keys, and the Model's notes say what was assumed. What would be read wrongly is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.core import codec
from weft.planner.models.values import Model

HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
INTERMEDIATE = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k")
SHARED = ("shared_expert_intermediate_size", "shared_intermediate_size")
SHARED_COUNT = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
"""Shared experts, each as wide as one that tokens are sent to."""
ACTIVATION = ("hidden_act", "activation_function", "hidden_activation")

LARGEST = 2**31 - 1

GATED = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma", "gemma2", "gemma3", "gemma3_text"}
GATED |= {"phi3", "phimoe", "olmo", "olmo2", "cohere", "granite", "granitemoe", "internlm2", "stablelm"}
PLAIN = {"gpt2", "gpt_neox", "gptj", "gpt_neo", "gpt_bigcode", "opt", "bloom", "falcon", "phi", "starcoder2"}
OTHERWISE = {
    "qwen": "its intermediate_size counts gate and up together",
    "llama4_text": "its layers differ, and its shared expert has no size of its own",
    "llama4": "its layers differ, and its shared expert has no size of its own",
}
"""Families whose keys mean something else, and what."""
FOUR_TIMES = {"gpt2", "gptj", "gpt_neo", "gpt_bigcode", "bloom", "falcon"}
"""Families whose MLP is four times as wide as the hidden size unless the config says otherwise."""


def read_config(path: Path) -> Model:
    """The Model that a config.json describes. Raises ValueError, one line that names the file, if it describes none."""
    config, notes = _text_part(_read_object(path))
    try:
        return _model(path, config, notes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read_object(path: Path) -> dict[str, Any]:
    data = codec.read_data(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds {type(data).__name__} data; a config.json holds an object")
    return data


def _text_part(config: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The language model's own part, where a config describes several models."""
    inner = config.get("text_config")
    if isinstance(inner, dict) and not any(key in config for key in HIDDEN):
        return inner, ("read from text_config",)
    return config, ()


def _model(path: Path, config: dict[str, Any], notes: tuple[str, ...]) -> Model:
    if "kv_lora_rank" in config:
        raise ValueError("latent attention (kv_lora_rank) has other sites; weft reads attention with query and key/value heads")
    family = config.get("model_type") if isinstance(config.get("model_type"), str) else None
    if family in OTHERWISE:
        raise ValueError(f"model_type {family!r} is not read: {OTHERWISE[family]}; describe it by the keys of Llama")
    sizes = _sizes(config, family)
    gated, how = _gated(config, family)
    return Model(
        name=_name(path, config),
        source=str(path),
        layers=_first(config, LAYERS) or 1,
        gated=gated,
        notes=notes + how + _mixed_layers(config),
        **sizes,
    )


def _sizes(config: dict[str, Any], family: str | None) -> dict[str, Any]:
    hidden, heads = _first(config, HIDDEN), _first(config, HEADS)
    width = _first(config, INTERMEDIATE)
    if width is None and hidden is not None and family in FOUR_TIMES:
        width = 4 * hidden
    experts = _first(config, EXPERTS, low=0) or 0
    expert_width = (_first(config, ("moe_intermediate_size",)) or width) if experts else None
    needed = ((HIDDEN, hidden), (HEADS, heads), (INTERMEDIATE, expert_width or width))
    missing = [" or ".join(keys[:2]) for keys, value in needed if value is None]
    if hidden is None or heads is None or missing:
        raise ValueError(f"missing {', '.join(missing)}")
    per_token = (_first(config, EXPERTS_PER_TOKEN) or 0) if experts else 0
    if per_token > experts:
        raise ValueError(
            f"{EXPERTS_PER_TOKEN[0]} is {per_token}, but there are {experts} experts; a token has at most all of them"
        )
    return {
        "hidden": hidden,
        "heads": heads,
        "kv_heads": _kv_heads(config, heads),
        "head_dim": _first(config, ("head_dim",)) or _divided(hidden, heads),
        "intermediate": _shared(config, expert_width or 0) if experts else (width or 0),
        "experts": experts,
        "experts_per_token": per_token,
        "expert_intermediate": expert_width or 0,
    }


def _first(config: dict[str, Any], keys: tuple[str, ...], *, low: int = 1) -> int | None:
    """The first of `keys` that is there and not null. Raises ValueError unless it is a whole number in range."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= LARGEST:
            raise ValueError(f"{key} is {value!r:.60}; it must be a whole number from {low} to {LARGEST}")
        return value
    return None


def _kv_heads(config: dict[str, Any], heads: int) -> int:
    """Falcon and GPT BigCode say multi_query for a single key/value head."""
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        return 1
    if config.get("multi_query_attention") is True and (groups := _first(config, ("multi_query_group_num",))):
        return groups  # ChatGLM's
    return _first(config, KV_HEADS) or heads


def _shared(config: dict[str, Any], expert_width: int) -> int:
    """How wide the experts that every token goes to are together."""
    width = _first(config, SHARED, low=0)
    return width if width is not None else (_first(config, SHARED_COUNT, low=0) or 0) * expert_width


def _divided(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ValueError(f"hidden size {hidden} is not a multiple of {heads} heads, and there is no head_dim")
    return hidden // heads


def _gated(config: dict[str, Any], family: str | None) -> tuple[bool, tuple[str, ...]]:
    """Whether the MLP has a gate, and a note where the family does not tell."""
    if family in GATED or family in PLAIN:
        return family in GATED, ()
    activation = next((config[key] for key in ACTIVATION if isinstance(config.get(key), str)), None)
    gated = activation is None or activation in ("silu", "swish") or "glu" in activation
    who = f"model_type {family!r} is not known to weft" if family else "no model_type"
    shape = "a gated MLP (gate and up)" if gated else "an MLP without a gate"
    return gated, (f"{who}; read as {shape}, since the activation is {activation or 'not given'}",)


def _mixed_layers(config: dict[str, Any]) -> tuple[str, ...]:
    """A note where only some layers have experts."""
    some = bool(config.get("mlp_only_layers")) or bool(config.get("first_k_dense_replace"))
    some = some or any(config.get(key, 1) not in (1, None) for key in ("decoder_sparse_step", "moe_layer_freq"))
    some = some or bool(config.get("moe_layer_start_index"))
    return ("some layers have a dense MLP; the sites are those of a layer with experts",) if some else ()


def _name(path: Path, config: dict[str, Any]) -> str:
    """The name that the config gives itself, else the folder's, else the file's."""
    given = config.get("_name_or_path")
    if isinstance(given, str) and given.isprintable() and given.strip("/. "):
        return given.rstrip("/").rsplit("/", 1)[-1]
    return path.resolve().parent.name if path.name == "config.json" else path.stem
