"""weft.parallelize: a decoder of Hugging Face's, tensor parallel with weft's operators, for training and generation.

How the tokens of hidden states [B, S, H] lie, from the embedding to the head:

    embedding        whole: every rank has all tokens
    first layer      pre-hook: each rank keeps its part of S, as torch.chunk cuts it        if there are more than few_tokens
    norm             on this rank's tokens; the gradient of its weight is summed
    attention, MLP   all_gather_matmul | heads, or columns, of this rank | matmul_reduce_scatter
    final norm       pre-hook: whole again, after whichever layer was the last to run
    norm, head       whole; the head's columns are sharded, and its logits gathered

A call of few tokens (decoding) stays whole throughout: matmul | heads | matmul_all_reduce. Which of the two a layer runs
follows from its inputs alone, at each call, so that lengths may change, and activation checkpoints recompute what they saw.

A block that cannot be sharded runs whole on every rank, between a gather and a cut; its site says why. All is decided, and
refused, before the first module is changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel
from torch.distributed.tensor.placement_types import Placement

from weft.core.errors import require
from weft.models.decoder_tokens import DecoderTokens
from weft.models.expert_parallel import ExpertParallel
from weft.models.layouts import ColumnsOut
from weft.models.linear import ColumnLinear, Distributor, OnInput, RowLinear, Tokens, to_columns, to_row, why_not_linear
from weft.models.moves import (
    Begun,
    Cut,
    CutIfMany,
    GatheredOnce,
    GatherSequence,
    OfOutput,
    Sharded,
    evenly,
    noting_tokens,
    placed,
)
from weft.models.products import How
from weft.models.replicas import always, class_of, never, replicate, replicate_alone
from weft.models.sharing import in_several_places, whole_by_sharing
from weft.models.sites import CommunicatingLayer, note
from weft.models.styles import column_site, row_site

M = TypeVar("M", bound=nn.Module)
FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3")
"""config.model_type of the models whose forward passes are known to do nothing else with hidden states."""
FEW_TOKENS = 128
"""Up to these, one kernel that reduces for all ranks is the fastest (docs/measured.md)."""


def parallelize(
    model: M,
    mesh: DeviceMesh,
    *,
    schedule: str = "auto",
    few_tokens: int = FEW_TOKENS,
    keep_gathered: bool = True,
    experts: ParallelStyle | None = None,
    src_data_rank: int | None = 0,
) -> M:
    """Shard a transformers model over a mesh's ranks, in place; its linears communicate by weft's operators.

    Args:
        model: of Llama, Mistral, Mixtral, Qwen 2, 2.5 or 3, with a head or without, on any device, meta too; whole on every
            rank. Put adapters (LoRA) in before, whose blocks then run whole; apply fully_shard, compile and activation
            checkpoints afterwards.
        mesh: of one dimension (mesh["tp"] of a larger one).
        schedule: as weft.all_gather_matmul's, a name.
        few_tokens: a call with up to so many tokens keeps them whole on every rank.
        keep_gathered: keep gathered inputs for weights' gradients.
        experts: a style for Mixtral's blocks of experts that takes and gives as many tokens on each rank
            (weft.ExpertParallel()); without one they run whole on every rank.
        src_data_rank: as parallelize_module's: whose values count; None if all ranks have the same, or none yet.

    The result is called like the original, with the same arguments on all ranks of the mesh, and returns the same on each,
    whole; but hidden_states of layers, if asked for, are this rank's tokens, attentions and past_key_values this rank's heads.
    With dropout, ranks need the same seed: what runs whole is to be the same on each. Parameters become DTensors under their
    old names. weft.overlap_report(model) says what is overlapped. Raises ValueError for another model or mesh, or if nothing
    can be sharded, or `experts` refuses a block; the model is as it was then.
    """
    decoder = _checked_decoder(model, mesh)
    if not isinstance(few_tokens, int) or isinstance(few_tokens, bool) or few_tokens < 0:
        raise ValueError(f"few_tokens is {few_tokens!r}; use 0 or more")
    how = How(schedule=schedule, keep_gathered=keep_gathered)
    _check_options(mesh, experts, src_data_rank)
    tokens = DecoderTokens(mesh=mesh, few_tokens=few_tokens)
    within = _Within(mesh, decoder.config, how, Distributor(mesh, src_data_rank), tokens, experts)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    whole = within.check(model, decoder, embedding, head)
    if experts is not None:
        experts.src_data_rank = src_data_rank
        decoder.register_forward_pre_hook(_no_router_logits, with_kwargs=True)
    within.ends(decoder)
    for layer in dict.fromkeys(decoder.layers):
        within.layer(layer, whole)
    within.embeddings(embedding, head, whole)
    within.rest(model)
    return model


def _checked_decoder(model: nn.Module, mesh: DeviceMesh) -> Any:
    """The module that has the layers."""
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
    if src_data_rank is not None and src_data_rank not in range(mesh.size()):
        raise ValueError(f"src_data_rank is {src_data_rank!r}; use a rank of the mesh, 0 to {mesh.size() - 1}, or None")


@dataclass(frozen=True)
class Block:
    """A child of a decoder layer with linears of two kinds: columns read its input, the row makes its output."""

    columns: tuple[str, ...]
    row: str


_USUAL = {"self_attn": Block(("q_proj", "k_proj", "v_proj"), "o_proj"), "mlp": Block(("gate_proj", "up_proj"), "down_proj")}


def blocks_of(config: Any) -> Mapping[str, Block]:
    """A layer's blocks by name: by the model's own plan for tensor parallelism, else by the usual names."""
    kinds: dict[str, dict[str, list[str]]] = {}
    for pattern, kind in (getattr(config, "base_model_tp_plan", None) or {}).items():
        path = pattern.split(".")
        if path[:2] == ["layers", "*"] and len(path) == 4:
            kinds.setdefault(path[2], {}).setdefault(kind, []).append(path[3])
    planned = {
        parent: Block(tuple(found["colwise"]), found["rowwise"][0])
        for parent, found in kinds.items()
        if "colwise" in found and len(found.get("rowwise", [])) == 1
    }
    return planned or _USUAL


@dataclass(frozen=True)
class Unwrapped:
    """A hook before a block: its linears are still those that were sharded, or ValueError. linears: their names."""

    linears: tuple[str, ...]

    def __call__(self, module: nn.Module, args: Any) -> None:
        for name in self.linears:
            found = getattr(module, name)
            if not isinstance(found, ColumnLinear | RowLinear) and _has_more(found):
                raise ValueError(
                    f"{name} of a {type(module).__name__} is a {type(found).__name__}, around or instead of what "
                    "weft.parallelize has sharded; put adapters (LoRA) in before weft.parallelize: their block then runs whole"
                )


def _has_more(module: nn.Module) -> bool:
    """Whether a module has parameters besides a sharded linear's: what only calls one (a compiled one) has not."""
    found = list(module.parameters())
    return len(found) > 2 or any(not isinstance(parameter, DTensor) for parameter in found)


