"""The hooks and modules of a decoder that record the layout of its tokens, or change it by the methods of DecoderTokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch import nn

from weft.models.decoder_tokens import DecoderTokens, first_of
from weft.models.linear import change_input
from weft.ops.parts import cut, gathered

Tensor = torch.Tensor


def length_of_positions(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int) -> int:
    """Return the number of tokens of all ranks in a decoder layer's call.

    position: the index of position_embeddings among the arguments.
    """
    cosine = (kwargs["position_embeddings"] if "position_embeddings" in kwargs else args[position])[0]
    found: int = cosine.shape[-2]
    return found


@cache
def noting_tokens(cls: type[Any], position: int) -> type[Any]:
    """Return a decoder layer's class that records the layout of its input's tokens. The positions give their number.

    The class overrides forward, because checkpoints may recompute it without the hooks.
    position: the index of position_embeddings among the arguments of forward.
    """

    @wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        tokens: DecoderTokens = self._weft_tokens
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        tokens.note(hidden, length_of_positions(args, kwargs, position))
        before, tokens.running = tokens.running, True
        try:
            return cls.forward(self, *args, **kwargs)
        finally:
            tokens.running = before

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


@cache
def placed(cls: type[Any]) -> type[Any]:
    """Return a class like `cls`, a norm of a layer, that has the layout of its tokens even if it is recomputed alone."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return cls.forward(self, self._weft_tokens.placed(hidden_states), *args, **kwargs)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


@dataclass(frozen=True)
class CutIfMany:
    """A pre-hook that cuts the first layer's input if it has many tokens.

    A layer may run several times. Its input of a later run has been cut already, and does not change.

    position: the index of position_embeddings among the arguments of the layer's forward.
    """

    tokens: DecoderTokens
    position: int

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        total = length_of_positions(args, kwargs, self.position)
        return change_input(module, args, kwargs, "hidden_states", lambda x: self.tokens.cut_if_many(x, total))


@cache
def evenly(cls: type[Any]) -> type[Any]:
    """Return a class like `cls`, a block that needs as many tokens on each rank (ExpertParallel's).

    Each rank passes the block an equal part of all tokens. The last ranks pad theirs with zeros, whose results are dropped.
    """

    def forward(self: Any, hidden_states: Tensor) -> Any:
        mesh, total = self._weft_mesh, self._weft_tokens.total
        if total is not None:
            own = hidden_states.shape[1]
            out = cls.forward(self, _filled(hidden_states, -(-total // mesh.size())))
            return first_of(out, lambda y: y[:, :own])
        rows = hidden_states.reshape(1, -1, hidden_states.shape[-1])
        count = mesh.size() * -(-rows.shape[1] // mesh.size())
        group = mesh.get_group()
        out = cls.forward(self, cut(_filled(rows, count), group, 1))
        return first_of(out, lambda y: gathered(y, group, 1, count)[:, : rows.shape[1]].view(hidden_states.shape))

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def _filled(x: Tensor, tokens: int) -> Tensor:
    return nn.functional.pad(x, (0, 0, 0, tokens - x.shape[1]))
