"""Optimizers that a lookup's backward applies to its tables at once, row by row, without a gradient in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from weft.compat.dispatch import graph_break


@dataclass(kw_only=True)
class SGD:
    """row -= lr * gradient. Raises ValueError for a rate below 0."""

    KIND: ClassVar[str] = "sgd"
    lr: float
    eps: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        _check_rate("lr", self.lr)

    def states_of(self, tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """It keeps none."""
        return []


@dataclass(kw_only=True)
class RowwiseAdagrad:
    """state += mean(gradient^2) of the row; row -= lr * gradient / (sqrt(state) + eps).

    states: float32 [rows], one for each table, made as zeros at the first use; yours to save and load. One value for each set
    of tables. Call states_of(tables) before a compiled function, whose graph would break to make them. Raises ValueError for a
    rate or eps below 0, and where the states are not those of the tables.
    """

    KIND: ClassVar[str] = "rowwise_adagrad"
    lr: float
    eps: float = 1e-8
    states: list[torch.Tensor] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        _check_rate("lr", self.lr)
        _check_rate("eps", self.eps)

    def states_of(self, tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The states of these tables."""
        if tables and not self.states:
            if torch.compiler.is_compiling():
                # A graph that both makes states and changes them in its backward is refused by torch's partitioner.
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
    with torch.inference_mode(False):  # else no backward could change them
        return [torch.zeros(t.shape[0], dtype=torch.float32, device=t.device) for t in tables]


Optimizer = SGD | RowwiseAdagrad


def _check_rate(name: str, value: float) -> None:
    if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be a number of at least 0, and finite")
