"""Every kernel compiles for every GPU that docs/kernels.md says it compiles for, down to what a driver loads. Needs no GPU."""

from __future__ import annotations

import importlib
import pkgutil

import devices
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
from compiled import for_a_gpu
from kernel_examples import Example, examples
from kernel_targets import MODULES, NOT_COMPILED, TARGETS, Target
from triton.runtime.jit import JITFunction

import weft.kernels
from weft.compat.device import capabilities
from weft.core.hardware import Capabilities

GPU = torch.device("cuda")
REPORTED = {"sm_80": devices.A100, "sm_90": devices.H200, "sm_100": devices.B200, "gfx942": devices.MI300X}


def kernels(module: str) -> set[str]:
    """The kernels of a module: what Triton launches, and not what those call."""
    found = vars(importlib.import_module(f"weft.kernels.{module}"))
    return {
        name
        for name, value in found.items()
        if isinstance(value, JITFunction) and name.endswith("_kernel") and value.__module__ == f"weft.kernels.{module}"
    }


def test_every_kernel_is_compiled() -> None:
    """A new kernel needs an example; a reason without a kernel or a target is out of date."""
    names = [module.name for module in pkgutil.iter_modules(weft.kernels.__path__)]
    assert sorted(MODULES) == sorted(name for name in names if kernels(name))
    with devices.pretend(devices.H200):
        for module in MODULES:
            compiled = {example.kernel.__name__ for example in examples(module, capabilities(GPU))}
            assert compiled == kernels(module)
    assert {key for key in NOT_COMPILED if key[0] not in MODULES or key[1] not in TARGETS} == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("module", MODULES)
def test_a_kernel_compiles(module: str, name: str) -> None:
    """It ends in machine code, and a block of it finds room in the GPU's shared memory, as the table says."""
    with devices.pretend(REPORTED[name]):
        gpu = capabilities(GPU)
        found = {f"{one.kernel.__name__} {one.words}": _wrong(one, TARGETS[name], gpu) for one in examples(module, gpu)}
    wrong = {words: why for words, why in found.items() if why}
    if (module, name) in NOT_COMPILED:
        assert wrong, f"it compiles: NOT_COMPILED need not list {module} and {name}"
    else:
        assert not wrong


def _wrong(example: Example, target: Target, gpu: Capabilities) -> str:
    """Why a launch would fail; empty if it would not."""
    options = {"multiples": example.multiples, "warps": example.warps, "stages": example.stages}
    try:
        made = for_a_gpu(example.kernel, example.constants, example.types, target=target, **options)
    except Exception as error:
        return str(error)
    if not made.asm.get(target.binary):
        return f"no {target.binary}"
    if made.metadata.shared > gpu.shared_bytes:
        return f"{made.metadata.shared} bytes of shared memory; a block has {gpu.shared_bytes}"
    return ""