@dataclass(frozen=True)
class _Within:
    """One model on its way to being sharded. tokens: of all layers, set by the one that runs. done: children of layers, which
    may share some."""

    mesh: DeviceMesh
    config: Any
    how: How
    distribute: Distributor
    tokens: DecoderTokens
    experts: ParallelStyle | None
    done: set[nn.Module] = field(default_factory=set)

    def check(self, model: nn.Module, decoder: Any, embedding: nn.Module, head: nn.Module | None) -> dict[nn.Module, str]:
        """What runs whole of blocks, embedding and head, and why. ValueError if nothing in any layer can be sharded, or what a
        layer has is refused. Changes nothing."""
        blocks = blocks_of(self.config)
        for layer in decoder.layers:
            _place_of_positions(layer)
        found = {child: name for layer in decoder.layers for name, child in layer.named_children() if not _is_leaf(child)}
        for child, name in found.items():
            if self._takes(name, child) and isinstance(self.experts, ExpertParallel):
                self.experts.check(child, self.mesh)
        rest = {child: name for child, name in found.items() if not self._takes(name, child)}
        several = in_several_places(model)
        whole = {child: self._why_not(child, blocks.get(name), several) for child, name in rest.items()}
        whole[embedding] = _why_not_embedding(embedding)
        if head is not None:
            whole[head] = why_not_linear(head)
        wanted = self._wanted({child: blocks.get(name) for child, name in found.items()}, embedding, head, whole)
        whole |= whole_by_sharing(model, wanted)
        reasons = [whole.get(child, "") for child in found]
        if all(reasons):
            first = f"runs whole on every rank: {reasons[0]}" if reasons else "has no layers"
            raise ValueError(f"model: no block can be sharded over {self.mesh.size()} ranks; the first {first}")
        return {module: why for module, why in whole.items() if why}

    def _takes(self, name: str, child: nn.Module) -> bool:
        """Whether a block is for the style of experts."""
        return self.experts is not None and name not in blocks_of(self.config) and _has_experts(child)

    def layer(self, layer: nn.Module, whole: Mapping[nn.Module, str]) -> None:
        """Shard a decoder layer, but for the blocks that run whole."""
        blocks = blocks_of(self.config)
        for name, child in layer.named_children():
            if child in self.done:
                continue
            self.done.add(child)
            if _is_leaf(child):
                replicate(child, self.distribute, Sharded(self.tokens))
                child.__class__ = placed(class_of(child))
                child.__dict__["_weft_tokens"] = self.tokens
                continue
            child.register_forward_pre_hook(OnInput("hidden_states", self.tokens.placed), with_kwargs=True)
            if self.experts is not None and self._takes(name, child):
                self._experts(child, self.experts)
            elif child in whole:
                self._whole(child, whole[child])
            else:
                self._block(child, blocks[name])
        layer.__class__ = noting_tokens(class_of(layer), _place_of_positions(layer))
        layer.__dict__["_weft_tokens"] = self.tokens

    def _why_not(self, child: nn.Module, block: Block | None, several: Collection[nn.Module]) -> str:
        """Why a block runs whole, whatever its parameters are shared with; empty if it can be sharded. several: modules that
        have several places in the model."""
        if block is None and _has_experts(child):
            return "all experts on all tokens; pass experts=weft.ExpertParallel()"
        if block is None:
            return f"a {type(child).__name__} is no block that the model's plan names"
        for name in (*block.columns, block.row):
            found = getattr(child, name, None)
            why = why_not_linear(found) if isinstance(found, nn.Module) else "there is none"
            if not why and found in several:
                why = "it is one module in several places"
            if why:
                return f"{name}: {why}"
        if hasattr(child, "head_dim"):
            for name in ("num_attention_heads", "num_key_value_heads"):
                if getattr(self.config, name) % self.mesh.size():
                    return f"{name} is {getattr(self.config, name)}, for {self.mesh.size()} ranks"
        return ""

    def _wanted(
        self,
        blocks: Mapping[nn.Module, Block | None],
        embedding: nn.Module,
        head: nn.Module | None,
        whole: Mapping[nn.Module, str],
    ) -> dict[tuple[nn.Module, str], tuple[nn.Module, Placement]]:
        """How what could be sharded wants its parameters; all others are whole. `whole` has a reason for what could not."""
        found: dict[tuple[nn.Module, str], tuple[nn.Module, Placement]] = {}
        for child, block in blocks.items():
            if block is None or whole.get(child):
                continue
            for name in block.columns:
                found |= {(child.get_submodule(name), own): (child, Shard(0)) for own in ("weight", "bias")}
            found[child.get_submodule(block.row), "weight"] = child, Shard(1)
        for module in (embedding, head):
            if module is not None and not whole[module]:
                found |= {(module, own): (module, Shard(0)) for own in ("weight", "bias")}
        return found

    def _block(self, child: nn.Module, block: Block) -> None:
        linears = [cast(nn.Linear, child.get_submodule(name)) for name in block.columns]
        row = cast(nn.Linear, child.get_submodule(block.row))
        shared = to_columns(linears, self.tokens, self.how, self.distribute)
        ran = to_row(row, self.tokens, self.how, self.distribute)
        note(child, column_site(shared, Shard(1), parts=block.columns))
        note(child, row_site(row, Shard(1), self.how, ran, parts=(block.row,), also=("matmul_all_reduce",)))
        for name, other in child.named_children():
            if name not in (*block.columns, block.row):
                replicate(other, self.distribute, always)
        if self.mesh.size() > 1:
            child.register_forward_pre_hook(Unwrapped((*block.columns, block.row)))
        child.register_forward_pre_hook(OnInput("hidden_states", shared.announce), with_kwargs=True)
        child.register_forward_hook(shared.forget)

    def _experts(self, child: nn.Module, style: ParallelStyle) -> None:
        """A block of experts on equal parts of the tokens, its router whole on every rank."""
        style._apply(child, self.mesh)
        for each in child.modules():
            replicate_alone(each, self.distribute, always)
        note(
            child,
            CommunicatingLayer(reason="in calls of few tokens each rank takes a part of them: what comes of it is gathered"),
        )
        child.__class__ = evenly(class_of(child))
        child.__dict__["_weft_mesh"], child.__dict__["_weft_tokens"] = self.mesh, self.tokens

    def _whole(self, child: nn.Module, why: str) -> None:
        note(child, CommunicatingLayer(reason=f"runs whole on every rank: {why}"))
        replicate(child, self.distribute, never)
        child.register_forward_pre_hook(OnInput("hidden_states", GatherSequence(self.mesh, self.tokens)), with_kwargs=True)
        child.register_forward_hook(OfOutput(Cut(self.mesh, self.tokens)))

    def ends(self, decoder: Any) -> None:
        """What cuts the tokens before the first layer, and makes them whole before the final norm: a model may run fewer layers
        than it has, or none."""
        first, norm = decoder.layers[0], decoder.norm
        decoder.register_forward_pre_hook(Begun(self.tokens))
        cut = CutIfMany(self.tokens, _place_of_positions(first))
        first.register_forward_pre_hook(cut, with_kwargs=True)
        norm.register_forward_pre_hook(OnInput("hidden_states", GatheredOnce(self.tokens)), with_kwargs=True)
        note(first, CommunicatingLayer(reason="its input is cut to this rank's tokens: the gradient of that is gathered"))
        note(norm, CommunicatingLayer(reason="its input is gathered: no matmul follows in every call"))

    def embeddings(self, embedding: nn.Module, head: nn.Module | None, whole: Mapping[nn.Module, str]) -> None:
        """Shard both by the vocabulary, also where they are one parameter."""
        if embedding in whole:
            replicate(embedding, self.distribute, never)
            note(embedding, CommunicatingLayer(reason=f"whole on every rank: {whole[embedding]}"))
        else:
            weight = embedding.get_parameter("weight")
            style = RowwiseParallel(input_layouts=Replicate())
            style.src_data_rank = self.distribute.src_data_rank
            style._apply(embedding, self.mesh)
            self.distribute.adopt(weight, embedding.get_parameter("weight"))
            note(
                embedding,
                CommunicatingLayer(reason="torch's RowwiseParallel: weft has no operator for a lookup and an all-reduce"),
            )
        if head is not None:
            self._head(head, whole.get(head, ""))

    def _head(self, head: nn.Module, why: str) -> None:
        if why:
            note(head, CommunicatingLayer(reason=f"runs whole on every rank: {why}"))
            return
        linear = cast(nn.Linear, head)
        shared = to_columns([linear], Tokens(), self.how, self.distribute)
        note(linear, column_site(shared, Replicate()))
        note(linear, CommunicatingLayer(reason="its logits are gathered, so that every rank has all"))
        linear.register_forward_hook(ColumnsOut(self.mesh, Replicate(), True))

    def rest(self, model: nn.Module) -> None:
        """Whatever is left is whole on every rank."""
        for module in model.modules():
            if any(not isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
                replicate_alone(module, self.distribute, never)


def _place_of_positions(layer: nn.Module) -> int:
    """Where position_embeddings is among the arguments of a decoder layer's forward. Raises ValueError if it has none."""
    names = list(inspect.signature(type(layer).forward).parameters)
    if "position_embeddings" not in names:
        raise ValueError(
            f"model has a layer that is a {type(layer).__name__}, whose forward takes no position_embeddings; pass a model of "
            "transformers 4.50 or later whose layers are its own: compile them, or wrap them, afterwards"
        )
    return names.index("position_embeddings") - 1


def _is_leaf(module: nn.Module) -> bool:
    """A norm, in a decoder layer: all else there has children."""
    return next(module.children(), None) is None


def _no_router_logits(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_router_logits", getattr(module.config, "output_router_logits", False)):
        raise ValueError("output_router_logits is True; with experts over ranks a router sees its rank's tokens: pass False")


def _has_experts(module: nn.Module) -> bool:
    """Whether there are experts in a module, or it is some itself."""
    listed = any(name.rpartition(".")[2] == "experts" for name, _ in module.named_modules())
    return listed or isinstance(getattr(module, "gate_up_proj", None), nn.Parameter)


def _why_not_embedding(embedding: nn.Module) -> str:
    if type(embedding) is not nn.Embedding:
        return f"{type(embedding).__name__} is no torch.nn.Embedding"
    if embedding.padding_idx is not None or embedding.max_norm is not None:
        return "it has padding_idx or max_norm"
    return ""
