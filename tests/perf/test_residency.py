"""Blocks an SM: by hand, by NVIDIA's own calculator, and the padding that caps them."""

from __future__ import annotations

import importlib.util
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.overlap.controls.residency import DEVICES, KIB, Multiprocessor, blocks_per_sm, padding_bytes

A40, A100, H100, H200, MI250X = (DEVICES[name] for name in ("A40", "A100", "H100", "H200", "MI250X"))
NVIDIA = (A40, A100, H100)


@pytest.mark.parametrize(
    ("device", "threads", "registers", "shared_bytes", "blocks", "limited_by"),
    [
        # 65536 registers / (128 threads x 64) = 8; 2048 threads / 128 = 16.
        (H200, 128, 64, 0, 8, ("registers",)),
        # 228 KiB / (48 + 1 KiB reserved) = 4.65.
        (H200, 128, 64, 48 * KIB, 4, ("shared memory",)),
        (H200, 128, 32, 56 * KIB + 1, 3, ("shared memory",)),
        # 65 registers are given as 72 x 32: 65 x 32 = 2080 is rounded up to 2304; 16384 / 2304 = 7 warps a quarter, 28 in all.
        (A100, 256, 65, 0, 3, ("registers",)),
        (A100, 32, 16, 0, 32, ("blocks",)),
        # 1536 threads / 256; 100 KiB / 17 KiB = 5.9.
        (A40, 256, 40, 0, 6, ("registers", "threads")),
        (H100, 128, 32, 227 * KIB + 1, 0, ("shared memory",)),
        # A quarter of the registers holds 128 x 512 bytes; 512 / 128 = 4 waves a SIMD, 16 in all, 4 of each group.
        (MI250X, 256, 128, 0, 4, ("registers",)),
    ],
)
def test_by_hand(
    device: Multiprocessor, threads: int, registers: int, shared_bytes: int, blocks: int, limited_by: tuple[str, ...]
) -> None:
    found = blocks_per_sm(device, threads=threads, registers=registers, shared_bytes=shared_bytes)
    assert (found.blocks, found.limited_by) == (blocks, limited_by)


def test_what_is_left_beside_the_blocks() -> None:
    found = blocks_per_sm(H200, threads=128, registers=64, shared_bytes=48 * KIB)
    assert (found.free_shared_bytes, found.free_registers, found.free_threads) == (32 * KIB, 32768, 1536)


_CALCULATOR = r"""
#include <cuda_occupancy.h>
#include <stdio.h>
int main() {
    int major, minor, sm_threads, shared, block_shared, reserved, threads, registers, fixed, dynamic;
    while (scanf("%d %d %d %d %d %d %d %d %d %d", &major, &minor, &sm_threads, &shared, &block_shared, &reserved, &threads,
                 &registers, &fixed, &dynamic) == 10) {
        cudaOccDeviceProp device;
        device.computeMajor = major, device.computeMinor = minor, device.warpSize = 32, device.numSms = 1;
        device.maxThreadsPerBlock = 1024, device.maxThreadsPerMultiprocessor = sm_threads;
        device.regsPerBlock = device.regsPerMultiprocessor = 65536;
        device.sharedMemPerBlock = 49152, device.sharedMemPerMultiprocessor = shared;
        device.sharedMemPerBlockOptin = block_shared, device.reservedSharedMemPerBlock = reserved;
        cudaOccFuncAttributes kernel;
        kernel.maxThreadsPerBlock = 1024, kernel.numRegs = registers, kernel.sharedSizeBytes = fixed;
        kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN, kernel.maxDynamicSharedSizeBytes = block_shared - fixed;
        cudaOccDeviceState state;
        cudaOccResult found;
        int failed = cudaOccMaxActiveBlocksPerMultiprocessor(&found, &device, &kernel, &state, threads, dynamic);
        printf("%d %d %d %d %d %d\n", failed, found.activeBlocksPerMultiprocessor, found.blockLimitSharedMem,
               found.blockLimitRegs, found.blockLimitWarps, found.blockLimitBlocks);
    }
}
"""


