"""weft.parallelize: tensor parallelism for a decoder of Hugging Face with weft's operators, for training and generation.

The layout of the tokens of hidden states [B, S, H], from the embedding to the head:

    embedding        whole: every rank has all tokens
    first layer      pre-hook: each rank keeps its part of S, as torch.chunk cuts it        if there are more than few_tokens
    norm             on this rank's tokens; the gradient of its weight is summed
    attention, MLP   all_gather_matmul | this rank's heads, or columns | matmul_reduce_scatter
    final norm       pre-hook: gathers all tokens, after whichever layer was the last to run
    norm, head       whole; the head's columns are sharded, and its logits gathered

A call with few tokens (decoding) has all tokens on every rank: matmul | heads | matmul_all_reduce. Without gradients, the
residual and the norm that follows are computed with it, by matmul_all_reduce_norm (norms.py). A layer chooses by its inputs in
each call. So lengths may change, and activation checkpoints recompute the same operators.

A block that cannot be sharded runs whole on every rank, between a gather and a cut. Its report says why. All checks run before
the first module is changed.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from weft.core.errors import require
from weft.models.adapters import (
    base_of,
    is_lora,
    merge_whole_weights,
    refuse_wrapped_parameters,
    shard_columns,
    shard_row,
    wanted,
)
from weft.models.blocks import Block, Unwrapped, blocks_of, has_experts, in_several_places, whole_by_sharing, why_not_block
from weft.models.communicating import CommunicatingLayer, record_layer
from weft.models.decoder_tokens import (
    CutIfMany,
    DecoderTokens,
    evenly,
    noting_tokens,
    placed,
    shard_embedding,
    why_not_embedding,
)
from weft.models.experts import ExpertParallel
from weft.models.layouts import Announce, ColumnsIn, ColumnsOut, LogitsOut
from weft.models.linear import (
    Distributor,
    InputHook,
    RowLinear,
    Tokens,
    make_column_linears,
    make_row_linear,
    why_not_linear,
)
from weft.models.norms import NOT_FUSED, NormAhead, computed_ahead, norms_after
from weft.models.products import LinearProducts, ProductSettings, check_sizes, kind_of
from weft.models.replicas import (
    ParameterReaders,
    always,
    class_of,
    enter,
    gathered_for_others,
    never,
    replicate,
    replicate_alone,
)
from weft.models.styles import describe_columns, describe_row

M = TypeVar("M", bound=nn.Module)
FAMILIES = ("deepseek_v3", "gemma3_text", "gpt_oss", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe")
"""config.model_type of the supported models. Outside their blocks, their forward passes do nothing else with hidden states."""
FEW_TOKENS = 128
"""Up to this number of tokens, one kernel that reduces for all ranks is the fastest (docs/measured.md)."""


def parallelize(
    model: M,
    mesh: DeviceMesh,
    *,
    schedule: str = "auto",
    few_tokens: int = FEW_TOKENS,
    keep_gathered: bool = True,
    experts: ParallelStyle | None = None,
    sharded_logits: bool = False,
    src_data_rank: int | None = 0,
) -> M:
    """Shard a transformers model over a mesh's ranks, in place. Its linears communicate by weft's operators.

    Args:
        model: DeepSeek V3, Gemma 3 (text), GPT-OSS, Llama, Mistral, Mixtral, Phi 3 and 4, Qwen 2, 2.5, 3 or 3 MoE, with a head
            or without, on any device, meta too; whole on every rank. Add adapters (LoRA) before this call, and apply
            fully_shard, compile and activation checkpoints after it.
        mesh: a mesh of one dimension (mesh["tp"] of a larger one).
        schedule: a name, as for weft.all_gather_matmul and weft.matmul_reduce_scatter, which both must have it. Calls with few
            tokens (matmul_all_reduce) use "auto" if they do not have it.
        few_tokens: a call with at most this number of tokens keeps them whole on every rank. Without gradients (decoding), each
            row linear then runs matmul_all_reduce_norm, with the residual and the norm that follows.
        keep_gathered: keep gathered inputs for weights' gradients, as torch's styles do. False saves that memory, and gathers
            them again in the backward pass.
        experts: a style for blocks of experts whose input and output have as many tokens on each rank (weft.ExpertParallel()).
            Without one, experts run whole on every rank. GPT-OSS's must, because they have biases.
        sharded_logits: while gradients are recorded, logits are a DTensor [B, S, vocabulary] that is sharded by the vocabulary,
            so no rank has all of them. Compute the loss, and call backward, under torch's loss_parallel(). Without gradients,
            as in generate, logits are gathered. With False they always are.
        src_data_rank: as for parallelize_module: the rank whose values are used, or None if all ranks have the same, or none
            yet.

    The result is called like the original, with the same arguments on all ranks of the mesh, and returns the same whole values
    on each. Exceptions are the hidden_states of layers, if requested, which are this rank's tokens, and attentions and
    past_key_values, which are this rank's heads (DeepSeek's latent cache, and all of Phi's, are whole). Linears that
    transformers keeps in FP8 (its FP8Linear and CompressedTensorsFP8Linear) stay in FP8, for inference; their weights and
    scales are cut together. With dropout, all ranks need the same seed, so that whole parts compute the same on each.
    Parameters become DTensors under their old names. weft.overlap_report(model) says what is overlapped. Raises ValueError for
    another model or mesh, if nothing can be sharded, if a linear of FP8 would be cut within a block of scales, if `experts`
    refuses a block, or if the head of sharded logits is missing or has to be whole. The model is then unchanged.
    """
    shard(
        model,
        mesh,
        schedule=schedule,
        few_tokens=few_tokens,
        keep_gathered=keep_gathered,
        experts=experts,
        sharded_logits=sharded_logits,
        src_data_rank=src_data_rank,
    )
    declare_tensor_parallel(model, mesh)
    return model


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    schedule: str,
    few_tokens: int,
    keep_gathered: bool,
    experts: ParallelStyle | None,
    src_data_rank: int | None,
    sharded_logits: bool = False,
) -> None:
    """Do what `parallelize` does, but do not mark the model as one that transformers has sharded."""
    decoder = _checked_decoder(model, mesh)
    check_few_tokens(few_tokens)
    settings = ProductSettings(schedule=schedule, keep_gathered=keep_gathered)
    settings.require("all_gather_matmul", "matmul_reduce_scatter")
    _check_options(mesh, experts, src_data_rank)
    tokens = DecoderTokens(mesh=mesh, few_tokens=few_tokens)
    names = {module: name for name, module in model.named_modules()}
    distribute, norms = Distributor(mesh, src_data_rank), norms_after(decoder)
    within = _Within(mesh, decoder.config, settings, distribute, tokens, experts, names, norms)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    whole = within.check(model, decoder, embedding, head)
    if sharded_logits and (head is None or head in whole):
        why = "model has no head" if head is None else f"its head runs whole on every rank: {whole[head]}"
        raise ValueError(f"sharded_logits is {sharded_logits!r}, but {why}; leave sharded_logits out")
    if experts is not None:
        experts.src_data_rank = src_data_rank
        decoder.register_forward_pre_hook(_no_router_logits, with_kwargs=True)
    within.ends(decoder)
    for layer in dict.fromkeys(decoder.layers):
        within.layer(layer, whole)
    within.embeddings(embedding, head, whole, sharded_logits)
    within.rest(model, decoder)
    merge_whole_weights(model)


def check_few_tokens(few_tokens: object) -> None:
    """Raise ValueError for anything but a number of tokens."""
    if not isinstance(few_tokens, int) or isinstance(few_tokens, bool) or few_tokens < 0:
        raise ValueError(f"few_tokens is {few_tokens!r}; use 0 or more")


def _checked_decoder(model: nn.Module, mesh: DeviceMesh) -> Any:
    """Return the module that has the layers. Raises ValueError for an unsupported model or mesh."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in FAMILIES:
        raise ValueError(
            f"model is a {type(model).__name__}{f' ({kind})' if kind else ''}; weft.parallelize knows transformers' "
            f"{', '.join(FAMILIES)}. For others, use parallelize_module with weft.ColwiseParallel, RowwiseParallel, SharedInput"
        )
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ValueError(f"mesh is {mesh}; use a DeviceMesh of one dimension, of a larger one a part: mesh['tp']")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("model has DTensors already; call weft.parallelize once, before fully_shard")
    found = getattr(model, cast(str, getattr(model, "base_model_prefix", "model")), model)
    layers, norm = getattr(found, "layers", None), getattr(found, "norm", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"model is {type(model).__name__} around {type(found).__name__}, which has no layers of its own; pass the model of "
            "transformers itself, here the one inside. Adapters (LoRA) are put into it before this call, not afterwards"
        )
    if not isinstance(norm, nn.Module):
        raise ValueError(
            f"model has a {type(found).__name__} without a norm after its layers, before which tokens become whole again; put "
            "an nn.Identity in its place"
        )
    if norm in layers.modules():
        raise ValueError(
            f"model has a {type(found).__name__} whose norm is also one of its layers'; give it one of its own: "
            "copy.deepcopy(model.norm)"
        )
    return found


