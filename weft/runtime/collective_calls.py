"""A CollectiveCall is one rank's call of a collective without a computation; an AllReduceCall, of one of whole rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from weft.comm.symmetric_heap import SymmetricPlace
from weft.core import __version__
from weft.core.problem import ADDENDS, ITEMSIZE, CollectiveProblem
from weft.runtime.bindings import Inputs, Outputs
from weft.runtime.bound import DTYPES
from weft.runtime.calls import Call, normed_of

STAGING_BYTES = {"cuda": 1 << 30, "cpu": 1 << 24}
"""The default limit of a rank's symmetric memory for collectives of one size and type. On CPUs it is in /dev/shm, which is
small in containers. On GPUs a smaller limit divides a collective into rounds, and each round ends with a kernel that waits for
SMs while a GEMM runs: on 4 x H200, concurrently with GEMMs of 1080 us, an all_gather of 512 MiB through 256 MiB took 1860 us,
and NCCL's 1612 us."""
_MOST_TRIED_BYTES = 1 << 30
_OF_FREE = 8
"""At most an eighth of a GPU's free memory is used, because `auto` binds several schedules at once."""
_SUMMED = {DTYPES[name]: name for name in ITEMSIZE}
MOST_ELEMENTS = 1 << 30
"""The most elements of a tensor that is summed, because the kernel counts them in 32 bits."""


def check_summed(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError for a tensor that cannot be summed."""
    if tensor.dtype not in _SUMMED:
        raise ValueError(f"{name} is {tensor.dtype}; {op} sums {', '.join(_SUMMED.values())}")
    if tensor.numel() > MOST_ELEMENTS:
        raise ValueError(f"{name} has {tensor.numel()} elements; {op} takes at most {MOST_ELEMENTS}: split it")


def staging_from_environment(device: torch.device) -> int:
    """Return WEFT_STAGING_BYTES, or the device's default. Raises ValueError if it is not a number, or too low."""
    text, least = os.environ.get("WEFT_STAGING_BYTES", str(STAGING_BYTES[device.type])), CollectiveProblem.LEAST_STAGING
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"WEFT_STAGING_BYTES is {text!r}; it must be a whole number of at least {least}")
    return int(text)


def affordable(staging_bytes: int, device: torch.device) -> int:
    """Return `staging_bytes`, or a smaller power of two on a GPU with less free memory."""
    if device.type != "cuda":
        return staging_bytes
    spare = torch.cuda.mem_get_info(device)[0] // _OF_FREE
    if spare >= staging_bytes:
        return staging_bytes
    return max(CollectiveProblem.LEAST_STAGING, 1 << max(0, spare.bit_length() - 1))


def _stageable(schedule: str, staging_bytes: int, device: torch.device) -> int:
    """Return the bytes that this rank can stage, its share of a call. The problem has the least of all ranks. A Schedule value
    fixes the number."""
    return staging_bytes if schedule.startswith("value:") else affordable(staging_bytes, device)


