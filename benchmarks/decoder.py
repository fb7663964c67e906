"""The decoder that models.py and training.py measure: layers of Llama, Qwen 3 and Mixtral as PyTorch users write them, and
their plans for tensor parallelism.

One model, three ways to shard it, all by torch's parallelize_module, on a mesh of one dimension:

    torchs(decode)   torch's styles: PrepareModuleInput, ColwiseParallel, RowwiseParallel, SequenceParallel. Experts, for which
                     torch has no style, are exchanged as by hand (by_hand.py)
    wefts(decode)    weft's in their place, and weft.ExpertParallel
    Alone            a rank's part with no communication: what comes from others is copied from this rank's own

Legend: B batch, S tokens of all ranks, s of one, H hidden size, D head's, q and g this rank's heads for queries and for keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Placement
from torch.utils.checkpoint import checkpoint

import weft
from benchmarks.by_hand import Link, exchange
from weft.models.experts import Experts

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Llama 3 70B's, and how many layers. context: of the caches that a decoding step reads. qk_norm: queries and keys are
    normalised by head, as in Qwen 3. experts: how many, of `width` columns each, and top_k of them for each token; 0 for a
    plain MLP."""

    layers: int = 4
    hidden: int = 8192
    width: int = 28672
    heads: int = 64
    kv_heads: int = 8
    head: int = 128
    context: int = 4096
    qk_norm: bool = False
    experts: int = 0
    top_k: int = 2

    def part(self, ranks: int) -> Sizes:
        """One rank's, of everything that is sharded."""
        return replace(self, width=self.width // ranks, heads=self.heads // ranks, kv_heads=self.kv_heads // ranks)


class Attention(nn.Module):
    """Causal attention with rotary positions, of grouped queries. With a cache: of one new token a sequence, its
    last."""

    def __init__(self, sizes: Sizes, cosine_SD: Tensor, sine_SD: Tensor) -> None:
        super().__init__()
        self.head = sizes.head
        self.cosine, self.sine = cosine_SD, sine_SD
        self.wq = nn.Linear(sizes.hidden, sizes.heads * self.head, bias=False)
        self.wk = nn.Linear(sizes.hidden, sizes.kv_heads * self.head, bias=False)
        self.wv = nn.Linear(sizes.hidden, sizes.kv_heads * self.head, bias=False)
        self.wo = nn.Linear(sizes.heads * self.head, sizes.hidden, bias=False)
        if sizes.qk_norm:
            self.q_norm, self.k_norm = nn.RMSNorm(self.head, 1e-6), nn.RMSNorm(self.head, 1e-6)
        self.qk_norm = sizes.qk_norm
        self.cache: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens = x.shape[:2]
        q, k, v = (w(x).view(batch, tokens, -1, self.head) for w in (self.wq, self.wk, self.wv))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        low = 0 if self.cache is None else self.cache[0].shape[2] - tokens
        cosine, sine = self.cosine[low : low + tokens], self.sine[low : low + tokens]
        q, k, v = turned(q, cosine, sine).transpose(1, 2), turned(k, cosine, sine).transpose(1, 2), v.transpose(1, 2)
        if self.cache is not None:
            for kept, new in zip(self.cache, (k, v), strict=True):
                kept[:, :, low:].copy_(new)
            k, v = self.cache
        causal = self.cache is None
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return self.wo(seen.transpose(1, 2).reshape(batch, tokens, -1))


def turned(x_BSqD: Tensor, cosine_SD: Tensor, sine_SD: Tensor) -> Tensor:
    """With rotary positions."""
    left, right = x_BSqD.chunk(2, -1)
    return x_BSqD * cosine_SD[:, None] + torch.cat((-right, left), -1) * sine_SD[:, None]


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(sizes.hidden, sizes.width, bias=False) for _ in range(2))
        self.w2 = nn.Linear(sizes.width, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class RoutedExperts(nn.Module):
    """Stacked experts whose routing is given, so that it is the same for all methods. index, weights: [T, k], of the
    tokens of the input."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.experts = Experts(sizes.experts, sizes.hidden, sizes.width)
        self.index, self.weights = torch.empty(0), torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.experts(x.reshape(-1, x.shape[-1]), self.index, self.weights)
        return out.view(x.shape)


class Layer(nn.Module):
    def __init__(self, sizes: Sizes, cosine_SD: Tensor, sine_SD: Tensor) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(sizes.hidden, 1e-5), nn.RMSNorm(sizes.hidden, 1e-5)
        self.attention = Attention(sizes, cosine_SD, sine_SD)
        self.feed_forward = RoutedExperts(sizes) if sizes.experts else FeedForward(sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    """Hidden states [B, s, H], or [B, S, H] where tokens are not sharded, through all layers. checkpointing: each layer
    is computed again in its backward."""

    checkpointing = False

    def __init__(self, sizes: Sizes, *, positions: int, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        angles_SD = torch.outer(torch.arange(positions), 500000 ** -(torch.arange(0, sizes.head, 2) / sizes.head)).repeat(1, 2)
        cosine_SD, sine_SD = angles_SD.cos().to(device, dtype), angles_SD.sin().to(device, dtype)
        with torch.device("meta"):
            layers = [Layer(sizes, torch.empty(0), torch.empty(0)) for _ in range(sizes.layers)]
        self.layers = nn.ModuleList(layers).to(dtype).to_empty(device=device)
        for layer in layers:
            layer.attention.cosine, layer.attention.sine = cosine_SD, sine_SD
        for parameter in self.parameters():
            nn.init.ones_(parameter) if parameter.dim() == 1 else nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return run_layers(self.layers, self.checkpointing, x)

    def route(self, index: Tensor, weights: Tensor) -> None:
        """Give the experts of all layers the same routing."""
        for layer in self.layers:
            layer.feed_forward.index, layer.feed_forward.weights = index, weights

    def cached(self, batch: int, sizes: Sizes) -> None:
        """Give every layer a cache for this rank's heads. sizes: a rank's."""
        for layer in self.layers:
            like = layer.attention.cosine
            shape = (batch, sizes.kv_heads, sizes.context, sizes.head)
            layer.attention.cache = torch.randn(shape, device=like.device, dtype=like.dtype), like.new_zeros(shape)


def run_layers(layers: Iterable[Callable[[Tensor], Tensor]], checkpointing: bool, x: Tensor) -> Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False) if checkpointing else layer(x)
    return x


class ExchangedExperts(Experts):
    """Experts over the ranks of a link by all-to-alls and grouped matmuls, one after the other, as torch's users write them.

    torch.compile leaves all but the activation out, because the host waits for the number of rows."""

    link: Link

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        into, out = (cast(DTensor, weight).to_local() for weight in (self.gate_up_proj, self.down_proj))
        fused = torch.compiler.is_compiling()
        return exchange(hidden_states, top_k_index, top_k_weights, into, out, self.link, fused=fused)


class ExchangeExperts(ParallelStyle):
    """The style of ExchangedExperts."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self.link = link

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, weight in list(module.named_parameters()):
            shards = distribute_tensor(weight, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(shards))
        module.__class__, module.link = ExchangedExperts, self.link
        return module


Plan = dict[str, ParallelStyle]


COLUMNS, SHARED = ("wq", "wk", "wv"), ("w1", "w3")
"""The linears of attention, and of an MLP, that read one input."""


def torchs(sizes: Sizes, *, decode: bool, link: Link | None = None) -> Plan:
    """torch's styles for a layer. decode: tokens are whole on every rank. link: over which experts are exchanged."""
    lies = Replicate() if decode else Shard(1)
    plan: Plan = {} if decode else {name: SequenceParallel() for name in ("attention_norm", "ffn_norm")}
    if sizes.qk_norm:
        plan |= {f"attention.{name}": SequenceParallel(sequence_dim=2, use_local_output=True) for name in ("q_norm", "k_norm")}
    plan |= _columns("attention", COLUMNS, lies) | {"attention.wo": RowwiseParallel(output_layouts=lies)}
    if not sizes.experts:
        return plan | _columns("feed_forward", SHARED, lies) | {"feed_forward.w2": RowwiseParallel(output_layouts=lies)}
    if link is None:
        raise ValueError("link is None; pass the link over which experts are exchanged")
    return plan | {"ffn_norm": SequenceParallel(use_local_output=True), "feed_forward.experts": ExchangeExperts(link)}


def _columns(block: str, linears: Sequence[str], lies: Placement) -> Plan:
    plan: Plan = {block: PrepareModuleInput(input_layouts=lies, desired_input_layouts=Replicate())}
    return plan | {f"{block}.{name}": ColwiseParallel() for name in linears}


def wefts(sizes: Sizes, *, decode: bool, schedule: str = "auto", limits: Mapping[str, Any] | None = None) -> Plan:
    """The same by weft's styles. limits: arguments of weft.ExpertParallel."""
    lies = Replicate() if decode else Shard(1)
    norms: Sequence[str] = () if decode else ("attention_norm", "ffn_norm")
    plan: Plan = {name: weft.SequenceParallel(use_local_output=True) for name in norms}
    if sizes.qk_norm:
        for name in ("attention.q_norm", "attention.k_norm"):
            plan[name] = weft.SequenceParallel(sequence_dim=2, use_local_output=True)
    plan["attention"] = weft.SharedInput(COLUMNS, input_layouts=lies, schedule=schedule)
    plan["attention.wo"] = weft.RowwiseParallel(output_layouts=lies, schedule=schedule)
    if sizes.experts:
        return plan | {"feed_forward.experts": weft.ExpertParallel(**(limits or {}))}
    plan["feed_forward"] = weft.SharedInput(SHARED, input_layouts=lies, schedule=schedule)
    return plan | {"feed_forward.w2": weft.RowwiseParallel(output_layouts=lies, schedule=schedule)}


class Alone(Decoder):
    """One rank's part of the computation, without communication. sizes: a rank's."""

    def __init__(self, sizes: Sizes, ranks: int, **options: Any) -> None:
        super().__init__(sizes, **options)
        if ranks == 1:
            return
        for layer in self.layers:
            for block in (layer.attention, layer.feed_forward):
                block.register_forward_pre_hook(lambda module, args: (args[0].repeat(1, ranks, 1),))
                block.register_forward_hook(lambda module, args, out: out[:, : out.shape[1] // ranks])
