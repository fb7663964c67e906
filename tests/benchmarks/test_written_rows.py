"""What benchmarks write, without a GPU: each method has a name of rows.py's, and what a trial needs is among them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_cpu import OnCpu

import weft
from benchmarks import (
    calls,
    cases,
    collective,
    concurrent,
    data_parallel,
    lookups,
    measure,
    methods,
    nccl,
    planner,
    resource_aware,
    rows,
    runner,
)
from benchmarks.lookups import LookupCase
from benchmarks.measure import Times
from benchmarks.rows import Row
from benchmarks.runner import Comparison
from weft.core.problem import COLUMN_OPS, ColumnProblem, LookupProblem, Problem

GIVEN = argparse.Namespace(modes="graph,eager", rounds=3, commit="abc", specs=[], set="unseen", json=None)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[nccl.Transport]:
    """One rank, whose methods all take 2 us."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "GPU")
    monkeypatch.setattr(measure, "versions", lambda device: {"torch": "2"})
    monkeypatch.setattr(measure, "release", lambda: None)
    monkeypatch.setattr(measure, "say", lambda *words, **options: None)
    scalings = (None, SimpleNamespace(quantises=False), SimpleNamespace(quantises=True))
    made = [SimpleNamespace(spec="shard_p2p", problem=SimpleNamespace(scaling=scaling)) for scaling in scalings]
    monkeypatch.setattr(weft, "choices", lambda: made)
    monkeypatch.setattr(methods, "TORCH", ())
    monkeypatch.setattr(lookups.Tables, "lookup", lambda tables: lambda: None)
    for module in (lookups, measure, runner, collective):
        monkeypatch.setattr(module, "trial", _trial, raising=False)
        monkeypatch.setattr(module, "together", _together, raising=False)
    with OnCpu():
        yield nccl.Transport(name="default", group=dist.group.WORLD)
    dist.destroy_process_group()


def _together(name: str, work: Callable[[], Any]) -> Any:
    """A result where one is asked for, and what is made where that is asked for."""
    return torch.ones(1) if "/" in name else work()


def _trial(works: Mapping[str, Any], modes: Any, *, needed: Any, **options: Any) -> Any:
    assert set(needed) <= set(works)
    return {mode: {name: Times(us=2.0, host_us=1.0) for name in works} for mode in modes}, {"peer/lost": "why"}