def test_as_nvidias_calculator(tmp_path: Path) -> None:
    """Its header comes with Triton; all limits agree, for every device and 5000 kernels."""
    spec = importlib.util.find_spec("triton")
    include = Path(spec.origin or "").parent / "backends/nvidia/include" if spec else Path()
    compiler = shutil.which("g++") or shutil.which("c++")
    if not (include / "cuda_occupancy.h").exists() or compiler is None:
        pytest.skip("needs a C++ compiler, and cuda_occupancy.h, which comes with Triton")
    (tmp_path / "occupancy.cpp").write_text(_CALCULATOR)
    subprocess.run([compiler, "-w", f"-I{include}", tmp_path / "occupancy.cpp", "-o", tmp_path / "occupancy"], check=True)
    draw, expected, asked = random.Random(1), [], []
    for _ in range(5_000):
        device = draw.choice(NVIDIA)
        threads, registers, fixed = (
            draw.choice((32, 128, 256, draw.randint(1, 1024))),
            draw.randint(1, 255),
            draw.randint(0, 4096),
        )
        dynamic = draw.choice((0, device.shared_block_bytes - fixed, draw.randint(0, device.shared_block_bytes - fixed)))
        found = blocks_per_sm(device, threads=threads, registers=registers, shared_bytes=fixed + dynamic)
        expected.append((0, found.blocks, found.by_shared, found.by_registers, found.by_threads, found.by_blocks))
        sizes = (device.threads, device.shared_bytes, device.shared_block_bytes, device.shared_reserved_bytes)
        asked.append(" ".join(map(str, (*device.capability.split("."), *sizes, threads, registers, fixed, dynamic))))
    answer = subprocess.run([tmp_path / "occupancy"], input="\n".join(asked), capture_output=True, text=True, check=True).stdout
    said = [tuple(map(int, line.split())) for line in answer.splitlines()]
    assert len(said) == len(expected)
    assert [a for a in zip(asked, said, expected, strict=True) if a[1] != a[2]] == []


@given(
    device=st.sampled_from(list(DEVICES.values())),
    warps=st.integers(1, 8),
    registers=st.integers(16, 128),
    shared_bytes=st.integers(0, 60 * KIB),
    wanted=st.integers(1, 32),
)
def test_padding_gives_that_many_and_no_unit_is_too_much(
    device: Multiprocessor, warps: int, registers: int, shared_bytes: int, wanted: int
) -> None:
    threads = warps * device.warp

    def fits(more: int) -> int:
        return blocks_per_sm(device, threads=threads, registers=registers, shared_bytes=shared_bytes + more).blocks

    try:
        padding = padding_bytes(device, threads=threads, registers=registers, shared_bytes=shared_bytes, blocks_per_sm=wanted)
    except ValueError:
        # Every size that the hardware tells apart: none gives that many.
        assert all(fits(more) != wanted for more in range(0, device.shared_block_bytes, device.shared_unit_bytes))
        return
    assert fits(padding) == wanted
    assert padding == 0 or fits(max(0, padding - device.shared_unit_bytes)) > wanted


@pytest.mark.parametrize(
    ("device", "wanted", "message"),
    [
        (H200, 0, "blocks_per_sm is 0"),
        (H200, 9, "blocks_per_sm is 9, .*registers"),
        (
            MI250X,
            13,
            "blocks_per_sm is 13: .*12, 14",
        ),
    ],
)
def test_caps_that_cannot_be(device: Multiprocessor, wanted: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        padding_bytes(device, threads=128, registers=64 if device is H200 else 8, shared_bytes=0, blocks_per_sm=wanted)


@pytest.mark.parametrize(("name", "count"), [("threads", 0), ("registers", -1), ("shared_bytes", -1)])
def test_kernels_that_cannot_be(name: str, count: int) -> None:
    with pytest.raises(ValueError, match=f"{name} is {count}"):
        blocks_per_sm(H200, **({"threads": 32, "registers": 32, "shared_bytes": 0} | {name: count}))
