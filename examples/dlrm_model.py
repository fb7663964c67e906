"""DLRM over ranks: tables that lie whole on one rank each, MLPs that every rank has, and batches in parts.

    dense [m, features] ------------------------------> bottom MLP ---+
                                                                      +--> pairwise products --> top MLP --> logits [m]
    indices of this rank's tables, of the whole batch --> lookup -----+
                                  ~embedding_bag_all_to_all~>  [m, tables * dim]

Legend: M the global batch, m a rank's part of it, T tables of all ranks, D their dim. Source: DLRM (arXiv 1906.00091).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.models.embedding_bags import ShardedEmbeddingBags


class DLRM(nn.Module):
    """A recommendation model: logits [m] of this rank's samples.

    dense: how many dense features a sample has. sizes: rows and dim of each table; dims are all the same, D. bottom, top:
    widths of the MLPs' layers; bottom ends in D, top in 1. options: ShardedEmbeddingBags'.

    `bags` updates its own tables; `bottom` and `top` are whole on every rank, the same where ranks have the same seed, and to
    wrap in DistributedDataParallel, say. Raises ValueError for widths that do not fit.
    """

    def __init__(
        self,
        dense: int,
        sizes: Sequence[tuple[int, int]],
        *,
        bottom: Sequence[int],
        top: Sequence[int],
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        dims = {dim for _, dim in sizes}
        if dims != {bottom[-1]} or top[-1] != 1:
            raise ValueError(f"tables have dims {sorted(dims)}, bottom ends in {bottom[-1]}, top in {top[-1]}: use D, D and 1")
        features = len(sizes) + 1
        self.bottom = _mlp([dense, *bottom], last=True, device=device)
        self.top = _mlp([bottom[-1] + features * (features - 1) // 2, *top], last=False, device=device)
        self.bags = ShardedEmbeddingBags(sizes, group, device=device, **options)
        self._ddp_params_and_buffers_to_ignore = [f"bags.{name}" for name in self.bags._ddp_params_and_buffers_to_ignore]

    def forward(self, dense: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """dense: [m, features], this rank's samples. indices, lengths: ShardedEmbeddingBags', of as many samples on each
        rank."""
        return self.logits(dense, self.bags(indices, lengths, batch=dense.shape[0] * self.bags.size))

    def logits(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """[m], from what was looked up, [m, T * D]."""
        below = self.bottom(dense)
        features = torch.cat([below[:, None], pooled.view(below.shape[0], -1, below.shape[1])], 1)
        # Made here: a buffer of a model that was made on meta would be left as memory is.
        low, high = torch.tril_indices(features.shape[1], features.shape[1], -1, device=features.device)
        products = torch.bmm(features, features.transpose(1, 2)).flatten(1).index_select(1, low * features.shape[1] + high)
        logits: torch.Tensor = self.top(torch.cat([below, products], 1)).squeeze(1)
        return logits


def _mlp(widths: Sequence[int], *, last: bool, device: torch.device | str | None) -> nn.Sequential:
    """Linears with ReLU between; last: after the last one, too."""
    layers: list[nn.Module] = []
    for into, out in pairwise(widths):
        layers += [nn.Linear(into, out, device=device), nn.ReLU()]
    return nn.Sequential(*layers if last else layers[:-1])