def _made(transport: nccl.Transport, case: Comparison) -> list[Row]:
    found = runner.measure_case(case, [transport], GIVEN)
    assert [row.mode for row in found] == ["graph", "eager"]
    assert all(row.missing == {"peer/lost": "why"} for row in found)
    assert (found[0].host_us, set(found[1].host_us)) == ({}, set(found[1].us))
    return found


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases that a CPU has room for."""
    ops = ("all_gather_matmul", "matmul_reduce_scatter")
    bags = LookupCase(tables=2, dim=4, pooling=2, batch=4, rows=8)
    found: dict[str, Any] = {
        "CASES": [cases.Case(name="x M=8", op=op, m=8, n=4, k=4) for op in ops],
        "DECODE": [(4, 4, 2)],
        "EVEN": [(8, 4, 4)],
        "RAGGED": [(8, 4, 4, 2)],
        "PROJECTIONS": {op: [(4, 4, 4)] for op in cases.PROJECTIONS},
        "LOOKUPS": [bags],
        "BAGS": [bags],
        "VECTORS": [(4, 4, 1)],
        "TOKENS": [(8, 4, 4)],
        "BETWEEN_NODES": {op: [(8, 4, 4)] for op in cases.BETWEEN_NODES},
    }
    for name, value in found.items():
        monkeypatch.setattr(cases, name, value)
    monkeypatch.setenv("WEFT_RANKS_PER_NODE", "1")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", cases.BENCHES)
def test_operators(world: nccl.Transport, name: str) -> None:
    """A row has the halves, what a user has without weft, and what a user gets."""
    bench = cases.BENCHES[name]
    for dtype in bench.dtypes:
        for case in bench.cases(1, dtype):
            found = _made(world, case)
            assert ("quantised/auto" in found[0].us) == (dtype == "float8_e4m3fn" and case.op == "all_gather_matmul")
            for row in found:
                assert rows.gain(row) == 1.0
                assert rows.ideal(row) == 2.0
                assert rows.best(row, "weft/", but=()) is not None
                assert row.chosen == (None if "experts" in case.name else "shard_p2p")
                assert rows.text_of(rows.of_text(rows.text_of(row))) == rows.text_of(row)
                assert row.extra == ({"nodes": (1,)} if name == "nodes" else {})


# The order in which methods take turns depends on it: measurements of one order compare with those of the same order.
ORDER = {
    "all_gather_matmul": """sequential/default communication/default computation/cublas sequential/symmetric
        communication/symmetric sequential/copy_engine communication/copy_engine peer/async_tp peer/torch_compile weft/shard_p2p
        weft/auto""",
    "matmul_reduce_scatter": """sequential/default communication/default computation/cublas sequential/symmetric
        communication/symmetric peer/async_tp peer/torch_compile weft/shard_p2p weft/auto""",
    "matmul_all_reduce": """computation/cublas sequential/default sequential/symmetric peer/torch_compile weft/shard_p2p
        weft/auto float8/one_shot float8/two_shot float8/sequential_stores float8/auto""",
    "matmul_all_to_all": """sequential/default communication/default sequential/symmetric communication/symmetric
        sequential/copy_engine communication/copy_engine computation/cublas peer/torch_compile weft/shard_p2p weft/auto""",
    "all_to_all_columns_matmul": """sequential/default communication/default computation/cublas weft/shard_p2p weft/auto""",
}


@pytest.mark.parametrize("op", ORDER)
def test_order_of_the_methods(world: nccl.Transport, op: Any) -> None:
    sizes = {"op": op, "m": 8, "n": 4, "k": 4, "world_size": 1}
    problem = (ColumnProblem if op in COLUMN_OPS else Problem)(**sizes)  # type: ignore[arg-type]
    transports = [world, *(nccl.Transport(name=name, group=world.group) for name in nccl.REGISTERED)]
    works = methods.every(methods.Matmul(problem, turned=op == "matmul_all_reduce"), transports, ("shard_p2p", "auto"))
    assert list(works) == ORDER[op].split()


def test_methods_of_one_transport_share_its_windows(world: nccl.Transport) -> None:
    windows = torch.zeros(64, dtype=torch.uint8), torch.zeros(128, dtype=torch.uint8)
    transport = nccl.Transport(name="symmetric", group=world.group, windows=windows)
    shard, whole = transport.shard(4, 8), transport.whole(4, 16, torch.uint8)
    assert (shard.data_ptr(), whole.data_ptr()) == (windows[0].data_ptr(), windows[1].data_ptr())
    assert (shard.dtype, whole.shape) == (torch.bfloat16, (4, 16))


@pytest.mark.parametrize("op", collective.OPS)
def test_collectives(world: nccl.Transport, op: str) -> None:
    given = torch.ones(16, dtype=torch.bfloat16)
    works = collective.methods(op, given, [])
    assert all(name.startswith("weft/copy_engine") for name in works)
    assert set(collective.methods(op, given, [world])) - set(works) == {"communication/default"}


@pytest.mark.parametrize(
    "problem",
    [
        Problem(op="matmul_all_reduce", m=8, n=4, k=4, world_size=1),
        LookupProblem.of(batch=4, dims=((4, 4),), pooling=2),
    ],
)
def test_the_planners(world: nccl.Transport, problem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Row] = []
    monkeypatch.setattr(measure, "together", _together)
    monkeypatch.setattr(measure, "append", lambda path, row: made.append(row))
    assert planner._collected("case", problem, ("sequential", "shard_p2p"), 2, GIVEN)
    (row,) = made
    lookup = isinstance(problem, LookupProblem)
    assert set(row.us) == {"communication/default", "weft/sequential", "weft/shard_p2p"} | (
        set() if lookup else {"computation/cublas"}
    )
    assert (row.extra, row.missing) == ({"set": "unseen", "repeats": 2}, {"peer/lost": "why"})

    def fails(*given: Any, **options: Any) -> Any:
        raise measure.Failed("weft/sequential", "no memory")

    monkeypatch.setattr(measure, "trial", fails)
    assert not planner._collected("case", problem, ("sequential",), 2, GIVEN)
    assert made[1].missing == {rows.CASE: "weft/sequential: no memory"}


def test_training_steps() -> None:
    names = {
        "computation": "computation/torch",
        "silent": "computation/silent",
        "stock, x": "peer/stock, x",
        "auto": "weft/auto",
    }
    assert {name: data_parallel.method_name(name) for name in names} == names


def test_points_of_residency(world: nccl.Transport) -> None:
    """Of two points: the plain one, and one with priority, which takes less time than the program on one stream."""
    plain = resource_aware.Point(grid=0, blocks_per_sm=1, capped=False, priority=False)
    point = replace(plain, priority=True)
    times = {"sequential": 10.0, "collective": 4.0, 1: 6.0, plain: 9.0, point: 8.0}
    found = {name: resource_aware.Times(us=us, rate=0.5) for name, us in times.items()}
    work: Any = SimpleNamespace(own={0: 1}, iterations=2, tile=(64, 64, 32))
    first, second = resource_aware.rows_of("cb-ar", work, found, GIVEN)
    assert first.us["weft/overlapped"] == 9.0
    assert second.us == {
        "sequential/default": 10.0,
        "computation/triton": 6.0,
        "communication/default": 4.0,
        "weft/overlapped": 8.0,
        "computation/capped": 6.0,
    }
    assert (second.extra["ideal_us"], second.extra["normalised"], second.extra["hidden"]) == (8.0, 8.0 / 9.0, 1.0)
    assert "20.0% less by" not in resource_aware.summary([first])
    assert "11.1% less by" in resource_aware.summary([first, second])


def test_spans_overlap_where_both_run() -> None:
    assert [resource_aware.shared((0.0, 2.0), other) for other in ((1.0, 3.0), (3.0, 4.0), (0.5, 1.0))] == [1.0, 0.0, 0.5]


@pytest.mark.parametrize(("words", "says"), [(["--modes", "graph"], "use eager"), (["--workloads", "cb-xx"], "cb-xx")])
def test_workloads_that_cannot_be_measured(words: list[str], says: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["resource_aware", *words])
    with pytest.raises(SystemExit, match="2"):
        resource_aware.main()
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("op", concurrent.OPS)
def test_pairs(world: nccl.Transport, op: str) -> None:
    """GEMMs and a collective, by the names of rows; each transport's result is compared with the sequential one's."""
    pair = concurrent.Pair(concurrent.Case(count=2, m=4, k=8, n=4, nbytes=64, op=op))
    works = pair.works(["sequential", "nccl", "nccl+priority"])
    assert set(works) == {
        *("computation/cublas", "communication/default", "weft/auto"),
        *("sequential/default", "peer/two_streams", "weft/nccl+priority"),
    }
    pair._fresh("sequential")
    expected = pair.out.clone()
    pair._compare("nccl", expected)
    with pytest.raises(measure.WrongResult, match="nccl"):
        pair._compare("nccl", expected + 1)


def test_pairs_of_conccl() -> None:
    """30 of three collectives, from bound by communication to bound by computation; and three pairs in every collective."""
    assert (len({str(case) for case in concurrent.conccl()}), len({str(case) for case in concurrent.cases()})) == (30, 12)


def test_matmuls_of_a_layer(world: nccl.Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, extent in {"HIDDEN": 16, "WIDTH": 24, "HEADS": 32, "TOKENS": 8}.items():
        monkeypatch.setattr(calls, name, extent)
    found: dict[str, Any] = {name: call() for name, call in calls.layer().items()}
    assert {name: tuple(out.shape) for name, out in found.items()} == {
        "qkv": (8, 32),
        "o": (8, 16),
        "gate, up": (8, 48),
        "down": (8, 16),
    }
    weft.close()
