"""The tensors of a call.

Bindings     maps the buffers of a Schedule to the tensors of one call
CallTensors  gives prepared launches the tensors of each call. All calls have tensors of the same layouts
Where        names the place of a step in error messages

A prepared launch refers to an address or a view by its number in a list, and `CallTensors.hold` fills both lists anew before
each call. So which of the caller's matrices a pointer belongs to, and where in it, is found out once.

    addresses   those of the caller's matrices, then addresses within them
    views       parts of the caller's matrices, made anew for each call; and of the program's own memory, made once
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch

from weft.compat.dispatch import address_of
from weft.core.problem import Scaling, Span1D
from weft.core.schedule import Buffer, Region, SendReceive, Step

Messages = Sequence[tuple[torch.Tensor, int]]
"""Contiguous tensors, each with the rank that sends or receives it."""
Columns = Sequence[tuple[torch.Tensor, Span1D]]
"""Matrices that together make up a buffer, each with the columns of the buffer that it holds."""

Inputs = Mapping[str, Sequence[torch.Tensor]]
"""The matrices of each input buffer by name, plus tensors that are not schedule buffers: embedding tables and indices."""
Outputs = dict[str, list[torch.Tensor]]
"""The matrices of each output buffer by name."""
Issue = Callable[[int], None]
"""Enqueues one launch on a stream, for the tensors that its CallTensors holds."""


def scales_name(buffer: str) -> str:
    """Return the name of the scales of a buffer of FP8 elements among the tensors of a call.

    >>> scales_name("a")
    'a scales'
    """
    return f"{buffer} scales"


@dataclass(frozen=True, slots=True)
class Where:
    """Where identifies a step of a rank in messages and spans."""

    rank: int
    lane: str
    position: int
    step: Step

    def __str__(self) -> str:
        return f"rank {self.rank}, lane {self.lane}, step {self.position} ({self.step})"


@dataclass(slots=True)
class Bindings:
    """Bindings holds the tensors of one call.

    tensors: the matrices that make up a buffer, by (buffer, rank).
    stacked: those that make up a buffer one below the other. Only the b of several products do
        (weft.core.problem.Problem.products).
    loose: inputs outside the schedule's buffers, by name, such as a lookup's tables and indices.
    scales: the scales of each matrix of a buffer of FP8 elements.
    scalings: by operand that is FP8, which elements share a scale.
    buffers: the schedule's buffers, by name.
    rank: the rank whose call it is.
    given: the names of the caller's buffers. The caller's other tensors are never those of a buffer, whatever a schedule's
        author has called its scratch.
    scale_names: the caller's buffer of FP8 elements, by the name of its scales.
    stacks_b: whether the caller's b are one below the other.
    """

    tensors: dict[tuple[str, int], Columns] = field(default_factory=dict)
    stacked: dict[tuple[str, int], Sequence[torch.Tensor]] = field(default_factory=dict)
    loose: dict[str, Sequence[torch.Tensor]] = field(default_factory=dict)
    scales: dict[tuple[str, int], Sequence[torch.Tensor]] = field(default_factory=dict)
    scalings: Mapping[str, Scaling] = field(default_factory=dict)
    buffers: Mapping[str, Buffer] = field(default_factory=dict)
    rank: int = 0
    given: frozenset[str] = frozenset()
    scale_names: Mapping[str, str] = field(default_factory=dict)
    stacks_b: bool = False

    @property
    def scaling(self) -> Scaling | None:
        """The scaling of the factors of products."""
        return self.scalings.get("a")

    def of_call(self, inputs: Inputs, outputs: Outputs) -> Bindings:
        """Return the bindings of a call, which has these and the caller's tensors."""
        made = Bindings(
            dict(self.tensors),
            {},
            {},
            dict(self.scales),
            self.scalings,
            self.buffers,
            self.rank,
            self.given,
            self.scale_names,
            self.stacks_b,
        )
        for tensors in (inputs, outputs):
            for name, matrices in tensors.items():
                if name == "b" and self.stacks_b:
                    made.stacked[name, self.rank] = matrices
                elif name in self.given:
                    made.bind(name, self.rank, *matrices)
                elif name in self.scale_names:
                    made.scales[self.scale_names[name], self.rank] = matrices
                else:
                    made.loose[name] = matrices
        return made

    def place_of(self, name: str) -> tuple[dict[Any, Any], Any]:
        """Return the part of the bindings, and the key, that hold the caller's tensors of this name."""
        if name == "b" and self.stacks_b:
            return self.stacked, (name, self.rank)
        if name in self.given:
            return self.tensors, (name, self.rank)
        if name in self.scale_names:
            return self.scales, (self.scale_names[name], self.rank)
        return self.loose, name

    def bind(self, buffer: str, rank: int, *matrices: torch.Tensor) -> None:
        columns, at = [], 0
        by_columns = buffer in self.buffers and self.buffers[buffer].by_columns
        for matrix in matrices:
            if by_columns:
                matrix = matrix.t()
            columns.append((matrix, (at, at + matrix.shape[1])))
            at += matrix.shape[1]
        self.tensors[buffer, rank] = columns

    def products(self, a: Sequence[Region], b: Region) -> list[tuple[Span1D, list[list[torch.Tensor]], Sequence[torch.Tensor]]]:
        """Return what is multiplied where a GEMM multiplies rows of a by b: for each matrix of results its columns, the factors
        a as a list of runs of rows each, and the factors b. The products of each a with its b are added up.

        a: runs of rows, all columns each.
        """
        # Loops, because a comprehension would be one more frame in each call on CPUs.
        rows: list[list[torch.Tensor]] = []
        for run in a:
            for number, (view, _) in enumerate(self.pieces(run)):
                if number == len(rows):
                    rows.append([])
                rows[number].append(view)
        found: list[tuple[Span1D, list[list[torch.Tensor]], Sequence[torch.Tensor]]] = []
        if (b.buffer, b.rank) in self.stacked:
            cols, bs = self._stacked_factors(b)
            found.append((cols, rows, bs))
            return found
        for matrix, cols in self.pieces(b):
            found.append((cols, rows, (matrix,)))
        return found

    def second_factors(self, b: Region) -> Sequence[torch.Tensor]:
        """Return the factors b, whether their products are added up or have results of their own."""
        if (b.buffer, b.rank) in self.stacked:
            return self._stacked_factors(b)[1]
        return [matrix for matrix, _ in self.pieces(b)]

    def _stacked_factors(self, b: Region) -> tuple[Span1D, Sequence[torch.Tensor]]:
        low, high = b.cols
        matrices = self.stacked[b.buffer, b.rank]
        bs = [one if one.shape[1] == high and not low else one[:, low:high] for one in matrices]
        # The a of a b without rows has no columns, and is no piece.
        return (0, high - low), [one for one in bs if one.shape[0]] or bs[:1]

    def scale_views(self, region: Region) -> list[torch.Tensor]:
        """Return the scales of each of the region's `pieces`. The list is empty if the region is not FP8."""
        matrices = self.scales.get((region.buffer, region.rank))
        if matrices is None:
            return []
        columns, found, (low, high) = self.tensors[region.buffer, region.rank], [], region.cols
        for scales, (_, (first, last)) in zip(matrices, columns, strict=True):
            cols = max(low, first) - first, min(high, last) - first
            if cols[1] > cols[0] or len(matrices) == 1:
                found.append(self._scales_of(scales, region, cols))
        return found

    def _scales_of(self, scales: torch.Tensor, region: Region, cols: Span1D) -> torch.Tensor:
        rows, blocks = self._scale_places(region, cols)
        return scales[slice(*rows), slice(*blocks)]

    def _scale_places(self, region: Region, cols: Span1D) -> tuple[Span1D, Span1D]:
        operand = self.buffers[region.buffer].operand
        assert operand, f"{region} is not of FP8"
        return self.scalings[operand].scales_of(operand, region.rows, cols)

    def scale_region(self, region: Region) -> Region:
        """Return where the scales of a region are in the matrix of its buffer's scales."""
        return Region(region.buffer, region.rank, *self._scale_places(region, region.cols))

    def scales_at(self, region: Region) -> torch.Tensor:
        """Return the scales in a region that `scale_region` returned."""
        (matrix,) = self.scales[region.buffer, region.rank]
        return matrix[slice(*region.rows), slice(*region.cols)]

    def messages(self, step: SendReceive) -> tuple[Messages, Messages]:
        """Return the tensors that a step sends and those that it receives, each with its peer."""
        sends = [(one, send.to) for send in step.sends for one in self.moved(send.src)]
        return sends, [(one, receive.source) for receive in step.receives for one in self.moved(receive.dst)]

    def moved(self, region: Region) -> list[torch.Tensor]:
        """Return the tensors that a collective or a message of a region moves. For FP8 they are bytes and scales."""
        scales, view = self.scale_views(region), self.view(region)
        return [view.view(torch.uint8), *scales] if scales else [view]

    def view(self, region: Region) -> torch.Tensor:
        """Return the region as one strided matrix. It must be within one of the matrices of its buffer."""
        columns = self.tensors[region.buffer, region.rank]
        if len(columns) == 1:
            whole, (top, bottom), (low, high) = columns[0][0], region.rows, region.cols
            # A view of the whole matrix would take about 5 us.
            return whole if top == low == 0 and whole.shape == (bottom, high) else whole[top:bottom, low:high]
        ((view, _),) = self.pieces(region)
        return view

    def pieces(self, region: Region) -> Columns:
        """Cut the region at the borders of its matrices. Return (view, columns relative to the region) of each piece."""
        rows, (low, high) = slice(*region.rows), region.cols
        columns = self.tensors[region.buffer, region.rank]
        if len(columns) == 1:
            if columns[0][0].shape == (rows.stop, high) and rows.start == low == 0:
                return columns
            return [(columns[0][0][rows, low:high], (0, high - low))]
        if low == high:
            return [(columns[0][0][rows, :0], (0, 0))]
        cut = [(t, first, max(low, first), min(high, last)) for t, (first, last) in columns]
        return [(t[rows, lo - first : hi - first], (lo - low, hi - low)) for t, first, lo, hi in cut if hi > lo]


