"""The floating-point operations of weft's operators, as torch.utils.flop_counter counts them.

An operator's number is that of the products which this rank computes, with 2 for a multiplication and an addition, whatever the
schedule. Operators that are not listed do not multiply matrices. A backward calls operators that are listed, and torch's own.
With splits, the rows that there are count. While a graph is traced or captured, nobody knows them, and the rows for which there
is room count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weft.compat.dispatch import Formula, number_of

Tensor = torch.Tensor


def _of_own_rows(out: Any, a: Tensor, b: Tensor, *_: Any) -> Any:
    """This rank's rows are multiplied, and their product is exchanged."""
    return 2 * a.shape[0] * b.shape[0] * b.shape[1]


def _of_added_up(out: Any, factors: Sequence[Tensor], bs: Sequence[Tensor], *_: Any) -> Any:
    return sum(_of_own_rows(out, a, b) for a, b in zip(factors, bs, strict=True))


def _of_both_gradients(out: Any, factors: Sequence[Tensor], bs: Sequence[Tensor], *_: Any) -> Any:
    return 2 * _of_added_up(out, factors, bs)


def _of_arriving_rows(out: Sequence[Tensor], a: Tensor, b: Tensor, *_: Any) -> Any:
    """Rows are exchanged, and then multiplied."""
    return 2 * out[0].shape[0] * b.shape[0] * b.shape[1]


def _of_several(out: Sequence[Tensor], a: Tensor, bs: Sequence[Tensor], *_: Any) -> Any:
    return sum(2 * one.shape[0] * b.shape[0] * b.shape[1] for one, b in zip(out, bs, strict=False))


def _of_weights(out: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], *_: Any) -> Any:
    return sum(2 * one.numel() * weight.shape[1] for one, weight in zip(out, weights, strict=True))


def _of_sent(out: Any, a: Tensor, b: Tensor, splits: Tensor, *_: Any) -> Any:
    return 2 * number_of(splits, a.shape[0]) * b.shape[1] * b.shape[2]


def _of_received(out: Sequence[Tensor], a: Tensor, b: Tensor, *_: Any) -> Any:
    return 2 * number_of(out[1], out[0].shape[0]) * b.shape[1] * b.shape[2]


FORMULAS: Mapping[str, Formula] = {
    "all_gather_matmul": _of_several,
    "all_gather_matmul_backward": _of_both_gradients,
    "matmul_reduce_scatter": _of_added_up,
    "matmul_all_reduce": _of_added_up,
    "matmul_all_reduce_norm": _of_added_up,
    "matmul_all_to_all": _of_own_rows,
    "all_to_all_matmul": _of_arriving_rows,
    "matmul_all_to_all_columns": _of_own_rows,
    "all_to_all_columns_matmul": _of_arriving_rows,
    "linears_of_whole": _of_weights,
    "quantised_linears": _of_weights,
    "ragged_matmul_all_to_all": _of_sent,
    "ragged_all_to_all_matmul": _of_received,
    "ragged_all_to_all_gated": _of_received,
}
"""By operator, the operations of its forward."""
