"""Matmuls of groups of rows, for which torch 2.11 has a private name alone."""

from __future__ import annotations

import torch


def grouped_mm(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The product of each group of a's columns and b's rows: [groups, K, N] of a [K, rows] and b [rows, N], in bfloat16.

    ends: where each group ends, on the device. Rows past the last end are in no group, and are not read. On GPUs a and b begin
    at multiples of 16 bytes.
    """
    return torch._grouped_mm(a, b, offs=ends.to(torch.int32))
