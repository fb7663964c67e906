"""This file reads a model's matmuls from the modules that transformers builds from its config, on the meta device.

No weight is allocated and nothing is downloaded. Every layer is built, so that each kind of layer is counted, and a key that
the config leaves out has the default of its own class. Only the number of experts per token is read from the config itself,
because no module's shape depends on it.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from logging import CRITICAL
from typing import Any

from weft.planner.models.values import ROWS, LayerWeight, Model, count_calls, notes_on_layers

TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "moe_top_k",
    "top_k_experts",
    "moe_k",
    "num_selected_experts",
)
"""Keys for the number of experts that a token goes to."""
NO_MATMUL = re.compile(r"\w*bias\w*|A_log|D|\w*scale\w*|time_\w+|position|static_weight|query|r_[rsw]")
"""Parameters of two or more dimensions that are not the matrix of a matmul."""
KINDS = re.compile(r"expert|moe|top_?k|layer_|freq|step|period|interval|pattern")
"""Keys that may decide the kind of a layer."""
MOST = 4096
"""A config with more layers or experts than this is refused before anything is built."""


def read_modules(config: Any, given: dict[str, Any], *, name: str, source: str) -> Model:
    """Read a transformers config as a Model. given: the keys as in the file. Raises ValueError if weft cannot read it."""
    if _value(config, "is_encoder_decoder"):
        raise ValueError("is_encoder_decoder is true; weft plans the layers of decoders")
    _check_counts(config)
    hidden = _value(config, "hidden_size")
    if not isinstance(hidden, int) or isinstance(hidden, bool):
        raise ValueError(f"hidden_size is {hidden!r:.60}; it must be a whole number")
    model = build_modules(config)
    layers = [tuple(_matmuls(layer, hidden)) for layer in _layers(model, config.model_type)]
    experts = max((one.experts for layer in layers for one in layer), default=0)
    visits = _top_k(config, given, experts) if experts else 0
    calls, uncovered = count_calls(layers, hidden, visits)
    if not calls:
        raise ValueError(f"model_type is {config.model_type!r}; none of its layers' matmuls is one that weft overlaps")
    widths = {one.name.split(" of ")[0]: one.k for one in reversed(calls)}
    inner = widths.get("attention out", 0)
    heads, kv_heads = (_value(config, key) for key in ("num_attention_heads", "num_key_value_heads"))
    heads = heads if isinstance(heads, int) and heads > 0 and inner and inner % heads == 0 else 0
    return Model(
        name=name,
        source=source,
        hidden=hidden,
        layers=len(layers),
        heads=heads,
        kv_heads=kv_heads if isinstance(kv_heads, int) else 0,
        head_dim=inner // heads if heads else 0,
        intermediate=widths.get("shared expert down", widths.get("MLP down", 0)),
        gated=any(one.name.split(" of ")[0].endswith("gate/up") for one in calls),
        qk_norm=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        experts=experts,
        experts_per_token=visits,
        expert_intermediate=widths.get("expert down + combine", 0),
        read=calls,
        uncovered=uncovered,
        notes=_unread(config, given, model) + notes_on_layers(calls, uncovered, len(layers)),
    )


def _value(config: Any, key: str) -> Any:
    """Return a config's value for a key; None if layers have different values, which transformers reports as an error."""
    try:
        return getattr(config, key, None)
    except Exception:  # the error has no public base class
        return None


def _unread(config: Any, given: dict[str, Any], model: Any) -> tuple[str, ...]:
    """Return a note about keys of the file that decide the kind of layers and that transformers does not read."""
    sources = "".join(inspect.getsource(sys.modules[type(one).__module__]) for one in (config, model))
    counts = {key for key, value in given.items() if isinstance(value, (int, list)) and value and value != 1}
    unread = [key for key in given if KINDS.search(key) and key in counts - set(TOP_K) and key not in sources]
    return (f"{type(model).__name__} of transformers does not read {', '.join(unread)}: layers may differ",) if unread else ()


def _check_counts(config: Any) -> None:
    for key, value in config.to_dict().items():
        counts = re.fullmatch(r"(\w*_)?(num|n|count)\w*(layer|expert)s?\w*", key)
        if counts and isinstance(value, int) and value > MOST:
            raise ValueError(f"{key} is {value}; weft reads models of at most {MOST}")