def _check_options(mesh: DeviceMesh, experts: object, src_data_rank: int | None) -> None:
    if experts is not None:
        require("experts", experts, ParallelStyle, "use an instance of a style, weft.ExpertParallel()")
        if isinstance(experts, ExpertParallel) and experts.gradients == "mean":
            raise ValueError(f"experts has gradients={experts.gradients!r}, but all ranks of the mesh have one loss: use 'sum'")
    if src_data_rank is not None and src_data_rank not in range(mesh.size()):
        raise ValueError(f"src_data_rank is {src_data_rank!r}; use a rank of the mesh, 0 to {mesh.size() - 1}, or None")


@dataclass(frozen=True)
class _Within:
    """A _Within shards one model.

    tokens: the token layout of all layers, which the running layer sets.
    names: the names of the model's modules.
    norms: the norm that follows each block, or why it is not computed with the block's product.
    region: all modules that read whole parameters.
    done: the children of layers that are sharded already, since layers may share some.
    """

    mesh: DeviceMesh
    config: Any
    settings: ProductSettings
    distribute: Distributor
    tokens: DecoderTokens
    experts: ParallelStyle | None
    names: Mapping[nn.Module, str]
    norms: Mapping[nn.Module, nn.Module | str]
    region: ParameterReaders = field(default_factory=ParameterReaders)
    done: set[nn.Module] = field(default_factory=set)

    def check(self, model: nn.Module, decoder: Any, embedding: nn.Module, head: nn.Module | None) -> dict[nn.Module, str]:
        """Return the blocks, embedding and head that run whole, and the reason for each. It changes nothing.

        Raises ValueError if nothing in any layer can be sharded, or if a layer is refused.
        """
        blocks = blocks_of(self.config)
        refuse_wrapped_parameters(model)
        for layer in decoder.layers:
            _place_of_positions(layer)
        found = {child: name for layer in decoder.layers for name, child in layer.named_children() if not _is_leaf(child)}
        for child in found:
            if self._takes(child) and isinstance(self.experts, ExpertParallel):
                self._check_experts(child, self.experts)
        rest = {child: name for child, name in found.items() if not self._takes(child)}
        several = in_several_places(model)
        whole = {
            child: self._why_whole_experts(child)
            if has_experts(child)
            else why_not_block(child, blocks.get(name), self.config, self.mesh.size(), several)
            for child, name in rest.items()
        }
        whole[embedding] = why_not_embedding(embedding)
        if head is not None:
            whole[head] = why_not_linear(head, ranks=self.mesh.size())
        asked = self._wanted({child: blocks.get(name) for child, name in rest.items()}, embedding, head, whole)
        whole |= whole_by_sharing(model, asked)
        reasons = [whole.get(child, "") for child in found]
        if all(reasons):
            first = f"{self.names[next(iter(found))]} runs whole on every rank: {reasons[0]}" if reasons else "it has no layers"
            raise ValueError(f"model: no block can be sharded over {self.mesh.size()} ranks; {first}")
        for child, name in rest.items():
            block = blocks.get(name)
            if block is not None and not whole.get(child):
                self._check_sizes(child, block)
        return {module: why for module, why in whole.items() if why}

    def _check_experts(self, child: nn.Module, style: ExpertParallel) -> None:
        try:
            style.check(child, self.mesh)
        except ValueError as error:
            raise ValueError(
                f"experts refuses {self.names[child]}: {error}. Leave experts out: then these experts run whole on every rank"
            ) from error

    def _why_whole_experts(self, child: nn.Module) -> str:
        """Return why a block of experts runs whole if no style for experts was passed."""
        try:
            ExpertParallel().check(child, self.mesh)
        except ValueError as error:
            return f"all experts on all tokens; weft.ExpertParallel refuses them: {error}"
        return "all experts on all tokens; pass experts=weft.ExpertParallel()"

    def _check_sizes(self, child: nn.Module, block: Block) -> None:
        """Raise ValueError for a linear of FP8 that cannot be cut over the mesh's ranks."""
        for name in block.linears:
            linear = child.get_submodule(name)
            kind = kind_of(linear)
            if kind is not None:
                check_sizes(self.names[linear], linear, kind, row=name == block.row, ranks=self.mesh.size())

    def _takes(self, child: nn.Module) -> bool:
        """Return whether the style of experts applies to a block."""
        return self.experts is not None and has_experts(child)

    def layer(self, layer: nn.Module, whole: Mapping[nn.Module, str]) -> None:
        """Shard a decoder layer, except for the blocks that run whole."""
        blocks = blocks_of(self.config)
        for name, child in layer.named_children():
            if child in self.done:
                continue
            self.done.add(child)
            if _is_leaf(child):
                replicate(child, self.distribute, self.tokens.sharded, self.region)
                child.__class__ = placed(class_of(child))
                child.__dict__["_weft_tokens"] = self.tokens
                continue
            child.register_forward_pre_hook(InputHook("hidden_states", self.tokens.placed), with_kwargs=True)
            if self.experts is not None and self._takes(child):
                self._experts(child, self.experts)
            elif child in whole:
                self._whole(child, whole[child])
            else:
                self._block(child, blocks[name])
        replicate_alone(layer, self.distribute, self.tokens.sharded, self.region)
        layer.__class__ = noting_tokens(class_of(layer), _place_of_positions(layer))
        layer.__dict__["_weft_tokens"] = self.tokens

    def _wanted(
        self,
        blocks: Mapping[nn.Module, Block | None],
        embedding: nn.Module,
        head: nn.Module | None,
        whole: Mapping[nn.Module, str],
    ) -> dict[tuple[nn.Module, str], tuple[nn.Module, Placement]]:
        """Return the layouts of all parameters that can be sharded. All others are whole. whole: the reasons for places that
        run whole."""
        found: dict[tuple[nn.Module, str], tuple[nn.Module, Placement]] = {}
        for child, block in blocks.items():
            if block is None or whole.get(child):
                continue
            for name in block.linears:
                for module, own, placement in wanted(child.get_submodule(name), row=name == block.row):
                    found[module, own] = child, placement
            for name, each in block.heads_of(child).items():
                modules = [(each, own) for own in ("weight", "bias")] if isinstance(each, nn.Module) else [(child, name)]
                found |= dict.fromkeys(modules, (child, Shard(0)))
        for end in (embedding, head):
            if end is not None and not whole[end]:
                found |= {(end, own): (end, Shard(0)) for own in ("weight", "bias")}
        return found

    def _block(self, child: nn.Module, block: Block) -> None:
        row, heads = child.get_submodule(block.row), block.heads_of(child)
        if self.mesh.size() > 1:
            linears = [each for each, found in heads.items() if isinstance(found, nn.Module)]
            child.register_forward_pre_hook(Unwrapped(self.names[child], (*block.linears, *linears)))
        if block.columns:
            self._columns(child, block)
        else:
            child.register_forward_pre_hook(InputHook("hidden_states", self.tokens.gathered_for_heads), with_kwargs=True)
            record_layer(
                child, CommunicatingLayer(reason=f"its input is gathered: what comes before {', '.join(heads)} is whole")
            )
        last = cast(nn.Linear, base_of(row))
        ran = make_row_linear(last, self.tokens, self.settings, self.distribute)
        shard_row(row, self.tokens, self.settings, self.distribute)
        why = self._fuse(child, block.row)
        also = ("matmul_all_reduce",) if why else ("matmul_all_reduce", "matmul_all_reduce_norm")
        reason = why and NOT_FUSED + why
        record_layer(child, describe_row(last, Shard(1), self.settings, ran, parts=(block.row,), also=also, reason=reason))
        if block.fused:
            row.register_forward_pre_hook(InputHook("input", ColumnsIn(self.mesh)), with_kwargs=True)
            fused = ", ".join(block.columns)
            record_layer(
                child, CommunicatingLayer(reason=f"the output of {fused} is gathered, since {type(child).__name__} splits it")
            )
        for other_name, other in child.named_children():
            if other_name in heads:
                replicate_alone(other, self.distribute, never, self.region, Shard(0))
            elif other_name not in block.linears:
                replicate(other, self.distribute, never if block.fused else always, self.region)
        if any(isinstance(each, nn.Parameter) for each in heads.values()):
            replicate_alone(child, self.distribute, never, self.region, Shard(0))

    def _fuse(self, child: nn.Module, name: str) -> str:
        """Let a block's row linear compute the norm that follows, in calls that allow it. Return why it never does, or ""."""
        row, norm = child.get_submodule(name), self.norms.get(child, "no norm follows")
        if isinstance(norm, str):
            return norm
        if not isinstance(row, RowLinear):
            return "an adapter (LoRA) adds to its output"
        if type(row._weft_settings.products) is not LinearProducts:
            return "it multiplies in FP8"
        child.__dict__["_weft_row"], row._weft_ahead = name, NormAhead(norm=norm)
        norm.__class__ = computed_ahead(class_of(norm))
        norm.__dict__["_weft_ahead"] = row._weft_ahead
        return ""

    def _columns(self, child: nn.Module, block: Block) -> None:
        """Shard the linears that read a block's input."""
        columns = [child.get_submodule(name) for name in block.columns]
        shared = make_column_linears(
            [cast(nn.Linear, base_of(each)) for each in columns], self.tokens, self.settings, self.distribute
        )
        for each in columns:
            shard_columns(each, self.settings, self.distribute)
            if block.fused:
                each.register_forward_hook(ColumnsOut(self.mesh, Replicate(), True))
        adapted = any(map(is_lora, columns))
        record_layer(child, describe_columns(shared, Replicate() if adapted else Shard(1), parts=block.columns, alone=adapted))
        if adapted:
            record_layer(
                child, CommunicatingLayer(reason="its input is gathered before the matmuls: an adapter (LoRA) reads it, too")
            )
        announce = Announce("hidden_states", shared, block.columns, self.names[child], adapted=adapted)
        child.register_forward_pre_hook(announce, with_kwargs=True)
        child.register_forward_hook(shared.drop_products)

    def _experts(self, child: nn.Module, style: ParallelStyle) -> None:
        """Run a block of experts on equal parts of the tokens. Its router is whole on every rank."""
        style._apply(child, self.mesh)
        for each in child.modules():
            replicate_alone(each, self.distribute, always, self.region)
        record_layer(
            child,
            CommunicatingLayer(reason="in calls of few tokens each rank takes a part of them: what comes of it is gathered"),
        )
        child.__class__ = evenly(class_of(child))
        child.__dict__["_weft_mesh"], child.__dict__["_weft_tokens"] = self.mesh, self.tokens

    def _whole(self, child: nn.Module, why: str) -> None:
        record_layer(child, CommunicatingLayer(reason=f"runs whole on every rank: {why}"))
        replicate(child, self.distribute, never, self.region)
        child.register_forward_pre_hook(InputHook("hidden_states", self.tokens.gathered), with_kwargs=True)
        child.register_forward_hook(self.tokens.cut_output)

    def ends(self, decoder: Any) -> None:
        """Add the hooks that cut the tokens before the first layer, and gather them before the final norm.

        These places hold even if a model runs only some of its layers.
        """
        first, norm = decoder.layers[0], decoder.norm
        decoder.register_forward_pre_hook(self.tokens.begin)
        cut = CutIfMany(self.tokens, _place_of_positions(first))
        first.register_forward_pre_hook(cut, with_kwargs=True)
        norm.register_forward_pre_hook(InputHook("hidden_states", self.tokens.gathered_at_end), with_kwargs=True)
        record_layer(
            first, CommunicatingLayer(reason="its input is cut to this rank's tokens: the gradient of that is gathered")
        )
        record_layer(norm, CommunicatingLayer(reason="its input is gathered: no matmul follows in every call"))

    def embeddings(
        self, embedding: nn.Module, head: nn.Module | None, whole: Mapping[nn.Module, str], sharded_logits: bool
    ) -> None:
        """Shard the embedding and the head by the vocabulary, also if they share one parameter."""
        if embedding in whole:
            replicate(embedding, self.distribute, never, self.region)
            record_layer(embedding, CommunicatingLayer(reason=f"whole on every rank: {whole[embedding]}"))
        else:
            shard_embedding(cast(nn.Embedding, embedding), self.distribute)
            gathered_for_others(embedding, self.region)
            record_layer(
                embedding,
                CommunicatingLayer(reason="its output is summed: weft has no operator for a lookup and an all-reduce"),
            )
        if head is not None:
            why = whole.get(head, "")
            shard_head(head, why, self.settings, self.distribute, self.region, sharded_logits=sharded_logits)

    def rest(self, model: nn.Module, decoder: nn.Module) -> None:
        """Make all remaining parameters whole on every rank. The model and its decoder may read parameters of their
        children."""
        for module in model.modules():
            if any(not isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
                replicate_alone(module, self.distribute, never, self.region)
        for module in (model, decoder):
            enter(module, self.region)


def shard_head(
    head: nn.Module,
    why: str,
    settings: ProductSettings,
    distribute: Distributor,
    region: ParameterReaders,
    *,
    sharded_logits: bool = False,
) -> None:
    """Shard a model's head by the vocabulary, and gather its logits.

    why: the reason to run it whole on every rank, or "".
    sharded_logits: gather them only where no gradients are recorded.
    """
    if why:
        record_layer(head, CommunicatingLayer(reason=f"runs whole on every rank: {why}"))
        replicate(head, distribute, never, region)
        return
    linear = cast(nn.Linear, head)
    shared = make_column_linears([linear], Tokens(), settings, distribute)
    record_layer(linear, describe_columns(shared, Replicate()))
    if sharded_logits:
        linear.register_forward_hook(LogitsOut(distribute.mesh))
        said = "its logits are gathered where no gradients are recorded, because sharded_logits=True"
    else:
        linear.register_forward_hook(ColumnsOut(distribute.mesh, Replicate(), True))
        said = "its logits are gathered, so that every rank has all"
    record_layer(linear, CommunicatingLayer(reason=said))
    gathered_for_others(linear, region)


def _place_of_positions(layer: nn.Module) -> int:
    """Return the index of position_embeddings in the arguments of a decoder layer's forward. Raises ValueError if it has
    none."""
    names = list(inspect.signature(type(layer).forward).parameters)
    if "position_embeddings" not in names:
        raise ValueError(
            f"model has a layer that is a {type(layer).__name__}, whose forward takes no position_embeddings; pass a model of "
            "transformers 4.50 or later whose layers are its own: compile them, or wrap them, afterwards"
        )
    return names.index("position_embeddings") - 1


def _is_leaf(module: nn.Module) -> bool:
    """Return whether a child of a decoder layer is a norm, the only child without children."""
    return next(module.children(), None) is None


def _no_router_logits(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_router_logits", getattr(module.config, "output_router_logits", False)):
        raise ValueError("output_router_logits is True; with experts over ranks a router sees its rank's tokens: pass False")


def declare_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Set the attributes by which transformers, accelerate and PEFT recognise a model that transformers has sharded.

    Trainer then gives all ranks of the mesh the same batches, and does not wrap the model in DistributedDataParallel.
    `save_pretrained`, also of PEFT's models, gathers whole tensors on all ranks, and one rank writes them. In versions without
    these attributes nothing is set.
    """
    ranks, marked = mesh.size(), "_is_distributed_loading_by_transformers"
    if ranks == 1 or not hasattr(model, marked):
        return
    configuration: Any = importlib.import_module("transformers.distributed.configuration_utils")
    cast(Any, model).config.distributed_config = configuration.DistributedConfig(tp_size=ranks)
    model.__dict__ |= {"_tp_size": ranks, "_fsdp_size": 1, "_device_mesh": mesh, marked: True}
