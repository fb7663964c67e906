"""How a decoder's tokens move between lying whole on every rank and lying in parts, and the modules that note or change it.

    x [B, S, H] whole    --cut-->      x [B, s, H], this rank's, as torch.chunk cuts S        backward: gathered
    x [B, s, H]          --gather-->   x [B, S, H]                                            backward: cut

What is whole is the same on every rank, and so is its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from weft.nn.layouts import as_dtensor
from weft.nn.linear import Tokens

Tensor = torch.Tensor


def cut(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's part of whole tokens, along dimension 1."""
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.redistribute(mesh, [Shard(1)]).to_local()


def gather(x: Tensor, mesh: DeviceMesh, total: int) -> Tensor:
    """All tokens, of which x is this rank's part, along dimension 1."""
    spread = as_dtensor(x, mesh, Shard(1), (x.shape[0], total, *x.shape[2:]))
    # torch 2.11 gathers into what lies otherwise, which a model's own views refuse.
    return spread.redistribute(mesh, [Replicate()]).to_local().contiguous()


@cache
def noting_tokens(cls: type[Any], position: int) -> type[Any]:
    """A decoder layer's class that notes how the tokens of its input lie: the positions say how many there are. position: of
    position_embeddings among the arguments of forward. In forward, not in a hook: checkpoints may recompute that alone."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        cosine = (kwargs["position_embeddings"] if "position_embeddings" in kwargs else args[position])[0]
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        total = cosine.shape[-2]
        self._weft_tokens.total = total if hidden.shape[1] != total else None
        return cls.forward(self, *args, **kwargs)

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
    """As Cut, for the first layer: here it is decided. Each rank of a group that is as long as the sequence has a token."""

    mesh: DeviceMesh
    tokens: Tokens
    few_tokens: int

    def __call__(self, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        many = batch * length > self.few_tokens and length >= self.mesh.size() > 1
        return cut(x, self.mesh) if many else x


@dataclass(frozen=True)
class Gathered:
    """This rank's [B, s, H] to whole hidden states, where tokens are sharded. Backward: cut. What is whole already stays."""

    mesh: DeviceMesh
    tokens: Tokens

    def __call__(self, x: Tensor) -> Tensor:
        total = self.tokens.total
        return x if total in (None, x.shape[1]) else gather(x, self.mesh, total)


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
        return first_of(out, lambda y: gather(y, mesh, count)[:, : rows.shape[1]].view(hidden_states.shape))

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def _filled(x: Tensor, tokens: int) -> Tensor:
    return nn.functional.pad(x, (0, 0, 0, tokens - x.shape[1]))


def first_of(out: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A module's output, of several the first, changed."""
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)
