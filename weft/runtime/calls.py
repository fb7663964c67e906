"""A Call is one operator call on one rank: its tensors, a key that finds its program, and the problem that it solves.

Call         the base of all operators' calls
MatmulCall   a matmul and a collective
LookupCall   embedding tables and an exchange
PLAIN        the mode in which calls run

Calls of a collective without a computation are in weft.runtime.collective_calls.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch

from weft.compat.dispatch import autocast_enabled, set_grad_enabled, without_autocast
from weft.core import __version__
from weft.core.problem import (
    ADDENDS,
    COLUMN_OPS,
    EXCHANGES,
    REDUCTIONS,
    ColumnProblem,
    DType,
    LookupProblem,
    Op,
    Problem,
    Scaling,
    split,
)
from weft.core.span import Span
from weft.runtime.bindings import Inputs, Outputs, scales_name

_GATHERED_SCALES, _NORMED_SCALES = scales_name("gathered"), scales_name("normed")
_M: dict[Op, str] = {
    "all_gather_matmul": "rows of a of all ranks together (if ranks have different numbers of rows, pass rows= to the call, "
    "or DTensors to a parallel style, by use_local_output=False of the style before)",
}
"""The name of M in messages, for operators of which each rank passes a part of M."""


@dataclass(kw_only=True, slots=True)
class Call(ABC):
    """A Call is one operator call on one rank.

    The class is not frozen because making a frozen object takes twice as long, and each call makes one.

    op: the operator.
    schedule: the schedule that the caller asked for.
    group: the name of the process group.
    spans: a list that is filled with the time of each step, if given.
    """

    op: Op
    schedule: str
    group: str = field(default="", compare=False)
    spans: list[Span] | None = field(default=None, compare=False)

    def results_of(self, outputs: Outputs) -> list[torch.Tensor]:
        """Return what the operator returns, of the outputs of a call."""
        return outputs["out"]

    @property
    def can_be_bound(self) -> bool:
        """False if a call also does work on the host: it checks indices, or records times. Then it has no BoundCall."""
        return self.spans is None

    @property
    @abstractmethod
    def inputs(self) -> Inputs:
        """The caller's tensors by the names of the schedule's input buffers."""

    @property
    def outputs(self) -> Outputs | None:
        """The caller's tensors for results. None if new ones are allocated."""
        return None

    @property
    def allocated(self) -> Sequence[torch.Tensor]:
        """The same memory as `outputs`, in the shape and dtype that the caller gets, if this call has allocated it."""
        return ()

    @property
    def place_in_symmetric_memory(self) -> Callable[[torch.Tensor], object] | None:
        """The function that returns where peers can write a tensor that is passed for a result, or None if they cannot."""
        return None

    @property
    def reached(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """The tensors of every rank, by rank, for those of the caller's tensors that peers can address."""
        return {}

    @property
    def results(self) -> int:
        """The number of matrices that the result consists of. It is the same on every rank."""
        return 1

    @property
    def invalidated(self) -> Sequence[torch.Tensor]:
        """The caller's tensors that a failure makes invalid."""
        return ()

    @property
    def tried(self) -> bool:
        """True if an autotuning run may repeat the call with new results. It is the same on every rank."""
        return True

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    @abstractmethod
    def share(self) -> int:
        """The one number in which ranks may differ. All ranks must know it to determine the problem."""

    @property
    @abstractmethod
    def key(self) -> tuple[object, ...]:
        """A key that is equal for calls of the same problem on this rank. It is compared at each call, so it must be cheap."""

    @abstractmethod
    def describe(self) -> str:
        """Return what must be equal on every rank, one line each."""

    def describe_with_shares(self, shares: tuple[int, ...]) -> str:
        """Return what is equal on every rank once each rank knows the shares of all."""
        return f"{self.describe()}\nsizes of b: {shares}"

    @abstractmethod
    def problem(self, shares: tuple[int, ...]) -> Problem:
        """Return the problem, given the share of every rank."""

    def refusal(self, shares: Sequence[int]) -> str:
        """Return why the call is impossible with these shares, or "" if it is possible.

        shares: the share of every rank if the ranks have agreed on them, or else only that of this rank.
        """
        return ""

    def sums_nothing(self, shares: tuple[int, ...]) -> bool:
        """Return whether no rank has anything to multiply, so that products are zeros. Then `filled` is run instead."""
        return False

    def filled(self, world_size: int) -> Call:
        """Return a call with the same result that has something to multiply."""
        return self


class ScaledOperands(NamedTuple):
    """ScaledOperands holds the scales of a call with FP8 operands.

    a: the float32 scales of a. None if a is quantised by the schedule.
    bs: the float32 scales of each b.
    scaling: the formats and the recipe.
    output_dtype: the dtype of the result.
    """

    a: torch.Tensor | None
    bs: Sequence[torch.Tensor]
    scaling: Scaling
    output_dtype: torch.dtype

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for calls of the same problem."""
        return self.scaling, self.output_dtype, *[one.shape for one in self.bs]

    def describe(self) -> str:
        """Return what must be equal on every rank, one line each."""
        scaling = self.scaling
        return (
            f"dtype of b: {scaling.b}\nscale recipe: {scaling.recipe}\nuse_fast_accum: {scaling.use_fast_accum}\n"
            f"output_dtype: {self.output_dtype}\na is quantised: {scaling.quantises}\n"
        )


@dataclass(kw_only=True, slots=True)
class MatmulCall(Call):
    """A MatmulCall is a call of a matmul and a collective.

    rows: the whole M. For an all-to-all it is the number of rows of a.
    more: further factors a of an operator of REDUCTIONS. Its result is the sum of the products of each a with its b.
    extras: further inputs by name, one matrix each.
    scales: the scales and the dtype of the result, for FP8 operands.
    norm_eps, norm_recipe, residual_sharded: as in weft.core.problem.Problem; extras then have norm_weight.
    weight_gradients, x: as in weft.core.problem.Problem. Results are then also the gradients, one [columns of a, N] for each a.
    """

    a: torch.Tensor
    bs: Sequence[torch.Tensor]
    rows: int
    row_multiple: int
    return_gathered: bool = False
    reduce_op: Literal["sum", "avg"] = "sum"
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)
    scales: ScaledOperands | None = None
    more: Sequence[torch.Tensor] = ()
    weight_gradients: Literal["", "whole", "shard"] = ""
    x: torch.Tensor | None = None
    norm_eps: float | None = None
    norm_recipe: Literal["", "rowwise", "blockwise"] = ""
    residual_sharded: bool = False

    def results_of(self, outputs: Outputs) -> list[torch.Tensor]:
        """Return the products, after their norm and its scales if there are any; then, if requested, the gathered rows and
        their scales, or the gradients of weights."""
        gathered = outputs.get("gathered", []) + outputs.get(_GATHERED_SCALES, [])
        normed = [] if self.norm_eps is None else normed_of(outputs)
        return normed + outputs["out"] + gathered + outputs.get("gradients", [])

    @property
    def inputs(self) -> Inputs:
        found: dict[str, Sequence[torch.Tensor]] = {"a": (self.a, *self.more), "b": self.bs}
        for name, tensor in self.extras.items():
            found[name] = (tensor,)
        if self.x is not None:
            found["x"] = (self.x,)
        if self.scales is not None:
            if self.scales.a is not None:
                found[scales_name("a")] = (self.scales.a,)
            found[scales_name("b")] = self.scales.bs
        return found

    @property
    def results(self) -> int:
        return 1 if self.more else len(self.bs)

    @property
    def device(self) -> torch.device:
        return self.a.device

    @property
    def share(self) -> int:
        """This rank's part of b's sharded dimension. For an all-to-all it is N."""
        if self.more:
            return sum(b.shape[0] for b in self.bs)
        if self.op in REDUCTIONS:
            return int(self.bs[0].shape[0])
        return int(self.bs[0].shape[1]) if len(self.bs) == 1 else sum(b.shape[1] for b in self.bs)

    @property
    def key(self) -> tuple[object, ...]:
        a, shapes = self.a, tuple([b.shape for b in self.bs])
        fixed = (self.op, self.rows, self.row_multiple, self.schedule, self.return_gathered, self.reduce_op)
        scaled = None if self.scales is None else self.scales.key
        summed = len(self.more), self.weight_gradients, self.norm_eps, self.norm_recipe, self.residual_sharded
        return (fixed, a.shape, a.dtype, a.get_device(), shapes, scaled, summed, *self.extras)

    def describe(self) -> str:
        k, n = f"K: {self.a.shape[1]}", f"N: {self.bs[0].shape[1]}"
        common = n if self.op in REDUCTIONS else k if self.op == "all_gather_matmul" else f"{k}, {n}"
        extras = "".join([f"with {name}: yes\n" for name in self.extras])
        scaled = "" if self.scales is None else self.scales.describe()
        summed = "their products are added up: yes\n" if self.more else ""
        summed += f"gradients of weights, x {self.weight_gradients}: yes\n" if self.weight_gradients else ""
        if self.norm_eps is not None:
            summed += f"eps: {self.norm_eps!r}\nscale recipe of the norm: {self.norm_recipe or 'none'}\n"
            summed += f"residual_sharded: {self.residual_sharded}\n"
        return (
            f"op: {self.op}\n{_M.get(self.op, 'M')}: {self.rows}\nrow_multiple: {self.row_multiple}\n{common}\n"
            f"number of b: {len(self.bs)}\n{summed}"
            f"dtype: {self.a.dtype}\n{scaled}device: {self.a.device.type}\nschedule: {self.schedule}\n"
            f"return_gathered: {self.return_gathered}\nreduce_op: {self.reduce_op}\n{extras}weft: {__version__}"
        )

    def sums_nothing(self, shares: tuple[int, ...]) -> bool:
        return not (sum(shares) if self.op in REDUCTIONS else self.bs[0].shape[0])

    def filled(self, world_size: int) -> MatmulCall:
        """Return the call with a column of zeros in a, and rows of zeros in b."""
        rows = world_size if self.op == "all_to_all_columns_matmul" else 1
        bs = [b.new_zeros(rows, b.shape[1]) for b in self.bs]
        more = [a.new_zeros(a.shape[0], 1) for a in self.more]
        return replace(self, a=self.a.new_zeros(self.a.shape[0], 1), bs=bs, more=more)

    def problem(self, shares: tuple[int, ...]) -> Problem:
        if not any(shares):
            shares = (self.share,) * len(shares)  # `filled` has replaced empty shares on all ranks
        total = sum(shares)
        if self.op in COLUMN_OPS:
            return self._column_problem(len(shares))
        equal = self.op in EXCHANGES or shares.count(shares[0]) == len(shares)
        regular = equal or tuple(high - low for low, high in split(total, len(shares))) == shares
        return Problem(
            op=self.op,
            m=self.rows,
            n=total if self.op == "all_gather_matmul" else int(self.bs[0].shape[1]),
            k=total if self.op in REDUCTIONS else int(self.a.shape[1]),
            world_size=len(shares),
            dtype=_name(self.a.dtype if self.scales is None else self.scales.output_dtype),  # type: ignore[arg-type]
            scaling=None if self.scales is None else self.scales.scaling,
            return_gathered=self.return_gathered,
            reduce_op=self.reduce_op,
            row_multiple=self.row_multiple,
            b_sizes=() if regular else shares,
            addends=tuple(name for name in ADDENDS if name in self.extras),
            norm_eps=self.norm_eps,
            norm_recipe=self.norm_recipe,
            residual_sharded=self.residual_sharded,
            products=1 + len(self.more),
            weight_gradients=self.weight_gradients,
        )

    def _column_problem(self, world_size: int) -> ColumnProblem:
        k, n = self.bs[0].shape
        return ColumnProblem(
            op=self.op,
            m=self.rows,
            n=n,
            k=k,
            world_size=world_size,
            dtype=_name(self.a.dtype),  # type: ignore[arg-type]
            return_gathered=self.return_gathered,
        )


def normed_of(outputs: Outputs) -> list[torch.Tensor]:
    """Return the norm and its scales, if there are any."""
    return outputs.get("normed", []) + outputs.get(_NORMED_SCALES, [])


def matmul_call(
    op: Op, a: torch.Tensor, bs: Sequence[torch.Tensor], group: str, schedule: str, *, rows: int, unit: int = 1, **more: Any
) -> MatmulCall:
    """Return a MatmulCall. unit: its row_multiple."""
    return MatmulCall(op=op, a=a, bs=bs, group=group, schedule=schedule, rows=rows, row_multiple=unit, **more)


@dataclass(kw_only=True, slots=True)
class LookupCall(Call):
    """A LookupCall is a call of embedding tables and an exchange.

    dims: the columns of the tables of each rank.
    indices, offsets, weights: the arguments of weft.kernels.lookup.lookup.
    pooling: the number of rows in a bag that predictions assume.
    check: raises an error for wrong indices or offsets, once the lookup has been enqueued. None for no check.
    """

    tables: Sequence[torch.Tensor]
    indices: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None
    batch: int
    dims: tuple[tuple[int, ...], ...]
    mode: Literal["sum", "mean"]
    dtype: torch.dtype
    pooling: int
    check: Callable[[], None] | None = None

    def results_of(self, outputs: Outputs) -> list[torch.Tensor]:
        if self.check is not None:
            self.check()
        return outputs["out"]

    @property
    def can_be_bound(self) -> bool:
        return self.check is None and self.spans is None

    @property
    def inputs(self) -> Inputs:
        found = {"tables": self.tables, "indices": (self.indices,), "offsets": (self.offsets,)}
        return found if self.weights is None else {**found, "weights": (self.weights,)}

    @property
    def device(self) -> torch.device:
        return self.indices.device

    @property
    def share(self) -> int:
        """Always 0, because `dims` contains everything in which ranks may differ."""
        return 0

    @property
    def key(self) -> tuple[object, ...]:
        fixed = (self.op, self.batch, self.dims, self.mode, self.dtype, self.pooling, self.schedule)
        return (*fixed, self.device, self.weights is None)

    def describe(self) -> str:
        lines = (
            f"op: {self.op}",
            f"batch: {self.batch}",
            *(f"dims of rank {rank}: {_dims(own)}" for rank, own in enumerate(self.dims)),
            f"mode: {self.mode}",
            f"pooling: {self.pooling}",
            f"dtype: {self.dtype}",
            f"per_sample_weights: {'no' if self.weights is None else 'yes'}",
            f"device: {self.device.type}",
            f"schedule: {self.schedule}",
            f"weft: {__version__}",
        )
        return "\n".join(lines)

    def problem(self, shares: tuple[int, ...]) -> Problem:
        dtype: DType = _name(self.dtype)  # type: ignore[assignment]
        return LookupProblem.of(batch=self.batch, dims=self.dims, pooling=self.pooling, mode=self.mode, dtype=dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dims(own: tuple[int, ...]) -> str:
    """
    >>> _dims((128, 128, 64))
    '2 x 128, 1 x 64'
    """
    return ", ".join(f"{len(list(same))} x {dim}" for dim, same in groupby(own)) or "no tables"


class PlainMode(threading.local):
    """PlainMode is the mode in which calls run: without inference mode, gradients and autocast.

    The compute lane runs on the caller's thread, whose autocast would round what is summed in float32. torch's contexts take
    about 20 us of a call, so those of inference mode and autocast are entered only if they are on. PlainMode is reentrant. If
    entering or leaving raises an error, the modes that were entered are left.
    """

    def __init__(self) -> None:
        self._entered: list[tuple[bool, ExitStack | None]] = []
        """For each time that this thread has entered: whether gradients were recorded, and torch's contexts."""

    def __enter__(self) -> None:
        contexts: ExitStack | None = None
        if autocast_enabled() or torch.is_inference_mode_enabled():
            with ExitStack() as entering:
                if autocast_enabled():
                    entering.enter_context(without_autocast())
                if torch.is_inference_mode_enabled():
                    entering.enter_context(torch.inference_mode(False))
                contexts = entering.pop_all()
        self._entered.append((torch.is_grad_enabled(), contexts))
        set_grad_enabled(False)

    def __exit__(self, *raised: object) -> None:
        grad, contexts = self._entered.pop()
        set_grad_enabled(grad)
        if contexts is not None:
            contexts.close()


PLAIN = PlainMode()
