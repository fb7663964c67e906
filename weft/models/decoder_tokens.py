"""Tracks the layout of a decoder's tokens while its parts run, changes it, and finds it again for parts that are recomputed
alone. DecoderTokens has the layout; the hooks and modules after it record it, or change it by its methods.

    x [B, S, H] whole    --cut-->        x [B, s, H], this rank's, as torch.chunk cuts S        backward: gathered
    x [B, s, H]          --gathered-->   x [B, S, H]                                            backward: cut

A whole tensor is the same on every rank, and so is its gradient.

The positions that a layer's forward receives give the number of tokens, which the parts of the layer read. But an activation
checkpoint may recompute only a norm, an MLP or an attention in the backward pass, which receives no positions:

    all forwards had as many tokens    that number is used
    otherwise                          the ranks exchange the numbers of tokens of the part's input. Their sum may be wrong,
                                       because few tokens are whole on every rank, so earlier calls decide in that case
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from weft.compat.dispatch import NO_BACKWARD, all_reduced, backward_pass
from weft.models.linear import Distributor, Tokens, change_input
from weft.models.norms import deferring_linears
from weft.models.parameters import group_of, keep_parts, part_of
from weft.ops.parts import cut, gathered, with_summed_double_gradient, with_summed_gradient
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
    """Looks up the ids in [0, part.shape[0]), which are this rank's, and sums over ranks.

    rank r has the rows [r * size, (r + 1) * size) of the weight, as torch.chunk cuts it
    ids [B, S]  -->  rows of its own, and zeros for the other ids  -->  [B, S, H], the sum over the ranks

    The output is whole on every rank, and so is its gradient. Parameters and checkpoints are those of torch's RowwiseParallel.
    """

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


_ALONE = "put the checkpoint around the decoder layer"


def recomputes() -> bool:
    """Return whether a checkpoint calls this from a backward pass. Compiled code cannot find out."""
    return not torch.compiler.is_compiling() and backward_pass() != NO_BACKWARD


def first_of(out: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a module's output with `change` applied to it, or to its first element if it is a tuple."""
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)


