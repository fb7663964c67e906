"""Capping kernels, with all but the device: Triton compiles for compute capability 9.0, a driver notes what it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from weft.overlap.controls import DEVICES, occupancy, shape, shaping

REGISTERS = 64
STREAM = 7


class Driver:
    """A device of compute capability 9.0 that runs nothing. loaded: shared memory of each load; launched: of each launch."""

    def __init__(self) -> None:
        self.loaded: list[int] = []
        self.launched: list[tuple[Any, ...]] = []
        self.utils, self.target = self, GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": DEVICES["H200"].shared_block_bytes}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        assert binary
        self.loaded.append(shared)
        return 1, 1000 + len(self.loaded), REGISTERS, 0, 1024

    def unload_module(self, module: int) -> None:
        """Of a kernel that is gone; asked for since Triton 3.9."""

    def launcher_cls(self, src: object, metadata: object) -> Any:
        def launch(x: int, y: int, z: int, stream: int, function: int, packed: Any, *rest: Any) -> None:
            self.launched.append(((x, y, z), stream, function, tuple(packed), rest[3:]))

        return launch


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    monkeypatch.setattr(triton.runtime.driver, "_active", made)
    monkeypatch.setattr(shaping, "this_device", lambda: DEVICES["H200"])
    yield made
    _copy_kernel.device_caches.clear()


@triton.jit
def _copy_kernel(x_ptr, out_ptr, count, SIZE: tl.constexpr = 128):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.load(x_ptr + at, at < count), at < count)


def _launch(kernel: Any, grid: Any = (3,), **options: Any) -> Any:
    x = torch.zeros(300)
    return kernel[grid](x, torch.empty(300), 300, **options)


@pytest.mark.parametrize(("wanted", "shared"), [(1, 115840), (2, 76928), (3, 57472), (5, 38016), (7, 28288), (8, 0)])
def test_a_triton_kernel_is_loaded_and_launched_with_more_shared_memory(driver: Driver, wanted: int, shared: int) -> None:
    """8 blocks fit for its registers. (shared + 1 KiB) in units of 128 B: one unit less would let one block more in."""
    shaped = shape(_copy_kernel, blocks_per_sm=wanted)
    for _ in range(2):
        compiled = _launch(shaped)
    sizes, stream, function, packed, arguments = driver.launched[-1]
    assert (sizes, stream, packed) == ((3, 1, 1), STREAM, (4, 1, shared))
    assert arguments[2:] == (300, 128)
    assert function == compiled.function
    assert driver.loaded == ([0, shared] if shared else [0])
    assert occupancy(compiled).blocks == wanted


def test_on_amd_it_is_the_same(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 work-groups of 4 wavefronts fit for their registers; a third of LDS, and a unit of 512 B more, lets 2 in."""
    driver.target = GPUTarget("hip", "gfx90a", 64)
    monkeypatch.setattr(shaping, "this_device", lambda: DEVICES["MI250X"])
    assert occupancy(_launch(_copy_kernel)).blocks == 8
    compiled = _launch(shape(_copy_kernel, blocks_per_sm=2))
    assert driver.launched[-1][3] == (4, 1, 43 * 512)
    assert occupancy(compiled).blocks == 2


def test_the_original_is_as_it_was(driver: Driver) -> None:
    before = _launch(_copy_kernel)
    with shape(_copy_kernel, blocks_per_sm=2) as shaped:
        capped = _launch(shaped)
    after = _launch(_copy_kernel)
    assert after is before
    assert capped is not before
    assert capped.kernel is before.kernel
    plain, padded, again = driver.launched
    assert plain[:4] == again[:4]
    assert padded[2] != plain[2]
    assert before.metadata.shared == 0
    with pytest.raises(ValueError, match="cap of 2 blocks an SM is closed"):
        _launch(shaped)


def test_grids_options_and_names_go_through(driver: Driver) -> None:
    shaped = shape(_copy_kernel, blocks_per_sm=4)
    _launch(shaped, lambda meta: (triton.cdiv(meta["count"], meta["SIZE"]), 2), SIZE=64, num_warps=8)
    shaped.run(torch.zeros(1), out_ptr=torch.zeros(1), count=1, grid=(1, 2, 3))
    (first, _, _, packed, arguments), (second, *_) = driver.launched
    assert (first, packed[0], arguments[3]) == ((5, 2, 1), 8, 64)
    assert second == (1, 2, 3)


def test_warmup_loads_and_launches_nothing(driver: Driver) -> None:
    compiled = shape(_copy_kernel, blocks_per_sm=2).warmup(torch.zeros(1), torch.zeros(1), 1, grid=(1,))
    assert compiled.metadata.shared == 76928
    assert driver.launched == []


def test_caps_nest(driver: Driver) -> None:
    """Two caps of one kernel do not know of each other."""
    for wanted, shared in ((2, 76928), (4, 45696), (2, 76928)):
        _launch(shape(_copy_kernel, blocks_per_sm=wanted))
        assert driver.launched[-1][3] == (4, 1, shared)


def test_an_autotuned_kernel_is_tuned_anew_under_the_cap(driver: Driver) -> None:
    """4 warps are faster without a cap, and 8 with one; of 32 warps only two fit anyway."""

    def bench(call: Any, quantiles: object) -> list[float]:
        call()
        _, _, _, (warps, _, shared), _ = driver.launched[-1]
        return [float(abs(warps - (8 if shared else 4)))] * 3

    configs = [triton.Config({}, num_warps=warps) for warps in (4, 8, 16)]
    tuned = triton.autotune(configs, key=[], do_bench=bench)(_copy_kernel)
    _launch(tuned)
    shaped = shape(tuned, blocks_per_sm=2)
    _launch(shaped)
    assert [launch[3] for launch in driver.launched] == [
        *((4, 1, 0), (8, 1, 0), (16, 1, 0), (4, 1, 0)),
        *((4, 1, 76928), (8, 1, 76928), (16, 1, 0), (8, 1, 76928)),
    ]
    _launch(tuned)
    assert driver.launched[-1][3] == (4, 1, 0)


