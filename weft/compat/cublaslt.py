"""This module asks cuBLASLt for the algorithms of a product, and enqueues one of them.

torch takes the first algorithm that cuBLAS returns. This module can ask for more. It calls six C functions by ctypes, because
the library's Python bindings (nvmath-python) need two more packages. The numbers are those of cublasLt.h (CUDA 12 and 13),
which promises not to renumber.

cuBLASLt stores matrices by columns. So it computes the transpose: out.T [n, m] = b.T [n, k] @ a.T [k, m].
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache

import torch

from weft.core.errors import WeftError

_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_FLOAT32, _COMPUTE_FLOAT32 = 0, 68
_TRANSPOSES = (3, 4)
"""The attributes of a product that say whether its first and its second factor are transposed."""
_WORKSPACE_BYTES, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
"""The preferences for the bytes of the workspace, how partial sums are added, and the alignment of the four matrices."""
_SUMS_IN_FLOAT32 = 2
ALIGN_BYTES = 16
"""The alignment of every matrix, and of its rows (or columns)."""


class Algorithm(ctypes.Structure):
    """An Algorithm is a cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )

    @property
    def identity(self) -> bytes:
        return bytes(self.algo)


class Library:
    """A Library is cuBLASLt for one device. Raises OSError if it is not installed."""

    def __init__(self, device: int) -> None:
        self._c = ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).split('.')[0]}")
        self._c.cublasLtMatmul.argtypes = [c_void_p] * 14 + [c_size_t, c_void_p]
        self._handle = c_void_p()
        with torch.cuda.device(device):
            self.ask("Create", byref(self._handle))
        self.handle = self._handle.value

    def ask(self, function: str, *arguments: object) -> None:
        """Call cublasLt`function`. Raises WeftError with its status if it refuses."""
        status = getattr(self._c, f"cublasLt{function}")(*arguments)
        if status:
            raise WeftError(f"cublasLt{function}: status {status}")

    def knows(self, function: str, *arguments: object) -> bool:
        return bool(getattr(self._c, f"cublasLt{function}")(*arguments) == 0)

    def multiply(self, *arguments: int | None) -> None:
        status = self._c.cublasLtMatmul(*arguments)
        if status:
            raise WeftError(f"cublasLtMatmul: status {status}")


@cache
def library(device: int) -> Library:
    return Library(device)


def stored(matrix: torch.Tensor) -> tuple[int, int, int, bool] | None:
    """Return (rows, columns, leading dimension, transposed) of a matrix's transpose stored by columns, or None if it is not."""
    rows, cols = matrix.shape
    down, across = matrix.stride()
    if across == 1 and down >= cols:
        return cols, rows, down, False
    if down == 1 and across >= rows:
        return rows, cols, across, True
    return None


