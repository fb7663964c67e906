"""Reads a Hugging Face config.json.

If transformers and torch are installed and know the config's model_type, the sizes are those of the modules that transformers
builds (`weft.planner.models.modules`). Otherwise the few families below are read by their keys. The file must then have every
key that decides a shape, because only transformers knows the default of a missing key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from weft.core import codec
from weft.planner.models.values import Model

INSTALL = "pip install transformers: with it, every model that it has can be read"
LARGEST = 2**31 - 1
Key = Literal["required", "optional", "unused"]


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """The keys of one model_type.

    gated: the MLP has a gate. qk_norm: queries and keys are normalised. hidden, heads, layers, width: the names of the keys of
    these sizes.
    kv_heads, head_dim: whether the family has these keys, and whether a config must have them. Without them there are as many
    key/value heads as heads, of hidden / heads columns. experts: the keys of their number and width, if there are experts.
    """

    gated: bool = True
    qk_norm: bool = False
    hidden: str = "hidden_size"
    heads: str = "num_attention_heads"
    layers: str = "num_hidden_layers"
    width: str = "intermediate_size"
    kv_heads: Key = "required"
    head_dim: Key = "optional"
    experts: tuple[str, str] | None = None


LLAMA, GEMMA = ModelFamily(kv_heads="optional"), ModelFamily(head_dim="required")
QWEN3 = replace(GEMMA, qk_norm=True)
PLAIN: dict[str, Any] = {"gated": False, "kv_heads": "unused", "head_dim": "unused"}
FAMILIES = {
    "llama": LLAMA,
    "granite": LLAMA,
    "olmo2": replace(LLAMA, qk_norm=True),
    "phi3": LLAMA,
    "mistral": ModelFamily(),
    "qwen2": ModelFamily(),
    "qwen3": QWEN3,
    "gemma": GEMMA,
    "gemma2": GEMMA,
    "gemma3_text": QWEN3,
    "gpt2": ModelFamily(hidden="n_embd", heads="n_head", layers="n_layer", width="n_inner", **PLAIN),
    "gpt_neox": ModelFamily(**PLAIN),
    "opt": ModelFamily(width="ffn_dim", **PLAIN),
    "mixtral": ModelFamily(experts=("num_local_experts", "intermediate_size")),
    "qwen3_moe": replace(QWEN3, experts=("num_experts", "moe_intermediate_size")),
}
"""The families that are read without transformers. tests/planner/test_configs.py compares each with transformers' modules."""