def test_a_kernel_with_heuristics_is_capped(driver: Driver) -> None:
    chosen = triton.heuristics({"SIZE": lambda _: 256})(_copy_kernel)
    _launch(shape(chosen, blocks_per_sm=2))
    assert (driver.launched[-1][3][2], driver.launched[-1][4][3]) == (76928, 256)
    with pytest.raises(ValueError, match="blocks_per_sm is 9, but fewer fit already: 8 blocks"):
        _launch(shape(chosen, blocks_per_sm=9))


def test_occupancy_of_a_triton_kernel(driver: Driver) -> None:
    with pytest.raises(ValueError, match="_copy_kernel has 0 compiled variants"):
        occupancy(_copy_kernel)
    compiled = _launch(_copy_kernel)
    assert occupancy(compiled) == occupancy(_copy_kernel)
    assert occupancy(compiled).limited_by == ("registers",)
    assert occupancy(compiled, device=DEVICES["A40"]).blocks == 8
    _launch(_copy_kernel, num_warps=8)
    with pytest.raises(ValueError, match=r"2 compiled variants.*kernel\.warmup"):
        occupancy(_copy_kernel)


class CupyKernel:
    """A RawKernel as CuPy has it."""

    num_regs, shared_size_bytes, max_dynamic_shared_size_bytes = 32, 512, 49152

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        assert shared_mem <= self.max_dynamic_shared_size_bytes
        self.launched.append((grid, block, args, shared_mem))


def test_a_cupy_kernel_is_launched_with_more_and_its_limit_restored(driver: Driver) -> None:
    kernel = CupyKernel()
    shaped = shape(kernel, blocks_per_sm=2)
    shaped((9,), (64, 2), (1, 2), shared_mem=100)
    assert kernel.max_dynamic_shared_size_bytes == 76928 - 512
    shaped((9,), (128,), ())
    with pytest.raises(RuntimeError, match="on purpose"), shaped:
        raise RuntimeError("on purpose")
    assert kernel.launched == [((9,), (64, 2), (1, 2), 76928 - 512), ((9,), (128,), (), 76928 - 512)]
    assert kernel.max_dynamic_shared_size_bytes == 49152
    with pytest.raises(ValueError, match="closed"):
        shaped((1,), (32,), ())


def test_occupancy_of_a_cupy_kernel_takes_its_threads(driver: Driver) -> None:
    assert occupancy(CupyKernel(), threads=256).blocks == 8
    assert occupancy(CupyKernel(), threads=256, dynamic_bytes=50_000).blocks == 4
    with pytest.raises(ValueError, match="threads is missing"):
        occupancy(CupyKernel())


class Config:
    """A launch configuration as cuda-core has it."""

    def __init__(self, grid: Any, block: Any, shmem_size: int = 0, cluster: Any = None, is_cooperative: bool = False) -> None:
        self.grid, self.block, self.shmem_size, self.cluster = grid, block, shmem_size, cluster
        self.is_cooperative, self.programmatic_stream_serialization = is_cooperative, False


class CudaCoreDriver:
    """The attributes of one cuda-core kernel."""

    class CUfunction_attribute:
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = "limit"

    def __init__(self) -> None:
        self.limit = 49152

    def cuCtxGetDevice(self) -> tuple[int, int]:
        return 0, 0

    def cuKernelGetAttribute(self, attribute: str, kernel: int, device: int) -> tuple[int, int]:
        assert (attribute, kernel, device) == ("limit", 5, 0)
        return 0, self.limit

    def cuKernelSetAttribute(self, attribute: str, value: int, kernel: int, device: int) -> tuple[int]:
        assert (attribute, kernel, device) == ("limit", 5, 0)
        self.limit = value
        return (0,)


def test_a_cuda_core_configuration_gets_more_and_the_limit_is_restored(driver: Driver, monkeypatch: Any) -> None:
    api = CudaCoreDriver()
    monkeypatch.setattr(shaping, "driver_api", lambda: api)
    attributes = SimpleNamespace(num_regs=32, shared_size_bytes=0)
    kernel, config = SimpleNamespace(attributes=attributes, handle=5, occupancy=None), Config((4, 1, 1), (128, 1, 1), 64)
    with shape(kernel, blocks_per_sm=2) as shaped:
        padded = shaped.config(config)
        assert (padded.grid, padded.block, padded.shmem_size, padded.cluster) == ((4, 1, 1), (128, 1, 1), 76928, None)
        assert api.limit == 76928
    assert (api.limit, config.shmem_size) == (49152, 64)


def test_other_kernels_are_refused() -> None:
    for refuse in (lambda: shape(len, blocks_per_sm=1), lambda: occupancy(len)):
        with pytest.raises(ValueError, match="kernel is builtin_function_or_method; use a Triton kernel, a CuPy RawKernel"):
            refuse()
    with pytest.raises(ValueError, match="blocks_per_sm is 0; at least one"):
        shape(_copy_kernel, blocks_per_sm=0)
    with pytest.raises(ValueError, match="kernel is function"):
        shape(torch.compile(len, backend="eager"), blocks_per_sm=1)
    from triton.runtime.interpreter import InterpretedFunction

    with pytest.raises(ValueError, match="Triton's interpreter"):
        shape(InterpretedFunction(_copy_kernel.fn), blocks_per_sm=1)
