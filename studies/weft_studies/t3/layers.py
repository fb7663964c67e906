"""This module computes the time of a transformer layer outside the sub-layers that T3 fuses. The end-to-end figures need it.

With T tokens, hidden size H, sequences of L tokens, A heads and N ranks, each rank does the following work in a layer. Each
GEMM runs on all units.

| | forward | backward |
| --- | --- | --- |
| GEMMs | T x 3H/N x H, T x 4H/N x H | the inputs of OP and FC2: T x H/N x H, T x 4H/N x H; four weights, K = T |
| attention, T A / N rows | rows x L x H/A, rows x H/A x L | one of the first kind, three of the second |
| passes over T x H | 10 (two norms, two biases with dropout and residual) | 16 |
| passes over T x 4H/N (GeLU) | 2 | 3 |
| passes over T A / N x L (softmax, dropout) | 4 | 5 |
| optimizer | | 28 bytes for each of 12 H H / N weights (Adam, mixed precision) |

A pass reads or writes its elements once at the memory's rate. The layer is that of Megatron-LM, arXiv 1909.08053. The passes
are those of unfused kernels, which read each input once and write each output once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from weft_studies.t3.configurations import gemm_alone
from weft_studies.t3.system import T3System
from weft_studies.t3.work import ITEMSIZE, Layer, LayerGemm, Transformer

Phase = Literal["forward", "backward"]
PHASE: dict[Layer, Phase] = {"OP": "forward", "FC2": "forward", "FC1": "backward", "IP": "backward"}
HIDDEN_PASSES: dict[Phase, int] = {"forward": 10, "backward": 16}
GELU_PASSES: dict[Phase, int] = {"forward": 2, "backward": 3}
SCORE_PASSES: dict[Phase, int] = {"forward": 4, "backward": 5}
OPTIMIZER_BYTES = 28


def other_ns(system: T3System, model: Transformer, world_size: int, phase: Phase) -> int:
    """Return one layer's time for one batch without the four sub-layers that end in an all-reduce.

    The backward phase includes the optimizer."""
    gemms = sum(gemm_alone(system, gemm).ns for gemm in _gemms(model, world_size, phase))
    return gemms + round(_moved(model, world_size, phase) / system.hbm.gbps)


def _gemms(model: Transformer, world_size: int, phase: Phase) -> Iterator[LayerGemm]:
    tokens, hidden, rows = model.tokens, model.hidden, model.tokens * model.heads // world_size
    head = hidden // model.heads
    wide, narrow = 4 * hidden // world_size, hidden // world_size
    scores = LayerGemm(name="scores", m=rows, n=model.sequence, k=head)
    values = LayerGemm(name="values", m=rows, n=head, k=model.sequence)
    if phase == "forward":
        yield LayerGemm(name="IP", m=tokens, n=3 * hidden // world_size, k=hidden)
        yield LayerGemm(name="FC1", m=tokens, n=wide, k=hidden)
        yield from (scores, values)
        return
    yield LayerGemm(name="OP input", m=tokens, n=narrow, k=hidden)
    yield LayerGemm(name="FC2 input", m=tokens, n=wide, k=hidden)
    for name, cols in (("IP", 3 * hidden // world_size), ("OP", narrow), ("FC1", wide), ("FC2", wide)):
        yield LayerGemm(name=f"{name} weight", m=hidden, n=cols, k=tokens)
    yield from (scores, values, values, values)


def _moved(model: Transformer, world_size: int, phase: Phase) -> int:
    """Return the bytes that elementwise kernels and the optimizer read and write."""
    tokens, hidden = model.tokens, model.hidden
    passes = HIDDEN_PASSES[phase] * tokens * hidden
    passes += GELU_PASSES[phase] * tokens * 4 * hidden // world_size
    passes += SCORE_PASSES[phase] * tokens * model.heads * model.sequence // world_size
    weights = 12 * hidden * hidden // world_size if phase == "backward" else 0
    return passes * ITEMSIZE + weights * OPTIMIZER_BYTES