class CublasProduct:
    """A CublasProduct computes out = a @ b, or out += a @ b, for tensors with the layout of these.

    The factors have 16 bits, out has their dtype or float32, and sums are float32.

    rows: the rows of a and out, if they differ from those of the tensors.
    """

    def __init__(
        self, of: Library, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, accumulate: bool, rows: int | None = None
    ) -> None:
        self._library = of
        first, second, result = stored(b), stored(a), stored(out)
        assert first, "supports() excludes other layouts"
        assert second
        assert result
        if rows is not None:
            second = (rows, *second[1:]) if second[3] else (second[0], rows, *second[2:])
            result = (result[0], rows, *result[2:])
        self._product = c_void_p()
        of.ask("MatmulDescCreate", byref(self._product), _COMPUTE_FLOAT32, _FLOAT32)
        for attribute, (*_, transposed) in zip(_TRANSPOSES, (first, second), strict=True):
            self._set("MatmulDescSetAttribute", self._product, attribute, c_int32(transposed))
        self._first, self._second = self._layout(a.dtype, *first[:3]), self._layout(a.dtype, *second[:3])
        self._result = self._layout(out.dtype, *result[:3])
        self._layouts = self._first, self._second, self._result, self._result
        made = [("MatrixLayoutDestroy", one) for one in self._layouts[:3]]
        weakref.finalize(self, _destroy, of, [("MatmulDescDestroy", self._product), *made])
        self._one, self._beta = c_float(1.0), c_float(float(accumulate))
        self._fixed = (
            self._product.value,
            ctypes.addressof(self._one),
            self._first.value,
            self._second.value,
            ctypes.addressof(self._beta),
            self._result.value,
        )

    def _set(self, function: str, of: c_void_p, attribute: int, value: ctypes._SimpleCData[int]) -> None:
        self._library.ask(function, of, attribute, byref(value), c_size_t(ctypes.sizeof(value)))

    def _layout(self, dtype: torch.dtype, rows: int, cols: int, ahead: int) -> c_void_p:
        layout = c_void_p()
        self._library.ask("MatrixLayoutCreate", byref(layout), _TYPES[dtype], c_uint64(rows), c_uint64(cols), c_int64(ahead))
        return layout

    def algorithms(self, most: int, workspace: int) -> list[Algorithm]:
        """Return the algorithms that cuBLAS expects to be fastest, within a workspace in bytes. It may return none."""
        wanted = c_void_p()
        self._library.ask("MatmulPreferenceCreate", byref(wanted))
        try:
            self._set("MatmulPreferenceSetAttribute", wanted, _WORKSPACE_BYTES, c_size_t(workspace))
            self._set("MatmulPreferenceSetAttribute", wanted, _REDUCTIONS, c_int32(_SUMS_IN_FLOAT32))
            for attribute in _ALIGNMENTS:
                self._set("MatmulPreferenceSetAttribute", wanted, attribute, c_int32(ALIGN_BYTES))
            found, count = (Algorithm * most)(), c_int()
            handle = self._library.handle
            known = self._library.knows(
                "MatmulAlgoGetHeuristic", c_void_p(handle), self._product, *self._layouts, wanted, most, found, byref(count)
            )
        finally:
            self._library.ask("MatmulPreferenceDestroy", wanted)
        return [one for one in found[: count.value] if one.state == 0] if known else []

    def takes(self, algorithm: Algorithm, workspace: int) -> bool:
        """Return whether another product's algorithm works for this one, and set the workspace that it needs."""
        found = Algorithm()
        handle = c_void_p(self._library.handle)
        if not self._library.knows("MatmulAlgoCheck", handle, self._product, *self._layouts, algorithm.algo, byref(found)):
            return False
        algorithm.workspace = found.workspace
        return int(found.workspace) <= workspace

    def run(
        self, algorithm: Algorithm, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor, stream: int
    ) -> None:
        product, one, first, second, beta, result = self._fixed
        at = out.data_ptr()
        self._library.multiply(
            self._library.handle,
            product,
            one,
            b.data_ptr(),
            first,
            a.data_ptr(),
            second,
            beta,
            at,
            result,
            at,
            result,
            ctypes.addressof(algorithm),  # the structure begins with the algorithm itself
            workspace.data_ptr(),
            workspace.nbytes,
            stream,
        )

    def prepare(
        self, algorithm: Algorithm, numbers: tuple[int, int, int], addresses: Sequence[int], workspace: torch.Tensor
    ) -> Callable[[int], None]:
        """Return a function that multiplies on a stream, with the factors and the result at addresses that may change.

        numbers: where a, b and out have their addresses in the list.
        """
        product, one, first, second, beta, result = self._fixed
        multiply, handle, at_a, at_b, at_out = self._library.multiply, self._library.handle, *numbers
        # `run` refers to this object, to the algorithm and to the workspace, so they live as long as it does.
        chosen, held = ctypes.addressof(algorithm), (self, algorithm, workspace)
        extra = workspace.data_ptr(), workspace.nbytes

        def run(stream: int, held: object = held) -> None:
            out = addresses[at_out]
            multiply(
                handle,
                product,
                one,
                addresses[at_b],
                first,
                addresses[at_a],
                second,
                beta,
                out,
                result,
                out,
                result,
                chosen,
                *extra,
                stream,
            )

        return run


def _destroy(of: Library, made: Sequence[tuple[str, c_void_p]]) -> None:
    for function, one in made:
        of.knows(function, one)


def supports(matrices: Sequence[torch.Tensor]) -> bool:
    """Return whether a CublasProduct takes these matrices. They are a, b and out, in this order."""
    a, b, out = matrices
    if a.dtype not in (torch.bfloat16, torch.float16) or b.dtype != a.dtype or out.dtype not in (a.dtype, torch.float32):
        return False
    found = [stored(matrix) for matrix in matrices]
    return (
        all(
            layout is not None and layout[2] * matrix.element_size() % ALIGN_BYTES == 0
            for layout, matrix in zip(found, matrices, strict=True)
        )
        and not (found[2] or (0, 0, 0, True))[3]
    )
