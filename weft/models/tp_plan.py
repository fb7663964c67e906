"""register_tp_plan: weft's tensor parallelism by the `tp_plan` of transformers' from_pretrained.

transformers shards a model after it has built it without data and before it loads the weights: for each rule of the plan it
looks a style up in its registry, and passes it the module that the rule names. Then each rank reads its part of every DTensor.

    rule                         style          what it does with its module
    model                        weft           shards the decoder, as weft.parallelize does
    lm_head                      weft:head      shards the head; weft:whole_head, if it is tied to an embedding that is whole
    score, ...                   weft:whole     keeps the other children of the model whole on every rank
    model.layers.*.mlp.up_proj   weft:inside    nothing: these rules replace the model's own, which transformers merges in

transformers drops a rule for the model itself, whose name is "". So weft cannot change the model around the decoder, as
`weft.parallelize` does: code of that model that reads the weight of the head or the embedding gets a DTensor.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.core.errors import require
from weft.models.decoder_tokens import why_not_embedding
from weft.models.experts import ExpertParallel
from weft.models.linear import Distributor, why_not_linear
from weft.models.parallelize import FAMILIES, FEW_TOKENS, check_few_tokens, shard, shard_head
from weft.models.products import ProductSettings
from weft.models.replicas import ParameterReaders, never, replicate

_OF_TRANSFORMERS = ("transformers.distributed.", "transformers.integrations.tensor_parallel")


def register_tp_plan(
    config: Any,
    *,
    model_class: Any = None,
    schedule: str = "auto",
    few_tokens: int = FEW_TOKENS,
    keep_gathered: bool = True,
    experts: ExpertParallel | None = None,
) -> dict[str, str]:
    """Register weft's styles with transformers, and return the `tp_plan` with which from_pretrained loads a sharded model.

        plan = weft.register_tp_plan(AutoConfig.from_pretrained(path))
        model = AutoModelForCausalLM.from_pretrained(path, tp_plan=plan)

    Each rank reads its own part of the weights from the files, and never has the whole model. The loaded model has the layers,
    token layouts and overlap of one that weft.parallelize has sharded: tokens are sharded between a row and a column linear
    (all_gather_matmul, matmul_reduce_scatter), or whole in a call of few tokens (matmul_all_reduce).

    The registry is transformers' ALL_PARALLEL_STYLES, which is global in the process. This function adds styles whose names
    begin with "weft", and changes no style of transformers. Each set of options has names of its own, so the function may be
    called again, and earlier plans stay valid. Call it in each process, and pass the plan as it is: transformers' own styles do
    not work inside of the decoder, and the first forward raises ValueError if the plan has one.

    Args:
        config: the model's, of a family that weft.parallelize takes.
        model_class: the class whose from_pretrained you call, with a head of any kind; None: AutoModelForCausalLM.
        schedule, few_tokens, keep_gathered: as weft.parallelize's.
        experts: weft.ExpertParallel() spreads blocks of experts; without it they run whole on every rank. transformers' own
            styles for experts are not used.

    DistributedConfig(tp_plan=plan, tp_size=..., fsdp_size=...) takes the plan, too, and applies FSDP over the other ranks; its
    pipeline parallelism is a ValueError. Code of the model around the decoder that reads the weight of the head or of the
    embedding gets a DTensor. Before you generate with cache_implementation="static" and prefill_chunk_size=, call
    model.init_parallel_plans(), because transformers takes the number of a cache's heads from the model's own plan.

    Works with transformers 5.19 or later. Raises ValueError for an older one, another family, a quantised checkpoint, and a
    model_class without a head (AutoModel): pass such a model to weft.parallelize after it is loaded. What weft.parallelize
    refuses for other reasons, such as a number of ranks for which no block can be sharded, is a ValueError of from_pretrained.
    """
    registry = _registry()
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES:
        raise ValueError(f"config is a {type(config).__name__}{f' ({kind})' if kind else ''}; weft knows {', '.join(FAMILIES)}")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            "config has a quantization_config; load a quantised model without tp_plan, then call weft.parallelize(model, mesh)"
        )
    check_few_tokens(few_tokens)
    if experts is not None:
        require("experts", experts, ExpertParallel, "use weft.ExpertParallel()")
    settings = ProductSettings(schedule=schedule, keep_gathered=keep_gathered)
    settings.require("all_gather_matmul", "matmul_reduce_scatter")
    name = _name_of(settings, few_tokens, experts)
    styles: dict[str, Callable[[nn.Module, DeviceMesh], None]] = {
        name: _Decoder(settings, few_tokens, experts),
        f"{name}:head": _Head(settings),
        f"{name}:whole_head": _Head(settings, "its weight is the embedding's, which is whole on every rank"),
        f"{name}:whole": _keep_whole,
        f"{name}:inside": _leave,
    }
    plan = _plan(_without_data(config, model_class), name)
    for style, install in styles.items():
        registry.register(style, _Style(install))
    return plan


@dataclass(frozen=True)
class _Style:
    """A style in transformers' registry. It has the methods of TensorParallelLayer that transformers calls to load a model."""

    install: Callable[[nn.Module, DeviceMesh], None]

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Install the style. transformers calls this for the module of a rule."""
        self.install(module, mesh)
        return module

    def validate_param(self, module: nn.Module, param: str, mesh: DeviceMesh, parameter_name: str | None = None) -> None:
        """Do nothing. transformers calls this for each parameter of that module, but `install_forward` has sharded them all."""

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Do nothing, as validate_param."""


