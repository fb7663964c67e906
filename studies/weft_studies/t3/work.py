"""This module defines the GEMMs that T3 evaluates: those of a transformer whose output is reduced over all ranks.

In a layer that is sharded over the ranks, four GEMMs end with an all-reduce. T3 splits it into a reduce-scatter, which it fuses
with the GEMM, and an all-gather. With hidden size H, these GEMMs have M = tokens, N = H and

    OP   attention's output projection, forward      K =     H / ranks
    FC2  the MLP's second matmul, forward            K = 4 * H / ranks
    FC1  gradient to the MLP's input, backward       K = 4 * H / ranks
    IP   gradient to attention's input, backward     K = 3 * H / ranks

Source of models and ranks: T3, arXiv 2401.16677, section 5. A batch has 16 x 1024 or 8 x 1024 tokens, or 2 x 1024 in the large
models.
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
    """Transformer is a model. `tokens` counts those of a batch. `heads` sets the work of attention between the GEMMs."""

    name: str
    hidden: int
    tokens: int
    heads: int
    sequence: int = 1024


@dataclass(frozen=True, kw_only=True)
class LayerGemm:
    """LayerGemm is a GEMM of M x N x K in half precision on one GPU. `name` is shown to people."""

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
    """SubLayer is one of a model's GEMMs with its all-reduce, on `world_size` GPUs."""

    model: Transformer
    layer: Layer
    world_size: int

    @property
    def name(self) -> str:
        return f"{self.model.name} TP{self.world_size} {self.layer}"

    @property
    def gemm(self) -> LayerGemm:
        """One rank's part of the GEMM. Raises ValueError if it would be empty because there are too many ranks."""
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
