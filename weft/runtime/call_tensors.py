"""CallTensors gives prepared launches the tensors of each call. All calls have tensors of the same layouts.

A prepared launch refers to an address or a view by its number in a list, and `hold` fills both lists anew before each call. So
which of the caller's matrices a pointer belongs to, and where in it, is found out once.

    addresses   those of the caller's matrices, then addresses within them
    views       parts of the caller's matrices, made anew for each call; and of the program's own memory, made once
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from weft.compat.dispatch import address_of
from weft.runtime.bindings import Bindings
from weft.runtime.launches import NotPreparedError

if TYPE_CHECKING:
    from weft.runtime.bound import BoundProgram, Inputs, Outputs

Issue = Callable[[int], None]
"""Enqueues one launch on a stream, for the tensors that its CallTensors holds."""


class CallTensors:
    """CallTensors holds the tensors of one call after the other.

    inputs, outputs: the tensors of a call that was made, with the strides that the program's steps need.
    given: the same tensors as callers have them, in any number of dimensions. Those of collectives may have another dtype.
    bindings: the bindings of this call.
    binds: whether a launch reads the bindings, so that each call must be put into them.
    """

    def __init__(
        self, program: BoundProgram, inputs: Inputs, outputs: Outputs, given: Sequence[torch.Tensor] | None = None
    ) -> None:
        self.bindings: Bindings = program.bind(inputs, outputs)
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
            part, key = program.place_of(self.bindings, name)
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
