"""The heuristic: always a schedule of the operator, in microseconds, by a table that documents print."""

from __future__ import annotations

import math
import subprocess
import sys
from math import ceil
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instructions import calls
from machine_tiny import tiny

import weft
from weft.core import codec, machine
from weft.core.problem import (
    COLLECTIVE_OPS,
    COLUMN_OPS,
    LOOKUP_OPS,
    OPS,
    CollectiveProblem,
    ColumnProblem,
    LookupProblem,
    Op,
    Problem,
)
from weft.perf.pieces import CUT, Pieces
from weft.perf.rules import FEATURES, TERMS, Estimates, Weights, choice, estimates, sizes, terms
from weft.perf.terms import gemm_cost
from weft.planner import heuristic
from weft.planner.shortlist import AT_MOST
from weft.runtime import choose
from weft.runtime.choose import contenders
from weft.schedules import check_op, parse, spec

H200, MI300X = machine.load("h200x8"), machine.load("mi300x8")
MACHINES = tuple(machine.load(name) for name in machine.names())


def problems() -> st.SearchStrategy[Problem]:
    extents = st.one_of(st.integers(1, 9), st.integers(10, 1 << 17))
    matmuls = st.builds(
        Problem,
        op=st.sampled_from(OPS),
        m=st.one_of(st.just(0), extents),
        n=st.one_of(st.just(0), extents),
        k=extents,
        world_size=st.integers(1, 4),
        dtype=st.sampled_from(("bfloat16", "float16", "float32")),
    )
    # Of whole parts, and small enough to be built each time.
    columns = st.builds(
        lambda op, size, m, n, k: ColumnProblem(op=op, m=m * size, n=n * size, k=k * size, world_size=size),
        op=st.sampled_from(COLUMN_OPS),
        size=st.integers(1, 4),
        m=st.integers(1, 300),
        n=st.integers(1, 300),
        k=st.integers(1, 300),
    )
    alone = st.builds(
        lambda op, size, m, dtype: CollectiveProblem(op=op, m=m * size, world_size=size, dtype=dtype),
        op=st.sampled_from(COLLECTIVE_OPS),
        size=st.integers(1, 4),
        m=st.integers(1, 1 << 20),
        dtype=st.sampled_from(("bfloat16", "float32")),
    )
    dims = st.lists(st.lists(st.integers(1, 256), max_size=3).map(tuple), min_size=1, max_size=4).map(tuple)
    return matmuls | columns | alone | st.builds(LookupProblem.of, batch=extents, dims=dims, pooling=st.integers(1, 100))


@settings(max_examples=60, deadline=None)
@given(problem=problems(), on=st.sampled_from(MACHINES))
def test_it_names_a_schedule_of_the_operator_always(problem: Problem, on: machine.Machine) -> None:
    name, chunks = parse(heuristic(problem, on))
    check_op(name, problem.op)
    assert spec(name, chunks or 1) == heuristic(problem, on)
    if problem.m * problem.n * problem.k < 1 << 30:
        weft.check(weft.build(problem, name, chunks))


@pytest.mark.parametrize("topology", ["switch", "mesh", "ring", "pcie"])
def test_every_operator_has_weights_of_schedules_that_it_has(topology: machine.Topology) -> None:
    found = estimates(topology)
    assert set(found.weights) == {*OPS, *LOOKUP_OPS}
    for op, rows in found.weights.items():
        assert rows[0].spec == "sequential"
        for row in rows:
            check_op(parse(row.spec)[0], op)  # type: ignore[arg-type]
            assert row.error < 0.6
    assert codec.loads(type(found), codec.dumps(found)) == found


def test_what_is_known_of_8_h200() -> None:
    """On 4 x H200, 512 rows of all_gather_matmul take 117 us sequential, 120 as sequential_stores, 145 or more by most
    overlaps; thousands of rows overlap; one row is one_shot's."""
    few = Problem(op="all_gather_matmul", m=512, n=28672, k=8192, world_size=4)
    assert heuristic(few, H200) in ("sequential", "sequential_stores")
    assert heuristic(Problem(op="all_gather_matmul", m=8192, n=28672, k=8192, world_size=4), H200) != "sequential"
    assert heuristic(Problem(op="matmul_all_reduce", m=1, n=8192, k=14336, world_size=4), H200) == "one_shot"


def test_a_mesh_is_not_a_switch() -> None:
    """A ring from peer to peer leaves a mesh's links idle (FiCCO): it is estimated slower than chunks of all peers there,
    or has no weights as it never is the fastest."""
    large = Problem(op="all_gather_matmul", m=65536, n=28672, k=8192, world_size=8)
    for on, better in ((H200, True), (MI300X, False)):
        us = estimates(on.links.topology).us(large, on)
        assert (us.get("shard_p2p", math.inf) < us["hetero_fused_1d:8"]) is better


