"""Caps kernels of CuPy and cuda-core by launching them with more dynamic shared memory.

A launch with more than 48 KiB needs a higher limit of the function, which the original kernel shares. The limit is raised as
far as needed, and restored on close. It does not affect launches with less.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

from weft.compat.streams import checked, driver_api
from weft.overlap.controls.device import this_device
from weft.overlap.controls.usage import Cap, Shaped, Usage


def is_cupy(kernel: object) -> bool:
    """Return whether this is, or looks like, a RawKernel of CuPy."""
    return callable(kernel) and all(
        hasattr(kernel, name) for name in ("max_dynamic_shared_size_bytes", "num_regs", "shared_size_bytes")
    )


def is_cuda_core(kernel: object) -> bool:
    """Return whether this is, or looks like, a Kernel of cuda-core."""
    return all(hasattr(kernel, name) for name in ("attributes", "handle", "occupancy"))


def usage_of(kernel: Any, threads: int, dynamic_bytes: int) -> Usage:
    """Return the resources of a block with `threads` threads."""
    said = kernel if is_cupy(kernel) else kernel.attributes
    return Usage(threads=threads, registers=said.num_regs, shared_bytes=said.shared_size_bytes + dynamic_bytes)


class _ShapedRaw(Shaped, ABC):
    """A raw kernel with a cap. Subclasses read and set its limit of dynamic shared memory, in bytes.

    kernel: the original.
    """

    def __init__(self, kernel: Any, cap: Cap) -> None:
        super().__init__(cap)
        self._kernel = kernel
        self._before: int | None = None

    def _padded(self, threads: int, dynamic_bytes: int) -> int:
        """Return the dynamic shared memory for a launch, after raising the limit if needed."""
        self._check_open()
        dynamic_bytes += self.cap.padding(this_device(), usage_of(self._kernel, threads, dynamic_bytes))
        limit = self._limit()
        if limit < dynamic_bytes:
            self._before = limit if self._before is None else self._before
            self._set_limit(dynamic_bytes)
        return dynamic_bytes

    @abstractmethod
    def _limit(self) -> int: ...

    @abstractmethod
    def _set_limit(self, nbytes: int) -> None: ...

    def close(self) -> None:
        if self._before is not None:
            self._set_limit(self._before)
            self._before = None
        super().close()


class ShapedCupy(_ShapedRaw):
    """A CuPy kernel with a cap. It is called as a RawKernel: `shaped(grid, block, args, shared_mem=0)`."""

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0, **options: Any) -> Any:
        return self._kernel(grid, block, args, shared_mem=self._padded(math.prod(block), shared_mem), **options)

    def _limit(self) -> int:
        return int(self._kernel.max_dynamic_shared_size_bytes)

    def _set_limit(self, nbytes: int) -> None:
        self._kernel.max_dynamic_shared_size_bytes = nbytes


class ShapedCudaCore(_ShapedRaw):
    """A cuda-core kernel with a cap. `shaped.launch(stream, config, *args)` is cuda-core's launch without the kernel
    argument."""

    def launch(self, stream: Any, config: Any, *args: Any) -> None:
        from cuda.core import launch

        launch(stream, self.config(config), self._kernel, *args)

    def config(self, config: Any) -> Any:
        """Return a copy of a launch configuration, with the cap, for cuda-core's own launch."""
        options = {name: getattr(config, name) for name in _OPTIONS if getattr(config, name, None)}
        return type(config)(**options, shmem_size=self._padded(math.prod(config.block), config.shmem_size or 0))

    def _limit(self) -> int:
        # kernel.attributes would return a cached value.
        api = driver_api()
        return int(checked(api.cuKernelGetAttribute(_limit_of(api), self._kernel.handle, checked(api.cuCtxGetDevice()))))

    def _set_limit(self, nbytes: int) -> None:
        api = driver_api()
        checked(api.cuKernelSetAttribute(_limit_of(api), nbytes, self._kernel.handle, checked(api.cuCtxGetDevice())))


def _limit_of(api: Any) -> Any:
    return api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


_OPTIONS = ("grid", "cluster", "block", "is_cooperative", "programmatic_stream_serialization")
"""The fields of a cuda-core launch configuration that are copied. Shared memory is set separately."""
