"""The decoder that models.py measures: Llama's layers as PyTorch users write them, and its plans for tensor parallelism.

One model, three ways to shard it, all by torch's parallelize_module, on a mesh of one dimension:

    torchs(decode)   torch's styles: PrepareModuleInput, ColwiseParallel, RowwiseParallel, SequenceParallel
    wefts(decode)    weft's in their place
    Alone            a rank's part with no communication: what comes from others is copied from this rank's own

Legend: B batch, S tokens of all ranks, s of one, H hidden size, D head's, q and g this rank's heads for queries and for keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

import weft

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Llama 3 70B's, and how many layers. context: of the caches that a decoding step reads."""

    layers: int = 4
    hidden: int = 8192
    width: int = 28672
    heads: int = 64
    kv_heads: int = 8
    head: int = 128
    context: int = 4096

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
        self.cache: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens = x.shape[:2]
        q, k, v = (w(x).view(batch, tokens, -1, self.head) for w in (self.wq, self.wk, self.wv))
        low = 0 if self.cache is None else self.cache[0].shape[2] - tokens
        q, k, v = self._turned(q, low).transpose(1, 2), self._turned(k, low).transpose(1, 2), v.transpose(1, 2)
        if self.cache is not None:
            for kept, new in zip(self.cache, (k, v), strict=True):
                kept[:, :, low:].copy_(new)
            k, v = self.cache
        causal = self.cache is None
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return self.wo(seen.transpose(1, 2).reshape(batch, tokens, -1))

    def _turned(self, x_BSqD: Tensor, low: int) -> Tensor:
        high = low + x_BSqD.shape[1]
        left, right = x_BSqD.chunk(2, -1)
        return x_BSqD * self.cosine[low:high, None] + torch.cat((-right, left), -1) * self.sine[low:high, None]


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(sizes.hidden, sizes.width, bias=False) for _ in range(2))
        self.w2 = nn.Linear(sizes.width, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, sizes: Sizes, cosine_SD: Tensor, sine_SD: Tensor) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(sizes.hidden, 1e-5), nn.RMSNorm(sizes.hidden, 1e-5)
        self.attention, self.feed_forward = Attention(sizes, cosine_SD, sine_SD), FeedForward(sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    """Hidden states [B, s, H], or [B, S, H] where tokens are not sharded, through all layers."""

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
            nn.init.ones_(parameter) if parameter.dim() == 1 else nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def cached(self, batch: int, sizes: Sizes) -> None:
        """Give every layer a cache for this rank's heads. sizes: a rank's."""
        for layer in self.layers:
            like = layer.attention.cosine
            shape = (batch, sizes.kv_heads, sizes.context, sizes.head)
            layer.attention.cache = torch.randn(shape, device=like.device, dtype=like.dtype), like.new_zeros(shape)


Plan = dict[str, ParallelStyle]


def torchs(*, decode: bool) -> Plan:
    """torch's styles for a layer. decode: tokens are whole on every rank."""
    lies = Replicate() if decode else Shard(1)
    plan: Plan = {} if decode else {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
    plan["attention"] = plan["feed_forward"] = PrepareModuleInput(input_layouts=lies, desired_input_layouts=Replicate())
    columns = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
    plan |= {name: ColwiseParallel() for name in columns}
    return plan | {name: RowwiseParallel(output_layouts=lies) for name in ("attention.wo", "feed_forward.w2")}


def wefts(*, decode: bool, schedule: str = "auto") -> Plan:
    """The same by weft's styles."""
    lies = Replicate() if decode else Shard(1)
    norms: Sequence[str] = () if decode else ("attention_norm", "ffn_norm")
    plan: Plan = {name: weft.SequenceParallel(use_local_output=True) for name in norms}
    plan["attention"] = weft.SharedInput(("wq", "wk", "wv"), input_layouts=lies, schedule=schedule)
    plan["feed_forward"] = weft.SharedInput(("w1", "w3"), input_layouts=lies, schedule=schedule)
    for name in ("attention.wo", "feed_forward.w2"):
        plan[name] = weft.RowwiseParallel(output_layouts=lies, schedule=schedule)
    return plan


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
