"""What compilers make of flags: a release behind every thread's stores, and an acquire before what the flag guards, both for
the whole system, since flags and rows are on peers. On x86-64, and on one GPU, a test that runs would pass without them."""

from __future__ import annotations

import re

import devices
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
from compiled import for_a_gpu
from kernel_examples import examples

from weft.compat.device import capabilities


def ptx(module: str) -> str:
    """The first example of a module's kernels, for an H200."""
    with devices.pretend(devices.H200):
        one = next(examples(module, capabilities(torch.device("cuda"))))
        options = {"multiples": one.multiples, "warps": one.warps, "stages": one.stages}
        return str(for_a_gpu(one.kernel, one.constants, one.types, **options).asm["ptx"])


@pytest.mark.parametrize("module", ["gemm_kernel", "push", "lookup", "flag_operations"])
def test_flags_are_raised_with_release(module: str) -> None:
    text = ptx(module)
    raised = [line for line in text.splitlines() if re.search(r"\b(?:atom|red)\.", line) and "acquire" not in line]
    assert raised
    assert all(".sys.release." in line for line in raised)


@pytest.mark.parametrize("module", ["gemm_kernel", "flag_operations"])
def test_flags_are_waited_for_with_acquire(module: str) -> None:
    text = ptx(module)
    assert re.search(r"\b(?:ld|atom)\.global\.sys\.acquire\.", text)
    assert "relaxed" not in text


def test_a_push_publishes_what_all_threads_have_stored() -> None:
    before = ptx("push").partition(".sys.release.")[0]
    assert before.rindex("bar.sync") > before.rindex("st.global")
