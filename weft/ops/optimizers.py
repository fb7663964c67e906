"""A lookup's backward applies these optimizers to its tables row by row, without storing a gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from weft.compat.dispatch import graph_break


@dataclass(kw_only=True)
class SGD:
    """SGD computes row -= lr * gradient. Raises ValueError for a rate below 0."""

    KIND: ClassVar[str] = "sgd"
    lr: float
    eps: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        _check_rate("lr", self.lr)

    def states_of(self, tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return an empty list, because SGD has no states."""
        return []


@dataclass(kw_only=True)
class RowwiseAdagrad:
    """RowwiseAdagrad computes state += mean(gradient^2) of the row, then row -= lr * gradient / (sqrt(state) + eps).

    Use a separate RowwiseAdagrad for each set of tables. Call states_of(tables) before a compiled function, whose graph would
    otherwise break to make the states.

    states: float32 [rows] for each table, made as zeros at the first use. You save and load them.
    Raises ValueError for a rate or eps below 0, and if the states do not fit the tables.
    """

    KIND: ClassVar[str] = "rowwise_adagrad"
    lr: float
    eps: float = 1e-8
    states: list[torch.Tensor] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        _check_rate("lr", self.lr)
        _check_rate("eps", self.eps)

    def states_of(self, tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the states of these tables. The first call makes them."""
        if tables and not self.states:
            if torch.compiler.is_compiling():
                # torch's partitioner refuses a graph that both makes states and changes them in its backward.
                graph_break(_STATELESS)
                self.states = torch.compiler.disable(_zeros)(tables)  # type: ignore[no-untyped-call]
            else:
                self.states = _zeros(tables)
        for at, (state, table) in enumerate(zip(self.states, tables, strict=False)):
            if state.shape != table.shape[:1] or state.dtype != torch.float32 or state.device != table.device:
                have = f"{list(state.shape)} of {state.dtype} on {state.device}"
                raise ValueError(
                    f"optimizer.states[{at}] is {have}; table {at} needs float32 [{table.shape[0]}] on {table.device}"
                )
        if len(self.states) != len(tables):
            raise ValueError(
                f"optimizer.states has {len(self.states)} entries for {len(tables)} tables; use one optimizer each"
            )
        return self.states


_STATELESS = "the optimizer has no states yet; call optimizer.states_of(tables) once, before the compiled function"


def _zeros(tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with torch.inference_mode(False):  # a backward cannot change tensors of inference mode
        return [torch.zeros(t.shape[0], dtype=torch.float32, device=t.device) for t in tables]


Optimizer = SGD | RowwiseAdagrad


def _check_rate(name: str, value: float) -> None:
    if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be a number of at least 0, and finite")