@dataclass(frozen=True)
class _Decoder:
    """Shards the module that has the layers."""

    settings: ProductSettings
    few_tokens: int
    experts: ExpertParallel | None

    def __call__(self, decoder: nn.Module, mesh: DeviceMesh) -> None:
        shard(
            decoder,
            mesh,
            schedule=self.settings.schedule,
            few_tokens=self.few_tokens,
            keep_gathered=self.settings.keep_gathered,
            experts=copy.copy(self.experts),
            src_data_rank=None,
        )
        decoder.register_forward_pre_hook(_refuse_other_styles)


@dataclass(frozen=True)
class _Head:
    """Shards the output embeddings of a model whose decoder is sharded. why: the reason to keep them whole, or ""."""

    settings: ProductSettings
    why: str = ""

    def __call__(self, head: nn.Module, mesh: DeviceMesh) -> None:
        why = self.why or why_not_linear(head, ranks=mesh.size())
        shard_head(head, why, self.settings, Distributor(mesh, None), ParameterReaders())


def _keep_whole(module: nn.Module, mesh: DeviceMesh) -> None:
    replicate(module, Distributor(mesh, None), never)


def _leave(module: nn.Module, mesh: DeviceMesh) -> None:
    """Do nothing, because the rule of the decoder has sharded this module."""


def _refuse_other_styles(decoder: nn.Module, args: Any) -> None:
    """Raise ValueError if a style of transformers was applied to a module inside. This is a pre-hook of the decoder."""
    for name, module in decoder.named_modules():
        home = getattr(module.__dict__.get("forward"), "__module__", None) or ""
        if home.startswith(_OF_TRANSFORMERS):
            raise ValueError(
                f"tp_plan has a rule of transformers for {name or 'the decoder'}, which weft has sharded; pass the plan that "
                "weft.register_tp_plan has returned, without changes"
            )


def _registry() -> Any:
    """Return transformers' registry of styles. Raises ValueError for versions that call styles in another way."""
    transformers: Any = importlib.import_module("transformers")
    try:
        found: Any = importlib.import_module("transformers.distributed.tensor_parallel")
        known = hasattr(found.TensorParallelLayer, "install_forward") and hasattr(found, "ALL_PARALLEL_STYLES")
    except (ImportError, AttributeError):
        known = False
    if not known or tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 19):
        raise ValueError(
            f"transformers {transformers.__version__} has no registry that takes weft's styles; use transformers 5.19 or "
            "later, or load the model without tp_plan and call weft.parallelize(model, mesh)"
        )
    return found.ALL_PARALLEL_STYLES


def _name_of(settings: ProductSettings, few_tokens: int, experts: ExpertParallel | None) -> str:
    """Return a name that contains the options that differ from the defaults."""
    usual: Mapping[str, Any] = {"schedule": "auto", "few_tokens": FEW_TOKENS, "keep_gathered": True, "experts": None}
    spread = (
        None if experts is None else (experts.limits.capacity, experts.limits.max_tokens, experts.float8, experts.gradients)
    )
    options = {
        "schedule": settings.schedule,
        "few_tokens": few_tokens,
        "keep_gathered": settings.keep_gathered,
        "experts": spread,
    }
    given = ",".join(f"{key}={value}" for key, value in options.items() if value != usual[key])
    return f"weft({given})" if given else "weft"


def _without_data(config: Any, model_class: Any) -> Any:
    """Return the model on the meta device."""
    if model_class is None:
        model_class = cast(Any, importlib.import_module("transformers")).AutoModelForCausalLM
    build = getattr(model_class, "from_config", model_class)
    if not callable(build):
        raise ValueError(f"model_class is {model_class!r}; use a class of transformers, such as AutoModelForCausalLM")
    with torch.device("meta"):
        return build(copy.deepcopy(config))


def _plan(model: Any, name: str) -> dict[str, str]:
    """Return the rules for a model's children, and a rule that replaces each rule of the model's own plan."""
    decoder, head = model.base_model, model.get_output_embeddings()
    if decoder is model:
        raise ValueError(
            f"model_class builds a {type(model).__name__}, which is a decoder without a head, and transformers takes no rule "
            "for a whole model; load it without tp_plan and call weft.parallelize(model, mesh)"
        )
    tied = model.config.tie_word_embeddings and why_not_embedding(model.get_input_embeddings())
    roles = {decoder: name, head: f"{name}:whole_head" if tied else f"{name}:head"}
    children = {child: roles.get(module, f"{name}:whole") for child, module in model.named_children()}
    return {**dict.fromkeys(model.tp_plan, f"{name}:inside"), **children}
