"""The decoder of decoder.py as Megatron writes it: QKV as one weight, gate and up as one, and collectives of by_hand.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.by_hand import ColumnProduct, Link, Scatter, compiled, cut, exchange, swiglu
from benchmarks.decoder import COLUMNS, SHARED, Decoder, run_layers, turned

Tensor = torch.Tensor
Function = Callable[..., Tensor]


class HandLayer(nn.Module):
    """A rank's part of a layer. fused: rotary positions and SwiGLU are kernels of Inductor's, as Megatron has fused ones."""

    def __init__(self, whole: Any, link: Link, *, fused: bool) -> None:
        super().__init__()
        attention, ff = whole.attention, whole.feed_forward
        self.link, self.head, self.cosine, self.sine = link, attention.head, attention.cosine, attention.sine
        self.fused = fused
        self.turned: Function = compiled(turned) if fused else turned
        self.act: Function = compiled(swiglu) if fused else swiglu
        self.attention_norm, self.ffn_norm = whole.attention_norm, whole.ffn_norm
        self.q_norm, self.k_norm = (attention.q_norm, attention.k_norm) if attention.qk_norm else (None, None)
        self.wqkv, self.widths = _fused(attention, COLUMNS, link)
        self.wo = nn.Parameter(cut(attention.wo.weight, 1, link))
        self.experts = hasattr(ff, "experts")
        if self.experts:
            self.index, self.weights = ff.index, ff.weights
            self.into, self.out = (nn.Parameter(cut(w, 0, link)) for w in (ff.experts.gate_up_proj, ff.experts.down_proj))
        else:
            self.w13, self.inner = _fused(ff, SHARED, link)
            self.w2 = nn.Parameter(cut(ff.w2.weight, 1, link))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x))
        return x + self._feed_forward(self.ffn_norm(x))

    def _attend(self, x: Tensor) -> Tensor:
        qkv: Tensor = ColumnProduct.apply(x, self.wqkv, self.link)  # type: ignore[no-untyped-call]
        q, k, v = (part.unflatten(2, (-1, self.head)) for part in qkv.split(self.widths, 2))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (self.turned(part, self.cosine, self.sine).transpose(1, 2) for part in (q, k))
        seen = nn.functional.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        return self._row(seen.transpose(1, 2).flatten(2), self.wo)

    def _feed_forward(self, x: Tensor) -> Tensor:
        if self.experts:
            rows = x.reshape(-1, x.shape[-1])
            return exchange(rows, self.index, self.weights, self.into, self.out, self.link, fused=self.fused).view(x.shape)
        return self._row(self.act(ColumnProduct.apply(x, self.w13, self.link)), self.w2)  # type: ignore[no-untyped-call]

    def _row(self, x: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = Scatter.apply(nn.functional.linear(x, weight), self.link)  # type: ignore[no-untyped-call]
        return out

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """By the names of decoder.py's layer, those of fused weights apart."""
        for name, grad in ((name, parameter.grad) for name, parameter in self.named_parameters()):
            assert grad is not None, name
            if name == "wqkv":
                yield from zip((f"attention.{one}.weight" for one in COLUMNS), grad.split(self.widths), strict=True)
            elif name == "w13":
                yield from zip((f"feed_forward.{one}.weight" for one in SHARED), grad.split(self.inner), strict=True)
            else:
                yield _NAMES.get(name, name), grad


_NAMES = {
    "wo": "attention.wo.weight",
    "q_norm.weight": "attention.q_norm.weight",
    "k_norm.weight": "attention.k_norm.weight",
    "w2": "feed_forward.w2.weight",
    "into": "feed_forward.experts.gate_up_proj",
    "out": "feed_forward.experts.down_proj",
}


def _fused(block: nn.Module, names: tuple[str, ...], link: Link) -> tuple[nn.Parameter, list[int]]:
    """(a rank's rows of these linears' weights as one, how many of each)."""
    parts = [cut(block.get_submodule(name).weight, 0, link) for name in names]  # type: ignore[arg-type]
    return nn.Parameter(torch.cat(parts)), [len(part) for part in parts]


class HandDecoder(nn.Module):
    """A rank's part of all layers of a decoder."""

    def __init__(self, whole: Decoder, link: Link, *, fused: bool) -> None:
        super().__init__()
        self.link, self.checkpointing = link, whole.checkpointing
        self.layers = nn.ModuleList(HandLayer(layer, link, fused=fused) for layer in whole.layers)

    def forward(self, x: Tensor) -> Tensor:
        return run_layers(self.layers, self.checkpointing, x)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for number, layer in enumerate(self.layers):
            for name, grad in layer.gradients():  # type: ignore[operator]
                yield f"layers.{number}.{name}", grad