@dataclass(kw_only=True, slots=True)
class CollectiveCall(Call):
    """A CollectiveCall is a call of a collective without a computation.

    a, out: contiguous, and of any dtype if nothing is summed. They may share memory as CollectiveProblem describes.
    fresh: whether the call has allocated out, and returns it.
    reach: where out is stored, if peers can write it.
    find_reach: returns that for another out. None if it makes no difference.
    unit: the dtype as which elements are moved if nothing is summed.
    """

    a: torch.Tensor
    out: torch.Tensor
    staging_bytes: int
    sms: int
    reduce_op: Literal["sum", "avg"] = "sum"
    fresh: bool = False
    reach: SymmetricPlace | None = None
    find_reach: Callable[[torch.Tensor], object] | None = None
    unit: torch.dtype = torch.uint8

    def results_of(self, outputs: Outputs) -> list[torch.Tensor]:
        return [self.out]

    @property
    def allocated(self) -> Sequence[torch.Tensor]:
        return [self.out] if self.fresh else ()

    @property
    def place_in_symmetric_memory(self) -> Callable[[torch.Tensor], object] | None:
        return self.find_reach

    @property
    def inputs(self) -> Inputs:
        return {"a": (self._elements(self.a),)}

    @property
    def outputs(self) -> Outputs:
        return {"out": [self._elements(self.out)]}

    @property
    def reached(self) -> Mapping[str, Sequence[torch.Tensor]]:
        if self.reach is None:
            return {}
        return {"out": [self._elements(tensor.view(self.out.dtype)) for tensor in self.reach.by_rank]}

    @property
    def invalidated(self) -> Sequence[torch.Tensor]:
        """The result, in its own dtype. For an all-gather in place, it excludes this rank's own part."""
        flat = _plain(self.out).view(-1)
        at = (self.a.data_ptr() - flat.data_ptr()) // flat.element_size()
        if self.op == "all_gather" and 0 <= at < flat.numel():
            return flat[:at], flat[at + self.a.numel() :]
        return (flat,)

    @property
    def tried(self) -> bool:
        """False if peers write the result itself, or a second result might not fit."""
        return self.reach is None and self.out.numel() * self.out.element_size() <= _MOST_TRIED_BYTES

    def _elements(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor as one column. If nothing is summed, its elements are units."""
        flat = _plain(tensor).view(-1)
        return (flat if self._sums else flat.view(self.unit)).view(-1, 1)

    @property
    def _sums(self) -> bool:
        return self.op in ("reduce_scatter", "all_reduce")

    @property
    def device(self) -> torch.device:
        return self.a.device

    @property
    def share(self) -> int:
        return _stageable(self.schedule, self.staging_bytes, self.a.device)

    @property
    def key(self) -> tuple[object, ...]:
        place = None if self.reach is None else (self.reach.piece, self.reach.offset)
        fixed = (self.op, self.reduce_op, self.schedule, self.staging_bytes, self.sms, place)
        return (*fixed, self.a.numel(), self.out.numel(), self.a.dtype, self.a.get_device())

    def describe(self) -> str:
        lines = (
            f"op: {self.op}",
            f"elements given: {self.a.numel()}",
            f"dtype: {self.a.dtype}",
            f"device: {self.device.type}",
            f"reduce_op: {self.reduce_op}",
            f"schedule: {self.schedule}",
            f"staging_bytes: {self.staging_bytes}",
            f"sms: {self.sms}",
            f"result in symmetric memory: {self.reach or 'no'}",
            f"weft: {__version__}",
        )
        return "\n".join(lines)

    def problem(self, shares: tuple[int, ...]) -> CollectiveProblem:
        unit = self.a.dtype if self._sums else self.unit
        size = self.a.element_size()
        return CollectiveProblem(
            op=self.op,
            m=max(self.a.numel(), self.out.numel()) * size // unit.itemsize,
            world_size=len(shares),
            dtype=str(unit).removeprefix("torch."),  # type: ignore[arg-type]
            reduce_op=self.reduce_op,
            staging_bytes=min(shares),
            sms=self.sms,
            reachable=self.reach is not None,
        )


@dataclass(kw_only=True, slots=True)
class AllReduceCall(Call):
    """An AllReduceCall is a call of an all_reduce of the rows of a matrix, which adds to the sum, and normalises it.

    a: [M, N], contiguous.
    extras: further inputs by name: bias [1, N], residual [M, N], norm_weight [1, N].
    norm_eps, norm_recipe: as in weft.core.problem.Problem; extras then have norm_weight.
    """

    a: torch.Tensor
    staging_bytes: int
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)
    norm_eps: float | None = None
    norm_recipe: Literal["", "rowwise", "blockwise"] = ""

    def results_of(self, outputs: Outputs) -> list[torch.Tensor]:
        return normed_of(outputs) + outputs["out"]

    @property
    def inputs(self) -> Inputs:
        return {"a": (self.a,), **{name: (tensor,) for name, tensor in self.extras.items()}}

    @property
    def device(self) -> torch.device:
        return self.a.device

    @property
    def share(self) -> int:
        return _stageable(self.schedule, self.staging_bytes, self.a.device)

    @property
    def key(self) -> tuple[object, ...]:
        fixed = (self.op, self.schedule, self.staging_bytes, self.norm_eps, self.norm_recipe)
        return (*fixed, self.a.shape, self.a.dtype, self.a.get_device(), *self.extras)

    def describe(self) -> str:
        lines = (
            f"op: {self.op}",
            f"M: {self.a.shape[0]}",
            f"N: {self.a.shape[1]}",
            f"dtype: {self.a.dtype}",
            f"device: {self.device.type}",
            *(f"with {name}: yes" for name in self.extras),
            f"eps: {self.norm_eps!r}",
            f"scale recipe of the norm: {self.norm_recipe or 'none'}",
            f"schedule: {self.schedule}",
            f"staging_bytes: {self.staging_bytes}",
            f"weft: {__version__}",
        )
        return "\n".join(lines)

    def problem(self, shares: tuple[int, ...]) -> CollectiveProblem:
        m, n = self.a.shape
        return CollectiveProblem(
            op=self.op,
            m=m,
            n=n,
            world_size=len(shares),
            dtype=_SUMMED[self.a.dtype],  # type: ignore[arg-type]
            addends=tuple(name for name in ADDENDS if name in self.extras),
            norm_eps=self.norm_eps,
            norm_recipe=self.norm_recipe,
            staging_bytes=min(shares),
        )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the same memory that may be written in any mode.

    A tensor of inference mode may only be written there, and calls run outside of it (weft.runtime.calls.PLAIN).
    """
    if not tensor.is_inference():
        return tensor.detach()
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage(), *place)