def build_modules(config: Any, *, head: bool = False) -> Any:
    """Build the model's modules on the meta device. Raises ValueError if transformers cannot build them.

    head: build the causal language model, if there is one, and not the decoder alone."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    if type(config) not in MODEL_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"model_type is {config.model_type!r}, of which transformers has no model that reads text alone")
    only = type(config) in MODEL_MAPPING and not (head and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING)
    auto: Any = AutoModel if only else AutoModelForCausalLM
    try:
        with silent(), torch.device("meta"):
            build: Any = auto.from_config
            return build(config, attn_implementation="eager", trust_remote_code=False)
    except Exception as error:  # errors of any type: the classes compute with the values in the file
        unset = [key for key, value in config.to_dict().items() if value is None and re.search(r"dim|size|head|expert", key)]
        hint = f"; not set: {', '.join(unset)}" if unset else ""
        raise ValueError(f"transformers cannot build {type(config).__name__} of it: {one_line(error)}{hint}") from None


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"


@contextmanager
def silent() -> Iterator[None]:
    """Silence the log of transformers about a config. weft raises an error of one line instead."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


def _layers(model: Any, family: str) -> Sequence[Any]:
    """Return the decoder's layers: the list with the most weights. Raises ValueError if another list has as many entries."""
    from torch import nn

    lists: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and not any(name.startswith(f"{outer}.") for outer in lists):
            lists[name] = module
    by_size = sorted(lists, key=lambda name: -sum(weight.numel() for weight in lists[name].parameters()))
    if not by_size:
        raise ValueError(f"model_type is {family!r}, whose modules have no list of layers")
    first, others = lists[by_size[0]], by_size[1:]
    if any(len(lists[name]) == len(first) > 1 for name in others):
        raise ValueError(f"model_type is {family!r}, whose layers are in several lists: {by_size[0]} and {', '.join(others)}")
    return tuple(first)


def _matmuls(layer: Any, hidden: int) -> Iterator[LayerWeight]:
    """Yield every weight that tokens are multiplied by. Raises ValueError if the modules leave its use open."""
    from torch import nn

    lists = {name: len(module) for name, module in layer.named_modules() if isinstance(module, nn.ModuleList)}
    for name, module in layer.named_modules(remove_duplicate=False):
        listed = next((each for each in lists if name.startswith(f"{each}.")), "")
        if listed and "expert" not in listed:
            raise ValueError(f"model_type decides which of the modules in {listed} a layer uses; weft does not know it")
        if listed and name.split(".")[listed.count(".") + 1] != "0":
            continue  # all experts of a list have the shapes of the first
        if isinstance(module, (nn.Embedding, nn.modules.conv._ConvNd)):
            continue
        for weight, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1 and not NO_MATMUL.fullmatch(weight):
                path = f"{name}.{weight}".removesuffix(".weight").removesuffix(".linear").lstrip(".")
                sizes = tuple(parameter.shape)
                if type(module).__name__ == "Conv1D":  # this class of GPT-2 is a linear layer, and its weight is transposed
                    sizes = sizes[::-1]
                found = _matmul(path, sizes, hidden, whole=weight == "weight", listed=lists.get(listed, 0))
                yield replace(found, owner=type(layer.get_submodule(found.block)).__name__)


def _matmul(path: str, sizes: tuple[int, ...], hidden: int, *, whole: bool, listed: int) -> LayerWeight:
    """Return the matmul of one parameter.

    whole: the parameter has all weights of its module. listed: the number of experts with such a parameter, if they are a list
    of modules."""
    block, _, name = path.rpartition(".")
    expert = "expert" in path.lower()
    if len(sizes) == 2 and (whole or not expert):
        return LayerWeight(block=block, name=name, n=sizes[0], k=sizes[1], experts=listed)
    row = bool(ROWS.fullmatch(name))
    if len(sizes) != 3 or not (expert or (whole and (row or name == "input_linear"))):
        raise ValueError(f"model_type decides how {path} of shape {sizes} is multiplied; weft does not know it")
    count, *two = sizes
    n, k = two if two[0 if row else 1] == hidden else two[::-1]  # stored as (n, k) or as (k, n)
    if "shared" not in path:
        return LayerWeight(block=block, name=name, n=n, k=k, experts=count)
    return LayerWeight(block=block, name=name, n=n if row else n * count, k=k * count if row else k)


def _top_k(config: Any, given: dict[str, Any], experts: int) -> int:
    """Return the number of experts that a token goes to. Raises ValueError if no key says it, or if keys or layers differ."""
    sources = [{key: _value(config, key) for key in TOP_K}, {key: given.get(key) for key in TOP_K}]
    found = [(key, value) for source in sources for key, value in source.items() if value is not None]
    values = [each for _, value in found for each in (value if isinstance(value, list) and value else [value])]
    if not found:
        raise ValueError(f"{TOP_K[0]} is missing: there are {experts} experts, and no key says how many a token goes to")
    if any(value != values[0] for value in values):
        raise ValueError(f"{' and '.join(sorted({f'{key} is {value!r:.60}' for key, value in found}))}; weft plans one number")
    if not isinstance(values[0], int) or not 1 <= values[0] <= experts:
        raise ValueError(f"{found[0][0]} is {values[0]!r:.60}, but there are {experts} experts; a token has 1 to {experts}")
    return values[0]
