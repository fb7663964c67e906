"""The embedding of a model, sharded by the vocabulary.

    rank r has the rows [r * size, (r + 1) * size) of the weight, as torch.chunk cuts it
    ids [B, S]  -->  rows of its own, and zeros for the other ids  -->  [B, S, H], the sum over the ranks

The output is whole on every rank, and so is its gradient. Parameters and checkpoints are those of torch's RowwiseParallel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from weft.compat.dispatch import all_reduced
from weft.models.linear import Distributor
from weft.models.parameters import group_of, keep_parts, part_of
from weft.ops.parts import with_summed_double_gradient
from weft.runtime.groups import GROUPS

Tensor = torch.Tensor


class VocabularyEmbedding(nn.Embedding):
    """An embedding of which each rank has a part of the rows. _weft_rows: the number of rows of all ranks."""

    _weft_rows: int

    def forward(self, input: Tensor) -> Tensor:
        eager = not torch.compiler.is_compiling()
        part, group = part_of(self, "weight", eager=eager), group_of(self, eager=eager)
        ids = input - group.rank() * -(-self._weft_rows // group.size())
        found: Tensor = _LookUp.apply(part, ids, group.group_name)  # type: ignore[no-untyped-call]
        return found


class _LookUp(torch.autograd.Function):
    """Looks up the ids in [0, part.shape[0]), which are this rank's, and sums over ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ids: Tensor, group: str) -> Tensor:
        ctx.group, ctx.rows = group, part.shape[0]
        table = part if ctx.rows else part.new_zeros(1, part.shape[1])
        own = ids.clamp(0, table.shape[0] - 1)
        others = (own != ids).unsqueeze(-1)
        ctx.save_for_backward(own, others)
        return all_reduced(torch.embedding(table, own).masked_fill_(others, 0), group, GROUPS.await_work, own=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        own, others = ctx.saved_tensors
        grad = with_summed_double_gradient(grads[0], ctx.group).masked_fill(others, 0)
        found = torch.ops.aten.embedding_dense_backward(grad, own, max(ctx.rows, 1), -1, False)
        return found if ctx.rows else found[:0], None, None


def shard_embedding(embedding: nn.Embedding, distribute: Distributor) -> None:
    """Shard an embedding by the vocabulary."""
    embedding.__dict__["_weft_rows"] = embedding.weight.shape[0]
    embedding.register_parameter("weight", distribute(embedding.weight, Shard(0)))
    keep_parts(embedding, "weight")
    embedding.__class__ = VocabularyEmbedding


def why_not_embedding(embedding: nn.Module) -> str:
    """Return why an embedding runs whole on every rank, or "" if it can be sharded by the vocabulary."""
    if type(embedding) is not nn.Embedding:
        return f"{type(embedding).__name__} is no torch.nn.Embedding"
    if embedding.padding_idx is not None or embedding.max_norm is not None:
        return "it has padding_idx or max_norm"
    if embedding.scale_grad_by_freq or embedding.sparse:
        return "it has scale_grad_by_freq or sparse gradients"
    if "forward" in embedding.__dict__:
        return "its forward was put on the module itself"
    return ""