def test_features_by_hand() -> None:
    problem = Problem(op="all_gather_matmul", m=512, n=1024, k=256, world_size=4)
    found = sizes(problem, tiny(world_size=4))
    values = {name: of(found) for name, of in FEATURES.items()}
    assert (found.rows, found.cols, found.inner, found.shard_bytes) == (512, 256, 256, 128 * 256 * 2)
    assert values["traffic_mib"] == 2 * (512 * 256 + 256 * 256 + 512 * 256) / (1 << 20)
    assert values["op_to_byte"] == 2 * 512 * 256 * 256 / (values["traffic_mib"] * (1 << 20))
    assert values["sent_mib"] == 3 * 128 * 256 * 2 / (1 << 20)
    assert (values["shard_rows"], values["m_over_k"], values["world_size"]) == (128, 2, 4)
    reduced = sizes(Problem(op="matmul_all_reduce", m=8, n=1024, k=256, world_size=4), H200)
    assert (reduced.rows, reduced.cols, reduced.inner) == (8, 1024, 64)
    assert reduced.sent_bytes == 2 * 3 * 2 * 1024 * 2
    uneven = Problem(op="matmul_reduce_scatter", m=8, n=16, k=10, world_size=2, b_sizes=(7, 3))
    assert sizes(uneven, H200).inner == 7


def test_terms_by_hand() -> None:
    """A product of 512 x 256 by 256 takes two tiles of 128 x 256 an SM's time each; three peers get a shard each."""
    problem, on = Problem(op="all_gather_matmul", m=512, n=1024, k=256, world_size=4), tiny(world_size=4)
    found = dict(zip(TERMS, terms(problem, on, "sequential", 1), strict=True))
    sent_us = 3 * 128 * 256 * 2 / (on.links.gbps * 1e3)
    memory = on.gpu.hbm_gbps * 1e3
    assert sent_us in (found["longer"], found["shorter"])
    assert found["result"] == 512 * 256 * 2 / memory
    assert found["operand"] == 512 * 256 * 2 / memory
    assert (found["copies"], found["launches"]) == (3 * on.copies.copy_us, on.launch_us)
    assert found["shards"] >= 0
    lookup = LookupProblem.of(batch=64, dims=((16,), (16,)), pooling=10)
    assert terms(lookup, H200, "sequential", 1)[TERMS.index("result")] * 10 in terms(lookup, H200, "sequential", 1)[:2]


def test_an_estimate_is_a_sum_and_the_least_one_wins_by_a_margin() -> None:
    def weighed(spec: str, longer: float) -> Weights:
        return Weights(spec=spec, weights=(longer, *[0.0] * (len(TERMS) - 1)), error=0.1)

    rows = (weighed("sequential", 20.0), weighed("shard_p2p", 15.0), weighed("uniform_fused_1d", 1.0))
    problem = Problem(op="all_gather_matmul", m=512, n=1024, k=256, world_size=4)
    us = Estimates(source="by hand", weights={"all_gather_matmul": rows}).us(problem, H200)
    counts = {"sequential": 1, "shard_p2p": 1, "uniform_fused_1d": 4}
    longer_us, p2p_us, cut_us = (terms(problem, H200, name, chunks)[0] for name, chunks in counts.items())
    assert us == {"sequential": 20 * longer_us, "shard_p2p": 15 * p2p_us, "uniform_fused_1d:4": cut_us}
    assert choice(us) == "uniform_fused_1d:4"
    assert choice({"sequential": 10.0, "shard_p2p": 9.95}) == "sequential"
    for bad in ((1.0,), (-1.0, *[0.0] * 6)):
        with pytest.raises(ValueError, match="of longer"):
            Weights(spec="sequential", weights=bad, error=0.0)
    with pytest.raises(ValueError, match="schedule is 'one_shot'"):
        Estimates(source="", weights={"all_gather_matmul": (weighed("one_shot", 1.0),)})


