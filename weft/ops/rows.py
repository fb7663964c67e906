"""Tensors of several dimensions as matrices: [entries, ..., K] has a row for each entry and each of its middle dimensions."""

from __future__ import annotations

import torch


def per_entry(a: torch.Tensor) -> int:
    """Rows for one entry of the first dimension. 0 for an empty batch, which ranks nevertheless call with, as one matrix
    without rows."""
    rows = 1
    for extent in a.shape[1:-1]:
        rows *= extent
    return rows


def flat(a: torch.Tensor) -> torch.Tensor:
    """The matrix."""
    return a.reshape(a.shape[0] * per_entry(a), a.shape[-1]) if a.dim() > 2 else a