class NotPreparedError(Exception):
    """A launch cannot be prepared, so that it must find the tensors of each call itself."""


def in_turn(found: Sequence[Issue]) -> Issue:
    """Return a function that calls these in turn."""
    if len(found) == 1:
        return found[0]

    def run(stream: int) -> None:
        for issue in found:
            issue(stream)

    return run


class FactorScales(NamedTuple):
    """FactorScales holds the scales of the FP8 operands a and b of one product.

    scaling: says which elements share a scale.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: Scaling


class CallTensors:
    """CallTensors holds the tensors of one call after the other.

    inputs, outputs: the tensors of a call that was made, with the strides that the program's steps need.
    given: the same tensors as callers have them, in any number of dimensions. Those of collectives may have another dtype.
    bindings: the bindings of this call. No other call uses them.
    binds: whether a launch reads the bindings, so that each call must be put into them.
    """

    def __init__(
        self, bindings: Bindings, inputs: Inputs, outputs: Outputs, given: Sequence[torch.Tensor] | None = None
    ) -> None:
        self.bindings = bindings
        matrices = list(chain.from_iterable((*inputs.values(), *outputs.values())))
        self.addresses = [one.data_ptr() for one in matrices]
        self.views: list[Any] = []
        self.binds = False
        self._matrices = matrices
        pairs = zip(matrices, matrices if given is None else given, strict=True)
        self._cast = [(number, one.dtype) for number, (one, like) in enumerate(pairs) if one.dtype != like.dtype]
        """The numbers of the matrices that callers have in another dtype, and the program's dtypes of them."""
        self._count, self._shapes = len(matrices), [one.shape for one in matrices]
        self._within: list[tuple[int, int, int]] = []
        """For each address after those of the matrices: its number, that of its matrix, and its distance in bytes."""
        self._moving: list[tuple[int, int, bool, Sequence[int], Sequence[int], int]] = []
        """For each view of a matrix of the caller: its number, that of the matrix, whether it is the whole matrix, its size,
        its strides, and the number of elements before it."""
        self._slots: list[tuple[dict[Any, Any], Any, list[Any], range, bool]] = []
        """For each name of tensors: the part of the bindings and the key that hold them, the columns of each tensor of a
        buffer, the numbers of the tensors, and whether the buffer is stored by columns."""
        first = 0
        for name, some in (*inputs.items(), *outputs.items()):
            part, key = self.bindings.place_of(name)
            columns = [cols for _, cols in part[key]] if part is self.bindings.tensors else [None] * len(some)
            buffer = self.bindings.buffers.get(name)
            by_columns = part is self.bindings.tensors and buffer is not None and buffer.by_columns
            self._slots.append((part, key, columns, range(first, first + len(some)), by_columns))
            first += len(some)

    def address(self, address: int) -> int | None:
        """Return the number of an address of this call, or None if it is not the caller's memory.

        Raises NotPreparedError if several matrices of the caller may contain it.
        """
        number = self._matrix_at(address)
        if number is None:
            return None
        distance = address - self.addresses[number]
        if distance == 0:
            return number
        self._within.append((len(self.addresses), number, distance))
        self.addresses.append(address)
        return len(self.addresses) - 1

    def number(self, address: int) -> int:
        """Return the number of an address of this call, or of a fixed address, which becomes a part of the list."""
        number = self.address(address)
        if number is not None:
            return number
        self.addresses.append(address)
        return len(self.addresses) - 1

    def view(self, part: torch.Tensor) -> int:
        """Return the number of a view. part: a view of a matrix of this call, or of memory that never moves."""
        self.views.append(part)
        at, number = len(self.views) - 1, self._matrix_at(part.data_ptr())
        if number is not None:
            matrix = self._matrices[number]
            if part.dtype != matrix.dtype:
                raise NotPreparedError("a view of another dtype")
            elements = (part.data_ptr() - self.addresses[number]) // part.element_size()
            # One row may be a vector in later calls.
            whole = elements == 0 and (part.shape, part.stride()) == (matrix.shape, matrix.stride()) and len(part) > 1
            self._moving.append((at, number, whole, part.shape, part.stride(), elements))
        return at

    def _matrix_at(self, address: int) -> int | None:
        """Return the number of the matrix that contains an address, or None if it is not the caller's memory."""
        found = [
            number
            for number, one in enumerate(self._matrices)
            if one.numel() and self.addresses[number] <= address < self.addresses[number] + _extent(one)
        ]
        if len(found) > 1:
            raise NotPreparedError("matrices of the caller overlap")
        return found[0] if found else None

    def hold(self, matrices: Sequence[torch.Tensor]) -> None:
        """Take the tensors of the next call.

        matrices: its inputs and outputs in the order of those of the constructor, and with the layouts and dtypes of `given`.
        """
        addresses, views = self.addresses, self.views
        if self._cast:
            matrices = list(matrices)
            for number, dtype in self._cast:
                one = matrices[number]
                # torch calls a matrix of one column contiguous, whatever its last stride is, and does not view it as bytes.
                matrices[number] = one.as_strided((one.numel(),), (1,), one.storage_offset()).view(dtype)
        addresses[: self._count] = map(address_of, matrices)
        for at, number, distance in self._within:
            addresses[at] = addresses[number] + distance
        for at, number, whole, size, strides, before in self._moving:
            one = matrices[number]
            # The caller's tensor may have more dimensions than the matrix of its rows.
            views[at] = one if whole and one.dim() == 2 else one.as_strided(size, strides, one.storage_offset() + before)
        if self.binds:
            self._bind(matrices)

    def release(self) -> None:
        """Drop the tensors of the last call."""
        for at, *_ in self._moving:
            self.views[at] = None
        if self.binds or self._matrices:
            self._matrices = []
            for part, key, *_ in self._slots:
                part[key] = ()

    def _bind(self, matrices: Sequence[torch.Tensor]) -> None:
        for part, key, columns, numbers, by_columns in self._slots:
            found: list[Any] = []
            for cols, number in zip(columns, numbers, strict=True):
                one, shape = matrices[number], self._shapes[number]
                if one.shape != shape:
                    one = one.view(shape)
                if by_columns:
                    one = one.t()
                found.append(one if cols is None else (one, cols))
            part[key] = found


def _extent(matrix: torch.Tensor) -> int:
    """Return the bytes from the first element of a matrix to the end of its last one."""
    last = sum((size - 1) * stride for size, stride in zip(matrix.shape, matrix.stride(), strict=True))
    return (last + 1) * matrix.element_size()
