"""Losses: none where there are none, growing where pieces get smaller, as FiCCO says of each family."""

from __future__ import annotations

import pytest
from machine_tiny import tiny

from weft.core.machine import load
from weft.core.problem import LookupProblem, Op, Problem
from weft.perf import run
from weft.perf.terms import whole_collective_us, whole_gemm_us
from weft.planner.simulated import Signature, signature, without_communication, without_computation
from weft.schedules import build, names, parse

H200 = load("h200x8")
GATHER = Problem(op="all_gather_matmul", m=8192, n=28672, k=8192, world_size=8)


def losses(problem: Problem, spec: str, machine: object = H200) -> Signature:
    return signature(build(problem, *parse(spec), fan_out=machine.fans_out), machine)  # type: ignore[attr-defined, arg-type]


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_the_sequential_program_loses_nothing_but_the_overlap(op: Op) -> None:
    problem = Problem(op=op, m=16, n=16, k=16, world_size=2)
    found = losses(problem, "sequential", tiny())
    assert found.gemm_dil == pytest.approx(1, rel=1e-3)
    assert found.transfers_us == pytest.approx(whole_collective_us(tiny(), problem) + tiny().launch_us, abs=0.1)
    assert found.total_us >= found.pieces_us + found.communication_us - 0.01
    assert found.exposed_us == pytest.approx(found.total_us - max(found.pieces_us, found.transfers_us))


def test_a_half_that_is_free_takes_nothing() -> None:
    for name in set(names("all_gather_matmul")) - {"sequential_stores"}:
        schedule = build(GATHER, name, 2)
        total, alone = run(schedule, H200), run(schedule, without_communication(H200))
        assert alone.total_us <= total.total_us
        assert max(alone.transfer_us) < 1
        assert max(run(schedule, without_computation(H200)).kernel_us) < 0.2 * max(total.kernel_us)
    sequential = build(GATHER, "sequential")
    assert run(sequential, without_communication(H200)).total_us == pytest.approx(whole_gemm_us(H200, GATHER), rel=0.01)


@pytest.mark.parametrize(
    ("op", "spec"),
    [(op, spec) for op in ("all_gather_matmul", "matmul_reduce_scatter") for spec in ("sequential", "node_slices:2")],
)
def test_between_nodes_a_half_that_is_free_takes_nothing(op: Op, spec: str) -> None:
    """Neither messages nor NCCL's collective between nodes are among the matmul's pieces; the network's SMs stay its."""
    problem = Problem(op=op, m=8192, n=8192, k=8192, world_size=16, nodes=(8, 8))
    schedule = build(problem, *parse(spec))
    alone, free = run(schedule, without_communication(H200)), without_communication(H200).network
    assert max(alone.transfer_us) < 1
    assert free is not None
    assert free.sms == H200.network.sms  # type: ignore[union-attr]
    found = signature(schedule, H200)
    if spec == "sequential":
        assert found.gemm_dil == pytest.approx(1, rel=0.01)
        assert found.exposed_us == pytest.approx(found.pieces_us, rel=0.05)
    assert found.pieces_us < found.total_us - H200.network.step_us


@pytest.mark.parametrize("name", ["one_shot", "two_shot"])
def test_communication_alone_does_not_grow_with_k(name: str) -> None:
    """What the kernel that exchanges takes for rows of b is the matmul's."""
    problems = [Problem(op="matmul_all_reduce", m=32, n=8192, k=k, world_size=8) for k in (4096, 131072)]
    short, long = (losses(problem, name) for problem in problems)
    assert long.transfers_us == pytest.approx(short.transfers_us, rel=0.02)
    assert long.pieces_us > 5 * short.pieces_us


def test_a_lookup_alone_has_no_copies_beside_it() -> None:
    """Nor do copies alone begin as late as beside it."""
    problem = LookupProblem.of(batch=8192, dims=((128,) * 8,) * 4, pooling=32)
    schedule = build(problem, "track_and_trigger", 2)
    assert run(schedule, without_communication(H200)).total_us < 1.15 * whole_gemm_us(H200, problem)
    copies = [span for span in run(schedule, without_computation(H200)).spans if span.kind == "copy"]
    assert min(span.start_us for span in copies) < H200.kernels.lookup_copy_us


def test_signatures_of_the_families() -> None:
    """Unfused pieces lose most, fused ones less, one gated kernel least, by its tiles alone where its parts come at once; those
    that come apart read b again; copies' fixed costs grow."""
    unfused = [losses(GATHER, f"hetero_unfused_1d:{chunks}").gemm_dil for chunks in (1, 2, 8)]
    assert unfused == sorted(unfused)
    assert unfused[-1] > losses(GATHER, "hetero_fused_1d:8").gemm_dil > 1
    gated = [losses(GATHER, f"flag_gated:{chunks}") for chunks in (1, 8)]
    assert gated[0].gemm_dil == pytest.approx(1 / H200.gpu.flag_efficiency, rel=0.02)
    assert gated[0].gemm_dil <= gated[1].gemm_dil < losses(GATHER, "hetero_fused_1d:8").gemm_dil
    assert gated[1].communication_dil > 1.5 > gated[0].communication_dil
    assert losses(GATHER, "direct_store:1").gemm_dil > gated[0].gemm_dil, "its blocks take SMs"
    assert losses(GATHER, "sequential_stores").gemm_cil is None


def test_2d_pays_for_c_where_k_is_small() -> None:
    def dil(k: int) -> float:
        return losses(Problem(op="all_gather_matmul", m=8192, n=16384, k=k, world_size=8), "uniform_fused_2d:8").gemm_dil

    assert dil(1024) > dil(8192) > dil(65536) > 1