@pytest.mark.parametrize("on", [H200, MI300X], ids=["h200x8", "mi300x8"])
def test_pieces_take_what_the_simulator_says(on: machine.Machine) -> None:
    """Of all-gathered rows, in listed tiles, where the fastest shape is one of few; and by hand, what is cut and copied."""
    problem = Problem(op="all_gather_matmul", m=65536, n=28672, k=8192, world_size=8)
    pieces = Pieces(problem, on, rows=65536, cols=3584, inner=8192, links_us=100.0)

    def gemm_us(rows: int, k: int = 8192, **sums: Any) -> float:
        cost = gemm_cost(on, rows=(rows,), n=3584, k=k, dtype="bfloat16", tiles=on.gpu.tiles, **sums)
        return on.launch_us + cost.busy_us

    expected = {
        "uniform_fused_1d": 8 * gemm_us(8192),
        "hetero_fused_1d": gemm_us(8192) + 8 * gemm_us(7168),
        "hetero_unfused_1d": gemm_us(8192) + 56 * gemm_us(1024),
        "uniform_fused_2d": 8 * gemm_us(65536, 1024, accumulate=True, out_itemsize=4),
    }
    assert set(expected) | {"shard_p2p"} == CUT
    copies = on.copies
    fixed_us = 8 * copies.copy_us * (1 if on.fans_out else 7)
    sent_us = fixed_us + 100.0 * (1 if on.fans_out else copies.gbps / copies.turned_gbps(8))
    for name, matmul_us in expected.items():
        assert sorted(pieces.halves(name, 8)) == pytest.approx(sorted((matmul_us, sent_us)), rel=0.02)


@pytest.mark.parametrize("on", [H200, MI300X], ids=["h200x8", "mi300x8"])
def test_a_matmul_takes_what_its_fastest_tiles_and_cut_take(on: machine.Machine) -> None:
    gpu, random = on.gpu, Random(1)
    bytes_us = gpu.hbm_gbps * 1e3
    for _ in range(100):
        rows, cols, inner = (round(2 ** random.uniform(3, most)) for most in (15, 15, 17.5))
        element_us = 2 * gpu.sms * inner / (gpu.tflops["bfloat16"] * 1e6)
        times = []
        for cuts in (1, 2, 4):
            if cuts == 1 or inner >= cuts * gpu.cut_k:
                moved = 2 * (rows * inner + inner * cols + rows * cols) + (8 * cuts * rows * cols if cuts > 1 else 0)
                waves = [
                    ceil(ceil(rows / high) * ceil(cols / wide) * cuts / gpu.sms) * (slow * element_us / cuts + gpu.tile_us)
                    for high, group in gpu.shapes
                    for wide, slow in group
                ]
                times.append(max(min(waves), moved / bytes_us))
        problem = Problem(op="matmul_all_to_all", m=rows * 8, n=cols, k=inner, world_size=8)
        pieces = Pieces(problem, on, rows=rows, cols=cols, inner=inner, links_us=1.0)
        assert pieces.us(rows) == pytest.approx(on.launch_us + min(times))


def test_between_nodes_it_is_sequential() -> None:
    across = Problem(op="all_gather_matmul", m=8192, n=28672, k=8192, world_size=8, nodes=(4, 4))
    assert heuristic(across, H200) == "sequential"


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="h200x8"):
        heuristic(Problem(op="all_gather_matmul", m=64, n=64, k=64, world_size=16), H200)
    with pytest.raises(ValueError, match="machine is a str"):
        heuristic(Problem(op="all_gather_matmul", m=64, n=64, k=64, world_size=2), "h200x8")  # type: ignore[arg-type]


def test_it_needs_the_standard_library_alone() -> None:
    code = (
        "import sys; from weft import machine; from weft.core.problem import Problem; from weft.perf.rules import heuristic;"
        "heuristic(Problem(op='all_gather_matmul', m=64, n=64, k=64, world_size=2), machine.load('h200x8'));"
        "sys.exit(bool({'torch', 'numpy', 'simpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_auto_measures_what_it_names_too(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, cpu = Problem(op="all_gather_matmul", m=8192, n=28672, k=8192, world_size=4), torch.device("cpu")
    listed = contenders(problem, cpu)
    assert listed[0] == "sequential"
    assert heuristic(problem, H200) in listed
    monkeypatch.setattr(choose, "heuristic", lambda problem, machine: "uniform_fused_1d:7")
    assert contenders(problem, cpu) == (*listed[: AT_MOST - 1], "uniform_fused_1d:7")


@pytest.mark.parametrize("op", OPS)
def test_what_it_does_depends_little_on_the_sizes(op: Op) -> None:
    sizes = ((4096, 8192), (16384, 16384), (64, 131072), (10**9, 10**9), (2**63 - 1, 2**63 - 1))
    counts = []
    for rows, size in sizes:
        problem = Problem(op=op, m=rows, n=size, k=size, world_size=4)
        heuristic(problem, H200)
        counts.append(calls(lambda of=problem: heuristic(of, H200)))  # type: ignore[misc]
    assert max(counts) < 2 * counts[0]
