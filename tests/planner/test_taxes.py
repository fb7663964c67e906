"""The three taxes of a schedule: each is what its definition says, of schedules whose answer is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.core import machine
from weft.core.problem import Problem
from weft.perf import run
from weft.planner.explanation import explain
from weft.planner.simulated import taxes
from weft.schedules import build

H200 = machine.load("h200x8")
GATHER = Problem(op="all_gather_matmul", m=8192, n=28672, k=4096, world_size=8)
FEW_ROWS = Problem(op="matmul_all_reduce", m=16, n=8192, k=8192, world_size=8)


def test_sequential_waits_for_the_whole_collective() -> None:
    found = taxes(build(GATHER, "sequential"), H200)
    together = run(build(GATHER, "sequential"), H200).total_us
    assert found.total_us == pytest.approx(together)
    assert 0.3 < found.waiting_us / together < 0.5
    assert found.kernels == 2


def test_an_overlap_waits_less() -> None:
    sequential, overlapped = (taxes(build(GATHER, name), H200) for name in ("sequential", "shard_p2p"))
    assert overlapped.waiting_us < sequential.waiting_us / 4


def test_rows_that_are_gathered_are_written_and_read_again() -> None:
    """The collective stores M x K, and the matmul loads it; a schedule whose matmul reads own rows from a saves these."""
    whole = 2 * GATHER.m * GATHER.k * 2
    assert taxes(build(GATHER, "sequential"), H200).between_bytes == whole
    assert taxes(build(GATHER, "flag_gated", 1), H200).between_bytes == whole * 7 // 8


def test_launches_are_counted_and_priced() -> None:
    pieces, one = taxes(build(GATHER, "shard_p2p"), H200), taxes(build(GATHER, "flag_gated", 1), H200)
    assert (pieces.kernels, one.kernels) == (8, 1)
    assert pieces.launch_us > one.launch_us
    slower = replace(H200, launch_us=10 * H200.launch_us)
    assert taxes(build(GATHER, "shard_p2p"), slower).launch_us > 5 * pieces.launch_us


def test_a_fused_kernel_is_launched_once() -> None:
    assert taxes(build(FEW_ROWS, "one_shot"), H200).kernels == 1
    assert taxes(build(FEW_ROWS, "sequential_stores"), H200).kernels == 2


def test_why_names_the_taxes_of_the_choice_and_of_sequential() -> None:
    found = explain(GATHER, H200)
    assert [one.spec for one in found.taxes] == [found.plan.chosen.spec, "sequential"]
    assert all(f"Three taxes of {one.spec}: " in found.details for one in found.taxes)