@dataclass(kw_only=True)
class DecoderTokens(Tokens):
    """The token layout of one decoder. Its methods are the decoder's hooks, so a copy of the model gets hooks of its own copy.

    open: `total`, or 0, from the start of a forward until its gather at the end. None outside.
    entered: the decoder's own forward runs.
    running: a layer runs.
    several: forwards had different values of `total`.
    _seen: (batch, tokens of each rank, whether these are all tokens) of calls where the last does not follow from the others.
    It is the same on all ranks.
    _task: the backward pass in which a part was recomputed.
    """

    mesh: DeviceMesh
    few_tokens: int
    open: int | None = None
    entered: bool = False
    running: bool = False
    several: bool = False
    _noted: bool = False
    _seen: set[tuple[int, int, bool]] = field(default_factory=set)
    _task: int = -1

    def begin(self, module: Any, args: Any) -> None:
        """Reset the tokens to whole, even if an earlier call ended early. This is a pre-hook of the decoder."""
        self.open, self.entered = 0, True

    def cut_output(self, module: Any, args: Any, out: Any) -> Any:
        """Cut the output of a module that runs whole to this rank's [B, s, H] if tokens are sharded. This is a forward hook."""
        return out if self.total is None else first_of(out, lambda x: cut(x, self.mesh.get_group(), 1))

    def cut_if_many(self, x: torch.Tensor, total: int) -> torch.Tensor:
        """Cut the first layer's input if it has many tokens. total: the number of its tokens on all ranks."""
        batch, length = x.shape[:2]
        return cut(x, self.mesh.get_group(), 1) if self.many(batch, length) and length == total else x

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Gather this rank's [B, s, H] to whole hidden states if tokens are sharded."""
        return x if self.total in (None, x.shape[1]) else gathered(x, self.mesh.get_group(), 1, self.total)

    def gathered_for_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Gather tokens for a block that computes this rank's heads from all tokens. The gradient is summed over ranks."""
        return with_summed_gradient(self.gathered(x), self.mesh.get_group().group_name)

    def gathered_at_end(self, x: torch.Tensor) -> torch.Tensor:
        """Gather at the end of a forward pass. Tokens then stay whole until a layer runs again."""
        total, self.open, self.entered = self.open, None, False
        if total is None and recomputes():
            total = self.of_part(x)
        return gathered(x, self.mesh.get_group(), 1, total) if total else x

    def many(self, batch: int, length: int) -> bool:
        """Return whether a call with `batch` x `length` tokens is cut."""
        return batch * length > self.few_tokens and length >= self.mesh.size() > 1

    def note(self, hidden: torch.Tensor, length: int) -> None:
        """Record the layout of a layer's hidden states. length: the number of their tokens on all ranks."""
        batch, own = hidden.shape[:2]
        total = length if own != length else None
        if torch.compiler.is_compiling():
            self.several = True
        else:
            self.several |= self._noted and total != self.total
            self._noted = True
            if total in (None, self.mesh.size() * own) and not self.many(batch, own):
                self._seen.add((batch, own, total is None))
        self.total = total
        if self.open is not None or not recomputes():  # a layer that is recomputed alone has no final norm to gather
            self.open = total or 0

    def placed(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, the input of a part of a layer, after setting `total` to its value in the part's first call.

        The call is collective if the part is recomputed alone. Raises ValueError on all ranks if the value is unknown.
        """
        if not self.running and recomputes():
            self.total, self._task = self.of_part(x), backward_pass()
        return x

    def of_part(self, x: torch.Tensor) -> int | None:
        """Return the value of `total` in the first call of a part with x, when the part is recomputed alone."""
        if not self.several or self.mesh.size() == 1:
            return self.total
        batch, own = x.shape[:2]
        group = GROUPS.state(self.mesh.get_group().group_name)
        lengths = group.exchange_numbers("tokens of a module that a checkpoint computes again", own)
        if len(set(lengths)) > 1 or self.many(batch, own):
            return sum(lengths)
        whole, part = ((batch, own, kind) in self._seen for kind in (True, False))
        if whole and part:
            raise ValueError(
                f"a module is computed again by a checkpoint of its own, after calls in which {batch} x {own} tokens were all,"
                f" and others in which they were a rank's part: {_ALONE}, or pass few_tokens=0"
            )
        return None if whole else sum(lengths)

    def check(self) -> None:
        if self.several and not self.running and recomputes() and self._task != backward_pass():
            raise ValueError(
                f"a linear is computed again by a checkpoint of its own, after calls of several lengths: {_ALONE}, or its block"
            )


def length_of_positions(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int) -> int:
    """Return the number of tokens of all ranks in a decoder layer's call.

    position: the index of position_embeddings among the arguments.
    """
    cosine = (kwargs["position_embeddings"] if "position_embeddings" in kwargs else args[position])[0]
    found: int = cosine.shape[-2]
    return found


@cache
def noting_tokens(cls: type[Any], position: int) -> type[Any]:
    """Return a decoder layer's class that records the layout of its input's tokens, of which the positions give the number, and
    lets its row linears defer their products (weft.models.norms).

    The class overrides forward, because checkpoints may recompute it without the hooks.
    position: the index of position_embeddings among the arguments of forward.
    """

    @wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        tokens: DecoderTokens = self._weft_tokens
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        tokens.note(hidden, length_of_positions(args, kwargs, position))
        before, tokens.running = tokens.running, True
        whole = not tokens.sharded() and not torch.is_grad_enabled()
        rows = deferring_linears(self, in_decoder=tokens.entered) if whole else []
        for row in rows:
            row._weft_defers = True
        try:
            return cls.forward(self, *args, **kwargs)
        finally:
            tokens.running = before
            for row in rows:
                row._weft_defers = False

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
