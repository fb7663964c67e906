"""GEMMs whose tiles wait between slices of K: the arithmetic part by part, which steps the kernel takes, and the kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pools import interpreting
from rank_work import check_gather

import weft
from weft.core.problem import Problem, split
from weft.core.schedule import Flag, Gemm, Part, Region, Wait
from weft.perf.shapes import SHAPES
from weft.runtime.arithmetic import Sliced, groups
from weft.runtime.bindings import Bindings
from weft.runtime.ranks import Ranks
from weft.schedules import build


def region(name: str, rows: tuple[int, int], cols: tuple[int, int]) -> Region:
    return Region(name, 0, rows, cols)


def gate(index: int) -> Wait:
    return Wait(Flag("slice", 0, index))


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, accumulate: bool) -> None:
    product = a.to(out.dtype) @ b.to(out.dtype)
    out.copy_(out + product if accumulate else product)


def test_slices_are_summed_unrounded_and_rounded_once() -> None:
    """1 + 2^-9 + 2^-9 is 1 in bfloat16, each time that it is rounded, and 1 + 2^-8 rounded up is what comes out in the end."""
    part = Part(region("a", (1, 3), (1, 5)), region("out", (0, 2), (0, 5)), inner=((1, gate(0)), (3, gate(1))))
    step, bindings = Gemm(region("b", (0, 4), (0, 5)), (part,)), Bindings()
    a = torch.tensor([[9.0] * 6, [9.0, 1.0, 2**-9, 2**-9, 2**-8, 9.0], [9.0, 1.0, 2**-9, 2**-9, 2**-8, 9.0]]).bfloat16()
    b, out = torch.ones(4, 5).bfloat16(), torch.zeros(2, 5).bfloat16()
    bindings.bind("a", 0, a)
    bindings.bind("b", 0, b[:, :2], b[:, 2:])
    bindings.bind("out", 0, out[:, :2], out[:, 2:])
    sliced = Sliced(step, part)
    for number in range(3):
        assert not out.any()
        sliced.multiply(bindings, number, matmul)
    assert torch.equal(out, torch.full((2, 5), 1 + 2.0**-7).bfloat16())


def test_what_the_host_sums_in_float32_it_multiplies_in_float32() -> None:
    from weft.runtime.host import HostProgram

    a, b, out = torch.tensor([[1.0, 2**-9]]).bfloat16(), torch.ones(2, 1).bfloat16(), torch.zeros(1, 1)
    for accumulate, expected in ((False, 1 + 2.0**-9), (True, 2 + 2.0**-8)):
        HostProgram.multiply(None, a, b, out, accumulate=accumulate)  # type: ignore[arg-type]
        assert out.item() == expected


def test_a_part_with_inner_gates_is_multiplied_by_itself() -> None:
    plain = Part(region("a", (0, 2), (0, 2)), region("out", (0, 2), (0, 3)))
    sliced = dataclasses.replace(plain, inner=((1, gate(0)),))
    assert groups([plain, plain, sliced, sliced, plain]) == [[plain, plain], [sliced], [sliced], [plain]]


def test_what_the_kernel_takes() -> None:
    gemm = pytest.importorskip("weft.kernels.gemm", reason="Triton is not installed")

    def step_of(k: int, chunks: int) -> Gemm:
        schedule = build(Problem(op="all_gather_matmul", m=64, n=8, k=k, world_size=2), "flag_gated_2d", chunks)
        return next(step for _, _, _, step in schedule if isinstance(step, Gemm))

    for k, chunks in ((8192, 4), (200, 3), (65, 2)):
        assert all(gemm.whole_slices(step_of(k, chunks), blocks) for blocks in SHAPES)
    assert not gemm.whole_slices(step_of(48, 2), SHAPES[0]), "its slices end within a step over K"
    step = step_of(256, 2)
    counting = dataclasses.replace(step.parts[0], count=Flag("made", 0))
    assert gemm.in_order(step)
    assert not gemm.in_order(dataclasses.replace(step, parts=(counting, dataclasses.replace(step.parts[1], gates=()))))


def _fused() -> tuple[int, int]:
    """Whole and ragged tiles and slices, and empty shards; launches of kernels with slices, and of others."""
    from weft.runtime import fused

    seen = [0, 0]
    launch = fused.FusedGemm.launch

    def counted(self: fused.FusedGemm, *arguments: object, **options: object) -> None:
        seen[any(part.inner for part in self.step.parts)] += 1
        launch(self, *arguments, **options)  # type: ignore[arg-type]

    fused.FusedGemm.launch = counted  # type: ignore[method-assign]
    try:
        for m, n, k, chunks in ((70, 96, 200, 4), (2, 48, 128, 2), (96, 48, 264, 3), (70, 96, 200, 1)):
            for call in range(3):
                check_gather(m, n, k, torch.float16, f"flag_gated_2d:{chunks}", call)
        before = list(seen)
        check_gather(70, 96, 48, torch.float16, "flag_gated_2d:2", 0)
        assert seen == before, "slices of 24 columns are no steps of the kernel's loop"
        _rank_that_cannot_load()
    finally:
        fused.FusedGemm.launch = launch  # type: ignore[method-assign]
    return seen[1], seen[0]


def _rank_that_cannot_load() -> None:
    """The last rank's b starts at an odd address, so that it multiplies part by part what its peers send it in tiles."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    a, b = torch.randn(64, 128).half(), torch.randn(size, 128, 33).half()
    right = b[rank][:, 1:] if rank == size - 1 else b[rank][:, 1:].contiguous()
    low, high = split(64, size)[rank]
    out = weft.all_gather_matmul(a[low:high].contiguous(), right, rows=64, schedule="flag_gated_2d:2")
    assert torch.allclose(out.float(), a.float() @ right.float(), atol=0.1)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_interpreted_kernel_waits_between_slices(world_size: int) -> None:
    for sliced, whole in interpreting(world_size).run(_fused):
        assert sliced >= 9
        assert whole == 3


def _late_slice() -> str:
    """Rank 1 raises none of its flags: the others name the first gate that stays closed, an inner one where that is it."""
    from weft.runtime.host import HostProgram

    check_gather(64, 48, 192, torch.float32, "flag_gated_2d:3", 0)
    signal, play = HostProgram.signal, HostProgram.play

    def hasty(self: HostProgram, *given: Any) -> None:
        self.rank_group.timeout_s = 3.0  # of what is waited for in vain alone
        play(self, *given)

    def silent(self: HostProgram, rank: int, slot: int, value: int) -> None:
        (flag,) = (flag for flag, slots in self.flags.slots.items() if flag.rank == rank and slot in slots)
        if flag.index % 3 != 1:
            signal(self, rank, slot, value)

    if dist.get_rank() == 1:
        HostProgram.signal = silent  # type: ignore[method-assign]
    else:
        HostProgram.play = hasty  # type: ignore[method-assign, assignment]
    try:
        check_gather(64, 48, 192, torch.float32, "flag_gated_2d:3", 1)
        return "right"
    except weft.core.errors.WeftError as error:
        return str(error)
    finally:
        HostProgram.signal, HostProgram.play = signal, play  # type: ignore[method-assign]


@pytest.mark.ranks
def test_an_inner_gate_that_stays_closed_is_named() -> None:
    with Ranks(2) as own:  # a group that has failed is nobody else's
        first, _ = own.run(_late_slice)
    assert "arrived[4]@0: expected 1, seen 0; rank 1's lane blocks raises it" in first
