"""A decoding step of some layers of a model, one rank's part, for benchmarks/serving.py.

Each layer has two chains, after attention and after the MLP. They are all that differs between methods. The rest is the same
for all. It is compiled in pieces, each of which ends where a chain begins. In a CUDA graph the kernels of the pieces follow
each other as those of one compiled program would. Queries, keys and values have one weight, and so have gate and up, as in
serving engines.

Attention over a cache would cost the same in all methods. A stand-in of one kernel takes its place: a head's query times the
sigmoid of its key, plus its value. A whole decoding step gains less than this one, because attention adds time to all methods.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

import torch

from benchmarks.decoder import Sizes
from benchmarks.serving_chains import EPS, Chain, Pair

Tensor = torch.Tensor


class Layer(NamedTuple):
    """Weights lie as linears keep them, turned: b = weight.t(). next_norm: of the layer that follows, or the last norm."""

    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor
    norm: Tensor
    next_norm: Tensor


class Pieces(NamedTuple):
    first: Callable[[Tensor, Tensor], Tensor]
    attend: Callable[[Tensor, Tensor], Tensor]
    act: Callable[[Tensor, Tensor], Tensor]


def first_norm(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), EPS)


def attend(x: Tensor, qkv: Tensor, *, sizes: Sizes) -> Tensor:
    """The stand-in for attention. sizes: a rank's."""
    heads: Tensor = (x @ qkv.to(x.dtype)).view(len(x), -1, sizes.head)
    q, k, v = (heads[:, low:high] for low, high in pairwise((0, sizes.heads, sizes.heads + sizes.kv_heads, heads.shape[1])))
    found: Tensor = q.unflatten(1, (sizes.kv_heads, -1)) * k.sigmoid()[:, :, None] + v[:, :, None]  # type: ignore[no-untyped-call]
    return found.reshape(len(x), -1)


def act(x: Tensor, up: Tensor) -> Tensor:
    gate, values = (x @ up.to(x.dtype)).chunk(2, 1)
    return torch.nn.functional.silu(gate) * values


@cache
def pieces_of(device: str, sizes: Sizes) -> Pieces:
    plain = Pieces(first=first_norm, attend=partial(attend, sizes=sizes), act=act)
    return plain if device == "cpu" else Pieces(*(torch.compile(piece, dynamic=False, fullgraph=True) for piece in plain))


@dataclass(kw_only=True)
class DecodeStep:
    """A step of one token each of len(x) sequences. sizes: a rank's. x: before the first layer, the same on every rank."""

    sizes: Sizes
    x: Tensor
    norm: Tensor
    layers: list[Layer]

    def run(self, pieces: Pieces, chain: Chain) -> Pair:
        """The last norm, and what it is the norm of."""
        whole, normed = self.x, pieces.first(self.x, self.norm)
        for layer in self.layers:
            normed, whole = chain(pieces.attend(normed, layer.qkv), layer.out, whole, layer.norm)
            normed, whole = chain(pieces.act(normed, layer.up), layer.down, whole, layer.next_norm)
        return normed, whole

    def with_chain(self, device: str, chain: Chain) -> Pair:
        return self.run(pieces_of(device, self.sizes), chain)

    def double(self, chain: Chain) -> Pair:
        """Everything in float64, by a chain in float64."""
        plain = Pieces(first=first_norm, attend=partial(attend, sizes=self.sizes), act=act)
        step = DecodeStep(sizes=self.sizes, x=self.x.double(), norm=self.norm, layers=self.layers)
        return step.run(plain, chain)


def make_step(sizes: Sizes, tokens: int, ranks: int, rank: int, device: str) -> DecodeStep:
    """sizes: of all ranks."""
    part, options = sizes.part(ranks), {"device": device, "dtype": torch.bfloat16}
    torch.manual_seed(7)
    x = torch.randn(tokens, sizes.hidden, **options)  # type: ignore[call-overload]
    norms = [1 + 0.1 * torch.randn(sizes.hidden, **options) for _ in range(2 * sizes.layers + 1)]  # type: ignore[call-overload]
    torch.manual_seed(8 + rank)

    def weight(columns: int, inner: int, whole: int) -> Tensor:
        """whole: the inner size of all ranks."""
        made: Tensor = torch.randn(columns, inner, **options).mul_(whole**-0.5)  # type: ignore[call-overload]
        return made.t()

    layers = [
        Layer(
            qkv=weight((part.heads + 2 * part.kv_heads) * sizes.head, sizes.hidden, sizes.hidden),
            out=weight(sizes.hidden, part.heads * sizes.head, sizes.heads * sizes.head),
            up=weight(2 * part.width, sizes.hidden, sizes.hidden),
            down=weight(sizes.hidden, part.width, sizes.width),
            norm=norms[2 * number + 1],
            next_norm=norms[2 * number + 2],
        )
        for number in range(sizes.layers)
    ]
    return DecodeStep(sizes=part, x=x, norm=norms[0], layers=layers)
