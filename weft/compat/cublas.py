"""cuBLAS and cuBLASLt: how many SMs they use, which algorithm multiplies, and FP8 operands.

The carveout is an experimental setting of torch. The SM target is a setting of a cuBLAS handle, which cuBLAS's C functions read
and write.

torch takes the first algorithm that cuBLAS returns. cuBLASLt can be asked for more. `Library` calls six C functions by ctypes,
because the library's Python bindings (nvmath-python) need two more packages. The numbers are those of cublasLt.h (CUDA 12 and
13), which promises not to renumber.

cuBLASLt stores matrices by columns. So it computes the transpose: out.T [n, m] = b.T [n, k] @ a.T [k, m].

`scaled_mm` is torch's private matmul, because torch.nn.functional.scaled_mm has no `out`.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache

import torch

from weft.core.errors import WeftError


def has_carveout() -> bool:
    """Return whether this version of torch can limit the SMs of its GEMMs."""
    return hasattr(torch._C, "_set_sm_carveout_experimental")


def carveout() -> int | None:
    """Return the number of SMs that cuBLASLt and Inductor's persistent GEMMs leave free in this process, or None if not set."""
    _require_carveout()
    return torch._C._get_sm_carveout_experimental()


def set_carveout(sms: int | None) -> None:
    """Set the number of SMs that `carveout` returns. Raises ValueError if this version of torch cannot."""
    _require_carveout()
    torch._C._set_sm_carveout_experimental(sms)


def matmul_settings(dtype: torch.dtype | None = None) -> tuple[object, ...]:
    """Return the settings of torch that affect how its matmuls run. They can be part of a cache key.

    The settings are, in this order: the carveout, deterministic algorithms, the preferred BLAS library, reduced-precision
    reductions in bfloat16 and in float16, accumulation in float16, and the precision of float32 matmuls. With bfloat16 as dtype
    it returns the first four, on which products of bfloat16 depend. That saves time in each replayed call.
    """
    of_bfloat16 = (
        torch._C._get_sm_carveout_experimental(),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_blas_preferred_backend(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
    )
    if dtype == torch.bfloat16:
        return of_bfloat16
    return (
        *of_bfloat16,
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_fp16_accumulation(),
        torch._C._get_fp32_precision_getter("cuda", "matmul"),
    )


def needs_torch(dtype: torch.dtype) -> bool:
    """Return whether a setting of torch applies that only torch's own matmuls of this dtype follow.

    Such settings are a carveout, deterministic algorithms, and accumulation in float16.
    """
    if torch._C._get_sm_carveout_experimental() is not None or torch.are_deterministic_algorithms_enabled():
        return True
    return dtype == torch.float16 and bool(torch._C._get_cublas_allow_fp16_accumulation())


def _require_carveout() -> None:
    if not has_carveout():
        raise ValueError(f"sms: torch {torch.__version__} cannot limit the SMs of its GEMMs; torch 2.11 can")


def sm_target() -> int:
    """Return the number of SMs for which cuBLAS chooses kernels in this thread and on the current device, or 0 for all SMs."""
    sms = ctypes.c_int()
    _require_success(_library().cublasGetSmCountTarget(_handle(), ctypes.byref(sms)))
    return sms.value


def set_sm_target(sms: int) -> None:
    """Set the number of SMs that `sm_target` returns. Raises ValueError if cuBLAS refuses the number."""
    _require_success(_library().cublasSetSmCountTarget(_handle(), sms))


def _handle() -> ctypes.c_void_p:
    """Return torch's cuBLAS handle of this thread and of the current device."""
    return ctypes.c_void_p(torch.cuda.current_blas_handle())  # type: ignore[no-untyped-call]


@cache
def _library() -> ctypes.CDLL:
    """Return the cuBLAS library that torch has loaded."""
    name = f"libcublas.so.{str(torch.version.cuda).split('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise ValueError(f"sms: {name} cannot be loaded: {error}") from None


def _require_success(status: int) -> None:
    if status:
        raise ValueError(f"sms: cuBLAS refused the number (status {status})")


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


OUT_DTYPES = {
    "tensorwise": (torch.bfloat16, torch.float16, torch.float32),
    "rowwise": (torch.bfloat16,),
    "blockwise": (torch.bfloat16,),
}
"""The dtypes of results for which torch has kernels, by recipe."""
_ALIGN_BYTES = 16
"""The alignment of scales that cuBLAS reads."""


def takes(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, recipe: str) -> bool:
    """Return whether torch has a kernel for a product with this recipe and a result of this dtype.

    Rowwise and blockwise scales need a b of float8_e4m3fn. Blockwise scales also need M and the blocks of K to be multiples of
    4, because for other sizes the format of scales depends on torch's version.
    """
    if recipe == "blockwise" and (a.shape[0] % 4 or a.shape[1] % 512):
        return False
    return out.dtype in OUT_DTYPES[recipe] and (recipe == "tensorwise" or b.dtype == torch.float8_e4m3fn)


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out: torch.Tensor,
    *,
    recipe: str,
    use_fast_accum: bool,
) -> None:
    """Compute out = (a * scale_a) @ (b * scale_b).

    a: [M, K], with contiguous rows.
    b: [K, N], with contiguous columns.
    scale_a, scale_b: of the shapes that weft.core.problem.Scaling names.
    """
    if recipe == "blockwise":
        # cuBLAS reads the scales of a column of blocks together. It has no fast accumulation.
        scale_a, scale_b = scale_a.t().contiguous().t(), scale_b.t().contiguous().t()
        use_fast_accum = False
    scale_a, scale_b = (one if one.data_ptr() % _ALIGN_BYTES == 0 else one.clone() for one in (scale_a, scale_b))
    torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out.dtype, use_fast_accum=use_fast_accum, out=out)
