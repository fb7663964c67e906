"""A graph's results keep their strides, whatever its operators became: callers, and autograd's own views of them, rely on that.

Inductor sees to this by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph

Strides = tuple[int, ...] | None


def strides_of_outputs(graph: Graph) -> list[Strides]:
    """Of each result, by its example; None for what is no tensor, or has strides that are not known."""
    found = [getattr(node, "meta", {}).get("val") for node in graph.output_node().args[0]]  # type: ignore[union-attr]
    return [_known(one) for one in found]


def _known(one: object) -> Strides:
    if not isinstance(one, torch.Tensor) or one.layout is not torch.strided:
        return None
    strides = tuple(one.stride())
    return strides if all(isinstance(stride, int) for stride in strides) else None


def laid_by(strides: Sequence[Strides], outs: Sequence[Any]) -> list[Any]:
    """Results with these strides: those that lie otherwise in memory are copied."""
    return [_laid(out, wanted) for out, wanted in zip(outs, strides, strict=True)]


def _laid(out: Any, wanted: Strides) -> Any:
    if wanted is None or _alike(out, wanted):
        return out
    return torch.empty_strided(out.shape, wanted, dtype=out.dtype, device=out.device).copy_(out)


def _alike(out: torch.Tensor, wanted: Sequence[int]) -> bool:
    return all(one == two for one, two, extent in zip(out.stride(), wanted, out.shape, strict=True) if extent > 1)
