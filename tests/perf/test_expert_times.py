"""Calls with splits: their predicted time, and that of NCCL and a grouped matmul, against what was measured and by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks import ragged as measured_calls
from benchmarks.rows import Row, read
from benchmarks.simulated import RESULTS
from weft.core.machine import load
from weft.core.problem import RaggedProblem
from weft.perf import ragged, run
from weft.perf.ragged import program_us
from weft.perf.terms import collective_us, gemm_us, hbm_us, whole_collective_us
from weft.schedules import build

H200 = load("h200x8")
PROBLEM = RaggedProblem(op="ragged_all_to_all_matmul", m=8192, n=4096, k=4096, world_size=2, capacity=8192, experts=2)


def of_experts() -> Iterator[Row]:
    for folder in ("h200x2", "h200x8"):
        rows = read(RESULTS / folder / "all_to_all.jsonl")
        yield from (row for row in rows if "experts" in row.case and row.mode == "graph")


def drawn(row: Row) -> tuple[RaggedProblem, dict[tuple[int, int, int], int]]:
    """Return the problem of a measured row, and the rows that its benchmark has drawn, by segment."""
    sizes, experts = row.case.split(" experts=")
    m, k, n = map(int, sizes.split("x"))
    problem = RaggedProblem(
        op=f"ragged_{row.op}",  # type: ignore[arg-type]
        m=2 * m,
        n=n,
        k=k,
        world_size=row.world_size,
        capacity=m,
        experts=int(experts),
    )
    counts = measured_calls.shares(m, problem.experts, row.world_size)
    return problem, {name: int(counts[name]) for rank in range(row.world_size) for name in problem.sent_order(rank)}


@pytest.mark.parametrize("row", list(of_experts()), ids=lambda row: f"{row.op} {row.case} on {row.world_size}")
def test_predictions_are_near_what_was_measured(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a graph the host knows the counts, and the slowest rank has more rows than an even routing gives it."""
    problem, counts = drawn(row)
    monkeypatch.setattr(ragged, "even_rows", lambda _: counts)
    fused_us = run(build(problem, "fused"), H200, whole=True).total_us
    assert 0.93 < program_us(H200, problem, known=True) / row.us["sequential/default"] < 1.01
    assert 0.88 < fused_us / row.us["weft/splits"] < 1.09


def test_the_program_without_weft_waits_for_counts_and_puts_rows_in_order() -> None:
    one = replace(PROBLEM, experts=1)
    ordered_us = H200.launch_us + hbm_us(H200, 2 * 8192 * 4096 * 2)
    alone_us = gemm_us(H200, 8192, 4096, 4096, "bfloat16") + whole_collective_us(H200, one)
    assert program_us(H200, one, known=True) == pytest.approx(alone_us)
    assert program_us(H200, PROBLEM, known=True) == pytest.approx(alone_us + ordered_us, rel=0.01)
    counts_us = collective_us(H200, "all_to_all", 2 * ragged.COUNT_BYTES, 2)
    waiting_us = program_us(H200, PROBLEM, known=False) - program_us(H200, PROBLEM, known=True)
    assert waiting_us == pytest.approx(counts_us + H200.copies.copy_us + 60)
    sources = {path: text for path, text in H200.sources.items() if path != "host_wait_us"}
    unknown = replace(H200, host_wait_us=None, sources=sources)
    assert program_us(H200, PROBLEM, known=False) - program_us(unknown, PROBLEM, known=False) == pytest.approx(60)
    combine = replace(PROBLEM, op="ragged_matmul_all_to_all")
    assert (
        program_us(H200, combine, known=False)
        == program_us(H200, combine, known=True)
        == pytest.approx(program_us(H200, PROBLEM, known=True))
    )
    silu_us = program_us(H200, replace(one, gated=True, n=2048), known=True) - alone_us
    assert silu_us == pytest.approx(H200.launch_us + hbm_us(H200, 3 * 8192 * 2048 * 2))
    assert program_us(H200, replace(one, world_size=1), known=False) == gemm_us(H200, 8192, 4096, 4096, "bfloat16")


def test_blocks_that_have_pushed_multiply() -> None:
    """Half of the SMs push a few rows, through fast links, and then multiply as long as the others."""
    fast = H200.what_if(links__gbps=39_000.0)
    few, many = (run(build(PROBLEM, "fused"), replace(fast, stores=replace(fast.stores, sms=sms))).total_us for sms in (1, 66))
    assert many < 1.05 * few


def test_a_tile_is_multiplied_after_its_rows_have_come() -> None:
    """Rows of one tile that come through slow links, after this rank's own."""
    slow = H200.what_if(links__gbps=1.0)
    problem = replace(PROBLEM, m=256, capacity=256, n=256, k=65536, experts=1)
    one_tile_us = ragged._cost(slow, problem, [256], slow.gpu.sms, flags=True).tile_us
    pushed_us = 128 * 65536 * 2 / (slow.stores.rate(slow.stores.sms) * 1e3)
    assert run(build(problem, "fused"), slow).total_us > pushed_us + one_tile_us


def test_the_power_limit_slows_long_products() -> None:
    for rows, slower in ((8192, False), (65536, True)):
        problem = replace(PROBLEM, m=rows, capacity=rows)
        full_us, half_us = (run(build(problem, "fused"), H200.what_if(gpu__sustained=rate)).total_us for rate in (1.0, 0.5))
        assert (half_us > 1.2 * full_us) == slower


def test_as_many_blocks_copy_as_in_the_kernel() -> None:
    """All others multiply. Few products arrive in a given time where K is long."""
    combine = replace(PROBLEM, op="ragged_matmul_all_to_all")
    found = [ragged._movers(H200, one) for one in (PROBLEM, combine, replace(combine, k=512))]
    assert found == [H200.stores.sms, 4, 12]


def test_own_rows_are_neither_pushed_nor_waited_for() -> None:
    """On one rank all rows are its own. A combine stores them where they belong, so both only multiply."""
    alone = replace(PROBLEM, world_size=1)
    combine = replace(alone, op="ragged_matmul_all_to_all")
    dispatch_us, combine_us = (run(build(one, "fused"), H200).total_us for one in (alone, combine))
    assert dispatch_us == pytest.approx(combine_us, rel=0.02)


def test_all_blocks_pull_once_they_have_multiplied() -> None:
    """Through slow SMs, most rows are still to be pulled at the end of the products: then each SM pulls at its rate."""
    combine = replace(PROBLEM, op="ragged_matmul_all_to_all", k=64)
    gbps = tuple((sms, sms * 1.0) for sms in (1, 132))
    slow = replace(H200, stores=replace(H200.stores, gbps=gbps))
    few_us = 4096 * 4096 * 2 / (12 * 1e3)
    assert run(build(combine, "fused"), slow).total_us < few_us / 2


def test_zeros_below_the_rows_take_their_stores() -> None:
    roomy_us, exact_us = (run(build(replace(PROBLEM, m=m), "fused"), H200).total_us for m in (16384, 8192))
    assert 0.5 < (roomy_us - exact_us) / hbm_us(H200, 8192 * 4096 * 2) < 1.1