def read_config(path: Path) -> Model:
    """Return the Model that a config.json describes. Raises ValueError, one line with the file, if it describes none."""
    data = _with_floats(codec.read_data(path))
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds {type(data).__name__} data; a config.json holds an object")
    try:
        family = data.get("model_type")
        if not isinstance(family, str):
            raise ValueError(f"model_type is {family!r:.60}; it must be a name, which decides how the other keys are read")
        config = _of_transformers(family, data)
        return _by_modules(path, data, config) if config is not None else _by_keys(path, data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_transformers_config(path: Path) -> Any:
    """Return a config.json that `read_config` can read as an object of transformers; None without transformers."""
    data = _with_floats(codec.read_data(path))
    return _of_transformers(data["model_type"], data)


def _with_floats(data: Any) -> Any:
    # transformers 5 saves numbers that JSON does not have as {"__float__": "Infinity"}, and reads them back.
    if isinstance(data, list):
        return [_with_floats(one) for one in data]
    if not isinstance(data, dict):
        return data
    if data.keys() == {"__float__"} and data["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(data["__float__"])
    return {key: _with_floats(value) for key, value in data.items()}


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of the language model, if a config describes several models."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _of_transformers(family: str, data: dict[str, Any]) -> Any:
    """Return the config as an object of transformers; None if it cannot be imported or does not know the family."""
    try:
        import torch  # noqa: F401 - the modules need torch
        from transformers import CONFIG_MAPPING
    except ImportError:
        return None
    from weft.planner.models.modules import one_line, silent

    if family not in CONFIG_MAPPING:
        return None
    given = {key: value for key, value in data.items() if key != "quantization_config"}  # the shapes are those of plain weights
    try:
        with silent():
            return CONFIG_MAPPING[family].from_dict(given).get_text_config(decoder=True)
    except Exception as error:  # errors of any type, because each class checks its values in its own way
        raise ValueError(f"transformers does not take it as a config of model_type {family!r}: {one_line(error)}") from None


def _by_modules(path: Path, data: dict[str, Any], config: Any) -> Model:
    from transformers import __version__

    from weft.planner.models.modules import read_modules

    source = f"{path}, modules of transformers {__version__}"
    return read_modules(config, _text_part(data), name=_name(path, data), source=source)


def _by_keys(path: Path, data: dict[str, Any]) -> Model:
    config = _text_part(data)
    name = config.get("model_type", data["model_type"])
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ValueError(f"model_type is {name!r:.60}, {_unknown_to()}; by its keys weft reads {', '.join(FAMILIES)}")
    hidden, heads = _number(config, family.hidden), _number(config, family.heads)
    experts, width = (0, 0) if family.experts is None else (_number(config, key) for key in family.experts)
    return Model(
        name=_name(path, data),
        source=str(path),
        hidden=hidden,
        layers=_number(config, family.layers),
        heads=heads,
        kv_heads=_kv_heads(config, family, heads),
        head_dim=_head_dim(config, family, hidden, heads),
        intermediate=0 if experts else _width(config, family, hidden),
        gated=family.gated,
        qk_norm=family.qk_norm,
        experts=experts,
        experts_per_token=_top_k(config, experts) if experts else 0,
        expert_intermediate=width,
        notes=() if config is data else ("read from text_config",),
    )


def _unknown_to() -> str:
    try:
        from transformers import __version__
    except ImportError:
        return f"and transformers is not installed: {INSTALL}"
    return f"which transformers {__version__} does not know"


def _number(config: dict[str, Any], key: str) -> int:
    """Return the value of a key. Raises ValueError unless it is there and is a whole number in range."""
    value = config.get(key)
    if value is None:
        raise ValueError(f"{key} is missing; {INSTALL}, with the default of its class")
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
        raise ValueError(f"{key} is {value!r:.60}; it must be a whole number from 1 to {LARGEST}")
    return value


def _is_read(config: dict[str, Any], key: str, use: Key) -> bool:
    return use == "required" or (use == "optional" and config.get(key) is not None)


def _kv_heads(config: dict[str, Any], family: ModelFamily, heads: int) -> int:
    key = "num_key_value_heads"
    return _number(config, key) if _is_read(config, key, family.kv_heads) else heads


def _head_dim(config: dict[str, Any], family: ModelFamily, hidden: int, heads: int) -> int:
    if _is_read(config, "head_dim", family.head_dim):
        return _number(config, "head_dim")
    if hidden % heads:
        raise ValueError(f"{family.hidden} is {hidden}, not a multiple of {heads} heads, and head_dim is not given")
    return hidden // heads


def _width(config: dict[str, Any], family: ModelFamily, hidden: int) -> int:
    if family.width == "n_inner" and config.get("n_inner") is None:
        return 4 * hidden
    return _number(config, family.width)


def _top_k(config: dict[str, Any], experts: int) -> int:
    for key, plain in (("mlp_only_layers", []), ("decoder_sparse_step", 1)):
        if config.get(key, plain) not in (plain, None):
            raise ValueError(f"{key} is {config[key]!r:.60}, so that layers differ; {INSTALL}")
    value = _number(config, "num_experts_per_tok")
    if value > experts:
        raise ValueError(f"num_experts_per_tok is {value}, but there are {experts} experts; use at most {experts}")
    return value


def _name(path: Path, config: dict[str, Any]) -> str:
    """Return the name that the config gives itself, or else that of the repository for a snapshot in the hub's cache, or else
    that of the folder or the file. A config.json in the cache is a link to a blob, and the folder is that of the link."""
    given = config.get("_name_or_path")
    if isinstance(given, str) and given.isprintable() and given.strip("/. "):
        return given.rstrip("/").rsplit("/", 1)[-1]
    folder = path.parent.resolve()
    repository = next((part for part in reversed(folder.parts) if part.startswith("models--")), None)
    if repository is not None:
        return repository.rsplit("--", 1)[-1]
    return folder.name if path.name == "config.json" else path.stem
