"""How a decoder's tokens move between lying whole on every rank and lying in parts, and the modules that note or change it.

    x [B, S, H] whole    --cut-->      x [B, s, H], this rank's, as torch.chunk cuts S        backward: gathered
    x [B, s, H]          --gather-->   x [B, S, H]                                            backward: cut

What is whole is the same on every rank, and so is its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from weft.models.decoder_tokens import DecoderTokens, recomputes
from weft.models.linear import Tokens, gathered, with_input_changed

Tensor = torch.Tensor


def cut(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's part of whole tokens, along dimension 1."""
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.redistribute(mesh, [Shard(1)]).to_local()


def length_of_positions(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int) -> int:
    """How many tokens a decoder layer is called for, of all ranks. position: of position_embeddings among its arguments."""
    cosine = (kwargs["position_embeddings"] if "position_embeddings" in kwargs else args[position])[0]
    found: int = cosine.shape[-2]
    return found


@cache
def noting_tokens(cls: type[Any], position: int) -> type[Any]:
    """A decoder layer's class that notes how the tokens of its input lie: the positions say how many there are. position: of
    position_embeddings among the arguments of forward. In forward, not in a hook: checkpoints may recompute that alone."""

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
    """A class like `cls`, a norm of a layer, that knows how its tokens lie where it is computed again alone, too."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return cls.forward(self, self._weft_tokens.placed(hidden_states), *args, **kwargs)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


@dataclass(frozen=True)
class Sharded:
    """Whether each rank has its part of the tokens."""

    tokens: Tokens

    def __call__(self) -> bool:
        return self.tokens.total is not None


@dataclass(frozen=True)
class Cut:
    """Whole hidden states [B, S, H] to this rank's [B, s, H], where tokens are sharded. Backward: gathered."""

    mesh: DeviceMesh
    tokens: Tokens

    def __call__(self, x: Tensor) -> Tensor:
        return cut(x, self.mesh) if self.tokens.total is not None else x


@dataclass(frozen=True)
class CutIfMany:
    """A pre-hook that cuts the first layer's input: here it is decided. A layer that comes again is given what has been cut,
    which stays. position: as noting_tokens'."""

    tokens: DecoderTokens
    position: int

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        total = length_of_positions(args, kwargs, self.position)
        return with_input_changed(module, args, kwargs, "hidden_states", lambda x: self._cut(total, x))

    def _cut(self, total: int, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        return cut(x, self.tokens.mesh) if self.tokens.many(batch, length) and length == total else x


@dataclass(frozen=True)
class GatherSequence:
    """This rank's [B, s, H] to whole hidden states, where tokens are sharded. Backward: cut. What is whole already stays."""

    mesh: DeviceMesh
    tokens: Tokens

    def __call__(self, x: Tensor) -> Tensor:
        total = self.tokens.total
        return x if total in (None, x.shape[1]) else gathered(x, self.mesh, 1, total)


@dataclass(frozen=True)
class GatheredOnce:
    """As GatherSequence, at the end of a forward: what comes after it is whole, until a layer has run once more."""

    tokens: DecoderTokens

    def __call__(self, x: Tensor) -> Tensor:
        total, self.tokens.open = self.tokens.open, None
        if total is None and recomputes():
            total = self.tokens.of_part(x)
        return gathered(x, self.tokens.mesh, 1, total) if total else x


@dataclass(frozen=True)
class Begun:
    """A pre-hook of the decoder: its tokens are whole, whatever a call that ended early has left."""

    tokens: DecoderTokens

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.tokens.open = 0


@dataclass(frozen=True)
class OfOutput:
    """A hook that changes a module's output, of several the first."""

    change: Callable[[Tensor], Tensor]

    def __call__(self, module: nn.Module, args: Any, out: Any) -> Any:
        return first_of(out, self.change)


@cache
def evenly(cls: type[Any]) -> type[Any]:
    """A class like `cls`, a block that takes and gives as many tokens on each rank (ExpertParallel's): each rank passes it an
    equal part of all tokens, the last ranks' filled up with zeros, whose results are dropped."""

    def forward(self: Any, hidden_states: Tensor) -> Any:
        mesh, total = self._weft_mesh, self._weft_tokens.total
        if total is not None:
            own = hidden_states.shape[1]
            out = cls.forward(self, _filled(hidden_states, -(-total // mesh.size())))
            return first_of(out, lambda y: y[:, :own])
        rows = hidden_states.reshape(1, -1, hidden_states.shape[-1])
        count = mesh.size() * -(-rows.shape[1] // mesh.size())
        out = cls.forward(self, cut(_filled(rows, count), mesh))
        return first_of(out, lambda y: gathered(y, mesh, 1, count)[:, : rows.shape[1]].view(hidden_states.shape))

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def _filled(x: Tensor, tokens: int) -> Tensor:
    return nn.functional.pad(x, (0, 0, 0, tokens - x.shape[1]))


def first_of(out: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A module's output, of several the first, changed."""
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)
