"""Work: the GEMMs of a transformer whose output is reduced over all ranks, as T3 evaluates them.

A layer that is cut over N ranks ends four of its GEMMs with an all-reduce, which T3 takes as a reduce-scatter, fused with the
GEMM, and an all-gather. With hidden size H all have M = tokens, N = H and

    OP   attention's output projection, forward      K =     H / ranks
    FC2  the MLP's second matmul, forward            K = 4 * H / ranks
    FC1  gradient to the MLP's input, backward       K = 4 * H / ranks
    IP   gradient to attention's input, backward     K = 3 * H / ranks

Source: T3, arXiv 2401.16677, section 5 (models, ranks). Tokens are 16 x 1024, 8 x 1024, and for the large models 2 x 1024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

ITEMSIZE = 2
Layer = Literal["OP", "FC2", "FC1", "IP"]
LAYERS: tuple[Layer, ...] = get_args(Layer)
FACTOR: dict[Layer, int] = {"OP": 1, "FC2": 4, "FC1": 4, "IP": 3}


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A transformer: hidden size, and tokens of a batch. heads: of attention, for the work between its GEMMs."""

    name: str
    hidden: int
    tokens: int
    heads: int
    sequence: int = 1024


@dataclass(frozen=True, kw_only=True)
class LayerGemm:
    """M x N x K in half precision, on one GPU. name: for people."""

    name: str
    m: int
    n: int
    k: int

    def __post_init__(self) -> None:
        for axis in ("m", "n", "k"):
            if getattr(self, axis) < 1:
                raise ValueError(f"{axis} is {getattr(self, axis)}; a GEMM needs at least 1")

    @property
    def out_bytes(self) -> int:
        return self.m * self.n * ITEMSIZE

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True, kw_only=True)
class SubLayer:
    """One of a model's GEMMs with its all-reduce, on `world_size` GPUs."""

    model: Transformer
    layer: Layer
    world_size: int

    @property
    def name(self) -> str:
        return f"{self.model.name} TP{self.world_size} {self.layer}"

    @property
    def gemm(self) -> LayerGemm:
        """One rank's part. Raises ValueError if there are more ranks than columns."""
        model = self.model
        return LayerGemm(name=self.name, m=model.tokens, n=model.hidden, k=FACTOR[self.layer] * model.hidden // self.world_size)


MEGA_GPT2 = Transformer(name="Mega-GPT-2", hidden=3072, tokens=16 * 1024, heads=32)
T_NLG = Transformer(name="T-NLG", hidden=4256, tokens=8 * 1024, heads=28)
LARGE = (
    Transformer(name="GPT-3", hidden=12288, tokens=2 * 1024, heads=96),
    Transformer(name="PALM", hidden=18432, tokens=2 * 1024, heads=48),
    Transformer(name="MT-NLG", hidden=20480, tokens=2 * 1024, heads=128),
)
MODELS = (MEGA_GPT2, T_NLG)
SUBLAYERS = tuple(SubLayer(model=m, layer=layer, world_size=n) for m in MODELS for n in (8, 16) for layer in LAYERS)
LARGE_SUBLAYERS = tuple(SubLayer(model=m, layer=layer, world_size=32) for m in LARGE for layer in LAYERS)
