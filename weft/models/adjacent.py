"""Weights of linears that read one input, side by side in memory: one matmul in a step of decoding, no copy in a backward.

    whole [n, K]    rows of q's weight, then k's, then v's
    the weights     parts of that memory, each a tensor with a storage of its own

With few rows a matmul takes as long as its weights take to be read, and a small one (K and V of grouped queries) hardly longer
than its launch. The gradient of what several linears have read is a product with all of their weights, which otherwise are
copied into one matrix for it (0.7 % of a training step of Llama 3 70B on two H200).

Each weight has its own storage since checkpoints and FSDP take tensors of one storage for one tensor. Whatever gives a weight
other memory (`to`, fully_shard, a checkpoint that is assigned, a copy of the module) ends this, and nothing else changes: the
whole is kept no longer than the weights that lie in it. Weights on the meta device have no place, so do not come to lie so.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

Tensor = torch.Tensor


def fits(weights: Sequence[Tensor]) -> bool:
    """Whether weights can lie side by side."""
    first = weights[0]
    alike = all(w.dtype == first.dtype and w.device == first.device and w.shape[1] == first.shape[1] for w in weights)
    return len(weights) > 1 and alike and not first.is_meta and all(w.numel() > 0 for w in weights)


class Adjacent:
    """Remembers which memory weights were parts of. Copies remember nothing: theirs is other memory."""

    def __init__(self) -> None:
        self._whole: Tensor | None = None

    def lay(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Copies of the weights, side by side."""
        with torch.no_grad():
            self._whole = torch.cat([weight.detach() for weight in weights])
            return [from_dlpack(part) for part in torch.split(self._whole, [len(weight) for weight in weights])]

    def live_with(self, weights: Sequence[Tensor]) -> None:
        """Give up the whole, whose memory is all of theirs, once one of these has gone. That needs no call, of which a compiled
        model has none: what fully_shard wants to free is free before the first step."""
        for weight in weights:
            weakref.finalize(weight, self._forget).atexit = False

    def _forget(self) -> None:
        self._whole = None

    def whole_of(self, weights: Sequence[Tensor]) -> Tensor | None:
        """One matrix of all these weights if they still lie where they were laid; else None, from then on."""
        if self._whole is None or torch.compiler.is_compiling():
            return None
        parts = torch.split(self._whole, [len(weight) for weight in weights]) if self._rows(weights) else ()
        if [_place(part) for part in parts] != [_place(weight) for weight in weights]:
            self._whole = None
        return self._whole

    def _rows(self, weights: Sequence[Tensor]) -> bool:
        return self._whole is not None and len(self._whole) == sum(len(weight) for weight in weights)

    def parts_of(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """The weights as parts of one storage, if they still lie where they were laid; gradients are those of the weights."""
        whole = self.whole_of(weights)
        if whole is None:
            return weights
        found: Sequence[Tensor] = _Parts.apply(whole, *weights)  # type: ignore[no-untyped-call]
        return found

    def __deepcopy__(self, memo: Any) -> Adjacent:
        return Adjacent()

    def __reduce__(self) -> tuple[type[Adjacent], tuple[()]]:
        return Adjacent, ()


def _place(tensor: Tensor) -> tuple[object, ...]:
    return type(tensor), tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


class _Parts(torch.autograd.Function):
    """The rows of a whole, of which the weights are other names."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        parts = torch.split(whole, [len(weight) for weight in weights])
        # One weight that learns does not make the others learn.
        ctx.mark_non_differentiable(*(part for part, needed in zip(parts, ctx.needs_input_grad[1:], strict=True) if not needed))
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *grads
