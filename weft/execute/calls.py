"""One operator call on one rank, before ranks have agreed: its tensors, what it has in common with other calls, its problem.

Call         what GroupState needs of any operator's call
MatmulCall   a matmul and a collective
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from weft.execute.bound import Inputs
from weft.problem import EXCHANGES, REDUCTIONS, Op, Problem, split
from weft.span import Span
from weft.version import __version__


@dataclass(kw_only=True, slots=True)
class Call(ABC):
    """Not frozen: making a frozen one takes twice as long, and one is made each call.

    op: which operator. schedule: what the caller asked for. spans: filled with what ran, if given."""

    op: Op
    schedule: str
    spans: list[Span] | None = field(default=None, compare=False)

    @property
    @abstractmethod
    def inputs(self) -> Inputs:
        """The caller's tensors by the names of the schedule's input buffers."""

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    @abstractmethod
    def share(self) -> int:
        """The one number in which ranks may differ, and which all must know to say what the problem is."""

    @property
    @abstractmethod
    def key(self) -> tuple[object, ...]:
        """What calls alike have in common, on this rank. Compared at each call: cheap."""

    @abstractmethod
    def describe(self) -> str:
        """What every rank must have in common, a line each."""

    @abstractmethod
    def problem(self, shares: tuple[int, ...]) -> Problem:
        """What is to be computed, from the share of every rank."""


@dataclass(kw_only=True, slots=True)
class MatmulCall(Call):
    """rows: of the whole M (of an all-to-all, a's). extras: further inputs by name, a matrix each."""

    a: torch.Tensor
    bs: Sequence[torch.Tensor]
    rows: int
    row_multiple: int
    return_gathered: bool = False
    reduce_op: Literal["sum", "avg"] = "sum"
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def inputs(self) -> Inputs:
        found: dict[str, Sequence[torch.Tensor]] = {"a": (self.a,), "b": self.bs}
        for name, tensor in self.extras.items():
            found[name] = (tensor,)
        return found

    @property
    def device(self) -> torch.device:
        return self.a.device

    @property
    def share(self) -> int:
        """This rank's part of b's sharded dimension; N of an all-to-all."""
        return int(self.bs[0].shape[0]) if self.op in REDUCTIONS else sum(b.shape[1] for b in self.bs)

    @property
    def key(self) -> tuple[object, ...]:
        a, shapes = self.a, tuple([b.shape for b in self.bs])
        fixed = (self.op, self.rows, self.row_multiple, self.schedule, self.return_gathered, self.reduce_op)
        return (fixed, a.shape, a.dtype, a.get_device(), shapes, *self.extras)

    def describe(self) -> str:
        k, n = f"K: {self.a.shape[1]}", f"N: {self.bs[0].shape[1]}"
        common = f"{k}, {n}" if self.op in EXCHANGES else n if self.op in REDUCTIONS else k
        lines = (
            f"op: {self.op}",
            f"M: {self.rows}",
            f"row_multiple: {self.row_multiple}",
            common,
            f"number of b: {len(self.bs)}",
            f"dtype: {self.a.dtype}",
            f"device: {self.a.device.type}",
            f"schedule: {self.schedule}",
            f"return_gathered: {self.return_gathered}",
            f"reduce_op: {self.reduce_op}",
            *(f"with {name}: yes" for name in self.extras),
            f"weft: {__version__}",
        )
        return "\n".join(lines)

    def problem(self, shares: tuple[int, ...]) -> Problem:
        total = sum(shares)
        regular = self.op in EXCHANGES or tuple(high - low for low, high in split(total, len(shares))) == shares
        return Problem(
            op=self.op,
            m=self.rows,
            n=total if self.op == "all_gather_matmul" else int(self.bs[0].shape[1]),
            k=total if self.op in REDUCTIONS else int(self.a.shape[1]),
            world_size=len(shares),
            dtype=str(self.a.dtype).removeprefix("torch."),  # type: ignore[arg-type]
            return_gathered=self.return_gathered,
            reduce_op=self.reduce_op,
            row_multiple=self.row_multiple,
            b_sizes=() if regular else shares,
            addends=tuple(self.extras),  # type: ignore[arg-type]
        )
