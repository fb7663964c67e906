"""What benchmarks write, without a GPU: each method has a name of rows.py's, and what a trial needs is among them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import weft
from benchmarks import (
    all_reduce,
    all_to_all,
    calls,
    cases,
    collective,
    collectives,
    concurrent,
    data_parallel,
    embedding,
    measure,
    nodes,
    planner,
    resource_aware,
    rows,
    tp,
    ulysses,
)
from benchmarks.measure import Job, Times
from benchmarks.rows import Row
from weft.core.problem import LookupProblem, Problem

GIVEN = argparse.Namespace(
    modes="graph,eager", rounds=3, commit="abc", specs="", dtype="bfloat16", ops="", per_node=1, set="unseen", json=None
)


class OnCpu(TorchFunctionMode):
    """Tensors that are asked for on a GPU are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if "device" in given:
            given["device"] = "cpu"
        return func(*args, **given)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[collectives.Way]:
    """One rank, whose methods all take 2 us."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "GPU")
    monkeypatch.setattr(measure, "versions", lambda device: {"torch": "2"})
    monkeypatch.setattr(measure, "release", lambda: None)
    monkeypatch.setattr(measure, "say", lambda *words, **options: None)
    choice = SimpleNamespace(spec="shard_p2p", problem=SimpleNamespace(scaling=None))
    monkeypatch.setattr(weft, "choices", lambda *group: [choice])
    monkeypatch.setattr(all_reduce, "TORCH", ())
    monkeypatch.setattr(embedding.Site, "lookup", lambda site: lambda: None)
    for module in (all_reduce, all_to_all, embedding, nodes, tp, measure, collective):
        monkeypatch.setattr(module, "trial", _trial)
        if hasattr(module, "together"):
            monkeypatch.setattr(module, "together", _together)
    for module, name in ((tp, "chosen"), (embedding, "chosen")):
        monkeypatch.setattr(module, name, lambda site: "shard_p2p")
    with OnCpu():
        yield collectives.Way(name="default", group=dist.group.WORLD)
    dist.destroy_process_group()


def _together(name: str, work: Callable[[], Any]) -> Any:
    """A result where one is asked for, and what is made where that is asked for."""
    return torch.ones(1) if "/" in name else work()


def _trial(works: Mapping[str, Any], modes: Any, *, needed: Any, **options: Any) -> Any:
    assert set(needed) <= set(works)
    return {mode: {name: Times(us=2.0, host_us=1.0) for name in works} for mode in modes}, {"peer/lost": "why"}


def _made(job: Job) -> list[Row]:
    found = list(job.run())
    assert [row.mode for row in found] == ["graph", "eager"]
    assert all(row.missing == {"peer/lost": "why"} for row in found)
    assert (found[0].host_us, set(found[1].host_us)) == ({}, set(found[1].us))
    return found


def _tp(way: collectives.Way) -> Iterator[Row]:
    for case in (cases.Case(name="x M=8", op=op, m=8, n=4, k=4) for op in ("all_gather_matmul", "matmul_reduce_scatter")):
        for dtype in tp.SITES:
            given = argparse.Namespace(**{**vars(GIVEN), "dtype": dtype})
            found = _made(Job(name="", run=partial(tp.measured, case, [way], given)))
            assert ("quantised/auto" in found[0].us) == (dtype != "bfloat16" and case.op == "all_gather_matmul")
            yield from found


def _all_reduce(way: collectives.Way) -> Iterator[Row]:
    for job in all_reduce.jobs([(4, 4, 2)], ("one_shot", "auto"), [way], GIVEN):
        yield from _made(job)


def _all_to_all(way: collectives.Way) -> Iterator[Row]:
    for op in all_to_all.SPECS:
        for job in all_to_all.jobs(op, [all_to_all.Case(m=8, k=4, n=4)], ("shard_p2p", "auto"), [way], GIVEN):
            yield from _made(job)


def _ulysses(way: collectives.Way) -> Iterator[Row]:
    for op in ulysses.SPECS:
        for job in ulysses.jobs(op, ("shard_p2p", "auto"), GIVEN)[:1]:
            yield from _made(job)


def _embedding(way: collectives.Way) -> Iterator[Row]:
    case = embedding.Case(tables=2, dim=4, pooling=2, batch=4, rows=8)
    for job in embedding.jobs([case], ("direct_store:1", "auto"), GIVEN):
        yield from _made(job)


@pytest.mark.parametrize("made", [_tp, _all_reduce, _all_to_all, _ulysses, _embedding])
def test_operators(world: collectives.Way, made: Callable[[collectives.Way], Iterator[Row]], monkeypatch: Any) -> None:
    """A row has the halves, what a user has without weft, and what a user gets."""
    small = {op: (ulysses.Case(tokens=4, width=4, features=4),) for op in ulysses.SPECS}
    monkeypatch.setattr(ulysses, "CASES", small)
    found = list(made(world))
    assert found
    for row in found:
        assert rows.gain(row) == 1.0
        assert rows.ideal(row) == 2.0
        assert rows.best(row, "weft/") is not None
        assert row.chosen == "shard_p2p"
        assert rows.of_text(rows.text_of(row)) == row


def test_nodes(world: collectives.Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "MATMULS", dict.fromkeys(nodes.MATMULS, ((8, 4, 4),)))
    monkeypatch.setattr(nodes, "LOOKUPS", (embedding.Case(tables=2, dim=4, pooling=2, batch=4, rows=8),))
    given = argparse.Namespace(**{**vars(GIVEN), "specs": "node_slices:1"})
    found = [row for job in nodes.jobs(given) for row in _made(job)]
    assert {row.op for row in found} == {*nodes.MATMULS, "embedding_bag_all_to_all"}
    assert all(rows.alternative(row)[0] == "sequential/default" and rows.ideal(row) == 2.0 for row in found)
    assert found[0].extra == {"nodes": (1,)}


@pytest.mark.parametrize("op", collective.OPS)
def test_collectives(world: collectives.Way, op: str) -> None:
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
def test_the_planners(world: collectives.Way, problem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_points_of_residency(world: collectives.Way) -> None:
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
def test_pairs(world: collectives.Way, op: str) -> None:
    """GEMMs and a collective, by the names of rows; each way's result is compared with the sequential one's."""
    pair = concurrent.Pair(concurrent.Case(count=2, m=4, k=8, n=4, nbytes=64, op=op))
    works = pair.works(["sequential", "vendor", "vendor+priority"])
    assert set(works) == {
        *("computation/cublas", "communication/default", "weft/auto"),
        *("sequential/default", "peer/two_streams", "weft/vendor+priority"),
    }
    pair._fresh("sequential")
    expected = pair.out.clone()
    pair._compare("vendor", expected)
    with pytest.raises(measure.WrongResult, match="vendor"):
        pair._compare("vendor", expected + 1)


def test_pairs_of_conccl() -> None:
    """30 of three collectives, from bound by communication to bound by computation; and three pairs in every collective."""
    assert (len({str(case) for case in concurrent.conccl()}), len({str(case) for case in concurrent.cases()})) == (30, 12)


def test_matmuls_of_a_layer(world: collectives.Way, monkeypatch: pytest.MonkeyPatch) -> None:
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
